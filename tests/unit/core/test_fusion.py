from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.core.fusion import DEPTH, RANK_CONSTANT, depth, fuse, joined
from openbook.core.types import NO_HIT, Candidates, Coverage, Hits, RetrievalSettings, RetrieverKind
from openbook.errors import InvalidRequest, SnapshotMismatch

HYBRID, BM25 = RetrieverKind.HYBRID, RetrieverKind.BM25


def candidates(rows: dict[int, tuple[float, float]], snapshot_id: str = "s") -> Candidates:
    """One question's: dense and BM25's score by id."""
    dense, bm25 = np.array([*rows.values()], np.float32).reshape(-1, 2).T
    return Candidates(np.array([[*rows]], np.int64), dense[None], bm25[None], snapshot_id)


def best(rows: dict[int, tuple[float, float]], **settings: object) -> list[tuple[int, float]]:
    hits = fuse(candidates(rows), RetrievalSettings(**settings))  # type: ignore[arg-type]
    return [(i, score) for i, score in zip(hits.ids[0].tolist(), hits.scores[0].tolist(), strict=True) if i != NO_HIT]


ROWS = {10: (3.0, 0.0), 11: (2.0, 5.0), 12: (1.0, 9.0), 13: (0.0, 7.0), NO_HIT: (9.0, 9.0)}


def test_by_words_only_what_has_a_word_is_found_and_scored_by_bm25() -> None:
    assert best(ROWS, k=4, retriever=BM25) == [(12, 9.0), (13, 7.0), (11, 5.0)]
    assert best({7: (1, 2), 5: (2, 2), 6: (3, 2)}, k=2, retriever=BM25) == [(5, 2.0), (6, 2.0)]
    assert best({7: (1, 0)}, k=2, retriever=BM25) == []


def test_by_rank_the_ranks_decide_and_the_scores_stay_dense() -> None:
    # dense 10 11 12 13, BM25 12 13 11 and never 10
    sums = {10: (1, None), 11: (2, 3), 12: (3, 1), 13: (4, 2)}
    exact = {i: sum(Fraction(1, RANK_CONSTANT + r) for r in ranks if r) for i, ranks in sums.items()}
    order = sorted(exact, key=lambda i: -exact[i])
    assert best(ROWS, k=4, retriever=HYBRID) == [(i, ROWS[i][0]) for i in order]


def test_by_weight_the_sum_decides_and_is_the_score() -> None:
    assert best(ROWS, k=4, retriever=HYBRID, bm25_weight=0.5) == [(12, 5.5), (11, 4.5), (13, 3.5), (10, 3.0)]
    assert best(ROWS, k=2, retriever=HYBRID, bm25_weight=0.0) == [(10, 3.0), (11, 2.0)]


def test_what_is_left_out_has_no_rank() -> None:
    left = {i: row for i, row in ROWS.items() if i != 12}
    for weight in (None, 0.5):
        without = best(ROWS, k=3, retriever=HYBRID, bm25_weight=weight, without=(12, 99))
        assert without == best(left, k=3, retriever=HYBRID, bm25_weight=weight)


@given(
    rows=st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 5)), min_size=1, max_size=300),
    n_shards=st.integers(1, 5),
    weight=st.none() | st.sampled_from([0.0, 0.5, 3.0]),
    kind=st.sampled_from([HYBRID, BM25]),
    k=st.integers(1, 20),
    without=st.lists(st.integers(0, 10), max_size=3),
    data=st.data(),
)
def test_the_same_is_found_however_passages_are_sharded(
    rows: list[tuple[float, float]],
    n_shards: int,
    weight: float | None,
    kind: RetrieverKind,
    k: int,
    without: list[int],
    data: st.DataObject,
) -> None:
    settings = RetrievalSettings(k=k, retriever=kind, bm25_weight=weight, without=tuple(without))
    owner = [data.draw(st.integers(0, n_shards - 1)) for _ in rows]
    found, expected = found_of_shards(rows, owner, settings), fuse(candidates(dict(enumerate(rows))), settings)
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.scores.tolist() == expected.scores.tolist()


def found_of_shards(
    rows: list[tuple[float, float]], owner: list[int], settings: RetrievalSettings, max_k: int = 1000
) -> Hits:
    """Each shard names only its best `depth` by either, and in whatever order."""
    whole, parts, n = dict(enumerate(rows)), [], depth(settings, max_k)
    for shard in range(max(owner) + 1):
        mine = [i for i in whole if owner[i] == shard]
        named = {
            *sorted((i for i in mine if whole[i][1]), key=lambda i: (-whole[i][1], i))[:n],
            *(sorted(mine, key=lambda i: (-whole[i][0], i))[:n] if settings.retriever is HYBRID else ()),
        }
        parts.append(candidates({i: whole[i] for i in sorted(named, reverse=True)}))
    return fuse(replace(joined(parts), n_named=n), settings)


@pytest.mark.parametrize("weight", [None, 0.7])
@pytest.mark.parametrize("without", [(), (3, 5)])
def test_so_it_is_where_servers_name_few(without: tuple[int, ...], weight: float | None) -> None:
    random = np.random.default_rng(0)
    rows = [(float(a), float(b)) for a, b in random.permuted(np.tile(np.arange(1, 201), (2, 1)), axis=1).T]
    settings = RetrievalSettings(k=15, retriever=HYBRID, without=without, bm25_weight=weight)
    found = [found_of_shards(rows, [i % n for i in range(200)], settings, max_k=20).ids.tolist() for n in (1, 2, 4)]
    assert found[0] == found[1] == found[2]
    assert NO_HIT not in found[0][0]


def test_the_depth_is_that_of_the_fusion_or_as_many_as_are_asked_for() -> None:
    assert depth(RetrievalSettings(k=5, retriever=HYBRID), 1000) == DEPTH
    assert depth(RetrievalSettings(k=300, retriever=HYBRID, without=(1, 2)), 1000) == 302
    assert depth(RetrievalSettings(k=5, retriever=BM25, without=(1, 1)), 1000) == 6
    assert depth(RetrievalSettings(k=5, retriever=HYBRID), 50) == 50  # the servers name no more


def test_of_as_many_as_are_named_the_last_counts_too() -> None:
    two = replace(candidates(dict(enumerate([(2.0, 2.0), (1.0, 1.0)]))), n_named=2)
    assert fuse(two, RetrievalSettings(k=2, retriever=HYBRID)).ids.tolist() == [[0, 1]]


def test_what_is_fused_covers_what_its_candidates_do() -> None:
    half = replace(candidates(ROWS), coverage=Coverage(1, 2, (1,)))
    assert fuse(half, RetrievalSettings(retriever=HYBRID)).coverage == half.coverage


def test_shards_of_two_snapshots_are_no_candidates() -> None:
    with pytest.raises(SnapshotMismatch, match="one snapshot, got s, t"):
        joined([candidates(ROWS), candidates(ROWS, "t")])


@pytest.mark.parametrize("weight", [-0.1, 1000.5, float("nan"), float("inf")])
def test_a_weight_out_of_range(weight: float) -> None:
    with pytest.raises(InvalidRequest, match=r"bm25_weight must be 0\.0\.\.1000\.0, got"):
        RetrievalSettings(bm25_weight=weight)
