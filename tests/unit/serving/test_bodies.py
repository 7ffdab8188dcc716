"""Bodies are read in full, within limits, before the application hears of a request."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from ray.serve._private import constants, http_util
from small_endpoint import QUESTION, service
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openbook.serving.endpoint.bodies import BodyLimits, BufferedBodies, middlewares
from openbook.serving.endpoint.http import build_app
from openbook.telemetry import refused

MANY = 1000


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message.get("body", b"")})


class Caller:
    """One request. Its body comes when the test says so."""

    def __init__(self, app: ASGIApp, method: str = "POST", headers: dict[str, str] | None = None) -> None:
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._told: list[Message] = []
        scope = {
            "type": "http",
            "method": method,
            "path": "/v1/answer",
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()],
        }
        self.task = asyncio.create_task(app(scope, self._messages.get, self._send))

    async def _send(self, message: Message) -> None:
        self._told.append(message)

    def sends(self, body: bytes, more: bool = False) -> None:
        self._messages.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leaves(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def hears(self) -> tuple[int, Any]:
        await self.task
        start, end = self._told
        return start["status"], end["body"] if start["status"] == 200 else json.loads(end["body"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self._told[0]["headers"])


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))  # type: ignore[arg-type]


@asynccontextmanager
async def slow_ones(app: BufferedBodies, n: int, body: bytes = b"{") -> AsyncIterator[list[Caller]]:
    callers = [Caller(app) for _ in range(n)]
    for caller in callers:
        caller.sends(body, more=True)
    await asyncio.sleep(0)
    yield callers
    for caller in callers:
        caller.leaves()
    await asyncio.gather(*(caller.task for caller in callers))


def test_a_body_in_pieces_arrives_as_one() -> None:
    async def scenario() -> None:
        caller = Caller(BufferedBodies(echo))
        caller.sends("{Zür".encode()[:-1], more=True)
        caller.sends("{Zür".encode()[-1:], more=True)
        caller.sends(b"}")
        assert await caller.hears() == (200, "{Zür}".encode())

    run(scenario)


def test_who_sends_at_once_is_answered_whoever_else_does_not() -> None:
    async def scenario() -> None:
        app = BufferedBodies(echo, BodyLimits(n_arriving=50))
        async with slow_ones(app, MANY) as slow:
            good = Caller(app)
            good.sends(b"{}")
            assert await good.hears() == (200, b"{}")
            # Those longest on their way had to go: all but 49, when one more came.
            for caller in slow[: MANY - 49]:
                status, error = await caller.hears()
                assert (status, error["code"]) == (408, "DEADLINE_EXCEEDED")
            assert not any(caller.task.done() for caller in slow[MANY - 49 :])

    run(scenario)


def test_who_comes_in_the_moment_in_which_the_oldest_ones_time_is_over_is_answered() -> None:
    async def scenario() -> None:
        app = BufferedBodies(echo, BodyLimits(n_arriving=1))
        async with slow_ones(app, 1) as (slow,):
            (time,) = app._arriving
            time._on_timeout()  # its task hears of it in the next turn of the loop
            good = Caller(app)
            good.sends(b"{}")
            assert await good.hears() == (200, b"{}")
            assert (await slow.hears())[0] == 408

    run(scenario)


def test_a_body_that_takes_too_long_is_refused_and_its_connection_closed() -> None:
    async def scenario() -> None:
        n_before = refused("endpoint", "fast body")._value.get()
        async with slow_ones(BufferedBodies(echo, BodyLimits(timeout_s=0.01)), 1) as (caller,):
            status, error = await caller.hears()
            assert status == 408
            assert error["detail"].startswith("body must arrive within 0.01 s")
            assert caller.headers[b"connection"] == b"close"
            assert refused("endpoint", "fast body")._value.get() == n_before + 1

    run(scenario)


@pytest.mark.parametrize("declared", [{"content-length": "1001"}, {}], ids=["declared", "as it comes"])
def test_a_large_body_is_refused_as_such(declared: dict[str, str]) -> None:
    async def scenario() -> None:
        caller = Caller(BufferedBodies(echo, BodyLimits(n_bytes=1000)), headers=declared)
        if not declared:  # else nothing of it is waited for
            caller.sends(b"x" * 600, more=True)
            caller.sends(b"x" * 600, more=True)
        status, error = await caller.hears()
        assert (status, error["code"]) == (413, "INVALID_ARGUMENT")
        assert error["detail"].startswith("body must have at most 1000 bytes")

    run(scenario)


def test_the_bytes_of_all_bodies_together_are_bounded() -> None:
    async def scenario() -> None:
        app = BufferedBodies(echo, BodyLimits(n_bytes_held=1000, n_bytes_small=100))
        async with slow_ones(app, 1, b"x" * 100) as (small,), slow_ones(app, 3, b"x" * 300) as (first, second, third):
            more = Caller(app)
            more.sends(b"y" * 300)
            assert (await more.hears())[0] == 200
            assert (await first.hears())[0] == 408
            assert not any(each.task.done() for each in (small, second, third))

    run(scenario)


def test_a_large_body_counts_once_however_many_pieces_it_comes_in() -> None:
    async def scenario() -> None:
        limits = BodyLimits(n_bytes=900, n_bytes_held=1000, n_bytes_small=100)
        caller = Caller(BufferedBodies(echo, limits), headers={"content-length": "900"})
        for more in (True, True, False):
            caller.sends(b"x" * 300, more)
        assert await caller.hears() == (200, b"x" * 900)

    run(scenario)


def test_what_comes_after_a_body_is_heard_when_it_comes() -> None:
    """That its sender has gone, and not before he has."""
    heard: list[Any] = []

    async def listens(scope: Scope, receive: Receive, send: Send) -> None:
        heard.append((await receive())["body"])
        heard.append(await receive())

    async def scenario() -> None:
        caller = Caller(BufferedBodies(listens))
        caller.sends(b"{}")
        caller._messages.put_nowait(gone)
        await caller.task

    gone = {"type": "http.disconnect", "of": "the sender"}
    run(scenario)
    assert heard == [b"{}", gone]


def test_bodies_being_answered_count_until_they_are() -> None:
    async def scenario() -> None:
        answered = asyncio.Event()

        async def dawdle(scope: Scope, receive: Receive, send: Send) -> None:
            await answered.wait()
            await echo(scope, receive, send)

        app = BufferedBodies(dawdle, BodyLimits(n_bytes_held=1000, n_bytes_small=100))
        first, second, small = Caller(app), Caller(app), [Caller(app) for _ in range(20)]
        first.sends(b"x" * 1000)
        second.sends(b"x" * 101)
        for each in small:
            each.sends(b"x" * 100)
        status, error = await second.hears()
        assert (status, error["code"]) == (429, "RESOURCE_EXHAUSTED")
        answered.set()
        assert [(await each.hears())[0] for each in (first, *small)] == [200] * 21
        third = Caller(app)
        third.sends(b"x" * 600)
        assert (await third.hears())[0] == 200

    run(scenario)


def test_what_is_no_text_is_refused() -> None:
    async def scenario() -> None:
        caller = Caller(BufferedBodies(echo))
        caller.sends(b"\xff")
        status, error = await caller.hears()
        assert status == 400
        assert "UTF-8" in error["detail"]
        caller = Caller(BufferedBodies(echo), headers={"content-encoding": "gzip"})
        caller.sends(gzip.compress(b"{}"))
        told = "body must be JSON in UTF-8: it is sent with Content-Encoding: gzip, which is not read"
        status, error = await caller.hears()
        assert (status, error["detail"]) == (400, told)

    run(scenario)


def test_nothing_is_left_of_those_who_leave() -> None:
    async def scenario() -> None:
        app = BufferedBodies(echo)
        async with slow_ones(app, 10, b"x" * 20_000) as left:
            assert (app._n_bytes_held, len(app._arriving)) == (200_000, 10)
        assert (app._n_bytes_held, len(app._arriving)) == (0, 0)
        assert not any(each._told for each in left), "half a body is no request"

    run(scenario)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("serves", [(b"X-Request-ID", b"another"), (b"x-request-id", b"chat-1")])
def test_a_reply_has_one_request_id_though_serve_adds_its_own(method: str, serves: tuple[bytes, bytes]) -> None:
    ours = (b"x-request-id", b"chat-1")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": [ours, (b"a", b"b"), serves, (b"a", b"b")]}
        )
        await send({"type": "http.response.body", "body": b""})

    async def scenario() -> None:
        caller = Caller(BufferedBodies(app), method)
        caller.sends(b"")
        await caller.hears()
        assert caller._told[0]["headers"] == [ours, (b"a", b"b"), (b"a", b"b")]

    run(scenario)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/answer", {"question": QUESTION, "request_id": "mine"}),
        ("POST", "/v1/answer/stream", {"question": QUESTION, "request_id": "mine"}),
        ("POST", "/v1/answer", {"question": "", "request_id": "mine"}),
        ("POST", "/v1/answer", {"question": QUESTION, "request_id": "mine", "any": "x" * (1 << 20)}),
        ("GET", "/v1/chat", None),
        ("PUT", "/v1/models", None),
        ("GET", "/healthz", None),
    ],
)
def test_behind_serve_a_reply_has_the_id_of_its_body_and_of_the_log(method: str, path: str, body: Any) -> None:
    app = http_util._apply_middlewares(build_app(service()), middlewares())

    async def scenario() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            reply = await client.request(method, path, json=body, headers={"x-request-id": "header"})
            read = body and len(body) == 2
            assert reply.headers.get_list("x-request-id") == ["mine" if read else "header"]
            assert not read or '"request_id":"mine"' in reply.text

    run(scenario)


SERVE_READS = (
    constants.SERVE_HTTP_REQUEST_ID_HEADER,
    constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
    constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
    constants.SERVE_MULTIPLEXED_MODEL_ID,
    constants.SERVE_MULTIPLEXED_MODEL_ID.replace("_", "-"),
    constants.SERVE_SESSION_ID,
)


@pytest.mark.parametrize("name", [b"x-request-timeout-seconds", b"x-request-disconnect-disabled"])
def test_no_caller_tells_serve_how_long_to_go_on(name: bytes) -> None:
    assert name.decode() in SERVE_READS

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        assert name not in dict(scope["headers"])
        await echo(scope, receive, send)

    async def scenario() -> None:
        caller = Caller(http_util._apply_middlewares(serve, middlewares()), headers={name.decode(): "?1"})
        caller.sends(b"")
        assert (await caller.hears())[0] == 200

    run(scenario)


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_serve_would_fail_to_read_does_not_reach_it(method: str) -> None:
    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        told = [(name, value.decode()) for name, value in scope["headers"] if name.decode() in SERVE_READS]
        assert [name for name, _ in told] == [b"x-request-id"], "its own"
        await echo(scope, receive, send)

    async def scenario() -> None:
        headers = {**dict.fromkeys(SERVE_READS, "é"), "authorization": "é"}
        caller = Caller(http_util._apply_middlewares(serve, middlewares()), method, headers)
        caller.sends(b"")
        assert (await caller.hears())[0] == 200

    run(scenario)


def test_a_web_socket_has_no_header_that_serve_would_fail_to_read() -> None:
    opened: list[Scope] = []

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        opened.append(scope)

    scope = {"type": "websocket", "path": "/", "headers": [(name.encode(), b"\xff") for name in SERVE_READS]}
    asyncio.run(BufferedBodies(serve)(scope, None, None))  # type: ignore[arg-type]
    assert [each["headers"] for each in opened] == [[]]


def test_of_a_body_that_nobody_asks_for_nothing_is_kept() -> None:
    """Serve hands on all that comes, to a queue without an end."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        kept = [await receive(), await receive()]
        assert [each["type"] for each in kept] == ["http.request", "http.disconnect"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": kept[0]["body"]})

    async def scenario() -> None:
        caller = Caller(BufferedBodies(serve), method="GET")
        for _ in range(3):
            caller.sends(bytes(1 << 16), more=True)
        caller.leaves()
        assert await caller.hears() == (200, b"")

    run(scenario)


def test_requests_without_a_body_are_not_kept() -> None:
    async def scenario() -> None:
        caller = Caller(BufferedBodies(echo), method="GET")
        caller.sends(b"", more=True)
        assert await caller.hears() == (200, b"")

    run(scenario)
