"""Scores and the best k by them, to the bit the same whatever the batch, the shard or the order of the rows."""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from openbook.core.types import NO_HIT, UNKNOWN_COVERAGE, Candidates, Coverage, Float32, Float64, Hits, Int64
from openbook.errors import InvalidRequest, ShardUnavailable, SnapshotMismatch

Number = TypeVar("Number", float, Float64)

SAFE_SQUARE = 1e38
"""Squares that add up to less are all finite in float32."""


def canonical_scores(query: Float32, vectors: Float32) -> Float32:
    """Inner products of a (d,) query with (m, d) vectors, or of (m, d) queries with one each: (m,) float32.

    This is the score of a pair everywhere in openbook.

    A product of two float32 is exact in float64, and NumPy adds up a contiguous last axis pairwise in an order that
    depends on d alone. So the bits of a score depend on its query and its vector alone, which no BLAS promises.
    """
    products = np.multiply(vectors, query, dtype=np.float64, order="C")  # (m, d)
    with np.errstate(over="ignore"):
        scores: Float32 = np.add.reduce(products, axis=-1).astype(np.float32)
    return scores


def score_error_bound(dimension: int, query_norm: Number, vector_norm: float) -> Number:
    """How far a float32 inner product, summed in any order, can lie from the canonical score of the same pair.

    Higham, Accuracy and Stability of Numerical Algorithms, section 3.1: a sum of d products in float32 errs by at most
    d u / (1 - d u) |q| |v| with u = 2^-24; rounding the canonical score adds u |q| |v|. Up to d = 4096 both together
    stay under (d + 4) u |q| |v|. The last term covers products that are too small for float32.
    """
    return (dimension + 4) * 2.0**-24 * query_norm * vector_norm + dimension * 2.0**-126


def top_k(ids: Int64, scores: Float32, k: int) -> tuple[Int64, Float32]:
    """The best k of each row of (n, m) ids and scores, by (score descending, id ascending): two (n, k) arrays.

    Rows of fewer than k candidates end in empty slots: id NO_HIT, score -inf. Empty slots may be among the candidates.
    """
    order = np.lexsort((ids, -scores), axis=-1)[:, :k]
    rows, found = np.arange(len(ids))[:, None], order.shape[1]
    best_ids = np.full((len(ids), k), NO_HIT, np.int64)
    best_scores = np.full((len(ids), k), -np.inf, np.float32)
    best_ids[:, :found] = ids[rows, order]
    best_scores[:, :found] = scores[rows, order]
    return best_ids, best_scores


def merge(shards: Sequence[Hits], k: int, coverage: Coverage = UNKNOWN_COVERAGE) -> Hits:
    """The best k over all shards, of the (n, any) hits of each of them, which cover that much. At least one shard.

    Raises:
        SnapshotMismatch: the shards answered from different snapshots.
    """
    snapshot_id = one_snapshot(shards)
    if len(shards) == 1 and shards[0].ids.shape[1] == k:
        return replace(shards[0], coverage=coverage)
    ids = np.concatenate([hits.ids for hits in shards], axis=1)
    scores = np.concatenate([hits.scores for hits in shards], axis=1)
    return Hits(*top_k(ids, scores, k), snapshot_id, coverage)


def one_snapshot(shards: Sequence[Hits | Candidates]) -> str:
    """The id of the snapshot that all answered from. Raises SnapshotMismatch: they are of different ones."""
    snapshots = sorted({each.snapshot_id for each in shards})
    if len(snapshots) > 1:
        raise SnapshotMismatch(f"shards must answer from one snapshot, got {', '.join(snapshots)}")
    return snapshots[0]


def check_coverage(coverage: Coverage, min_coverage: float, problems: Sequence[str] = ()) -> None:
    """Stop a search of too few passages.

    Raises:
        ShardUnavailable: names the share, its limit, the missing shards and what was heard of them.
    """
    enough = coverage.share >= min_coverage if min_coverage < 1.0 else not coverage.missing_shards
    if not enough:
        missing = ", ".join(map(str, coverage.missing_shards))
        raise ShardUnavailable(
            f"coverage must be at least {min_coverage}, got {coverage.n_searched} of {coverage.n_total} passages: "
            f"shard {missing} does not answer{''.join(f'; {problem}' for problem in problems)}"
        )


def check_questions(questions: Sequence[str], k: int, max_k: int, max_rows: int) -> None:
    """Raises InvalidRequest where the best k cannot be searched for by the words of so many questions."""
    if not 1 <= k <= max_k:
        raise InvalidRequest(f"k must be 1..{max_k}, got {k}")
    if not 1 <= len(questions) <= max_rows:
        raise InvalidRequest(f"questions must be 1..{max_rows}, got {len(questions)}")


def check_without(k: int, without: Collection[int], max_k: int) -> None:
    """Raises InvalidRequest where the best k beside those cannot be searched for: as many more are needed."""
    if k + (n_without := len(set(without))) > max_k:
        raise InvalidRequest(f"k and the passages of without must be at most {max_k}, got {k} and {n_without}")


@contextmanager
def told_why(n: int, k: int, why: str) -> Iterator[None]:
    """Who asked for k is told why n are searched for. Raises InvalidRequest, where it is raised inside."""
    try:
        yield
    except InvalidRequest as error:
        if n == k or not re.search(rf"\b{n}\b", str(error)):
            raise
        raise InvalidRequest(f"{error} ({why})") from None


def check_search(
    queries: NDArray[np.generic], k: int, dimension: int, max_k: int, max_rows: int, max_norm: float = math.inf
) -> Float32:
    """The queries as a C-contiguous (n, d) float32 array, if they and k can be searched for.

    Raises:
        InvalidRequest: names what is out of range, its value and its limits.
    """
    if not 1 <= k <= max_k:
        raise InvalidRequest(f"k must be 1..{max_k}, got {k}")
    if queries.ndim != 2 or not 1 <= len(queries) <= max_rows:
        raise InvalidRequest(f"queries must have 1..{max_rows} rows, got an array of shape {queries.shape}")
    if queries.shape[1] != dimension:
        raise InvalidRequest(f"queries must have dimension {dimension}, got {queries.shape[1]}")
    if queries.dtype != np.float32:
        raise InvalidRequest(f"queries must be float32, got {queries.dtype}")
    checked: Float32 = np.ascontiguousarray(queries, np.float32)
    # Nearly always enough, and a fraction of what exact norms cost; NaN is not below anything.
    # `vdot`: what overflows is no warning.
    if not np.vdot(checked, checked) < min(max_norm**2 / 2, SAFE_SQUARE):
        finite = np.isfinite(checked).all(axis=1)
        if not finite.all():
            raise InvalidRequest(f"queries must be finite, got NaN or infinity in row {int(np.argmin(finite))}")
        norms: list[float] = np.linalg.norm(checked.astype(np.float64), axis=1).tolist()
        for row, norm in enumerate(norms):
            if norm > max_norm:
                raise InvalidRequest(f"queries must have norms up to {max_norm:g}, got {norm:g} in row {row}")
    return checked
