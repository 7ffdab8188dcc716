"""Fakes that work, for the tests of those who build on openbook: small, exact, without models, servers or clocks."""

import hashlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from openbook.core.confidence import UNFITTED
from openbook.core.context import Context
from openbook.core.deadline import Check, go_on
from openbook.core.marginal import label_log_marginal, log_prior
from openbook.core.origin import Located, is_lasting_id, position_of
from openbook.core.topk import canonical_scores, check_coverage, check_questions, check_search, top_k
from openbook.core.types import (
    Candidates,
    Classification,
    Coverage,
    Float32,
    Float64,
    Generation,
    GenerationSettings,
    Hits,
    Int64,
    Passage,
    RetrievalSettings,
    Retrieved,
    Token,
)
from openbook.errors import ShardUnavailable, SnapshotMismatch, UnknownPassage

if TYPE_CHECKING:
    from openbook.index.server.server import IndexServer


class ManualClock:
    """A clock whose hands the test turns."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class HashEncoder:
    """A bag of words in which every word has its own random direction: texts that share words are near each other."""

    def __init__(self, dimension: int = 64) -> None:
        self.dimension = dimension
        self.fingerprint = self.space = f"hash-{dimension}"

    async def encode(self, questions: Sequence[str], context: Context) -> Float32:
        context.deadline.check("encode")
        return self.encode_questions(questions)

    async def encode_own(self, passages: Sequence[Passage], context: Context) -> Float32:
        context.deadline.check("encode")
        return self.encode_passages(passages)

    def padded_length(self, question: str) -> int:
        """No question is padded, none too long."""
        return 0

    def encode_questions(self, questions: Sequence[str], check: Check = go_on) -> Float32:
        """(n, d) unit vectors."""
        check()
        rows = [self._embed(question) for question in questions]
        return np.stack(rows) if rows else np.empty((0, self.dimension), np.float32)

    def encode_passages(self, passages: Sequence[Passage]) -> Float32:
        """(n, d) unit vectors of title and text."""
        return self.encode_questions([f"{passage.title} {passage.text}" for passage in passages])

    def _embed(self, text: str) -> Float32:
        total = np.zeros(self.dimension)
        for word in "".join(c if c.isalnum() else " " for c in text.lower()).split():
            seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little")
            total += np.random.default_rng(seed).standard_normal(self.dimension)
        length = float(np.linalg.norm(total))
        unit: Float32 = (total / length if length else total).astype(np.float32)
        return unit


class EchoGenerator:
    """Answers with the best passage's text, certain of it, every passage as useful as the retriever thought."""

    fingerprint = generates_by = "echo"
    calibration = UNFITTED

    def place(
        self, settings: GenerationSettings, n_passages: int, context: Context, is_stream: bool = False
    ) -> AbstractContextManager[Self]:
        """None: it has no queue."""
        return nullcontext(self)

    async def generate(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> Generation:
        context.deadline.check("generate")
        if settings.labels:
            return self._choose(retrieved, settings)
        text = retrieved.passages[0].text.split()
        words = text[: settings.max_new_tokens]
        prior = log_prior(retrieved.scores)
        generation = Generation(
            " ".join(words),
            tuple(range(len(words))),
            0.0,
            prior,
            prior,
            word_tokens(words, prior, log_likelihood=0.0),
            cut=len(words) < len(text),
        )
        return replace(generation, others=(generation,) * (settings.n_answers - 1))

    async def stream(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> AsyncIterator[Token | Generation]:
        generation = await self.generate(question, retrieved, settings, context)
        if settings.one_by_one:
            for token in generation.tokens:
                yield replace(token, start=None, end=None)
        yield generation

    def _choose(self, retrieved: Retrieved, settings: GenerationSettings) -> Generation:
        """Every passage believes in the labels that stand in it twice as much as in the others."""
        prior = log_prior(retrieved.scores)
        belief = np.array([[1.0 + (label in p.text) for label in settings.labels] for p in retrieved.passages])
        log_p = np.log(belief / belief.sum(1, keepdims=True))  # (k, c)
        log_likelihood = label_log_marginal(prior[None], log_p[None])[0]
        posterior = prior + log_p.T - log_likelihood[:, None]
        found = Classification(settings.labels, log_likelihood, log_likelihood, prior, posterior)
        best = int(log_likelihood.argmax())
        tokens = word_tokens([found.label], posterior[best], float(log_likelihood[best]))
        return Generation(found.label, (best,), log_likelihood[best], prior, posterior[best], tokens, found)


def word_tokens(words: Sequence[str], log_posterior: Float64, log_likelihood: float) -> tuple[Token, ...]:
    """Every word as a token of the text that they are together."""
    tokens, end = [], 0
    for i, word in enumerate(words):
        start, end = end + (i > 0), end + (i > 0) + len(word)
        text = f" {word}" if i else word
        tokens.append(Token(text, log_likelihood, tuple(log_posterior.tolist()), start, end))
    return tuple(tokens)


class ExactIndex:
    """The index tier's exact twin: every score, then a sort. What the real one answers differs from it in no bit.

    Holds passages with ids 0..N-1 and their (N, d) float32 vectors, as if in shards, any of which can go missing.
    """

    def __init__(
        self, passages: Sequence[Passage], vectors: Float32, snapshot_id: str = "exact", n_shards: int = 1
    ) -> None:
        assert [passage.id for passage in passages] == list(range(len(vectors)))
        self._passages = passages
        self._vectors = vectors
        self.snapshot_id = snapshot_id
        self.n_passages, self.dimension = vectors.shape
        self.missing_shards: set[int] = set()
        self._shards = (np.arange(self.n_passages) * n_shards + n_shards - 1) // self.n_passages  # of each passage

    async def search(self, queries: Float32, settings: RetrievalSettings, context: Context) -> Hits:
        context.deadline.check("search")
        queries = check_search(queries, settings.k, self.dimension, max_k=1000, max_rows=1024)
        searched, coverage = self._searched(settings)
        scores = np.stack([canonical_scores(query, self._vectors[searched]) for query in queries])
        return Hits(*top_k(np.tile(searched, (len(queries), 1)), scores, settings.k), self.snapshot_id, coverage)

    async def candidates(
        self, questions: Sequence[str], queries: Float32 | None, settings: RetrievalSettings, context: Context
    ) -> Candidates:
        """All passages that can be searched, and their scores by bm25s itself: who ranks them sees the best."""
        import bm25s

        context.deadline.check("candidates")
        check_questions(questions, settings.k, max_k=1000, max_rows=1024)
        searched, coverage = self._searched(settings)
        texts = [f"{passage.title}. {passage.text}" for passage in self._passages]
        passages = bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)
        index = bm25s.BM25()
        index.index(passages, show_progress=False)
        asked = bm25s.tokenize(list(questions), stopwords="en", return_ids=False, show_progress=False)
        bm25 = np.stack([index.get_scores_from_ids(index.get_tokens_ids(words)) for words in asked])[:, searched]
        dense = np.zeros_like(bm25)
        if queries is not None:
            queries = check_search(queries, settings.k, self.dimension, max_k=1000, max_rows=1024)
            dense = np.stack([canonical_scores(query, self._vectors[searched]) for query in queries])
        return Candidates(np.tile(searched, (len(questions), 1)), dense, bm25, self.snapshot_id, coverage)

    def _searched(self, settings: RetrievalSettings) -> tuple[Int64, Coverage]:
        searched = np.flatnonzero(~np.isin(self._shards, list(self.missing_shards)))
        coverage = Coverage(len(searched), self.n_passages, tuple(sorted(self.missing_shards)))
        check_coverage(coverage, settings.min_coverage)
        return searched, coverage

    async def fetch(self, ids: Sequence[int], snapshot_id: str, context: Context) -> list[Passage]:
        context.deadline.check("fetch")
        if snapshot_id != self.snapshot_id:
            raise SnapshotMismatch(f"the index holds snapshot {self.snapshot_id}, asked for {snapshot_id}")
        for passage_id in ids:
            if not 0 <= passage_id < self.n_passages:
                raise UnknownPassage(f"passage id must be 0..{self.n_passages - 1}, got {passage_id}")
            if self._shards[passage_id] in self.missing_shards:
                raise ShardUnavailable(f"shard {self._shards[passage_id]} does not answer")
        return [self._passages[passage_id] for passage_id in ids]

    async def fetch_with_vectors(
        self, ids: Sequence[int], snapshot_id: str, context: Context
    ) -> tuple[list[Passage], Float32]:
        return await self.fetch(ids, snapshot_id, context), self._vectors[list(ids)]

    async def locate(self, passage_id: str, snapshot_id: str, context: Context) -> Located:
        context.deadline.check("locate")
        if snapshot_id not in ("", self.snapshot_id):
            raise SnapshotMismatch(f"the index holds snapshot {self.snapshot_id}, asked for {snapshot_id}")
        if not is_lasting_id(passage_id):
            return Located(position_of(passage_id), self.snapshot_id, self.n_passages)
        for passage in self._passages:
            if passage.lasting_id == passage_id and self._shards[passage.id] not in self.missing_shards:
                return Located(passage.id, self.snapshot_id, self.n_passages)
        if self.missing_shards:
            raise ShardUnavailable(f"shard {min(self.missing_shards)} does not answer")
        raise UnknownPassage(f"no passage of snapshot {self.snapshot_id} has the lasting id {passage_id}")


@contextmanager
def served(snapshot: Path, n_replicas: int = 1) -> "Iterator[list[IndexServer]]":
    """All shards of a snapshot behind real servers in this process, on free ports of loopback."""
    from openbook.config import IndexServerSettings
    from openbook.index.disk.snapshot import Snapshot
    from openbook.index.server.server import IndexServer

    with ExitStack() as stack:
        shards = range(len(Snapshot.open(snapshot).manifest.shards))
        settings = [
            IndexServerSettings(snapshot=snapshot, shard=shard, max_streams=8)  # each has a thread of its own
            for shard in shards
            for _ in range(n_replicas)
        ]
        yield [stack.enter_context(IndexServer(each)) for each in settings]
