"""Index files that are written through little memory are those that FAISS writes."""

import errno
from pathlib import Path

import numpy as np
import pytest
from small_disk import files_of_at_most

from openbook.index.shard.engine import Index

D = 5


@pytest.mark.parametrize("factory", ["Flat", "HNSW4", "SQ8"])
@pytest.mark.parametrize("n", [0, 1, 300])
def test_blocks_give_the_bytes_of_all_at_once(factory: str, n: int, tmp_path: Path) -> None:
    vectors = np.random.default_rng(n).standard_normal((n, D)).astype(np.float32)
    index, other = Index.from_factory(factory, D), Index.from_factory(factory, D)
    for each in (index, other):
        each.train(np.eye(D, dtype=np.float32))
    index.write_with((vectors[i : i + 128] for i in range(0, n, 128)), tmp_path / "blocks")
    other.add(vectors)
    other.write(tmp_path / "at_once")
    assert len(Index.read(tmp_path / "blocks")) == n
    if factory != "HNSW4":  # its graph depends on who comes with whom
        assert (tmp_path / "blocks").read_bytes() == (tmp_path / "at_once").read_bytes()


def test_a_full_disk_is_told_as_others_tell_it(tmp_path: Path) -> None:
    index = Index.from_factory("Flat", D)
    index.add(np.zeros((5000, D), np.float32))
    with files_of_at_most(10_000), pytest.raises(OSError, match="File too large") as raised:
        index.write(tmp_path / "index")
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(tmp_path / "index"))
    with pytest.raises(RuntimeError, match="No such file"):
        index.write(tmp_path / "none" / "index")
