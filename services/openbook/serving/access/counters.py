"""What callers have asked for, counted in a Redis that all replicas share: one atomic script a question."""

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis

from openbook.cache.trips import Breaker, Lane
from openbook.core.deadline import Clock
from openbook.logs import Lasting
from openbook.serving.access.quota import Asked, Taken

log = logging.getLogger(__name__)

PREFIX = "openbook:quota:"
TIMEOUT_S = 0.1

# One hash a caller, gone a day after it was last counted in. For each policy its name, the length of its window, its
# limit and what is asked for; what is below 0 is given back.
SCRIPT = """
local now, used, granted = tonumber(redis.call('TIME')[1]), {}, 1
for i = 1, #ARGV, 4 do
  local window, limit, cost = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), tonumber(ARGV[i + 3])
  local number, count = string.match(redis.call('HGET', KEYS[1], ARGV[i]) or '', '^(%d+):(%d+)$')
  local so_far = (number and tonumber(number) == math.floor(now / window)) and tonumber(count) or 0
  if cost > 0 and so_far + cost > limit then granted = 0 end
  used[#used + 1] = so_far
end
if granted == 1 then
  for i = 1, #ARGV, 4 do
    local n = (i + 3) / 4
    used[n] = math.max(0, used[n] + tonumber(ARGV[i + 3]))
    redis.call('HSET', KEYS[1], ARGV[i], string.format('%d:%d', math.floor(now / tonumber(ARGV[i + 1])), used[n]))
  end
  redis.call('EXPIRE', KEYS[1], 86400)
end
return {granted, now, unpack(used)}
"""


class Counters:
    """Counts in Redis. For one event loop."""

    def __init__(self, redis: Redis, clock: Clock = time.monotonic) -> None:
        self._redis = redis
        self._breaker = Breaker(clock)
        self._failing = Lasting(log, "quotas are counted by all replicas together again")
        self._lane: Lane[tuple[str, Asked], Taken] = Lane(self._trip)

    async def take(self, caller: str, asked: Asked) -> Taken | None:
        """As `quota.take`, for all replicas together; None while Redis does not answer."""
        try:
            (taken,) = await self._lane.go([(caller, asked)])
        except Exception:  # logged where it happened
            return None
        return taken

    async def aclose(self) -> None:
        """Close all connections."""
        await self._lane.aclose()
        await self._redis.aclose()

    async def _trip(self, items: Sequence[tuple[str, Asked]]) -> Sequence[Taken]:
        if not self._breaker.lets_through():
            raise ConnectionError("Redis is left alone")
        pipeline = self._redis.pipeline(transaction=False)
        for caller, asked in items:
            arguments = [part for policy, cost in asked for part in (policy.name, policy.window_s, policy.limit, cost)]
            pipeline.eval(SCRIPT, 1, PREFIX + caller, *map(str, arguments))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found: list[Any] = await pipeline.execute()
        except BaseException as error:
            self._breaker.failed()
            if isinstance(error, Exception):
                self._failing.met(f"quotas are counted by each replica alone: {type(error).__name__}: {error}")
            raise
        self._breaker.succeeded()
        self._failing.ended()
        return [Taken(granted == 1, now, tuple(used)) for granted, now, *used in found]
