"""The journey of one question, steps 2 to 12 (ARCHITECTURE.md): cached or fresh query, top k, passages, answer."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import numpy as np

from openbook.config import AnswerDefaults
from openbook.core.confidence import confidence
from openbook.core.context import Context
from openbook.core.deadline import Clock
from openbook.core.marginal import log_prior
from openbook.core.topk import canonical_scores
from openbook.core.types import (
    NO_HIT,
    Float32,
    Generation,
    GenerationSettings,
    Hits,
    OwnPassage,
    ReplySettings,
    RetrievalSettings,
    Retrieved,
    Token,
)
from openbook.errors import InvalidRequest, ShardUnavailable
from openbook.rag.answer import Answer, Excerpt, Retrieval, alternative, evidence_of, labels_of
from openbook.rag.cached import Generations, Queries
from openbook.rag.excerpt import excerpt
from openbook.rag.own import as_passage, check_retriever, check_text, joined
from openbook.rag.ports import AnswerCache, EmbeddingCache, Encoder, Generator, PassageStore, Retriever
from openbook.rag.retrieving import find, needs_queries
from openbook.rag.stopwatch import Stopwatch

BARE = ReplySettings()
NOTHING = Retrieved((), np.empty(0, np.float32), snapshot_id="")
"""Of a question whose passages are all the caller's own."""


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
        self,
        question: str,
        retrieval: RetrievalSettings,
        generation: GenerationSettings,
        context: Context,
        reply: ReplySettings = BARE,
        own: Sequence[OwnPassage] = (),
    ) -> Answer:
        """The best answer, with its evidence: the k passages that are found, and the caller's own.

        Raises:
            InvalidRequest: the question or a passage is empty, too long or no text, k is out of its range, the answer
                would take too much work or has no confidence to be held back by, the index knows no such search
                parameter, or no encoder is there for passages.
            ShardUnavailable, SnapshotMismatch, Overloaded, DeadlineExceeded: as the ports say.
        """
        self.work(retrieval, generation, len(own))
        self._check_reply(reply, generation)
        watch = Stopwatch(self._clock)
        question, retrieved, cached = await self._find(question, retrieval, own, context, watch)
        with watch.stage("generate", context) as inner:
            generated = await self._generations.find(question, retrieved, generation, inner)
        return self._to_answer(generated, retrieved, generation, reply, cached, context, watch)

    async def stream(
        self,
        question: str,
        retrieval: RetrievalSettings,
        generation: GenerationSettings,
        context: Context,
        reply: ReplySettings = BARE,
        own: Sequence[OwnPassage] = (),
    ) -> AsyncIterator[Retrieval | Token | Answer]:
        """What was retrieved, then the answer's tokens, last the answer. Raises as `answer`.

        Tokens come as they are decided where they are decided one by one, otherwise when the answer stands; none of an
        answer that is to be held back if it is not probable enough, which its end alone can tell.
        """
        self.work(retrieval, generation, len(own))
        self._check_reply(reply, generation)
        watch = Stopwatch(self._clock)
        question, retrieved, cached = await self._find(question, retrieval, own, context, watch)
        yield self._to_retrieval(retrieved, cached, context, watch)
        n_told = 0
        with watch.stage("generate", context) as inner:
            items = self._generator.stream(question, retrieved, generation, inner)
            async with aclosing(items):  # type: ignore[type-var]  # an async generator; closing it stops the work
                async for item in items:
                    if not isinstance(item, Token):
                        generated = item
                    elif not reply.may_hold_back:
                        n_told += 1
                        yield item
        answer = self._to_answer(generated, retrieved, generation, reply, cached, context, watch)
        if not (n_told or answer.abstained):
            for token in generated.tokens:
                yield token
        yield answer

    async def retrieve(
        self, question: str, retrieval: RetrievalSettings, context: Context, own: Sequence[OwnPassage] = ()
    ) -> Retrieval:
        """The passages and their prior alone. Raises as `answer`."""
        self.work(retrieval, n_own=len(own))
        watch = Stopwatch(self._clock)
        _, retrieved, cached = await self._find(question, retrieval, own, context, watch)
        return self._to_retrieval(retrieved, cached, context, watch)

    async def embed(self, texts: Sequence[str], context: Context) -> Float32:
        """(n, d) queries, as questions become them. Raises InvalidRequest as `answer`, and as `Encoder.encode`."""
        limit = self._limits.max_question_chars
        checked = [check_text(f"input[{number}]", text, limit) for number, text in enumerate(texts)]
        queries = await asyncio.gather(*(self._queries.find(text, context) for text in checked))
        return np.stack([query.embedding for query in queries])

    async def excerpt(self, passage_id: str, around: int, snapshot_id: str, context: Context) -> Excerpt:
        """A passage in its document. Raises as `openbook.rag.excerpt.excerpt`."""
        with Stopwatch(self._clock).stage("fetch", context) as inner:
            return await excerpt(self._passages, passage_id, around, snapshot_id, inner)

    def work(self, retrieval: RetrievalSettings, generation: GenerationSettings | None = None, n_own: int = 0) -> int:
        """`GenerationSettings.work` of an answer, 0 without one. Raises InvalidRequest beyond max_k or max_work."""
        limits, least, n_without = self._limits, 0 if n_own else 1, len(retrieval.without)
        if not least <= retrieval.k <= limits.max_k:
            raise InvalidRequest(f"k must be {least}..{limits.max_k}, got {retrieval.k}")
        if retrieval.k + n_without > limits.max_k:  # as many are searched for
            raise InvalidRequest(
                f"k and the passages of without must be at most {limits.max_k}, got {retrieval.k} and {n_without}"
            )
        if n_own > limits.max_passages:
            raise InvalidRequest(f"passages must be at most {limits.max_passages}, got {n_own}")
        return generation.work(retrieval.k + n_own, limits.max_work) if generation else 0

    def _check_reply(self, reply: ReplySettings, generation: GenerationSettings) -> None:
        if reply.min_confidence and (generation.labels or generation.formulation not in self._generator.calibration):
            raise InvalidRequest(
                f"min_confidence must be 0 where answers have no confidence, got {reply.min_confidence}: labels have "
                f"none, and this generator's is known for {', '.join(self._generator.calibration) or 'no formulation'}"
            )

    async def aclose(self) -> None:
        """Wait for what is still on its way into the caches."""
        await self._queries.aclose()
        await self._generations.aclose()

    async def _find(
        self,
        question: str,
        settings: RetrievalSettings,
        own: Sequence[OwnPassage],
        context: Context,
        watch: Stopwatch,
    ) -> tuple[str, Retrieved, bool]:
        question = check_text("question", question, self._limits.max_question_chars)
        passages = [as_passage(number, each, self._limits.max_passage_chars) for number, each in enumerate(own)]
        if passages:
            check_retriever(settings)
        query, cached = None, False
        if needs_queries(settings):
            query, cached = await self._query(question, context, watch)
        retrieved = NOTHING if settings.k == 0 else await self._retrieve(question, query, settings, context, watch)
        if query is not None and passages:
            with watch.stage("encode passages", context) as inner:
                vectors = await self._encoder.encode_own(passages, inner)
            retrieved = joined(retrieved, passages, canonical_scores(query, vectors))
        if not retrieved.passages:
            raise InvalidRequest(f"there must be a passage to answer from: {_why_none(settings)}")
        return question, retrieved, cached

    async def _retrieve(
        self,
        question: str,
        query: Float32 | None,
        settings: RetrievalSettings,
        context: Context,
        watch: Stopwatch,
    ) -> Retrieved:
        hits = await self._search(question, query, settings, context, watch)
        try:
            return await self._fetch(hits, context, watch)
        except ShardUnavailable:
            if settings.min_coverage == 1.0:
                raise
            # A shard that took part in the search is gone by now: do without it.
            return await self._fetch(await self._search(question, query, settings, context, watch), context, watch)

    async def _search(
        self,
        question: str,
        query: Float32 | None,
        settings: RetrievalSettings,
        context: Context,
        watch: Stopwatch,
    ) -> Hits:
        queries = None if query is None else query[None, :]
        with watch.stage("search", context, k=settings.k, retriever=settings.retriever) as inner:
            return await find(self._retriever, [question], queries, settings, inner)

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
            evidence=evidence_of(retrieved, prior, prior),
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
        reply: ReplySettings,
        cached: bool,
        context: Context,
        watch: Stopwatch,
    ) -> Answer:
        answers = tuple(alternative(each, reply) for each in generation.several)
        best = answers[0]
        right = confidence(self._generator.calibration, settings.formulation, generation, retrieved.passages)
        abstained = math.exp(generation.log_likelihood) < reply.min_probability or (
            right is not None and right < reply.min_confidence
        )
        return Answer(
            text="" if abstained else best.text,
            log_likelihood=generation.log_likelihood,
            evidence=evidence_of(retrieved, generation.log_prior, generation.log_posterior),
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
            labels=labels_of(generation),
            tokens=() if abstained else best.tokens,
            citations=() if abstained else best.citations,
            answers=answers if abstained or settings.n_answers > 1 else (),
            abstained=abstained,
            confidence=right,
        )


def _why_none(settings: RetrievalSettings) -> str:
    if settings.without:
        return f"without leaves out {len(settings.without)}, all of them"
    return "none has a word of the question, and retriever bm25 looks for nothing else"
