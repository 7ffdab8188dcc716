"""The endpoint over HTTP: JSON, server-sent events, and errors in one shape."""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openbook import __version__, wire
from openbook.core.context import Context
from openbook.errors import InvalidRequest, OpenbookError
from openbook.serving.endpoint.schemas import (
    AnswerRequest,
    AnswerResponse,
    ErrorDetail,
    ErrorResponse,
    Event,
    RetrieveRequest,
    RetrieveResponse,
    describe,
    event_to_json,
)
from openbook.serving.endpoint.service import AnswerService, to_openbook_error, with_request_id

MAX_BODY_BYTES = 1 << 20


def build_app(service: AnswerService) -> FastAPI:
    """The ASGI application in front of `service`."""
    app = FastAPI(
        title="openbook",
        version=__version__,
        description="Question answering by retrieval-augmented generation.",
        responses={"default": {"model": ErrorResponse, "description": "Any error."}},
    )
    app.add_middleware(_CheckedBody)
    app.add_exception_handler(OpenbookError, _on_openbook_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)

    @app.post("/v1/answer", response_model=AnswerResponse)
    async def answer(body: AnswerRequest, request: Request) -> Response:
        """The answer with its evidence."""
        with _asked(request, body) as context:
            return _json(AnswerResponse.model_validate(await service.answer(body, context)))

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
            return _json(RetrieveResponse.model_validate(await service.retrieve(body, context)))

    @app.get("/healthz")
    async def healthz(request: Request) -> dict[str, str]:
        """Whether questions can be answered now: the index tier is within reach."""
        with _asked(request):
            await service.check_ready()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics of the replica that answers: stages, cache, shards, batches, requests."""
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    return app


async def _server_sent(first: Event, events: AsyncGenerator[Event], request_id: str) -> AsyncGenerator[str]:
    try:
        async with aclosing(events):
            yield _event(*event_to_json(first))
            async for event in events:
                yield _event(*event_to_json(event))
    except Exception as error:
        yield _event("error", _error_body(to_openbook_error(error, request_id), request_id).model_dump_json())


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


def _json(body: BaseModel, status: int = 200) -> Response:
    return Response(body.model_dump_json(), status, media_type="application/json")


def _error_body(error: OpenbookError, request_id: str) -> ErrorResponse:
    return ErrorResponse(error=ErrorDetail(code=error.grpc_code, message=str(error), request_id=request_id))


@contextmanager
def _asked(request: Request, body: RetrieveRequest | None = None) -> Iterator[Context]:
    """The request's context, with the id of the body, else the header's, else a new one.

    Whatever is raised in the block becomes an error of ours.
    """
    try:
        context = with_request_id(wire.context_of_headers(request.headers), body.request_id if body else "")
        request.state.request_id = context.request_id
        yield context
    except Exception as error:
        raise to_openbook_error(error, _request_id(request)) from None


def _request_id(request: Request) -> str:
    """Of a request that may have failed before it had a context."""
    if not hasattr(request.state, "request_id"):
        request.state.request_id = with_request_id(wire.context_of_headers(request.headers), "").request_id
    request_id: str = request.state.request_id
    return request_id


async def _on_openbook_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OpenbookError)
    return _json(_error_body(error, _request_id(request)), error.http_status)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return await _on_openbook_error(request, InvalidRequest(describe(error.errors())))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """No such path, no such method, or a body that the JSON parser gave up on."""
    assert isinstance(error, HTTPException)
    code = {404: "NOT_FOUND", 405: "UNIMPLEMENTED"}.get(error.status_code, "INVALID_ARGUMENT")
    detail = ErrorDetail(code=code, message=f"{request.url.path}: {error.detail}", request_id=_request_id(request))
    return _json(ErrorResponse(error=detail), error.status_code)


class _CheckedBody:
    """Reads the body before anything parses it: no more than MAX_BODY_BYTES, and text in UTF-8."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more and len(body) <= MAX_BODY_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        try:
            if len(body) > MAX_BODY_BYTES:
                raise InvalidRequest(f"body must have at most {MAX_BODY_BYTES} bytes")
            body.decode()
        except UnicodeDecodeError as error:
            reply = await _on_openbook_error(Request(scope), InvalidRequest(f"body must be JSON in UTF-8: {error}"))
            await reply(scope, receive, send)
        except InvalidRequest as error:
            await (await _on_openbook_error(Request(scope), error))(scope, receive, send)
        else:
            await self._app(scope, _replay(body, receive), send)


def _replay(body: bytes, receive: Receive) -> Receive:
    """First the body, then what comes after it."""
    messages: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def next_message() -> Message:
        return next(messages, None) or await receive()

    return next_message
