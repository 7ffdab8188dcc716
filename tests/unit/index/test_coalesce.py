import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import AS_BUILT, Float32, Hits, SearchParameters
from openbook.errors import Overloaded, ShardUnavailable
from openbook.index.server.coalesce import Coalescer, search_together
from openbook.index.server.failed import Failed
from openbook.index.server.pending import PART_HITS, PART_ROWS, Later, Outcome, PendingSearch, Ticket
from openbook.index.server.waiting import MOST_PASSED, SHARED_S, SearchQueue, part_rows

HERE, THERE = object(), object()


def search(
    n: int = 1,
    k: int = 5,
    shard: Any = HERE,
    due: float = 100.0,
    wide: bool = False,
    caller: str = "",
    width: float = 1.0,
) -> PendingSearch:
    parameters = SearchParameters(nprobe=9) if wide else AS_BUILT
    context = Context(Deadline(due))
    queries = np.zeros((n, 2), np.float32)
    return PendingSearch(shard, queries, k, parameters, context, lambda outcome: None, Ticket(caller), width)


def queue(*searches: PendingSearch, max_rows: int = 100, max_batch: int = 64) -> SearchQueue:
    waiting = SearchQueue(max_rows, max_batch)
    for each in searches:
        waiting.put(each)
    return waiting


def test_all_that_ask_the_same_go_together_and_the_others_keep_their_order() -> None:
    a, b, c, d, e, f = search(3), search(k=6), search(2), search(shard=THERE), search(wide=True), search(k=6)
    waiting = queue(a, b, c, d, e, f)
    assert waiting.take(0) == ([a, c], [])
    assert waiting.take(0) == ([b, f], [])
    assert waiting.take(0) == ([d], [])
    assert waiting.take(0) == ([e], [])
    assert waiting.take(0) == ([], [])
    assert waiting.n_rows == 0


def test_the_late_and_the_cancelled_are_dropped_before_the_search() -> None:
    late, gone, live = search(due=10), search(), search(due=10.5)
    waiting = queue(late, gone, live)
    gone.ticket.cancelled = True
    assert waiting.take(10) == ([live], [late, gone])


def test_of_those_who_ask_something_else_few_are_looked_at() -> None:
    first, last = search(), search()
    waiting = queue(first, *(search(k=6) for _ in range(MOST_PASSED)), last)
    assert waiting.take(0) == ([first], [])
    assert len(waiting.take(0)[0]) == 64
    assert waiting.take(0) == ([last], [])


def test_a_live_search_hears_before_those_that_are_late() -> None:
    class Shard:
        def search_checked(self, queries: Float32, *_: object) -> Hits:
            return Hits(np.zeros((len(queries), 1), np.int64), np.zeros((len(queries), 1), np.float32), "a")

    told: list[str] = []
    over = threading.Event()

    def pending(name: str, due: float) -> PendingSearch:
        def done(outcome: Outcome) -> Later:
            told.append(name)
            return over.set if len(told) == 3 else None

        queries = np.zeros((1, 2), np.float32)
        return PendingSearch(Shard(), queries, 1, AS_BUILT, Context(Deadline(due)), done)  # type: ignore[arg-type]

    searches = Coalescer(100, 64, clock=lambda: 5.0)
    for name, due in (("late", 1.0), ("later", 1.0), ("live", 1e9)):
        searches.submit(pending(name, due))
    searches.go()
    assert over.wait(60)
    searches.close()
    assert told == ["live", "late", "later"]


def test_a_batch_is_bounded_and_one_search_may_be_larger() -> None:
    large, small = search(70), search(1)
    waiting = queue(large, small)
    assert waiting.take(0) == ([large], [])
    a, b, c = search(40), search(30), search(24)
    waiting = queue(a, b, c)
    assert waiting.take(0) == ([a, c], [])
    assert waiting.take(0) == ([b], [])


def test_the_queue_is_bounded_in_rows() -> None:
    waiting = queue(search(60), search(40))
    with pytest.raises(Overloaded, match="at most 100 query rows may wait, 100 do"):
        waiting.put(search(1))
    waiting.take(0)
    assert waiting.put(search(1)) == []
    assert len(queue(search(101))) == 1  # an empty queue takes whatever one request may hold


@given(st.lists(st.tuples(st.integers(1, 70), st.integers(1, 3), st.booleans(), st.integers(0, 2))))
def test_nobody_is_lost_or_answered_twice(asked: list[tuple[int, int, bool, int]]) -> None:
    searches = [search(n, k, HERE if here else THERE, due=due) for n, k, here, due in asked]
    waiting = queue(*searches, max_rows=10_000)
    assert waiting.n_rows == sum(n for n, *_ in asked)
    seen = []
    while waiting:
        batch, dropped = waiting.take(1.0)
        assert batch or dropped
        assert all(each.goes_with(batch[0]) for each in batch)
        assert len(batch) <= 1 or sum(len(each.queries) for each in batch) <= 64
        assert all((each.context.deadline.due <= 1.0) == (each in dropped) for each in (*batch, *dropped))
        seen += [*batch, *dropped]
    assert sorted(map(id, seen)) == sorted(map(id, searches))


class AllInTurn(SearchQueue):
    """Nobody goes the short way of who waits alone."""

    def put(self, search: PendingSearch) -> list[PendingSearch]:
        lost = super().put(search)
        self._line_up()
        return lost


CALLERS = st.sampled_from("ab")  # whose turns are exact in floating point, as thirds are not
SIZES = st.sampled_from([1, 3, 8, 70])
LIGHT, WIDE, MANY_HITS = (1.0, 5), (4.0, 5), (1.0, 1000)
KINDS = st.sampled_from([LIGHT, WIDE, MANY_HITS])


@given(st.lists(st.tuples(CALLERS, SIZES, KINDS, st.integers(0, 9), st.integers(0, 3))))
@example(  # rows of b's that cost two each pay off what a has had beyond his share
    [("a", 8, LIGHT, 9, 0), ("b", 70, MANY_HITS, 1, 2)]
    + 2 * [("b", 1, MANY_HITS, 9, 1)]
    + [("a", 1, LIGHT, 9, 0), ("b", 1, MANY_HITS, 9, 2)]
)
@example(5 * [("a", 1, LIGHT, 9, 1)] + 2 * [("a", 8, LIGHT, 9, 0)] + [("b", 8, LIGHT, 9, 1)])  # b asks when it is 4
def test_who_waits_alone_is_given_what_he_would_be_in_turn(
    asked: list[tuple[str, int, tuple[float, int], int, int]],
) -> None:
    queues, now = [kind(100, 64, lambda _: PART_ROWS) for kind in (SearchQueue, AllInTurn)], 0.0
    names: dict[PendingSearch, int] = {}
    for i, (caller, n, (width, k), due, n_batches) in enumerate((*asked, ("a", 1, (1.0, 5), 9, 3))):
        told = []
        for waiting in queues:
            each = search(n, k, due=now + due, caller=caller, width=width)
            names[each] = i
            try:
                seen: list[Any] = [[names[lost] for lost in waiting.put(each)]]
            except Overloaded as error:
                seen = [str(error)]
            for step in range(n_batches):
                batch, dropped = waiting.take(now + step)
                seen.append(([(names[one], one.begin, one.end) for one in batch], [names[one] for one in dropped]))
                for one in batch:
                    one.begin = one.end or 0  # as if it had been searched for
            told.append((seen, len(waiting), waiting.n_rows))
        assert told[0] == told[1]
        now += n_batches


def test_who_pipelines_much_is_searched_for_in_parts_and_others_come_between() -> None:
    floods = [search(256, caller="flood") for _ in range(8)]
    waiting = queue(*floods, max_rows=4096, max_batch=1024)
    small = search(caller="small")
    waiting.put(small)
    assert waiting.take(0) == ([small], [])
    assert waiting.take(0) == ([floods[0]], [])
    assert floods[0].end == PART_ROWS
    floods[0].begin = PART_ROWS  # as if it had been searched for
    another = search(3, caller="another")
    waiting.put(another)
    assert waiting.take(1) == ([another], [])
    assert waiting.take(1) == ([floods[0]], [])
    assert floods[0].end == 2 * PART_ROWS
    assert waiting.n_rows == 8 * 256 - 2 * PART_ROWS


@pytest.mark.parametrize("n_rows", [1, 60])
def test_searches_of_callers_who_ask_for_like_much_go_together(n_rows: int) -> None:
    searches = [search(n_rows, caller=str(i)) for i in range(4 * PART_ROWS)]
    waiting = queue(*searches, max_rows=4096, max_batch=1024)
    assert waiting.take(0) == (searches, [])
    assert all(each.end == n_rows for each in searches)


def cut(waiting: SearchQueue, caller: str, now: float, n_rows: int = 200) -> int:
    """The rows that a caller's search begins with. He has it to its end."""
    asked = search(n_rows, caller=caller)
    waiting.put(asked)
    ends = [0]
    while waiting:
        assert waiting.take(now) == ([asked], [])
        assert asked.end is not None
        ends.append(asked.end)
        asked.begin = asked.end  # as if it had been searched for
    assert ends[-1] == n_rows
    return ends[1]


def test_who_is_alone_is_not_cut_unless_one_who_asks_for_less_comes_between() -> None:
    waiting = queue(max_batch=1024)

    assert cut(waiting, "a", 0) == cut(waiting, "a", 0) == 200
    assert cut(waiting, "b", 0, 5) == cut(waiting, "b", 0, 5) == 5  # as a client that goes on with another stream
    assert cut(waiting, "a", 0) == cut(waiting, "a", SHARED_S - 1) == 5
    assert cut(waiting, "a", SHARED_S) == 200
    assert cut(waiting, "b", SHARED_S) == cut(waiting, "a", SHARED_S) == 200  # who asks for no less is no reason


@pytest.mark.parametrize("n_searches", [1, 64])
def test_who_was_cut_for_one_who_asks_for_less_is_whole_again_when_he_is_gone(n_searches: int) -> None:
    waiting = queue(max_batch=1024)

    def n_batches(caller: str, now: float) -> int:
        """That 64 rows of a caller take."""
        asked = [search(64 // n_searches, caller=caller) for _ in range(n_searches)]
        for each in asked:
            waiting.put(each)
        n = 0
        while waiting:
            batch, _ = waiting.take(now)
            n += 1
            for each in batch:
                each.begin = each.end or 0  # as if it had been searched for
        return n

    n_batches("a", 0)
    assert cut(waiting, "light", 0, 1) == 1
    for now in (0, SHARED_S - 1):
        assert n_batches("a", now) == n_batches("b", now) == 64 // PART_ROWS
    for _ in range(4):
        last = n_batches("a", SHARED_S), n_batches("b", SHARED_S)
    assert last == (1, 1)


def test_a_flood_is_cut_also_where_whoever_asks_for_less_goes_with_it() -> None:
    waiting, n_rows = queue(max_rows=4096, max_batch=1024), list[int]()
    for n in range(20):
        for _ in range(200):
            waiting.put(search(caller="flood"))
        if n % 2:
            waiting.put(search(caller="light"))
        n_rows.append(len(waiting.take(0.01 * n)[0]))
    assert max(n_rows[3:]) <= PART_ROWS + 1


def test_a_row_of_a_wide_search_counts_as_several() -> None:
    alone = search(60, wide=True, width=8)
    waiting = queue(alone, search(60, wide=True, width=8), max_rows=4096)
    assert waiting.take(0) == ([alone], [])
    assert alone.end == 64 // 8
    for others, n_rows in ((1, 1), (60, 60 // 8)):
        wide = search(64, wide=True, width=8, caller="wide")
        waiting = queue(search(others, caller="other"), wide, max_rows=4096)
        waiting.take(0)
        waiting.put(search(others, caller="other"))
        while wide.end is None:
            waiting.take(0)
        assert wide.end == n_rows


@pytest.mark.parametrize("costly", [{"width": 3.0, "wide": True}, {"k": 3 * PART_HITS // PART_ROWS}])
def test_whose_rows_cost_three_times_as_much_has_a_turn_where_others_have_three(costly: dict[str, Any]) -> None:
    waiting = queue(max_batch=1)
    for _ in range(12):
        waiting.put(search(caller="costly", **costly))
        waiting.put(search(caller="cheap"))
    turns = [each.ticket.caller for _ in range(12) for each in waiting.take(0)[0]]
    assert (turns.count("costly"), turns.count("cheap")) == (3, 9)


def test_a_full_queue_refuses_who_has_most_in_it() -> None:
    floods = [search(32, caller="flood") for _ in range(3)]
    waiting = queue(*floods, max_rows=100)
    assert waiting.put(search(5, caller="small")) == [floods[2]]
    with pytest.raises(Overloaded, match="at most 100 query rows may wait, 69 do"):
        waiting.put(search(32, caller="flood"))


class Counting:
    """A shard whose hits are the queries."""

    def search_checked(self, queries: Float32, *_: object) -> Hits:
        return Hits(queries[:, :1].astype(np.int64), queries[:, :1], "s")


def test_searches_together_have_the_time_of_the_one_that_has_most() -> None:
    dues = list[float]()

    class Noting(Counting):
        def search_checked(self, queries: Float32, k: int, parameters: object, deadline: Deadline) -> Hits:  # type: ignore[override]
            dues.append(deadline.due)
            return super().search_checked(queries)

    search_together([search(due=due, shard=Noting()) for due in (1e9, 3e9, 2e9)])
    assert dues == [3e9]


def test_who_lost_his_place_is_told_at_once_and_who_comes_after_the_end_too() -> None:
    told: list[Outcome] = []
    searches = Coalescer(100, 64)
    floods = [search(32, caller="flood") for _ in range(3)]
    for each in floods:
        each.done = told.append
        searches.submit(each)
    searches.submit(search(5, caller="small"))
    assert [outcome.code for outcome in told if isinstance(outcome, Failed)] == ["RESOURCE_EXHAUSTED"]
    searches._queue = queue()
    searches.close()
    with pytest.raises(ShardUnavailable, match="is stopping"):
        searches.submit(search())


@pytest.mark.parametrize(
    ("reads_all", "k", "n_rows"), [(True, 5, 16), (False, 5, 4), (True, 1000, 2), (False, 5000, 1)]
)
def test_parts_are_of_so_many_rows_that_nobody_waits_long(reads_all: bool, k: int, n_rows: int) -> None:
    assert part_rows(search(99, k, SimpleNamespace(reads_all=reads_all))) == n_rows


def test_what_failed_in_part_or_was_cancelled_is_told_once_and_searched_no_more() -> None:
    told: list[Outcome] = []

    class Broken:
        def search_checked(self, *_: object) -> Hits:
            raise ZeroDivisionError

    broken = search(3 * PART_ROWS, shard=Broken(), caller="a")
    broken.done = told.append
    waiting = queue(broken, search(caller="b"))
    for _ in range(4):
        batch, _ = waiting.take(0)
        if broken in batch:
            search_together(batch)
    assert [outcome.code for outcome in told if isinstance(outcome, Failed)] == ["INTERNAL"]
    assert waiting.take(0) == ([], [])
    assert not waiting


def test_each_hears_of_its_own_and_what_is_left_is_done_once_all_have_heard() -> None:
    told: list[object] = []

    def here() -> None:
        told.append("here")

    def done(name: str, later: Later) -> Any:
        def hear(outcome: Outcome) -> Later:
            assert isinstance(outcome, Hits)
            told.append((name, outcome.ids[:, 0].tolist()))
            return later

        return hear

    def pending(*numbers: int, name: str, later: Later) -> PendingSearch:
        queries = np.repeat(np.array(numbers, np.float32), 2).reshape(-1, 2)
        return PendingSearch(Counting(), queries, 1, AS_BUILT, Context(), done(name, later))  # type: ignore[arg-type]

    there = lambda: told.append("there")  # noqa: E731
    search_together(
        [
            pending(1, 2, name="a", later=here),
            pending(3, name="b", later=there),
            pending(4, name="c", later=None),
            pending(5, 6, name="d", later=here),
        ]
    )
    assert told == [("a", [1, 2]), ("b", [3]), ("c", [4]), ("d", [5, 6]), "here", "there"]


@pytest.mark.parametrize("n_rows", [1, PART_ROWS, 5 * PART_ROWS + 3])
def test_parts_are_put_together_as_if_they_had_been_searched_at_once(n_rows: int) -> None:
    told: list[Outcome] = []
    queries = np.arange(2 * n_rows, dtype=np.float32).reshape(-1, 2)
    search = PendingSearch(Counting(), queries, 1, AS_BUILT, Context(), told.append, Ticket("a"))  # type: ignore[arg-type]
    waiting = queue(search)
    waiting.put(PendingSearch(THERE, queries[:1], 1, AS_BUILT, Context(), told.append, Ticket("b")))  # type: ignore[arg-type]
    while waiting:
        batch, _ = waiting.take(0)
        if search in batch:
            search_together(batch)
    (hits,) = told
    assert isinstance(hits, Hits)
    np.testing.assert_array_equal(hits.scores, queries[:, :1])
    np.testing.assert_array_equal(hits.ids, queries[:, :1])
    assert hits.snapshot_id == "s"
