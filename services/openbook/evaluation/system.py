"""What is asked: a query encoder, the index tier and a generator, all of it from this process."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openbook.config import MAX_WORDS_CHARS, IndexClientSettings, IndexServerSettings
from openbook.core.context import Context
from openbook.core.space import Space
from openbook.core.types import (
    NO_HIT,
    Float32,
    Formulation,
    Generation,
    GenerationSettings,
    Hits,
    Int64,
    Passage,
    RetrievalSettings,
    Retrieved,
    RetrieverKind,
)
from openbook.corpus.questions import Question
from openbook.errors import InvalidRequest, SnapshotMismatch
from openbook.evaluation.settings import EvaluationSettings, SearchSettings
from openbook.index.client.opening import open_index
from openbook.index.client.publish import held_by_one
from openbook.index.client.sharded import ShardedIndex
from openbook.index.disk.snapshot import Snapshot
from openbook.index.server.server import IndexServer
from openbook.models.checkpoint import GeneratorCheckpoint, load_generator
from openbook.models.encoder import TextEncoder
from openbook.models.generator import RagGenerator
from openbook.rag.following import Found, followed
from openbook.rag.retrieving import find, needs_queries, needs_words

PATIENCE_S = 60.0
"""For a server in this process, which shares its cores with the models."""


@dataclass(frozen=True, slots=True)
class Library:
    """The index tier and the encoder of its queries."""

    encoder: TextEncoder
    index: ShardedIndex
    snapshot_id: str  # when the evaluation began
    description: dict[str, Any]

    def check(self, file: str, questions: Sequence[Question], retrieval: RetrievalSettings) -> None:
        """Raises InvalidRequest: a question has more tokens than the encoder can read, or by words more characters than
        an index server does; names file and question.
        """
        for question in questions:
            with _named(file, question):
                if needs_queries(retrieval):
                    self.encoder.padded_length(question.text)
                if needs_words(retrieval) and (n := len(question.text)) > MAX_WORDS_CHARS:
                    raise InvalidRequest(f"question must have at most {MAX_WORDS_CHARS} characters, got {n}")

    async def find(self, questions: Sequence[Question], *searches: RetrievalSettings) -> list[Retrieved]:
        """The best k passages of each, best first: what one search finds, and behind it what the next one finds beyond.

        Raises:
            SnapshotMismatch: another snapshot was published since the evaluation began.
            InvalidRequest: a question is too long, as for `check`.
        """
        texts = [question.text for question in questions]
        is_long = any(map(needs_words, searches)) and sum(map(len, texts)) > MAX_WORDS_CHARS
        if len(texts) > 1 and (is_long or len(texts) > self.index.max_rows):  # for one call
            half = len(texts) // 2
            return [*await self.find(questions[:half], *searches), *await self.find(questions[half:], *searches)]
        needed = any(map(needs_queries, searches))
        queries = await asyncio.to_thread(self.encoder.encode_questions, texts) if needed else None
        hits = [self._of_ours(await find(self.index, texts, queries, each, Context())) for each in searches]
        ids, scores = np.hstack([each.ids for each in hits]), np.hstack([each.scores for each in hits])
        rows = (_first(*row, searches[-1].k) for row in zip(ids, scores, strict=True))
        return await asyncio.gather(*(self._fetch(*row) for row in rows))

    async def look(self, text: str, retrieval: RetrievalSettings) -> Found:
        """The best k passages with their vectors. Raises as `find`."""
        queries = await asyncio.to_thread(self.encoder.encode_questions, [text])
        hits = self._of_ours(await find(self.index, [text], queries, retrieval, Context()))
        ids = hits.ids[0][hits.ids[0] != NO_HIT]
        passages, vectors = await self.index.fetch_with_vectors(ids.tolist(), self.snapshot_id, Context())
        return Found(queries[0], tuple(passages), vectors, self.snapshot_id, hits.coverage)

    def _of_ours(self, hits: Hits) -> Hits:
        if hits.snapshot_id != self.snapshot_id:
            raise SnapshotMismatch(f"evaluated is snapshot {self.snapshot_id}, and now {hits.snapshot_id} is published")
        return hits

    async def _fetch(self, ids: Int64, scores: Float32) -> Retrieved:
        passages = await self.index.fetch(ids.tolist(), self.snapshot_id, Context())
        return Retrieved(tuple(passages), scores, self.snapshot_id)


@dataclass(frozen=True, slots=True)
class System:
    """All that an answer comes from. Without a library every question brings its own passage."""

    settings: EvaluationSettings
    generator: RagGenerator
    reads: GeneratorCheckpoint  # what the generator was made of
    library: Library | None

    @property
    def ranks_alike(self) -> bool:
        """Whether a search begins with what one for fewer passages finds.

        A dense one of an index that is not exact looks the more widely the more it is asked for.
        """
        is_dense = self.settings.retriever is RetrieverKind.DENSE
        return not (self.library and is_dense and self.library.description["factory"] != "Flat")

    @property
    def _searches(self) -> tuple[int, ...]:
        """How many passages each search is for: those that are read are found as for whoever is served."""
        k, n = self.settings.k, max(self.settings.k, self.settings.n_searched)
        return (n,) if self.ranks_alike or k == n else (k, n)

    def describe(self) -> dict[str, Any]:
        """What identifies it, as far as answers depend on it."""
        settings = self.settings
        return {
            "context": settings.context,
            "index": self.library and self.library.description,
            "encoder": self.library and settings.encoder.model,
            "encoder_fingerprint": self.library and self.library.encoder.fingerprint,
            "generator": settings.generator.model,
            "generator_fingerprint": self.generator.fingerprint,
            "dtype": settings.generator.dtype,
            "k": settings.k if self.library else 1,
            "n_searched": settings.n_searched if len(self._searches) == 1 else list(self._searches),
            "retriever": self.library and settings.retriever,
            "bm25_weight": self.library and settings.bm25_weight,
            "decoding": settings.decoding,
            "n_beams": settings.n_beams,
            "max_new_tokens": settings.max_new_tokens,
            "labels": list(settings.labels),
            **({"follow": settings.follow} if settings.follow else {}),
        }

    def check(self, file: str, questions: Sequence[Question]) -> None:
        """Raises InvalidRequest: a question has more tokens than a model can read; names file and question."""
        if self.library and self.settings.context == "retrieved":
            self.library.check(file, questions, self.settings.retrieval(self.settings.k))
        for question in questions:
            with _named(file, question):
                self.reads.contexts(question.text, _own(question).passages)

    async def find(self, questions: Sequence[Question]) -> list[Retrieved]:
        """At least as many passages as are read, best first. Raises as `Library.find`."""
        if self.library and self.settings.context == "retrieved":
            found = await self.library.find(questions, *map(self.settings.retrieval, self._searches))
            # By words, a question may find nothing: it is read alone.
            return [each if each.passages else _own(question) for question, each in zip(questions, found, strict=True)]
        if self.settings.context == "none":
            return [_own(question) for question in questions]
        return [_own(question, question.title, question.context) for question in questions]

    async def answer(
        self, questions: Sequence[Question], found: Sequence[Retrieved], formulation: Formulation
    ) -> list[Generation]:
        """From the first k passages of each, or with `follow` from all that are looked for as the answer grows.

        Raises InvalidRequest as `RagGenerator.generate`.
        """
        k = self.settings.k
        if self.settings.follow:
            return [await self._followed(question, formulation) for question in questions]
        read = [Retrieved(each.passages[:k], each.scores[:k], each.snapshot_id) for each in found]
        # Not on the event loop, which has the connections to the index tier to look after.
        texts, decoded_as = [question.text for question in questions], self.settings.generation(formulation)
        return await asyncio.to_thread(self.generator.generate, texts, read, decoded_as)

    async def _followed(self, question: Question, formulation: Formulation) -> Generation:
        library, retrieval = self.library, RetrievalSettings(k=self.settings.k)
        assert library

        async def generate(read: Retrieved, settings: GenerationSettings) -> Generation:
            return (await asyncio.to_thread(self.generator.generate, [question.text], [read], settings))[0]

        settings = self.settings.generation(formulation)
        return (await followed(question.text, settings, lambda text: library.look(text, retrieval), generate))[1]


@contextmanager
def _named(file: str, question: Question) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(f"{file}, question {question.id}: {error}") from None


def _first(ids: Int64, scores: Float32, k: int) -> tuple[Int64, Float32]:
    """The first k of one question, each once, and no empty slot."""
    real = np.flatnonzero(ids != NO_HIT)
    _, seen_at = np.unique(ids[real], return_index=True)
    first = real[np.sort(seen_at)][:k]
    return ids[first], scores[first]


def _own(question: Question, title: str = "", text: str = "") -> Retrieved:
    """A passage of no snapshot, in place of what is found."""
    return Retrieved((Passage(0, question.id, title, text),), np.zeros(1, np.float32), "")


@asynccontextmanager
async def opened(settings: EvaluationSettings) -> AsyncIterator[System]:
    """The system that the settings name, for the running event loop.

    Raises:
        InvalidModel: a model cannot be loaded.
        InvalidSnapshot: the folder is no snapshot, or its files were altered.
        ShardUnavailable: the index tier cannot be reached.
        SnapshotMismatch: the index was not built for this encoder, or no server holds its snapshot any more.
    """
    reads = load_generator(settings.generator.model)
    generator = RagGenerator(reads, settings.generator)
    if settings.context != "retrieved":
        yield System(settings, generator, reads, None)
        return
    async with opened_library(settings) as library:
        yield System(settings, generator, reads, library)


@asynccontextmanager
async def opened_library(settings: SearchSettings) -> AsyncIterator[Library]:
    """What is searched, for the running event loop. Raises as `opened`."""
    encoder = TextEncoder.load(settings.encoder)
    with _servers(settings) as client_settings:
        queries = Space(f"query encoder {settings.encoder.model!r}", encoder.space, encoder.dimension)
        index = await open_index(client_settings, queries)
        try:
            yield Library(encoder, index, index.snapshot_id, await _describe(index, client_settings))
        finally:
            await index.close()


async def _describe(index: ShardedIndex, settings: IndexClientSettings) -> dict[str, Any]:
    """What is written beside every exact match: one index finds what another one misses."""
    held = await held_by_one(settings, index.snapshot_id)
    recall = {str(k): share for k, share in sorted(held.recall.items())} or None
    return {
        "snapshot_id": index.snapshot_id,
        "n_passages": index.n_passages,
        "factory": held.factory,
        "recall": recall,
    }


@contextmanager
def _servers(settings: SearchSettings) -> Iterator[IndexClientSettings]:
    """Those that run, or one in this process for each shard of the snapshot."""
    if settings.snapshot is None:
        yield settings.index
        return
    with ExitStack() as stack:
        addresses = [stack.enter_context(server).address for server in _of_all_shards(settings.snapshot)]
        yield IndexClientSettings(addresses=tuple(addresses), timeout_s=PATIENCE_S)


def _of_all_shards(snapshot: Path) -> Iterator[IndexServer]:
    for shard in range(len(Snapshot.open(snapshot).manifest.shards)):
        yield IndexServer(IndexServerSettings(snapshot=snapshot, shard=shard))
