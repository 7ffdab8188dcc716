"""MCP over standard input and output, for clients that start their servers. All is asked of a running endpoint."""

import asyncio
import re
import signal
import ssl
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import anyio
import httpx2
from anyio.abc import TaskGroup, TaskStatus
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel.server import Server
from mcp.server.session import ServerSession
from mcp_types import (
    INTERNAL_ERROR,
    CallToolRequestParams,
    CallToolResult,
    Implementation,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
)
from pydantic import BaseModel, ValidationError

from openbook import certificates
from openbook.errors import InvalidConfig, OpenbookError
from openbook.files import at_home
from openbook.mcp_lines import serve
from openbook.processes import is_loopback
from openbook.secret import bearer
from openbook.serving.endpoint.problems import MEDIA_TYPE

Result = TypeVar("Result")

TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 300.0
START_TIMEOUT_S = 10.0
"""For the endpoint to say who it is, while who started us waits to hear that of us."""
LOOK_AGAIN_S = 2.0
NO_PROXY = {"http://": None, "https://": None}
"""For httpx, in place of what the environment says: no proxy reaches what listens on loopback here."""

UNTRUSTED = 495
"""As nginx says of certificates that will not do."""
FINAL = (401, 403, UNTRUSTED)
"""What is told as long as we run: asked anew, with the same key and files, the endpoint says the same."""

HUNG_UP = re.compile("Server disconnected|ReadError")
"""httpx's own words where somebody listens, but ends the connection at once: as who speaks TLS alone."""


def run(
    url: str,
    api_key: str | None = None,
    tls_ca: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> None:
    """Until the input ends, or Ctrl-C ends the process. A call that the endpoint does not answer, or refuses, gets an
    error as its result.

    Raises:
        InvalidConfig: the address is none, no header holds the key, or files of TLS are given that cannot be used.
        OpenbookError: whoever listens at `url` refuses the key, or one of both refuses the other's certificate.
    """
    _check(url)
    shown = bearer(api_key)
    verify = _trusting(url, tls_ca, tls_cert, tls_key) if tls_ca or tls_cert or tls_key else True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else who started us has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the thread that waits for input would be waited for
    asyncio.run(_run(f"{url.rstrip('/').removesuffix('/mcp')}/mcp", {"Authorization": shown} if shown else {}, verify))


def _check(url: str) -> None:
    """Raises InvalidConfig: nobody can be asked there, ever."""
    try:
        found = httpx2.URL(url)
        is_one = found.scheme in ("http", "https") and bool(found.host)
        is_one = is_one and (found.port is None or 0 < found.port < 1 << 16)
    except httpx2.InvalidURL:
        is_one = False
    if not is_one:
        raise InvalidConfig(f"--server must be http://host:port or https://host:port, got {url!r}")


def _trusting(url: str, ca: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    """Without `ca` whom this machine trusts."""
    if not url.startswith("https://"):
        raise InvalidConfig(f"tls_ca, tls_cert and tls_key need an address of https://, got {url}")
    if (certificate is None) != (key is None):
        raise InvalidConfig("tls_cert and tls_key must be given together")
    certificates.load("tls", certificate, key, ca)
    context = certificates.of_who_connects(ca)
    if certificate and key:
        context.load_cert_chain(at_home(certificate), at_home(key))
    return context


async def _run(url: str, headers: dict[str, str], verify: ssl.SSLContext | bool) -> None:
    timeout = httpx2.Timeout(TIMEOUT_S, read=ANSWER_TIMEOUT_S)
    mounts = NO_PROXY if is_loopback(httpx2.URL(url).host) else None
    async with _Http(headers=headers, timeout=timeout, mounts=mounts, verify=verify) as http:
        about, instructions = await _introduced(url, http)
        async with anyio.create_task_group() as tasks:
            endpoint = _Endpoint(url, http, tasks)
            server: Server[Any] = Server(
                about.name,
                version=about.version,
                title=about.title,
                instructions=instructions,
                on_list_tools=endpoint.list_tools,
                on_call_tool=endpoint.call_tool,
            )
            await serve(server, ANSWER_TIMEOUT_S)
            tasks.cancel_scope.cancel()


async def _introduced(url: str, http: "_Http") -> tuple[Implementation, str | None]:
    """Who answers, and what it says of itself; where nobody does, or not now, what stands for it until somebody will.

    Raises:
        OpenbookError: it does not let us in, or its certificate is not one that is trusted: asking again is no use.
    """
    about = Implementation(name="openbook", version="")
    try:
        with anyio.fail_after(START_TIMEOUT_S):
            async with _client(url, http) as endpoint:
                return endpoint.server_info or about, endpoint.instructions
    except Exception as error:
        told = f"{url}: {_reason(url, error)}"
        if _is_final(error):
            raise OpenbookError(told) from None
        print(f"openbook: {told}; each request asks anew", file=sys.stderr)
        return about, None


def _client(url: str, http: "_Http") -> Client:
    return Client(streamable_http_client(url, http_client=http))


class _Endpoint:
    """Asked for each request, by one client from the first time that it answers."""

    def __init__(self, url: str, http: "_Http", tasks: TaskGroup) -> None:
        self._url = url
        self._http = http
        self._tasks = tasks
        self._client: Client | None = None
        self._is_awaited = False

    async def list_tools(self, context: ServerRequestContext[Any], _: PaginatedRequestParams | None) -> ListToolsResult:
        try:
            return await self._ask(lambda client: client.list_tools())
        except MCPError as error:
            if self._client is None and not self._is_awaited and not _is_final(error):
                self._is_awaited = True
                self._tasks.start_soon(self._announce, context.session)
            raise

    async def call_tool(self, _: object, call: CallToolRequestParams) -> CallToolResult:
        try:
            return await self._ask(lambda client: client.call_tool(call.name, call.arguments))
        except MCPError as error:
            if error.code != INTERNAL_ERROR:
                raise
            return CallToolResult(content=[TextContent(text=str(error))], is_error=True)

    async def _ask(self, how: Callable[[Client], Awaitable[Result]]) -> Result:
        """Raises MCPError, INTERNAL_ERROR where it is not an answer."""
        try:
            if self._client is None:
                self._client = await self._tasks.start(self._hold)
        except Exception as error:
            data = error.data if isinstance(error, MCPError) else None
            raise MCPError(INTERNAL_ERROR, f"{self._url}: {_reason(self._url, error)}", data) from None
        try:
            return await how(self._client)
        except MCPError as error:
            if error.code != INTERNAL_ERROR:
                raise
            raise MCPError(INTERNAL_ERROR, f"{self._url}: {error}", error.data) from None

    async def _hold(self, *, task_status: TaskStatus[Client]) -> None:
        """A client ends in the task that began it, and no request's lasts as long."""
        async with _client(self._url, self._http) as client:
            task_status.started(client)
            await anyio.sleep_forever()

    async def _announce(self, session: ServerSession) -> None:
        """Tell who was shown no tools when there are some: some clients list them once alone."""
        while self._client is None:
            await anyio.sleep(LOOK_AGAIN_S)
            try:
                await self._ask(lambda client: client.list_tools())
            except MCPError as error:
                if _is_final(error):
                    return
        await session.send_tool_list_changed()


def _is_final(error: BaseException) -> bool:
    return _status(_first(error)) in FINAL


def _reason(url: str, error: BaseException) -> str:
    """Why there is no client of it."""
    began = _first(error)
    told = _told(began)
    if _status(began):
        return told
    hint = "; it may want https://" if url.startswith("http://") and HUNG_UP.search(told) else ""
    return f"nobody speaks MCP there: {told}{hint}"


class _Http(httpx2.AsyncClient):
    """Where a reply does not come, or is a problem, one of JSON-RPC stands for it. The SDK knows no problems, and by an
    exception of one call it ends all of them.
    """

    async def send(self, request: httpx2.Request, **how: Any) -> httpx2.Response:
        try:
            response = await super().send(request, **how)
            await response.aread()
        except httpx2.RequestError as error:
            return _failed(request, 503, _told(error), {"status": UNTRUSTED} if _is_of_certificates(error) else None)
        # 404: of an endpoint without MCP, which the SDK knows.
        if response.status_code != 404 and response.headers.get("content-type", "").startswith(MEDIA_TYPE):
            with suppress(ValidationError):
                detail = _Problem.model_validate_json(response.content).detail
                return _failed(request, response.status_code, detail, {"status": response.status_code})
        return response


class _Problem(BaseModel):
    """What is told of it."""

    detail: str


def _failed(request: httpx2.Request, status: int, message: str, data: Any = None) -> httpx2.Response:
    error = {"code": INTERNAL_ERROR, "message": message, "data": data}
    return httpx2.Response(status, json={"jsonrpc": "2.0", "id": None, "error": error}, request=request)


def _status(error: BaseException) -> int | None:
    """Of a problem, where it is one."""
    return error.data.get("status") if isinstance(error, MCPError) and isinstance(error.data, dict) else None


def _is_of_certificates(error: BaseException | None) -> bool:
    """Not where the connection just ends: as while nobody listens behind a port that a container publishes."""
    while error and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error is not None and not isinstance(error, ssl.SSLEOFError)


def _first(error: BaseException) -> BaseException:
    """What began it, of errors that come in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _told(error: BaseException) -> str:
    return str(error) or type(error).__name__
