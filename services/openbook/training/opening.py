"""The retriever that a run's settings ask for."""

import torch

from openbook.core.space import Space, check_same_space
from openbook.training.retrieval import Given, LiveIndex, MemoryIndex, Nothing, PassageFinder
from openbook.training.settings import RetrieverSettings


def open_retriever(settings: RetrieverSettings, queries: Space | None, device: torch.device) -> PassageFinder:
    """Ready to find passages. `queries` is what the query encoder asks for; None if there is none.

    Raises:
        SnapshotMismatch: the index holds embeddings of another space.
        InvalidSnapshot, ShardUnavailable: it cannot be read.
    """
    if settings.kind == "given":
        return Given()
    if settings.kind == "none":
        return Nothing()
    if settings.kind == "bm25":
        from openbook.training.bm25 import Bm25

        assert settings.snapshot is not None
        return Bm25(settings.snapshot)
    assert queries is not None
    if settings.snapshot is None:
        return LiveIndex(settings.index, settings.retry_s, queries)
    from openbook.index.disk.snapshot import Snapshot

    held = Snapshot.open(settings.snapshot).manifest
    check_same_space(queries, Space(f"snapshot {held.snapshot_id}", held.encoder_fingerprint, held.dimension))
    return MemoryIndex(settings.snapshot, device)
