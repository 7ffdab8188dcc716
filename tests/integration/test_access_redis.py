"""Keys in a real Redis: seen by all replicas, known for a while when it is gone, and never let in unknown."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis import Redis

from openbook.cache.server import RedisServer
from openbook.config import AccessSettings
from openbook.errors import InvalidConfig, InvalidRequest, KeysUnavailable
from openbook.processes import end, free_port
from openbook.serving.access.key_redis import HASH, PAUSE_S, KeyRedis, KeyRedisBook
from openbook.serving.access.keys import KeyRecord, may_join, mint, revoked
from openbook.serving.access.ports import LOOK_S
from openbook.serving.access.scopes import Scope
from openbook.testing import ManualClock


def record(name: str = "web") -> KeyRecord:
    return mint(name, 0.0, [Scope.ASK])[1]


@pytest.fixture
def settings(redis_server: RedisServer) -> Iterator[AccessSettings]:
    yield AccessSettings(keys="redis", url=redis_server.url)
    with Redis.from_url(redis_server.url) as redis:
        redis.delete(HASH)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]


def test_what_is_added_and_revoked_all_replicas_see_within_half_a_second(settings: AccessSettings) -> None:
    async def scenario() -> None:
        book, clock = KeyRedisBook(settings), ManualClock()
        replicas = [KeyRedis(settings, clock) for _ in range(3)]
        kept = record()
        assert [await each.find(kept.digest) for each in replicas] == [None] * 3
        book.put(lambda _: kept)
        assert [await each.find(kept.digest) for each in replicas] == [kept] * 3
        book.put(lambda records: revoked(records, kept.prefix, 1.0))
        clock.advance(LOOK_S)
        for each in replicas:
            found = await each.find(kept.digest)
            assert found is not None
            assert found.why_dead(2.0) == "revoked"
            await each.aclose()

    run(scenario)


def test_of_many_who_add_keys_of_one_name_at_once_two_do(settings: AccessSettings) -> None:
    def add(_: int) -> bool:
        new = record()
        try:
            KeyRedisBook(settings).put(lambda records: may_join(records, new, 0.0))
        except InvalidRequest:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(add, range(8))) == 2
    assert len(KeyRedisBook(settings).all()) == 2


def test_without_redis_known_keys_stay_for_a_while_and_unknown_ones_are_refused() -> None:
    async def scenario() -> None:
        with RedisServer() as server:
            settings, clock = AccessSettings(keys="redis", url=server.url, known_for_s=60.0), ManualClock()
            kept = record()
            KeyRedisBook(settings).put(lambda _: kept)
            store = KeyRedis(settings, clock)
            assert await store.find(kept.digest) == kept
            end(server.process)
            for now in (1.0, 30.0, 60.0):
                clock.now = now
                assert await store.find(kept.digest) == kept
                with pytest.raises(KeysUnavailable):
                    await store.find(record().digest)
            clock.now = 61.0
            with pytest.raises(KeysUnavailable):
                await store.find(kept.digest)
            server.again()
            server.address()
            clock.advance(PAUSE_S)
            assert await store.find(kept.digest) is None  # it began empty: what it says is believed
            await store.aclose()

    run(scenario)


def test_what_is_no_key_lets_nobody_in(settings: AccessSettings) -> None:
    async def scenario() -> None:
        one, other = record("one"), record("other")
        with Redis.from_url(settings.url.get_secret_value()) as redis:  # type: ignore[union-attr]
            redis.hset(HASH, one.digest, "{}")
            redis.hset(HASH, other.digest, one.model_dump_json())  # another's
        store = KeyRedis(settings)
        assert [await store.find(each.digest) for each in (one, other)] == [None, None]
        await store.aclose()

    run(scenario)


def test_a_redis_that_is_not_there_is_named() -> None:
    settings = AccessSettings(keys="redis", url=f"redis://127.0.0.1:{free_port()}/0")
    with pytest.raises(InvalidConfig, match=r"access.url: ConnectionError"):
        KeyRedisBook(settings).all()
    with pytest.raises(InvalidConfig, match=r"access.url must be set"):
        KeyRedisBook(AccessSettings(keys="redis"))
