"""The exact best of what FAISS found, in one pass of compiled code: a dozen calls of NumPy take six times as long."""

import math
from typing import cast

import numpy as np
from numpy.typing import NDArray

from openbook.core.topk import score_error_bound
from openbook.core.types import NO_HIT, Float32, Float64, Int64
from openbook.index.disk.arrays import Exact
from openbook.index.shard.compiled import compiled, prefetch

ROWS = "Array(float32, 2, 'C', True, aligned=False)"  # in a mapped index they need not lie at a multiple of four
HALVES = "Array(uint16, 2, 'C', True, aligned=False)"
SIGNATURE = (
    "float64[:](Array(float32, 2, 'C', True), Array(float32, 2, 'C', True), Array(int64, 2, 'C', True), "
    f"{ROWS}, {HALVES}, float64, float64, int64, boolean, int64[:, ::1], float32[:, ::1])"
)
NO_HALVES, NONE = np.empty((0, 0), np.uint16), np.empty((0, 0), np.float32)
SUMMED_IN_TURN = 128  # numbers
SPARSELY = 64
"""Of so many numbers one is fetched before a vector's turn; the processor then finds the others itself."""


@compiled(fastmath={"reassoc", "contract"})
def _product(query: Float32, vector: Float32) -> float:
    """The inner product of two (d,) vectors in float64, added up in any order."""
    total = 0.0
    for i in range(len(query)):
        total += np.float64(query[i]) * np.float64(vector[i])
    return total


@compiled()
def _canonical(query: Float32, vector: Float32) -> float:
    """The same in the order of `canonical_scores`, which is NumPy's: halves of halves, and these in eight sums."""
    n = len(query)
    if n > SUMMED_IN_TURN:
        half = n // 2 - n // 2 % 8
        return _canonical(query[:half], vector[:half]) + _canonical(query[half:], vector[half:])
    in_eights = n - n % 8
    a = b = c = d = e = f = g = h = -0.0
    for i in range(0, in_eights, 8):
        a += np.float64(query[i]) * np.float64(vector[i])
        b += np.float64(query[i + 1]) * np.float64(vector[i + 1])
        c += np.float64(query[i + 2]) * np.float64(vector[i + 2])
        d += np.float64(query[i + 3]) * np.float64(vector[i + 3])
        e += np.float64(query[i + 4]) * np.float64(vector[i + 4])
        f += np.float64(query[i + 5]) * np.float64(vector[i + 5])
        g += np.float64(query[i + 6]) * np.float64(vector[i + 6])
        h += np.float64(query[i + 7]) * np.float64(vector[i + 7])
    total = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for i in range(in_eights, n):
        total += np.float64(query[i]) * np.float64(vector[i])
    return total


@compiled()
def _widen(halves: NDArray[np.uint16], numbers: Float32) -> None:
    """The bits of (d,) float16 as float32, exactly.

    Both have a sign, an exponent and a fraction, only of other widths: moved to their places the bits are a float32
    whose exponent counts from another zero, so that it is 2^112 times too small, also where it is denormal. Numba knows
    no float16 on a CPU. Infinity and NaN, which no snapshot holds, would become numbers.
    """
    for i in range(len(halves)):
        half = np.uint32(halves[i])
        bits = np.uint32((half & np.uint32(0x8000)) << np.uint32(16) | (half & np.uint32(0x7FFF)) << np.uint32(13))
        numbers[i] = bits.view(np.float32) * np.float32(2.0**112)


@compiled(SIGNATURE)
def _rescore(
    queries: Float32,
    approximate: Float32,
    candidates: Int64,
    vectors: Float32,
    halves: NDArray[np.uint16],
    error: float,
    error_of_norm: float,
    first_id: int,
    prune: bool,
    ids: Int64,
    scores: Float32,
) -> Float64:
    n, k = ids.shape
    errors = np.empty(n)
    d, n_vectors, widened = queries.shape[1], max(len(vectors), len(halves)), np.empty(queries.shape[1], np.float32)
    for row in range(n):
        query = queries[row]
        errors[row] = error + error_of_norm * math.sqrt(_product(query, query))
        # In float64 no order errs by more than 2^-29 of what float32 may.
        least, doubt = approximate[row, k - 1] - 2 * errors[row] if prune else -np.inf, 2.0**-28 * errors[row]
        found = 0
        for column in range(candidates.shape[1]):
            position = candidates[row, column]
            if position < 0 or (prune and approximate[row, column] < least):
                continue
            if position >= n_vectors:
                raise IndexError("the index gave a position that no vector has")
            ahead = candidates[row, column + 1] * d if column + 1 < candidates.shape[1] else -1
            if len(halves):
                for i in range(0, d if ahead >= 0 else 0, 2 * SPARSELY):
                    prefetch(halves, ahead + i)
                _widen(halves[position], widened)
                total = _product(query, widened)
            else:
                for i in range(0, d if ahead >= 0 else 0, SPARSELY):
                    prefetch(vectors, ahead + i)
                total = _product(query, vectors[position])
            score = np.float32(total)
            if score == 0 or np.float32(total - doubt) != np.float32(total + doubt):
                exact = _canonical(query, widened) if len(halves) else _canonical(query, vectors[position])
                score = np.float32(0.0 + exact)  # NumPy begins with 0, never -0
            # Those that FAISS gave come nearly in order: mostly this one goes to the end, or nowhere.
            passage_id, at = position + first_id, found
            while at and (score, -passage_id) > (scores[row, at - 1], -ids[row, at - 1]):
                at -= 1
            if at < k:
                found = min(found + 1, k)
                for i in range(found - 1, at, -1):
                    ids[row, i], scores[row, i] = ids[row, i - 1], scores[row, i - 1]
                ids[row, at], scores[row, at] = passage_id, score
        ids[row, found:], scores[row, found:] = NO_HIT, -np.inf
    return errors


def rescore(
    queries: Float32,
    candidates: Int64,
    vectors: Exact,
    k: int,
    *,
    max_norm: float,
    first_id: int = 0,
    approximate: Float32 | None = None,
) -> tuple[Int64, Float32, Float64]:
    """The best k of (n, m) positions in (N, d) vectors by their canonical scores with (n, d) queries.

    Adds the products up in whatever order is fast, and in the canonical one only where float32 could round otherwise:
    of some thousand pairs that is hardly one. A candidate of -1 is none; position 0 has `first_id`; no vector is longer
    than `max_norm`. Given the float32 inner products with the candidates, descending, m at least k, what scores less
    than the k-th by more than both may err is not looked at.

    Returns:
        ids and scores, (n, k) both, by (score descending, id ascending), ending in empty slots where there are fewer;
        and how far a float32 inner product can lie from the canonical score, (n,).
    """
    shape = len(queries), k
    ids, scores = np.empty(shape, np.int64), np.empty(shape, np.float32)
    error = score_error_bound(queries.shape[1], 0.0, max_norm)
    error_of_norm = score_error_bound(queries.shape[1], 1.0, max_norm) - error  # it is linear in the query's norm
    is_half = vectors.dtype == np.float16
    wide, halves = (NONE, vectors.view(np.uint16)) if is_half else (cast(Float32, vectors), NO_HALVES)
    errors = _rescore(
        queries, NONE if approximate is None else approximate, candidates, wide, halves, error, error_of_norm, first_id,
        approximate is not None, ids, scores,
    )  # fmt: skip
    return ids, scores, errors
