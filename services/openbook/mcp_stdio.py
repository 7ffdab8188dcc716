"""MCP over standard input and output, for clients that start their servers. All is asked of a running endpoint."""

import asyncio
import re
import signal
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
from mcp import Client, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
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
from openbook.processes import is_loopback
from openbook.secret import bearer
from openbook.serving.endpoint.problems import MEDIA_TYPE

TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 300.0
NO_PROXY = {"http://": None, "https://": None}
"""For httpx, in place of what the environment says: no proxy reaches what listens on loopback here."""

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
        InvalidConfig: no header holds the key, or files of TLS are given that cannot be used.
        OpenbookError: nobody speaks MCP at `url`, or not with this key.
    """
    shown = bearer(api_key)
    verify = _trusting(url, tls_ca, tls_cert, tls_key) if tls_ca or tls_cert or tls_key else True
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else who started us has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the thread that waits for input would be waited for
    asyncio.run(_run(f"{url.rstrip('/').removesuffix('/mcp')}/mcp", {"Authorization": shown} if shown else {}, verify))


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
    is_connected = False
    try:
        timeout = httpx2.Timeout(TIMEOUT_S, read=ANSWER_TIMEOUT_S)
        mounts = NO_PROXY if is_loopback(httpx2.URL(url).host) else None
        async with (
            _Http(headers=headers, timeout=timeout, mounts=mounts, verify=verify) as http,
            Client(streamable_http_client(url, http_client=http)) as endpoint,
        ):
            is_connected = True

            async def list_tools(_: object, page: PaginatedRequestParams | None) -> ListToolsResult:
                return await endpoint.list_tools()

            async def call_tool(_: object, call: CallToolRequestParams) -> CallToolResult:
                try:
                    return await endpoint.call_tool(call.name, call.arguments)
                except MCPError as error:
                    if error.code != INTERNAL_ERROR:
                        raise
                    return CallToolResult(content=[TextContent(text=f"{url}: {error}")], is_error=True)

            about = endpoint.server_info or Implementation(name="openbook", version="")
            server: Server[Any] = Server(
                about.name,
                version=about.version,
                title=about.title,
                instructions=endpoint.instructions,
                on_list_tools=list_tools,
                on_call_tool=call_tool,
            )
            async with stdio_server() as (read, write):
                await server.run(read, write, server.create_initialization_options())
    except Exception as error:
        if is_connected:
            raise
        began = _first(error)
        if isinstance(began, MCPError) and began.data:
            raise OpenbookError(f"{url}: {began}") from None
        told = _told(began)
        hint = "; it may want https://" if url.startswith("http://") and HUNG_UP.search(told) else ""
        raise OpenbookError(f"{url}: nobody speaks MCP there: {told}{hint}") from None


class _Http(httpx2.AsyncClient):
    """Where a reply does not come, or is a problem, one of JSON-RPC stands for it. The SDK knows no problems, and by an
    exception of one call it ends all of them.
    """

    async def send(self, request: httpx2.Request, **how: Any) -> httpx2.Response:
        try:
            response = await super().send(request, **how)
            await response.aread()
        except httpx2.RequestError as error:
            return _failed(request, 503, _told(error))
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


def _first(error: BaseException) -> BaseException:
    """What began it, of errors that come in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _told(error: BaseException) -> str:
    return str(error) or type(error).__name__
