"""Request bodies over HTTP, read in full before anything else happens: bounded in time, number and bytes.

Serve gives a request one of its places and only then hands over the body, however slowly that comes: as many slow
senders as there are places would stop the endpoint. So this stands in front of the places, by `middlewares`, which is
what Serve's `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names, and once more in the application itself, for a Serve
that was started without it. When there is no room for one more body, the one that has been on its way longest goes: a
caller who sends at once is never kept waiting by those who do not.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastapi import Request
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openbook.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, OpenbookError, Overloaded
from openbook.serving.endpoint.load import LoadTold
from openbook.serving.endpoint.quiet import quieten
from openbook.serving.endpoint.replies import error_reply, request_id_of
from openbook.telemetry import refused

BODY_WANTS: dict[type[OpenbookError], str] = {
    BodyTooLarge: "small body",
    BodyTooSlow: "fast body",
    Overloaded: "room for bodies",
}
"""What a body that is refused lacks, for the metric."""
SERVE_READS = {b"x-request-id", b"serve-multiplexed-model-id", b"x-session-id"}
"""Headers, with hyphens, that Serve takes for UTF-8."""
SERVE_OBEYS = {b"x-request-timeout-seconds", b"x-request-disconnect-disabled"}
"""Others, by which any caller would have it end his request in a plain text, or go on with it when he has gone."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What is read, from whomever."""

    n_bytes: int = 1 << 20  # of one body
    timeout_s: float = 10.0  # from the headers to the last byte
    n_arriving: int = 1024  # bodies on their way at once
    n_bytes_held: int = 64 << 20  # of all bodies that are on their way or being answered, the small ones apart
    # Of a body that is never refused for the large ones of others. What these take is bounded by their number: as they
    # come 16 MiB, of 1,024; while they are answered 9 MiB, of 288 in Serve's places and as many that wait for one.
    n_bytes_small: int = 16 << 10


def middlewares() -> list[Middleware]:
    """For Serve to put in front of its places. Of ours, its proxies call nothing else."""
    quieten()
    return [Middleware(LoadTold), Middleware(BufferedBodies)]


class BufferedBodies:
    """Lets requests through once their bodies are here, and are text in UTF-8. For one event loop."""

    def __init__(self, app: ASGIApp, limits: BodyLimits | None = None) -> None:
        self._app = app
        self._limits = limits or BodyLimits()
        self._arriving: dict[asyncio.Timeout, int] = {}  # bytes so far; the one longest on its way first
        self._n_bytes_held = 0  # of those that need room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope, send = _legible(scope), _mended(scope, send)
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] != "POST":
            await self._app(scope, replay(b"", _dropped(receive)), send)
            return
        try:
            body = await self._read(scope, receive)
        except OpenbookError as error:
            refused("endpoint", BODY_WANTS.get(type(error), "UTF-8")).inc()
            request = Request(scope)
            reply = error_reply(request, error)
            reply.headers["X-Request-Id"] = request_id_of(request)
            reply.headers["Connection"] = "close"  # what is still to come of the body is not waited for
            await reply(scope, receive, send)
            return
        if body is not None:
            with self._held(self._room(len(body))):
                await self._app(scope, replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body, or None if its sender has gone.

        Raises:
            BodyTooLarge, BodyTooSlow: as the limits say; BodyTooSlow also if room is needed for others.
            Overloaded: those being answered hold all the bytes there may be.
            InvalidRequest: it is no text in UTF-8.
        """
        limits = self._limits
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limits.n_bytes:
            raise BodyTooLarge(f"body must have at most {limits.n_bytes} bytes, got {int(declared)}")
        chunks: list[bytes] = []
        try:
            async with asyncio.timeout(limits.timeout_s) as time:
                with self._arrives(time):
                    more = True
                    while more:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            return None
                        chunks.append(message.get("body", b""))
                        more = message.get("more_body", False)
                        self._count(time, len(chunks[-1]))
        except TimeoutError:
            raise BodyTooSlow(
                f"body must arrive within {limits.timeout_s:g} s, or sooner while many others do"
            ) from None
        body = b"".join(chunks)
        try:
            body.decode()
        except UnicodeDecodeError as error:
            encoding = dict(scope["headers"]).get(b"content-encoding", b"").decode("latin-1")
            why = f"it is sent with Content-Encoding: {encoding:.40}, which is not read" if encoding else str(error)
            raise InvalidRequest(f"body must be JSON in UTF-8: {why}") from None
        return body

    @contextmanager
    def _arrives(self, time: asyncio.Timeout) -> Iterator[None]:
        if len(self._arriving) >= self._limits.n_arriving:
            self._drop(next(iter(self._arriving)))
        self._arriving[time] = 0
        try:
            yield
        finally:
            self._n_bytes_held -= self._room(self._arriving.pop(time, 0))

    def _room(self, n_bytes: int) -> int:
        """What a body of so many bytes takes of `n_bytes_held`."""
        return n_bytes if n_bytes > self._limits.n_bytes_small else 0

    def _count(self, time: asyncio.Timeout, n_bytes: int) -> None:
        """So many more bytes have come of a body that is on its way."""
        if time not in self._arriving:
            raise TimeoutError("it was dropped")
        before, now = self._arriving[time], self._arriving[time] + n_bytes
        self._arriving[time] = now
        self._n_bytes_held += self._room(now) - self._room(before)
        if now > self._limits.n_bytes:
            raise BodyTooLarge(f"body must have at most {self._limits.n_bytes} bytes, got more")
        if not self._room(now):
            return
        while self._n_bytes_held > self._limits.n_bytes_held and len(large := self._large()) > 1:
            self._drop(large[0])
        if self._n_bytes_held > self._limits.n_bytes_held:
            raise Overloaded(f"requests of {self._limits.n_bytes_held} bytes are being answered: try again later")

    def _large(self) -> list[asyncio.Timeout]:
        return [time for time, n_bytes in self._arriving.items() if self._room(n_bytes)]

    def _drop(self, time: asyncio.Timeout) -> None:
        self._n_bytes_held -= self._room(self._arriving.pop(time))
        if not time.expired():  # it may be over already, and its task not have heard of it yet
            time.reschedule(asyncio.get_running_loop().time())

    @contextmanager
    def _held(self, n_bytes: int) -> Iterator[None]:
        self._n_bytes_held += n_bytes
        try:
            yield
        finally:
            self._n_bytes_held -= n_bytes


def _mended(scope: Scope, send: Send) -> Send:
    """Of a reply with an id of its own Serve, which stands between, does not know, and adds another one. And uvicorn
    takes the body of who asks for another protocol for the next request: no other is read over his connection.
    """
    is_last = scope["type"] == "http" and any(name == b"upgrade" for name, _ in scope["headers"])

    async def send_one(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message["headers"])
            ids = [i for i, (name, _) in enumerate(headers) if name.lower() == b"x-request-id"]
            kept = [each for i, each in enumerate(headers) if i not in ids[1:]]
            message = {**message, "headers": [*kept, (b"connection", b"close")] if is_last else kept}
        await send(message)

    return send_one


def _legible(scope: Scope) -> Scope:
    """Without what Serve would obey, or fail to read: it answers that in plain text, with 500."""
    if scope["type"] == "lifespan":
        return scope
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in SERVE_OBEYS and (value.isascii() or name.replace(b"_", b"-") not in SERVE_READS)
    ]
    return {**scope, "headers": headers}


def _dropped(receive: Receive) -> Receive:
    """Nothing of a body that nobody asked for, of which Serve would keep all: only that its sender has gone."""

    async def gone() -> Message:
        while (message := await receive())["type"] == "http.request":
            pass
        return message

    return gone


def replay(body: bytes, receive: Receive) -> Receive:
    """First the body, then what comes after it."""
    messages: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def next_message() -> Message:
        return next(messages, None) or await receive()

    return next_message
