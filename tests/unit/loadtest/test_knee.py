"""The search for the knee, told by an endpoint that is a formula."""

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from openbook.loadtest.knee import Limits, find
from openbook.loadtest.outcomes import HANG, NOT_SENT, OK, Log, Reply
from openbook.loadtest.result import Result
from openbook.loadtest.settings import LoadSettings


def endpoint(settings: LoadSettings, capacity: float, can_send: float = 1e9) -> Result:
    """Answers so many questions of a second, and leaves the others."""
    log = Log()
    n = round(settings.rate * settings.duration_s)
    for i in range(n):
        at = i / settings.rate
        status = OK if i * capacity // settings.rate < (i + 1) * capacity // settings.rate else HANG
        status = OK if capacity >= settings.rate else status
        status = NOT_SENT if settings.rate > can_send else status
        log.add(at, float("nan") if status == NOT_SENT else at, at + settings.rate / 1000, Reply(status, status))
    return Result(settings, log.outcomes(), 0.0, 0.0)


def settings(rate: float) -> LoadSettings:
    return LoadSettings(address="a:1", rate=rate, duration_s=20.0, warm_up_s=0.0)


@settings_of_hypothesis(max_examples=20)
@given(capacity=st.floats(4, 200), start=st.floats(1, 150))
def test_it_is_found_from_below_and_from_above(capacity: float, start: float) -> None:
    found = find(settings(start), Limits(), lambda step: endpoint(step, capacity))
    assert found.rate
    assert found.above
    assert found.rate < found.above <= found.rate * 1.05
    assert capacity * 0.95 <= found.rate <= capacity * 1.03
    assert found.ended == "known to 5%"


def test_a_limit_of_p99_is_one_too() -> None:
    found = find(settings(10), Limits(p99_s=0.05), lambda step: endpoint(step, 1e9))
    assert found.rate == pytest.approx(50, rel=0.05)
    assert any(missed.startswith("p99 0.080 s > 0.05 s") for missed in found.missed)


def test_a_generator_that_does_not_keep_up_ends_the_search() -> None:
    found = find(settings(10), Limits(), lambda step: endpoint(step, 1e9, can_send=45))
    assert (found.rate, found.above) == (40, None)
    assert found.missed == ("", "", "", "the load generator did not keep up")
    assert found.ended.startswith("the load generator did not keep up at 80 a second")


def test_a_server_that_never_holds_ends_it_where_steps_say_nothing_any_more() -> None:
    found = find(settings(3), Limits(), lambda step: endpoint(step, 0.0))
    assert found.rate is None
    assert found.above == 0.75
    assert "a step has 10 to 5,000,000 questions, and would not at 0.375 a second" in found.ended
