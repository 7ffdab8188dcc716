"""What waits to be searched for at an index server: whose turn it is, and who is searched for together. Pure."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

import numpy as np

from openbook.core.context import Context
from openbook.core.turns import Turns
from openbook.core.types import Candidates, Float32, Hits, SearchParameters
from openbook.errors import Overloaded
from openbook.index.server.failed import CANCELLED, Failed, explain
from openbook.index.shard.shard import Shard
from openbook.telemetry import refused

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
    found: list[Hits] = field(default_factory=list)
    """Of the rows before `begin`."""
    is_over: bool = False

    @property
    def weight(self) -> float:
        """How many rows one of it counts for: of a search as its index was built for, and of few hits."""
        return max(self.width, self.k * PART_ROWS / PART_HITS)

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
        self.found.append(hits)
        self.begin += len(hits.ids)
        return self._tell(_joined(self.found)) if self.begin == len(self.queries) else None

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


FLAT_PART_ROWS = 16
PART_ROWS = 4
"""Searched at once where callers share a server, for everyone waits for the FAISS call that is under way: so few that
one more costs about what it costs by itself. A Flat index reads all its vectors for one row, and hardly longer for 16.
"""
PART_HITS = 2000
"""Of these rows together, as exact scores cost too."""
SHORT = 4
"""What takes at most this part of a batch under way, of other callers, does not wait for its end."""
MOST_PASSED = 64
"""Who waits and does not go with a batch: no more of them are looked at, however many there are."""
SHARED_S = 3.0
"""How long a server counts as shared after two callers asked in turn: either may come again at any moment."""


class SearchQueue:
    """What waits, by turns. Pure: no lock, no clock, no search."""

    def __init__(
        self, max_rows: int, max_batch: int, part_rows: Callable[[PendingSearch], int] = lambda _: PART_ROWS
    ) -> None:
        self._max_rows = max_rows
        self._max_batch = max_batch
        self._part_rows = part_rows
        self._turns: Turns[PendingSearch] = Turns(max_rows)
        self._lone: PendingSearch | None = None  # who waits while nobody else does: in no turn yet
        self._latest: Hashable = None  # whose turn it was
        self._former: Hashable = None  # and before him
        self._shared_until = -math.inf
        self._asked: dict[Hashable, tuple[float, int]] = {}  # of each caller: when he asked, and rows he had then
        self._now = 0.0  # of the last batch

    def __len__(self) -> int:
        return len(self._turns) + (self._lone is not None)

    def __bool__(self) -> bool:
        return self._lone is not None or self._turns.n_callers > 0

    @property
    def n_rows(self) -> int:
        """That wait."""
        return self._turns.size + (len(self._lone.queries) if self._lone is not None else 0)

    def put(self, search: PendingSearch) -> list[PendingSearch]:
        """Join the queue; whoever finds it empty may, whatever their size. Returns those who lost their places to it,
        the newest of whom most rows wait.

        Raises:
            Overloaded: there is no place.
        """
        if not self:
            self._lone = search
            return []
        self._line_up()
        lost = self._turns.put(search.ticket.caller, search, len(search.queries))
        if search in lost:
            refused("index", "rows").inc()
            raise self.overloaded()
        # As he asks, not at his turn: that may come with another's, and who was cut has less waiting then.
        self._note(search.ticket.caller, self._now, self._turns.waiting(search.ticket.caller))
        return lost

    def overloaded(self) -> Overloaded:
        """Why there is no place."""
        return Overloaded(f"at most {self._max_rows} query rows may wait, {self.n_rows} do: try again later")

    def take(self, now: float) -> tuple[list[PendingSearch], list[PendingSearch]]:
        """The next batch, of at most `max_batch` rows or one search, and those dropped as late or no longer wanted.

        The batch is the search whose turn it is and all that go with it; what does not keeps its place. While callers
        share the server, those who have more waiting than another asks for, and than `part_rows`, get no more of it
        together, and a larger search goes in parts: so nobody waits long for what others ask for beyond that. A row of
        a wide search counts as several, also for who is alone: others may be behind him.
        """
        if (lone := self._lone) is not None and not lone.is_late(now):
            caller, n_rows = lone.ticket.caller, len(lone.queries)
            is_shared = self._is_shared(caller, now, n_rows)
            if n_rows == 1 or not (is_shared or lone.width > 1):  # the common case: the rest says the same, and is slow
                self._lone, lone.end, self._now = None, n_rows, now
                self._turns.pass_by(caller, n_rows * lone.weight)
                return [lone], []
        self._line_up()
        self._now = now
        batch: list[PendingSearch] = []
        dropped: list[PendingSearch] = []
        n_rows = n_heavy = n_passed = 0
        most = self._max_batch
        light: float = math.inf  # who has more rows waiting is heavy
        for search in self._turns.in_order(FLAT_PART_ROWS):
            n_left = len(search.queries) - search.begin
            if search.is_late(now):
                dropped.append(search)
                continue
            if not batch:
                if search.width > 1:
                    light = most = max(1, int(self._max_batch / search.width))
                if self._is_shared(search.ticket.caller, now):
                    n_rows_at_once = max(self._part_rows(search), self._least_asked())
                    light = min(light, max(1, int(n_rows_at_once / search.width)))
            is_heavy = self._turns.waiting(search.ticket.caller) > light
            if not batch:
                n_left = int(min(n_left, light))
            elif is_heavy and n_heavy + n_left > light:
                break  # who has little waiting comes before
            elif not search.goes_with(batch[0]) or n_rows + n_left > most:
                n_passed += 1
                if n_passed == MOST_PASSED:
                    break
                continue
            batch.append(search)
            search.end = search.begin + n_left
            n_rows += n_left
            n_heavy += n_left if is_heavy else 0
            if n_rows >= most:
                break
        for search in dropped:
            self._turns.remove(search)
        for search in batch:
            assert search.end is not None
            self._turns.give(search, search.end - search.begin, search.weight)
        return batch, [search for search in dropped if not search.is_over]

    def take_beside(self, now: float, under_way: UnderWay) -> PendingSearch | None:
        """One that this batch lets past, if any."""
        self._line_up()
        for search in islice(self._turns.in_order(FLAT_PART_ROWS), MOST_PASSED):
            if not search.begin and not search.is_late(now) and under_way.lets_past(search):
                self._is_shared(search.ticket.caller, now)
                search.end = len(search.queries)
                self._turns.give(search, search.end, search.weight)
                return search
        return None

    def _line_up(self) -> None:
        """Who waited alone takes turns with others from now on."""
        if self._lone is not None:
            caller, n_rows = self._lone.ticket.caller, len(self._lone.queries)
            self._note(caller, self._now, n_rows)
            self._turns.put(caller, self._lone, n_rows)
            self._lone = None

    def _is_shared(self, caller: Hashable, now: float, n_asked: int = 0) -> bool:
        if caller != self._latest:
            if caller == self._former:
                self._shared_until = now + SHARED_S
            self._former, self._latest = self._latest, caller
        if self._turns.n_callers > 1:
            self._shared_until = now + SHARED_S
        is_shared = now < self._shared_until
        if not n_asked:
            _, n_asked = self._asked.get(caller, (now, self._turns.waiting(caller)))
        if not is_shared:
            self._asked.clear()
        self._note(caller, now, n_asked)
        return is_shared

    def _note(self, caller: Hashable, now: float, n_rows: int) -> None:
        """Those who asked last come last, so that who is forgotten comes first."""
        self._asked.pop(caller, None)
        self._asked[caller] = now, n_rows
        while next(iter(self._asked.values()))[0] <= now - SHARED_S:
            del self._asked[next(iter(self._asked))]

    def _least_asked(self) -> int:
        """Rows that the least demanding of the latest callers had waiting when he asked."""
        return min(n_rows for _, n_rows in self._asked.values())


def part_rows(search: PendingSearch) -> int:
    """See PART_ROWS and PART_HITS."""
    return max(1, min(FLAT_PART_ROWS if search.shard.reads_all else PART_ROWS, PART_HITS // search.k))


def _joined(parts: Sequence[Hits]) -> Hits:
    if len(parts) == 1:
        return parts[0]
    ids, scores = np.concatenate([hits.ids for hits in parts]), np.concatenate([hits.scores for hits in parts])
    return Hits(ids, scores, parts[0].snapshot_id)
