"""The compiled scores are those of NumPy, to the bit."""

from typing import Any

import numpy as np
import pytest

from openbook.core.topk import canonical_scores, score_error_bound, top_k
from openbook.core.types import NO_HIT, Float32
from openbook.index.shard.rescoring import _widen, rescore

N = 400


def pairs(d: int, spread: int) -> tuple[Float32, Float32]:
    """Queries, one of them all zeros, and vectors: equal ones, opposite ones, zeros, and some whose products cancel."""
    rng = np.random.default_rng(d)
    scale = np.exp2(rng.integers(-spread, spread + 1, d)).astype(np.float32)
    queries, vectors = (rng.standard_normal((n, d)).astype(np.float32) * scale for n in (5, N))
    vectors[:150, : d // 2], vectors[:150, d - d // 2 :] = 1 / queries[0, : d // 2], -1 / queries[0, d - d // 2 :]
    vectors[150:200, rng.permutation(d)[: d // 2]] *= -1
    vectors[200:220], vectors[220:230], vectors[230:240] = vectors[200], 0, -vectors[200]
    queries[4] = 0
    return queries, vectors


def longest(vectors: Float32) -> float:
    return float(np.linalg.norm(vectors.astype(np.float64), axis=1).max())


def of(dtype: Any, vectors: Float32) -> Any:
    """In another dtype, and within its range."""
    limit = float(np.finfo(dtype).max)
    return np.clip(vectors, -limit, limit).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("spread", [0, 1, 40])
@pytest.mark.parametrize("d", [1, 2, 7, 8, 9, 100, 127, 128, 129, 136, 256, 257, 384, 768, 1000, 4096])
def test_it_is_the_head_of_the_list_sorted_by_canonical_scores(d: int, spread: int, dtype: Any) -> None:
    queries, vectors = pairs(d, spread)
    vectors = of(dtype, vectors)
    candidates = np.stack([np.random.default_rng(i).permutation(N) for i in range(len(queries))])
    candidates[2, ::3] = -1
    all_scores = np.stack([canonical_scores(query, vectors.astype(np.float32)) for query in queries])
    scores = np.where(candidates < 0, -np.inf, np.take_along_axis(all_scores, candidates, 1)).astype(np.float32)
    ids = np.where(candidates < 0, NO_HIT, candidates + 7)
    for k in (1, 10, N + 20):
        found = rescore(queries, candidates, vectors, k, max_norm=longest(vectors), first_id=7)
        wanted = top_k(ids, scores, k)
        np.testing.assert_array_equal(found[0], wanted[0])
        assert found[1].tobytes() == wanted[1].tobytes()
    norms = np.linalg.norm(queries.astype(np.float64), axis=1)
    np.testing.assert_allclose(found[2], score_error_bound(d, norms, longest(vectors)), rtol=1e-12)


def test_products_that_cancel_are_added_up_in_the_canonical_order() -> None:
    queries, vectors = pairs(768, 1)
    in_turn = np.cumsum(vectors.astype(np.float64) * queries[0], axis=1)[:, -1].astype(np.float32)
    wanted = canonical_scores(queries[0], vectors)
    assert np.mean(in_turn[:150] != wanted[:150]) > 0.5  # as any other order would have it
    ids, scores, _ = rescore(queries[:1], np.arange(N)[None], vectors, N, max_norm=longest(vectors))
    assert scores.tobytes() == wanted[ids].tobytes()


def test_every_float16_is_what_numpy_makes_of_it() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    numbers = halves.view(np.float16)
    halves, wanted = halves[np.isfinite(numbers)], numbers[np.isfinite(numbers)].astype(np.float32)
    found = np.empty_like(wanted)
    _widen(halves, found)
    np.testing.assert_array_equal(found.view(np.int32), wanted.view(np.int32))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_vectors_need_not_lie_at_a_multiple_of_four(dtype: Any) -> None:
    queries, vectors = pairs(129, 0)
    vectors = of(dtype, vectors)
    moved = np.empty(vectors.nbytes + 1, np.uint8)
    moved[1:] = vectors.view(np.uint8).reshape(-1)
    unaligned = moved[1:].view(dtype).reshape(vectors.shape)
    assert not unaligned.flags.aligned
    candidates = np.tile(np.arange(N), (len(queries), 1))
    for found, wanted in zip(
        rescore(queries, candidates, unaligned, 10, max_norm=longest(vectors)),
        rescore(queries, candidates, vectors, 10, max_norm=longest(vectors)),
        strict=True,
    ):
        np.testing.assert_array_equal(found, wanted)


def test_what_cannot_win_within_the_rounding_bound_is_not_looked_at() -> None:
    vectors = np.eye(4, dtype=np.float32)
    candidates, approximate = np.array([[0, 1, 2, 3]]), np.array([[3, 2, 2, 1]], np.float32)
    queries = np.array([[1, 2, 4, 3]], np.float32)  # had FAISS such scores, it would have lied of the last two
    ids, scores, _ = rescore(queries, candidates, vectors, 2, max_norm=1.0, approximate=approximate)
    assert (ids.tolist(), scores.tolist()) == ([[2, 1]], [[4.0, 2.0]])
    ids, _, _ = rescore(queries, candidates, vectors, 2, max_norm=1.0)
    assert ids.tolist() == [[2, 3]]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_position_that_no_vector_has_is_an_error(dtype: Any) -> None:
    queries, vectors = pairs(8, 0)
    vectors = of(dtype, vectors)
    for position in (N, 1 << 40):
        with pytest.raises(IndexError, match="a position that no vector has"):
            rescore(queries[:1], np.array([[0, position]]), vectors, 1, max_norm=longest(vectors))
