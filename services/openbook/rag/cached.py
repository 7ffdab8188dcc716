"""Queries and generations: from a cache, or computed, once for all who ask for the same at the same time."""

import asyncio
from collections.abc import Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

from openbook.core.context import Context
from openbook.core.deadline import Clock
from openbook.core.fingerprint import json_digest, text_digest
from openbook.core.types import Float32, Generation, GenerationSettings, Retrieved
from openbook.rag.in_flight import InFlight
from openbook.rag.ports import AnswerCache, EmbeddingCache, Encoder, Generator, Maker
from openbook.rag.stopwatch import Stopwatch

MAX_BYTES = 100_000
"""Of what is kept for one question. More is made anew: the event loop would stand still while it is packed."""


class _WriteBacks:
    """What is on its way into a cache: nobody's answer waits for it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, writing: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(writing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def done(self) -> None:
        await asyncio.gather(*self._tasks)


@dataclass(frozen=True, slots=True)
class Query:
    """A question's embedding, shared by all who ask it at the same time."""

    embedding: Float32  # (d,)
    made_by: str  # the encoder's fingerprint
    stages: dict[str, float]  # seconds that finding it took, for whoever asked first


@dataclass(frozen=True, slots=True)
class Generated:
    """A generation, and whose it is."""

    generation: Generation
    made_by: Maker


class Queries:
    """Embeddings of questions. Raises as `Encoder.encode`."""

    def __init__(self, encoder: Encoder, cache: EmbeddingCache, clock: Clock) -> None:
        self._encoder = encoder
        self._cache = cache
        self._clock = clock
        self._in_flight: InFlight[Query] = InFlight("encoder")
        self._write_backs = _WriteBacks()

    async def find(self, question: str, context: Context) -> Query:
        """The question's embedding."""
        made_by = self._encoder.fingerprint
        key = of_tenant(context.tenant, f"{made_by}:{text_digest(question)}")
        return await self._in_flight.get(key, lambda shared: self._find(key, made_by, question, shared), context)

    async def aclose(self) -> None:
        """Wait for what is still on its way into the cache."""
        await self._write_backs.done()

    async def _find(self, key: str, made_by: str, question: str, context: Context) -> Query:
        watch = Stopwatch(self._clock, context)
        with watch.stage("cache"):
            (embedding,) = await self._cache.get_many([key])
        # Whatever stands in a shared cache, only a vector of this encoder's shape is one of its embeddings.
        if embedding is not None and embedding.shape == (self._encoder.dimension,):
            return Query(embedding, made_by, watch.stages)
        with watch.stage("encode") as inner:
            embedding = (await self._encoder.encode([question], inner))[0]
        if (of_call := self._encoder.fingerprint) == made_by:
            self._write_backs.start(self._cache.put_many([(key, embedding)]))
        return Query(embedding, of_call, watch.stages)


class Generations:
    """What the generator makes of a question and its passages. Raises as `Generator.generate`."""

    def __init__(self, generator: Generator, cache: AnswerCache | None) -> None:
        self._generator = generator
        self._cache = cache
        self._in_flight: InFlight[Generated] = InFlight("generator")
        self._write_backs = _WriteBacks()

    def place(
        self, settings: GenerationSettings, n_passages: int, context: Context
    ) -> AbstractContextManager[Generator]:
        """The generator, with a place where it must be asked. Raises as `Generator.place`."""
        generator = self._generator
        return generator.place(settings, n_passages, context) if self._cache is None else nullcontext(generator)

    async def find(
        self,
        question: str,
        retrieved: Retrieved,
        settings: GenerationSettings,
        context: Context,
        placed: Generator,
    ) -> Generated:
        """The generation: fresh, where there is no cache, of the generator with its place."""
        if self._cache is None:
            generation = await placed.generate(question, retrieved, settings, context)
            return Generated(generation, Maker.of(self._generator))
        cache, made_by = self._cache, Maker.of(self._generator)
        key = of_tenant(context.tenant, generation_key(made_by.generates_by, question, retrieved, settings))

        async def compute(shared: Context) -> Generated:
            (found,) = await cache.get_many([key])
            # Whatever stands in a shared cache, only what has a posterior of each of these passages is theirs.
            if found is not None and found.log_prior.shape == found.log_posterior.shape == retrieved.scores.shape:
                return Generated(found, made_by)
            generation = await self._generator.generate(question, retrieved, settings, shared)
            of_call = Maker.of(self._generator)
            if of_call.generates_by == made_by.generates_by and size_bytes(generation) <= MAX_BYTES:
                self._write_backs.start(cache.put_many([(key, generation)]))
            return Generated(generation, of_call)

        # Of one caller alone: in the company of who asks for much one would wait for his turn, not for one's own.
        return await self._in_flight.get((context.caller, key), compute, context)

    async def aclose(self) -> None:
        """Wait for what is still on its way into the cache."""
        await self._write_backs.done()


def size_bytes(generation: Generation) -> int:
    """About what it takes in memory, and more than as JSON.

    A token has a posterior, whose k numbers take 32 bytes each, and besides that as much as 12 more. What is an
    answer's own is as much as two tokens; a label is less than one, but for its text: a character may take 6 as JSON.
    """
    labels = generation.classification.labels if generation.classification else ()
    n_rows = sum(len(each.tokens) + 2 for each in generation.several) + len(labels)
    return 32 * n_rows * (len(generation.log_prior) + 12) + 6 * sum(map(len, labels))


def generation_key(generates_by: str, question: str, retrieved: Retrieved, settings: GenerationSettings) -> str:
    """The key of what the generator that `generates_by` this makes of a question and its passages.

    A generation depends on nothing else. The search runs every time, so a publication, or a shard that is gone, gives
    other keys; samples have their seed in the settings.
    """
    named = [each.id if each.id >= 0 else [each.title, each.text] for each in retrieved.passages]  # or are the caller's
    passages = [retrieved.snapshot_id, named, retrieved.scores.tolist()]
    return f"{generates_by}:{json_digest([question, passages, asdict(settings)])}"


def of_tenant(tenant: str, key: str) -> str:
    """The key of what is kept for this tenant alone: a hit, or company on the way, would tell others what was asked.

    No tenant has a colon in its name, nor has a fingerprint one.
    """
    return f"{tenant}:{key}" if tenant else key
