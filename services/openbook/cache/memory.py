"""What was used most recently, in process."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

from openbook.telemetry import CACHE_LOOKUPS

V = TypeVar("V")


class MemoryCache(Generic[V]):
    """Least recently used goes first. For one event loop; holds at most `n_max` values, which nobody changes."""

    def __init__(self, n_max: int, tier: str = "memory") -> None:
        self._n_max = n_max
        self._tier = tier
        self._entries: OrderedDict[str, V] = OrderedDict()

    async def get_many(self, keys: Sequence[str]) -> list[V | None]:
        return [self._get(key) for key in keys]

    async def put_many(self, entries: Sequence[tuple[str, V]]) -> None:
        for key, value in entries:
            if isinstance(value, np.ndarray):
                # A copy of its own: a row of a batch would keep the whole batch alive, and nobody may write into it.
                value = value.copy()
                value.flags.writeable = False
            self._entries[key] = value
            self._entries.move_to_end(key)
            if len(self._entries) > self._n_max:
                self._entries.popitem(last=False)

    def _get(self, key: str) -> V | None:
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        CACHE_LOOKUPS.labels(self._tier, "miss" if value is None else "hit").inc()
        return value
