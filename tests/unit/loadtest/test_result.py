"""Figures are what follows from the outcomes; parts of a run join to the whole."""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from math import ceil, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.errors import InvalidDocuments
from openbook.loadtest import histograms, outcomes
from openbook.loadtest.histograms import histogram, merged, read_log, write_log
from openbook.loadtest.outcomes import HANG, OK, REFUSED, Log, Outcomes, Reply
from openbook.loadtest.result import NothingMeasured, Result, latency, wrong
from openbook.loadtest.settings import LoadSettings

LATENCIES = st.lists(st.floats(1e-6, 3000), max_size=50)
EVENTS = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 20), st.sampled_from([OK, REFUSED, HANG, "UNAVAILABLE"])),
    max_size=40,
)


def settings(**values: Any) -> LoadSettings:
    return LoadSettings.model_validate({"address": "a:1", "duration_s": 8, "warm_up_s": 2, **values})


def logged(*events: tuple[float, float, str], begun: float = 100.0) -> Outcomes:
    """Each with intended time, latency and status."""
    log = Log(begun)
    for at, latency_s, status in events:
        log.add(at, begun + at, begun + at + latency_s, Reply(status, status))
    return log.outcomes()


def as_rows(found: Outcomes) -> list[tuple[Any, ...]]:
    statuses = [found.labels[label].status for label in found.label]
    return sorted(zip(statuses, found.intended_s, found.sent_s, found.done_s, found.about, found.digest, strict=True))


def test_a_window_without_a_question_is_not_measured() -> None:
    Result(settings(), logged((2.0, 0.1, OK)), 0.0, 0.0).check()
    with pytest.raises(
        NothingMeasured,
        match=r"^no question was asked within the 8 s that count: raise --duration, or the --rate if there is one$",
    ):
        Result(settings(), logged((1.9, 0.1, OK)), 0.0, 0.0).check()


@given(events=EVENTS)
def test_figures_are_counts_of_the_window(events: list[tuple[float, float, str]]) -> None:
    result = Result(settings(timeout_s=5), logged(*events), 0.0, 0.0)
    counted = [event for event in events if event[0] >= 2]
    found = result.measured
    assert found.n == len(counted)
    assert found.offered_rate == len(counted) / 8
    assert found.answered_rate == sum(status == OK for _, _, status in counted) / 8
    assert found.goodput_rate * 8 == sum(status == OK and late <= 5 for _, late, status in counted)
    assert found.n_hangs == sum(status == HANG for _, _, status in counted)
    assert result.warm_up
    assert result.warm_up.n == len(events) - len(counted)
    for each in result.seconds:
        assert each.counts == Counter(status for at, _, status in events if at == each.second)
    assert sum(each.n_good for each in result.seconds if each.second >= 2) == round(found.goodput_rate * 8)


@given(begun=st.floats(0, 1e8), at=st.floats(0, 1e5))
def test_questions_are_intended_when_the_schedule_says_so_whatever_the_clock_says(begun: float, at: float) -> None:
    assert logged((at, 1.0, OK), begun=begun).intended_s.tolist() == [at]


@given(events=EVENTS, cuts=st.lists(st.integers(0, 40), max_size=3))
def test_parts_join_to_the_whole(events: list[tuple[float, float, str]], cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(events)]
    parts = [logged(*events[a:b]) for a, b in pairwise(ends)]
    joined = outcomes.join(parts)
    assert as_rows(joined) == as_rows(logged(*events))
    assert Result(settings(), joined, 0.0, 0.0).measured == Result(settings(), logged(*events), 0.0, 0.0).measured


@given(events=EVENTS)
def test_outcomes_come_back_from_a_file(events: list[tuple[float, float, str]], tmp_path: Path) -> None:
    found = logged(*events)
    found.save(tmp_path / "outcomes.npz")
    assert as_rows(outcomes.load(tmp_path / "outcomes.npz")) == as_rows(found)
    (tmp_path / "outcomes.npz").write_bytes(b"PK\3\4 no such file")
    with pytest.raises(InvalidDocuments, match="holds no outcomes"):
        outcomes.load(tmp_path / "outcomes.npz")


@pytest.mark.parametrize("damage", [lambda whole, i: whole[:i], lambda whole, i: whole[:i] + b"\xff" + whole[i + 1 :]])
def test_damaged_outcomes_are_read_as_they_were_or_not_at_all(
    damage: Callable[[bytes, int], bytes], tmp_path: Path
) -> None:
    found, path = logged((0.5, 1.0, OK), (1.0, 2.0, OK)), tmp_path / "outcomes.npz"
    found.save(path)
    whole = path.read_bytes()
    n_refused = 0
    for i in range(0, len(whole), 7):
        path.write_bytes(damage(whole, i))
        try:
            assert as_rows(outcomes.load(path)) == as_rows(found)
        except InvalidDocuments:
            n_refused += 1
    assert n_refused > len(whole) / 7 / 2


@given(parts=st.lists(LATENCIES, min_size=1, max_size=4))
def test_merged_histograms_equal_one_of_all(parts: list[list[float]], tmp_path: Path) -> None:
    whole = histogram(np.array([each for part in parts for each in part]))
    each = [histogram(np.array(part)) for part in parts]
    assert merged(each).equals(whole)
    write_log(tmp_path / "x.hlog", 1e9, [(n, of) for n, of in enumerate(each) if of.get_total_count()])
    assert read_log(tmp_path / "x.hlog").equals(whole)


@given(latencies=st.lists(st.floats(1e-5, 1000), min_size=1, max_size=200))
def test_percentiles_are_right_to_three_digits(latencies: list[float]) -> None:
    found, ordered = latency(np.array(latencies)), sorted(latencies)
    assert found
    for name, share in (("p50_s", "0.5"), ("p90_s", "0.9"), ("p99_s", "0.99"), ("p999_s", "0.999")):
        least = ordered[ceil(Fraction(share) * len(ordered)) - 1]  # that so large a share does not exceed
        assert getattr(found, name) == pytest.approx(least, rel=0.002, abs=2e-6)
    assert found.max_s == pytest.approx(ordered[-1], rel=0.002, abs=2e-6)
    assert found.mean_s == pytest.approx(np.mean(latencies))


def test_where_one_in_sixty_is_slow_the_99th_percentile_is() -> None:
    found = latency(np.array([0.1] * 59 + [9.0]))
    assert found
    assert found.p90_s == pytest.approx(0.1, rel=0.002)
    assert found.p99_s == pytest.approx(9.0, rel=0.002)


def test_what_is_not_on_time_is_counted_against_the_generator() -> None:
    log = Log()
    for at, sent in ((3.0, 3.0), (3.1, 3.15), (3.2, 3.26), (3.3, nan)):
        log.add(at, sent, 4.0, Reply(OK, OK))
    found = Result(settings(), log.outcomes(), 0.0, 0.0).measured
    assert found.on_time == 0.5  # to the millisecond at the limit
    assert found.send_delay
    assert found.send_delay.n == 3


def test_a_first_token_counts_from_the_intended_start() -> None:
    log = Log(100.0)
    log.add(3.0, 103.2, 104.0, Reply(OK, OK, first=103.5))
    found = Result(settings(), log.outcomes(), 0.0, 0.0).measured.first_token
    assert found
    assert found.p50_s == pytest.approx(0.5, rel=0.002)


@pytest.mark.parametrize(
    ("digests", "expected"),
    [
        ([], (0, 0)),
        ([(1, 7)], (0, 0)),
        ([(1, 7), (1, 7), (1, 8)], (3, 1)),
        ([(1, 7), (2, 8)], (0, 0)),
        ([(0, 7), (0, 8)], (0, 0)),
    ],
)
def test_wrong_is_what_differs_from_most_of_its_like(digests: list[tuple[int, int]], expected: tuple[int, int]) -> None:
    log = Log()
    for about, digest in digests:
        log.add(0.0, 0.0, 1.0, Reply(OK, OK, "", nan, about, digest))
    assert wrong(log.outcomes()) == expected


def test_latencies_outside_of_an_hour_and_a_microsecond_are_kept_at_its_ends() -> None:
    found = histogram(np.array([0.0, 1e-9, 7200.0]))
    assert found.get_total_count() == 3
    assert found.get_max_value() / histograms.US == pytest.approx(3600, rel=0.001)
