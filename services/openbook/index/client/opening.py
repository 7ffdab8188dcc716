"""The index tier, found and fit to be searched."""

from openbook.config import IndexClientSettings
from openbook.core.space import Space, check_same_space
from openbook.index.client.sharded import ShardedIndex


async def open_index(settings: IndexClientSettings, queries: Space) -> ShardedIndex:
    """The index tier that the settings name, connected, for queries of one space. The caller closes it.

    Raises:
        InvalidConfig: as `ShardedIndex`.
        ShardUnavailable: no server of some shard answers.
        SnapshotMismatch: the servers hold no snapshot in common, or one of another space.
    """
    index = ShardedIndex.of(settings)
    try:
        await index.connect()
        check_same_space(queries, Space(f"snapshot {index.snapshot_id}", index.encoder_fingerprint, index.dimension))
    except BaseException:
        await index.close()
        raise
    return index
