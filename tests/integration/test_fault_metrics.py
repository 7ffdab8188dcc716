"""Each fault that docs/operate.md says a metric shows is shown by it."""

import asyncio
import math
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from prometheus_client import REGISTRY
from ray.exceptions import ActorDiedError
from redis import Redis

from openbook.cache.codec import EmbeddingCodec
from openbook.cache.memory import MemoryCache
from openbook.cache.redis import RedisCache
from openbook.cache.server import RedisServer
from openbook.config import CacheSettings, parse
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import AS_BUILT, Generation, GenerationSettings, Passage, Retrieved, Token
from openbook.errors import DeadlineExceeded, ModelUnavailable, OpenbookError, Overloaded
from openbook.index.server.exchange import Peer
from openbook.index.server.pending import PendingSearch
from openbook.index.server.streams import OpenStreams
from openbook.index.server.threads import CallThreads, Fetches
from openbook.index.server.waiting import SearchQueue
from openbook.rag.pipeline import Pipeline
from openbook.serving.endpoint.schemas import AnswerRequest
from openbook.serving.endpoint.service import AnswerService
from openbook.serving.workers.batching import Batcher
from openbook.serving.workers.hop import call
from openbook.serving.workers.worker import in_time
from openbook.telemetry import CACHE_UP
from openbook.testing import EchoGenerator, ExactIndex, HashEncoder, ManualClock

EMBEDDING = np.ones(8, np.float32)
PASSAGES = [Passage(0, "a", "A", "Bell patented the telephone")]
EMBEDDINGS = EmbeddingCodec()
ENDLESS = {"formulation": "token", "n_beams": 1}


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@contextmanager
def rises(name: str, **labels: str) -> Iterator[None]:
    """By one or more in the body."""
    before = value(name, **labels)
    yield
    assert value(name, **labels) > before, (name, labels)


def endpoint(generator: Any = None, **serving: int) -> AnswerService:
    encoder, settings = HashEncoder(), parse({"answer": {"k": 1, "max_work": 100_000}, "serving": serving})
    index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
    pipeline = Pipeline(encoder, index, index, generator or EchoGenerator(), MemoryCache(9), settings.answer)

    async def ready() -> None: ...

    return AnswerService(pipeline, settings, ready)


# --- Redis


def with_redis(fault: Callable[[RedisServer, Redis], None]) -> None:
    """A fault between two uses of a cache."""

    async def main() -> None:
        with RedisServer() as server, Redis(port=server.port) as client:
            cache = RedisCache(CacheSettings(url=server.url, timeout_s=5.0), EMBEDDINGS, ManualClock())
            await cache.put_many([("key", EMBEDDING)])
            assert value("openbook_cache_up", tier="redis") == 1
            fault(server, client)
            try:
                await cache.get_many(["key"])
                await cache.put_many([("key", EMBEDDING)])
            finally:
                await cache.aclose()

    asyncio.run(main())


def test_of_a_redis_that_nobody_has_asked_yet_nothing_bad_is_said() -> None:
    CACHE_UP.labels("redis").set(0)

    async def main() -> None:
        await RedisCache(CacheSettings(url="redis://127.0.0.1:6380/0"), EMBEDDINGS).aclose()

    asyncio.run(main())
    assert value("openbook_cache_up", tier="redis") == 1


def test_a_redis_that_was_killed() -> None:
    def kill(server: RedisServer, client: Redis) -> None:
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()

    with rises("openbook_cache_errors_total", operation="read"):
        with_redis(kill)
    assert value("openbook_cache_up", tier="redis") == 0


def test_a_redis_that_is_full() -> None:
    def fill(server: RedisServer, client: Redis) -> None:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 1)

    with rises("openbook_cache_errors_total", operation="write"):
        with_redis(fill)
    assert value("openbook_cache_up", tier="redis") == 0


def test_a_redis_that_returns_garbage() -> None:
    with rises("openbook_cache_errors_total", operation="digest"):
        with_redis(lambda server, client: client.set(EMBEDDINGS.prefix + "key", b"garbage"))
    assert value("openbook_cache_up", tier="redis") == 1


# --- the endpoint


class Endless(EchoGenerator):
    """Never comes to an end."""

    async def generate(self, *asked: Any) -> Generation:
        async with in_time("generator", asked[-1].deadline):
            await asyncio.Event().wait()
        raise AssertionError("it waits for ever")

    async def stream(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> AsyncIterator[Token | Generation]:
        while True:
            yield Token("more", 0.0, (0.0,))


def test_a_timeout_too_short_and_a_generator_that_is_frozen() -> None:
    asked = AnswerRequest(question="who", timeout_s=1.0)  # on a busy machine 0.01 s end before the generator begins
    with (
        rises("openbook_stage_errors_total", stage="generate", code="DEADLINE_EXCEEDED"),
        rises("openbook_requests_total", method="Answer", code="DEADLINE_EXCEEDED"),
        pytest.raises(DeadlineExceeded),
    ):
        asyncio.run(endpoint(Endless()).answer(asked, Context()))


def test_how_long_an_answer_takes_is_told_of_answers_alone() -> None:
    with rises("openbook_request_seconds_count", method="Answer"):
        asyncio.run(endpoint().answer(AnswerRequest(question="who"), Context()))
    before = value("openbook_request_seconds_count", method="Answer")
    with pytest.raises(DeadlineExceeded):
        asyncio.run(endpoint(Endless()).answer(AnswerRequest(question="who", timeout_s=0.01), Context()))
    assert value("openbook_request_seconds_count", method="Answer") == before


def test_a_client_who_vanished_in_the_middle() -> None:
    async def main() -> None:
        async with aclosing(endpoint(Endless()).stream(AnswerRequest(question="who", **ENDLESS), Context())) as events:
            for _ in range(3):
                await anext(events)
            assert value("openbook_in_flight") == 1
            assert value("openbook_work_in_flight") > 0

    with (
        rises("openbook_requests_total", method="AnswerStream", code="CANCELLED"),
        rises("openbook_stage_errors_total", stage="generate", code="CANCELLED"),
    ):
        asyncio.run(main())
    assert value("openbook_in_flight") == value("openbook_work_in_flight") == 0


@pytest.mark.parametrize(
    ("want", "serving"), [("places", {"max_in_flight": 1}), ("work", {"max_work_in_flight": 100_000})]
)
def test_overload_of_the_endpoint(want: str, serving: dict[str, int]) -> None:
    async def main() -> None:
        service, stack = endpoint(Endless(), **serving), []
        with suppress(Overloaded):
            while True:
                events = service.stream(AnswerRequest(question="who", max_new_tokens=256, n_beams=16), Context())
                stack.append(events)
                task = asyncio.create_task(anext(events))  # type: ignore[arg-type]
                await task
        for events in stack:
            await events.aclose()

    with (
        rises("openbook_refused_total", by="endpoint", want=want),
        rises("openbook_requests_total", method="AnswerStream", code="RESOURCE_EXHAUSTED"),
    ):
        asyncio.run(main())


# --- the models


def held_up(test: Callable[[Batcher[int, int]], Awaitable[None]]) -> None:
    """The test, beside a batch that lasts as long as it."""
    begun, enough = threading.Event(), threading.Event()

    def model(items: Sequence[int], check: Any) -> Sequence[int]:
        begun.set()
        enough.wait()
        return items

    async def main() -> None:
        batcher: Batcher[int, int] = Batcher(model, name="held up", max_batch=1, max_queue=1)
        first = asyncio.create_task(batcher.submit(0, Context()))
        await asyncio.to_thread(begun.wait)
        with ExitStack() as stack:
            stack.callback(enough.set)
            await test(batcher)
        await first
        await batcher.aclose()

    with (
        rises("openbook_queue_seconds_count", model="held up"),
        rises("openbook_batch_seconds_count", model="held up"),
    ):
        asyncio.run(main())


def test_a_model_that_is_slow() -> None:
    async def test(batcher: Batcher[int, int]) -> None:
        waiting = asyncio.create_task(batcher.submit(1, Context()))
        await asyncio.sleep(0)
        assert value("openbook_queued", model="held up") == 1
        with rises("openbook_refused_total", by="held up", want="room"), pytest.raises(Overloaded):
            await batcher.submit(2, Context())
        waiting.cancel()
        batcher.learn([0], 1000.0)
        with rises("openbook_refused_total", by="held up", want="time"), pytest.raises(OpenbookError):
            await batcher.submit(3, Context(Deadline.after(1)))

    held_up(test)


def test_a_replica_that_died() -> None:
    class Dead:
        def __await__(self) -> Any:
            raise ActorDiedError
            yield

    with (
        rises("openbook_hop_errors_total", to="encoder", error="ActorDiedError"),
        pytest.raises(ModelUnavailable),
    ):
        asyncio.run(call("encoder", Context(), Dead))


# --- an index server


def test_what_an_index_server_refuses_is_counted_by_what_it_lacks() -> None:
    def search() -> PendingSearch:
        return PendingSearch(None, np.zeros((1, 2), np.float32), 1, AS_BUILT, Context(), lambda outcome: None)  # type: ignore[arg-type]

    def stream() -> Any:
        return Mock(idle_since=math.inf, unread_since=math.inf, peer=Peer("a", "1"))

    def refuses(want: str) -> Any:
        stack = ExitStack()
        stack.enter_context(rises("openbook_refused_total", by="index", want=want))
        stack.enter_context(pytest.raises(Overloaded))
        return stack

    waiting, streams, threads, told = SearchQueue(1, 1), OpenStreams(1), CallThreads(1, 1), list[Overloaded]()
    waiting.put(search())
    with refuses("rows"):
        waiting.put(search())
    streams.admit(stream())
    with refuses("streams"):
        streams.admit(stream())
    with threads.working("a"), refuses("threads"), threads.working("a"):
        pass
    fetches = Fetches(1)
    fetches._turns.put("a", object(), 1)  # type: ignore[arg-type]
    with rises("openbook_refused_total", by="index", want="ids"):
        fetches.submit("b", 9, iter(()), told.append)
    assert len(told) == 1
