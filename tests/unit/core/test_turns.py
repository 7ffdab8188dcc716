from collections import Counter, defaultdict
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.core.turns import Turns

AT_ONCE = 16


def give_next(turns: Turns[str]) -> str:
    item = next(turns.in_order(AT_ONCE))
    turns.give(item)
    return item


def test_callers_take_turns_however_much_one_of_them_asks_for() -> None:
    turns: Turns[str] = Turns(1000)
    for i in range(9):
        turns.put("much", f"much {i}", 1)
    for i in range(3):
        turns.put("little", f"little {i}", 1)
    given = [give_next(turns) for _ in range(6)]
    assert sorted(given) == ["little 0", "little 1", "little 2", "much 0", "much 1", "much 2"]


def test_a_turn_is_measured_by_the_size_of_what_is_given() -> None:
    turns: Turns[str] = Turns(1000)
    for i in range(9):
        turns.put("large", f"large {i}", 8)
        turns.put("small", f"small {i}", 2)
    given = [give_next(turns).split()[0] for _ in range(10)]
    assert Counter(given) == {"small": 8, "large": 2}


def test_what_costs_several_times_its_size_counts_so() -> None:
    turns: Turns[str] = Turns(1000)
    for i in range(20):
        turns.put("wide", f"wide {i}", 1)
        turns.put("narrow", f"narrow {i}", 1)
    given = Counter[str]()
    for _ in range(20):
        item = next(turns.in_order(AT_ONCE))
        turns.give(item, 1, 9.0 if item.startswith("wide") else 1.0)
        given[item.split()[0]] += 1
    assert given == {"narrow": 18, "wide": 2}


def test_who_comes_late_begins_where_the_costs_of_others_have_got_to() -> None:
    turns: Turns[str] = Turns(1000)
    for i in range(20):
        turns.put("wide", f"wide {i}", 1)
        turns.put("waits", f"waits {i}", 1)
    for i in range(2):
        turns.give(f"wide {i}", 1, 10.0)
    turns.put("late", "late", 1)
    assert [give_next(turns) for _ in range(9)] == [f"waits {i}" for i in range(9)]


def test_who_comes_late_neither_waits_for_all_others_nor_has_saved_up_turns() -> None:
    turns: Turns[str] = Turns(10_000)
    for caller in range(10):
        for i in range(20):
            turns.put(caller, f"{caller} {i}", 16)
    for _ in range(34):
        give_next(turns)
    for i in range(20):
        turns.put("late", f"late {i}", 16)
    given = [give_next(turns) for _ in range(22)]
    assert 1 <= sum(item.startswith("late") for item in given) <= 3
    turns.put("small", "small", 1)
    assert give_next(turns) == "small"


def assert_equal_shares(turns: Turns[str], *callers: str) -> None:
    """Of forty turns, where all of these go on asking for as much."""
    for n in range(60):
        for caller in callers:
            turns.put(caller, f"{caller} goes on {n}", 16)
    given = Counter(give_next(turns).split()[0] for _ in range(40))
    assert max(given[each] for each in callers) - min(given[each] for each in callers) <= 2


def test_who_used_what_nobody_else_wanted_owes_nothing_for_it() -> None:
    turns: Turns[str] = Turns(10_000)

    def heavy(n: int) -> None:
        turns.put("heavy", f"heavy {n}", 16)

    heavy(0)
    for n in range(900):
        if n % 3 == 0:
            turns.put("light", f"light {n}", 1)
        heavy(n + 1)
        while not give_next(turns).startswith("heavy"):
            pass
    assert_equal_shares(turns, "heavy", "late")


def test_nor_does_he_who_asked_for_one_thing_after_the_other() -> None:
    turns: Turns[str] = Turns(10_000)
    for n in range(300):
        turns.put("old" if n % 3 else "other", f"alone {n}", 16)
        give_next(turns)
    assert not turns._accounts, "callers come and go"
    assert_equal_shares(turns, "old", "late")


def test_new_callers_one_after_the_other_leave_turns_to_who_waits() -> None:
    turns: Turns[str] = Turns(10_000)
    for n in range(20):
        turns.put("waits", f"waits {n}", 16)
    given = list[str]()
    for n in range(600):
        turns.put(f"new {n}", f"new {n}", 16)
        given.append(give_next(turns).split()[0])
    assert given.count("waits") >= 10


def test_who_asks_for_more_while_he_waits_keeps_his_turn() -> None:
    turns: Turns[str] = Turns(10_000)
    for caller in "abc":
        for n in range(400):
            turns.put(caller, f"{caller} {n}", 1)
    turns.put("waits", "large", 20)
    given = list[str]()
    while "large" not in given:
        if len(given) % 20 == 10:
            turns.put("waits", f"small {len(given)}", 1)
        given.append(give_next(turns))
    assert len(given) <= 61


@pytest.mark.parametrize("n_floods", [1, 2, 3])
def test_who_had_to_wait_for_others_has_no_claim_to_the_turns_of_those_who_come_later(n_floods: int) -> None:
    turns: Turns[str] = Turns(10_000)
    for flood in range(n_floods):
        for n in range(2000):
            turns.put(f"flood {flood}", f"flood {flood} {n}", 1)
    for n in range(300):
        turns.put("little", f"little {n}", 1)
        turns.give(f"little {n}")
        for _ in range(5):
            give_next(turns)
    turns.put("newcomer", "newcomer", 1)
    assert "newcomer" in [give_next(turns) for _ in range(1 + n_floods)]


def test_who_waits_for_something_else_than_a_turn_takes_no_claim_along() -> None:
    turns: Turns[str] = Turns(10_000)
    turns.put("waits", "for a place", 1)
    for caller in "ab":
        for n in range(300):
            turns.put(caller, f"{caller} {n}", 1)
    for _ in range(400):
        turns.give(next(each for each in turns.in_order() if each != "for a place"))
    for n in range(50):
        turns.put("waits", f"waits {n}", 1)
    given = Counter(give_next(turns).split()[0] for _ in range(30))
    assert given["a"] >= 9
    assert given["b"] >= 9


def test_nor_does_he_where_nobody_else_waits() -> None:
    turns: Turns[str] = Turns(10_000)
    turns.put("waits", "for a place", 10)
    for n in range(100):
        turns.put("a", f"a {n}", 10)
        turns.give(f"a {n}")
    for caller in ("waits", "newcomer"):
        for n in range(20):
            turns.put(caller, f"{caller} {n}", 10)
    given = Counter(give_next(turns).split()[0] for _ in range(12))
    assert given["newcomer"] >= 5


@pytest.mark.parametrize("n_others", [2, 3])
def test_who_asks_and_goes_again_changes_nothing_by_doing_so_once_more(n_others: int) -> None:
    turns: Turns[str] = Turns(10_000)
    turns.put("waits", "for a place", 10)
    for n in range(100):
        for caller in "abc"[:n_others]:
            turns.put(caller, f"{caller} {n}", 10)
        turns.give(f"a {n}")

    def behind() -> float:
        """How far those who wait are, on average, behind the share."""
        given = [each.given for each in turns._accounts.values() if each.waiting]
        return turns._share - sum(given) / len(given)

    before, seen = behind(), []
    for n in range(3):
        turns.put("waits", f"gone {n}", 10)
        turns.remove(f"gone {n}")
        assert behind() == pytest.approx(before)
        seen.append((turns._share, [each.given for each in turns._accounts.values()]))
    assert seen[0] == seen[1] == seen[2]


def test_nor_does_he_whom_the_share_has_reached_since_he_was_here() -> None:
    def order(asks_before: bool) -> list[str]:
        turns: Turns[str] = Turns()
        turns.put("b", "b1", 1)
        turns.put("a", "a1", 1)
        turns.give("b1")  # above the share, which with the next one is as much
        turns.put("a", "a2", 1)
        turns.give("a1")
        if asks_before:
            turns.put("b", "b2", 1)
            turns.remove("b2")
        turns.put("b", "b2", 1)
        return list(turns.in_order())

    assert order(asks_before=True) == order(asks_before=False) == ["a2", "b2"]


def test_something_large_is_given_in_parts_and_others_come_between() -> None:
    turns: Turns[str] = Turns(1000)
    turns.put("much", "much", 100)
    assert next(turns.in_order(AT_ONCE)) == "much"
    turns.give("much", AT_ONCE)
    turns.put("little", "little", 1)
    assert list(turns.in_order(AT_ONCE)) == ["little", "much"]
    assert turns.size == 100 - AT_ONCE + 1
    assert turns.waiting("much") == 100 - AT_ONCE
    for i in range(2):
        turns.put("little", f"little {i}", AT_ONCE)
    assert list(turns.in_order(AT_ONCE)) == ["little", "much", "little 0", "little 1"]


def test_where_there_is_no_place_the_newest_of_who_has_most_must_go() -> None:
    turns: Turns[str] = Turns(10)
    assert turns.put("much", "a", 4) == []
    assert turns.put("much", "b", 4) == []
    assert turns.put("some", "c", 2) == []
    assert turns.put("little", "d", 1) == ["b"]
    assert turns.put("much", "e", 8) == ["e"]
    assert turns.put("other", "f", 100) == ["f"]
    assert sorted(turns.in_order(AT_ONCE)) == ["a", "c", "d"]
    turns.give("a", 1)
    assert turns.put("little", "g", 5) == ["g"]  # it would have most, for what was begun stays
    assert turns.size == 6


def test_what_was_begun_keeps_its_place_and_nothing_else_of_its_name() -> None:
    turns: Turns[str] = Turns(10)
    turns.put("much", "a", 9)
    turns.give("a", 1)
    assert turns.put("little", "b", 3) == ["b"]
    turns.give("a")
    assert turns.put("little", "b", 3) == []
    assert turns.put("much", "a", 7) == []
    assert turns.put("other", "c", 1) == ["a"]


def test_where_nothing_waits_there_is_place_for_anything() -> None:
    turns: Turns[str] = Turns(10)
    assert turns.put("anyone", "a", 100) == []
    assert give_next(turns) == "a"
    assert not turns


ACTIONS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=60)  # caller and size; size 0: give


@given(ACTIONS)
def test_nothing_is_lost_or_given_twice_and_each_caller_keeps_his_order(actions: list[tuple[int, int]]) -> None:
    turns: Turns[int] = Turns(60)
    put: defaultdict[int, list[int]] = defaultdict(list)
    out: defaultdict[int, list[int]] = defaultdict(list)
    refused: set[int] = set()
    sizes: dict[int, int] = {}
    caller_of: dict[int, int] = {}

    def give() -> None:
        for item in turns.in_order(AT_ONCE):
            part = min(AT_ONCE, sizes[item])
            sizes[item] -= part
            turns.give(item, part)
            if not sizes[item]:
                out[caller_of[item]].append(item)
            return

    for item, (caller, size) in enumerate(actions):
        if not size:
            give()
            continue
        put[caller].append(item)
        sizes[item], caller_of[item] = size, caller
        gone = turns.put(caller, item, size)
        refused.update(gone)
        assert turns.size <= 60 or len(turns) == 1
        assert turns.size == sum(size for item, size in sizes.items() if item not in refused)
        assert turns.waiting(caller) == sum(sizes[each] for each in put[caller] if each not in refused)
    while turns:
        give()
    for caller, items in put.items():
        assert out[caller] == [item for item in items if item not in refused]
    assert turns.size == 0
    assert not turns._accounts or all(account.given > turns._share for account in turns._accounts.values())


@given(st.lists(st.integers(1, AT_ONCE), min_size=2, max_size=6), st.integers(1, 60))
def test_shares_of_those_who_always_wait_differ_by_no_more_than_a_turn_each(sizes: list[int], n: int) -> None:
    turns: Turns[tuple[int, int]] = Turns(1 << 30)
    given_to = Counter(dict.fromkeys(range(len(sizes)), 0))
    for caller, size in enumerate(sizes):
        for i in range(1000):
            turns.put(caller, (caller, i), size)
    for _ in range(n):
        caller, i = next(turns.in_order(AT_ONCE))
        turns.give((caller, i))
        given_to[caller] += sizes[caller]
    assert max(given_to.values()) - min(given_to.values()) <= 2 * AT_ONCE


STEPS = st.lists(
    st.tuples(st.sampled_from("ab"), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from([1.0, 4.0]))
)


@given(STEPS)
def test_what_passes_by_counts_as_if_it_had_been_put_and_given(steps: list[tuple[str, list[int], float]]) -> None:
    passing, waiting = Turns[str](), Turns[str]()
    for caller, sizes, times in steps:
        for turns in (passing, waiting):  # so he has had more than his share
            turns.put("ab".replace(caller, ""), "other", 1)
            turns.put(caller, "before", 5)
            turns.give("before")
            turns.remove("other")
        passing.pass_by(caller, len(sizes), sum(sizes) * times)
        items = [f"{i}" for i in range(len(sizes))]
        for item, size in zip(items, sizes, strict=True):
            waiting.put(caller, item, size)
        for item in items:
            waiting.give(item, times=times)
        told = []
        for turns in (passing, waiting):
            after = deepcopy(turns)  # what he has had shows in whose turn it is next
            for i in range(40):
                after.put("ab"[i % 2], f"{i}", 1)
            told.append([give_next(after) for _ in range(40)])
        assert told[0] == told[1]
        assert passing._accounts.keys() == waiting._accounts.keys(), "nobody is remembered for longer"
