"""How Redis is connected to, and what of it is kept here; what a real one says is in the integration tests."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from redis.asyncio import Redis

from openbook import certificates
from openbook.cache.codec import GenerationCodec, Seal
from openbook.cache.redis import N_CONNECTIONS, RedisCache, connect, open_answers, open_embeddings
from openbook.config import CacheSettings, ClientTls
from openbook.secret import RedisUrl
from openbook.telemetry import CACHE_ERRORS, CACHE_LOOKUPS, CACHE_UP


def options(client: Redis) -> dict[str, object]:
    found: dict[str, object] = client.connection_pool.connection_kwargs
    return found


def test_nobody_waits_longer_for_redis_than_he_said_nor_twice() -> None:
    client = connect("cache", RedisUrl("redis://r:1/0"), None, 0.25)
    found = options(client)
    assert (found["socket_timeout"], found["socket_connect_timeout"]) == (0.25, 0.25)
    assert client.get_retry().get_retries() == 0
    assert client.connection_pool.max_connections == N_CONNECTIONS


def test_who_asks_redis_shows_the_certificate_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "read", lambda *_: None)
    tls = ClientTls(ca=Path("ca.pem"), certificate=Path("c.pem"), key=Path("k.pem"))
    found = options(connect("cache", RedisUrl("rediss://r:1/0"), tls, 1.0))
    assert [found[f"ssl_{name}"] for name in ("ca_certs", "certfile", "keyfile")] == ["ca.pem", "c.pem", "k.pem"]


def test_as_much_is_kept_in_process_and_as_it_is_written_as_the_settings_say() -> None:
    settings = CacheSettings(url="redis://r:1/0", n_memory=7, answers=9, dtype="float16")
    embeddings, answers = open_embeddings(settings), open_answers(settings)
    assert answers
    assert (embeddings._memory._n_max, answers._memory._n_max) == (7, 9)
    assert embeddings._redis._codec.prefix.endswith("float16:")


def test_what_nests_too_deep_to_be_read_is_a_miss_and_counted() -> None:
    """Whoever may write into a Redis without a secret could end every answer by it."""
    cache = RedisCache(CacheSettings(url="redis://r:1/0"), GenerationCodec())
    before = CACHE_ERRORS.labels("value")._value.get()
    assert cache._unpack("key", Seal("").close("key", b"[" * 1_000_000)) is None
    assert CACHE_ERRORS.labels("value")._value.get() == before + 1


def test_of_a_redis_that_nobody_has_asked_yet_nothing_bad_is_known_and_then_it_is() -> None:
    """It says each thing in time, and all of them too late."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while line := await reader.readline():
                _, name, *_ = [(await reader.readline()).strip() for _ in range(2 * int(line[1:]))]
                await asyncio.sleep(0.06)
                writer.write(b"*2\r\n$-1\r\n$-1\r\n" if name == b"MGET" else b"+OK\r\n")
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(say, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            cache = RedisCache(CacheSettings(url=f"redis://127.0.0.1:{port}/1", timeout_s=0.1), GenerationCodec())
            up, misses = CACHE_UP.labels("answers-redis"), CACHE_LOOKUPS.labels("answers-redis", "miss")
            assert up._value.get() == 1
            before = misses._value.get()
            assert await cache.get_many(["a", "b"]) == [None, None]
            assert (up._value.get(), misses._value.get()) == (0, before + 2)
            await cache.aclose()
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others)

    asyncio.run(scenario())
