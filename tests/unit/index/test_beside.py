"""What is searched for at once: a row that waits alone, and beside a long search what is far shorter."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import AS_BUILT, Float32, Hits, SearchParameters
from openbook.errors import DeadlineExceeded, Overloaded
from openbook.index.server.coalesce import Coalescer
from openbook.index.server.failed import Failed
from openbook.index.server.pending import SHORT, Later, Outcome, PendingSearch, Ticket, UnderWay
from openbook.index.server.waiting import SHARED_S, SearchQueue
from openbook.index.shard import engine

S = 60


class Shard:
    """Of which a search of few rows goes on beside others."""

    def goes_on_beside(self, n_rows: int) -> bool:
        return n_rows <= 64


ONE, ANOTHER = Shard(), Shard()


def search(n: int, caller: str, k: int = 5, due: float = 100.0, shard: Any = ONE) -> PendingSearch:
    context, queries = Context(Deadline(due)), np.zeros((n, 2), np.float32)
    return PendingSearch(shard, queries, k, AS_BUILT, context, lambda outcome: None, Ticket(caller))


def put(waiting: SearchQueue, *searches: PendingSearch) -> None:
    for each in searches:
        waiting.put(each)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.sampled_from("abc"), st.integers(0, 3))))
def test_a_row_that_waits_alone_is_taken_as_if_it_took_turns(steps: list[tuple[int, int, str, int]]) -> None:
    class InTurns(SearchQueue):
        def put(self, search: PendingSearch) -> list[PendingSearch]:
            lost = super().put(search)
            self._line_up()
            return lost

    found: list[list[Any]] = [[], []]
    for waiting, taken in zip((SearchQueue(6, 4), InTurns(6, 4)), found, strict=True):
        for number, (n_rows, k, caller, now) in enumerate(steps):
            if not n_rows:
                batch, dropped = waiting.take(now)
                for each in batch:
                    each.begin = each.end or 0
                taken.append([(each.ticket.size_bytes, each.end) for each in (*batch, *dropped)])
                continue
            asked = search(n_rows, caller, k, due=number % 4)
            asked.ticket.size_bytes = number  # by which it is known
            try:
                taken.append([each.ticket.size_bytes for each in waiting.put(asked)])
            except Overloaded as error:
                taken.append(str(error))
            taken.append((len(waiting), waiting.n_rows))
    assert found[0] == found[1]


def test_what_is_far_shorter_does_not_wait_for_a_long_search_of_somebody_else() -> None:
    waiting, long = SearchQueue(4096, 1024), search(4 * SHORT, "a")
    put(waiting, long)
    under_way = UnderWay(waiting.take(0)[0])
    assert under_way.searches == [long]
    own, too_long, other, late = search(1, "a"), search(5, "b"), search(4, "c"), search(1, "d", due=0)
    put(waiting, own, too_long, late, other)
    assert waiting.take_beside(0, under_way) is other
    assert waiting.take_beside(0, under_way) is None
    assert waiting.n_rows == 7  # all but that one go on waiting
    assert waiting.take(0)[0][0] in (own, too_long)


def test_what_cannot_be_searched_for_at_once_waits() -> None:
    for batch, asked in (
        (search(8, "a"), search(1, "b", shard=ANOTHER)),  # whose settings may be others
        (search(65, "a"), search(1, "b")),
        (search(64, "a", k=5000), search(65, "b")),
        (search(1000, "a", shard=ANOTHER), search(65, "b", shard=ANOTHER)),
    ):
        waiting = SearchQueue(4096, 1024)
        put(waiting, batch)
        under_way = UnderWay(waiting.take(0)[0])
        put(waiting, asked)
        assert waiting.take_beside(0, under_way) is None


def test_many_hits_make_a_search_long() -> None:
    def lets_past(batch: PendingSearch, asked: PendingSearch) -> bool:
        batch.end = len(batch.queries)
        return UnderWay([batch]).lets_past(asked)

    assert lets_past(search(2, "a", k=1000), search(1, "b"))
    assert not lets_past(search(2, "a"), search(1, "b"))
    assert not lets_past(search(7, "a"), search(1, "b", k=1000))


def test_what_failed_in_part_is_not_searched_again() -> None:
    waiting, failed = SearchQueue(4096, 1024), search(100, "a")
    put(waiting, search(1, "b"), failed)
    waiting.take(0)
    put(waiting, search(1, "b"))
    while failed.end is None:
        waiting.take(0)
    failed.fail(ZeroDivisionError())
    long = search(64, "c", k=10_000)
    long.end = 64
    assert waiting.take_beside(0, UnderWay([long])) is None
    assert waiting.take(0) == ([], [])
    assert not len(waiting)


def test_callers_of_long_ago_are_forgotten() -> None:
    waiting = SearchQueue(4096, 1024)
    for n in range(1000):
        put(waiting, search(1, f"caller {n // 2}", due=1e9), search(1, "other", due=1e9))
        while waiting:
            waiting.take(n * SHARED_S / 10)
    assert len(waiting._asked) < 20


class Blocked(Shard):
    """A shard whose searches of more than a row wait to be let go."""

    def __init__(self) -> None:
        self.searching, self.let_go = threading.Event(), threading.Event()

    def search_checked(self, queries: Float32, k: int, parameters: SearchParameters, deadline: Deadline) -> Hits:
        if len(queries) > 1:
            self.searching.set()
            assert self.let_go.wait(S)
        return Hits(np.zeros((len(queries), k), np.int64), np.zeros((len(queries), k), np.float32), "a")


class Told:
    """What callers of searches in a blocked shard have heard."""

    def __init__(self) -> None:
        self.shard, self.names = Blocked(), list[str]()
        self._changed = threading.Condition()

    def pending(self, n: int, caller: str) -> PendingSearch:
        asked = search(n, caller, due=1e12, shard=self.shard)

        def done(outcome: Outcome) -> Later:
            assert not isinstance(outcome, Failed)
            with self._changed:
                self.names.append(caller)
                self._changed.notify_all()
            return None

        asked.done = done
        return asked

    def has(self, *names: str) -> bool:
        """Whether it comes to this."""
        with self._changed:
            return self._changed.wait_for(lambda: self.names == list(names), S)


def test_short_ones_are_answered_while_a_long_one_is_under_way() -> None:
    told, searches = Told(), Coalescer(4096, 1024)
    searches.submit(told.pending(64, "long"))
    searches.go()
    assert told.shard.searching.wait(S)
    for caller in ("short", "another"):
        searches.submit(told.pending(1, caller))
    searches.go()
    assert told.has("short", "another")
    told.shard.let_go.set()
    assert told.has("short", "another", "long")
    searches.close()


def test_what_waits_while_it_closes_is_answered_by_whoever_is_at_it() -> None:
    told, searches = Told(), Coalescer(4096, 1024)
    searches.submit(told.pending(2, "read"))
    reader = threading.Thread(target=searches.go, args=(False,))
    reader.start()
    assert told.shard.searching.wait(S)
    searches.submit(told.pending(2, "waits"))
    searches.close()
    told.shard.let_go.set()
    reader.join(S)
    assert told.names == ["read", "waits"]


@pytest.fixture
def inside() -> engine._Turn:
    return engine._Turn(Deadline.never(), 7, 1, may_join=True)


def enter(turn: engine._Turn) -> tuple[threading.Thread, threading.Event]:
    """In a thread of its own, which leaves again."""
    entered = threading.Event()

    def run() -> None:
        with turn:
            entered.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread, entered


def until(holds: Callable[[], bool]) -> None:
    deadline = Deadline.after(S)
    while not holds():
        deadline.check("it was so")


def test_searches_under_the_same_settings_go_on_beside_each_other(inside: engine._Turn) -> None:
    with inside:
        assert engine.is_searching()
        with engine._Turn(Deadline.after(0), 7, 1, may_join=True):
            pass
        assert engine.is_searching()
        with engine.turn(Deadline.after(0)), inside:  # what uses no FAISS is in nobody's way
            pass
        for other in (
            engine._Turn(Deadline.after(0), 8, 1, may_join=True),  # of other settings
            engine._Turn(Deadline.after(0), 7, 1),  # through BLAS
        ):
            with pytest.raises(DeadlineExceeded, match="it was this search's turn"), other:
                pass
    assert not engine.is_searching()
    others = engine._Turn(Deadline.after(0), 8, 1, may_join=True)
    with engine.turn(Deadline.after(0)), inside, pytest.raises(DeadlineExceeded), others:
        pass


def test_nobody_joins_while_somebody_waits_for_all_to_be_done(inside: engine._Turn) -> None:
    with inside:
        waiting, entered = enter(engine._Turn(Deadline.after(S), 8))
        until(lambda: engine._INSIDE.n_waiting == 1)
        with pytest.raises(DeadlineExceeded), engine._Turn(Deadline.after(0), 7, 1, may_join=True):
            pass
        assert not entered.is_set()
    waiting.join(S)
    assert entered.is_set()
    with inside:
        pass
