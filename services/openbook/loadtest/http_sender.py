"""Questions over HTTP: JSON, and server-sent events."""

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from math import isnan
from time import monotonic
from typing import Any

import aiohttp
from grpc import StatusCode

from openbook import certificates
from openbook.loadtest.kinds import What
from openbook.loadtest.outcomes import BROKEN, NAN, NOT_SENT, OK, Reply
from openbook.loadtest.senders import CONNECT_TIMEOUT_S, Unreachable, about, digest, options, who_asks
from openbook.loadtest.settings import GRACE_S, LoadSettings

PATHS = {What.ANSWER: "/v1/answer", What.STREAM: "/v1/answer/stream", What.RETRIEVE: "/v1/retrieve"}
CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    408: "DEADLINE_EXCEEDED",
    413: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
"""Of replies that name no gRPC code themselves: a proxy's."""

OURS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
"""No more files or ports on this machine: nothing that the endpoint could help."""


@asynccontextmanager
async def opened(settings: LoadSettings, questions: Sequence[str]) -> AsyncIterator["HttpSender"]:
    """Where HTTP is spoken. Connections are made as they are needed. Raises InvalidConfig, Unreachable."""
    trusted = certificates.load("tls_ca", authorities=settings.tls_ca).authorities
    # By default 100 connections would be a queue of ours, and five minutes the limit of a request.
    async with aiohttp.ClientSession(
        settings.address,
        # A comment in the file may have any letters.
        connector=aiohttp.TCPConnector(
            limit=0, ssl=certificates.of_who_connects(content=trusted.decode("ascii", "ignore"))
        ),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"content-type": "application/json", **who_asks(settings)},
    ) as session:
        try:
            await _greet(session)
        except (aiohttp.ClientError, OSError) as error:
            why = str(error) or type(error).__name__
            if isinstance(error, aiohttp.ServerDisconnectedError):  # as gRPC's port does
                why += "; is that an endpoint's HTTP port (gRPC has no http:// in front)?"
            raise Unreachable(f"{settings.address}: {why}") from None
        yield HttpSender(session, settings, questions)


async def _greet(session: aiohttp.ClientSession) -> None:
    """Pass where questions would find who speaks HTTP, and TLS if it is to, whatever it says. One that says nothing is
    reached: that is what is to be measured. Raises what aiohttp raises.
    """
    limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=CONNECT_TIMEOUT_S)
    with suppress(aiohttp.SocketTimeoutError):
        async with session.get("/healthz", timeout=limits, allow_redirects=False):
            pass


class HttpSender:
    """One session, whose connections are kept."""

    def __init__(self, session: aiohttp.ClientSession, settings: LoadSettings, questions: Sequence[str]) -> None:
        self._session = session
        self._questions = questions
        self._check = settings.check
        self._path = PATHS[settings.what]
        self._is_stream = settings.what is What.STREAM
        self._read_on_s = settings.timeout_s + GRACE_S / 2  # sooner than the question is taken for a hang
        asked = options(settings)
        self._bodies = [json.dumps({"question": question, **asked}).encode() for question in questions]

    async def send(self, number: int) -> Reply:
        read_on_until = asyncio.get_running_loop().time() + self._read_on_s
        try:
            async with self._session.post(self._path, data=self._bodies[number], allow_redirects=False) as response:
                if response.status != 200:
                    return _failed(str(response.status), await response.read())
                if self._is_stream:
                    reply = (await self._stream(number, response))._replace(done=monotonic())
                    await _read_on(response, read_on_until)
                    return reply
                return self._reply(number, await response.read())
        except (aiohttp.ClientError, OSError) as error:
            why = str(error) or type(error).__name__
            if getattr(error, "errno", None) in OURS:
                return Reply(NOT_SENT, NOT_SENT, why)
            return Reply("UNAVAILABLE", "connection", why)

    async def _stream(self, number: int, response: aiohttp.ClientResponse) -> Reply:
        first = NAN
        async for name, data in events(response.content.iter_any()):
            if name == "error":
                return _failed("200, then error", data)
            if isnan(first) and name != "retrieved":
                first = monotonic()
            if name == "answer":
                return self._reply(number, data, first)
        return Reply(BROKEN, "200", "the stream ended without an answer")

    def _reply(self, number: int, data: bytes, first: float = NAN) -> Reply:
        """Of a body, which is looked at although nothing is checked: an answer is one only if it can be read."""
        try:
            body = json.loads(data)
            evidence = body["evidence"]
            if not self._check:
                return Reply(OK, "200", "", first)
            ids = [each["passage"]["id"] for each in evidence]
            numbers = [each[name] for each in evidence for name in ("score", "log_prior")]
            key = about(self._questions[number], body["snapshot_id"], body["coverage"]["missing_shards"])
            of = digest(self._check, body.get("answer", ""), ids, numbers)
            return Reply(OK, "200", "", first, key, of)
        except (ValueError, LookupError, TypeError, AttributeError):
            return Reply(BROKEN, "200", f"no answer: {data[:80]!r}")


async def _read_on(response: aiohttp.ClientResponse, until: float) -> None:
    """To the end of a reply of which all is known: only then is its connection kept for the next question."""
    with suppress(aiohttp.ClientError, OSError):  # a TimeoutError is one
        async with asyncio.timeout_at(until):
            async for _ in response.content.iter_any():
                pass


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, bytes]]:
    """The server-sent events, with name and data, in whatever pieces they come."""
    buffer = b""
    async for chunk in chunks:
        *whole, buffer = (buffer + chunk).split(b"\n\n")
        for event in whole:
            fields = dict(line.partition(b": ")[::2] for line in event.splitlines())
            yield fields.get(b"event", b"").decode(errors="replace"), fields.get(b"data", b"")


def _failed(seen: str, data: bytes) -> Reply:
    """A refusal or an error: the code that the body names, as openbook's do, or else what HTTP's status stands for."""
    code, message = CODES.get(int(seen[:3]), "UNKNOWN"), data[:200].decode(errors="replace")
    try:
        problem: dict[str, Any] = json.loads(data)
        if problem["code"] in StatusCode.__members__ and problem["code"] != OK:
            code, message = problem["code"], str(problem["detail"])
    except (ValueError, LookupError, TypeError):
        pass
    return Reply(code, seen, message)
