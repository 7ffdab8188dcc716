"""One computation for all who want the same: whoever goes, whoever comes, whatever it ends in."""

import asyncio
import contextvars
import random
from collections.abc import Callable

import pytest

from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.errors import DeadlineExceeded, InvalidRequest, Overloaded
from openbook.rag.in_flight import InFlight
from openbook.testing import ManualClock


class Work:
    """Computations that end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[Context] = []
        self.cancelled = 0
        self.results: list[asyncio.Future[str]] = []

    async def __call__(self, context: Context) -> str:
        self.begun.append(context)
        self.results.append(asyncio.get_running_loop().create_future())
        try:
            return await self.results[-1]
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def context(timeout_s: float = 60.0, caller: str = "") -> Context:
    return Context(Deadline.after(timeout_s), caller=caller)


async def settled() -> None:
    """All that can go on without anything from outside has gone on."""
    for _ in range(20):
        await asyncio.sleep(0)


def ask(
    flights: InFlight[str], work: Work, key: str = "key", timeout_s: float = 60.0, caller: str = ""
) -> asyncio.Task[str]:
    return asyncio.create_task(flights.get(key, work, context(timeout_s, caller)))


def test_a_thousand_who_want_the_same_get_one_computation() -> None:
    async def scenario() -> None:
        flights, work = InFlight[str]("work"), Work()
        crowd = [ask(flights, work) for _ in range(1000)]
        other = ask(flights, work, "another key")
        await settled()
        assert len(work.begun) == 2
        for result in work.results:
            result.set_result("done")
        assert set(await asyncio.gather(*crowd, other)) == {"done"}
        late = ask(flights, work)
        await settled()
        assert len(work.begun) == 3, "what is done is not kept: that is the cache's part"
        work.results[-1].set_result("again")
        assert await late == "again"
        assert not flights._shared

    asyncio.run(scenario())


def test_a_computation_runs_in_the_context_of_no_caller() -> None:
    """Ray Serve cancels all calls that were made in that of a caller who goes."""
    whose: contextvars.ContextVar[str] = contextvars.ContextVar("whose", default="nobody's")

    async def compute(context: Context) -> str:
        return whose.get()

    async def scenario() -> None:
        whose.set("the first caller's")
        assert await InFlight[str]("work").get("key", compute, context()) == "nobody's"

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(20))
def test_cancelled_in_any_order_they_leave_the_others_theirs(seed: int) -> None:
    rng = random.Random(seed)

    async def scenario() -> None:
        flights, work = InFlight[str]("work"), Work()
        crowd = [ask(flights, work) for _ in range(rng.randint(1, 12))]
        await settled()
        for task in rng.sample(crowd, rng.randint(0, len(crowd))):
            task.cancel()
            if rng.random() < 0.5:
                await settled()
                crowd.append(ask(flights, work))
                await settled()
        await settled()
        remain = [task for task in crowd if not task.done()]
        assert len(work.begun) - work.cancelled == bool(remain), "one for those who remain, none for nobody"
        if remain:
            work.results[-1].set_result("done")
        assert all(result == "done" for result in await asyncio.gather(*remain))
        await settled()
        assert not flights._shared

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [InvalidRequest("no"), Overloaded("full"), ValueError("a fault")])
def test_a_failure_reaches_all(error: Exception) -> None:
    async def scenario() -> None:
        flights, work = InFlight[str]("work"), Work()
        shared = context()
        crowd = [asyncio.create_task(flights.get("key", work, shared)) for _ in range(5)]
        await settled()
        work.results[0].set_exception(error)
        assert await asyncio.gather(*crowd, return_exceptions=True) == [error] * 5
        assert len(work.begun) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("make", [Overloaded, DeadlineExceeded])
def test_refused_under_the_first_deadline_it_is_tried_once_under_the_latest(make: Callable[[str], Exception]) -> None:
    async def scenario() -> None:
        flights, work = InFlight[str]("work"), Work()
        crowd = [ask(flights, work, timeout_s=timeout_s) for timeout_s in (50, 60, 90, 70)]
        await settled()
        work.results[0].set_exception(make("no place"))
        await settled()
        assert len(work.begun) == 2
        assert work.begun[1].deadline.remaining_s() > 80
        assert isinstance(crowd[0].exception(), make), "its own deadline was the one it was refused under"
        work.results[1].set_exception(make("no place at all"))
        assert all(isinstance(error, make) for error in await asyncio.gather(*crowd, return_exceptions=True))
        assert len(work.begun) == 2

    asyncio.run(scenario())


def test_what_is_refused_to_one_caller_is_tried_again_for_each_other_who_wants_it() -> None:
    async def scenario() -> None:
        flights, work = InFlight[str]("work"), Work()
        flood = [ask(flights, work, timeout_s=60 - i, caller="flood") for i in range(3)]
        await settled()
        callers = ("good", "good", "another")
        others = [ask(flights, work, timeout_s=30 - i, caller=caller) for i, caller in enumerate(callers)]
        await settled()
        work.results[0].set_exception(Overloaded("the flood has too many"))
        await settled()
        assert all(isinstance(each.exception(), Overloaded) for each in flood)
        assert [each.caller for each in work.begun] == ["flood", "good", "another"], "at once, not one after the other"
        work.results[1].set_exception(Overloaded("so has this one"))
        work.results[2].set_result("done")
        found = await asyncio.gather(*others, return_exceptions=True)
        assert [str(each) for each in found] == ["so has this one", "so has this one", "done"]

    asyncio.run(scenario())


def test_who_has_more_time_than_the_first_gets_an_answer() -> None:
    async def scenario() -> None:
        flights, work = InFlight[str]("work"), Work()
        hasty, patient = ask(flights, work, timeout_s=0.01), ask(flights, work)
        with pytest.raises(DeadlineExceeded, match="deadline passed before work was done"):
            await hasty
        assert not patient.done()
        assert work.cancelled == 0
        work.results[0].set_result("done")
        assert await patient == "done"

    asyncio.run(scenario())


def test_when_the_last_is_late_the_computation_is_cancelled() -> None:
    async def scenario() -> None:
        flights, work = InFlight[str]("work"), Work()
        late = await asyncio.gather(*(ask(flights, work, timeout_s=0.25) for _ in range(3)), return_exceptions=True)
        await settled()
        assert all(isinstance(error, DeadlineExceeded) for error in late)
        assert (len(work.begun), work.cancelled) == (1, 1)
        clock = ManualClock()
        with pytest.raises(DeadlineExceeded, match="deadline passed before work"):
            await flights.get("key", work, Context(Deadline.after(0, clock)))
        assert len(work.begun) == 1, "nothing is begun for who is late already"

    asyncio.run(scenario())


def test_who_comes_just_as_the_last_goes_begins_anew_and_shares_it_with_the_next() -> None:
    async def scenario() -> None:
        flights, work = InFlight[str]("work"), Work()
        last = ask(flights, work)
        await settled()
        last.cancel()
        crowd = []
        for _ in range(2):
            crowd.append(ask(flights, work))
            await settled()
        assert (len(work.begun), work.cancelled) == (2, 1)
        work.results[1].set_result("done")
        assert await asyncio.gather(*crowd) == ["done", "done"]

    asyncio.run(scenario())


def test_a_computation_that_is_cancelled_from_outside_cancels_those_who_wait() -> None:
    async def scenario() -> None:
        flights, work = InFlight[str]("work"), Work()
        crowd = [ask(flights, work) for _ in range(3)]
        await settled()
        work.results[0].cancel()
        assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*crowd, return_exceptions=True))

    asyncio.run(scenario())
