"""The endpoint: one deployment that speaks gRPC through its methods and HTTP through an ASGI application.

Serve calls the method named like the rpc. Requests arrive as bytes (see `add_services`), so that even a message that
cannot be parsed is answered with INVALID_ARGUMENT. An exception would reach the caller with its traceback: none leaves.
"""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from openbook.core.context import Context
from openbook.errors import OpenbookError, Overloaded
from openbook.logs import as_ours
from openbook.serving.access.gate import Gate
from openbook.serving.access.keys import Identity
from openbook.serving.endpoint.guard import context_of
from openbook.serving.endpoint.http import build_app
from openbook.serving.endpoint.quiet import quieten
from openbook.serving.endpoint.schemas import (
    AnswerRequest,
    RetrieveRequest,
    answer_to_proto,
    event_to_proto,
    parse_proto,
    request_from_proto,
    retrieval_to_proto,
)
from openbook.serving.endpoint.service import AnswerService, with_request_id
from openbook.telemetry import new_request_id
from openbook.v1 import answer_pb2

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve.grpc_util import RayServegRPCContext

ANSWER_SERVICE = answer_pb2.DESCRIPTOR.services_by_name["AnswerService"].full_name
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
WireRequest = answer_pb2.AnswerRequest | answer_pb2.RetrieveRequest
R = TypeVar("R", bound=RetrieveRequest)


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

    def __init__(self, service: AnswerService, gate: Gate | None = None) -> None:
        self._service = service
        self._gate = gate
        quieten()

    def __serve_build_asgi_app__(self) -> "FastAPI":
        return build_app(self._service, self._gate)

    async def Answer(self, request: bytes, grpc_context: "RayServegRPCContext") -> answer_pb2.AnswerResponse:  # noqa: N802
        call = self._call("Answer", grpc_context, answer_pb2.AnswerRequest, AnswerRequest, request)
        async with call as (asked, context):
            return answer_to_proto(await self._service.answer(asked, context))

    async def Retrieve(self, request: bytes, grpc_context: "RayServegRPCContext") -> answer_pb2.RetrieveResponse:  # noqa: N802
        call = self._call("Retrieve", grpc_context, answer_pb2.RetrieveRequest, RetrieveRequest, request)
        async with call as (asked, context):
            return retrieval_to_proto(await self._service.retrieve(asked, context))

    async def AnswerStream(  # noqa: N802
        self, request: bytes, grpc_context: "RayServegRPCContext"
    ) -> AsyncIterator[answer_pb2.AnswerEvent]:
        call = self._call("AnswerStream", grpc_context, answer_pb2.AnswerRequest, AnswerRequest, request)
        async with call as (asked, context), aclosing(self._service.stream(asked, context)) as events:
            async for event in events:
                yield event_to_proto(event)

    async def Check(  # noqa: N802
        self, request: bytes, grpc_context: "RayServegRPCContext"
    ) -> health_pb2.HealthCheckResponse:
        try:
            await self._service.check_ready()
        except OpenbookError:
            return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    @asynccontextmanager
    async def _call(
        self, method: str, call: "RayServegRPCContext", kind: type[WireRequest], model: type[R], data: bytes
    ) -> AsyncIterator[tuple[R, Context]]:
        """The request in `data`, and its context, once its caller is admitted. Whatever goes wrong ends the call with
        the code of an error of ours.

        The error is raised as well: with no message left to send, Serve's Python proxy learns of the code in no other
        way.
        """
        request_id, identity = new_request_id(), None
        try:
            headers = dict(call.invocation_metadata())
            identity = await self._gate.admit(f"/{ANSWER_SERVICE}/{method}", headers) if self._gate else None
            message = parse_proto(kind, data)
            context = with_request_id(context_of(headers, identity), message.request_id)
            request_id = context.request_id
            yield request_from_proto(model, message), context
            if quota := self._quota_of(identity):
                call.set_trailing_metadata([("request_id", request_id), *quota])
        except Exception as error:
            ours = as_ours(error, request_id)
            call.set_code(grpc.StatusCode[ours.grpc_code])
            call.set_details(str(ours))
            retry = [("retry-after", str(ours.retry_after_whole_s))] if isinstance(ours, Overloaded) else []
            call.set_trailing_metadata([("request_id", request_id), *retry, *self._quota_of(identity)])
            raise ours from None

    def _quota_of(self, identity: Identity | None) -> list[tuple[str, str]]:
        return [*self._gate.quotas.headers(identity.caller).items()] if self._gate and identity else []
