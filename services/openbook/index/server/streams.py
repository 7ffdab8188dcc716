"""The streams of calls that are open. Where they are too many, one of them makes room for a newcomer."""

import threading
from collections import Counter
from collections.abc import Iterator
from time import monotonic

from openbook.errors import Overloaded
from openbook.index.server.exchange import CallStream
from openbook.telemetry import refused

IDLE_S = 1.0
"""A stream on which nothing was under way for so long makes room for another one: its client opens a new one."""


class OpenStreams:
    """Of one server. Thread-safe.

    Args:
        max_streams: at once.
    """

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._open: set[CallStream] = set()
        self._admitting = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[CallStream]:
        return iter(list(self._open))

    @property
    def n_under_way(self) -> int:
        """Calls of all of them."""
        return sum(stream.n_under_way for stream in self)

    def admit(self, newcomer: CallStream) -> None:
        """Where there are too many, that which is idle for longest ends; if none is idle, one of those who have most.

        Raises:
            Overloaded: there are too many, none is idle, and nobody has more of them than the newcomer would.
        """
        with self._admitting:
            if len(self._open) >= self._max_streams:
                self._make_room(newcomer)
            self._open.add(newcomer)

    def leave(self, stream: CallStream) -> None:
        """It is over."""
        with self._admitting:
            self._open.discard(stream)

    def end_unread(self, since: float) -> None:
        """Break off those whose client has not taken a reply since then or longer."""
        for stream in self:
            if stream.unread_since <= since:
                stream.break_off()

    def _make_room(self, newcomer: CallStream) -> None:
        idle = min(self._open, key=lambda each: each.idle_since)
        if monotonic() - idle.idle_since >= IDLE_S:
            self._open.discard(idle)
            idle.end()
        elif one_of_many := self._one_of_many(newcomer):
            self._open.discard(one_of_many)
            one_of_many.break_off()  # if it only ended, who does not read would keep its thread
        else:
            refused("index", "streams").inc()
            raise Overloaded(f"at most {self._max_streams} streams at once")

    def _one_of_many(self, newcomer: CallStream) -> CallStream | None:
        """A stream of who has most of them: of all machines, else of the connections from the newcomer's. None where he
        would then have fewer than the newcomer.
        """
        streams = list(self._open)
        for n in (1, 2):
            counts = Counter(each.peer[:n] for each in streams)
            for most, n_most in counts.most_common(1):
                if n_most > counts[newcomer.peer[:n]] + 1:
                    theirs = (each for each in streams if each.peer[:n] == most)
                    return min(theirs, key=lambda each: (each.idle_since, each.unread_since))
            streams = [each for each in streams if each.peer.machine == newcomer.peer.machine]
        return None
