"""Metrics by hand-computed values, by their properties, and against the definitions written out."""

import unicodedata
from itertools import combinations, product
from math import exp, isnan, nan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.core import metrics
from openbook.errors import InvalidRequest

few = settings(max_examples=60)
WORDS = ["the", "a", "cat", "sat", "mat.", "The", "Dog!", "U.S.", "1,000", "naïve"]
words = st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join)
outcomes = st.lists(st.tuples(st.integers(0, 8).map(lambda i: i / 8), st.booleans()), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles!", "beatles"),
        ("An a-b of the U.S.A.", "ab of usa"),
        ("the.cat", "thecat"),  # punctuation goes first, so this `the` is no article
        ("Theatre\ta\nnd", "theatre nd"),
        ("“Quoted”", "“quoted”"),  # only ASCII punctuation is deleted
        ("", ""),
    ],
)
def test_normalise(text: str, normal: str) -> None:
    assert metrics.normalise(text) == normal


@few
@given(words)
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert metrics.normalise(metrics.normalise(text)) == metrics.normalise(text)


def test_f1_by_hand() -> None:
    assert metrics.f1("the cat sat", ["cat sat down"]) == pytest.approx(2 * 1 * (2 / 3) / (1 + 2 / 3))
    assert metrics.f1("cat cat", ["cat"]) == pytest.approx(2 / 3), "a word counts as often as it stands in both"
    assert metrics.f1("dog", ["cat", "a dog"]) == 1.0, "the best of the answers"
    assert metrics.f1("", ["cat"]) == metrics.f1("cat", []) == 0.0
    assert metrics.f1("the", ["an"]) == 1.0, "nothing is left of both"


@few
@given(words, st.lists(words, min_size=1, max_size=3))
def test_f1_lies_between_0_and_exact_match(prediction: str, answers: list[str]) -> None:
    score = metrics.f1(prediction, answers)
    assert 0.0 <= score <= 1.0
    assert metrics.exact_match(prediction, [prediction, *answers])
    if metrics.exact_match(prediction, answers):
        assert score == 1.0
    assert metrics.f1(prediction, answers[:1]) == metrics.f1(answers[0], [prediction])


def test_a_regular_expression_is_searched_for_in_any_case_and_line() -> None:
    assert metrics.regex_match("It was\nJEAN, they say", "^jean")
    assert metrics.regex_match("in 1,642 ft", r"1,?642(\.\d+)? (feet|ft)")
    assert not metrics.regex_match("Joan", "jean")


@pytest.mark.parametrize(
    ("passage", "answer", "held"),
    [
        ("A party in New York.", "new york", True),
        ("A party in New York.", "art", False),  # whole tokens only
        ("A new party in York.", "new york", False),  # one after the other
        ("in the U.S. army", "u.s.", True),
        ("in the U.S. army", "us", False),  # punctuation counts
        ("in the US army", "U.S.", False),
        ("for $ 5,000", "$5,000", True),  # spaces do not
        ("Beyonce\u0301 sang", "BEYONCÉ", True),  # however the accent is written
        ("Beyoncé sang", "Beyonce", False),
        ("snake_case", "snake", True),  # an underscore is punctuation
        ("zero\u200bwidth", "zero", True),  # format characters are gaps
        ("anything", " ", False),
        ("", "a", False),
    ],
)
def test_has_answer(passage: str, answer: str, held: bool) -> None:
    assert metrics.has_answer(passage, ["no such thing", answer]) is held


@few
@given(st.text(max_size=30), st.text(max_size=30))
def test_tokens_are_those_of_dpr(left: str, right: str) -> None:
    """Its regular expression character by character, from Unicode's categories."""
    expected: list[str] = []
    inside = False
    for character in unicodedata.normalize("NFD", f"{left} {right}"):
        major = unicodedata.category(character)[0]
        if major in "LNM" and inside:
            expected[-1] += character
        elif major not in "ZC":
            expected.append(character)
        inside = major in "LNM"
    expected = [token.lower() for token in expected]
    for start, stop in combinations(range(len(expected) + 1), 2):
        assert metrics.has_answer(f"{left} {right}", [" ".join(expected[start:stop])])
    assert not metrics.has_answer(f"{left} {right}", ["".join(["x", *expected, "y"])])


def test_a_regular_expression_is_found_in_a_passage_however_accents_are_written() -> None:
    assert metrics.has_regex_answer("the Cafe\u0301 de Flore", "CAFÉ|bar")
    assert not metrics.has_regex_answer("the Cafe de Flore", "CAFÉ|bar")
    assert not metrics.has_regex_answer("the Café de Flore", r"Caf\é"), "in NFD that is no pattern: as DPR, nowhere"


def test_rouge_l_by_hand() -> None:
    # In order both have "the cat on mat": precision 4/6, recall 4/4.
    assert metrics.rouge_l("the cat sat on the mat", ["The cat, on mat!"]) == pytest.approx(
        (1 + 1.44) * (4 / 6) / (1 + 1.44 * 4 / 6)
    )
    assert metrics.rouge_l("a b", ["b a"], beta=1.0) == pytest.approx(0.5), "order counts"
    assert metrics.rouge_l("a b c d", ["a b", "a b c d e f g h"], beta=1.0) == pytest.approx(1.0), "each at its best"
    assert metrics.rouge_l("", ["a"]) == metrics.rouge_l("a", ["b", ""]) == metrics.rouge_l("a", []) == 0.0


@few
@given(st.text("abc ", max_size=12), st.text("abc ", max_size=12))
def test_rouge_l_is_the_longest_common_subsequence(left: str, right: str) -> None:
    a, b = left.split(), right.split()

    def common(n: int) -> bool:
        return any(x == y for x, y in product(combinations(a, n), combinations(b, n)))

    longest = max(n for n in range(len(a) + 1) if n == 0 or common(n))
    expected = 2 * longest / (len(a) + len(b)) if longest else 0.0
    assert metrics.rouge_l(left, [right], beta=1.0) == pytest.approx(expected)


def test_bleu_1_by_hand() -> None:
    # "the" stands twice in the answer, so 2 of 4 words count; 4 words instead of 6 cost exp(1 - 6/4).
    assert metrics.bleu_1(["the the the the"], [["The cat is on the mat."]]) == pytest.approx(exp(-0.5) * 2 / 4)
    # Of both together 3 of 4 words; the closest answers have 2 and 1 words, fewer than the 4.
    assert metrics.bleu_1(["a b", "c c"], [["a b c d e", "a b"], ["c"]]) == pytest.approx(3 / 4)
    assert metrics.bleu_1(["a b c"], [["a b", "a b c d"]]) == 1.0, "of two as close the shorter"
    assert metrics.bleu_1(["x", ""], [["a"], ["b"]]) == 0.0
    assert isnan(metrics.bleu_1([], []))


def test_reliability_by_hand() -> None:
    bins = metrics.reliability([0.05, 0.15, 0.95, 1.0], [False, True, True, False], n_bins=10)
    assert bins.counts.tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0, 2]
    assert bins.accuracy[[0, 1, 9]].tolist() == [0.0, 1.0, 0.5]
    assert bins.confidence[9] == pytest.approx(0.975)
    assert np.isnan(bins.accuracy[2:9]).all()
    assert bins.expected_error == pytest.approx((0.05 + 0.85 + 2 * 0.475) / 4)
    assert isnan(metrics.reliability([], []).expected_error)


@few
@given(outcomes)
def test_bins_lose_nothing(pairs: list[tuple[float, bool]]) -> None:
    confidence, correct = zip(*pairs, strict=True)
    bins = metrics.reliability(confidence, correct, n_bins=4)
    held = bins.counts > 0
    assert bins.counts.sum() == len(pairs)
    assert (bins.counts * bins.accuracy)[held].sum() == pytest.approx(sum(correct))
    assert (bins.counts * bins.confidence)[held].sum() == pytest.approx(sum(confidence))
    assert ((bins.edges[:-1] <= bins.confidence) & (bins.confidence <= bins.edges[1:]))[held].all()
    assert abs(np.mean(confidence) - np.mean(correct)) <= bins.expected_error + 1e-9 <= 1 + 1e-9


@few
@given(outcomes)
def test_auroc_counts_pairs(pairs: list[tuple[float, bool]]) -> None:
    right, wrong = ([p for p, ok in pairs if ok is kind] for kind in (True, False))
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in product(right, wrong)]
    expected = float(np.mean(wins)) if wins else nan
    assert metrics.auroc(*zip(*pairs, strict=True)) == pytest.approx(expected, nan_ok=True)


@few
@given(outcomes)
def test_risk_at_every_threshold(pairs: list[tuple[float, bool]]) -> None:
    curve = metrics.risk_coverage(*zip(*pairs, strict=True))
    assert curve.threshold.tolist() == sorted({p for p, _ in pairs}, reverse=True)
    for threshold, coverage, risk in zip(curve.threshold, curve.coverage, curve.risk, strict=True):
        given = [ok for p, ok in pairs if p >= threshold]
        assert coverage == pytest.approx(len(given) / len(pairs))
        assert risk == pytest.approx(1 - np.mean(given))


def test_confidence_must_be_numbers_and_as_many_as_answers() -> None:
    for function in (metrics.reliability, metrics.auroc, metrics.risk_coverage):
        with pytest.raises(InvalidRequest, match=r"got shapes \(2,\) and \(1,\)"):
            function([0.5, 0.5], [True])
        with pytest.raises(InvalidRequest, match="must be"):
            function([nan], [True])


def test_the_bootstrap_interval_is_that_of_the_normal_distribution_for_many_values() -> None:
    values = np.random.default_rng(1).random(2000) < 0.3
    low, high = metrics.bootstrap_interval(values)
    error = 1.96 * values.std() / len(values) ** 0.5
    assert low == pytest.approx(values.mean() - error, abs=0.15 * error)
    assert high == pytest.approx(values.mean() + error, abs=0.15 * error)
    assert (low, high) == metrics.bootstrap_interval(values), "the same from the same seed"
    assert (low, high) != metrics.bootstrap_interval(values, seed=1)


def test_the_bootstrap_interval_of_little() -> None:
    assert metrics.bootstrap_interval([0.25]) == (0.25, 0.25)
    assert all(map(isnan, metrics.bootstrap_interval([])))
    few_low, few_high = metrics.bootstrap_interval([0, 1] * 10)
    many_low, many_high = metrics.bootstrap_interval([0, 1] * 100)
    assert few_low < many_low < 0.5 < many_high < few_high


@pytest.mark.parametrize("n", [1, 7, 5000])  # of the longest, a few samples are drawn at once
def test_the_samples_are_those_that_are_drawn_one_by_one(n: int) -> None:
    values, random = np.random.default_rng(3).random((n, 2)), np.random.default_rng(0)
    means = [values[random.integers(0, n, n)].mean(axis=0) for _ in range(50)]
    wanted = np.quantile(means, [(1 - 0.95) / 2, (1 + 0.95) / 2], axis=0)
    np.testing.assert_array_equal(metrics.bootstrap_intervals(values, n_resamples=50), wanted)


def test_the_intervals_of_columns_are_those_of_each() -> None:
    columns = np.random.default_rng(2).random((50, 3))
    apart = np.array([metrics.bootstrap_interval(each) for each in columns.T])
    assert np.transpose(metrics.bootstrap_intervals(columns)) == pytest.approx(apart)
