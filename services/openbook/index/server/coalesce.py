"""Searches that wait together are searched together: one FAISS call for all that ask the same of the same snapshot."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter

import numpy as np

from openbook.core.context import Context
from openbook.core.deadline import Clock
from openbook.core.types import Float32, Hits, SearchParameters
from openbook.errors import DeadlineExceeded, Overloaded, ShardUnavailable
from openbook.index.shard import engine
from openbook.index.shard.shard import Shard

Outcome = Hits | Exception
Later = Callable[[], None] | None
"""What is still to be done once all of a batch have heard; the same of several of them only once."""


@dataclass(eq=False, slots=True)
class Ticket:
    """By which the caller of something under way can let go of it."""

    cancelled: bool = False


@dataclass(eq=False, slots=True)
class PendingSearch:
    """A search that waits for its turn. `queries` are those that `Shard.check` gave back."""

    shard: Shard
    queries: Float32  # (n, d)
    k: int
    parameters: SearchParameters
    context: Context
    done: Callable[[Outcome], Later] = field(repr=False)
    """Told once what came of it, in the searching thread: must be quick and must not raise."""
    ticket: Ticket = field(default_factory=Ticket)

    def goes_with(self, other: "PendingSearch") -> bool:
        """Whether one FAISS call can answer both as it would answer each."""
        return self.shard is other.shard and self.k == other.k and self.parameters == other.parameters


class SearchQueue:
    """What waits, first come, first served. Pure: no lock, no clock, no search."""

    def __init__(self, max_rows: int, max_batch: int) -> None:
        self._max_rows = max_rows
        self._max_batch = max_batch
        self._waiting: deque[PendingSearch] = deque()
        self.n_rows = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, search: PendingSearch) -> None:
        """Join the queue; whoever finds it empty may, whatever their size.

        Raises:
            Overloaded: there is no place.
        """
        n_rows = self.n_rows + len(search.queries)
        if self._waiting and n_rows > self._max_rows:
            raise Overloaded(f"at most {self._max_rows} query rows may wait, {self.n_rows} do: try again later")
        self._waiting.append(search)
        self.n_rows = n_rows

    def take(self, now: float) -> tuple[list[PendingSearch], list[PendingSearch]]:
        """The next batch, of at most `max_batch` rows or one search, and those dropped as late or no longer wanted.

        The batch is the oldest search and all that go with it; what does not keeps its place.
        """
        batch: list[PendingSearch] = []
        dropped: list[PendingSearch] = []
        staying: deque[PendingSearch] = deque()
        n_rows = 0
        for search in self._waiting:
            if search.ticket.cancelled or search.context.deadline.due <= now:
                dropped.append(search)
            elif not batch or (search.goes_with(batch[0]) and n_rows + len(search.queries) <= self._max_batch):
                batch.append(search)
                n_rows += len(search.queries)
            else:
                staying.append(search)
        self._waiting = staying
        self.n_rows = sum(len(search.queries) for search in staying)
        return batch, dropped


SHORT_S = 5e-3
"""A search that takes no longer is done by the thread that read it: handing it over takes a tenth of a millisecond."""


class Coalescer:
    """One search at a time for all who wait: in a thread of its own, or by whoever brings a short one."""

    def __init__(self, max_rows: int, max_batch: int, clock: Clock = time.monotonic) -> None:
        self._queue = SearchQueue(max_rows, max_batch)
        self._lock = threading.Lock()
        self._clock = clock
        self._searching = False
        self._last_s = 0.0  # what the last search took
        # Of C, where a Condition is of Python: it wakes in half the time.
        self._signals: SimpleQueue[bool] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="search", daemon=True)
        self._thread.start()

    def submit(self, search: PendingSearch) -> None:
        """Queue a search; `search.done` hears what came of it once somebody calls `go`.

        Raises:
            Overloaded: no place in the queue.
            ShardUnavailable: the server is stopping.
        """
        with self._lock:
            if self._closed:
                raise ShardUnavailable("this server is stopping")
            self._queue.put(search)

    def go(self, in_thread: bool = True) -> None:
        """See to it that those who wait are searched for: in the thread, or here, if it is soon done."""
        if not in_thread and self._last_s < SHORT_S and not engine.is_searching():
            self._search()
        with self._lock:
            if self._queue and not self._searching:
                self._signals.put(True)

    def close(self) -> None:
        """Answer those who wait, take no more, end the thread. May be called twice."""
        with self._lock:
            self._closed = True
            self._signals.put(False)
        self._thread.join()

    def _work(self) -> None:
        while True:
            goes_on = self._signals.get()
            while self._search():
                pass
            if not goes_on:
                return

    def _search(self) -> bool:
        """Search for one batch, unless somebody else is at it. Whoever is looks again when it is done."""
        with self._lock:
            if self._searching or not self._queue:
                return False
            self._searching = True
            batch, dropped = self._queue.take(self._clock())
        try:
            late = "deadline passed before it was this search's turn"
            finish(*(search.done(DeadlineExceeded(late)) for search in dropped))
            if batch:
                began = perf_counter()
                search_together(batch)
                self._last_s = perf_counter() - began
        finally:
            with self._lock:
                self._searching = False
        return True


def finish(*later: Later) -> None:
    """Do what is left to be done."""
    for each in dict.fromkeys(later):
        if each is not None:
            each()


def search_together(batch: Sequence[PendingSearch]) -> None:
    """Search once for searches that go together, and tell each its part."""
    first = batch[0]
    queries = first.queries if len(batch) == 1 else np.concatenate([search.queries for search in batch])
    outcome: Outcome
    try:
        latest = max((search.context.deadline for search in batch), key=lambda deadline: deadline.due)
        outcome = first.shard.search_checked(queries, first.k, first.parameters, latest)
    except Exception as error:
        outcome = error
    row, later = 0, []
    for search in batch:
        end = row + len(search.queries)
        later.append(search.done(_rows(outcome, row, end) if isinstance(outcome, Hits) else outcome))
        row = end
    finish(*later)


def _rows(hits: Hits, start: int, end: int) -> Hits:
    return Hits(hits.ids[start:end], hits.scores[start:end], hits.snapshot_id)
