"""The endpoint over HTTP: JSON, server-sent events, and errors in one shape."""

import logging
from collections.abc import AsyncGenerator
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from openbook import __version__
from openbook.core.json_text import LongNumber, read_json
from openbook.errors import InvalidRequest, OpenbookError
from openbook.logs import as_ours
from openbook.processes import is_loopback
from openbook.rag.answer import Event
from openbook.serving.access.gate import Gate
from openbook.serving.endpoint.asked import asked
from openbook.serving.endpoint.batch import BatchRequest, BatchResponse, answer_batch, batch_to_json
from openbook.serving.endpoint.bodies import BufferedBodies
from openbook.serving.endpoint.guard import Guarded, OfThisMachine
from openbook.serving.endpoint.openai.routes import add_openai
from openbook.serving.endpoint.openapi import ASKED, BATCH, HEALTH, OURS, PROBLEM, RETRIEVED, streamed, take_keys
from openbook.serving.endpoint.page import mount_page
from openbook.serving.endpoint.problems import problem_of
from openbook.serving.endpoint.replies import EventStream, Named, error_reply, status_reply, to_json
from openbook.serving.endpoint.schemas import (
    AnswerRequest,
    AnswerResponse,
    ExcerptOut,
    PassageQuery,
    PassageRequest,
    RetrieveRequest,
    RetrieveResponse,
    event_to_json,
)
from openbook.serving.endpoint.sent import describe, parsed
from openbook.serving.endpoint.service import AnswerService
from openbook.serving.endpoint.swagger import add_docs

log = logging.getLogger(__name__)

CORS: dict[str, Any] = {
    "allow_methods": ["GET", "HEAD", "POST"],
    "allow_headers": ["*"],  # clients bring headers of their own: OpenAI's X-Stainless-..., MCP's Mcp-...
    "expose_headers": ["RateLimit", "RateLimit-Policy", "Retry-After", "WWW-Authenticate", "X-Request-Id"],
}
"""What pages of other origins may send and read, where any may."""


class _Exposition(Response):
    media_type = CONTENT_TYPE_LATEST


def build_app(service: AnswerService, gate: Gate | None = None) -> FastAPI:
    """The ASGI application in front of `service`, for those whom the gate admits; with none, for all."""
    app = FastAPI(
        title="openbook",
        version=__version__,
        description="Question answering by retrieval-augmented generation.",
        responses=PROBLEM,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # it would lead to http where a proxy in front ends TLS
    )
    app.add_middleware(BufferedBodies)
    if gate:
        app.add_middleware(Guarded, gate=gate)  # in front of it: who may not ask needs not send
    elif is_loopback(service.settings.serving.host):
        app.add_middleware(OfThisMachine, domains=service.settings.serving.domains)
    app.add_middleware(Named)
    add_docs(app)
    if origins := service.settings.serving.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, **CORS)  # outermost: browsers ask it before all else
    app.add_exception_handler(OpenbookError, _on_openbook_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)

    @app.post("/v1/answer", response_model=AnswerResponse, tags=[OURS])
    async def answer(body: Annotated[AnswerRequest, ASKED], request: Request) -> Response:
        """The answer with its evidence."""
        with asked(request, body.request_id) as context:
            return to_json(AnswerResponse.model_validate(await service.answer(body, context)))

    @app.post("/v1/answer/batch", response_model=BatchResponse, tags=[OURS])
    async def answer_many(body: Annotated[BatchRequest, BATCH], request: Request) -> Response:
        """Many questions at once. Each has its answer, or its own error; the order is kept."""
        with asked(request, body.request_id) as context:
            outcomes = await answer_batch(
                service, body.requests, partial(parsed, AnswerRequest), body.timeout_s, context
            )
        return to_json(batch_to_json(outcomes, context.request_id))

    @app.post("/v1/answer/stream", response_class=StreamingResponse, responses=streamed(EVENTS), tags=[OURS])
    async def answer_stream(body: Annotated[AnswerRequest, ASKED], request: Request) -> Response:
        """Server-sent events: `retrieved`, then `token` after `token`, then `answer`.

        RAG-Token, greedy or sampled, tells tokens as they are decided; otherwise they come when the answer stands.

        An error after the first event comes as the event `error`.
        """
        with asked(request, body.request_id) as context:
            events = service.stream(body, context)
            first = await anext(events)  # what fails until here has a status of its own
        return EventStream(_server_sent(first, events, context.request_id), events)

    @app.post("/v1/retrieve", response_model=RetrieveResponse, tags=[OURS])
    async def retrieve(body: Annotated[RetrieveRequest, RETRIEVED], request: Request) -> Response:
        """The passages and their prior alone."""
        with asked(request, body.request_id) as context:
            return to_json(RetrieveResponse.model_validate(await service.retrieve(body, context)))

    @app.get("/v1/passages/{id}", response_model=ExcerptOut, tags=[OURS])
    async def passage(
        id: Annotated[str, Path(description="A lasting id, or the number that an answer gives.", examples=["0"])],
        request: Request,
        query: Annotated[PassageQuery, Query()],
    ) -> Response:
        """One passage with its origin, and its neighbours if they are asked for."""
        with asked(request) as context:
            wanted = PassageRequest.model_construct(id=id, **query.model_dump())
            return to_json(ExcerptOut.model_validate(await service.excerpt(wanted, context)))

    @app.get("/healthz", tags=[HEALTH])
    async def healthz() -> dict[str, str]:
        """Whether the replica that answers lives, whatever else does: its event loop runs."""
        return {"status": "ok"}

    @app.get("/readyz", tags=[HEALTH])
    async def readyz(request: Request) -> dict[str, str]:
        """Whether questions can be answered now: the index tier is within reach."""
        with asked(request):
            await service.check_ready()
        return {"status": "ok"}

    @app.get("/metrics", response_class=_Exposition, tags=[HEALTH])
    async def metrics() -> Response:
        """Prometheus metrics of the replica that answers: stages, cache, shards, batches, requests."""
        return _Exposition(generate_latest())

    mount_page(app)
    add_openai(app, service)
    if find_spec("mcp"):
        try:
            from openbook.serving.endpoint.mcp import add_mcp
        except ImportError as error:  # of another one's version of it, such as 1.x
            log.warning("there is no /mcp: %s: pip install 'openbook[mcp]'", error)
        else:
            add_mcp(app, service)
    take_keys(app)
    for route in app.routes:  # behind what OpenAPI describes, in which HEAD goes without saying
        if isinstance(route, APIRoute) and route.methods == {"GET"}:
            route.methods = {"GET", "HEAD"}
    return app


EVENTS = """event: retrieved
data: {"evidence": [...], "snapshot_id": "...", ...}

event: token
data: {"text": "Alexander", "log_likelihood": -0.1, "log_posterior": [-0.01, -4.6]}

event: answer
data: {"answer": "Alexander Graham Bell", ...}

"""


async def _server_sent(first: Event, events: AsyncGenerator[Event], request_id: str) -> AsyncGenerator[str]:
    try:
        yield _event(*event_to_json(first))
        async for event in events:
            yield _event(*event_to_json(event))
    except Exception as error:
        ours = as_ours(error, request_id)
        yield _event("error", problem_of(ours, request_id).model_dump_json())


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


async def _on_openbook_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OpenbookError)
    return error_reply(request, error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = [(each, each["loc"]) for each in error.errors()]
    named = [{**each, "loc": loc[loc[0] in ("path", "query") :] or loc} for each, loc in found]
    return error_reply(request, InvalidRequest(describe(named)))


def _unread(body: bytes) -> str:
    """Why the JSON parser gave a body up; empty if nobody knows."""
    try:
        read_json(body)
    except LongNumber as error:
        return str(error)
    except RecursionError:
        return "body must be JSON of fewer brackets within each other"
    except ValueError:
        pass
    return ""


async def _on_http_error(request: Request, error: Exception) -> Response:
    """No such path, no such method, or a body that the JSON parser gave up on."""
    assert isinstance(error, HTTPException)
    message = f"{request.url.path}: {error.detail}"
    if error.status_code == 400:
        gave_up = isinstance(error.__cause__, ValueError | RecursionError)  # once all of the body was there
        return error_reply(request, InvalidRequest((gave_up and _unread(await request.body())) or message))
    code = {404: "NOT_FOUND", 405: "UNIMPLEMENTED"}.get(error.status_code, "INVALID_ARGUMENT")
    reply = status_reply(request, error.status_code, message, code)
    reply.headers.update(error.headers or {})  # Allow
    return reply
