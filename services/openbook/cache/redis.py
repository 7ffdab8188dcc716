"""Embeddings in Redis, shared by all replicas, with an in-process cache in front.

Whatever goes wrong with Redis is a miss and a metric, never an error: an answer must not depend on its cache. After a
failure Redis is left alone for a moment, so that a frozen server costs one timeout now and then, not one a question.
"""

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from openbook.cache.memory import MemoryCache
from openbook.config import CacheSettings
from openbook.core.deadline import Clock
from openbook.core.types import Float32
from openbook.errors import InvalidConfig
from openbook.telemetry import CACHE_ERRORS, CACHE_LOOKUPS, CACHE_UP

log = logging.getLogger(__name__)
T = TypeVar("T")

PAUSE_S = 1.0
"""How long Redis is left alone after a failure."""

KEY_PREFIX = "openbook:query:3:"
"""The 3 is the version of the value's format (see `Codec`) and of how encoders compute (see `models.batches`)."""

DIGEST_BYTES = 16
MAX_NORM = 1e15
"""Of an embedding: no encoder's is as long, and the scores of longer ones might be infinite."""


class RedisCache:
    """The shared tier.

    Raises:
        InvalidConfig: the URL is missing or not one of Redis's.
    """

    def __init__(self, settings: CacheSettings, clock: Clock = time.monotonic) -> None:
        self._settings = settings
        self._codec = Codec(settings.secret.get_secret_value() if settings.secret else "")
        self._clock = clock
        self._paused_until = -float("inf")
        self._up = CACHE_UP.labels("redis")
        # An exhausted pool raises instead of waiting, so no more calls are let in than it has connections.
        self._places = asyncio.Semaphore(settings.n_connections)
        if settings.url is None:
            raise InvalidConfig("cache.url must be set to a Redis server, such as redis://127.0.0.1:6379/0")
        try:
            self._redis = Redis.from_url(
                settings.url.get_secret_value(),
                socket_timeout=settings.timeout_s,
                socket_connect_timeout=settings.timeout_s,
                retry=Retry(NoBackoff(), 0),
                max_connections=settings.n_connections,
            )
        except ValueError:  # which quotes parts of the URL
            raise InvalidConfig(f"cache.url = '{settings.url}': no URL of a Redis server") from None

    async def get_many(self, keys: Sequence[str]) -> list[Float32 | None]:
        values = await self._guarded("read", lambda: self._redis.mget([KEY_PREFIX + key for key in keys]))
        found = [self._codec.unpack(key, value) for key, value in zip(keys, values or [None] * len(keys), strict=True)]
        for embedding in found:
            CACHE_LOOKUPS.labels("redis", "miss" if embedding is None else "hit").inc()
        return found

    async def put_many(self, entries: Sequence[tuple[str, Float32]]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for key, embedding in entries:
            pipeline.set(KEY_PREFIX + key, self._codec.pack(key, embedding), ex=self._settings.ttl_s)
        await self._guarded("write", pipeline.execute)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._redis.aclose()

    async def _guarded(self, operation: str, call: Callable[[], Awaitable[T]]) -> T | None:
        if self._clock() < self._paused_until:
            return None
        # One time limit for the wait for a place, connecting, and every byte of the reply.
        due = asyncio.get_running_loop().time() + self._settings.timeout_s
        try:
            async with asyncio.timeout_at(due):
                await self._places.acquire()
        except TimeoutError:  # a crowd of our own is no fault of Redis
            CACHE_ERRORS.labels(operation).inc()
            return None
        try:
            async with asyncio.timeout_at(due):
                result = await call()
        except Exception as error:
            CACHE_ERRORS.labels(operation).inc()
            self._up.set(0)
            log.warning("cache %s failed, paused for %.0f s: %s: %s", operation, PAUSE_S, type(error).__name__, error)
            self._paused_until = self._clock() + PAUSE_S
            return None
        else:
            self._up.set(1)
            return result
        finally:
            self._places.release()


class TieredCache:
    """Memory in front of Redis."""

    def __init__(self, settings: CacheSettings) -> None:
        self._memory = MemoryCache(settings.n_memory)
        self._redis = RedisCache(settings)

    async def get_many(self, keys: Sequence[str]) -> list[Float32 | None]:
        found = await self._memory.get_many(keys)
        missing = [i for i, embedding in enumerate(found) if embedding is None]
        if not missing:
            return found
        fetched = await self._redis.get_many([keys[i] for i in missing])
        for i, embedding in zip(missing, fetched, strict=True):
            if embedding is not None:
                found[i] = embedding
                await self._memory.put_many([(keys[i], embedding)])
        return found

    async def put_many(self, entries: Sequence[tuple[str, Float32]]) -> None:
        await self._memory.put_many(entries)
        await self._redis.put_many(entries)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._redis.aclose()


class Codec:
    """Embeddings as Redis holds them: a digest of key and value, then little-endian float32.

    The digest depends on `secret`: who does not know it can neither alter an entry nor put one in another's place.
    """

    def __init__(self, secret: str) -> None:
        self._digest_key = hashlib.blake2b(secret.encode()).digest() if secret else b""

    def pack(self, key: str, embedding: Float32) -> bytes:
        """A (d,) embedding as the value of a key."""
        data = embedding.astype("<f4").tobytes()
        return self._digest(key, data) + data

    def unpack(self, key: str, value: bytes | str | None) -> Float32 | None:
        """The embedding, or None for what `pack` did not make of this key and an embedding."""
        if not isinstance(value, bytes):
            return None
        digest, data = value[:DIGEST_BYTES], value[DIGEST_BYTES:]
        if not data or len(data) % 4 or not hmac.compare_digest(digest, self._digest(key, data)):
            CACHE_ERRORS.labels("digest").inc()
            return None
        embedding = np.frombuffer(data, dtype="<f4")
        if not np.linalg.norm(embedding.astype(np.float64)) <= MAX_NORM:  # nor is NaN
            CACHE_ERRORS.labels("value").inc()
            return None
        return embedding

    def _digest(self, key: str, data: bytes) -> bytes:
        digest = hashlib.blake2b(key.encode() + b"\0", digest_size=DIGEST_BYTES, key=self._digest_key)
        digest.update(data)
        return digest.digest()
