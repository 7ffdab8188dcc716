"""What is short runs between the steps of what is long, in one thread; each test decides when the long one ends."""

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from openbook.core.context import Context
from openbook.core.deadline import Check
from openbook.errors import InvalidRequest, ModelUnavailable
from openbook.serving.app import Ingress
from openbook.serving.workers.batching import Batcher
from openbook.serving.workers.encoder import EncoderDeployment
from openbook.serving.workers.generator import GeneratorDeployment
from openbook.serving.workers.worker import GIVES_WAY, Stopped, Worker, _Gpu, _look_at, apart, check_gpu
from openbook.testing import ManualClock

LONG, SHORT = 100, 1
NEVER = Context()


class Model:
    """Numbers of a hundred and more take steps until they are told to end."""

    def __init__(self) -> None:
        self.enough = threading.Event()
        self.begun = threading.Semaphore(0)
        self.threads: set[int] = set()
        self.finished: list[int] = []

    def __call__(self, items: Sequence[int], check: Check) -> list[int]:
        self.threads.add(threading.get_ident())
        if items[0] >= LONG:
            self.begun.release()
            while not self.enough.is_set():
                check()
        self.finished += items
        return list(items)


def run(test: Callable[[Model, Batcher[int, int]], Awaitable[None]]) -> Model:
    """The test beside a batch that is known to be long, and under way until `enough`."""
    model = Model()

    async def main() -> None:
        batcher: Batcher[int, int] = Batcher(
            model, name="model", max_batch=4, max_queue=8, key=lambda item: item >= LONG, work=lambda item: item
        )
        batcher.learn([LONG], 1000.0)
        batcher.learn([SHORT], 0.001)
        long = asyncio.create_task(batcher.submit(LONG, NEVER))
        await asyncio.to_thread(model.begun.acquire)
        try:
            await asyncio.wait_for(test(model, batcher), 60)  # else for ever, where something is let past no more
        finally:
            model.enough.set()
            assert await long == LONG
            await batcher.aclose()

    asyncio.run(main())
    return model


def test_a_short_question_does_not_wait_for_a_long_batch() -> None:
    async def test(model: Model, batcher: Batcher[int, int]) -> None:
        assert await asyncio.gather(*(batcher.submit(SHORT + n, NEVER) for n in range(3))) == [1, 2, 3]

    model = run(test)
    assert model.finished == [1, 2, 3, LONG]
    assert len(model.threads) == 1


def test_nor_does_one_that_came_before_the_long_batch_began() -> None:
    begun, go = threading.Event(), threading.Event()
    finished: list[int] = []

    def model(items: Sequence[int], check: Check) -> Sequence[int]:
        if items[0] >= LONG:
            begun.set()
            go.wait()
            check()
        finished.extend(items)
        return items

    async def main() -> None:
        batcher: Batcher[int, int] = Batcher(
            model, name="model", max_batch=1, max_queue=8, key=lambda item: item >= LONG, work=lambda item: item
        )
        batcher.learn([SHORT], 1.0)
        batcher.learn([LONG], 100.0)
        tasks = [asyncio.create_task(batcher.submit(item, NEVER)) for item in (SHORT, LONG, SHORT + 1)]
        await asyncio.to_thread(begun.wait)
        go.set()
        await asyncio.gather(*tasks)
        await batcher.aclose()

    asyncio.run(main())
    assert finished == [SHORT, SHORT + 1, LONG]


def test_a_stream_goes_on_beside_a_long_batch() -> None:
    def letters(check: Check) -> Iterator[str]:
        for letter in "abc":
            check()
            yield letter

    async def test(model: Model, batcher: Batcher[int, int]) -> None:
        assert [letter async for letter in batcher.stream(letters, NEVER)] == ["a", "b", "c"]
        assert model.finished == []

    run(test)


def test_a_stream_goes_on_beside_what_was_let_past_a_long_batch() -> None:
    """Else who asks for one heavy thing would stop the streams of all others for as long."""
    order: list[str] = []

    async def main() -> None:
        worker = Worker("worker", ManualClock())
        begun, go, let_past, on = (threading.Event() for _ in range(4))

        def long(check: Check) -> None:
            begun.set()
            go.wait()
            check()
            order.append("long")

        def heavy(check: Check) -> None:
            let_past.set()
            on.wait()
            check()
            order.append("heavy")

        tasks = [asyncio.create_task(worker.run(long))]
        await asyncio.to_thread(begun.wait)
        tasks.append(asyncio.create_task(worker.run_between(heavy)))
        await asyncio.sleep(0)
        go.set()
        await asyncio.to_thread(let_past.wait)
        tasks.append(asyncio.create_task(worker.run_between(lambda _: order.append("step"))))
        await asyncio.sleep(0)
        on.set()
        await asyncio.gather(*tasks)
        worker.shutdown()

    asyncio.run(main())
    assert order == ["step", "heavy", "long"]


def test_a_stream_goes_on_beside_the_long_first_step_of_another() -> None:
    order: list[str] = []

    async def test(model: Model, batcher: Batcher[int, int]) -> None:
        begun, go = threading.Event(), threading.Event()

        def long(check: Check) -> Iterator[str]:
            begun.set()
            go.wait()
            check()
            yield "long"

        async def listen(parts: Callable[[Check], Iterator[str]]) -> None:
            order.extend([part async for part in batcher.stream(parts, NEVER)])

        first = asyncio.create_task(listen(long))
        await asyncio.to_thread(begun.wait)
        other = asyncio.create_task(listen(lambda check: iter(["other"])))
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(first, other)

    run(test)
    assert order == ["other", "long"]


def test_of_streams_that_come_together_the_first_is_not_the_last() -> None:
    begun: list[int] = []

    async def test(model: Model, batcher: Batcher[int, int]) -> None:
        all_there = threading.Event()

        def parts(number: int) -> Callable[[Check], Iterator[int]]:
            def steps(check: Check) -> Iterator[int]:
                all_there.wait()
                check()
                begun.append(number)
                yield number

            return steps

        async def listen(number: int) -> None:
            assert [part async for part in batcher.stream(parts(number), NEVER)] == [number]

        tasks = [asyncio.create_task(listen(number)) for number in range(4)]
        await asyncio.sleep(0)
        all_there.set()
        await asyncio.gather(*tasks)

    run(test)
    assert begun[0] < 2


def test_another_question_of_the_long_kind_waits() -> None:
    async def test(model: Model, batcher: Batcher[int, int]) -> None:
        other = asyncio.create_task(batcher.submit(LONG + 1, NEVER))
        await batcher.submit(SHORT, NEVER)
        assert not other.done()
        model.enough.set()
        assert await other == LONG + 1

    assert run(test).finished == [SHORT, LONG, LONG + 1]


def turns(n_long: int, *between: str) -> list[str]:
    """Whose second it was: of long work of so many, or of what is let past, which is all there from the beginning."""
    clock = ManualClock()
    log: list[str] = []

    async def main() -> None:
        worker = Worker("worker", clock)
        begun, all_there = threading.Event(), threading.Event()

        def step(name: str) -> None:
            clock.advance(1)
            log.append(name)

        def long(check: Check) -> None:
            begun.set()
            all_there.wait()
            for _ in range(n_long):
                step("long")
                check()

        task = asyncio.create_task(worker.run(long))
        await asyncio.to_thread(begun.wait)
        past = [
            asyncio.create_task(worker.run_between(lambda _, name=name: step(name), *[True] * (name == "first")))
            for name in between
        ]
        await asyncio.sleep(0)
        all_there.set()
        assert await task == (None, float(n_long))
        assert await asyncio.gather(*past) == [(None, 1.0)] * len(between)
        worker.shutdown()

    asyncio.run(main())
    return log


def test_short_work_takes_half_of_the_time_and_is_not_counted_as_the_long_ones() -> None:
    assert turns(4, *["short"] * 4) == ["long", "short", "short", "long", "short", "long", "short", "long"]


def test_what_goes_first_waits_for_no_share_and_takes_none_from_what_is_short() -> None:
    log = turns(3, "short", "short", "first", "first", "first")
    assert log == ["long", "first", "first", "first", "short", "short", "long", "long"]


def test_who_asks_for_little_goes_before_a_flood_again_and_again() -> None:
    """No time passes but theirs: what is short would have to wait for its share."""
    clock = ManualClock()
    model = Model()

    def compute(items: Sequence[int], check: Check) -> Sequence[int]:
        clock.advance(items[0] < LONG)
        return model(items, check)

    async def main() -> None:
        batcher: Batcher[int, int] = Batcher(compute, name="model", max_batch=4, max_queue=8, clock=clock)
        for n in (1, 4):
            batcher.learn([LONG] * n, 1.0 + n)
        flood = [asyncio.create_task(batcher.submit(LONG, Context(caller="flood"))) for _ in range(4)]
        await asyncio.to_thread(model.begun.acquire)
        try:
            for n in range(2):
                assert await asyncio.wait_for(batcher.submit(n, Context(caller="little")), 60) == n
        finally:
            model.enough.set()
            await asyncio.gather(*flood)
            await batcher.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("error", [RuntimeError, Stopped, InvalidRequest])
def test_short_work_that_fails_takes_its_time_from_the_long_one_too(error: type[Exception]) -> None:
    clock = ManualClock()
    begun, enough = threading.Event(), threading.Event()

    def model(items: Sequence[int], check: Check) -> Sequence[int]:
        if items[0] < LONG:
            clock.advance(4)
            raise error
        begun.set()
        while not enough.is_set():
            check()
        return items

    async def main() -> None:
        batcher: Batcher[int, int] = Batcher(
            model, name="model", max_batch=4, max_queue=8, key=lambda item: item >= LONG, clock=clock
        )
        batcher.learn([LONG], 1000.0)
        batcher.learn([SHORT], 0.001)
        long = asyncio.create_task(batcher.submit(LONG, NEVER))
        await asyncio.to_thread(begun.wait)
        clock.advance(100)
        shorts = (batcher.submit(SHORT, NEVER) for _ in range(2))  # a batch; if invalid then each alone
        await asyncio.gather(*shorts, return_exceptions=True)
        await asyncio.sleep(0)
        left_s = batcher._queue._under_way.left_s
        enough.set()
        await long
        await batcher.aclose()
        assert left_s == pytest.approx(900)

    asyncio.run(main())


def test_what_fails_or_is_cancelled_between_leaves_the_long_work_alone() -> None:
    async def main() -> None:
        worker = Worker("worker", ManualClock())
        begun, go = threading.Event(), threading.Event()

        def long(check: Check) -> str:
            begun.set()
            go.wait()
            check()
            return "done"

        def broken(check: Check) -> None:
            raise RuntimeError("broken")

        task = asyncio.create_task(worker.run(long))
        await asyncio.to_thread(begun.wait)
        cancelled, failing = (asyncio.create_task(worker.run_between(broken)) for _ in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(RuntimeError, match="broken"):
            await failing
        assert (await task)[0] == "done"
        worker.shutdown()

    asyncio.run(main())


LOST = "CUDA error: an illegal memory access was encountered\nmore"
WHOLE = "out of memory", "invalid argument", "invalid configuration argument", "too many resources requested for launch"


@pytest.mark.parametrize("replica", [Ingress, EncoderDeployment, GeneratorDeployment])
@pytest.mark.parametrize("in_stream", [False, True])
def test_a_replica_that_has_lost_its_gpu_is_ill_for_ever(
    replica: Any, in_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openbook.serving.workers.worker._GPU", _Gpu())
    healthy = replica.__new__(replica)

    async def main() -> None:
        def model(errors: Sequence[Exception], check: Check) -> list[int]:
            raise errors[0]

        def step(check: Check) -> Iterator[int]:
            raise error
            yield 0

        batcher: Batcher[Exception, int] = Batcher(model, name="model", max_batch=4, max_queue=8)
        whole = [torch.AcceleratorError(f"CUDA error: {why}\nmore") for why in WHOLE]
        others = RuntimeError(LOST), torch.OutOfMemoryError("CUDA out of memory"), *whole
        for error in (*others, torch.AcceleratorError(LOST)):
            await healthy.check_health()
            with pytest.raises(type(error)):
                await (anext(batcher.stream(step, NEVER)) if in_stream else batcher.submit(error, NEVER))
        await batcher.aclose()
        for _ in range(2):
            with pytest.raises(ModelUnavailable, match=r"has lost its GPU: CUDA error: an illegal memory .*ed$"):
                await healthy.check_health()

    asyncio.run(main())


def test_no_result_is_written_out_to_look_for_such_errors() -> None:
    class Embedding:
        def __repr__(self) -> str:
            raise AssertionError("this takes longer than to compute it")

    async def main() -> None:
        batcher: Batcher[int, Embedding] = Batcher(
            lambda items, check: [Embedding()], name="model", max_batch=4, max_queue=8
        )
        assert isinstance(await batcher.submit(0, NEVER), Embedding)
        await batcher.aclose()

    asyncio.run(main())


@pytest.mark.parametrize(
    "why",
    [
        "misaligned address",
        "device-side assert triggered",
        "an illegal instruction was encountered",
        "unspecified launch failure",
        "the launch timed out and was terminated",
        "uncorrectable ECC error encountered",
        "hardware stack error",
        "operation not supported on global/shared address space",
        "invalid program counter",
        "tensor memory not completely freed",
        "the MPS client has been terminated by the server",
        "an async error has occured in external entity outside of CUDA",
        "context is destroyed",
        "unknown error",
    ],
)
def test_what_cuda_does_not_get_over(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openbook.serving.workers.worker._GPU", _Gpu())
    _look_at(torch.AcceleratorError(f"CUDA error: {why}\nmore"))
    with pytest.raises(ModelUnavailable, match=why):
        check_gpu()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no niceness of its own")
def test_who_loads_a_model_gives_way_to_those_who_answer() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = niceness()
    assert apart(niceness) == GIVES_WAY
    assert niceness() == before
