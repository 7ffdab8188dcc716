"""The thread in which a model computes: long work, and between its steps what is short."""

import asyncio
import logging
import math
import os
import re
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from openbook.core.deadline import Check, Clock, Deadline
from openbook.errors import DeadlineExceeded, ModelUnavailable
from openbook.tracing.spans import flush_spans

log = logging.getLogger(__name__)

Result = TypeVar("Result")
_Between = tuple[Future[Any], Callable[[Check], Any]]


class Stopped(Exception):
    """Nobody waits for this work any more. What a check raises; callers never hear it."""


SHARE_BETWEEN = 0.5
"""Of the time since long work began, what may go to short work at most."""


MOST_NESTED = 2
"""What was let past lets others past in its turn, and these nobody: else the last of many that come together would be
done first, and the first last.
"""
FATAL = re.compile(
    "illegal|misaligned|device-side assert|launch failure|launch timed out|uncorrectable|hardware|address space"
    "|program counter|tensor memory|terminated by the server|external entity|context is destroyed|unknown error"
)
"""In CUDA's words for errors after which, it says, a process must be started anew; the last two are those of a context
and of a card that are gone. Others, as of a full memory or an invalid argument, leave it whole.
"""
GIVES_WAY = 10
"""The niceness of what is done before a replica answers: in an update another one beside it does, and must hardly
notice. With the most, 19, it would not begin for a quarter of an hour where others keep all cores busy.
"""


def apart(load: Callable[[], Result]) -> Result:
    """The result of what loads a model, in a thread that ends with it and gives way to all that answers questions.

    OpenMP keeps threads for each thread that ever computed. Once there are more than cores, none waits for the others'
    work with open eyes any more, and computing takes half as long again.
    """
    with ThreadPoolExecutor(1, initializer=_give_way) as thread:
        return thread.submit(load).result()


def _give_way() -> None:
    """This thread, and those that it starts. Elsewhere than on Linux it would be the whole process, for ever."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), GIVES_WAY)


@asynccontextmanager
async def in_time(name: str, deadline: Deadline) -> AsyncIterator[None]:
    """Cancel the body at the deadline.

    Raises:
        DeadlineExceeded: it came before the body's end, or stopped the work that the body waits for; the message names
            the stage.
    """
    remaining_s = deadline.remaining_s()
    try:
        async with asyncio.timeout(None if math.isinf(remaining_s) else remaining_s):
            yield
    except (TimeoutError, Stopped):
        raise DeadlineExceeded(f"deadline passed before {name} was done") from None


@dataclass(slots=True)
class _Gpu:
    """That of this process."""

    lost_by: str = ""  # the error from which on it fails whatever this process asks of it


_GPU = _Gpu()


def check_gpu() -> None:
    """What a replica's `check_health` calls, so that Serve puts another one in its place: it would stay, fail at once,
    and so draw the questions of all others to it.

    Raises:
        ModelUnavailable: this process has lost its GPU for ever.
    """
    if _GPU.lost_by:
        raise ModelUnavailable(f"this replica has lost its GPU: {_GPU.lost_by}")


class Replica:
    """What Serve asks of each of ours."""

    def __del__(self) -> None:
        flush_spans()  # Serve calls this, and kills the process

    async def check_health(self) -> None:
        """Serve calls this, and replaces a replica that raises."""
        check_gpu()


def _look_at(outcome: object) -> None:
    """Whether it is an error after which CUDA fails in this process for ever."""
    if type(outcome).__name__ != "AcceleratorError":  # by name: torch is not needed here
        return  # no result is written out: of a batch of embeddings that would take longer than to compute it
    why = str(outcome).partition("\n")[0]
    if FATAL.search(why) and not _GPU.lost_by:
        _GPU.lost_by = why
        log.error("this replica has lost its GPU, and another one takes its place: %s", _GPU.lost_by)


class Worker:
    """One thread, never the event loop's. What is long runs in order; what is short, as soon as the long lets it."""

    def __init__(self, name: str, clock: Clock) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._clock = clock
        self._first: deque[_Between] = deque()  # as soon as there is a step
        self._short: deque[_Between] = deque()  # then, as far as their share goes
        self._n_nested = 0  # of short work, each let past by the one before

    async def run(self, work: Callable[[Check], Result]) -> tuple[Result, float]:
        """The result, and the seconds that it took by itself.

        The work calls its check between its steps, and raises nothing that `StopIteration` is.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work)

    async def run_between(self, work: Callable[[Check], Result], is_first: bool = False) -> tuple[Result, float]:
        """As `run`, between two steps of what runs there: the next two if it goes first, else as soon as what is short
        may have its share of the time. What of it takes long lets others past as that does.
        """
        future: Future[tuple[Result, float]] = Future()
        (self._first if is_first else self._short).append((future, work))
        self._thread.submit(self._next_short)  # finds it, or nothing: then long work has let it pass
        return await asyncio.wrap_future(future)

    def submit(self, work: Callable[[], Any]) -> None:
        """After all that waits now; nobody waits for it."""
        self._thread.submit(work)

    def shutdown(self) -> None:
        """Finish what waits, end the thread."""
        self._thread.shutdown()

    def _run(self, work: Callable[[Check], Result]) -> tuple[Result, float]:
        begun, first_s, short_s = self._clock(), 0.0, 0.0

        def check() -> None:
            nonlocal first_s, short_s
            if self._n_nested >= MOST_NESTED:
                return
            while self._first or (self._short and short_s <= SHARE_BETWEEN * (self._clock() - begun)):
                if self._first:
                    first_s += self._next_short()
                else:
                    short_s += self._next_short()

        try:
            result = work(check)
        except Exception as error:
            _look_at(error)
            raise
        _look_at(result)  # a batch's error is its result
        return result, self._clock() - begun - first_s - short_s

    def _next_short(self) -> float:
        """Do one piece of what is short, if there is any, what goes first before others. Returns the seconds that it
        took.
        """
        waiting = self._first or self._short
        if not waiting:
            return 0.0
        future, work = waiting.popleft()
        begun = self._clock()
        if future.set_running_or_notify_cancel():
            self._n_nested += 1
            try:
                result = self._run(work)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            finally:
                self._n_nested -= 1
        return self._clock() - begun
