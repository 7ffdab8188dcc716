import pytest

from openbook.errors import SnapshotMismatch
from openbook.index.server.held import HeldSnapshots
from openbook.testing import ManualClock


class Table:
    """Held snapshots that are their own ids."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.held = HeldSnapshots("a", "A", 1, retain_s=30, clock=self.clock)

    def ids(self) -> list[tuple[int, str]]:
        return self.held.held()


def test_a_publication_is_seen_at_once_and_the_former_one_drains() -> None:
    t = Table()
    t.held.prepare("b", "B")
    assert t.held.current_id == "a"
    assert t.held.acquire("b") == ("b", "B")
    t.held.release("b")
    t.held.publish("b", 2)
    assert (t.held.current_id, t.held.sequence, t.held.acquire("")) == ("b", 2, ("b", "B"))
    assert t.ids() == [(2, "B"), (1, "A")]
    t.clock.advance(29)
    assert t.held.drain() == []
    t.held.acquire("a")  # named: its time begins anew, and in use it stays for ever
    t.clock.advance(1000)
    assert t.held.drain() == []
    t.held.release("a")
    t.clock.advance(29)
    assert t.held.drain() == []
    t.clock.advance(1)
    assert t.held.drain() == ["a"]
    with pytest.raises(SnapshotMismatch, match="holds snapshot b, got a request for a"):
        t.held.acquire("a")


def test_the_grace_of_a_former_snapshot_begins_with_the_publication_and_is_that_of_all_before() -> None:
    t = Table()
    t.clock.advance(100)
    t.held.prepare("b", "B")
    t.held.publish("b", 2)
    t.held.follow("c", "C", 3)
    assert t.held.drain() == []
    t.clock.advance(30)
    assert t.held.drain() == ["a", "b"]


def test_a_former_snapshot_that_was_prepared_and_discarded_is_a_former_one_still() -> None:
    t = Table()
    t.held.prepare("b", "B")
    t.held.publish("b", 2)
    t.held.prepare("a", "A")
    t.held.discard("a")
    assert t.held.acquire("a") == ("a", "A")


def test_the_current_one_comes_first_and_then_the_latest() -> None:
    t = Table()
    for sequence, name in enumerate("bc", 2):
        t.held.prepare(name, name.upper())
        t.held.publish(name, sequence)
    t.held.publish("a", 4)
    t.held.prepare("d", "D")
    assert t.ids() == [(4, "A"), (3, "C"), (2, "B"), (0, "D")]


def test_neither_the_current_nor_a_prepared_snapshot_drains() -> None:
    t = Table()
    t.held.prepare("b", "B")
    t.clock.advance(1e9)
    assert t.held.drain() == []
    assert t.ids() == [(1, "A"), (0, "B")]


def test_a_former_snapshot_prepared_again_stays_for_the_roll_back() -> None:
    t = Table()
    t.held.prepare("b", "B")
    t.held.publish("b", 2)
    t.held.prepare("a", "A")
    t.clock.advance(1e9)
    assert t.held.drain() == []
    t.held.publish("a", 3)
    assert t.ids() == [(3, "A"), (2, "B")]


@pytest.mark.parametrize("is_current", [True, False])
def test_another_copy_takes_the_place_of_the_one_that_is_held_and_calls_end_with_theirs(is_current: bool) -> None:
    t = Table()
    t.held.prepare("b", "B")
    t.held.publish("b", 2)
    name, other = ("b", "a") if is_current else ("a", "b")
    held = t.held.acquire(name)
    t.held.prepare(name, "copy")
    assert held == (name, name.upper())
    assert t.held.acquire(name) == (name, "copy")
    t.held.publish(name, 2 if is_current else 3)
    assert [item for _, item in t.ids()] == ["copy", other.upper()]
    t.held.prepare(other, other.upper())
    t.held.publish(other, 4)
    t.clock.advance(1e9)
    t.held.release(name)
    t.clock.advance(1e9)
    assert t.held.drain() == [], "one call uses it still"
    t.held.release(name)
    t.clock.advance(30)
    assert t.held.drain() == [name]


def test_preparing_another_lets_go_of_the_one_before() -> None:
    t = Table()
    t.held.prepare("b", "B")
    t.held.prepare("c", "C")
    assert t.ids() == [(1, "A"), (0, "C")]


def test_what_was_prepared_and_is_asked_for_outlives_the_next_preparation() -> None:
    """Other servers have published it, and clients search it here too: without it the tier would have no whole one."""
    t = Table()
    t.held.prepare("b", "B")
    t.held.acquire("b")
    t.held.release("b")
    t.held.prepare("c", "C")
    assert t.held.acquire("b") == ("b", "B")
    t.held.release("b")
    t.clock.advance(29)
    assert t.held.drain() == []
    t.clock.advance(1)
    assert t.held.drain() == ["b"]
    assert t.ids() == [(1, "A"), (0, "C")]


def test_everything_may_be_asked_twice() -> None:
    t = Table()
    for _ in range(2):
        t.held.prepare("b", "B")
    for _ in range(2):
        t.held.publish("b", 2)
    assert t.ids() == [(2, "B"), (1, "A")]
    t.held.prepare("c", "C")
    for _ in range(2):
        t.held.discard("c")
    t.held.prepare("b", "B")  # current: nothing to prepare
    assert t.ids() == [(2, "B"), (1, "A")]


def test_what_cannot_be_published_or_discarded() -> None:
    t = Table()
    t.held.prepare("b", "B")
    with pytest.raises(SnapshotMismatch, match="cannot publish c"):
        t.held.publish("c", 2)
    for sequence in (0, 1):
        with pytest.raises(SnapshotMismatch, match=f"sequence must be above 1.*got {sequence}"):
            t.held.publish("b", sequence)
    with pytest.raises(SnapshotMismatch, match="a is current"):
        t.held.discard("a")


def test_a_snapshot_discarded_in_use_is_released_without_harm() -> None:
    t = Table()
    t.held.prepare("b", "B")
    name, item = t.held.acquire("b")
    t.held.discard("b")
    assert (item, t.held.find("b"), t.held.find("a")) == ("B", None, "A")
    t.held.release(name)
    assert t.ids() == [(1, "A")]
