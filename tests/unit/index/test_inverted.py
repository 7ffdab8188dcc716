"""Lists of codes, searched together, give what FAISS gives."""

from pathlib import Path

import faiss
import numpy as np
import pytest

from openbook.core.deadline import Deadline
from openbook.core.types import SearchParameters
from openbook.index.shard.engine import Index, Tuning

N, D, NEVER = 3000, 40, Deadline.never()
rng = np.random.default_rng(0)
CENTRES = rng.standard_normal((30, D))
VECTORS = (CENTRES[rng.integers(0, 30, N)] + 0.3 * rng.standard_normal((N, D))).astype(np.float32)
VECTORS[500:600] = VECTORS[500]  # equal codes
QUERIES = (CENTRES[rng.integers(0, 30, 50)] + 0.3 * rng.standard_normal((50, D))).astype(np.float32)


def read(folder: Path, factory: str, vectors: np.ndarray = VECTORS, of_residuals: bool = True) -> Index:
    index = faiss.index_factory(D, factory, faiss.METRIC_INNER_PRODUCT)
    if not of_residuals:
        index.by_residual = False
    index.train(VECTORS)
    if len(vectors):
        index.add_with_ids(vectors, np.arange(len(vectors)) * 3 + (1 << 33))
    faiss.write_index(index, str(folder / "index"))
    return Index.read(folder / "index")


@pytest.mark.parametrize("of_residuals", [True, False])
@pytest.mark.parametrize("factory", ["IVF16,SQ8", "IVF16_HNSW8,SQ8"])
@pytest.mark.parametrize(("nprobe", "k"), [(1, 1), (1, 400), (5, 40), (16, 10), (16, N + 5)])
def test_they_give_what_faiss_gives_and_a_query_the_same_alone(
    tmp_path: Path, factory: str, of_residuals: bool, nprobe: int, k: int
) -> None:
    index = read(tmp_path, factory, of_residuals=of_residuals)
    assert index._lists is not None
    parameters = SearchParameters(nprobe=nprobe)
    scores, ids = index.search(QUERIES, k, parameters, Tuning(1), NEVER)
    wanted, their_ids = index.search(QUERIES, k, parameters, Tuning(2), NEVER)  # of FAISS
    found = their_ids >= 0
    np.testing.assert_array_equal(ids >= 0, found)
    np.testing.assert_allclose(scores[found], wanted[found], rtol=1e-5, atol=1e-4)
    for row in range(len(QUERIES)):
        mine, theirs = ids[row, found[row]], their_ids[row, found[row]]
        assert len(set(mine)) == len(mine)
        if len(mine) < k:  # all that there is
            assert set(mine) == set(theirs)
        near = np.abs(wanted[row, found[row]] - wanted[row, -1]) < 1e-4  # which of the last come in is rounding
        assert set(theirs[~near]) <= set(mine)
    for i in range(len(QUERIES)):
        alone = index.search(QUERIES[i : i + 1], k, parameters, Tuning(1), NEVER)
        assert alone[0].tobytes() == scores[i].tobytes()
        assert alone[1].tobytes() == ids[i].tobytes()


def test_other_kinds_and_what_is_empty_are_left_to_faiss(tmp_path: Path) -> None:
    assert read(tmp_path, "IVF16,SQ8", VECTORS[:0])._lists is None
    for factory in ("IVF16,SQ6", "IVF16,Flat", "IVF16,PQ8x4fs"):
        assert read(tmp_path, factory)._lists is None


def test_empty_lists_and_lists_that_are_none_hold_nothing(tmp_path: Path) -> None:
    index = read(tmp_path, "IVF16,SQ8", VECTORS[:3])
    assert index._lists is not None
    assert np.count_nonzero(index._lists.sizes == 0) >= 13
    _, ids = index.search(QUERIES[:2], 5, SearchParameters(nprobe=16), Tuning(1), NEVER)
    assert [sorted(row) for row in ids.tolist()] == [[-1, -1, (1 << 33), (1 << 33) + 3, (1 << 33) + 6]] * 2
    nowhere = np.full((2, 3), -1)
    scores, ids = index._lists.search(QUERIES[:2], nowhere, np.zeros((2, 3), np.float32), 5)
    assert (ids == -1).all()
    assert (scores == -np.inf).all()
