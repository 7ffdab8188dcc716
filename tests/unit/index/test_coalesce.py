from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import AS_BUILT, Float32, Hits, SearchParameters
from openbook.errors import Overloaded
from openbook.index.server.coalesce import Later, Outcome, PendingSearch, SearchQueue, search_together

HERE, THERE = object(), object()


def search(n: int = 1, k: int = 5, shard: Any = HERE, due: float = 100.0, wide: bool = False) -> PendingSearch:
    parameters = SearchParameters(nprobe=9) if wide else AS_BUILT
    context = Context(Deadline(due))
    return PendingSearch(shard, np.zeros((n, 2), np.float32), k, parameters, context, lambda outcome: None)


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
    waiting.put(search(1))
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


class Counting:
    """A shard whose hits are the queries."""

    def search_checked(self, queries: Float32, *_: object) -> Hits:
        return Hits(queries[:, :1].astype(np.int64), queries[:, :1], "")


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
