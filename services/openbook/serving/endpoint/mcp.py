"""MCP at `/mcp`: streamable HTTP without sessions, replies in JSON. Tools: search, fetch, answer.

The results of `search` and `fetch` have the shapes that ChatGPT's connectors ask for. A passage's id names its snapshot
too, so that after a publication nobody gets another text under the same id. Needs the extra `mcp`.
"""

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from math import exp
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    CallToolRequestParams,
    CallToolResult,
    ErrorData,
    JSONRPCError,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)
from pydantic import Field
from pydantic_core import from_json
from starlette.types import Receive, Send
from starlette.types import Scope as Connection

from openbook import __version__
from openbook.core.context import Context
from openbook.core.types import Passage
from openbook.errors import OpenbookError, Overloaded, UnknownPassage
from openbook.logs import as_ours
from openbook.rag.answer import Answer
from openbook.rag.own import check_text
from openbook.serving.access.keys import Identity
from openbook.serving.access.scopes import Scope
from openbook.serving.endpoint.asked import asked
from openbook.serving.endpoint.bodies import replay
from openbook.serving.endpoint.guard import identified
from openbook.serving.endpoint.openapi import CALL_OF_A_TOOL
from openbook.serving.endpoint.schemas import AnswerRequest, PassageRequest, RetrieveRequest
from openbook.serving.endpoint.sent import Real, Sent, Whole32, parsed
from openbook.serving.endpoint.service import AnswerService
from openbook.serving.endpoint.urls import url_of

BAD_ID = "id must be a text or a whole number"
SNIPPET_CHARS = 300
"""Of a passage among the results of a search."""
INSTRUCTIONS = (
    "Answers questions from a collection of passages, and says which passages each answer rests on. "
    "`search` finds passages, `fetch` gives one of them whole, `answer` answers a question from the best of them."
)


class Search(Sent):
    """Find the passages that are nearest to a question, best first."""

    query: Annotated[str, Field(description="A question, in words.")]
    k: Annotated[Whole32 | None, Field(description="How many passages.")] = None


class Fetch(Sent):
    """Get a passage whole."""

    id: Annotated[str, Field(description="As `search` and `answer` name it.")]


class Ask(Sent):
    """Answer a question from the passages that are found for it, and say which of them each part rests on."""

    question: str
    k: Annotated[Whole32 | None, Field(description="Passages to read.")] = None
    labels: Annotated[
        Annotated[list[str], Field(fail_fast=True)] | None,
        Field(description="The answer is the most probable of these."),
    ] = None
    min_probability: Annotated[
        Real | None, Field(description="0 to 1: rather no answer than one less probable than this.")
    ] = None
    min_confidence: Annotated[
        Real | None, Field(description="0 to 1: rather no answer than one that is right with less probability.")
    ] = None


def add_mcp(app: FastAPI, service: AnswerService) -> None:
    """`POST /mcp` in front of `service`. There are no sessions, hence nothing to GET or DELETE."""

    @app.post("/mcp", tags=["MCP"], openapi_extra=CALL_OF_A_TOOL)
    async def mcp(request: Request) -> Response:
        """The Model Context Protocol, for its clients: JSON-RPC, a request a call."""
        with asked(request) as context:
            return _Session(build_server(service, context, identified(request)))


class _Session(Response):
    """One request, answered by a server of its own."""

    def __init__(self, server: "Server[Any]") -> None:
        super().__init__()
        self._manager = StreamableHTTPSessionManager(server, json_response=True, stateless=True)

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        if _has_bad_id(body):
            error = JSONRPCError(jsonrpc="2.0", id=None, error=ErrorData(code=INVALID_REQUEST, message=BAD_ID))
            reply = error.model_dump_json(exclude_unset=True)
            await Response(reply, 400, media_type="application/json")(scope, receive, send)
            return
        async with self._manager.run():
            await self._manager.handle_request(scope, replay(body, receive), send)


def _has_bad_id(body: bytes) -> bool:
    """Whether it is a request with an id that is none. The SDK would take it for a notification, which has no reply.
    What is no JSON it says itself.
    """
    with suppress(ValueError):
        sent = from_json(body)
        return isinstance(sent, dict) and "method" in sent and type(sent.get("id", "")) not in (str, int)
    return False


def build_server(service: AnswerService, context: Context, identity: Identity | None) -> "Server[Any]":
    """The tools, on behalf of one caller: those that his key has the scope for."""
    tools: dict[str, tuple[type[Sent], Callable[[Any], Awaitable[dict[str, Any]]]]] = {
        "search": (Search, lambda asked: _search(service, asked, context)),
        "fetch": (Fetch, lambda asked: _fetch(service, asked, context)),
        "answer": (Ask, lambda asked: _answer(service, asked, context)),
    }
    if identity and Scope.RETRIEVE not in identity.scopes:
        del tools["search"], tools["fetch"]

    async def list_tools(_: object, page: PaginatedRequestParams | None) -> ListToolsResult:
        max_k = service.settings.answer.max_k
        return ListToolsResult(tools=[_described(name, arguments, max_k) for name, (arguments, _) in tools.items()])

    async def call_tool(_: object, call: CallToolRequestParams) -> CallToolResult:
        if call.name not in tools:
            raise MCPError(INVALID_PARAMS, f"tool must be one of {', '.join(tools)}, got {call.name[:50]!r}")
        arguments, use = tools[call.name]
        try:
            found = await use(parsed(arguments, call.arguments or {}))
        except Exception as error:
            ours = as_ours(error, context.request_id)
            return CallToolResult(content=[TextContent(text=_said_of(ours))], is_error=True)
        return CallToolResult(content=[TextContent(text=json.dumps(found))], structured_content=found)

    return Server(
        "openbook",
        version=__version__,
        title="openbook",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


async def _search(service: AnswerService, asked: Search, context: Context) -> dict[str, Any]:
    query = check_text("query", asked.query, service.settings.answer.max_question_chars)  # by the name that it has here
    found = await service.retrieve(RetrieveRequest(question=query, k=asked.k), context)
    results = [
        {**_named(each.passage, found.snapshot_id), "text": _snippet(each.passage.text)} for each in found.evidence
    ]
    return {"results": results}


async def _fetch(service: AnswerService, asked: Fetch, context: Context) -> dict[str, Any]:
    snapshot_id, _, number = asked.id.rpartition(":")
    if not (snapshot_id and number.isascii() and number.isdigit() and len(number) < 20):
        raise UnknownPassage(f"id must be one that search gave, got {asked.id[:100]!r}")
    wanted = PassageRequest(id=number, snapshot_id=snapshot_id)
    passage = (await service.excerpt(wanted, context)).passage
    metadata: dict[str, Any] = {"document_id": passage.document_id, "snapshot_id": snapshot_id}
    if passage.origin:
        metadata["lasting_id"] = passage.lasting_id
        metadata |= {name: value for name, value in asdict(passage.origin).items() if value not in ("", None, {})}
    return {**_named(passage, snapshot_id), "text": passage.text, "metadata": metadata}


async def _answer(service: AnswerService, asked: Ask, context: Context) -> dict[str, Any]:
    wanted = asked.model_dump(exclude_none=True)
    answer = await service.answer(parsed(AnswerRequest, {**wanted, "tokens": True}), context)
    return {
        "answer": answer.text,
        "probability": exp(answer.log_likelihood),
        "confidence": answer.confidence,
        "abstained": answer.abstained,
        "cut": answer.cut,
        "citations": _citations(answer),
        "passages": [
            {
                **_named(each.passage, answer.snapshot_id),
                "text": each.passage.text,
                "probability": exp(each.log_posterior),
            }
            for each in answer.evidence
        ],
    }


def _citations(answer: Answer) -> list[dict[str, Any]]:
    return [
        {
            "text": answer.text[each.start : each.end],
            **_named(answer.evidence[each.evidence].passage, answer.snapshot_id),
            "probability": each.probability,
        }
        for each in answer.citations
    ]


def _named(passage: Passage, snapshot_id: str) -> dict[str, Any]:
    return {"id": f"{snapshot_id}:{passage.id}", "title": passage.title, "url": url_of(passage)}


def _snippet(text: str) -> str:
    if len(text) <= SNIPPET_CHARS:
        return text
    begun = text[:SNIPPET_CHARS]
    return f"{begun.rpartition(' ')[0] or begun} ..."  # some scripts put no spaces between words


def _described(name: str, arguments: type[Sent], max_k: int) -> Tool:
    schema = arguments.model_json_schema()
    if k := schema["properties"].get("k"):
        k["anyOf"][0] = {"type": "integer", "minimum": 1, "maximum": max_k}  # the model's limits are protobuf's
    description = schema.pop("description")
    hints = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
    return Tool(name=name, description=description, input_schema=schema, annotations=hints)


def _said_of(error: OpenbookError) -> str:
    """For a model to read, which may try again."""
    again = f" (try again in {error.retry_after_whole_s} s)" if isinstance(error, Overloaded) else ""
    return f"{error.grpc_code}: {error}{again}"
