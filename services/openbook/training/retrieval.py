"""Where a run's passages come from: the index tier, a snapshot in memory, BM25, the question itself, or nowhere."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from openbook.config import IndexClientSettings
from openbook.core.space import Space
from openbook.core.topk import canonical_scores, score_error_bound, top_k
from openbook.core.types import NO_HIT, Float32, Int64, Passage
from openbook.corpus.questions import Question
from openbook.errors import DeadlineExceeded, Overloaded, ShardUnavailable, SnapshotMismatch
from openbook.training.data import Example, Search

T = TypeVar("T")

EMPTY = Passage(NO_HIT, "", "", "")


@dataclass(frozen=True, slots=True)
class Found:
    """The k passages of n questions, best first. An empty slot has id NO_HIT, score -inf and a passage without text."""

    ids: Int64  # (n, k)
    scores: Float32  # (n, k)
    passages: list[list[Passage]]
    vectors: Float32 | None = None  # (n, k, d), those stored: what gradients of the query go through; 0 in empty slots


class PassageFinder(Protocol):
    """Finds passages. Threads may take turns, but not at once."""

    @property
    def identity(self) -> Mapping[str, str]:
        """What a run that goes on must find again: the snapshot, the space of its vectors."""
        ...

    def find(self, examples: Sequence[Example], queries: Float32 | None, k: int) -> Found:
        """k passages for each example, whose (n, d) queries are None unless the retriever is dense.

        Raises:
            ShardUnavailable, Overloaded: shards are gone or busy, and were for longer than a step may wait.
            SnapshotMismatch: another snapshot was published since the run began.
        """
        ...

    def close(self) -> None:
        """Let go of connections."""
        ...


class Given:
    """Each question's own passage."""

    identity: Mapping[str, str] = {}

    def find(self, examples: Sequence[Example], queries: Float32 | None, k: int) -> Found:
        """Bare."""
        questions = [example.question for example in examples]
        return _one_each([Passage(0, question.id, question.title, question.context) for question in questions])

    def close(self) -> None:
        """Nothing to close."""


class Nothing:
    """No retrieval: the generator reads the question alone."""

    identity: Mapping[str, str] = {}

    def find(self, examples: Sequence[Example], queries: Float32 | None, k: int) -> Found:
        """Bare."""
        return _one_each([EMPTY] * len(examples))

    def close(self) -> None:
        """Nothing to close."""


def _one_each(passages: Sequence[Passage]) -> Found:
    n = len(passages)
    return Found(np.zeros((n, 1), np.int64), np.zeros((n, 1), np.float32), [[passage] for passage in passages])


def texts_by(find: Callable[[Sequence[Example]], Found]) -> Search:
    """What `read_examples` looks for the answers of regular expressions in."""

    def search(questions: Sequence[str]) -> list[list[str]]:
        found = find([Example(text, "", Question("", text)) for text in questions])
        return [[passage.text for passage in passages] for passages in found.passages]

    return search


REGEX_PASSAGES = 100
"""That a regular expression's answer is looked for in. The paper took 1,000."""


class SnapshotTexts:
    """All passages of a snapshot by id; an empty one where there was no hit."""

    def __init__(self, folder: Path) -> None:
        from openbook.index.disk.passages import SnapshotPassages

        self._passages = SnapshotPassages(folder)
        self.snapshot = self._passages.snapshot

    def __getitem__(self, id: int) -> Passage:
        return EMPTY if id == NO_HIT else self._passages[id]

    def __len__(self) -> int:
        return len(self._passages)


class MemoryIndex:
    """A snapshot's vectors in memory, searched exactly: the same ids and score bits as a Flat index tier, without it.

    For a machine with an accelerator and torch alone.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._texts = SnapshotTexts(folder)
        self._vectors = self._texts.snapshot.vectors()  # (n_passages, d)
        self._on_device = torch.from_numpy(self._vectors).to(device)
        manifest = self._texts.snapshot.manifest
        self._max_norm = manifest.max_norm
        self.identity = {"snapshot": manifest.snapshot_id, "space": manifest.encoder_fingerprint}

    def find(self, examples: Sequence[Example], queries: Float32 | None, k: int) -> Found:
        """Bare."""
        assert queries is not None
        best = [self._best(*each, k) for each in zip(queries, self._candidates(queries, k), strict=True)]
        ids, scores = (np.concatenate(parts) for parts in zip(*best, strict=True))
        vectors = np.where((ids != NO_HIT)[..., None], self._vectors[ids.clip(0)], np.float32(0))
        return Found(ids, scores, [[self._texts[i] for i in row] for row in ids.tolist()], vectors)

    def close(self) -> None:
        """Nothing to close."""

    def _candidates(self, queries: Float32, k: int) -> list[Int64]:
        """For each query the ids among which its best k are, ties and rounding considered."""
        approximate = torch.from_numpy(queries).to(self._on_device.device) @ self._on_device.T  # (n, n_passages)
        kth = approximate.topk(min(k, approximate.shape[1]), -1).values[:, -1]
        norms = np.linalg.norm(queries.astype(np.float64), axis=1).tolist()
        errors = [score_error_bound(queries.shape[1], norm, self._max_norm) for norm in norms]
        # Whatever scores less than the k-th by more than both of them, and this limit, may err.
        limits = (kth.double() - 3 * torch.tensor(errors, device=kth.device)).float()
        return [(row >= limit).nonzero()[:, 0].cpu().numpy() for row, limit in zip(approximate, limits, strict=True)]

    def _best(self, query: Float32, candidates: Int64, k: int) -> tuple[Int64, Float32]:
        """(1, k) ids and canonical scores."""
        return top_k(candidates[None], canonical_scores(query, self._vectors[candidates])[None], k)


class LiveIndex:
    """The index tier. A step waits for shards that are gone or busy, and fails rather than train on some passages."""

    def __init__(self, settings: IndexClientSettings, retry_s: float, queries: Space) -> None:
        from openbook.index.client.opening import open_index

        self._retry_s = retry_s
        self._turn, self._closed = threading.Lock(), threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="index client", daemon=True)
        self._thread.start()
        try:
            self._index = self._retried(lambda: open_index(settings, queries))
        except BaseException:
            self._stop()
            raise
        self.identity = {"snapshot": self._index.snapshot_id, "space": self._index.encoder_fingerprint}

    def find(self, examples: Sequence[Example], queries: Float32 | None, k: int) -> Found:
        """Bare."""
        assert queries is not None
        with self._turn:
            if self._closed.is_set():
                raise ShardUnavailable("the index tier is not asked any more")
            return self._retried(lambda: self._find(queries, k))

    def close(self) -> None:
        """Let go of connections. A thread that waits for shards does not any longer."""
        self._closed.set()
        with self._turn:
            try:
                asyncio.run_coroutine_threadsafe(self._index.close(), self._loop).result()
            finally:
                self._stop()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _find(self, queries: Float32, k: int) -> Found:
        from openbook.core.context import Context
        from openbook.core.deadline import Deadline
        from openbook.core.types import RetrievalSettings

        context = Context(Deadline.after(STEP_TIMEOUT_S))
        n_rows = self._index.max_rows
        parts = [queries[start : start + n_rows] for start in range(0, len(queries), n_rows)]
        hits = [await self._index.search(part, RetrievalSettings(k=k), context) for part in parts]
        begun = self.identity["snapshot"]
        if others := {each.snapshot_id for each in hits} - {begun}:
            raise SnapshotMismatch(f"the run began with snapshot {begun}, the index tier now serves {others.pop()}")
        all_ids, scores = np.concatenate([each.ids for each in hits]), np.concatenate([each.scores for each in hits])
        real = all_ids != NO_HIT
        ids, where = np.unique(all_ids[real], return_inverse=True)
        found, stored = await self._index.fetch_with_vectors(ids.tolist(), begun, context)
        passages = dict(zip(ids.tolist(), found, strict=True))
        vectors = np.zeros((*all_ids.shape, queries.shape[1]), np.float32)
        vectors[real] = stored[where]
        return Found(all_ids, scores, [[passages.get(i, EMPTY) for i in row] for row in all_ids.tolist()], vectors)

    def _retried(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential
        from tenacity.nap import sleep_using_event
        from tenacity.stop import stop_when_event_set

        attempts = Retrying(
            retry=retry_if_exception_type((ShardUnavailable, DeadlineExceeded, Overloaded)),
            stop=stop_after_delay(self._retry_s) | stop_when_event_set(self._closed),
            wait=wait_random_exponential(0.1, 5),
            sleep=sleep_using_event(self._closed),
            reraise=True,
        )
        return attempts(lambda: asyncio.run_coroutine_threadsafe(call(), self._loop).result())


STEP_TIMEOUT_S = 30.0
"""One search with its fetches."""
