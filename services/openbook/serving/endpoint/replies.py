"""What HTTP callers get: JSON, and errors in one shape."""

from fastapi import Request, Response
from pydantic import BaseModel

from openbook import wire
from openbook.errors import OpenbookError, Overloaded, Unauthenticated
from openbook.serving.endpoint.schemas import ErrorDetail, ErrorResponse
from openbook.serving.endpoint.service import with_request_id


def to_json(body: BaseModel, status: int = 200) -> Response:
    """A response of JSON."""
    return Response(body.model_dump_json(), status, media_type="application/json")


def error_body(code: str, message: str, request_id: str) -> ErrorResponse:
    """The one shape of every error."""
    return ErrorResponse(error=ErrorDetail(code=code, message=message, request_id=request_id))


def error_reply(request: Request, error: OpenbookError) -> Response:
    """The response to a request that failed."""
    reply = to_json(error_body(error.grpc_code, str(error), request_id_of(request)), error.http_status)
    if isinstance(error, Overloaded):
        reply.headers["Retry-After"] = str(error.retry_after_whole_s)
    if isinstance(error, Unauthenticated):
        reply.headers["WWW-Authenticate"] = 'Bearer realm="openbook"'
    return reply


def request_id_of(request: Request) -> str:
    """Of a request that may have failed before it had a context."""
    if not hasattr(request.state, "request_id"):
        request.state.request_id = with_request_id(wire.context_of_headers(request.headers), "").request_id
    request_id: str = request.state.request_id
    return request_id
