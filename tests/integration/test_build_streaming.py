"""Snapshots larger than memory: passages and vectors that exist only while the build looks at them."""

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from openbook.core.deadline import Deadline
from openbook.core.types import Float32, Passage
from openbook.index.building.build import _training_rows, _training_sample, build_snapshot
from openbook.index.shard.engine import Index
from openbook.index.shard.shard import Shard

D = 32


class Vectors:
    """(n, D) float32, made when sliced; remembers the most rows asked for at once."""

    ndim, dtype, most = 2, np.dtype(np.float32), 0

    def __init__(self, n: int) -> None:
        self.shape = (n, D)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Float32:
        chosen = np.arange(len(self))[rows]
        self.most = max(self.most, len(chosen))
        return np.sin(chosen[:, None] * np.arange(1, D + 1)).astype(np.float32)


class Passages(Sequence[Passage]):
    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: Any) -> Any:
        return Passage(i, f"d{i}", f"title {i}", f"text {i}")


def test_a_build_holds_no_more_of_a_larger_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openbook.index.building.build.ROWS_AT_ONCE", 500)
    monkeypatch.setattr("openbook.index.building.build.TRAINING_ROWS", 1000)
    peaks = []
    for n in (2_000, 4_000, 32_000):  # with the first, all is imported
        vectors: Any = Vectors(n)
        tracemalloc.start()
        build_snapshot(Passages(n), vectors, tmp_path / str(n), 2, "Flat", "made", "made")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert vectors.most == 500
        _training_sample(vectors, np.float32, _training_rows("OPQ8,IVF4_HNSW32,SQ8"))
        assert vectors.most == 1000
    assert _training_rows("IVF100,SQ8") == 3900  # 39 for each cell
    whole_bytes = 32_000 * D * 4
    assert peaks[2] - peaks[1] < whole_bytes / 10, peaks
    shard = Shard(tmp_path / "32000", 1)
    assert shard.fetch([31_999])[0].text == "text 31999"
    np.testing.assert_array_equal(shard.fetch_vectors([20_000]), Vectors(32_000)[20_000:20_001])
    of_shard = Vectors(32_000)[16_000:]
    best = 16_000 + int((of_shard @ of_shard[123]).argmax())
    assert shard.search(of_shard[123:124], 1, deadline=Deadline.never()).ids.tolist() == [[best]]


@pytest.mark.parametrize("factory", ["HNSW16", "IVF16_HNSW16,SQ8"])
def test_an_index_has_the_same_bytes_whatever_the_number_of_threads(factory: str, tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((6000, D)).astype(np.float32)
    made = set()
    before = faiss.omp_get_max_threads()
    try:
        for n_threads in (1, 2, 4, 4):
            faiss.omp_set_num_threads(n_threads)
            index = Index.from_factory(factory, D)
            index.train(vectors)
            index.write_with(iter(np.split(vectors, 3)), tmp_path / "index")
            made.add((tmp_path / "index").read_bytes())
    finally:
        faiss.omp_set_num_threads(before)
    assert len(made) == 1
