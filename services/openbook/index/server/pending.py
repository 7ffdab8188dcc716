"""A search that waits for its turn, a part of which is perhaps done, and those that are under way. Pure."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from openbook.core.context import Context
from openbook.core.types import Candidates, Float32, Hits, SearchParameters
from openbook.index.server.failed import CANCELLED, Failed, explain
from openbook.index.shard.shard import Shard

PART_ROWS = 4
"""Searched at once where callers share a server, for everyone waits for the FAISS call that is under way: so few that
one more costs about what it costs by itself.
"""
PART_HITS = 2000
"""Of these rows together, as exact scores cost too."""
SHORT = 4
"""What takes at most this part of a batch under way, of other callers, does not wait for its end."""

Outcome = Hits | Candidates | Failed
Later = Callable[[], None] | None
"""What is still to be done once all of a batch have heard; the same of several of them only once."""


@dataclass(eq=False, slots=True)
class Ticket:
    """By which the caller of something under way can let go of it."""

    caller: Hashable = None
    """Whose turns it takes: a stream, or a connection of gRPC's."""
    cancelled: bool = False
    size_bytes: int = 0
    """Of the reply, once it is known; before, about."""


@dataclass(eq=False, slots=True)
class PendingSearch:
    """A search that waits for its turn. `queries` are those that `Shard.check` gave back."""

    shard: Shard
    queries: Float32  # (n, d)
    k: int
    parameters: SearchParameters
    context: Context
    done: Callable[[Outcome], Later] = field(repr=False)
    """Told once what came of it, mostly in the searching thread: must be quick and must not raise."""
    ticket: Ticket = field(default_factory=Ticket)
    width: float = 1.0
    """How many times as much it looks at as one that is as its index was built."""
    begin: int = 0
    end: int | None = None
    """The rows that are searched next are those from `begin` to `end`, or all from `begin` on."""
    found: tuple[Hits, ...] = ()
    """Of the rows before `begin`."""
    is_over: bool = False

    @property
    def weight(self) -> float:
        """How many rows one of it counts for: of a search as its index was built for, and of few hits."""
        by_hits = self.k * (PART_ROWS / PART_HITS)
        return by_hits if by_hits > self.width else self.width

    @property
    def work(self) -> float:
        """Of the rows that are searched next."""
        return ((len(self.queries) if self.end is None else self.end) - self.begin) * self.weight

    def goes_with(self, other: "PendingSearch") -> bool:
        """Whether one FAISS call can answer both as it would answer each."""
        return self.shard is other.shard and self.k == other.k and self.parameters == other.parameters

    def is_late(self, now: float) -> bool:
        """Whether nobody wants to know any more, or knows already."""
        return self.is_over or self.ticket.cancelled or self.context.deadline.due <= now

    def hear(self, hits: Hits) -> Later:
        """Take the hits of the rows that were searched, and tell of all once there are no more."""
        n_heard = self.begin + len(hits.ids)
        if n_heard == len(self.queries):
            return self._tell(_joined((*self.found, hits)) if self.begin else hits)
        self.begin, self.found = n_heard, (*self.found, hits)
        return None

    def fail(self, error: Exception) -> Later:
        """Tell of it, unless nobody wants to know."""
        return self._tell(CANCELLED if self.ticket.cancelled else explain("Search", self.context.request_id, error))

    def _tell(self, outcome: Outcome) -> Later:
        self.is_over = True
        return self.done(outcome)


@dataclass
class UnderWay:
    """A batch while it is searched for."""

    searches: Sequence[PendingSearch]

    def lets_past(self, search: PendingSearch) -> bool:
        """Whether a search is so short that it does not wait for the end of this, in which its caller has no part."""
        return (
            search.work * SHORT <= self._work
            and search.shard is self.searches[0].shard
            and search.shard.goes_on_beside(len(search.queries))
            and search.shard.goes_on_beside(self._n_rows)
            and search.ticket.caller not in self._callers
        )

    @cached_property
    def _n_rows(self) -> int:
        return sum((search.end or 0) - search.begin for search in self.searches)

    @cached_property
    def _work(self) -> float:
        return sum(search.work for search in self.searches)

    @cached_property
    def _callers(self) -> set[Hashable]:
        return {search.ticket.caller for search in self.searches}


def _joined(parts: Sequence[Hits]) -> Hits:
    ids, scores = np.concatenate([hits.ids for hits in parts]), np.concatenate([hits.scores for hits in parts])
    return Hits(ids, scores, parts[0].snapshot_id)
