"""The cache against a real redis-server: same bits back, and no failure of Redis ever reaches the caller."""

import asyncio
import os
import signal
from collections.abc import Callable

import numpy as np
import pytest
from pydantic import SecretStr
from redis import Redis

from openbook import processes
from openbook.cache.redis import KEY_PREFIX, PAUSE_S, RedisCache, TieredCache
from openbook.cache.server import RedisServer
from openbook.config import CacheSettings
from openbook.errors import InvalidConfig
from openbook.telemetry import CACHE_ERRORS
from openbook.testing import ManualClock

EMBEDDING = np.random.default_rng(0).standard_normal(384).astype(np.float32)


def errors(operation: str) -> float:
    return CACHE_ERRORS.labels(operation)._value.get()


def freeze(server: RedisServer) -> None:
    """Stop it, and wait until it stands still."""
    os.kill(server.process.pid, signal.SIGSTOP)
    os.waitpid(server.process.pid, os.WUNTRACED)


def settings(server: RedisServer, **changes: object) -> CacheSettings:
    return CacheSettings(url=server.url, timeout_s=60.0).model_copy(update=changes)


def test_the_same_bits_come_back_in_the_order_of_the_keys(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        cache = RedisCache(settings(redis_server))
        await cache.put_many([("one", EMBEDDING), ("two", -EMBEDDING)])
        two, nothing, one = await cache.get_many(["two", "never seen", "one"])
        assert nothing is None
        assert one is not None
        assert one.tobytes() == EMBEDDING.tobytes()
        assert two is not None
        assert two.tobytes() == (-EMBEDDING).tobytes()
        await cache.aclose()

    asyncio.run(scenario())


def test_entries_expire(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        cache = RedisCache(settings(redis_server, ttl_s=1234))
        await cache.put_many([("expiring", EMBEDDING)])
        await cache.aclose()

    asyncio.run(scenario())
    with Redis(port=redis_server.port) as client:
        assert 0 < client.ttl(KEY_PREFIX + "expiring") <= 1234


@pytest.mark.parametrize(
    "damage",
    [
        lambda v: v[:-1],
        lambda v: v[:-4],
        lambda v: bytes([v[0] ^ 1]) + v[1:],
        lambda v: v[:-1] + bytes([v[-1] ^ 1]),
        lambda v: b"",
    ],
)
def test_an_altered_value_is_a_miss(redis_server: RedisServer, damage: Callable[[bytes], bytes]) -> None:
    async def scenario() -> None:
        cache = RedisCache(settings(redis_server))
        await cache.put_many([("altered", EMBEDDING)])
        with Redis(port=redis_server.port) as client:
            client.set(KEY_PREFIX + "altered", damage(client.get(KEY_PREFIX + "altered")))
        assert await cache.get_many(["altered"]) == [None]
        await cache.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e20])
def test_an_embedding_that_no_encoder_makes_is_a_miss(redis_server: RedisServer, value: float) -> None:
    """Whoever put it there knows the format; a search with it would be refused, and the one who asked be blamed."""

    async def scenario() -> None:
        cache = RedisCache(settings(redis_server))
        await cache.put_many([("poisoned", np.full_like(EMBEDDING, value))])
        assert await cache.get_many(["poisoned"]) == [None]
        await cache.aclose()

    asyncio.run(scenario())


def test_an_embedding_belongs_to_one_key_and_to_those_who_know_the_secret(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        mine, theirs, open_to_all = (
            RedisCache(settings(redis_server).model_copy(update={"secret": secret and SecretStr(secret)}))
            for secret in ("one of some length", "another of some length", None)
        )
        await mine.put_many([("one", EMBEDDING), ("another", EMBEDDING + 1)])
        with Redis(port=redis_server.port) as client:
            client.set(KEY_PREFIX + "one", client.get(KEY_PREFIX + "another"))
        assert await mine.get_many(["one"]) == [None]
        for cache, believed in ((mine, True), (theirs, False), (open_to_all, False)):
            (found,) = await cache.get_many(["another"])
            assert (found is not None) == believed
            await cache.aclose()

    asyncio.run(scenario())


def test_a_second_process_finds_what_the_first_left_in_redis(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        first, second = TieredCache(settings(redis_server)), TieredCache(settings(redis_server))
        await first.put_many([("shared", EMBEDDING)])
        with Redis(port=redis_server.port) as client:
            (found,) = await second.get_many(["shared"])
            assert found is not None
            assert found.tobytes() == EMBEDDING.tobytes()
            client.delete(KEY_PREFIX + "shared")
        (again,) = await second.get_many(["shared"])
        assert again is not None, "what came from Redis is kept in process"
        await first.aclose()
        await second.aclose()

    asyncio.run(scenario())


def test_a_stopped_server_is_a_miss_and_a_metric_and_it_is_found_again() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        with RedisServer() as server:
            cache = RedisCache(settings(server), clock)
            await cache.put_many([("before", EMBEDDING)])
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()
            read_errors, write_errors = errors("read"), errors("write")
            assert await cache.get_many(["before"]) == [None]
            assert errors("read") == read_errors + 1
            assert await cache.get_many(["before"]) == [None]
            assert errors("read") == read_errors + 1, "Redis is left alone for a moment"
            clock.advance(PAUSE_S)
            await cache.put_many([("before", EMBEDDING)])
            assert errors("write") == write_errors + 1
            await cache.aclose()

    asyncio.run(scenario())


def test_a_frozen_server_costs_one_timeout_and_serves_again_when_it_thaws() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        with RedisServer() as server:
            cache = RedisCache(settings(server), clock)
            await cache.put_many([("before", EMBEDDING)])
            impatient = RedisCache(settings(server, timeout_s=0.05), clock)
            freeze(server)
            try:
                before = errors("read")
                assert await impatient.get_many(["before"]) == [None]
                assert errors("read") == before + 1
            finally:
                os.kill(server.process.pid, signal.SIGCONT)
            (found,) = await cache.get_many(["before"])
            assert found is not None
            await cache.aclose()
            await impatient.aclose()

    asyncio.run(scenario())


def test_more_callers_than_connections_all_get_their_answer(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        cache = RedisCache(settings(redis_server, n_connections=2))
        await cache.put_many([("popular", EMBEDDING)])
        answers = await asyncio.gather(*(cache.get_many(["popular"]) for _ in range(50)))
        assert all(found is not None for (found,) in answers)
        await cache.aclose()

    asyncio.run(scenario())


def test_a_crowd_of_our_own_is_a_miss_and_no_reason_to_leave_redis_alone(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        cache = RedisCache(settings(redis_server, n_connections=1))
        await cache.put_many([("wanted", EMBEDDING)])
        impatient = RedisCache(settings(redis_server, n_connections=1, timeout_s=0.01))
        async with impatient._places:
            assert await impatient.get_many(["wanted"]) == [None]
        assert impatient._paused_until < 0
        (found,) = await cache.get_many(["wanted"])
        assert found is not None
        await cache.aclose()
        await impatient.aclose()

    asyncio.run(scenario())


def test_a_frozen_server_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.1)
    server = RedisServer()
    freeze(server)
    server.stop()
    assert server.process.returncode == -signal.SIGKILL


def test_a_url_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match=r"cache\.url = 'http://nowhere': no URL of a Redis server"):
        RedisCache(CacheSettings(url="http://nowhere"))
    with pytest.raises(InvalidConfig, match=r"cache\.url = '\*\*\*': no URL of a Redis server") as refused:
        RedisCache(CacheSettings(url="redis://openbook:sec/ret@nowhere:x/0"))
    assert "sec" not in str(refused.value)
