"""What waits to be searched for at an index server: whose turn it is, and who is searched for together. Pure."""

import math
from collections.abc import Callable, Hashable
from itertools import islice
from operator import itemgetter

from openbook.core.turns import Turns
from openbook.errors import Overloaded
from openbook.index.server.pending import PART_HITS, PART_ROWS, PendingSearch, UnderWay
from openbook.telemetry import refused

FLAT_PART_ROWS = 16
"""In place of PART_ROWS: a Flat index reads all its vectors for one row, and hardly longer for 16."""
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
        self._alone: list[PendingSearch] = []  # of one caller, while nobody else waits: in no turn yet
        self._n_alone = 0  # their rows
        self._n_asked = 0  # and those when he asked for the last of them
        self._latest: Hashable = None  # whose turn it was
        self._former: Hashable = None  # and before him
        self._shared_until = -math.inf
        self._asked: dict[Hashable, tuple[float, int]] = {}  # of each caller: when he asked, and rows he had then
        self._now = 0.0  # of the last batch

    def __len__(self) -> int:
        return len(self._turns) + len(self._alone)

    def __bool__(self) -> bool:
        return bool(self._alone or self._turns.n_callers)

    @property
    def n_rows(self) -> int:
        """That wait."""
        return self._turns.size + self._n_alone

    def put(self, search: PendingSearch) -> list[PendingSearch]:
        """Join the queue; whoever finds it empty may, whatever their size. Returns those who lost their places to it,
        the newest of whom most rows wait.

        Raises:
            Overloaded: there is no place.
        """
        n_alone = self._n_alone + len(search.queries)
        is_alone = self._alone and self._alone[0].ticket.caller == search.ticket.caller and n_alone <= self._max_rows
        if is_alone or not self:
            self._alone.append(search)
            self._n_alone = self._n_asked = n_alone
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
        if (batch := self._take_alone(now)) is not None:
            return batch, []
        self._line_up()
        self._now = now
        batch = []
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
                    light = min(light, max(1, int(self._at_once(search) / search.width)))
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

    def _take_alone(self, now: float) -> list[PendingSearch] | None:
        """All that wait, if they are of one caller and go together: the common case, of which the rest of `take` says
        the same, and is slow.
        """
        batch, n_rows = self._alone, self._n_alone
        if not batch or (n_rows > self._max_batch and len(batch) > 1):
            return None
        first = batch[0]
        for search in batch:
            if search.is_late(now) or not (search is first or first.goes_with(search)):
                return None
            search.end = len(search.queries)
        is_shared = self._is_shared(first.ticket.caller, now, self._n_asked)
        if n_rows > 1 and (first.width > 1 or (is_shared and n_rows > self._at_once(first))):
            return None
        self._turns.pass_by(first.ticket.caller, len(batch), n_rows * first.weight)
        self._alone, self._n_alone, self._now = [], 0, now
        return batch

    def _line_up(self) -> None:
        """Who waited alone takes turns with others from now on."""
        if self._alone:
            caller = self._alone[0].ticket.caller
            self._note(caller, self._now, self._n_asked)
            for search in self._alone:
                self._turns.put(caller, search, len(search.queries))
            self._alone, self._n_alone = [], 0

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
        if is_shared:
            self._note(caller, now, n_asked)
        else:
            self._asked = {caller: (now, n_asked)}
        return is_shared

    def _note(self, caller: Hashable, now: float, n_rows: int) -> None:
        """Those who asked last come last, so that who is forgotten comes first."""
        self._asked.pop(caller, None)
        self._asked[caller] = now, n_rows
        while next(iter(self._asked.values()))[0] <= now - SHARED_S:
            del self._asked[next(iter(self._asked))]

    def _at_once(self, search: PendingSearch) -> int:
        """Rows of its caller that are searched together while others share the server: no more than the least
        demanding of them had waiting when he asked.
        """
        return max(self._part_rows(search), min(self._asked.values(), key=itemgetter(1))[1])


def part_rows(search: PendingSearch) -> int:
    """See PART_ROWS and PART_HITS."""
    return max(1, min(FLAT_PART_ROWS if search.shard.reads_all else PART_ROWS, PART_HITS // search.k))
