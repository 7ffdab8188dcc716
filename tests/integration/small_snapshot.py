"""A snapshot of forty passages, for all who need one of no particular content."""

from pathlib import Path

import numpy as np

from openbook.core.types import Float32, Passage
from openbook.index.building.build import build_snapshot

N, D = 40, 4
VECTORS: Float32 = np.random.default_rng(0).integers(-9, 10, (N, D)).astype(np.float32)  # so that scores tie


def build(folder: Path, n_shards: int = 1) -> Path:
    """The snapshot's folder, within the one given."""
    passages = [Passage(i, f"doc-{i}", f"title {i}", f"text {i}") for i in range(N)]
    build_snapshot(passages, VECTORS, folder / "snapshot", n_shards, "Flat", "encoder", "fingerprint")
    return folder / "snapshot"
