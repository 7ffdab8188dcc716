"""Round trips to Redis: one at a time, what comes meanwhile shares the next; after a failure none for a moment."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from openbook.core.deadline import Clock

Item = TypeVar("Item")
Result = TypeVar("Result")

_Waiting = tuple[Sequence[Item], asyncio.Future[Sequence[Result]]]

MAX_ITEMS = 512
"""Of one round trip."""


PAUSE_S = 1.0
"""How long Redis is left alone after a failure."""


class Breaker:
    """Open for PAUSE_S after a failure; then one call may try, and what becomes of it decides for the others."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._has_failed = False
        self._is_trying = False
        self._open_until = -float("inf")

    def lets_through(self) -> bool:
        """Whether to call now. Who was let through says how it ended."""
        if not self._has_failed:
            return True
        if self._is_trying or self._clock() < self._open_until:
            return False
        self._is_trying = True
        return True

    def succeeded(self) -> None:
        """It answers."""
        self._has_failed = self._is_trying = False

    def failed(self) -> None:
        """It does not."""
        self._has_failed, self._is_trying = True, False
        self._open_until = self._clock() + PAUSE_S


class Lane(Generic[Item, Result]):
    """Callers' items, a round trip at a time, each with what came while the one before it was under way.

    A trip that fails fails all who wait by then: they would only learn the same, later. For one event loop.
    """

    def __init__(self, trip: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]]) -> None:
        self._trip = trip
        self._waiting: deque[_Waiting[Item, Result]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def go(self, items: Sequence[Item]) -> Sequence[Result]:
        """One result an item, in order. Raises what the trip raised."""
        result: asyncio.Future[Sequence[Result]] = asyncio.get_running_loop().create_future()
        self._waiting.append((items, result))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await result

    async def aclose(self) -> None:
        """End the trip under way; who waits is cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self._fail([], None)

    async def _run(self) -> None:
        while batch := self._take():
            try:
                results = await self._trip([item for items, _ in batch for item in items])
            except Exception as error:
                self._fail(batch, error)
                return
            except asyncio.CancelledError:
                self._fail(batch, None)
                raise
            start = 0
            for items, result in batch:
                if not result.done():
                    result.set_result(results[start : start + len(items)])
                start += len(items)

    def _take(self) -> list[_Waiting[Item, Result]]:
        """Those whose turn it is: as many as fit, at least one; those who have gone are left out."""
        batch: list[_Waiting[Item, Result]] = []
        n_items = 0
        while self._waiting:
            items, result = self._waiting[0]
            if batch and n_items + len(items) > MAX_ITEMS:
                break
            self._waiting.popleft()
            if not result.done():
                batch.append((items, result))
                n_items += len(items)
        return batch

    def _fail(self, batch: Sequence[_Waiting[Item, Result]], error: Exception | None) -> None:
        """These and all who wait: with the error, or cancelled."""
        for _, result in [*batch, *self._waiting]:
            if result.done():
                continue
            if error is None:
                result.cancel()
            else:
                result.set_exception(error)
        self._waiting.clear()
