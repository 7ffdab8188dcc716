"""MCP over standard input and output, for clients that start their servers. All is asked of a running endpoint."""

import asyncio
from typing import Any

from openbook.errors import OpenbookError
from openbook.serving.access.bearer import bearer

TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 300.0


def run(url: str, api_key: str | None = None) -> None:
    """Until the input ends.

    Raises:
        InvalidConfig: no header holds the key.
        OpenbookError: nobody speaks MCP at `url`, or not with this key.
    """
    shown = bearer(api_key)
    asyncio.run(_run(f"{url.rstrip('/')}/mcp", {"Authorization": shown} if shown else {}))


async def _run(url: str, headers: dict[str, str]) -> None:
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.server.lowlevel.server import Server
    from mcp.server.stdio import stdio_server
    from mcp_types import CallToolRequestParams, CallToolResult, ListToolsResult, PaginatedRequestParams

    is_connected = False
    try:
        timeout = httpx2.Timeout(TIMEOUT_S, read=ANSWER_TIMEOUT_S)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout) as http,
            Client(streamable_http_client(url, http_client=http)) as endpoint,
        ):
            is_connected = True

            async def list_tools(_: object, page: PaginatedRequestParams | None) -> ListToolsResult:
                return await endpoint.list_tools()

            async def call_tool(_: object, call: CallToolRequestParams) -> CallToolResult:
                return await endpoint.call_tool(call.name, call.arguments)

            server: Server[Any] = Server(
                "openbook", instructions=endpoint.instructions, on_list_tools=list_tools, on_call_tool=call_tool
            )
            async with stdio_server() as (read, write):
                await server.run(read, write, server.create_initialization_options())
    except Exception as error:
        if is_connected:
            raise
        raise OpenbookError(f"{url}: nobody speaks MCP there: {_first(error)}") from None


def _first(error: BaseException) -> str:
    """What began it, of errors that come in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
