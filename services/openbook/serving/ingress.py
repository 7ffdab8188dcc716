"""The endpoint: one deployment that speaks gRPC through its methods and HTTP through an ASGI application.

Serve calls the method named like the rpc. Requests arrive as bytes (see `add_services`), so that even a message that
cannot be parsed is answered with INVALID_ARGUMENT. An exception would reach the caller with its traceback: none leaves.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from openbook.errors import OpenbookError
from openbook.serving.http import build_app
from openbook.serving.schemas import (
    AnswerRequest,
    RetrieveRequest,
    answer_to_proto,
    event_to_proto,
    parse_proto,
    request_from_proto,
    retrieval_to_proto,
)
from openbook.serving.service import AnswerService, check_request_id, to_openbook_error
from openbook.telemetry import new_request_id
from openbook.v1 import answer_pb2

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve.grpc_util import RayServegRPCContext

ANSWER_SERVICE = answer_pb2.DESCRIPTOR.services_by_name["AnswerService"].full_name
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
M = TypeVar("M", bound=Message)


def add_services(servicer: Any, server: grpc.Server) -> None:
    """Register the gRPC methods of `AnswerIngress`: what Serve's `grpc_servicer_functions` names.

    Unlike the generated function it leaves requests unparsed: gRPC answers a text that is not UTF-8 with INTERNAL.
    """
    services: dict[str, dict[str, Any]] = {
        ANSWER_SERVICE: {
            "Answer": grpc.unary_unary_rpc_method_handler(servicer.Answer),
            "AnswerStream": grpc.unary_stream_rpc_method_handler(servicer.AnswerStream),
            "Retrieve": grpc.unary_unary_rpc_method_handler(servicer.Retrieve),
        },
        HEALTH_SERVICE: {"Check": grpc.unary_unary_rpc_method_handler(servicer.Check)},
    }
    for name, methods in services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))


class AnswerIngress:
    """The methods of openbook.v1.AnswerService, grpc.health.v1.Health.Check, and the HTTP application."""

    def __init__(self, service: AnswerService) -> None:
        self._service = service
        logging.getLogger("ray.serve").addFilter(_is_news)

    def __serve_build_asgi_app__(self) -> "FastAPI":
        return build_app(self._service)

    async def Answer(self, request: bytes, grpc_context: "RayServegRPCContext") -> answer_pb2.AnswerResponse:  # noqa: N802
        async def answer(message: answer_pb2.AnswerRequest, request_id: str) -> answer_pb2.AnswerResponse:
            return answer_to_proto(await self._service.answer(request_from_proto(AnswerRequest, message), request_id))

        reply = await _unary(answer_pb2.AnswerRequest, request, grpc_context, answer)
        return reply or answer_pb2.AnswerResponse()

    async def Retrieve(self, request: bytes, grpc_context: "RayServegRPCContext") -> answer_pb2.RetrieveResponse:  # noqa: N802
        async def retrieve(message: answer_pb2.RetrieveRequest, request_id: str) -> answer_pb2.RetrieveResponse:
            asked = request_from_proto(RetrieveRequest, message)
            return retrieval_to_proto(await self._service.retrieve(asked, request_id))

        reply = await _unary(answer_pb2.RetrieveRequest, request, grpc_context, retrieve)
        return reply or answer_pb2.RetrieveResponse()

    async def AnswerStream(  # noqa: N802
        self, request: bytes, grpc_context: "RayServegRPCContext"
    ) -> AsyncIterator[answer_pb2.AnswerEvent]:
        request_id = new_request_id()
        try:
            message = parse_proto(answer_pb2.AnswerRequest, request)
            request_id = check_request_id(message.request_id)
            asked = request_from_proto(AnswerRequest, message)
            async with aclosing(self._service.stream(asked, request_id)) as events:
                async for event in events:
                    yield event_to_proto(event)
        except Exception as error:
            ours = to_openbook_error(error, request_id)
            _set_error(grpc_context, ours, request_id)
            # Serve's Python proxy learns of the code with a message or an exception, and there is no message left.
            raise ours from None

    async def Check(  # noqa: N802
        self, request: bytes, grpc_context: "RayServegRPCContext"
    ) -> health_pb2.HealthCheckResponse:
        try:
            await self._service.check_ready()
        except OpenbookError:
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


def _is_news(record: logging.LogRecord) -> bool:
    """Serve logs every exception that leaves a method. Ours are answers, or were logged when they became ours."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(getattr(error, "original_exception", error), OpenbookError)


async def _unary(
    kind: type[M],
    data: bytes,
    context: "RayServegRPCContext",
    call: Callable[[M, str], Awaitable[Any]],
) -> Any:
    """The reply, or None after the context was given the error."""
    request_id = new_request_id()
    try:
        message = parse_proto(kind, data)
        request_id = check_request_id(message.request_id)  # type: ignore[attr-defined]  # all our requests have one
        return await call(message, request_id)
    except Exception as error:
        _set_error(context, to_openbook_error(error, request_id), request_id)
        return None


def _set_error(context: "RayServegRPCContext", error: OpenbookError, request_id: str) -> None:
    context.set_code(grpc.StatusCode[error.grpc_code])
    context.set_details(str(error))
    context.set_trailing_metadata([("request_id", request_id)])
