"""Who gets in, on a clock that the test turns."""

from collections import deque
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from openbook import telemetry
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.errors import Overloaded, ShardUnavailable
from openbook.serving.endpoint.admission import MEMORY_S, Admission
from openbook.testing import ManualClock

WORK = 10


class House:
    """Whoever is let in stays until the test lets him go."""

    def __init__(self, max_n: int = 1000, max_work: int = 10**9) -> None:
        self.clock = ManualClock()
        self.admission = Admission(max_n, max_work, self.clock)
        self.stays: list[ExitStack] = []  # let go of, one would end

    def enter(self, timeout_s: float = 1e9, caller: str = "", work: int = WORK) -> ExitStack:
        stay = ExitStack()
        deadline = Deadline.after(timeout_s, self.clock)
        stay.enter_context(self.admission.admitted(Context(deadline, caller=caller), work))
        self.stays.append(stay)
        return stay

    def fill(self, n: int, **options: Any) -> None:
        for _ in range(n):
            self.enter(**options)

    def answers(self, per_s: float, n: int = 40) -> None:
        """One after another, each at this rate."""
        for _ in range(n):
            with self.enter():
                self.clock.advance(1 / per_s)


def test_an_answer_that_would_be_late_at_the_rate_of_late_is_refused_at_once() -> None:
    house = House()
    house.answers(per_s=2)
    house.fill(7)
    want_of_time = telemetry.refused("endpoint", "time")._value
    before = want_of_time.get()
    with pytest.raises(Overloaded, match=r"ready in 4.9 s, as things go, and is due in 4.0 s") as refused:
        house.enter(timeout_s=4)
    assert want_of_time.get() == before + 1
    assert refused.value.retry_after_s == pytest.approx(0.9, abs=0.05)
    house.enter(timeout_s=5.1)
    house.stays[-1].close()


def test_time_in_which_nobody_asked_says_nothing_about_the_rate() -> None:
    house = House()
    house.answers(per_s=2)
    house.clock.advance(1000)
    house.fill(7)
    house.enter(timeout_s=5.1)


def test_failures_and_cancelled_questions_are_no_answers() -> None:
    house = House()
    house.answers(per_s=2)
    for _ in range(1000):
        with pytest.raises(ShardUnavailable), house.enter():
            raise ShardUnavailable("gone")
    house.fill(7)
    with pytest.raises(Overloaded):
        house.enter(timeout_s=4)


def test_alone_one_is_let_in_however_slow_things_were() -> None:
    house = House()
    house.answers(per_s=0.01)
    with house.enter(timeout_s=1):
        house.clock.advance(0.1)


def test_a_faster_rate_is_noticed() -> None:
    house = House()
    house.answers(per_s=0.5)
    house.answers(per_s=10, n=600)
    house.fill(30)
    house.enter(timeout_s=5)


def test_a_slow_spell_is_not_taken_for_the_rate() -> None:
    house = House()
    house.answers(per_s=5)
    house.answers(per_s=0.2, n=3)  # a question waited for a replica that was lost
    house.fill(10)
    house.enter(timeout_s=5)


def test_whoever_stays_slow_is_found_to_be() -> None:
    house = House()
    house.answers(per_s=5)
    house.answers(per_s=0.2, n=60)
    house.fill(3)
    with pytest.raises(Overloaded):
        house.enter(timeout_s=15)


def test_at_ten_times_what_can_be_done_who_is_let_in_is_in_time() -> None:
    house = House()
    waiting: deque[tuple[float, ExitStack]] = deque()
    n_late = n_in_time = 0
    for tick in range(3000):
        house.clock.advance(0.05)
        with suppress(Overloaded):
            waiting.append((house.clock(), house.enter(timeout_s=10)))
        if tick % 10 == 0:
            came_at, stay = waiting.popleft()
            stay.close()
            if tick > 600:  # what came before anything was known is answered
                n_late += house.clock() - came_at > 10
                n_in_time += house.clock() - came_at <= 10
    assert n_late == 0 < n_in_time


def test_the_first_answers_of_a_process_are_not_believed() -> None:
    house = House()
    house.answers(per_s=0.2, n=3)
    house.fill(5)
    house.enter(timeout_s=5)


def test_nor_are_those_of_less_than_a_second() -> None:
    house = House()
    house.answers(per_s=5, n=4)
    house.fill(20)
    house.enter(timeout_s=1)


def test_who_only_retrieves_makes_no_rate_known() -> None:
    house = House()
    house.answers(per_s=0.2, n=1)
    for _ in range(9):
        with house.enter(work=0):
            pass
    house.fill(5)
    house.enter(timeout_s=5)


def test_who_was_here_takes_no_share() -> None:
    house = House(max_n=16)
    with house.enter(caller="gone", work=0):
        pass
    house.fill(16, work=0)


def test_nobody_is_told_to_stay_away_for_longer_than_what_was_seen_counts() -> None:
    house = House()
    house.answers(per_s=0.01)
    house.enter()
    with pytest.raises(Overloaded) as refused:
        house.enter(timeout_s=1)
    assert refused.value.retry_after_s == MEMORY_S


def test_nothing_is_known_at_the_start_and_everybody_let_in() -> None:
    house = House()
    house.fill(100, timeout_s=0.1)


def test_a_flood_of_one_keeps_nobody_else_out() -> None:
    house = House()
    house.answers(per_s=2)
    with pytest.raises(Overloaded):
        house.fill(1000, timeout_s=10, caller="much")
    for caller in "abc":
        house.enter(timeout_s=5, caller=caller)


def test_nobody_waits_for_more_than_is_in_flight() -> None:
    house = House()
    house.answers(per_s=2)
    house.fill(6, caller="much")
    house.enter(caller="little")
    house.enter(timeout_s=5.1, caller="much")  # for those seven, not for twice his six


def test_the_last_places_are_for_those_who_hold_few() -> None:
    house = House(max_n=16)
    house.enter(caller="little", work=0)
    with pytest.raises(Overloaded, match="14 questions are in flight, of max_in_flight = 16"):
        house.fill(16, caller="much", work=0)
    house.enter(caller="little", work=0)
    house.enter(caller="other", work=0)
    with pytest.raises(Overloaded, match="16 questions"):
        house.enter(caller="other", work=0)


def test_retrieval_is_no_work_of_the_generator() -> None:
    house = House()
    house.answers(per_s=0.1)
    house.enter()
    house.fill(100, timeout_s=0.1, work=0)


def test_who_only_retrieves_takes_no_share_of_the_generator() -> None:
    house = House()
    house.answers(per_s=2)
    house.fill(20, caller="much")
    for n in range(20):
        house.enter(caller=f"retrieves {n}", work=0)
    house.enter(caller="little")
    house.enter(timeout_s=3, caller="little")


def test_retrieval_says_nothing_about_the_rate() -> None:
    """Many a second, or one after the other for hours: nothing was generated, which says nothing of how fast it is."""
    house = House()
    house.answers(per_s=2)
    for _ in range(600):
        with house.enter(work=0):
            house.clock.advance(1)
    house.enter()
    house.enter(timeout_s=3)


def test_a_caller_by_himself_leaves_room_for_the_next() -> None:
    house = House(max_n=16)
    with pytest.raises(Overloaded, match="14 questions are in flight"):
        house.fill(16, caller="much", work=0)
    house.stays[0].close()
    house.enter(caller="much", work=0)
    house.fill(2, caller="little", work=0)

    house = House(max_work=16 * WORK)
    with pytest.raises(Overloaded, match="work of 140 is in flight"):
        house.fill(16, caller="much")
    house.enter(caller="little", work=2 * WORK)


def test_who_gives_up_all_that_he_asks_for_keeps_nobody_out() -> None:
    house = House()
    house.answers(per_s=10)
    for _ in range(40):  # each is given up after ten seconds, and the next is there already
        house.enter(caller="hangs")
        if len(house.stays) > 1:
            with suppress(TimeoutError), house.stays.pop(0):
                raise TimeoutError
        with house.admission.admitted(Context(caller="hangs")):  # retrieves, of which nothing comes either
            pass
        house.clock.advance(10)
    for caller in ("other", "third"):  # who have nothing else here
        house.enter(timeout_s=30, caller=caller)
    with pytest.raises(Overloaded):
        house.fill(2, timeout_s=30, caller="other")
    house.clock.advance(MEMORY_S)
    house.enter(timeout_s=30, caller="other")


def test_work_has_a_limit_of_its_own() -> None:
    house = House(max_work=3 * WORK)
    house.fill(3)
    with pytest.raises(Overloaded, match="work of 30 is in flight, and 10 more would exceed max_work_in_flight = 30"):
        house.enter()
    house.stays[-1].close()
    house.enter()
