"""The index tier, found and fit to be searched."""

from openbook.config import IndexClientSettings
from openbook.core.space import Space, check_same_space
from openbook.index.client.discovery import Source
from openbook.index.client.sharded import ShardedIndex


async def open_index(settings: IndexClientSettings, queries: Space, source: Source | None = None) -> ShardedIndex:
    """The index tier that the settings name, connected, for queries of one space. The caller closes it.

    Args:
        settings: where servers are and how they are reached.
        queries: what the encoder makes.
        source: in the place of the settings', if they name one that only the caller can read.

    Raises:
        InvalidConfig: as `ShardedIndex`.
        ShardUnavailable: no server of some shard answers.
        SnapshotMismatch: the servers hold no snapshot in common, or one of another space.
    """
    index = ShardedIndex.of(settings, source)
    try:
        await index.connect()
        check_same_space(queries, Space(f"snapshot {index.snapshot_id}", index.encoder_fingerprint, index.dimension))
    except BaseException:
        await index.close()
        raise
    return index
