"""Predictions against questions of each kind."""

from math import isnan

import pytest

from openbook.corpus.questions import Question
from openbook.errors import InvalidRequest
from openbook.evaluation.score import answering, evaluate_answers, is_right

PARIS = Question("1", "Where is the Louvre?", ("Paris", "Paris, France"))
CATS = Question("2", "What sat?", ("two black cats",))
FEET = Question("3", "How tall is it?", answer_regex=r"1,?454\s+feet")


def test_each_question_is_scored_by_what_it_asks_for() -> None:
    assert is_right("the Paris", PARIS)
    assert not is_right("in Paris", PARIS)
    assert is_right("about 1454 FEET high", FEET)
    assert not is_right("1,454 metres", FEET)
    assert answering(PARIS)("The Louvre in Paris")
    assert answering(FEET)("is 1,454 feet tall")
    assert not answering(FEET)("is 443 m tall")


def test_a_label_is_right_letter_for_letter() -> None:
    minus = Question("4", "Which sign?", ("-1",))
    assert is_right("1", minus)
    assert not is_right("1", minus, is_label=True)
    assert is_right("-1", minus, is_label=True)
    assert is_right("1454 feet", FEET, is_label=True), "a regular expression is matched as ever"


def test_scores_are_means_and_text_overlap_is_of_texts_alone() -> None:
    scores = evaluate_answers(["Paris", "black cats", "1454 feet"], [PARIS, CATS, FEET])
    assert scores.n == 3
    assert scores.exact_match == pytest.approx(2 / 3)
    assert scores.f1 == pytest.approx((1 + 0.8) / 2)
    assert scores.bleu_1 == pytest.approx(2.718281828 ** (1 - 4 / 3))
    assert 0.5 < scores.rouge_l < 1.0


def test_nothing_to_average_is_no_number() -> None:
    only_regex = evaluate_answers(["1454 feet"], [FEET])
    assert (only_regex.n, only_regex.exact_match) == (1, 1.0)
    assert all(map(isnan, (only_regex.f1, only_regex.rouge_l, only_regex.bleu_1)))
    assert isnan(evaluate_answers([], []).exact_match)


def test_there_must_be_a_prediction_for_each_question() -> None:
    with pytest.raises(InvalidRequest, match="predictions must be 2, one a question, got 1"):
        evaluate_answers(["Paris"], [PARIS, CATS])
