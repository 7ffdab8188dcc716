"""Calls to another deployment: under our deadline, with our errors.

Errors cross as values, not as exceptions: Ray would wrap an exception together with its traceback, and log both for
every bad request, with whatever they quote. A context crosses as it is: see `Deadline.__reduce__`.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from openbook.core.context import Context
from openbook.errors import ModelUnavailable, OpenbookError, Overloaded
from openbook.logs import as_ours
from openbook.serving.workers.batching import in_time
from openbook.telemetry import hop_errors
from openbook.tracing.spans import span

T = TypeVar("T")

Send = Callable[[], Any]
"""Starts the call; gives Serve's response to wait for."""


async def call(name: str, context: Context, send: Send) -> Any:
    """The result of a call to the deployment `name`. Tried once more, on another replica, when one dies under it.

    Raises:
        DeadlineExceeded: not in time; the call is cancelled.
        ModelUnavailable: no replica answers.
        OpenbookError: the one that the deployment returned.
    """
    context.deadline.check(name)
    async with in_time(name, context.deadline):
        with _from_ray(name):
            try:
                return unwrap(await _cancellable(send()))
            except RayActorError as error:
                hop_errors(name, type(error).__name__).inc()
                return unwrap(await _cancellable(send()))


async def call_stream(name: str, context: Context, send: Send) -> AsyncIterator[Any]:
    """What the deployment yields. Closing it cancels the call. Raises as `call`, but never tries again."""
    context.deadline.check(name)
    response = send()
    try:
        while True:
            async with in_time(name, context.deadline):
                with _from_ray(name):
                    part = unwrap(await anext(response))
            yield part
    except StopAsyncIteration:
        pass
    finally:
        response.cancel()


async def answered(name: str, context: Context, work: Callable[[Context], Awaitable[T]]) -> T | OpenbookError:
    """What the work of the deployment `name` comes to, or why it does not."""
    try:
        with span(name, context, "server") as inner:
            return await work(inner)
    except Exception as error:
        return as_ours(error, context.request_id)


def unwrap(value: Any) -> Any:
    """The value, unless it is one of our errors.

    Raises:
        OpenbookError: it is.
    """
    if isinstance(value, OpenbookError):
        raise value
    return value


async def _cancellable(response: Any) -> Any:
    try:
        return await response
    except asyncio.CancelledError:
        response.cancel()
        raise


@contextmanager
def _from_ray(name: str) -> Iterator[None]:
    try:
        yield
    except BackPressureError as error:
        hop_errors(name, type(error).__name__).inc()
        raise Overloaded(f"{name}: {error.message}") from None
    except (RayActorError, DeploymentUnavailableError) as error:
        hop_errors(name, type(error).__name__).inc()
        raise ModelUnavailable(f"no replica of the {name} answers: {type(error).__name__}") from None
