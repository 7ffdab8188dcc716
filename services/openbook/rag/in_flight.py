"""One computation for all who want the same at the same time."""

import asyncio
import contextvars
import math
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from openbook.core.context import Context
from openbook.errors import DeadlineExceeded, Overloaded

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Shared(Generic[T]):
    task: asyncio.Task[T]
    under: Context  # which it was begun under
    latest: Context  # of those who came: the one whose deadline is the last
    n_waiting: int = 0


class InFlight(Generic[T]):
    """What is being computed, by key. For one event loop.

    A computation belongs to nobody: who is cancelled or late leaves the others theirs, and it is cancelled once nobody
    waits any more. So it runs in no caller's `contextvars`: with a caller who goes, Ray Serve cancels all calls that
    were made in his. It knows the deadline of who came first, and waits as his. Where it fails for being late or
    refused, and another's deadline is later, it is begun once more, under the latest; where it was refused, for its
    caller may ask for much, once more for each other caller.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._shared: dict[Hashable, _Shared[T]] = {}

    async def get(self, key: Hashable, compute: Callable[[Context], Awaitable[T]], context: Context) -> T:
        """The result of `compute`, or of another's who asked with an equal key and did not have it yet.

        Raises:
            DeadlineExceeded: the context's own deadline passed.
            Exception: what the computation raised.
        """
        under = context
        while True:
            context.deadline.check(self._name)
            shared = self._shared.get(key) or self._begin(key, compute, under)
            if context.deadline.due > shared.latest.deadline.due:
                shared.latest = context
            await self._wait(key, shared, context)
            error = None if shared.task.cancelled() else shared.task.exception()
            if isinstance(error, Overloaded) and context.caller != shared.under.caller:
                key, under = (context.caller, key), context  # with his own alone: others may ask for much too
            elif isinstance(error, DeadlineExceeded | Overloaded) and context.deadline.due > shared.under.deadline.due:
                under = shared.latest
            else:
                return shared.task.result()

    def _begin(self, key: Hashable, compute: Callable[[Context], Awaitable[T]], context: Context) -> _Shared[T]:
        async def run() -> T:
            return await compute(context)

        task = asyncio.create_task(run(), context=contextvars.Context())
        shared = self._shared[key] = _Shared(task, context, context)
        shared.task.add_done_callback(lambda task: self._end(key, shared))
        return shared

    def _end(self, key: Hashable, shared: _Shared[T]) -> None:
        self._forget(key, shared)
        if not shared.task.cancelled():
            shared.task.exception()  # looked at, even where nobody waits any more: asyncio would complain

    def _forget(self, key: Hashable, shared: _Shared[T]) -> None:
        if self._shared.get(key) is shared:
            del self._shared[key]

    async def _wait(self, key: Hashable, shared: _Shared[T], context: Context) -> None:
        remaining_s = context.deadline.remaining_s()
        shared.n_waiting += 1
        try:
            await asyncio.wait({shared.task}, timeout=None if math.isinf(remaining_s) else remaining_s)
        finally:
            shared.n_waiting -= 1
            if not shared.n_waiting and not shared.task.done():
                self._forget(key, shared)  # who comes now begins anew
                shared.task.cancel()
        if not shared.task.done():
            raise DeadlineExceeded(f"deadline passed before {self._name} was done")
