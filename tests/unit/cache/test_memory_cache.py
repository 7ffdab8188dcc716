import asyncio

import numpy as np

from openbook.cache.memory import MemoryCache
from openbook.core.types import Float32
from openbook.telemetry import CACHE_LOOKUPS

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def test_the_least_recently_used_goes_first() -> None:
    async def scenario() -> None:
        for use in (lambda cache: cache.get_many(["a"]), lambda cache: cache.put_many([("a", ROWS[0])])):
            cache = MemoryCache[Float32](n_max=2)
            await cache.put_many([("a", ROWS[0]), ("b", ROWS[1])])
            await use(cache)
            await cache.put_many([("c", ROWS[2])])
            a, b, c = await cache.get_many(["a", "b", "c"])
            assert a is not None
            assert b is None
            assert c is not None

    asyncio.run(scenario())


def test_what_is_looked_up_is_counted_where_it_was_looked_for() -> None:
    async def scenario() -> None:
        cache = MemoryCache[Float32](2, "a tier")
        await cache.put_many([("a", ROWS[0])])
        await cache.get_many(["a", "b", "c"])

    asyncio.run(scenario())
    assert [CACHE_LOOKUPS.labels("a tier", outcome)._value.get() for outcome in ("hit", "miss")] == [1, 2]


def test_entries_are_copies_that_nobody_can_alter() -> None:
    async def scenario() -> None:
        cache, batch = MemoryCache(n_max=2), ROWS.copy()
        await cache.put_many([("a", batch[0])])
        batch[0] = -1
        (a,) = await cache.get_many(["a"])
        assert a is not None
        assert a.base is None
        assert not a.flags.writeable
        np.testing.assert_array_equal(a, ROWS[0])

    asyncio.run(scenario())
