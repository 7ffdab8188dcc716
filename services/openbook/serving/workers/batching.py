"""Batches for a model: our own loop, which takes what waits whenever the worker is free.

The model runs in one worker thread, never on the event loop. A batch is never closed before the worker can take it: the
longer the worker was busy, the larger the next batch, up to `max_batch`. Work that nobody waits for any more is
stopped where it next calls its check.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from openbook.core.context import Context
from openbook.core.deadline import Check, Deadline
from openbook.errors import DeadlineExceeded, InvalidRequest, Overloaded
from openbook.telemetry import BATCH_SIZE, QUEUED

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
Part = TypeVar("Part")

Handler = Callable[[Sequence[Item], Check], Sequence[Result]]
"""A batch in, as many results out, in order. May raise InvalidRequest if any one item is at fault.

Calls its check between its steps, which raises once the last caller has gone or is late."""


class _Unwanted(Exception):
    """Nobody waits for this work any more. What a check raises; callers never hear it."""


@dataclass(eq=False, slots=True)
class _Waiting(Generic[Item, Result]):
    item: Item
    key: Hashable
    context: Context
    result: asyncio.Future[Result]

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it. By the clock too: where the event loop is busy, late ones still wait."""
        return not self.result.done() and self.context.deadline.remaining_s() > 0


class Batcher(Generic[Item, Result]):
    """A bounded queue in front of one worker thread. For one event loop.

    Only items of equal `key` share a batch. The oldest item decides whose turn it is, so no key starves.
    """

    def __init__(
        self,
        handler: Handler[Item, Result],
        *,
        name: str,
        max_batch: int,
        max_queue: int,
        key: Callable[[Item], Hashable] = lambda item: None,
    ) -> None:
        self._handler = handler
        self._name = name
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._key = key
        self._queue: deque[_Waiting[Item, Result]] = deque()
        self._n_streams = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._loop_task: asyncio.Task[None] | None = None
        self._queued = QUEUED.labels(name)

    async def submit(self, item: Item, context: Context) -> Result:
        """The item's own result. Cancelling the call takes the item out of the queue, or stops a batch of its own.

        Raises:
            Overloaded: the queue is full; nothing was done.
            DeadlineExceeded: the deadline passed while it waited, or before the model was done.
            Exception: what the handler raised for it.
        """
        context.deadline.check(self._name)
        self._check_room()
        waiting = _Waiting(item, self._key(item), context, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._queued.set(len(self._queue))
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.create_task(self._drain())
        try:
            async with in_time(self._name, context.deadline):
                result: Result = await waiting.result
                return result
        finally:
            if waiting in self._queue:
                self._queue.remove(waiting)
                self._queued.set(len(self._queue))

    async def stream(self, parts: Callable[[Check], Iterator[Part]], context: Context) -> AsyncIterator[Part]:
        """What `parts` yields, one step at a time in the same worker thread, so that batches run between the steps.

        Raises as `submit`. Closing the iterator stops the step under way at its next check, and closes that of `parts`.
        """
        context.deadline.check(self._name)
        self._check_room()
        is_closed = False

        def check() -> None:
            if is_closed or not context.deadline.remaining_s():
                raise _Unwanted

        self._n_streams += 1
        log.debug("%s streams, request id %s", self._name, context.request_id)
        loop, end = asyncio.get_running_loop(), object()
        iterator: Iterator[Part] | None = None
        try:
            async with in_time(self._name, context.deadline):
                iterator = await loop.run_in_executor(self._worker, parts, check)
            while True:
                async with in_time(self._name, context.deadline):
                    part = await loop.run_in_executor(self._worker, next, iterator, end)
                if part is end:
                    return
                yield part  # type: ignore[misc]  # only `end` is not a Part
        finally:
            is_closed = True
            self._n_streams -= 1
            # Closed by the worker itself: a step may be running at this moment.
            if iterator is not None and hasattr(iterator, "close"):
                self._worker.submit(iterator.close)

    async def aclose(self) -> None:
        """Cancel those who wait, finish the batch under way, end the thread."""
        for waiting in self._queue:
            waiting.result.cancel()
        if self._loop_task is not None:
            await self._loop_task
        await asyncio.to_thread(self._worker.shutdown)

    def _check_room(self) -> None:
        n_waiting = len(self._queue) + self._n_streams
        if n_waiting >= self._max_queue:
            raise Overloaded(f"{self._name}: the queue has room for {self._max_queue}, and {n_waiting} wait")

    async def _drain(self) -> None:
        while batch := self._take():
            await self._work(batch)

    def _take(self) -> list[_Waiting[Item, Result]]:
        """The oldest item that is still wanted, and those behind it that fit it; the others keep their places."""
        batch: list[_Waiting[Item, Result]] = []
        kept: deque[_Waiting[Item, Result]] = deque()
        for waiting in self._queue:
            if waiting.result.done():  # cancelled
                continue
            try:
                waiting.context.deadline.check(self._name)
            except DeadlineExceeded as error:
                waiting.result.set_exception(error)
                continue
            if len(batch) < self._max_batch and (not batch or waiting.key == batch[0].key):
                batch.append(waiting)
            else:
                kept.append(waiting)
        self._queue = kept
        self._queued.set(len(kept))
        return batch

    async def _work(self, batch: Sequence[_Waiting[Item, Result]]) -> None:
        BATCH_SIZE.labels(self._name).observe(len(batch))
        log.debug("%s computes %d, request ids %s", self._name, len(batch), [each.context.request_id for each in batch])
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._worker, self._run, batch)
        except InvalidRequest as error:
            if len(batch) == 1:
                _fail(batch, error)
            else:  # one of them is at fault: each alone, so that it does not fail its neighbours
                for waiting in batch:
                    await self._work([waiting])
        except Exception as error:
            _fail(batch, error)
        else:
            for waiting, result in zip(batch, results, strict=True):
                if not waiting.result.done():
                    waiting.result.set_result(result)

    def _run(self, batch: Sequence[_Waiting[Item, Result]]) -> Sequence[Result]:
        def check() -> None:
            if not any(waiting.is_wanted for waiting in batch):
                raise _Unwanted

        check()  # the worker was busy with a stream, or this is one of several that run each alone
        items = [waiting.item for waiting in batch]
        results = self._handler(items, check)
        if len(results) != len(items):
            raise RuntimeError(f"{self._name}: {len(items)} items went in, {len(results)} results came out")
        return results


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
    except (TimeoutError, _Unwanted):
        raise DeadlineExceeded(f"deadline passed before {name} was done") from None


def _fail(batch: Sequence[_Waiting[Item, Result]], error: Exception) -> None:
    for waiting in batch:
        if not waiting.result.done():
            waiting.result.set_exception(error)
