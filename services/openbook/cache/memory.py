"""The most recently used embeddings, in process."""

from collections import OrderedDict
from collections.abc import Sequence

from openbook.core.types import Float32
from openbook.telemetry import CACHE_LOOKUPS


class MemoryCache:
    """Least recently used goes first. For one event loop; holds at most `n_max` embeddings."""

    def __init__(self, n_max: int) -> None:
        self._n_max = n_max
        self._entries: OrderedDict[str, Float32] = OrderedDict()

    async def get_many(self, keys: Sequence[str]) -> list[Float32 | None]:
        return [self._get(key) for key in keys]

    async def put_many(self, entries: Sequence[tuple[str, Float32]]) -> None:
        for key, embedding in entries:
            # A copy of its own: a row of a batch would keep the whole batch alive, and nobody may write into it.
            kept = embedding.copy()
            kept.flags.writeable = False
            self._entries[key] = kept
            self._entries.move_to_end(key)
            if len(self._entries) > self._n_max:
                self._entries.popitem(last=False)

    def _get(self, key: str) -> Float32 | None:
        embedding = self._entries.get(key)
        if embedding is not None:
            self._entries.move_to_end(key)
        CACHE_LOOKUPS.labels("memory", "miss" if embedding is None else "hit").inc()
        return embedding
