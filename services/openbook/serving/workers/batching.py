"""Batches for a model: our own loop, which takes what waits whenever the worker is free.

The model runs in one worker thread, never on the event loop. A batch is never closed before the worker can take it: the
longer the worker was busy, the larger the next batch, as far as that pays and everybody in it is ready in time: see
`queue`. Work that nobody waits for any more is stopped where it next calls its check.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, Generic, TypeVar

from openbook.core.context import Context
from openbook.core.deadline import Check, Clock, go_on
from openbook.errors import InvalidRequest, OpenbookError
from openbook.logs import about
from openbook.serving.workers.queue import Queue
from openbook.serving.workers.reckoning import Waiting
from openbook.serving.workers.worker import Stopped, Worker, in_time
from openbook.telemetry import BATCH_SECONDS, BATCH_SIZE, QUEUE_SECONDS, QUEUED
from openbook.tracing.ports import Recording
from openbook.tracing.spans import span, together

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
Part = TypeVar("Part")

Handler = Callable[[Sequence[Item], Check], Sequence[Result]]
"""A batch in, as many results out, in order. May raise InvalidRequest if any one item is at fault.

Calls its check between its steps, which raises once the last caller has gone or is late, and else may take a while: it
is where short work runs beside long."""

Parts = Callable[[Check], Iterator[Part]]


@dataclass(eq=False, slots=True, kw_only=True)
class Asked(Waiting):
    """An item that waits for its result, or a stream for its turn. The last three are set once it is here."""

    result: asyncio.Future[Any]
    item: Any = field(init=False)
    since: float = field(init=False)  # when it came
    waits: Recording = field(init=False)  # ends with its turn

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it. By the clock too: where the event loop is busy, late ones still wait."""
        return not self.result.done() and self.remaining_s > 0


class Batcher(Generic[Item, Result]):
    """A bounded queue in front of one worker thread. For one event loop.

    Only items of equal `key` share a batch, of at most `max_batch` items and, where it is of several, `max_work`. Of
    keys of one `kind` the time goes with the work.
    """

    def __init__(
        self,
        handler: Handler[Item, Result],
        *,
        name: str,
        max_batch: int,
        max_queue: int,
        key: Callable[[Item], Hashable] = lambda item: None,
        kind: Callable[[Any], Hashable] = lambda key: key,
        work: Callable[[Item], int] = lambda item: 1,
        max_work: float = math.inf,
        clock: Clock = monotonic,
    ) -> None:
        self._handler = handler
        self._name = name
        self._key = key
        self._kind = kind
        self._work_of = work
        self._queue: Queue[Asked] = Queue(name, max_batch, max_queue, max_work, clock)
        self.load = self._queue.load
        self._worker = Worker(name, clock)
        self._loops: dict[bool, asyncio.Task[None]] = {}  # that take batches: any, and short ones beside a long one
        self._clock = clock
        self._queued, self._queue_seconds = QUEUED.labels(name), QUEUE_SECONDS.labels(name)
        self._batch_size, self._batch_seconds = BATCH_SIZE.labels(name), BATCH_SECONDS.labels(name)

    @contextmanager
    def place(self, context: Context, key: Hashable, work: int, is_stream: bool = False) -> Iterator[Asked]:
        """Kept in the body for what comes with it: who comes meanwhile is behind. Raises as `submit`."""
        kept = self._asked(context, key, work, is_stream)
        kept.is_here = False
        self._refuse(self._queue.enter(kept))
        try:
            yield kept
        finally:
            self._queue.leave(kept)
            self._queued.set(len(self._queue))

    async def submit(self, item: Item, context: Context, place: Asked | None = None) -> Result:
        """The item's own result. Cancelling the call takes the item out of the queue, or stops a batch of its own.

        Raises:
            Overloaded: it would not be ready in time, or the queue is full; nothing was done.
            DeadlineExceeded: the deadline is too near for it, passed while it waited, or before the model was done.
            Exception: what the handler raised for it.
        """
        asked = self._enter(self._asked(context, self._key(item), self._work_of(item)), place, item)
        result: Result = await self._turn_of(asked)
        return result

    async def stream(
        self, parts: Parts[Part], context: Context, key: Hashable = None, work: int = 1, place: Asked | None = None
    ) -> AsyncIterator[Part]:
        """What `parts` yields, one step at a time in the same worker thread, between the steps of batches.

        Raises as `submit`. Closing the iterator stops the step under way at its next check, and closes that of `parts`.
        """
        asked = self._enter(self._asked(context, key, work, is_stream=True), place)
        is_closed, is_whole, took_s, end = False, False, 0.0, object()
        iterator: Iterator[Part] | None = None
        let_past = go_on

        def check() -> None:
            if is_closed or not asked.remaining_s:
                raise Stopped
            let_past()

        def step(between: Check) -> Part | object:
            nonlocal iterator, let_past
            let_past = between
            if iterator is None:
                iterator = parts(check)
            return next(iterator, end)

        try:
            await self._turn_of(asked)
            log.debug("%s streams, request id %s", self._name, context.request_id, extra=about(context))
            with span(f"{self._name} streams", context):
                while True:
                    async with in_time(self._name, context.deadline):
                        part, seconds = await self._worker.run_between(step)
                    took_s += seconds
                    if part is end:
                        is_whole = True
                        return
                    yield part  # type: ignore[misc]  # only `end` is not a Part
        finally:
            is_closed = True
            self._queue.learn([asked], took_s, is_whole)
            self._queue.leave(asked)
            self._go_on()
            # By the worker itself: a step may be running at this moment.
            self._worker.submit(lambda: getattr(iterator, "close", lambda: None)())

    def learn(self, items: Sequence[Item], seconds: float) -> None:
        """So long this batch took: for what is known before anybody asks."""
        alike = self._sort(self._key(items[0]))
        self._queue.learn([Waiting(*alike, self._work_of(item), Context()) for item in items], seconds)

    async def aclose(self) -> None:
        """Cancel those who wait, finish the batch under way, end the thread."""
        for asked in self._queue.waiting():
            asked.result.cancel()
        await asyncio.gather(*self._loops.values())
        await asyncio.to_thread(self._worker.shutdown)

    def _sort(self, key: Hashable, is_stream: bool = False) -> tuple[Hashable, Hashable]:
        """The key and the kind of what waits. A stream shares no batch."""
        kind = self._kind(key)
        return (("stream", kind), ("stream", kind)) if is_stream else (key, kind)

    def _asked(self, context: Context, key: Hashable, work: int, is_stream: bool = False) -> Asked:
        return Asked(*self._sort(key, is_stream), work, context, is_stream, result=asyncio.Future())

    def _enter(self, newcomer: Asked, place: Asked | None, item: Item | None = None) -> Asked:
        """Let it wait: in its place, if that is still kept and for such as it is."""
        asked, context, waits = newcomer, newcomer.context, span(f"wait for {self._name}", newcomer.context)
        if place and place in self._queue and not place.is_here:
            if (place.key, place.work) == (newcomer.key, newcomer.work):
                asked = place
            else:
                self._queue.leave(place)
        try:
            if asked is newcomer:
                self._refuse(self._queue.enter(asked))
        except OpenbookError as error:
            waits.end(error.grpc_code)
            raise
        asked.item, asked.context, asked.since, asked.waits, asked.is_here = item, context, self._clock(), waits, True
        self._go_on()
        return asked

    async def _turn_of(self, asked: Asked) -> Any:
        try:
            async with in_time(self._name, asked.context.deadline):
                return await asked.result
        except BaseException as error:
            asked.waits.__exit__(type(error), error, None)
            self._queue.leave(asked)
            raise

    def _turn_came(self, asked: Asked) -> None:
        self._queue_seconds.observe(self._clock() - asked.since)
        asked.waits.end()

    def _refuse(self, refused: Sequence[tuple[Asked, OpenbookError]]) -> None:
        for asked, error in refused:
            if asked.is_here:  # else he will hear when he comes
                _fail([asked], error)

    def _go_on(self) -> None:
        """See to it that what waits is taken."""
        for asked in self._queue.streams():
            self._turn_came(asked)
            if not asked.result.done():
                asked.result.set_result(None)
        for is_short in (False, True):
            loop = self._loops.get(is_short)
            if len(self._queue) and (loop is None or loop.done()):
                self._loops[is_short] = asyncio.create_task(self._drain(is_short))
        self._queued.set(len(self._queue))

    async def _drain(self, is_short: bool) -> None:
        while True:
            batch, refused = self._queue.take(is_short)
            self._refuse(refused)
            self._queued.set(len(self._queue))
            if not batch:
                return
            if wanted := [asked for asked in batch if not asked.result.done()]:
                self._batch_size.observe(len(wanted))
                for asked in wanted:
                    self._turn_came(asked)
                await self._work(wanted, is_short)

    async def _work(self, batch: Sequence[Asked], is_short: bool) -> None:
        log.debug("%s computes %d, request ids %s", self._name, len(batch), [each.context.request_id for each in batch])
        seconds = 0.0
        computing = together(f"{self._name} computes", (asked.context for asked in batch))
        try:
            with computing:
                is_first = self._queue.begin(batch, is_short)
                if is_short:
                    run = self._worker.run_between(partial(self._run, batch), is_first)
                else:
                    self._go_on()  # what is short beside it
                    run = self._worker.run(partial(self._run, batch))
                results, seconds = await run
                if isinstance(results, Exception):
                    raise results
        except InvalidRequest as error:
            if len(batch) == 1:
                _fail(batch, error)
            else:  # one of them is at fault: each alone, so that it does not fail its neighbours
                self._queue.end(is_short, seconds)
                for asked in batch:
                    await self._work([asked], is_short)
        except Stopped as stopped:
            self._queue.learn(batch, seconds, is_whole=False)
            _fail(batch, stopped)
        except Exception as error:
            _fail(batch, error)
        else:
            self._batch_seconds.observe(seconds)
            self._queue.learn(batch, seconds)
            for asked, result in zip(batch, results, strict=True):
                if not asked.result.done():
                    asked.result.set_result(result)
        finally:
            self._queue.end(is_short, seconds)

    def _run(self, batch: Sequence[Asked], between: Check) -> Sequence[Result] | Exception:
        """What fails took its time too: so an error comes back as a result does."""

        def check() -> None:
            if not any(asked.is_wanted for asked in batch):
                raise Stopped
            between()

        try:
            check()  # the worker was busy with a stream, or this is one of several that run each alone
            results = self._handler([asked.item for asked in batch], check)
        except Exception as error:  # no future takes a StopIteration: its callers would wait for ever
            return RuntimeError(f"{self._name}: {error!r}") if isinstance(error, StopIteration) else error
        if len(results) != len(batch):
            return RuntimeError(f"{self._name}: {len(batch)} items went in, {len(results)} results came out")
        return results


def _fail(batch: Sequence[Asked], error: Exception) -> None:
    for asked in batch:
        if not asked.result.done():
            asked.result.set_exception(error)
