"""Keys in a Redis that all replicas share: one hash, by digest."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, cast

from redis.exceptions import RedisError

from openbook.cache.redis import connect, connect_blocking
from openbook.cache.trips import Breaker, Lane
from openbook.config import AccessSettings
from openbook.core.deadline import Clock
from openbook.errors import InvalidConfig, KeysUnavailable
from openbook.logs import Lasting
from openbook.serving.access.keys import KeyRecord, from_line, to_line
from openbook.serving.access.ports import LOOK_S, Decide

log = logging.getLogger(__name__)

HASH = "openbook:keys"
TIMEOUT_S = 0.25
"""Of one look-up: half of what a revocation may take."""
N_KNOWN = 10_000
COMMAND_TIMEOUT_S = 5.0


class KeyRedisBook:
    """The hash as `openbook keys` changes it. Fits `ports.KeyBook`."""

    def __init__(self, settings: AccessSettings) -> None:
        self._redis = connect_blocking("access", settings.url, settings.tls, COMMAND_TIMEOUT_S)

    def all(self) -> list[KeyRecord]:
        """Bare."""
        try:
            return _records(self._redis.hgetall(HASH))
        except (RedisError, UnicodeError) as error:
            raise _failed(error) from None

    def put(self, decide: Decide) -> KeyRecord:
        """Bare."""

        def change(pipeline: Any) -> KeyRecord:
            chosen = decide(_records(pipeline.hgetall(HASH)))
            pipeline.multi()
            pipeline.hset(HASH, chosen.digest, to_line(chosen))
            return chosen

        transaction: Any = self._redis.transaction  # whose types know no value
        try:  # begun again while others change it
            return cast(KeyRecord, transaction(change, HASH, value_from_callable=True))
        except (RedisError, UnicodeError) as error:
            raise _failed(error) from None


class KeyRedis:
    """The hash as a replica reads it. Fits `ports.KeyStore`.

    Raises:
        InvalidConfig: as `openbook.cache.redis.connect`.
    """

    def __init__(self, settings: AccessSettings, clock: Clock = time.monotonic) -> None:
        self._known_for_s = settings.known_for_s
        self._clock = clock
        self._breaker = Breaker(clock)
        self._failing = Lasting(log, "keys can be looked up again")
        self._lane: Lane[str, bytes | None] = Lane(self._read)
        self._redis = connect("access", settings.url, settings.tls, TIMEOUT_S)
        self._known: OrderedDict[str, tuple[float, KeyRecord]] = OrderedDict()  # when it was asked, and what it said

    async def find(self, digest: str) -> KeyRecord | None:
        asked_at = self._clock()
        seen_at, known = self._known.get(digest, (0.0, None))
        if known is not None and asked_at - seen_at < LOOK_S:
            return known
        try:
            (data,) = await self._lane.go([digest])
        except Exception:  # logged where it happened
            if known is not None and self._clock() - seen_at <= self._known_for_s:
                return known
            raise KeysUnavailable("keys cannot be looked up now: try again later") from None
        return self._learn(digest, data, asked_at)

    async def aclose(self) -> None:
        await self._lane.aclose()
        await self._redis.aclose()

    def _learn(self, digest: str, data: bytes | None, asked_at: float) -> KeyRecord | None:
        """Only keys that there are: who makes up others fills no memory."""
        self._known.pop(digest, None)
        if data is None:
            return None
        try:
            record = from_line(data)
        except ValueError:
            log.warning("%s: what stands under %s is no key", HASH, digest)
            return None
        if record.digest != digest:
            return None
        self._known[digest] = asked_at, record
        if len(self._known) > N_KNOWN:
            self._known.popitem(last=False)
        return record

    async def _read(self, digests: Sequence[str]) -> Sequence[bytes | None]:
        if not self._breaker.lets_through():
            raise KeysUnavailable("Redis is left alone")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await self._redis.hmget(HASH, list(digests))
        except BaseException as error:
            self._breaker.failed()
            if isinstance(error, Exception):
                self._failing.met(f"keys cannot be looked up: {type(error).__name__}: {error}")
            raise
        self._breaker.succeeded()
        self._failing.ended()
        return cast(Sequence[bytes | None], found)


def _records(found: Any) -> list[KeyRecord]:
    try:
        return [from_line(line) for line in found.values()]
    except ValueError:
        raise InvalidConfig(f"{HASH}: holds something that is no key of this version") from None


def _failed(error: RedisError | UnicodeError) -> InvalidConfig:
    """The latter of a name that no host can have."""
    return InvalidConfig(f"access.url: {type(error).__name__}: {error}")
