"""Calls between deployments, with responses that behave like Serve's."""

import asyncio
from collections.abc import Callable, Generator
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.hedges import MAX_SAVED_HEDGES, HedgeBudget
from openbook.errors import DeadlineExceeded, InvalidRequest, ModelUnavailable, OpenbookError, Overloaded
from openbook.serving.workers.hop import N_AT_ONCE, SLOW, OtherModel, call, call_stream
from openbook.telemetry import hop_errors
from openbook.testing import ManualClock

NEVER = Context()


class Response:
    """A result or an error; with neither it never comes. Knows whether it was cancelled."""

    def __init__(self, *parts: Any) -> None:
        self.parts = list(parts)
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True

    async def __anext__(self) -> Any:
        if not self.parts:
            await asyncio.Event().wait()
        part = self.parts.pop(0)
        if isinstance(part, BaseException) and not isinstance(part, OpenbookError):
            raise part
        return part

    def __await__(self) -> Generator[Any, None, Any]:
        return self.__anext__().__await__()


class Late(Response):
    """Comes as soon as another one has."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.other_came = asyncio.Event()

    async def __anext__(self) -> Any:
        await self.other_came.wait()
        return await super().__anext__()


class Early(Response):
    """Comes, and lets the late one come."""

    def __init__(self, late: Late, *parts: Any) -> None:
        super().__init__(*parts)
        self.late = late

    async def __anext__(self) -> Any:
        asyncio.get_running_loop().call_soon(self.late.other_came.set)
        return await super().__anext__()


def sender(*responses: Response) -> Callable[[], Response]:
    left = list(responses)
    return lambda: left.pop(0)


def n_errors(to: str, error: str) -> int:
    """As an operator sees them."""
    return int(hop_errors(to, error)._value.get())


def test_a_result_comes_back_and_our_error_is_raised() -> None:
    assert asyncio.run(call("encoder", NEVER, sender(Response(5)))) == 5
    with pytest.raises(InvalidRequest, match="too long"):
        asyncio.run(call("encoder", NEVER, sender(Response(InvalidRequest("too long")))))


def test_when_a_replica_dies_another_is_asked_once() -> None:
    before = n_errors("encoder", "ActorDiedError")
    assert asyncio.run(call("encoder", NEVER, sender(Response(ActorDiedError()), Response(5)))) == 5
    assert n_errors("encoder", "ActorDiedError") == before + 1
    with pytest.raises(ModelUnavailable, match="no replica of the encoder answers: ActorDiedError"):
        asyncio.run(call("encoder", NEVER, sender(Response(ActorDiedError()), Response(ActorDiedError()))))
    assert n_errors("encoder", "ActorDiedError") == before + 3


def broken(code: StatusCode) -> Response:
    return Response(AioRpcError(code, Metadata(), Metadata(), "RST_STREAM"))


@pytest.mark.parametrize("code", [StatusCode.CANCELLED, StatusCode.INTERNAL])
def test_a_call_over_grpc_whose_connection_breaks_is_one_of_a_replica_that_died(code: StatusCode) -> None:
    assert asyncio.run(call("encoder", NEVER, sender(broken(code), Response(5)))) == 5
    with pytest.raises(ModelUnavailable, match="no replica of the encoder answers: ActorUnavailableError"):
        asyncio.run(call("encoder", NEVER, sender(broken(code), broken(code))))
    with pytest.raises(ModelUnavailable, match="no replica of the generator answers"):
        asyncio.run(_read(call_stream("generator", NEVER, sender(broken(code)))))


def test_a_call_over_grpc_that_ends_otherwise_is_made_once() -> None:
    """What one replica fails at kills no second one."""
    with pytest.raises(AioRpcError):
        asyncio.run(call("encoder", NEVER, sender(broken(StatusCode.UNKNOWN))))


def test_a_call_that_others_cancelled_is_an_error_of_ours_and_no_cancellation_of_who_waits() -> None:
    cancelled = Response()
    cancelled.parts = [asyncio.CancelledError()]

    async def waits() -> None:
        with pytest.raises(ModelUnavailable, match="cancelled where it was to be answered"):
            await call("encoder", NEVER, sender(cancelled))

    asyncio.run(waits())


def test_the_second_attempt_has_what_the_first_left_of_the_time() -> None:
    second = Response()
    soon = Context(Deadline.after(0.01, ManualClock()))
    with pytest.raises(DeadlineExceeded, match="before encoder was done"):
        asyncio.run(call("encoder", soon, sender(Response(ActorDiedError()), second)))
    assert second.cancelled


def rich() -> HedgeBudget:
    """Each call pays for as much as is saved at most."""
    return HedgeBudget(MAX_SAVED_HEDGES)


def soon(timeout_s: float = 0.01) -> Context:
    """Half of that is short, and then the clock of the deadline stands: only who never answers is late."""
    return Context(Deadline.after(timeout_s, ManualClock()))


def test_when_a_replica_takes_long_another_is_asked_and_the_first_answer_counts() -> None:
    frozen, before = (Response(), Response()), n_errors("encoder", SLOW)
    assert asyncio.run(call("encoder", soon(0.1), sender(*frozen, Response(5)), rich())) == 5
    assert all(each.cancelled for each in frozen)
    assert n_errors("encoder", SLOW) == before + 2


@pytest.mark.parametrize("worse", [Overloaded("full"), BackPressureError(9, 8), ActorDiedError(), OtherModel()])
def test_a_hedge_that_comes_to_nothing_leaves_the_first_call_its_time(worse: object) -> None:
    slow = Late(5)
    assert asyncio.run(call("encoder", soon(1.0), sender(slow, Early(slow, worse)), rich())) == 5


def test_no_more_than_three_are_asked_at_once() -> None:
    with pytest.raises(DeadlineExceeded):  # a fourth would be no response
        asyncio.run(call("encoder", soon(0.1), sender(*(Response() for _ in range(N_AT_ONCE))), rich()))


def test_without_budget_or_another_replica_nobody_else_is_asked() -> None:
    for hedges in (None, HedgeBudget(0.0)):
        with pytest.raises(DeadlineExceeded):
            asyncio.run(call("encoder", soon(), sender(Response()), hedges))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(BackPressureError(9, 8), Overloaded), (DeploymentUnavailableError("x"), ModelUnavailable)],  # type: ignore[arg-type]
)
def test_serves_errors_become_ours(theirs: Exception, ours: type[OpenbookError]) -> None:
    before = n_errors("encoder", type(theirs).__name__)
    with pytest.raises(ours, match="encoder"):
        asyncio.run(call("encoder", NEVER, sender(Response(theirs))))
    assert n_errors("encoder", type(theirs).__name__) == before + 1


def test_the_deadline_cancels_the_call() -> None:
    response = Response()
    with pytest.raises(DeadlineExceeded, match="before encoder was done"):
        asyncio.run(call("encoder", Context(Deadline.after(0.01, ManualClock())), sender(response)))
    assert response.cancelled
    with pytest.raises(DeadlineExceeded):
        asyncio.run(call("encoder", Context(Deadline.after(0)), sender()))  # not even sent


async def _read(stream: Any, n: int | None = None) -> list[Any]:
    seen = []
    async for part in stream:
        seen.append(part)
        if len(seen) == n:
            await stream.aclose()
    return seen


def test_a_stream_ends_with_its_source_or_with_our_error() -> None:
    assert asyncio.run(_read(call_stream("generator", NEVER, sender(Response(1, 2, StopAsyncIteration()))))) == [1, 2]
    with pytest.raises(InvalidRequest, match="bad"):
        asyncio.run(_read(call_stream("generator", NEVER, sender(Response(1, InvalidRequest("bad"))))))
    with pytest.raises(ModelUnavailable):
        asyncio.run(_read(call_stream("generator", NEVER, sender(Response(1, ActorDiedError())))))


def test_the_deadline_holds_for_each_part_of_a_stream() -> None:
    response = Response(1)
    with pytest.raises(DeadlineExceeded, match="before generator was done"):
        asyncio.run(_read(call_stream("generator", soon(), sender(response))))
    assert response.cancelled
    with pytest.raises(DeadlineExceeded):
        asyncio.run(_read(call_stream("generator", Context(Deadline.after(0)), sender())))  # not even sent


def test_closing_a_stream_cancels_the_call() -> None:
    response = Response(1, 2, 3)
    assert asyncio.run(_read(call_stream("generator", NEVER, sender(response)), n=2)) == [1, 2]
    assert response.cancelled
