import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from openbook.core.topk import (
    canonical_scores,
    check_coverage,
    check_search,
    check_without,
    merge,
    score_error_bound,
    top_k,
)
from openbook.core.types import NO_HIT, Coverage, Float32, Hits
from openbook.errors import InvalidRequest, ShardUnavailable, SnapshotMismatch

FINITE = st.floats(-(2.0**40), 2.0**40, width=32)


def bits(scores: Float32) -> list[int]:
    return np.ascontiguousarray(scores).view(np.int32).ravel().tolist()


def exact(query: Float32, vector: Float32) -> Fraction:
    return sum((Fraction(a) * Fraction(b) for a, b in zip(query.tolist(), vector.tolist(), strict=True)), Fraction())


@pytest.mark.parametrize("d", [1, 2, 7, 8, 9, 127, 128, 129, 384, 768, 1000, 4096])
def test_a_score_has_the_same_bits_in_any_company_and_any_layout(d: int) -> None:
    rng = np.random.default_rng(d)
    query, vectors = rng.standard_normal(d).astype(np.float32), rng.standard_normal((300, d)).astype(np.float32)
    # Products that cancel leave nothing but rounding errors, which any other order of summation would change.
    shuffled, half = rng.permutation(d), d // 2
    query[shuffled[half : 2 * half]] = query[shuffled[:half]]
    vectors[:, shuffled[half : 2 * half]] = -vectors[:, shuffled[:half]]
    vectors[:, shuffled[2 * half :]] = 0
    together = canonical_scores(query, vectors)
    alone = np.concatenate([canonical_scores(query, vectors[i : i + 1]) for i in range(300)])
    assert bits(alone) == bits(together)
    assert bits(canonical_scores(query, np.asfortranarray(vectors))) == bits(together)
    assert bits(canonical_scores(query, vectors[::-3])) == bits(together[::-3])
    assert bits(canonical_scores(np.repeat(query, 2)[::2], np.repeat(vectors, 2, axis=1)[:, ::2])) == bits(together)


@given(hnp.arrays(np.int32, (2, 33), elements=st.integers(-500, 500)), st.integers(-20, 20))
def test_a_score_of_exact_numbers_is_exact(numbers: np.ndarray, exponent: int) -> None:
    query, vector = np.ldexp(numbers.astype(np.float32), exponent)
    expected = int(numbers[0].astype(int) @ numbers[1].astype(int)) * 4.0**exponent
    assert canonical_scores(query, vector[None]).tolist() == [expected]


@settings(max_examples=50)
@example(np.full((2, 17), 2.0**-75, np.float32))  # whose products are too small for float32
@given(hnp.arrays(np.float32, (2, 17), elements=FINITE))
def test_no_float32_summation_is_further_off_than_the_bound(pair: Float32) -> None:
    query, vector = pair
    bound = score_error_bound(17, *np.linalg.norm(pair.astype(np.float64), axis=1).tolist())
    score = float(canonical_scores(query, vector[None])[0])
    assert abs(Fraction(score) - exact(query, vector)) <= Fraction(bound)
    one_by_one = np.float32(0)
    for product in query * vector:
        one_by_one += product
    for approximate in (one_by_one, np.float32(query @ vector), np.sum((query * vector)[::-1])):
        assert abs(float(approximate) - score) <= bound


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from([-1.5, -0.0, 0.0, 1.0, 1.5])), max_size=30),
    st.integers(1, 40),
)
def test_top_k_is_the_head_of_the_sorted_list(pairs: list[tuple[int, float]], k: int) -> None:
    ids = np.array([[i for i, _ in pairs]], np.int64).reshape(1, -1)
    scores = np.array([[s for _, s in pairs]], np.float32).reshape(1, -1)
    best_ids, best_scores = top_k(ids, scores, k)
    expected = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:k] + [(NO_HIT, -math.inf)] * (k - len(pairs))
    assert list(zip(best_ids[0].tolist(), best_scores[0].tolist(), strict=True)) == expected
    assert [best_ids.dtype.name, best_scores.dtype.name] == ["int64", "float32"]


@given(st.data())
def test_merging_shards_is_top_k_of_them_all(data: st.DataObject) -> None:
    n, total, k = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 30)), data.draw(st.integers(1, 40))
    scores = data.draw(hnp.arrays(np.float32, (n, total), elements=st.sampled_from([0.0, 0.25, 0.5])))
    ids = np.tile(np.arange(total), (n, 1))
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=4)))
    ranges = list(zip([0, *cuts], [*cuts, total], strict=True))
    shards = [Hits(*top_k(ids[:, a:b], scores[:, a:b], k), "one") for a, b in data.draw(st.permutations(ranges))]
    merged, expected = merge(shards, k), top_k(ids, scores, k)
    np.testing.assert_array_equal(merged.ids, expected[0])
    assert bits(merged.scores) == bits(expected[1])
    assert merged.snapshot_id == "one"


def test_shards_of_two_snapshots_are_never_merged() -> None:
    hits = [Hits(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32), name) for name in ("new", "old")]
    with pytest.raises(SnapshotMismatch, match="new, old"):
        merge(hits, 1)


@pytest.mark.parametrize(
    ("queries", "k", "message"),
    [
        (np.ones((1, 3)), 0, r"k must be 1\.\.9, got 0"),
        (np.ones((1, 3)), -1, r"k must be 1\.\.9, got -1"),
        (np.ones((1, 3)), 10, r"k must be 1\.\.9, got 10"),
        (np.ones((0, 3)), 1, r"1\.\.4 rows, got an array of shape \(0, 3\)"),
        (np.ones((5, 3)), 1, r"1\.\.4 rows, got an array of shape \(5, 3\)"),
        (np.ones(3), 1, r"1\.\.4 rows, got an array of shape \(3,\)"),
        (np.ones((1, 2)), 1, "dimension 3, got 2"),
        (np.array([[1, 1, 1], [1, np.nan, 1]]), 1, "NaN or infinity in row 1"),
        (np.array([[1, 1, -np.inf]]), 1, "NaN or infinity in row 0"),
    ],
)
def test_what_cannot_be_searched_for_is_refused_by_name(queries: np.ndarray, k: int, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_search(queries.astype(np.float32), k, dimension=3, max_k=9, max_rows=4)


def test_large_queries_are_searched_for_up_to_a_norm() -> None:
    """Though their squares are too large for float32."""
    queries = np.array([[1, 0, 0], [1e30, 1e30, 0]], np.float32)
    assert check_search(queries, 1, dimension=3, max_k=9, max_rows=4).tolist() == queries.tolist()
    assert len(check_search(queries, 1, dimension=3, max_k=9, max_rows=4, max_norm=1.5e30)) == 2
    with pytest.raises(InvalidRequest, match=r"norms up to 1.4e\+30, got 1.41421e\+30 in row 1"):
        check_search(queries, 1, dimension=3, max_k=9, max_rows=4, max_norm=1.4e30)


def test_a_query_may_be_as_long_as_the_longest_and_no_longer() -> None:
    for norm in (1.0, 0.5):
        check_search(np.array([[0, norm, 0]], np.float32), 1, dimension=3, max_k=9, max_rows=4, max_norm=1.0)
    with pytest.raises(InvalidRequest, match=r"norms up to 1, got 1\.25 in row 0"):
        check_search(np.array([[0, 1.25, 0]], np.float32), 1, dimension=3, max_k=9, max_rows=4, max_norm=1.0)


def test_whole_coverage_is_that_of_all_shards_though_the_one_that_lacks_be_empty() -> None:
    coverage = Coverage(4, 4, (1,))
    check_coverage(coverage, 0.99)
    with pytest.raises(ShardUnavailable, match="shard 1 does not answer"):
        check_coverage(coverage, 1.0)
    check_coverage(Coverage(2, 4, (1,)), 0.5)


def test_what_is_left_out_is_looked_for_too() -> None:
    check_without(7, (1, 2, 2), 9)
    with pytest.raises(InvalidRequest, match="must be at most 9, got 8 and 2"):
        check_without(8, (1, 2, 2), 9)


def test_hits_of_one_shard_alone_tell_what_they_cover() -> None:
    hits = Hits(np.zeros((1, 1), np.int64), np.zeros((1, 1), np.float32), "s")
    assert [merge([hits], k, Coverage(1, 2, (1,))).coverage.share for k in (1, 2)] == [0.5, 0.5]


def test_queries_must_be_float32() -> None:
    with pytest.raises(InvalidRequest, match="float32, got float64"):
        check_search(np.ones((1, 3)), 1, dimension=3, max_k=9, max_rows=4)
