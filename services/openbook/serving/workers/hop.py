"""Calls to another deployment: under our deadline, with our errors, and of another replica where one fails us.

Errors cross as values, not as exceptions: Ray would wrap an exception together with its traceback, and log both for
every bad request, with whatever they quote. A context crosses as it is: see `Deadline.__reduce__`.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from grpc import StatusCode
from grpc.aio import AioRpcError
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from openbook.core.context import Context
from openbook.core.hedges import HedgeBudget
from openbook.errors import ModelUnavailable, OpenbookError, Overloaded
from openbook.logs import as_ours
from openbook.serving.workers.worker import in_time
from openbook.telemetry import hop_errors
from openbook.tracing.spans import span

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OtherModel:
    """In place of a result: the replica has another model than the one that the call is for."""


Send = Callable[[], Any]
"""Starts the call; gives Serve's response to wait for."""

SLOW = "Slow"
"""In place of an error's name: the call went on, and another replica was asked too."""


HEDGE_AFTER = 0.5
"""Of a call's time, after which another replica is asked too, as far as the budget allows: of a replica that is frozen,
or whose node is lost, Ray may say nothing for many seconds, and whoever waits for it would be late. Half of what is
left then is given to that one before a third try: Serve's router may have chosen the same.
"""
N_AT_ONCE = 3

GONE = (StatusCode.CANCELLED, StatusCode.INTERNAL)
"""How calls over gRPC end whose replica stops, or whose connection breaks. Ray has an error for UNAVAILABLE alone."""


def over_grpc(handle: "DeploymentHandle") -> "DeploymentHandle":
    """The handle, of which calls go from replica to replica without Ray: that holds up all that an actor returns while
    one of its callers, frozen or lost with its node, does not take its own.
    """
    return handle.options(_by_reference=False)


async def call(name: str, context: Context, send: Send, hedges: HedgeBudget | None = None) -> Any:
    """The result of a call to the deployment `name`: the first that comes of two replicas, when one takes long and
    there are `hedges`. Tried once more, on another replica, when one dies under it.

    Raises:
        DeadlineExceeded: not in time; the call is cancelled.
        ModelUnavailable: no replica answers.
        OpenbookError: the one that the deployment returned.
    """
    context.deadline.check(name)
    patience_s = HEDGE_AFTER * context.deadline.remaining_s()
    async with in_time(name, context.deadline):
        with _from_ray(name):
            return unwrap(await _first(name, send, hedges, patience_s))


async def call_stream(name: str, context: Context, send: Send) -> AsyncIterator[Any]:
    """What the deployment yields. Closing it cancels the call. Raises as `call`, but never tries again."""
    context.deadline.check(name)
    response = send()
    try:
        while True:
            async with in_time(name, context.deadline):
                with _from_ray(name), _from_grpc():
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


async def _first(name: str, send: Send, hedges: HedgeBudget | None, patience_s: float) -> Any:
    """What the deployment returns. Raises what Ray does for the last replica that was asked."""
    if hedges:
        hedges.count_call()
    wait_s = patience_s if hedges and math.isfinite(patience_s) else None  # until another one is asked
    has_retried = False
    running = {asyncio.create_task(_cancellable(send()))}
    try:
        while True:
            done, running = await asyncio.wait(running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                if hedges and wait_s and len(running) < N_AT_ONCE and hedges.take():
                    hop_errors(name, SLOW).inc()
                    running.add(asyncio.create_task(_cancellable(send())))
                    wait_s *= HEDGE_AFTER  # half of what is left now
                else:
                    wait_s = None
            for task in sorted(done, key=_failure):  # an answer before a failure
                failure = _failure(task)
                has_died = isinstance(task.exception(), RayActorError)
                if not failure or not (running or (has_died and not has_retried)):
                    return task.result()
                hop_errors(name, failure).inc()
                if not running:
                    has_retried = True
                    running.add(asyncio.create_task(_cancellable(send())))
    finally:
        for task in running:
            task.cancel()


def _failure(task: "asyncio.Task[Any]") -> str:
    """Why a replica did not answer, where another might; nothing if it did."""
    ended = task.exception() or task.result()
    return (
        type(ended).__name__ if isinstance(ended, RayActorError | BackPressureError | Overloaded | OtherModel) else ""
    )


async def _cancellable(response: Any) -> Any:
    """Raises ModelUnavailable: others than who waits for it have cancelled it."""
    try:
        with _from_grpc():
            return await response
    except asyncio.CancelledError:
        response.cancel()
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ModelUnavailable("a call was cancelled where it was to be answered") from None


@contextmanager
def _from_grpc() -> Iterator[None]:
    try:
        yield
    except AioRpcError as error:
        if error.code() not in GONE:
            raise
        raise ActorUnavailableError(f"{error.code().name}: {error.details()}", None) from None


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
