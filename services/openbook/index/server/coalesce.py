"""Searches that wait together are searched together: one FAISS call for all that ask the same of the same snapshot."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from time import perf_counter

import numpy as np

from openbook.core.deadline import Clock
from openbook.core.types import Float32, Hits
from openbook.errors import DeadlineExceeded, ShardUnavailable
from openbook.index.server.pending import Later, PendingSearch, UnderWay
from openbook.index.server.waiting import SearchQueue, part_rows
from openbook.index.shard import engine
from openbook.telemetry import SEARCH_ROWS, SEARCH_SECONDS, refused
from openbook.tracing.spans import together

SHORT_S = 5e-3
"""A search that takes no longer is done by a thread of its stream: handing it over takes a tenth of a millisecond."""


class Coalescer:
    """One search at a time for all who wait: in a thread of its own, or by whoever brings a short one. And in one more
    thread what is far shorter than what is under way, and somebody else's.
    """

    def __init__(self, max_rows: int, max_batch: int, clock: Clock = time.monotonic) -> None:
        self._queue = SearchQueue(max_rows, max_batch, part_rows)
        self._lock = threading.Lock()
        self._clock = clock
        self._under_way: UnderWay | None = None
        self._last_s = 0.0  # what the last search took
        # Of C, where a Condition is of Python: it wakes in half the time.
        self._signals: SimpleQueue[bool] = SimpleQueue()
        self._beside: SimpleQueue[bool] = SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=work, name=name, daemon=True)
            for name, *work in (
                ("search", self._signals, self._search),
                ("search beside", self._beside, self._search_beside),
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def n_rows(self) -> int:
        """That wait."""
        return self._queue.n_rows

    def submit(self, search: PendingSearch) -> None:
        """Queue a search; `search.done` hears what came of it once somebody calls `go`.

        Raises:
            Overloaded: no place in the queue.
            ShardUnavailable: the server is stopping.
        """
        with self._lock:
            if self._closed:
                raise ShardUnavailable("this server is stopping")
            lost = self._queue.put(search)
            if self._under_way and self._under_way.lets_past(search):
                self._beside.put(True)
        if lost:
            refused("index", "rows").inc(len(lost))
            finish(*(each.fail(self._queue.overloaded()) for each in lost))

    def go(self, in_thread: bool = True) -> None:
        """See to it that those who wait are searched for: in the thread, or here, if it is soon done."""
        if not in_thread and self._last_s < SHORT_S and not engine.is_searching() and not self._search():
            return
        with self._lock:
            waits = not self._under_way and bool(self._queue)
            if waits and not self._closed:
                self._signals.put(True)
        while waits and self._closed and self._search():  # the thread may have ended
            pass

    def close(self) -> None:
        """Answer those who wait, take no more, end the threads. May be called twice."""
        with self._lock:
            self._closed = True
            self._signals.put(False)
            self._beside.put(False)
        for thread in self._threads:
            thread.join()

    def _work(self, signals: SimpleQueue[bool], search: Callable[[], bool]) -> None:
        while True:
            goes_on = signals.get()
            while search():
                pass
            if not goes_on:
                return

    def _search(self) -> bool:
        """Search for one batch, unless somebody else is at it, and tell whether others wait now. Whoever is at it looks
        again when it is done.
        """
        with self._lock:
            if self._under_way or not self._queue:
                return False
            batch, dropped = self._queue.take(self._clock())
            if batch:
                self._under_way = UnderWay(batch)
            waits = bool(self._queue)
        try:
            if batch:
                self._last_s = self._measured(batch)
        finally:
            if batch:
                with self._lock:
                    self._under_way = None
                    waits = bool(self._queue)
            if dropped:  # a flood of them keeps nobody waiting
                late = "deadline passed before it was this search's turn"
                finish(*(search.fail(DeadlineExceeded(late)) for search in dropped))
        return waits

    def _search_beside(self) -> bool:
        """Search for one that need not wait for the end of what is under way."""
        with self._lock:
            search = self._queue.take_beside(self._clock(), self._under_way) if self._under_way else None
        if search is None:
            return False
        self._measured([search])
        return True

    def _measured(self, batch: Sequence[PendingSearch]) -> float:
        """Search, and return the seconds that it took."""
        began = perf_counter()
        n_rows = search_together(batch)
        seconds = perf_counter() - began
        SEARCH_SECONDS.observe(seconds)
        SEARCH_ROWS.observe(n_rows)
        return seconds


def finish(*later: Later) -> None:
    """Do what is left to be done."""
    for each in dict.fromkeys(later) if len(later) > 1 else later:
        if each is not None:
            each()


def search_together(batch: Sequence[PendingSearch]) -> int:
    """Search once for searches that go together, and tell each its part. Returns their rows."""
    first = latest = batch[0]
    queries = first.queries[first.begin : first.end]
    if not (is_one := len(batch) == 1):  # which is the common case
        parts = [search.queries[search.begin : search.end] for search in batch]
        queries = np.concatenate(parts)
        latest = max(batch, key=lambda search: search.context.deadline.due)
    try:
        with together("FAISS", (search.context for search in batch), rows=len(queries), k=first.k):
            hits = first.shard.search_checked(queries, first.k, first.parameters, latest.context.deadline)
    except Exception as error:
        finish(*(search.fail(error) for search in batch))
    else:
        if is_one:
            finish(first.hear(hits))
        else:
            finish(*(search.hear(its) for search, its in zip(batch, _split(hits, parts), strict=True)))
    return len(queries)


def _split(hits: Hits, parts: Sequence[Float32]) -> Iterator[Hits]:
    """Those of each of the parts that were searched for together."""
    start = 0
    for part in parts:
        end = start + len(part)
        yield Hits(hits.ids[start:end], hits.scores[start:end], hits.snapshot_id)
        start = end
