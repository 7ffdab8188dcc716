"""Arrivals have the rate and the spread that was asked for, and questions their frequencies."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from openbook.loadtest.schedule import arrivals, choices, draw
from openbook.loadtest.settings import LoadSettings

SEEDS = st.integers(0, 2**63 - 1)
CVS = st.sampled_from([0.0, 0.5, 1.0, 2.0])


def settings(**values: Any) -> LoadSettings:
    return LoadSettings.model_validate({"address": "a:1", **values})


@given(rate=st.floats(0.1, 2000), duration_s=st.floats(0.1, 20), cv=st.floats(0.05, 5), seed=SEEDS)
def test_arrivals_ascend_within_the_run(rate: float, duration_s: float, cv: float, seed: int) -> None:
    found = arrivals(rate, duration_s, cv, np.random.default_rng(seed))
    assert (np.diff(found) >= 0).all()
    assert ((found >= 0) & (found < duration_s)).all()


@given(rate=st.floats(1, 1000), cv=CVS, seed=SEEDS)
def test_the_rate_is_what_was_asked_for(rate: float, cv: float, seed: int) -> None:
    n = 20_000
    found = arrivals(rate, n / rate, cv, np.random.default_rng(seed))
    assert abs(len(found) - n) <= 6 * cv * np.sqrt(n) + 1  # six deviations of a renewal process


@given(cv=st.floats(0.2, 3), seed=SEEDS)
def test_gaps_have_the_coefficient_of_variation(cv: float, seed: int) -> None:
    gaps = np.diff(arrivals(100, 500, cv, np.random.default_rng(seed)))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


def test_gaps_that_hardly_vary_are_drawn_and_none_that_a_float_cannot_hold() -> None:
    assert len(draw(settings(rate=50, arrivals="gamma", cv=0.001), 100).intended_s)
    with pytest.raises(ValidationError, match=r"cv\n.*equal to 0\.001"):
        settings(arrivals="gamma", cv=1e-170)


def test_constant_arrivals_are_even() -> None:
    assert arrivals(4, 1.0, 0, np.random.default_rng(0)).tolist() == [0, 0.25, 0.5, 0.75]


def test_poisson_counts_vary_as_much_as_they_are() -> None:
    found = arrivals(50, 2000, 1.0, np.random.default_rng(1))
    counts = np.bincount(found.astype(int), minlength=2000)
    assert counts.var() / counts.mean() == pytest.approx(1, rel=0.1)


@given(seed=SEEDS, kind=st.sampled_from(["poisson", "constant", "gamma"]))
def test_equal_seeds_draw_equal_schedules(seed: int, kind: str) -> None:
    one, same, other = (draw(settings(rate=50, arrivals=kind, seed=each), 100) for each in (seed, seed, seed ^ 1))
    assert one.intended_s.tolist() == same.intended_s.tolist()
    assert one.choice.tolist() == same.choice.tolist()
    assert one.choice.tolist() != other.choice.tolist()


@given(n=st.integers(1, 7))
def test_shares_of_processes_are_the_whole_schedule(n: int) -> None:
    whole = draw(settings(rate=30), 10)
    parts = [whole.share(number, n) for number in range(n)]
    joined = sorted((t, c) for part in parts for t, c in zip(part.intended_s, part.choice, strict=True))
    assert joined == list(zip(whole.intended_s, whole.choice, strict=True))


@given(zipf=st.sampled_from([0.0, 0.5, 1.0, 2.0]), seed=SEEDS)
def test_questions_come_as_often_as_zipf_says(zipf: float, seed: int) -> None:
    n = 50_000
    found = np.bincount(choices(n, 20, settings(zipf=zipf), np.random.default_rng(seed)), minlength=20)
    expected = n * np.arange(1, 21) ** -zipf / (np.arange(1, 21) ** -zipf).sum()
    assert (np.abs(found - expected) <= 6 * np.sqrt(expected)).all()


def test_a_replay_asks_in_order_again_and_again() -> None:
    assert draw(settings(rate=1, duration_s=5, warm_up_s=0, arrivals="constant", replay=True), 3).choice.tolist() == [
        *(0, 1, 2),
        *(0, 1),
    ]


def test_a_replay_in_a_closed_loop_begins_anew_only_at_the_end_of_the_file() -> None:
    found = draw(settings(closed=4, replay=True), 3_000)
    assert len(found.choice) == len(found.intended_s)
    assert len(found.choice) % 3_000 == 0
    assert len(draw(settings(closed=4, replay=True), 3_000_000).choice) == 3_000_000


def test_callers_in_a_closed_loop_have_questions_and_no_times() -> None:
    found = draw(settings(closed=4), 1_000)
    assert len(found.choice) == len(found.intended_s) > 10_000
    assert not found.intended_s.any()
