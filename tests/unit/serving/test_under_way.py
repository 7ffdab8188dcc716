"""What a worker computes, until when: with the hands of a clock."""

import pytest

from openbook.serving.workers.under_way import CREDIT_S, MOST_CALLERS, Shares, UnderWay
from openbook.testing import ManualClock


def test_what_is_let_past_puts_the_batch_off_by_what_it_took() -> None:
    clock = ManualClock()
    under_way: UnderWay[str] = UnderWay(clock)
    under_way.begin(["batch"], 10)
    clock.advance(1)
    for took_s in (1, 7):  # less than was predicted, and more
        under_way.let_past(4)
        clock.advance(took_s)
        under_way.went_past(took_s)
        assert under_way.left_s == 9


def test_and_not_by_the_time_for_which_it_waited_while_the_batch_went_on() -> None:
    clock = ManualClock()
    under_way: UnderWay[str] = UnderWay(clock)
    under_way.begin(["batch"], 10)
    for left_s in (6, 2):
        under_way.let_past(3)
        clock.advance(4 + 3)  # others had the share of what comes past
        under_way.went_past(3)
        assert under_way.left_s == left_s


def test_a_batch_that_begins_waits_for_what_the_one_before_let_past_and_for_nothing_of_its_own() -> None:
    clock = ManualClock()
    under_way: UnderWay[str] = UnderWay(clock)
    under_way.begin(["batch"], 10)
    under_way.let_past(4)
    clock.advance(1)
    under_way.end()
    assert under_way
    assert under_way.left_s == 4, "it begins only now: a batch does not end while it is stopped"
    clock.advance(1)
    under_way.end()
    assert under_way.left_s == 3
    under_way.begin(["next"], 5)
    assert under_way.left_s == 8
    clock.advance(2)
    under_way.went_past(3)
    assert under_way.left_s == 5
    under_way.end()
    under_way.end()
    assert not under_way
    under_way.let_past(5)  # the last of several, each alone
    clock.advance(1)
    assert under_way.left_s == 4


def test_others_wait_as_much_longer_as_time_goes_to_who_comes_before_them() -> None:
    clock = ManualClock()
    under_way: UnderWay[str] = UnderWay(clock)
    assert under_way.stretch == 1
    for _ in range(200):
        under_way.came_before(0.25)
        clock.advance(1)
    assert under_way.stretch == pytest.approx(4 / 3, rel=0.02)
    for _ in range(200):
        under_way.came_before(1)
        clock.advance(1)
    assert under_way.stretch == 2, "never more than that"


def test_what_came_before_others_is_forgotten_also_while_there_is_nothing_to_do() -> None:
    clock = ManualClock()
    under_way: UnderWay[str] = UnderWay(clock)
    for _ in range(200):
        under_way.begin(["batch"], 1)
        under_way.came_before(1)
        clock.advance(1)
        under_way.end()
    assert under_way.stretch == 2
    clock.advance(300)
    assert under_way.stretch == pytest.approx(1, abs=0.01)
    for _ in range(10):  # one in a minute, and it comes before another one
        under_way.begin(["batch"], 1)
        under_way.came_before(1)
        clock.advance(1)
        under_way.end()
        assert under_way.stretch < 1.1
        clock.advance(59)


def test_who_comes_has_a_bounded_claim_to_what_he_left_to_others_and_no_debt_for_what_nobody_else_wanted() -> None:
    shares = Shares()
    for _ in range(100):
        shares.begin(["alone"])
        shares.give("alone", 1)
    shares.begin(["alone"])
    assert shares.end("newcomer") == shares.end("alone") - CREDIT_S
    shares.give("newcomer", 5)
    assert shares.end("newcomer") == shares.end("alone") - CREDIT_S + 5
    shares.begin(["alone", "newcomer"])
    assert shares.end("third") == shares.end("alone") - CREDIT_S, "he comes after who is least far, not furthest"
    shares.begin(["newcomer"])
    assert shares.end("third") == shares.end("newcomer") - CREDIT_S
    shares.begin(["third"])
    assert shares.end("third") == shares.end("newcomer") - CREDIT_S, "nobody gets back"


def test_who_comes_begins_later_for_what_goes_first_and_not_behind_those_who_wait_for_it() -> None:
    shares = Shares()
    shares.begin(["much", "more"])
    shares.give("much", 4)
    shares.give("more", 8)
    for seconds, behind_s in ((6, 2), (3, 1), (99, 0), (99, 0)):
        shares.goes_first(seconds, {"much", "more"})
        assert shares.end("newcomer") == shares.end("much") - behind_s
    shares.goes_first(1, ())
    assert shares.end("newcomer") == shares.end("much"), "nobody waits"


def test_of_callers_with_ever_new_names_so_many_are_told_apart_who_got_furthest() -> None:
    shares = Shares()
    shares.give("much", 10)
    for n in range(2 * MOST_CALLERS):
        shares.give(f"newcomer {n}", 1)
    assert len(shares) == MOST_CALLERS
    assert shares.end("much") == 10 - CREDIT_S
    shares.begin(["much"])
    assert len(shares) == 1
