"""A scan over 8-bit codes of a Flat shard's vectors: it leaves out what cannot be among a query's best k.

The search of one query reads every vector, so the speed of memory limits it; codes are a quarter of the vectors.

A vector is v = m + s c + r: m is the centre of the shard, c are whole numbers from -127 to 127, s is a scale of the
vector's own, r is what rounding left. A query is q = t p + e, with p whole numbers of 16 bits. So

    q·v = q·m + s t p·c + s e·c + q·r,  and by Cauchy and Schwarz  |s e·c + q·r| <= s |e| 127 sqrt(d) + |q| |r|.

p·c is exact in int32, because 127 |p|_1 < 2^31. |r| is stored; it bounds whatever c and s are. The rest is computed in
float64 from numbers up to 4 |q| max_norm: its rounding stays below `score_error_bound`, which is float32's, by a factor
of millions. That bound also covers the way from q·v to the canonical score. Twice the bound is added, and then every
canonical score lies between its pair's `low` and `high`. Let L be the k-th greatest low of a query: k vectors score at
least L, so a vector with a high below L scores less than each of them, and does not even tie.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from openbook.core.deadline import Deadline
from openbook.core.topk import score_error_bound
from openbook.core.types import NO_HIT, Float32, Float64, Int64
from openbook.index.disk.arrays import new_array, read_array
from openbook.index.disk.snapshot import CENTRE, CODES, SCALES, VECTORS
from openbook.index.shard.compiled import compiled, dot, prefetch
from openbook.index.shard.engine import turn
from openbook.index.shard.memory import in_huge_pages

GREATEST_CODE = 127
GREATEST_OF_QUERY = (1 << 15) - 1
GREATEST_SUM = 16_900_000  # of |p|, before its d <= 4096 numbers are rounded: 127 (16,900,000 + 2048) < 2^31
ROWS_AT_ONCE = 8192
CACHE_LINE = 64
AHEAD = 8192
"""Bytes of codes that are fetched before their turn. Processors do so by themselves, but not beyond a page of 4096."""
CONTENDERS_SHARE = 4
"""One vector of so many may be a contender: scoring more of them would take as long as FAISS takes for all."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The codes of the N vectors of a shard."""

    codes: NDArray[np.int8]  # (N, d)
    scales: Float64  # (N, 2): s and |r|
    centre: Float32  # (d,)
    max_norm: float  # of the vectors

    @classmethod
    def read(cls, folder: Path, shape: tuple[int, ...], max_norm: float, huge_pages: bool = False) -> "Scan":
        """What `write` wrote for vectors of this shape, memory mapped; with `huge_pages`, codes in memory of their own.

        Raises:
            InvalidSnapshot: it is not of vectors of this shape.
        """
        n, d = shape
        codes = read_array(folder / CODES, np.int8, (n, d))
        scales = read_array(folder / SCALES, np.float64, (n, 2))
        centre = read_array(folder / CENTRE, np.float32, (d,))
        if huge_pages:
            codes = np.array(codes)
            in_huge_pages(codes)
        return cls(codes, scales, centre, max_norm)

    def first(self, n: int) -> "Scan":
        """That of the first n vectors."""
        return Scan(self.codes[:n], self.scales[:n], self.centre, self.max_norm)

    def contenders(self, queries: Float32, k: int, deadline: Deadline) -> Int64 | None:
        """Positions of all vectors that may be among the best k of each of (n, d) queries by canonical score.

        As (n, m), each row ascending and then -1; None if some query has too many for a scan to pay.

        Raises:
            DeadlineExceeded: it was not this search's turn in time.
        """
        n, capacity = len(queries), len(self.codes) // CONTENDERS_SHARE
        if 2 * k > capacity:
            return None
        positions, highs = np.empty((n, capacity), np.int64), np.empty((n, capacity))
        lows, counts = np.full((n, k), -np.inf), np.zeros(n, np.int64)
        with turn(deadline):
            whole, terms = self._encoded(queries)
            if not _scan(whole, terms, self.codes, self.scales, positions, highs, lows, counts):
                return None
        m = counts.max()
        found: Int64 = np.where(np.arange(m) < counts[:, None], positions[:, :m], NO_HIT)
        return found

    def _encoded(self, queries: Float32) -> tuple[NDArray[np.int16], Float64]:
        """For each query p, and as its terms q·m, t, |q|, |e| 127 sqrt(d) and what all rounding may come to."""
        exact, d = queries.astype(np.float64), queries.shape[1]
        absolute = np.abs(exact)
        t = np.maximum(absolute.max(axis=1) / GREATEST_OF_QUERY, absolute.sum(axis=1) / GREATEST_SUM)
        whole = np.rint(exact / np.where(t > 0, t, 1)[:, None])
        norm, lost = np.linalg.norm(exact, axis=1), np.linalg.norm(exact - t[:, None] * whole, axis=1)
        rounding = 2 * score_error_bound(d, norm, self.max_norm)
        base = np.einsum("ij,j->i", exact, self.centre.astype(np.float64))
        terms = np.stack([base, t, norm, lost * GREATEST_CODE * d**0.5, rounding], axis=1)
        return whole.astype(np.int16), terms


def write(folder: Path) -> None:
    """Encode the vectors of a shard's folder, beside them. Raises StartupError: the disk has no room for the codes."""
    vectors = np.load(folder / VECTORS, mmap_mode="r")
    n, d = vectors.shape
    blocks = [slice(start, start + ROWS_AT_ONCE) for start in range(0, n, ROWS_AT_ONCE)]
    total = sum((vectors[block].sum(axis=0, dtype=np.float64) for block in blocks), start=np.zeros(d))
    centre = (total / max(n, 1)).astype(np.float32)
    codes, scales = new_array(folder / CODES, np.int8, (n, d)), new_array(folder / SCALES, np.float64, (n, 2))
    for block in blocks:
        codes[block], scales[block] = encode(vectors[block], centre)
    np.save(folder / CENTRE, centre)


def encode(vectors: Float32, centre: Float32) -> tuple[NDArray[np.int8], Float64]:
    """Codes and scales of (n, d) vectors as a `Scan` has them."""
    beyond = vectors.astype(np.float64) - centre
    scale = np.abs(beyond).max(axis=1) / GREATEST_CODE
    codes = np.rint(beyond / np.where(scale > 0, scale, 1)[:, None])
    lost = np.linalg.norm(beyond - scale[:, None] * codes, axis=1)
    return codes.astype(np.int8), np.stack([scale, lost], axis=1)


@compiled()
def _product(query: NDArray[np.int16], codes: NDArray[np.int8]) -> np.int32:
    """In 32 bits throughout, which processors multiply and add up by the dozen."""
    found, done = dot(query, codes)
    total = np.int32(found)
    for i in range(done, len(query)):
        total = np.int32(total + np.int32(query[i]) * np.int32(codes[i]))
    return total


@compiled()
def _kept(positions: Int64, highs: Float64, count: int, least: float) -> int:
    """Move those whose high is at least `least` to the front; how many they are."""
    kept = 0
    for i in range(count):
        if highs[i] >= least:
            positions[kept], highs[kept] = positions[i], highs[i]
            kept += 1
    return kept


@compiled(
    "boolean(int16[:, ::1], float64[:, ::1], Array(int8, 2, 'C', True), Array(float64, 2, 'C', True), int64[:, ::1], "
    "float64[:, ::1], float64[:, ::1], int64[::1])"
)
def _scan(
    queries: NDArray[np.int16],
    terms: Float64,
    codes: NDArray[np.int8],
    scales: Float64,
    positions: Int64,
    highs: Float64,
    lows: Float64,
    counts: Int64,
) -> bool:
    """Fills positions and highs of each query's contenders, counts them, and stops where they are too many: False.

    Lows, the k greatest in ascending order, begin as -inf.
    """
    (n, capacity), k, d = positions.shape, lows.shape[1], codes.shape[1]
    for position in range(len(codes)):
        for at in range(0, d, CACHE_LINE):
            prefetch(codes, position * d + at + AHEAD)
        scale, lost = scales[position, 0], scales[position, 1]
        for row in range(n):
            score = terms[row, 0] + scale * terms[row, 1] * _product(queries[row], codes[position])
            error = terms[row, 2] * lost + terms[row, 3] * scale + terms[row, 4]
            if score + error < lows[row, 0]:
                continue
            if counts[row] == capacity:  # most were contenders only until better ones came
                counts[row] = _kept(positions[row], highs[row], capacity, lows[row, 0])
                if 2 * counts[row] > capacity:
                    return False
            positions[row, counts[row]], highs[row, counts[row]] = position, score + error
            counts[row] += 1
            low, at = score - error, 0
            while at < k and lows[row, at] < low:
                if at:
                    lows[row, at - 1] = lows[row, at]
                at += 1
            if at:
                lows[row, at - 1] = low
    for row in range(n):
        counts[row] = _kept(positions[row], highs[row], counts[row], lows[row, 0])
    return True
