"""What HTTP callers get: JSON, events, and errors in the shape that their protocol has for them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openbook import wire
from openbook.errors import OpenbookError, Overloaded, Unauthenticated
from openbook.logs import as_ours
from openbook.rag.answer import Event
from openbook.serving.endpoint import problems
from openbook.serving.endpoint.openai_errors import openai_error, openai_error_of_status, speaks_openai
from openbook.serving.endpoint.problems import problem_of, problem_of_status
from openbook.serving.endpoint.service import with_request_id

NOT_KEPT_BACK = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers, so that nobody on the way keeps events back."""


class EventStream(StreamingResponse):
    """Server-sent events, and what they are made of: both end with the response. Starlette leaves them as they are when
    the caller goes while something is sent, and what is asked would keep its place until Python collects them.
    """

    def __init__(self, sent: AsyncGenerator[str], events: AsyncGenerator[Event]) -> None:
        super().__init__(sent, headers=NOT_KEPT_BACK, media_type="text/event-stream")
        self._sent = sent
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events), aclosing(self._sent):
            await super().__call__(scope, receive, send)


def to_json(body: BaseModel, status: int = 200, media_type: str = "application/json") -> Response:
    """A response of JSON."""
    return Response(body.model_dump_json(), status, media_type=media_type)


def error_reply(request: Request, error: OpenbookError) -> Response:
    """The response to a request that failed."""
    if speaks_openai(request.url.path):
        reply = to_json(openai_error(error), error.http_status)
    else:
        reply = to_json(problem_of(error, request_id_of(request)), error.http_status, problems.MEDIA_TYPE)
    if isinstance(error, Overloaded):
        reply.headers["Retry-After"] = str(error.retry_after_whole_s)
    if isinstance(error, Unauthenticated):
        reply.headers["WWW-Authenticate"] = 'Bearer realm="openbook"'
    return reply


def status_reply(request: Request, status: int, detail: str, code: str) -> Response:
    """The response where HTTP itself says no: a status, what is wrong, and the gRPC code that is nearest."""
    if speaks_openai(request.url.path):
        return to_json(openai_error_of_status(status, detail), status)
    problem = problem_of_status(status, detail, code, request_id_of(request))
    return to_json(problem, status, problems.MEDIA_TYPE)


def request_id_of(request: Request) -> str:
    """Of a request that may have failed before it had a context."""
    if not hasattr(request.state, "request_id"):
        request.state.request_id = with_request_id(wire.context_of_headers(request.headers), "").request_id
    request_id: str = request.state.request_id
    return request_id


class Named:
    """The application behind it: every reply has the request's id for a header, the one of its body and of the log.

    So has what breaks outside of all `asked`: Starlette would say it in a text of its own, and its message in the log.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})  # one for all, also for those behind it who copy the scope
        begun = False

        async def send_named(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id_of(Request(scope))
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception as error:
            if scope["type"] != "http":
                raise
            request = Request(scope)
            ours = as_ours(error, request_id_of(request))
            if begun:  # the connection ends before the reply does, and who serves us logs what is raised
                raise ours from None
            await error_reply(request, ours)(scope, receive, send_named)
