"""The batching loop, driven by events: every test decides itself when the worker is busy."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest
from prometheus_client import REGISTRY

from openbook.core.context import Context
from openbook.core.deadline import Check, Deadline
from openbook.errors import DeadlineExceeded, InvalidRequest, Overloaded
from openbook.serving.workers.batching import Asked, Batcher
from openbook.testing import ManualClock

NEVER = Context()


class Worker:
    """A model that doubles numbers and that the test can hold back. Refuses negative numbers, breaks at 13 and 14.

    Looks at its check once, after it was held back.
    """

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.stopped: list[list[int]] = []
        self.threads: set[int] = set()
        self.begun = threading.Semaphore(0)
        self.go = threading.Event()
        self.go.set()

    def __call__(self, items: Sequence[int], check: Check) -> list[int]:
        self.batches.append(list(items))
        self.threads.add(threading.get_ident())
        self.begun.release()
        self.go.wait()
        try:
            check()
        except Exception:
            self.stopped.append(list(items))
            raise
        if 13 in items:
            raise RuntimeError("13")
        if 14 in items:
            raise StopIteration("14")
        for item in items:
            if item < 0:
                raise InvalidRequest(f"item must be 0.., got {item}")
        return [2 * item for item in items]


def run(test: Callable[[Worker, Batcher[int, int]], Awaitable[None]], **options: object) -> Worker:
    """The test with a batcher that is closed after it."""
    worker = Worker()

    async def main() -> None:
        settings = {"name": "doubler", "max_batch": 4, "max_queue": 8, **options}
        batcher: Batcher[int, int] = Batcher(worker, **settings)  # type: ignore[arg-type]
        try:
            await test(worker, batcher)
        finally:
            worker.go.set()
            await batcher.aclose()

    asyncio.run(main())
    return worker


async def busy(worker: Worker, batcher: Batcher[int, int]) -> asyncio.Task[int]:
    """A task whose item is in the worker and stays there until `worker.go`."""
    (first,) = await held_back(worker, batcher, 0)
    return first


async def held_back(
    worker: Worker, batcher: Batcher[int, int], *items: int, context: Context = NEVER
) -> list[asyncio.Task[int]]:
    """Tasks whose items are one batch, in the worker until `worker.go`."""
    worker.go.clear()
    tasks = [asyncio.create_task(batcher.submit(item, context)) for item in items]
    await asyncio.to_thread(worker.begun.acquire)
    assert worker.batches[-1] == list(items)
    return tasks


def would_enter(batcher: Batcher[int, int], context: Context, is_stream: bool = False) -> None:
    with batcher.place(context, None, 1, is_stream):
        pass


async def gone(*tasks: asyncio.Task[int]) -> None:
    """Until these callers have gone."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def waiting(batcher: Batcher[int, int], *items: int, context: Context = NEVER) -> list[asyncio.Task[int]]:
    """Tasks whose items stand in the queue."""
    n_waiting = len(batcher._queue) + len(items)
    tasks = [asyncio.create_task(batcher.submit(item, context)) for item in items]
    while len(batcher._queue) < n_waiting:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return tasks


async def one_then_five(worker: Worker, batcher: Batcher[int, int]) -> None:
    first = await busy(worker, batcher)
    others = await waiting(batcher, 1, 2, 3, 4, 5)
    worker.go.set()
    assert await asyncio.gather(first, *others) == [0, 2, 4, 6, 8, 10]


def test_what_waits_while_the_worker_is_busy_is_the_next_batch() -> None:
    worker = run(one_then_five)
    assert worker.batches == [[0], [1, 2, 3, 4], [5]]
    assert len(worker.threads) == 1
    assert threading.get_ident() not in worker.threads


def test_the_event_loop_runs_while_the_model_does() -> None:
    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        first = await busy(worker, batcher)
        assert not first.done()  # we are here although the worker is busy
        worker.go.set()
        assert await first == 0

    run(test)


def test_who_has_a_place_is_not_refused_for_those_who_come_meanwhile() -> None:
    clock = ManualClock()

    def due(seconds: float) -> Context:
        return Context(Deadline.after(seconds, clock))

    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        batcher.learn([0], 1.0)
        (first,) = await held_back(worker, batcher, 1)
        with batcher.place(due(2.6), None, 1) as place:  # (1 + 1) * 1.25
            with pytest.raises(Overloaded, match=r"would be done in 3\.8 s"):
                await batcher.submit(3, due(2.6))
            behind = await waiting(batcher, 4, context=due(4))
            clock.advance(0.1)
            placed = asyncio.create_task(batcher.submit(2, due(2.5), place))
            await asyncio.sleep(0)
            worker.go.set()
            assert await asyncio.gather(first, placed, *behind) == [2, 4, 8]

    assert run(test, clock=clock, max_batch=1).batches == [[1], [2], [4]]


def test_a_place_keeps_no_worker_waiting_and_ends_with_its_body() -> None:
    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        with batcher.place(NEVER, None, 1):
            assert await batcher.submit(1, NEVER) == 2
            stream, full = batcher.place(NEVER, "stream", 1, is_stream=True), "the queue has room for 2, and 2 wait"
            with stream, pytest.raises(Overloaded, match=full):
                await batcher.submit(2, NEVER)
        with batcher.place(NEVER, "stream", 1, is_stream=True):
            assert await batcher.submit(3, NEVER) == 6
            assert REGISTRY.get_sample_value("openbook_queued", {"model": "doubler"}) == 1
        assert not len(batcher._queue)
        assert REGISTRY.get_sample_value("openbook_queued", {"model": "doubler"}) == 0

    assert run(test, max_queue=2).batches == [[1], [3]]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_place_is_for_one_and_for_such_as_it_was_kept_for(is_stream: bool) -> None:
    """More passages than were expected, or fewer: he comes anew, and takes no two places."""

    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        async def ask(n: int, place: Asked) -> None:
            if is_stream:
                assert [each async for each in batcher.stream(lambda _: iter([n]), NEVER, place=place)] == [n]
            else:
                assert await batcher.submit(n, NEVER, place) == 2 * n

        for work in (1, 7):
            with batcher.place(NEVER, None, work, is_stream) as place:
                await asyncio.gather(ask(1, place), ask(2, place))
                assert not len(batcher._queue)
            assert not len(batcher._queue)

    run(test)


def test_who_lost_his_place_to_others_hears_it_when_he_comes() -> None:
    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        held = await held_back(worker, batcher, 1)
        much, little = Context(caller="much"), Context(caller="little")
        with batcher.place(much, None, 1), batcher.place(much, None, 1) as place:
            held.append(asyncio.create_task(batcher.submit(2, little)))  # there is room for two, and he has none
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="the queue has room for 2, and 2 wait"):
                await batcher.submit(3, much, place)
        worker.go.set()
        await asyncio.gather(*held)

    assert run(test, max_queue=2).batches == [[1], [2]]


@pytest.mark.parametrize("options", [{}, {"kind": lambda key: "of all keys"}])
def test_only_equal_keys_share_a_batch_and_none_starves(options: dict[str, object]) -> None:
    worker = run(one_then_five, key=lambda item: item % 2, **options)
    assert worker.batches == [[0], [1, 3, 5], [2, 4]]


def test_a_full_queue_refuses_at_once_and_names_the_limit() -> None:
    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        first = await busy(worker, batcher)
        others = await waiting(batcher, 1, 2)
        with pytest.raises(Overloaded, match="doubler: the queue has room for 2"):
            await batcher.submit(3, NEVER)
        await gone(others[0])
        again = await waiting(batcher, 4)  # the cancelled one made room
        worker.go.set()
        assert await asyncio.gather(first, others[1], *again) == [0, 4, 8]

    assert run(test, max_queue=2).batches == [[0], [2, 4]]


def test_what_is_too_late_is_not_computed() -> None:
    clock = ManualClock()

    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        with pytest.raises(DeadlineExceeded):
            await batcher.submit(7, Context(Deadline.after(0, clock)))
        first = await busy(worker, batcher)
        (late,) = await waiting(batcher, 1, context=Context(Deadline.after(60, clock)))
        (other,) = await waiting(batcher, 2)
        clock.advance(60)
        worker.go.set()
        with pytest.raises(DeadlineExceeded, match="before doubler"):
            await late
        assert await asyncio.gather(first, other) == [0, 4]

    assert run(test).batches == [[0], [2]]


def test_what_a_batch_took_is_known_and_then_the_worker_is_free() -> None:
    clock = ManualClock()

    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        (first,) = await held_back(worker, batcher, 1)
        clock.advance(2)
        worker.go.set()
        await first
        with pytest.raises(DeadlineExceeded, match=r"it takes some 2\.0 s"):
            would_enter(batcher, Context(Deadline.after(1, clock)))
        would_enter(batcher, Context(Deadline.after(2, clock)))  # who is next needs no time to spare

    run(test, clock=clock)


def test_a_batch_that_nobody_waited_for_to_its_end_says_nothing_of_how_long_such_take() -> None:
    clock = ManualClock()

    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        batcher.learn([0], 2.0)
        await gone(*await held_back(worker, batcher, 1))
        worker.go.set()
        await batcher.aclose()
        with pytest.raises(DeadlineExceeded, match=r"it takes some 2\.0 s"):
            would_enter(batcher, Context(Deadline.after(1, clock)))

    assert run(test, clock=clock).stopped == [[1]]


def test_a_batch_that_was_stopped_for_being_late_is_known_to_take_longer() -> None:
    clock = ManualClock()

    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        batcher.learn([0], 1.0)
        (late,) = await held_back(worker, batcher, 1, context=Context(Deadline.after(3, clock)))
        clock.advance(3)
        worker.go.set()
        with pytest.raises(DeadlineExceeded):
            await late
        (first,) = await held_back(worker, batcher, 2, context=NEVER)
        with pytest.raises(Overloaded, match=r"doubler: would be done in"):
            await batcher.submit(3, Context(Deadline.after(3, clock)))
        worker.go.set()
        assert await first == 4

    assert run(test, clock=clock).stopped == [[1]]


def test_nobody_waits_for_a_busy_worker_longer_than_the_deadline() -> None:
    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        first = await busy(worker, batcher)
        with pytest.raises(DeadlineExceeded, match="before doubler was done"):
            await batcher.submit(1, Context(Deadline.after(0.01, ManualClock())))  # not over before it waits
        worker.go.set()
        assert await first == 0

    assert run(test).batches == [[0]]


def test_one_bad_item_does_not_fail_its_neighbours() -> None:
    clock = ManualClock(1000)

    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        first = await busy(worker, batcher)
        others = await waiting(batcher, 1, -1, 3)
        clock.advance(2)
        worker.go.set()
        results = await asyncio.gather(first, *others, return_exceptions=True)
        assert [results[0], results[1], results[3]] == [0, 2, 6]
        assert isinstance(results[2], InvalidRequest)
        assert str(results[2]) == "item must be 0.., got -1"

    def counted(name: str) -> float:
        return REGISTRY.get_sample_value(f"openbook_{name}", {"model": "one bad"}) or 0.0

    assert run(test, name="one bad", clock=clock).batches == [[0], [1, -1, 3], [1], [-1], [3]]
    assert (counted("batch_size_count"), counted("batch_size_sum")) == (2, 4)
    assert (counted("queue_seconds_count"), counted("queue_seconds_sum")) == (4, 3 * 2)


def test_a_broken_model_fails_its_batch_and_serves_the_next() -> None:
    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        for broken, why in ((13, "13"), (14, r"doubler: StopIteration\('14'\)")):
            with pytest.raises(RuntimeError, match=why):
                await asyncio.wait_for(batcher.submit(broken, NEVER), 60)
        assert await batcher.submit(1, NEVER) == 2

    run(test)


def test_as_many_results_as_items() -> None:
    async def main() -> None:
        batcher: Batcher[int, int] = Batcher(lambda items, check: [1, 2], name="liar", max_batch=4, max_queue=8)
        with pytest.raises(RuntimeError, match="liar: 1 items went in, 2 results came out"):
            await batcher.submit(1, NEVER)
        await batcher.aclose()

    asyncio.run(main())


def test_batches_run_between_the_steps_of_a_stream() -> None:
    steps: list[int] = []

    def count(check: Check) -> Iterator[int]:
        for i in range(4):
            steps.append(threading.get_ident())
            yield i

    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        seen = []
        async for i in batcher.stream(count, NEVER):
            seen.append(i)
            assert await batcher.submit(i, NEVER) == 2 * i
        assert seen == [0, 1, 2, 3]

    worker = run(test)
    assert set(steps) == worker.threads


def test_closing_a_stream_closes_its_source_and_frees_its_place() -> None:
    closed, closed_by = threading.Event(), set[int]()

    def forever(check: Check) -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            closed_by.add(threading.get_ident())
            closed.set()

    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        stream = batcher.stream(forever, NEVER)
        assert await anext(stream) == 1
        with pytest.raises(Overloaded, match="room for 1"):
            await batcher.submit(1, NEVER)
        await stream.aclose()  # type: ignore[attr-defined]
        assert await asyncio.to_thread(closed.wait, 60)
        assert await batcher.submit(1, NEVER) == 2

    assert run(test, max_queue=1).threads == closed_by


def test_a_stream_that_waits_for_a_place_begins_when_another_one_ends() -> None:
    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        async def listen() -> list[int]:
            return [part async for part in batcher.stream(lambda check: iter([3]), NEVER)]

        first = batcher.stream(lambda check: iter([1, 2]), NEVER)
        assert await anext(first) == 1
        second = asyncio.create_task(listen())
        await asyncio.sleep(0)
        assert [part async for part in first] == [2]
        async with asyncio.timeout(60):
            assert await second == [3]

    run(test, max_batch=1)


def test_a_stream_whose_caller_goes_at_the_moment_of_its_turn_leaves_it_to_the_next() -> None:
    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        async def listen(n: int) -> list[int]:
            return [part async for part in batcher.stream(lambda check: iter([n]), NEVER)]

        first = batcher.stream(lambda check: iter([1, 2]), NEVER)
        assert await anext(first) == 1
        gone, other = (asyncio.create_task(listen(n)) for n in (3, 4))
        await asyncio.sleep(0)
        gone.cancel()
        await first.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            assert await other == [4]
        assert gone.cancelled()

    run(test, max_batch=1)


def test_a_batch_stops_when_its_last_caller_has_gone() -> None:
    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        callers = await held_back(worker, batcher, 1, 2)
        await gone(*callers)
        (other,) = await waiting(batcher, 3)
        worker.go.set()
        assert await other == 6

    worker = run(test)
    assert worker.batches == [[1, 2], [3]]
    assert worker.stopped == [[1, 2]]


def test_a_batch_goes_on_while_one_caller_waits() -> None:
    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        first, second = await held_back(worker, batcher, 1, 2)
        await gone(first)
        worker.go.set()
        assert await second == 4

    assert run(test).stopped == []


def test_a_batch_stops_at_the_last_deadline_although_the_event_loop_is_behind() -> None:
    clock = ManualClock()

    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        late = await held_back(worker, batcher, 1, 2, context=Context(Deadline.after(60, clock)))
        clock.advance(60)
        worker.go.set()
        for task in late:
            with pytest.raises(DeadlineExceeded, match="before doubler was done"):
                await task

    assert run(test).stopped == [[1, 2]]


def test_beside_a_bad_item_only_what_is_wanted_is_computed_again() -> None:
    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        first, bad, third = await held_back(worker, batcher, 1, -1, 3)
        await gone(third)
        worker.go.set()
        assert await first == 2
        with pytest.raises(InvalidRequest):
            await bad

    assert run(test).batches == [[1, -1, 3], [1], [-1]]


class LongStep:
    """A stream of one step, which the test can hold back, as it can a `Worker`."""

    def __init__(self) -> None:
        self.begun, self.go, self.stopped = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, check: Check) -> Iterator[int]:
        self.begun.set()
        self.go.wait()
        try:
            check()
        except Exception:
            self.stopped.set()
            raise
        yield 1


@pytest.mark.parametrize("is_late", [False, True])
def test_a_stream_stops_within_a_step_when_its_caller_has_gone_or_is_late(is_late: bool) -> None:
    clock, step = ManualClock(), LongStep()

    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        stream = batcher.stream(step, Context(Deadline.after(60, clock)))
        part = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(step.begun.wait)
        if is_late:
            clock.advance(60)
        else:
            await gone(part)
        step.go.set()
        if is_late:
            with pytest.raises(DeadlineExceeded, match="before doubler was done"):
                await part
        assert await batcher.submit(1, NEVER) == 2  # the worker is free
        assert step.stopped.is_set()

    run(test)


def test_of_a_stream_that_is_late_it_is_learned_how_long_such_take_and_not_of_one_that_is_closed() -> None:
    clock = ManualClock()

    def slow(check: Check) -> Iterator[int]:
        for i in range(9):
            clock.advance(1)
            yield i

    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        batcher.learn([0], 1.0)
        with pytest.raises(DeadlineExceeded):
            async for _ in batcher.stream(slow, Context(Deadline.after(3, clock))):
                pass
        closed = batcher.stream(slow, NEVER)
        await anext(closed)
        await closed.aclose()  # type: ignore[attr-defined]
        with pytest.raises(DeadlineExceeded, match=r"it takes some [23]\.\d s"):
            would_enter(batcher, Context(Deadline.after(1, clock)), is_stream=True)

    run(test, clock=clock)


def test_a_stream_waits_for_a_busy_worker_no_longer_than_its_deadline() -> None:
    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        first = await busy(worker, batcher)
        with pytest.raises(DeadlineExceeded, match="before doubler was done"):
            await anext(batcher.stream(LongStep(), Context(Deadline.after(0.01, ManualClock()))))
        worker.go.set()
        assert await first == 0

    run(test)


def test_closing_ends_the_thread_and_lets_nobody_wait_for_ever() -> None:
    async def test(worker: Worker, batcher: Batcher[int, int]) -> None:
        first = await busy(worker, batcher)
        (other,) = await waiting(batcher, 1)
        closing = asyncio.create_task(batcher.aclose())
        worker.go.set()
        await closing
        assert not worker.threads & {thread.ident for thread in threading.enumerate()}
        results = await asyncio.gather(first, other, return_exceptions=True)
        assert results[0] == 0
        assert isinstance(results[1], asyncio.CancelledError)

    run(test)
