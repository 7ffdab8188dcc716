"""The inverted lists of an `IVFn,SQ8` index, searched for all queries of a batch together.

FAISS goes query by query, decodes every code it meets anew, and a query takes as long in a batch as alone. Here a list
is read for several queries at once, and the decoding is folded into the query: a code c of a component stands for
minimum + (c + 1/2) / 255 * extent (FAISS, ScalarQuantizer, QT_8bit), so its product with a query is a constant plus
that of the codes with query * extent / 255.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from openbook.core.types import NO_HIT, Float32, Int64
from openbook.index.shard.compiled import compiled, prefetch

LEVELS = 255
AHEAD = 4
"""Vectors that are fetched before their turn: the processor itself does not look beyond a page, which holds five."""
LINE = 64
TOGETHER = 6
"""Queries that a vector is multiplied with while it is at hand: of 768 numbers, more do not stay in the first cache."""
POSITION_BITS = 40
"""Of a vector in its list; those above are the list."""


@dataclass(frozen=True, slots=True)
class InvertedLists:
    """Where the codes are, in the memory of an index."""

    memory: NDArray[np.uint8]  # (any,)
    codes_at: Int64  # (nlist,) where in it the codes of each list begin: `d` bytes a vector
    ids_at: Int64  # (nlist,) and their ids: 8 bytes each
    sizes: Int64  # (nlist,)
    minimum: Float32  # (d,), half a step below what a code of 0 stands for
    extent: Float32  # (d,) of what the codes 0 to 255 stand for
    of_residuals: bool  # codes are of what the vectors have beyond their list's centroid

    @property
    def max_norm(self) -> float:
        """Of what is multiplied with a query on the way to a score."""
        return float(np.linalg.norm(self.minimum) + np.linalg.norm(self.extent))

    def search(self, queries: Float32, lists: Int64, centroid_scores: Float32, k: int) -> tuple[Float32, Int64]:
        """Approximate scores and ids of the best k in some lists for each query, both (n, k), -1 where there is none.

        A query's results do not depend on the others.

        Args:
            queries: (n, d).
            lists: (n, nprobe) to look at, -1 for none.
            centroid_scores: (n, nprobe), inner products with their centroids.
            k: at least 1.
        """
        step = self.extent / np.float32(LEVELS)
        constant = np.einsum("ij,j->i", queries, self.minimum + step / 2)[:, None]
        bases = np.broadcast_to(centroid_scores + constant if self.of_residuals else constant, lists.shape)
        scores, ids = np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), NO_HIT)
        _scan(
            queries * step, lists, np.argsort(lists, axis=None), np.ascontiguousarray(bases), self.memory,
            self.codes_at, self.ids_at, self.sizes, scores, ids,
        )  # fmt: skip
        order = np.argsort(-scores, axis=1)
        return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)


@compiled(fastmath={"reassoc", "contract", "nsz"})
def _product(query: Float32, codes: NDArray[np.uint8]) -> np.float32:
    total = np.float32(0)
    for i in range(len(query)):
        total += query[i] * np.float32(codes[i])
    return total


@compiled()
def _replace_least(scores: Float32, ids: Int64, score: float, passage_id: int) -> None:
    """In a heap, whose least is at its root."""
    at, n = 0, len(scores)
    while True:
        child = 2 * at + 1
        if child + 1 < n and scores[child + 1] < scores[child]:
            child += 1
        if child >= n or scores[child] >= score:
            break
        scores[at], ids[at] = scores[child], ids[child]
        at = child
    scores[at], ids[at] = score, passage_id


@compiled(
    "void(Array(float32, 2, 'C', True), Array(int64, 2, 'C', True), int64[::1], Array(float32, 2, 'C', True), "
    "Array(uint8, 1, 'C', True), int64[::1], int64[::1], int64[::1], float32[:, ::1], int64[:, ::1])"
)
def _scan(
    queries: Float32,
    lists: Int64,
    probes: Int64,
    bases: Float32,
    memory: NDArray[np.uint8],
    codes_at: Int64,
    ids_at: Int64,
    sizes: Int64,
    scores: Float32,
    ids: Int64,
) -> None:
    """The (n * nprobe,) probes are sorted by their lists; scores and ids become heaps of the best."""
    (n, nprobe), d = lists.shape, queries.shape[1]
    wanted, base = lists.ravel(), bases.ravel()
    start = 0
    while start < len(probes):
        number, end = wanted[probes[start]], start + 1
        while end < min(len(probes), start + TOGETHER) and wanted[probes[end]] == number:
            end += 1
        together = probes[start:end]
        rows, their_bases = together // nprobe, base[together]
        for position in range(sizes[number] if 0 <= number < len(sizes) else 0):
            begin = codes_at[number] + position * d
            codes = memory[begin : begin + d]
            for i in range(begin + AHEAD * d, begin + (AHEAD + 1) * d, LINE):
                prefetch(memory, i)
            for i in range(end - start):
                row = rows[i]
                score = their_bases[i] + _product(queries[row], codes)
                if score > scores[row, 0]:
                    _replace_least(scores[row], ids[row], score, number << POSITION_BITS | position)
        start = end
    for row in range(n):
        for column in range(scores.shape[1]):
            found = ids[row, column]
            if found >= 0:
                at = ids_at[found >> POSITION_BITS] + 8 * (found & ((1 << POSITION_BITS) - 1))
                ids[row, column] = memory[at : at + 8].view(np.int64)[0]
