"""MCP's messages as lines of standard input and output. What the SDK's server drops without a word is told here."""

from typing import Any

import anyio
from mcp.server.lowlevel.server import NotificationOptions, Server
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp_types import (
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)
from pydantic import ValidationError

NO_ID = "a request must have an id, a text or a whole number"


async def serve(server: Server[Any], timeout_s: float) -> None:
    """Until the input has ended and what was asked in it is answered, for at most `timeout_s`: when its input ends, the
    SDK cancels that."""
    under_way: dict[RequestId, anyio.Event] = {}
    to_server, asked = anyio.create_memory_object_stream[SessionMessage | Exception]()
    to_client, answers = anyio.create_memory_object_stream[SessionMessage]()
    options = server.create_initialization_options(NotificationOptions(tools_changed=True))

    async def ask() -> None:
        async with to_server:
            async for item in read:
                if isinstance(item, Exception):
                    if refusal := _refusal(item):
                        await write.send(SessionMessage(refusal))
                    continue
                match item.message:
                    case JSONRPCRequest(id=id):
                        under_way[id] = anyio.Event()
                    case JSONRPCNotification(
                        method="notifications/cancelled", params={"requestId": str() | int() as id}
                    ):
                        under_way.pop(id, None)  # nobody answers it
                    case JSONRPCNotification(method=method) if not method.startswith("notifications/"):
                        await write.send(SessionMessage(_error(INVALID_REQUEST, NO_ID)))  # the SDK drops one of null
                await to_server.send(item)
            with anyio.move_on_after(timeout_s):
                for each in [*under_way.values()]:
                    await each.wait()

    async def answer() -> None:
        async for item in answers:
            await write.send(item)
            if isinstance(item.message, JSONRPCResponse | JSONRPCError) and item.message.id in under_way:
                under_way.pop(item.message.id).set()

    async with stdio_server() as (read, write), write, anyio.create_task_group() as relays:
        relays.start_soon(ask)
        relays.start_soon(answer)
        await server.run(asked, to_client, options)


def _refusal(error: Exception) -> JSONRPCError | None:
    """Of a line that is no message. Nobody waits for a reply to an empty one."""
    code, why = INVALID_REQUEST, "a line must be one message of JSON-RPC 2.0, an object, and is not"
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        if problem["type"] == "json_invalid":
            if not str(problem["input"]).strip():
                return None
            code, why = PARSE_ERROR, problem["msg"]
    return _error(code, why)


def _error(code: int, why: str) -> JSONRPCError:
    return JSONRPCError(jsonrpc="2.0", id=None, error=ErrorData(code=code, message=why))
