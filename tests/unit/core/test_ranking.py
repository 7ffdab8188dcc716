"""Rankings by hand, and 10,000 random ones beside trec_eval, MS MARCO's evaluation and KILT's."""

import random
from collections.abc import Callable
from math import log2

import ir_measures
import pytest
from ir_measures import AP, RR, P, R, Rprec, Success, nDCG
from numpy.testing import assert_allclose, assert_array_equal

from openbook.core import ranking as rank
from openbook.errors import InvalidRequest

N = 10_000
CUTS = (1, 5, 100)
RANKING = ["a", "b", "c", "d"]
JUDGMENTS = {"b": 2, "d": 1, "x": 1, "c": 0}


def test_by_hand() -> None:
    assert [rank.success(RANKING, JUDGMENTS, k) for k in (1, 2)] == [0.0, 1.0]
    assert [rank.precision(RANKING, JUDGMENTS, k) for k in (1, 2, 4, 8)] == [0.0, 0.5, 0.5, 0.25]
    assert [rank.recall(RANKING, JUDGMENTS, k) for k in (1, 2, 4)] == pytest.approx([0.0, 1 / 3, 2 / 3])
    assert rank.r_precision(RANKING, JUDGMENTS) == pytest.approx(1 / 3)
    assert [rank.reciprocal_rank(RANKING, JUDGMENTS, k) for k in (1, 2, 4)] == [0.0, 0.5, 0.5]
    assert rank.average_precision(RANKING, JUDGMENTS, 4) == pytest.approx((1 / 2 + 2 / 4) / 3)
    ideal = 2 / log2(2) + 1 / log2(3) + 1 / log2(4)
    assert rank.ndcg(RANKING, JUDGMENTS, 4) == pytest.approx((2 / log2(3) + 1 / log2(5)) / ideal)


def test_nothing_found_and_nothing_relevant_are_worth_nothing() -> None:
    for ranking, judgments in (([], JUDGMENTS), (RANKING, {}), (RANKING, {"a": 0, "b": -1})):
        assert {measure(ranking, judgments) for _, measure in MEASURES} == {0.0}


def test_a_provenance_set_counts_when_it_is_whole_in_the_place_of_its_last_page() -> None:
    sets = [{"a", "c"}, {"b"}, {"c", "a"}, set()]  # two of them alike, one empty
    # The places: b, c (which completes a), d.
    assert [rank.kilt_recall(RANKING, sets, k) for k in (1, 2, 3)] == [0.5, 1.0, 1.0]
    assert rank.kilt_recall(["a", "x"], [{"a", "c"}], 2) == 0.0
    assert rank.kilt_recall(["a", "b"], [{"a"}, {"a", "b"}], 2) == 1.0, "one page in two sets"
    assert rank.kilt_r_precision(RANKING, sets) == 0.5
    assert rank.kilt_r_precision(["c", "a"], sets) == 1.0
    assert rank.kilt_recall(RANKING, [], 1) == rank.kilt_r_precision(RANKING, []) == 0.0


def test_kilt_scores_count_answers_whose_pages_were_found() -> None:
    assert_array_equal(rank.kilt_scores([1.0, 0.5, 1.0], [1.0, 1.0, 0.5]), [1.0, 0.5, 0.0])
    with pytest.raises(InvalidRequest, match=r"got shapes \(2,\) and \(1,\)"):
        rank.kilt_scores([1.0, 0.5], [1.0])


def test_what_is_no_ranking_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="k must be at least 1, got 0"):
        rank.recall(RANKING, JUDGMENTS, 0)
    with pytest.raises(InvalidRequest, match="different documents, got 'a' twice"):
        rank.ndcg(["a", "b", "a"], JUDGMENTS, 1)
    with pytest.raises(InvalidRequest, match="different documents, got 'a' twice"):
        rank.kilt_recall(["a", "a"], [{"a"}], 1)


Measure = Callable[[list[str], dict[str, int]], float]
MEASURES: list[tuple[object, Measure]] = [(Rprec, rank.r_precision)]
for cut in CUTS:
    MEASURES += [
        (Success @ cut, lambda ranking, judgments, k=cut: rank.success(ranking, judgments, k)),
        (P @ cut, lambda ranking, judgments, k=cut: rank.precision(ranking, judgments, k)),
        (R @ cut, lambda ranking, judgments, k=cut: rank.recall(ranking, judgments, k)),
        (RR @ cut, lambda ranking, judgments, k=cut: rank.reciprocal_rank(ranking, judgments, k)),
        (AP @ cut, lambda ranking, judgments, k=cut: rank.average_precision(ranking, judgments, k)),
        (nDCG @ cut, lambda ranking, judgments, k=cut: rank.ndcg(ranking, judgments, k)),
    ]


def test_random_rankings_are_worth_what_trec_eval_says() -> None:
    draw = random.Random(0)
    names = [f"d{i}" for i in range(24)]
    rankings = {str(i): draw.sample(names, draw.randint(1, 20)) for i in range(N)}
    judgments = {
        query: {name: draw.choice([0, 0, 0, 1, 1, 2, 3]) for name in draw.sample(names, draw.randint(1, 12))}
        for query in rankings
    }
    run = {query: {name: float(-i) for i, name in enumerate(found)} for query, found in rankings.items()}
    theirs: dict[tuple[str, str], float] = {
        (str(metric.measure), metric.query_id): metric.value
        for metric in ir_measures.iter_calc([name for name, _ in MEASURES], judgments, run)
    }
    for name, measure in MEASURES:
        ours = [measure(rankings[query], judgments[query]) for query in rankings]
        assert_allclose(ours, [theirs[str(name), query] for query in rankings], atol=1e-9, err_msg=str(name))


def kilt_places(pages: list[str], provenance: list[set[str]]) -> tuple[list[object], int]:
    """KILT's own procedure: a list of places, from which a set's former place goes when its next page comes."""
    sets: list[set[str]] = []
    for each in provenance:
        if each not in sets:
            sets.append(set(each))
    places: list[object] = []
    for page in pages:
        met = [i for i, left in enumerate(sets) if page in left]
        for i in met:
            if f"set {i}" in places:
                places.remove(f"set {i}")
            sets[i].remove(page)
            places.append(f"set {i}" if sets[i] else True)
        if not met:
            places.append(False)
    return places, len(sets)


def test_random_rankings_are_worth_what_kilt_says() -> None:
    draw = random.Random(1)
    names = [f"p{i}" for i in range(9)]
    for _ in range(N):
        ranking = draw.sample(names, draw.randint(1, 9))
        sets = [set(draw.sample(names, draw.randint(1, 3))) for _ in range(draw.randint(1, 4))]
        k = draw.randint(1, 9)
        places, n_sets = kilt_places(ranking, sets)
        assert rank.kilt_recall(ranking, sets, k) == pytest.approx(places[:k].count(True) / n_sets)
        best = max(len(pages & set(ranking[: len(pages)])) / len(pages) for pages in sets)
        assert rank.kilt_r_precision(ranking, sets) == pytest.approx(best)
