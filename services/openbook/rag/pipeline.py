"""The journey of one question, steps 2 to 11 (ARCHITECTURE.md): its passages, the answer, what both rest on."""

import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace

from openbook.config import AnswerDefaults
from openbook.core.confidence import Calibration, confidence
from openbook.core.context import Context
from openbook.core.deadline import Clock
from openbook.core.marginal import log_prior
from openbook.core.topk import check_without
from openbook.core.types import (
    Float32,
    Generation,
    GenerationSettings,
    OwnPassage,
    PartSettings,
    Passage,
    ReplySettings,
    RetrievalSettings,
    Retrieved,
    Token,
)
from openbook.errors import InvalidRequest
from openbook.rag.answer import Answer, Excerpt, Retrieval, alternative, evidence_of, labels_of
from openbook.rag.cached import Generated, Generations
from openbook.rag.excerpt import excerpt
from openbook.rag.finding import Finder
from openbook.rag.following import Found, followed
from openbook.rag.ports import AnswerCache, EmbeddingCache, Encoder, Generator, Maker, PassageStore, Retriever
from openbook.rag.stopwatch import Stopwatch

BARE = ReplySettings()


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
        self._passages = passages
        self._generator = generator
        self._limits = limits
        self._clock = clock
        self._finder = Finder(encoder, retriever, passages, cache, limits, clock)
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
        _check_reply(reply, generation, self._generator.calibration)
        watch = Stopwatch(self._clock, context)
        question, passages = self._finder.checked(question, own)
        if generation.follow:
            retrieved, generated = await self._follow(question, retrieval, generation, passages, watch)
        else:
            with self._generations.place(generation, self._finder.n_expected(retrieval, len(own)), context) as placed:
                retrieved = await self._finder.find(question, retrieval, passages, watch)
                with watch.stage("generate") as inner:
                    generated = await self._generations.find(question, retrieved, generation, inner, placed)
        return self._to_answer(generated, retrieved, generation, reply, watch)

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
        _check_reply(reply, generation, self._generator.calibration)
        watch, n_told = Stopwatch(self._clock, context), 0
        question, passages = self._finder.checked(question, own)
        if generation.follow:
            retrieved, generated = await self._follow(question, retrieval, generation, passages, watch)
            yield self._to_retrieval(retrieved, watch)
        else:
            n_expected = self._finder.n_expected(retrieval, len(own))
            with self._generator.place(generation, n_expected, context, is_stream=True) as placed:
                retrieved = await self._finder.find(question, retrieval, passages, watch)
                yield self._to_retrieval(retrieved, watch)
                with watch.stage("generate") as inner:
                    made_by = Maker.of(self._generator)
                    items = placed.stream(question, retrieved, generation, inner)
                    async with aclosing(items):  # type: ignore[type-var]  # an async generator; closing it stops the work
                        async for item in items:
                            if isinstance(item, Maker):
                                made_by = item
                            elif isinstance(item, Generation):
                                generated = Generated(item, made_by)
                            elif not reply.may_hold_back:
                                n_told += 1
                                yield item
        answer = self._to_answer(generated, retrieved, generation, reply, watch)
        if not (n_told or answer.abstained):
            for token in generated.generation.tokens:
                yield token
        yield answer

    async def retrieve(
        self, question: str, retrieval: RetrievalSettings, context: Context, own: Sequence[OwnPassage] = ()
    ) -> Retrieval:
        """The passages and their prior alone. Raises as `answer`."""
        self.work(retrieval, n_own=len(own))
        watch = Stopwatch(self._clock, context)
        question, passages = self._finder.checked(question, own)
        retrieved = await self._finder.find(question, retrieval, passages, watch)
        return self._to_retrieval(retrieved, watch)

    @property
    def dimension(self) -> int:
        """d of the queries."""
        return self._finder.dimension

    async def embed(self, texts: Sequence[str], context: Context) -> Float32:
        """(n, d) queries, as questions become them. Raises InvalidRequest as `answer`, and as `Encoder.encode`."""
        return await self._finder.embed(texts, context)

    async def excerpt(self, passage_id: str, around: int, snapshot_id: str, context: Context) -> Excerpt:
        """A passage in its document. Raises as `openbook.rag.excerpt.excerpt`."""
        with Stopwatch(self._clock, context).stage("fetch") as inner:
            return await excerpt(self._passages, passage_id, around, snapshot_id, inner)

    def work(self, retrieval: RetrievalSettings, generation: GenerationSettings | None = None, n_own: int = 0) -> int:
        """`GenerationSettings.work` of an answer, 0 without one. Raises InvalidRequest beyond max_k or max_work."""
        limits, least = self._limits, 0 if n_own else 1
        if not least <= retrieval.k <= limits.max_k:
            raise InvalidRequest(f"k must be {least}..{limits.max_k}, got {retrieval.k}")
        check_without(retrieval.k, retrieval.without, limits.max_k)
        if n_own > limits.max_passages:
            raise InvalidRequest(f"passages must be at most {limits.max_passages}, got {n_own}")
        if generation is None:
            return 0
        if generation.follow and not retrieval.k:
            raise InvalidRequest(
                f"k must be at least 1 where passages are looked for again, got follow {generation.follow}"
            )
        return generation.work(retrieval.k * generation.n_looks + n_own, limits.max_work)

    async def aclose(self) -> None:
        """Wait for what is still on its way into the caches."""
        await self._finder.aclose()
        await self._generations.aclose()

    async def _follow(
        self,
        question: str,
        retrieval: RetrievalSettings,
        generation: GenerationSettings,
        own: Sequence[Passage],
        watch: Stopwatch,
    ) -> tuple[Retrieved, Generated]:
        made_by = Maker.of(self._generator)
        vectors = await self._finder.encode_own(own, watch) if own else None

        async def look(text: str) -> Found:
            found = await self._finder.look(text, retrieval, watch)
            return found if vectors is None else found.beside(own, vectors)

        async def generate(retrieved: Retrieved, of_part: PartSettings) -> Generation:
            nonlocal made_by
            if of_part.begun:
                of_part = replace(of_part, begun_by=made_by.generates_by)
            with watch.stage("generate") as inner:
                part = await self._generator.generate(question, retrieved, of_part, inner)
            made_by = Maker.of(self._generator)
            return part

        retrieved, generated = await followed(question, generation, look, generate)
        return retrieved, Generated(generated, made_by)

    def _to_retrieval(self, retrieved: Retrieved, watch: Stopwatch) -> Retrieval:
        prior = log_prior(retrieved.scores)
        return Retrieval(
            evidence=evidence_of(retrieved, prior, prior),
            snapshot_id=retrieved.snapshot_id,
            encoder_fingerprint=retrieved.encoder_fingerprint,
            complete=retrieved.complete,
            coverage=retrieved.coverage,
            cached=_is_cached(watch),
            request_id=watch.context.request_id,
            timings=watch.read(),
        )

    def _to_answer(
        self,
        generated: Generated,
        retrieved: Retrieved,
        settings: GenerationSettings,
        reply: ReplySettings,
        watch: Stopwatch,
    ) -> Answer:
        generation, made_by = generated.generation, generated.made_by
        answers = tuple(alternative(each, reply) for each in generation.several)
        best = answers[0]
        right = None
        if not settings.follow:  # nothing was fitted to such answers
            _check_reply(reply, settings, made_by.calibration)  # once more: another model may have come since
            right = confidence(made_by.calibration, settings.formulation, generation, retrieved.passages)
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
            encoder_fingerprint=retrieved.encoder_fingerprint,
            generator_fingerprint=made_by.fingerprint,
            complete=retrieved.complete,
            coverage=retrieved.coverage,
            cached=_is_cached(watch),
            request_id=watch.context.request_id,
            timings=watch.read(),
            labels=labels_of(generation),
            tokens=() if abstained else best.tokens,
            citations=() if abstained else best.citations,
            answers=answers if abstained or settings.n_answers > 1 else (),
            abstained=abstained,
            confidence=right,
            cut=best.cut and not abstained,
        )


def _check_reply(reply: ReplySettings, generation: GenerationSettings, calibration: Calibration) -> None:
    if not reply.min_confidence:
        return
    if generation.labels or generation.follow or generation.formulation not in calibration:
        raise InvalidRequest(
            f"min_confidence must be 0 where answers have no confidence, got {reply.min_confidence}: labels and "
            "answers with follow have none, and this generator's is known for "
            f"{', '.join(calibration) or 'no formulation'}"
        )


def _is_cached(watch: Stopwatch) -> bool:
    """Whether the query was, and all of them where passages were looked for several times."""
    return "cache" in watch.stages and "encode" not in watch.stages
