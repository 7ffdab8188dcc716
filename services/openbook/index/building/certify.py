"""The recall certificate: what share of the exact best k a snapshot's own search finds, measured when it is built."""

import logging
from collections.abc import Sequence

import numpy as np

from openbook.core.deadline import Deadline
from openbook.core.topk import merge
from openbook.core.types import AS_BUILT, Float32, SearchParameters
from openbook.index.disk.snapshot import RECALL_AT, Recall, SearchDefaults
from openbook.index.shard.shard import Shard

log = logging.getLogger(__name__)

N_QUERIES = 1000
NOISE = 0.5
"""Length of what is added to a stored vector, beside its own: their cosine is 0.89 then."""
ROWS_AT_ONCE = 1024
"""Queries, for which all vectors are read once: where these are larger than memory, from the disk each time."""


def certify(shards: Sequence[Shard], queries: Float32 | None, target: float | None) -> tuple[Recall, SearchDefaults]:
    """The recall of some shards together over (n, d) queries, and how widely they are to be searched.

    Without queries, over stored vectors with noise added. With a target for recall at 10, the search is widened,
    twofold each time, until it is reached or nothing is left to widen, which is a warning. A Flat index is exact by
    proof, not measured.
    """
    if all(shard.is_exact for shard in shards):
        return Recall(n_queries=0, queries="exact", at_1=1.0, at_5=1.0, at_10=1.0, at_100=1.0), SearchDefaults()
    source = "perturbed" if queries is None else "given"
    asked = _perturbed(shards) if queries is None else queries
    k = min(max(RECALL_AT), sum(shard.n_passages for shard in shards))
    blocks = [asked[i : i + ROWS_AT_ONCE] for i in range(0, len(asked), ROWS_AT_ONCE)]
    exact = np.concatenate([merge([shard.search_exactly(block, k) for shard in shards], k).scores for block in blocks])
    parameters = AS_BUILT
    while True:
        share = _recall(shards, blocks, exact, parameters)
        wider = max(shards, key=lambda shard: shard.n_passages).wider(parameters)
        is_missed = target is not None and share["at_10"] < target
        if not is_missed or wider is None:
            if is_missed:
                log.warning("recall at 10 is %s, below %s: there is no wider search", share["at_10"], target)
            defaults = SearchDefaults(
                nprobe=parameters.nprobe, ef_search=parameters.ef_search, rerank_factor=parameters.rerank_factor
            )
            return Recall.model_validate({"n_queries": len(asked), "queries": source, **share}), defaults
        parameters = wider


def _recall(
    shards: Sequence[Shard], blocks: Sequence[Float32], exact: Float32, parameters: SearchParameters
) -> dict[str, float]:
    """By name. A hit counts if its score is that of one of the exact best k, so that ties cost nothing."""
    share = {}
    for at in RECALL_AT:
        k = min(at, exact.shape[1])
        found = [
            merge([shard.search_checked(block, k, parameters, Deadline.never()) for shard in shards], k).scores
            for block in blocks
        ]
        share[f"at_{at}"] = round(float(np.mean(np.concatenate(found) >= exact[:, k - 1 : k])), 4)
    return share


def _perturbed(shards: Sequence[Shard]) -> Float32:
    rng = np.random.default_rng(0)
    total = sum(shard.n_passages for shard in shards)
    chosen = np.sort(rng.integers(0, total, N_QUERIES))
    parts = []
    for shard in shards:
        here = chosen[(chosen >= shard.first_id) & (chosen < shard.first_id + shard.n_passages)]
        parts.append(shard.fetch_vectors(here.tolist()))
    vectors = np.concatenate(parts).astype(np.float64)
    noise = rng.standard_normal(vectors.shape)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True) / np.linalg.norm(noise, axis=1, keepdims=True)
    queries: Float32 = (vectors + NOISE * lengths * noise).astype(np.float32)
    return queries
