"""What an index server says of itself."""

from openbook.index.server.held import HeldSnapshots
from openbook.index.shard.shard import Shard
from openbook.v1 import index_pb2


def info(held: HeldSnapshots[Shard]) -> index_pb2.InfoResponse:
    """What this server holds, and its limits."""
    shard = held.current
    return index_pb2.InfoResponse(
        snapshot_id=shard.manifest.snapshot_id,
        shard=shard.number,
        n_shards=len(shard.manifest.shards),
        n_passages=shard.n_passages,
        first_id=shard.first_id,
        dimension=shard.manifest.dimension,
        encoder=shard.manifest.encoder,
        encoder_fingerprint=shard.manifest.encoder_fingerprint,
        factory=shard.manifest.factory,
        max_k=shard.max_k,
        max_rows=shard.max_rows,
        held=[_held_snapshot(sequence, each) for sequence, each in held.held()],
    )


def _held_snapshot(sequence: int, shard: Shard) -> index_pb2.HeldSnapshot:
    manifest = shard.manifest
    return index_pb2.HeldSnapshot(
        snapshot_id=manifest.snapshot_id,
        sequence=sequence,
        n_shards=len(manifest.shards),
        n_passages=shard.n_passages,
        first_id=shard.first_id,
        dimension=manifest.dimension,
        encoder=manifest.encoder,
        encoder_fingerprint=manifest.encoder_fingerprint,
        factory=manifest.factory,
        n_passages_total=manifest.n_passages,
        created_at=manifest.created_at,
        recall=manifest.recall.by_k() if manifest.recall else {},
    )
