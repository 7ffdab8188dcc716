"""What a model's pace predicts, after batches whose seconds follow a known rule."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.serving.workers.pace import BELIEVED_S, N_KEYS, OUTLIER, WASTED, Pace

SECONDS = st.floats(0, 1)


@given(start_s=SECONDS, slope=st.floats(0.001, 1), works=st.lists(st.integers(1, 16), min_size=12, max_size=40))
def test_it_finds_what_a_batch_costs_at_the_start_and_for_each_unit_of_work(
    start_s: float, slope: float, works: list[int]
) -> None:
    pace = Pace()
    for now, work in enumerate([*works, 1, 16]):
        pace.learn("key", work, start_s + slope * work, now)
    for work, n_batches in ((1, 1), (8, 1), (16, 1), (32, 2)):
        assert pace.seconds("key", work, n_batches) == pytest.approx(
            n_batches * start_s + slope * work, rel=1e-3, abs=1e-3
        )
    assert pace.worthwhile("key") == pytest.approx(start_s / (WASTED * slope), rel=0.05, abs=0.1)


@given(seed=st.integers(0, 99))
def test_noise_moves_predictions_no_further_than_itself(seed: int) -> None:
    pace, rng = Pace(), random.Random(seed)
    for now in range(100):
        work = rng.randint(1, 16)
        pace.learn("key", work, (0.2 + 0.1 * work) * rng.uniform(0.8, 1.2), now)
    for work in (1, 4, 16):
        assert pace.seconds("key", work) == pytest.approx(0.2 + 0.1 * work, rel=0.35)


@given(seed=st.integers(0, 99), unlucky=st.floats(1, 3))
def test_of_one_large_batch_that_took_long_no_batch_is_thought_not_to_pay(seed: int, unlucky: float) -> None:
    """As where two replicas warm up at once. None would be made that tells otherwise: all would go one by one."""
    pace, rng = Pace(), random.Random(seed)
    pace.learn("key", 1, 0.4, 0.0)
    pace.learn("key", 4, unlucky * 0.9, 0.0)  # with 0.2 s of it fixed
    for now in range(60):
        assert pace.worthwhile("key") >= 4
        pace.learn("key", 1, 0.4 * rng.lognormvariate(-0.08, 0.4), now)  # answers differ in length


def test_before_anything_was_seen_nothing_takes_time_and_any_batch_pays() -> None:
    assert Pace().seconds("key", 100) == 0.0
    assert Pace().worthwhile("key") == float("inf")


@pytest.mark.parametrize("more", [0, 0.1])
def test_of_batches_that_were_all_alike_seconds_go_with_work_and_a_larger_one_may_pay(more: float) -> None:
    """Nor do they tell more that differ by less than what they took does."""
    pace = Pace()
    for now in range(5):
        pace.learn("key", 4 + more * (now % 2), 2.0 - more * (now % 2), now)
    assert pace.seconds("key", 8) == pytest.approx(4.0, abs=2 * more)
    assert pace.worthwhile("key") == float("inf")


def test_what_was_not_seen_is_predicted_from_all_else_but_is_not_sure() -> None:
    pace = Pace()
    pace.learn("seen", 2, 1.0, 0.0)
    assert pace.seconds("other", 6) == pytest.approx(3.0)
    assert pace.is_sure("seen", BELIEVED_S - 0.1)
    assert not pace.is_sure("seen", BELIEVED_S + 0.1)
    assert not pace.is_sure("other", 0.0)


def test_a_machine_that_stood_still_once_is_not_believed_to_be_slow() -> None:
    pace = Pace()
    for now in range(10):
        pace.learn("key", 1, 1.0, now)
    pace.learn("key", 1, 1000.0, 10)
    assert pace.seconds("key", 1) < 1 + OUTLIER / 5


def test_a_model_that_became_slower_is_followed() -> None:
    pace = Pace()
    for now in range(60):
        pace.learn("key", 1, 1.0 if now < 20 else 10.0, now)
    assert pace.seconds("key", 1) > 8


def test_a_larger_batch_is_never_thought_to_take_less() -> None:
    pace = Pace()
    for now in range(5):
        for work, seconds in ((1, 2.0), (4, 1.0)):
            pace.learn("key", work, seconds, now)
    assert pace.seconds("key", 100) >= pace.seconds("key", 1)


def test_callers_who_ask_for_ever_other_settings_neither_fill_the_memory_nor_have_the_usual_ones_forgotten() -> None:
    pace = Pace()
    for key in range(10 * N_KEYS):
        pace.learn("usual", 1, 1.0, 0.0)
        pace.learn(key, 1, 1.0, 0.0)
    assert len(pace._of_key) == N_KEYS
    assert pace.is_sure("usual", 0.0)
    assert not pace.is_sure(0, 0.0)
    assert pace.is_sure(10 * N_KEYS - 1, 0.0)
