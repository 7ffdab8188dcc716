"""Calls made at once, of which none goes on when one has failed."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def all_of(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results in order. The first failure, or a cancellation, ends the calls that are left."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
