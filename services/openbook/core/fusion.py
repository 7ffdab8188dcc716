"""The ranking by words, or those by query and by words as one, and what the prior over it is the softmax of.

bm25: BM25's scores. hybrid: reciprocal rank fusion decides which passages and in which order, and their dense scores
are the prior's, for a sum of reciprocal ranks is the logarithm of nothing; or, with a weight w, the score is
dense + w * BM25, which decides and is the prior's too: p(z|x) is proportional to exp(dense) * exp(BM25) ** w.

What comes out is the same however the passages are sharded: only the best DEPTH of each ranking over all shards count,
or fewer where servers name no more (`index_server.max_k`).
"""

from collections.abc import Sequence

import numpy as np

from openbook.core.topk import one_snapshot
from openbook.core.types import NO_HIT, Candidates, Float32, Float64, Hits, Int64, RetrievalSettings, RetrieverKind

RANK_CONSTANT = 60
"""Of reciprocal rank fusion: Cormack, Clarke and Büttcher, SIGIR 2009."""
DEPTH = 100
"""Passages of each ranking that take part in a fusion; as many as are asked for, if those are more."""


def depth(settings: RetrievalSettings, max_k: int) -> int:
    """How many of the best by query, and by words, every shard must name: those left out may be among them."""
    n_best = settings.k if settings.retriever is RetrieverKind.BM25 else max(settings.k, DEPTH)
    return max(settings.k, min(n_best + len(set(settings.without)), max_k))


def joined(shards: Sequence[Candidates]) -> Candidates:
    """The candidates of all shards, at least one.

    Raises:
        SnapshotMismatch: they are of different snapshots.
    """
    snapshot_id = one_snapshot(shards)
    ids, dense, bm25 = (
        np.concatenate([getattr(each, name) for each in shards], axis=1) for name in ("ids", "dense", "bm25")
    )
    return Candidates(ids, dense, bm25, snapshot_id)


def fuse(candidates: Candidates, settings: RetrievalSettings) -> Hits:
    """The best k of each question as the settings' retriever ranks them, without those that are to be left out.

    Best first; scores are what the prior is the softmax of. A passage without a word of the question is not found by
    words. Ties by id.
    """
    n_best = max(settings.k, DEPTH)
    if candidates.n_named is not None:
        n_best = min(n_best, candidates.n_named - len(set(settings.without)))
    of_each = zip(candidates.ids, candidates.dense, candidates.bm25, strict=True)
    rows = [_fused(*row, settings, n_best) for row in of_each]
    ids = np.full((len(rows), settings.k), NO_HIT, np.int64)
    scores = np.full((len(rows), settings.k), -np.inf, np.float32)
    for i, (found, of_found) in enumerate(rows):
        ids[i, : len(found)], scores[i, : len(found)] = found, of_found
    return Hits(ids, scores, candidates.snapshot_id, candidates.coverage)


def _fused(
    ids: Int64, dense: Float32, bm25: Float32, settings: RetrievalSettings, n_best: int
) -> tuple[Int64, Float32]:
    """Ids and scores of one question, at most k of each."""
    real = (ids != NO_HIT) & ~np.isin(ids, settings.without)
    ids, dense, bm25 = ids[real], dense[real], bm25[real]
    found = np.where(bm25 > 0, bm25, np.float32(-np.inf))
    merit: Float64
    if settings.retriever is RetrieverKind.BM25:
        merit, scores = found.astype(np.float64), bm25
    else:
        places = [_places(ids, of_one, n_best) for of_one in (dense, found)]
        if settings.bm25_weight is None:
            merit, scores = sum((1 / (RANK_CONSTANT + place) for place in places), np.zeros(len(ids))), dense
        else:
            scores = (dense + np.float64(settings.bm25_weight) * bm25).astype(np.float32)
            merit = scores.astype(np.float64)
        merit = np.where(np.isinf(places).all(axis=0), -np.inf, merit)
    best = np.lexsort((ids, -merit))[: settings.k]
    best = best[merit[best] > -np.inf]
    return ids[best], scores[best]


def _places(ids: Int64, scores: Float32, n_best: int) -> Float64:
    """(m,) places from 1 on, by (score descending, id ascending); infinity beyond `n_best` and for a score of -inf."""
    order = np.lexsort((ids, -scores))
    places = np.empty(len(ids))
    places[order] = np.arange(1, len(ids) + 1)
    places[np.isneginf(scores) | (places > n_best)] = np.inf
    return places
