"""Questions sent at their times, whatever becomes of the others; or by callers who wait for their answers."""

import asyncio
from asyncio import TaskGroup
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import cycle
from math import isnan, nan
from time import monotonic

from openbook.loadtest.outcomes import HANG, NOT_SENT, Log, Outcomes, Reply
from openbook.loadtest.schedule import Schedule
from openbook.loadtest.senders import Sender
from openbook.loadtest.settings import GRACE_S, LoadSettings

OnProgress = Callable[[int, int, int], None]
"""Called with how many questions were sent, have ended, and were answered."""

PROGRESS_S = 0.25


async def open_loop(
    schedule: Schedule, sender: Sender, settings: LoadSettings, begin: float, on_progress: OnProgress
) -> Outcomes:
    """Send every question of the schedule at `begin`, a monotonic time, plus its own. Returns when all have ended."""
    log = Log(begin)
    async with _telling(log, on_progress), TaskGroup() as group:
        for after, number in zip(schedule.intended_s.tolist(), schedule.choice.tolist(), strict=True):
            await asyncio.sleep(max(0.0, begin + after - monotonic()))  # also if late: those under way must get on
            log.n_begun += 1
            if log.n_begun - log.n_done > settings.max_in_flight:
                reply = Reply(NOT_SENT, NOT_SENT, f"{settings.max_in_flight} were in flight already")
                log.add(after, nan, monotonic(), reply)
            else:
                group.create_task(_ask(number, sender, settings, log, after))
    return log.outcomes()


async def closed_loop(
    schedule: Schedule, n_callers: int, sender: Sender, settings: LoadSettings, begin: float, on_progress: OnProgress
) -> Outcomes:
    """Callers who take the schedule's next question as soon as the last one has ended, until the time is over.

    Intended is when it is sent, so latencies are service times: what a stalled endpoint keeps from being asked shows
    in no latency.
    """
    log = Log(begin)
    numbers = cycle(schedule.choice.tolist())

    async def caller() -> None:
        await asyncio.sleep(max(0.0, begin - monotonic()))
        while (now := monotonic()) < begin + settings.length_s:
            log.n_begun += 1
            await _ask(next(numbers), sender, settings, log, now - begin)

    async with _telling(log, on_progress), TaskGroup() as group:
        for _ in range(n_callers):
            group.create_task(caller())
    return log.outcomes()


async def _ask(number: int, sender: Sender, settings: LoadSettings, log: Log, intended_s: float) -> None:
    sent = monotonic()
    try:
        async with asyncio.timeout(settings.timeout_s + GRACE_S):
            reply = await sender.send(number)
    except TimeoutError:
        reply = Reply(HANG, HANG, f"no outcome {GRACE_S:g} s after its deadline")
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # it is us who are to end
            raise
        reply = Reply("CANCELLED", "CANCELLED", "by the endpoint")
    log.add(intended_s, sent, monotonic() if isnan(reply.done) else reply.done, reply)


@asynccontextmanager
async def _telling(log: Log, on_progress: OnProgress) -> AsyncIterator[None]:
    """How it goes, for as long as the body runs, and once when it has ended."""

    async def tell() -> None:
        while True:
            on_progress(log.n_begun, log.n_done, log.n_ok)
            await asyncio.sleep(PROGRESS_S)

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()
    on_progress(log.n_begun, log.n_done, log.n_ok)
