"""A cache in Redis, shared by all replicas, and with one in process in front of it.

Whatever goes wrong with Redis is a miss and a metric, never an error: an answer must not depend on its cache. After a
failure Redis is left alone for a moment, so that a frozen server costs one timeout now and then, not one a question.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import redis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from openbook import certificates
from openbook.cache.codec import Codec, EmbeddingCodec, GenerationCodec, Seal
from openbook.cache.memory import MemoryCache
from openbook.cache.trips import PAUSE_S, Breaker, Lane
from openbook.config import CacheSettings, ClientTls
from openbook.core.deadline import Clock
from openbook.core.types import Float32, Generation
from openbook.errors import InvalidConfig
from openbook.files import at_home
from openbook.logs import Lasting
from openbook.secret import RedisUrl
from openbook.telemetry import CACHE_ERRORS, CACHE_LOOKUPS, CACHE_UP

log = logging.getLogger(__name__)
V = TypeVar("V")
R = TypeVar("R", redis.Redis, Redis)

N_CONNECTIONS = 2
"""One reads, one writes: what comes meanwhile shares the next round trip."""

LOOK_TIMEOUT_S = 5.0
"""Once, at the start: a question waits for `cache.timeout_s` alone."""

AS_GRPC = {
    "ssl_exclude_verify_flags": [ssl.VERIFY_X509_STRICT],
    "ssl_include_verify_flags": [ssl.VERIFY_X509_PARTIAL_CHAIN],
}
"""As `certificates.of_who_connects` takes certificates. Before 7.0 redis-py takes them as Python does by default."""


class _Paused(Exception):
    """Redis is left alone."""


class RedisCache(Generic[V]):
    """The shared tier.

    Raises:
        InvalidConfig: the URL is missing or not one of Redis's, or the files of `tls` cannot be used.
    """

    def __init__(self, settings: CacheSettings, codec: Codec[V], clock: Clock = time.monotonic) -> None:
        self._settings = settings
        self._codec = codec
        self._seal = Seal(settings.secret.get_secret_value() if settings.secret else "")
        self._clock = clock
        self._breaker = Breaker(clock)
        self._refuses_reads = False
        self._refuses_writes_until = -float("inf")
        self._failing = {each: Lasting(log, f"cache {each} works again") for each in ("read", "write")}
        self._up = CACHE_UP.labels(codec.tier)
        self._up.set(1)  # of a Redis that nobody has asked yet nothing bad is known
        self._reads: Lane[str, bytes | None] = Lane(self._read)
        self._writes: Lane[tuple[str, bytes], None] = Lane(self._write)
        self._redis = connect("cache", settings.url, settings.tls, settings.timeout_s)

    async def get_many(self, keys: Sequence[str]) -> list[V | None]:
        full = [self._codec.prefix + key for key in keys]
        try:
            values = await self._reads.go(full)
        except Exception:  # counted where it happened
            values = [None] * len(keys)
        found = [self._unpack(key, value) for key, value in zip(full, values, strict=True)]
        for value in found:
            CACHE_LOOKUPS.labels(self._codec.tier, "miss" if value is None else "hit").inc()
        return found

    async def put_many(self, entries: Sequence[tuple[str, V]]) -> None:
        packed = [(self._codec.prefix + key, self._codec.pack(value)) for key, value in entries]
        try:
            await self._writes.go([(key, self._seal.close(key, data)) for key, data in packed])
        except Exception:  # counted where it happened
            return

    async def aclose(self) -> None:
        """Close all connections."""
        await self._reads.aclose()
        await self._writes.aclose()
        await self._redis.aclose()

    async def _read(self, keys: Sequence[str]) -> Sequence[bytes | None]:
        values: Sequence[bytes | None] = await self._guarded("read", lambda: self._redis.mget(keys))
        return values

    async def _write(self, entries: Sequence[tuple[str, bytes]]) -> Sequence[None]:
        if self._clock() < self._refuses_writes_until:
            raise _Paused
        pipeline = self._redis.pipeline(transaction=False)
        for key, value in entries:
            pipeline.set(key, value, ex=self._settings.ttl_s)
        await self._guarded("write", pipeline.execute)
        return [None] * len(entries)

    async def _guarded(self, operation: str, call: Any) -> Any:
        if not self._breaker.lets_through():
            raise _Paused
        try:
            # One time limit for connecting and every byte of the reply.
            async with asyncio.timeout(self._settings.timeout_s):
                result = await call()
        except BaseException as error:
            if operation == "write" and isinstance(error, redis.ResponseError):  # full: it is read all the same
                self._refuses_writes_until = self._clock() + PAUSE_S
                self._breaker.succeeded()
            else:
                self._refuses_reads = isinstance(error, redis.ResponseError)  # NOPERM: it may be written all the same
                self._breaker.failed()
            if isinstance(error, Exception):
                CACHE_ERRORS.labels(operation).inc()
                self._up.set(0)
                self._failing[operation].met(f"cache {operation} fails: {type(error).__name__}: {error}")
            raise
        self._breaker.succeeded()
        self._failing[operation].ended()
        self._refuses_reads = self._refuses_reads and operation == "write"
        self._up.set(not self._refuses_reads and self._clock() >= self._refuses_writes_until)
        return result

    def _unpack(self, key: str, value: object) -> V | None:
        if not isinstance(value, bytes):
            return None
        if (data := self._seal.open(key, value)) is None:
            CACHE_ERRORS.labels("digest").inc()
            return None
        try:
            return self._codec.unpack(data)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            CACHE_ERRORS.labels("value").inc()
            return None


class TieredCache(Generic[V]):
    """Memory in front of Redis."""

    def __init__(self, memory: MemoryCache[V], redis: RedisCache[V]) -> None:
        self._memory = memory
        self._redis = redis

    async def get_many(self, keys: Sequence[str]) -> list[V | None]:
        found = await self._memory.get_many(keys)
        missing = [i for i, value in enumerate(found) if value is None]
        if not missing:
            return found
        fetched = await self._redis.get_many([keys[i] for i in missing])
        for i, value in zip(missing, fetched, strict=True):
            if value is not None:
                found[i] = value
                await self._memory.put_many([(keys[i], value)])
        return found

    async def put_many(self, entries: Sequence[tuple[str, V]]) -> None:
        await self._memory.put_many(entries)
        await self._redis.put_many(entries)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._redis.aclose()


def open_embeddings(settings: CacheSettings) -> TieredCache[Float32]:
    """The cache of query embeddings. Raises InvalidConfig as `RedisCache`."""
    return TieredCache(MemoryCache(settings.n_memory), RedisCache(settings, EmbeddingCodec(settings.dtype)))


def open_answers(settings: CacheSettings) -> TieredCache[Generation] | None:
    """The cache of answers, where one is wanted. Raises InvalidConfig as `RedisCache`."""
    if not settings.answers:
        return None
    return TieredCache(MemoryCache(settings.answers, "answers-memory"), RedisCache(settings, GenerationCodec()))


def connect(name: str, url: RedisUrl | None, tls: ClientTls | None, timeout_s: float) -> Redis:
    """A client that never waits longer than `timeout_s` and never tries twice.

    Raises:
        InvalidConfig: as `RedisCache`. `name` is the section of the settings that has `url` and `tls`.
    """
    return _opened(Redis, name, url, tls, timeout_s, retry=Retry(NoBackoff(), 0), max_connections=N_CONNECTIONS)


def connect_blocking(name: str, url: RedisUrl | None, tls: ClientTls | None, timeout_s: float) -> redis.Redis:
    """As `connect`, for commands, which have no event loop."""
    return _opened(redis.Redis, name, url, tls, timeout_s, retry=redis.retry.Retry(NoBackoff(), 0))


def warn_if_useless(settings: CacheSettings) -> None:
    """Say in the log that nothing can be looked up there: later that is but a miss.

    Raises:
        InvalidConfig: as `RedisCache`.
    """
    try:
        with connect_blocking("cache", settings.url, settings.tls, LOOK_TIMEOUT_S) as client:
            client.mget([EmbeddingCodec(settings.dtype).prefix])
    except (redis.RedisError, UnicodeError) as error:  # the latter of a name that none can have
        log.warning("cache.url = %s cannot be used, so every lookup is a miss: %s", settings.url, error)


def _opened(
    kind: type[R], name: str, url: RedisUrl | None, tls: ClientTls | None, timeout_s: float, **options: Any
) -> R:
    if url is None:
        raise InvalidConfig(f"{name}.url must be set to a Redis server, such as redis://127.0.0.1:6379/0")
    text = url.get_secret_value()
    options |= _tls_options(name, tls, text)
    try:
        return kind.from_url(text, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, **options)
    except ValueError:  # which quotes parts of the URL
        raise InvalidConfig(f"{name}.url = '{url}': no URL of a Redis server") from None


def _tls_options(name: str, tls: ClientTls | None, url: str) -> dict[str, Any]:
    is_encrypted, given = url.startswith("rediss://"), {}
    if tls:
        if not is_encrypted:
            raise InvalidConfig(f"{name}.tls is for a {name}.url of rediss://")
        certificates.read(f"{name}.tls", tls)  # now: later whatever is wrong with them would be a miss
        given = {"ssl_ca_certs": tls.ca, "ssl_certfile": tls.certificate, "ssl_keyfile": tls.key}
    files = {name: str(at_home(path)) for name, path in given.items() if path}
    return files | (AS_GRPC if is_encrypted and redis.VERSION >= (7,) else {})
