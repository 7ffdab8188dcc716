"""The index tier, found and fit to be searched."""

import asyncio
import logging
from time import monotonic

from openbook.config import IndexClientSettings
from openbook.core.space import Space, check_same_space
from openbook.errors import ShardUnavailable
from openbook.index.client.discovery import Source
from openbook.index.client.sharded import ShardedIndex

log = logging.getLogger(__name__)

POLL_S = 2.0


async def open_index(
    settings: IndexClientSettings, queries: Space, source: Source | None = None, min_coverage: float = 1.0
) -> ShardedIndex:
    """The index tier that the settings name, connected, for queries of one space. The caller closes it.

    Args:
        settings: where servers are and how they are reached.
        queries: what the encoder makes.
        source: in the place of the settings', if they name one that only the caller can read.
        min_coverage: share of the passages that is enough to begin with; 1: a server of each shard.

    Raises:
        InvalidConfig: as `ShardedIndex`.
        ShardUnavailable: too few servers for `min_coverage` answer within `wait_s`.
        SnapshotMismatch: the servers hold no snapshot in common, or one of another space.
    """
    index = ShardedIndex.of(settings, source)
    try:
        await _connect(index, settings.wait_s, min_coverage)
        check_same_space(queries, Space(f"snapshot {index.snapshot_id}", index.encoder_fingerprint, index.dimension))
    except BaseException:
        await index.close()
        raise
    return index


async def _connect(index: ShardedIndex, wait_s: float, min_coverage: float) -> None:
    give_up, told = monotonic() + wait_s, ""
    while True:
        try:
            return await index.connect(min_coverage)
        except ShardUnavailable as error:
            if monotonic() > give_up:
                raise
            if str(error) != told:
                told = str(error)
                log.warning("waiting for the index tier: %s", told)
        await asyncio.sleep(POLL_S)
