"""The endpoint over HTTP: JSON, server-sent events, and errors in one shape."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from openbook import __version__
from openbook.core.context import Context
from openbook.errors import InvalidRequest, OpenbookError
from openbook.logs import as_ours
from openbook.serving.access.gate import Gate
from openbook.serving.endpoint.bodies import BufferedBodies
from openbook.serving.endpoint.guard import Guarded, context_of, identified
from openbook.serving.endpoint.replies import error_body, error_reply, request_id_of, to_json
from openbook.serving.endpoint.schemas import (
    AnswerRequest,
    AnswerResponse,
    ErrorResponse,
    Event,
    RetrieveRequest,
    RetrieveResponse,
    describe,
    event_to_json,
)
from openbook.serving.endpoint.service import AnswerService, with_request_id


class _Exposition(Response):
    media_type = CONTENT_TYPE_LATEST


def build_app(service: AnswerService, gate: Gate | None = None) -> FastAPI:
    """The ASGI application in front of `service`, for those whom the gate admits; with none, for all."""
    app = FastAPI(
        title="openbook",
        version=__version__,
        description="Question answering by retrieval-augmented generation.",
        responses={"default": {"model": ErrorResponse, "description": "Any error."}},
    )
    app.add_middleware(BufferedBodies)
    if gate:
        app.add_middleware(Guarded, gate=gate)  # in front of it: who may not ask needs not send
    app.add_exception_handler(OpenbookError, _on_openbook_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)

    @app.post("/v1/answer", response_model=AnswerResponse)
    async def answer(body: AnswerRequest, request: Request) -> Response:
        """The answer with its evidence."""
        with _asked(request, body) as context:
            return to_json(AnswerResponse.model_validate(await service.answer(body, context)))

    @app.post("/v1/answer/stream", response_class=StreamingResponse)
    async def answer_stream(body: AnswerRequest, request: Request) -> Response:
        """Server-sent events: `retrieved`, then `token` after `token` (RAG-Token with one beam), then `answer`.

        An error after the first event comes as the event `error`.
        """
        with _asked(request, body) as context:
            events = service.stream(body, context)
            first = await anext(events)  # what fails until here has a status of its own
        return StreamingResponse(
            _server_sent(first, events, context.request_id),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    @app.post("/v1/retrieve", response_model=RetrieveResponse)
    async def retrieve(body: RetrieveRequest, request: Request) -> Response:
        """The passages and their prior alone."""
        with _asked(request, body) as context:
            return to_json(RetrieveResponse.model_validate(await service.retrieve(body, context)))

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Whether the replica that answers lives, whatever else does: its event loop runs."""
        return {"status": "ok"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz")
    async def readyz(request: Request) -> dict[str, str]:
        """Whether questions can be answered now: the index tier is within reach."""
        with _asked(request):
            await service.check_ready()
        return {"status": "ok"}

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", response_class=_Exposition)
    async def metrics() -> Response:
        """Prometheus metrics of the replica that answers: stages, cache, shards, batches, requests."""
        return _Exposition(generate_latest())

    return app


async def _server_sent(first: Event, events: AsyncGenerator[Event], request_id: str) -> AsyncGenerator[str]:
    try:
        async with aclosing(events):
            yield _event(*event_to_json(first))
            async for event in events:
                yield _event(*event_to_json(event))
    except Exception as error:
        ours = as_ours(error, request_id)
        yield _event("error", error_body(ours.grpc_code, str(ours), request_id).model_dump_json())


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


@contextmanager
def _asked(request: Request, body: RetrieveRequest | None = None) -> Iterator[Context]:
    """The request's context, with the id of the body, else the header's, else a new one.

    Whatever is raised in the block becomes an error of ours.
    """
    try:
        context = with_request_id(context_of(request.headers, identified(request)), body.request_id if body else "")
        request.state.request_id = context.request_id
        yield context
    except Exception as error:
        raise as_ours(error, request_id_of(request)) from None


async def _on_openbook_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OpenbookError)
    return error_reply(request, error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_reply(request, InvalidRequest(describe(error.errors())))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """No such path, no such method, or a body that the JSON parser gave up on."""
    assert isinstance(error, HTTPException)
    code = {404: "NOT_FOUND", 405: "UNIMPLEMENTED"}.get(error.status_code, "INVALID_ARGUMENT")
    reply = to_json(error_body(code, f"{request.url.path}: {error.detail}", request_id_of(request)), error.status_code)
    reply.headers.update(error.headers or {})  # Allow
    return reply
