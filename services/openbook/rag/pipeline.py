"""The journey of one question, steps 2 to 12 (ARCHITECTURE.md): cached or fresh query, top k, passages, answer."""

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from openbook.config import AnswerDefaults
from openbook.core.context import Context
from openbook.core.deadline import Clock
from openbook.core.marginal import log_prior
from openbook.core.types import (
    NO_HIT,
    Classification,
    Coverage,
    Decoding,
    Float32,
    Float64,
    Formulation,
    Generation,
    GenerationSettings,
    Hits,
    Passage,
    RetrievalSettings,
    Retrieved,
    Token,
)
from openbook.errors import InvalidRequest, ShardUnavailable
from openbook.rag.cached import Generations, Queries
from openbook.rag.ports import AnswerCache, EmbeddingCache, Encoder, Generator, PassageStore, Retriever
from openbook.rag.stopwatch import Stopwatch


@dataclass(frozen=True, slots=True)
class Evidence:
    """A passage shown with what it contributed."""

    passage: Passage
    score: float
    log_prior: float
    log_posterior: float


@dataclass(frozen=True, slots=True)
class Retrieval:
    """What was found for a question. The posterior equals the prior: nothing was generated yet."""

    evidence: tuple[Evidence, ...]  # by score, highest first
    snapshot_id: str
    encoder_fingerprint: str
    complete: bool
    coverage: Coverage
    cached: bool
    request_id: str
    timings: dict[str, float]  # seconds by stage


@dataclass(frozen=True, slots=True)
class Label:
    """One of the labels that an answer was chosen from."""

    text: str
    log_likelihood: float  # log p(label|x) among all answers there are
    log_probability: float  # among the labels


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, what it rests on, and what made it."""

    text: str
    log_likelihood: float  # log p(y|x)
    evidence: tuple[Evidence, ...]
    formulation: Formulation
    decoding: Decoding
    snapshot_id: str
    encoder_fingerprint: str
    generator_fingerprint: str
    complete: bool
    coverage: Coverage
    cached: bool
    request_id: str
    timings: dict[str, float]
    labels: tuple[Label, ...] = ()  # in the order of the request


class Pipeline:
    """Plugs an encoder, an index tier and a generator together. One instance serves any number of questions at once."""

    def __init__(
        self,
        encoder: Encoder,
        retriever: Retriever,
        passages: PassageStore,
        generator: Generator,
        cache: EmbeddingCache,
        limits: AnswerDefaults,
        clock: Clock = time.monotonic,
        answers: AnswerCache | None = None,
    ) -> None:
        self._encoder = encoder
        self._retriever = retriever
        self._passages = passages
        self._generator = generator
        self._limits = limits
        self._clock = clock
        self._queries = Queries(encoder, cache, clock)
        self._generations = Generations(generator, answers)

    async def answer(
        self, question: str, retrieval: RetrievalSettings, generation: GenerationSettings, context: Context
    ) -> Answer:
        """The best answer, with its evidence.

        Raises:
            InvalidRequest: the question is empty, too long or no text, k is out of its range, the answer would take too
                much work, or the index knows no such search parameter.
            ShardUnavailable, SnapshotMismatch, Overloaded, DeadlineExceeded: as the ports say.
        """
        self.work(retrieval, generation)
        watch = Stopwatch(self._clock)
        question, retrieved, cached = await self._find(question, retrieval, context, watch)
        with watch.stage("generate", context) as inner:
            generated = await self._generations.find(question, retrieved, generation, inner)
        return self._to_answer(generated, retrieved, generation, cached, context, watch)

    async def stream(
        self, question: str, retrieval: RetrievalSettings, generation: GenerationSettings, context: Context
    ) -> AsyncIterator[Retrieval | Token | Answer]:
        """What was retrieved, then tokens as they are decided, last the answer. Raises as `answer`."""
        self.work(retrieval, generation)
        watch = Stopwatch(self._clock)
        question, retrieved, cached = await self._find(question, retrieval, context, watch)
        yield self._to_retrieval(retrieved, cached, context, watch)
        with watch.stage("generate", context) as inner:
            items = self._generator.stream(question, retrieved, generation, inner)
            async with aclosing(items):  # type: ignore[type-var]  # an async generator; closing it stops the work
                async for item in items:
                    if isinstance(item, Token):
                        yield item
                    else:
                        generated = item
        yield self._to_answer(generated, retrieved, generation, cached, context, watch)

    async def retrieve(self, question: str, retrieval: RetrievalSettings, context: Context) -> Retrieval:
        """The passages and their prior alone. Raises as `answer`."""
        self.work(retrieval)
        watch = Stopwatch(self._clock)
        _, retrieved, cached = await self._find(question, retrieval, context, watch)
        return self._to_retrieval(retrieved, cached, context, watch)

    def work(self, retrieval: RetrievalSettings, generation: GenerationSettings | None = None) -> int:
        """`GenerationSettings.work` of an answer, 0 without one. Raises InvalidRequest beyond max_k or max_work."""
        if not 1 <= retrieval.k <= self._limits.max_k:
            raise InvalidRequest(f"k must be 1..{self._limits.max_k}, got {retrieval.k}")
        return generation.work(retrieval.k, self._limits.max_work) if generation else 0

    async def aclose(self) -> None:
        """Wait for what is still on its way into the caches."""
        await self._queries.aclose()
        await self._generations.aclose()

    async def _find(
        self, question: str, settings: RetrievalSettings, context: Context, watch: Stopwatch
    ) -> tuple[str, Retrieved, bool]:
        question = check_question(question, self._limits.max_question_chars)
        query, cached = await self._query(question, context, watch)
        retrieved = await self._retrieve(query, settings, context, watch)
        return question, retrieved, cached

    async def _retrieve(
        self, query: Float32, settings: RetrievalSettings, context: Context, watch: Stopwatch
    ) -> Retrieved:
        hits = await self._search(query, settings, context, watch)
        try:
            return await self._fetch(hits, context, watch)
        except ShardUnavailable:
            if settings.min_coverage == 1.0:
                raise
            # A shard that took part in the search is gone by now: do without it.
            return await self._fetch(await self._search(query, settings, context, watch), context, watch)

    async def _search(self, query: Float32, settings: RetrievalSettings, context: Context, watch: Stopwatch) -> Hits:
        with watch.stage("search", context, k=settings.k) as inner:
            return await self._retriever.search(query[None, :], settings, inner)

    async def _fetch(self, hits: Hits, context: Context, watch: Stopwatch) -> Retrieved:
        found = hits.ids[0] != NO_HIT
        with watch.stage("fetch", context, snapshot=hits.snapshot_id) as inner:
            passages = await self._passages.fetch(hits.ids[0][found].tolist(), hits.snapshot_id, inner)
        return Retrieved(tuple(passages), hits.scores[0][found], hits.snapshot_id, hits.coverage)

    async def _query(self, question: str, context: Context, watch: Stopwatch) -> tuple[Float32, bool]:
        query = await self._queries.find(question, context)
        watch.stages.update(query.stages)
        return query.embedding, query.cached

    def _to_retrieval(self, retrieved: Retrieved, cached: bool, context: Context, watch: Stopwatch) -> Retrieval:
        prior = log_prior(retrieved.scores)
        return Retrieval(
            evidence=_evidence(retrieved, prior, prior),
            snapshot_id=retrieved.snapshot_id,
            encoder_fingerprint=self._encoder.fingerprint,
            complete=retrieved.complete,
            coverage=retrieved.coverage,
            cached=cached,
            request_id=context.request_id,
            timings=watch.read(),
        )

    def _to_answer(
        self,
        generation: Generation,
        retrieved: Retrieved,
        settings: GenerationSettings,
        cached: bool,
        context: Context,
        watch: Stopwatch,
    ) -> Answer:
        return Answer(
            text=generation.text,
            log_likelihood=generation.log_likelihood,
            evidence=_evidence(retrieved, generation.log_prior, generation.log_posterior),
            formulation=settings.formulation,
            decoding=settings.decoding,
            snapshot_id=retrieved.snapshot_id,
            encoder_fingerprint=self._encoder.fingerprint,
            generator_fingerprint=self._generator.fingerprint,
            complete=retrieved.complete,
            coverage=retrieved.coverage,
            cached=cached,
            request_id=context.request_id,
            timings=watch.read(),
            labels=_labels(generation.classification) if generation.classification else (),
        )


def check_question(question: str, max_chars: int) -> str:
    """The question without surrounding white space.

    Raises:
        InvalidRequest: it is empty, longer than `max_chars` or not encodable as UTF-8.
    """
    question = question.strip()
    if not question:
        raise InvalidRequest(f"question must have 1..{max_chars} characters, got none")
    if len(question) > max_chars:
        raise InvalidRequest(f"question must have 1..{max_chars} characters, got {len(question)}")
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"question must be UTF-8 text, got {error.object[error.start]!a} at {error.start}"
        ) from None
    return question


def _labels(found: Classification) -> tuple[Label, ...]:
    rows = zip(found.labels, found.log_likelihood.tolist(), found.log_probability.tolist(), strict=True)
    return tuple(Label(*row) for row in rows)


def _evidence(retrieved: Retrieved, prior: Float64, posterior: Float64) -> tuple[Evidence, ...]:
    rows = zip(retrieved.passages, *(np.asarray(a).tolist() for a in (retrieved.scores, prior, posterior)), strict=True)
    return tuple(Evidence(*row) for row in rows)
