"""Signals of an answer, and the curve that makes a probability of them."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.core.confidence import LEAST_LOG, SIGNALS, Curve, confidence, signals
from openbook.core.types import Classification, Formulation, Generation, Passage

PASSAGES = [
    Passage(0, "", "", "Warsaw is a city."),
    Passage(1, "", "", "Paris, of Warsaw's size"),
    Passage(2, "", "", ""),
]
ANSWER = Generation("warsaw", (7, 8), math.log(0.25), np.log([0.5, 0.3, 0.2]), np.log([0.7, 0.2, 0.1]))
ONE = (1.0,) + (0.0,) * (len(SIGNALS) - 1)
finite = st.floats(-1e6, 1e6)


def test_the_signals_of_an_answer() -> None:
    found = dict(zip(SIGNALS, signals(ANSWER, PASSAGES), strict=True))
    wanted = {
        "log_likelihood": math.log(0.25),
        "per_token": math.log(0.5),
        "best_posterior": 0.7,
        "holding_posterior": 0.9,
        "holding_prior": 0.8,
        "best_prior": 0.5,
    }
    assert found == pytest.approx(wanted)


def test_an_answer_without_a_word_or_a_chance_has_finite_signals() -> None:
    empty = replace(ANSWER, text="", token_ids=(), log_likelihood=-math.inf)
    assert signals(empty, PASSAGES)[:2] == (LEAST_LOG, LEAST_LOG)
    assert np.isfinite(signals(empty, PASSAGES)).all()


@given(st.lists(finite, min_size=1, max_size=9), st.data())
def test_a_confidence_is_a_probability_and_never_falls_as_the_sum_rises(
    places: list[float], data: st.DataObject
) -> None:
    shares = data.draw(st.lists(st.floats(0, 1), min_size=len(places), max_size=len(places)))
    curve = Curve(ONE, 0.0, tuple(sorted(places)), tuple(sorted(shares)))
    asked = sorted(data.draw(st.lists(finite, min_size=2, max_size=9)))
    found = [curve.confidence((each, *ONE[1:])) for each in asked]
    assert all(low <= high + 1e-12 for low, high in pairwise(found))
    assert min(shares) <= found[0]
    assert found[-1] <= max(shares)


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        ((ONE[1:], 0.0, (0.0,), (0.5,)), "weights must be 6, one a signal, got 5"),
        ((ONE, 0.0, (1.0, 0.0), (0.5, 0.6)), "must be equally many and rise"),
        ((ONE, 0.0, (0.0, 1.0), (0.6, 0.5)), "must be equally many and rise"),
        ((ONE, 0.0, (0.0, 1.0), (0.5,)), "must be equally many and rise"),
        ((ONE, 0.0, (), ()), "must be equally many and rise"),
        ((ONE, 0.0, (0.0,), (1.5,)), "within 0..1"),
        ((ONE, math.nan, (0.0,), (0.5,)), "must be finite"),
    ],
)
def test_what_is_no_curve_is_refused(
    curve: tuple[tuple[float, ...], float, tuple[float, ...], tuple[float, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Curve(*curve)


def test_labels_and_formulations_that_nothing_was_fitted_to_have_none() -> None:
    calibration = {Formulation.SEQUENCE: Curve(ONE, 0.0, (-2.0, 0.0), (0.0, 1.0))}
    assert confidence(calibration, Formulation.SEQUENCE, ANSWER, PASSAGES) == pytest.approx(1 + math.log(0.25) / 2)
    assert confidence(calibration, Formulation.TOKEN, ANSWER, PASSAGES) is None
    zeros = np.zeros(1)
    label = replace(ANSWER, classification=Classification(("a",), zeros, zeros, ANSWER.log_prior, zeros[None]))
    assert confidence(calibration, Formulation.SEQUENCE, label, PASSAGES) is None
