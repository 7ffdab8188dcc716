from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openbook.core.deadline import Deadline
from openbook.core.types import Float32, Passage, SearchParameters
from openbook.errors import InvalidConfig
from openbook.index.building.build import build_snapshot
from openbook.index.disk.snapshot import Manifest, Recall
from openbook.index.shard import shard as shard_module
from openbook.index.shard.shard import Shard
from openbook.index.shard.width import MAX_FACTOR

N, D = 3000, 16
RNG = np.random.default_rng(0)
VECTORS = RNG.standard_normal((N, D)).astype(np.float32)
QUERIES = RNG.standard_normal((40, D)).astype(np.float32)


def build(out: Path, factory: str, n_shards: int = 1, vectors: Float32 = VECTORS, **more: Any) -> Manifest:
    passages = [Passage(i, "d", "", "") for i in range(len(vectors))]
    return build_snapshot(passages, vectors, out, n_shards, factory, "e", "f", **more)


def recall_of(manifest: Manifest) -> Recall:
    assert manifest.recall is not None
    return manifest.recall


def test_recall_is_what_anybody_measures(tmp_path: Path) -> None:
    recall = recall_of(build(tmp_path / "s", "IVF64,SQ8", n_shards=2, queries=QUERIES))
    shards = [Shard(tmp_path / "s", number) for number in (0, 1)]
    for k, share in recall.by_k().items():
        found = 0
        for query in QUERIES:
            best = set(np.argsort(-(VECTORS.astype(np.float64) @ query))[:k].tolist())
            hits = [shard.search(query[None], k, Deadline.never()) for shard in shards]
            ids = np.concatenate([each.ids[0] for each in hits])
            order = np.argsort(-np.concatenate([each.scores[0] for each in hits]))[:k]
            found += len(best & set(ids[order].tolist()))
        assert share == pytest.approx(found / (k * len(QUERIES)), abs=1e-4)
    assert (recall.n_queries, recall.queries) == (40, "given")
    assert recall.at_100 < 1


def test_without_queries_a_thousand_are_made_of_stored_vectors(tmp_path: Path) -> None:
    recall = recall_of(build(tmp_path / "s", "HNSW4", n_shards=3))
    assert (recall.n_queries, recall.queries) == (1000, "perturbed")
    assert 0.5 < recall.at_100 <= 1
    again = build(tmp_path / "again", "HNSW4", n_shards=3)
    assert recall_of(again) == recall


def test_a_flat_index_is_exact_by_proof(tmp_path: Path) -> None:
    recall = recall_of(build(tmp_path / "s", "Flat"))
    assert (recall.queries, recall.n_queries, recall.at_1, recall.at_100) == ("exact", 0, 1.0, 1.0)


@pytest.mark.parametrize("factory", ["IVF64,Flat", "IVF64,PQ4x4fs", "PQ4x4fs", "HNSW4"])
def test_the_search_is_widened_until_the_target_is_reached(factory: str, tmp_path: Path) -> None:
    before = recall_of(build(tmp_path / "before", factory, queries=QUERIES)).at_10
    manifest = build(tmp_path / "after", factory, queries=QUERIES, recall_target=before + 0.001)
    assert recall_of(manifest).at_10 > before
    assert manifest.search is not None
    wide = SearchParameters(**manifest.search.model_dump())
    narrow, widened = Shard(tmp_path / "before", 0), Shard(tmp_path / "after", 0)
    expected = narrow.search(QUERIES, 10, Deadline.never(), wide)
    np.testing.assert_array_equal(widened.search(QUERIES, 10, Deadline.never()).ids, expected.ids)


def test_a_target_out_of_reach_ends_all_the_same_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = build(tmp_path / "s", "PQ1x4fs", vectors=np.repeat(VECTORS, 3, axis=0), recall_target=1.0)
    assert manifest.search is not None
    assert manifest.search.rerank_factor == MAX_FACTOR
    assert recall_of(manifest).at_10 < 1
    assert f"recall at 10 is {recall_of(manifest).at_10}, below 1.0: there is no wider search" in caplog.text


@pytest.mark.parametrize("target", [-0.1, 1.01, 95, float("nan")])
def test_a_target_is_a_share(target: float, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"^recall at 10 must be 0\.\.1, got "):
        build(tmp_path / "s", "Flat", recall_target=target)


def test_fewer_passages_than_k(tmp_path: Path) -> None:
    recall = recall_of(build(tmp_path / "s", "HNSW4", n_shards=3, vectors=VECTORS[:5]))
    assert recall.by_k() == dict.fromkeys((1, 5, 10, 100), 1.0)


def test_an_exact_search_in_blocks_is_that_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(tmp_path / "s", "Flat")
    shard = Shard(tmp_path / "s", 0)
    monkeypatch.setattr(shard_module, "VECTORS_AT_ONCE", 77)
    hits, expected = shard.search_exactly(QUERIES, 50), shard.search(QUERIES, 50, Deadline.never())
    np.testing.assert_array_equal(hits.ids, expected.ids)
    np.testing.assert_array_equal(hits.scores, expected.scores)
