import math
from dataclasses import dataclass
from time import monotonic
from typing import Any

import pytest

from openbook.errors import Overloaded
from openbook.index.server.exchange import Peer
from openbook.index.server.streams import IDLE_S, OpenStreams


@dataclass(eq=False)
class Stream:
    """One that is busy, unless it is said to be idle."""

    peer: Peer
    idle_since: float = math.inf
    unread_since: float = math.inf
    came_to: str = ""

    def end(self) -> None:
        self.came_to = "ended"

    def break_off(self) -> None:
        self.came_to = "broken off"


def of(machine: str, connection: object = "", **state: float) -> Any:
    return Stream(Peer(machine, str(connection)), **state)


def admitted(*streams: Any) -> OpenStreams:
    """And no place is left."""
    found = OpenStreams(len(streams))
    for stream in streams:
        found.admit(stream)
    return found


def test_who_has_most_makes_room_until_all_have_like_many() -> None:
    many = [of("a", i) for i in range(6)]
    streams = admitted(*many)
    newcomers = [of("b", i) for i in range(3)]
    for newcomer in newcomers:
        streams.admit(newcomer)
    with pytest.raises(Overloaded, match="at most 6 streams at once"):
        streams.admit(of("b", 3))
    assert [stream.came_to for stream in many].count("broken off") == 3
    assert set(streams) == {*newcomers, *(stream for stream in many if not stream.came_to)}
    streams.admit(of("c"))
    with pytest.raises(Overloaded):
        streams.admit(of("a", 9))


def test_of_one_machine_a_connection_with_many_makes_room() -> None:
    busy, unread, other = of("a", 1), of("a", 1, unread_since=1.0), of("a", 2)
    streams = admitted(busy, unread, other)
    streams.admit(of("a", 3))
    assert (busy.came_to, unread.came_to, other.came_to) == ("", "broken off", "")
    with pytest.raises(Overloaded):
        streams.admit(of("a", 4))


def test_of_another_machine_that_has_no_more_no_connection_makes_room() -> None:
    streams = admitted(*(of("b", 1) for _ in range(3)), *(of("a", i) for i in range(3)))
    with pytest.raises(Overloaded):
        streams.admit(of("a", 4))


def test_one_that_was_used_just_now_makes_no_room() -> None:
    used = of("a", idle_since=monotonic())
    with pytest.raises(Overloaded):
        admitted(used).admit(of("b"))
    assert not used.came_to


def test_one_that_is_idle_makes_room_before_one_of_many() -> None:
    now = monotonic()
    idle = of("b", idle_since=now - IDLE_S)
    streams = admitted(of("a"), of("a"), of("a"), of("b", idle_since=now + 60), idle)
    streams.admit(of("c"))
    assert idle.came_to == "ended"
    assert {stream.came_to for stream in streams} == {""}


def test_who_does_not_read_is_broken_off() -> None:
    unread, busy = of("a", unread_since=1.0), of("a")
    admitted(unread, busy).end_unread(1.0)
    assert (unread.came_to, busy.came_to) == ("broken off", "")
