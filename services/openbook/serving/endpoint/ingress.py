"""The endpoint: one deployment that speaks gRPC through its methods and HTTP through an ASGI application.

Serve calls the method named like the rpc. Requests arrive as bytes (see `add_services`), so that even a message that
cannot be parsed is answered with INVALID_ARGUMENT. An exception would reach the caller with its traceback: none leaves.
"""

import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2

from openbook import wire
from openbook.core.context import Context
from openbook.core.deadline import SPARE
from openbook.errors import OpenbookError, Overloaded, QuotaExceeded
from openbook.logs import as_ours
from openbook.serving.access.gate import Gate
from openbook.serving.access.keys import Identity
from openbook.serving.endpoint import status
from openbook.serving.endpoint.batch import answer_batch, batch_to_proto
from openbook.serving.endpoint.guard import context_of
from openbook.serving.endpoint.http import build_app
from openbook.serving.endpoint.messages import (
    answer_to_proto,
    event_to_proto,
    excerpt_to_proto,
    parse_proto,
    passage_request_from_proto,
    request_from_proto,
    retrieval_to_proto,
)
from openbook.serving.endpoint.problems import name_of
from openbook.serving.endpoint.quiet import quieten
from openbook.serving.endpoint.reflection import add_reflection
from openbook.serving.endpoint.schemas import AnswerRequest, RetrieveRequest
from openbook.serving.endpoint.service import AnswerService, with_request_id
from openbook.v1 import answer_pb2

if TYPE_CHECKING:
    from fastapi import FastAPI
    from ray.serve.grpc_util import RayServegRPCContext

ANSWER_SERVICE = answer_pb2.DESCRIPTOR.services_by_name["AnswerService"].full_name
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
MAX_MESSAGE_BYTES = 4 << 20
"""Of a request: what gRPC itself takes."""
M = TypeVar(
    "M",
    answer_pb2.AnswerRequest,
    answer_pb2.RetrieveRequest,
    answer_pb2.AnswerBatchRequest,
    answer_pb2.PassageRequest,
)


class UnknownService(OpenbookError):
    """Nothing of this name has a health here."""

    grpc_code = "NOT_FOUND"
    http_status = 404


def add_services(servicer: Any, server: grpc.Server) -> None:
    """Register the gRPC methods of `AnswerIngress`: what Serve's `grpc_servicer_functions` names.

    Unlike the generated function it leaves requests unparsed: gRPC answers a text that is not UTF-8 with INTERNAL.
    """
    services: dict[str, dict[str, Any]] = {
        ANSWER_SERVICE: {
            "Answer": grpc.unary_unary_rpc_method_handler(servicer.Answer),
            "AnswerStream": grpc.unary_stream_rpc_method_handler(servicer.AnswerStream),
            "Retrieve": grpc.unary_unary_rpc_method_handler(servicer.Retrieve),
            "AnswerBatch": grpc.unary_unary_rpc_method_handler(servicer.AnswerBatch),
            "GetPassage": grpc.unary_unary_rpc_method_handler(servicer.GetPassage),
        },
        HEALTH_SERVICE: {"Check": grpc.unary_unary_rpc_method_handler(servicer.Check)},
    }
    for name, methods in services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
    add_reflection(server, list(services))


class AnswerIngress:
    """The methods of openbook.v1.AnswerService, grpc.health.v1.Health.Check, and the HTTP application."""

    def __init__(self, service: AnswerService, gate: Gate | None = None) -> None:
        self._service = service
        self._max_passages = service.settings.answer.max_passages
        self._gate = gate
        self._streams_raise = not _is_behind_haproxy()
        quieten()
        _mend_grpc()

    def __serve_build_asgi_app__(self) -> "FastAPI":
        return build_app(self._service, self._gate)

    async def Answer(self, request: bytes, grpc_context: "RayServegRPCContext") -> answer_pb2.AnswerResponse:  # noqa: N802
        with _Call(self._gate, "Answer", grpc_context) as call:
            message, context = await call.read(answer_pb2.AnswerRequest, request)
            asked = request_from_proto(AnswerRequest, message, self._max_passages)
            return answer_to_proto(await self._service.answer(asked, context))
        return answer_pb2.AnswerResponse()

    async def Retrieve(self, request: bytes, grpc_context: "RayServegRPCContext") -> answer_pb2.RetrieveResponse:  # noqa: N802
        with _Call(self._gate, "Retrieve", grpc_context) as call:
            message, context = await call.read(answer_pb2.RetrieveRequest, request)
            asked = request_from_proto(RetrieveRequest, message, self._max_passages)
            return retrieval_to_proto(await self._service.retrieve(asked, context))
        return answer_pb2.RetrieveResponse()

    async def AnswerBatch(  # noqa: N802
        self, request: bytes, grpc_context: "RayServegRPCContext"
    ) -> answer_pb2.AnswerBatchResponse:
        with _Call(self._gate, "AnswerBatch", grpc_context) as call:
            message, context = await call.read(answer_pb2.AnswerBatchRequest, request)
            timeout_s = message.timeout_s if message.HasField("timeout_s") else None
            parse = partial(request_from_proto, AnswerRequest, max_passages=self._max_passages)
            outcomes = await answer_batch(self._service, message.requests, parse, timeout_s, context)
            return batch_to_proto(outcomes, context.request_id)
        return answer_pb2.AnswerBatchResponse()

    async def GetPassage(self, request: bytes, grpc_context: "RayServegRPCContext") -> answer_pb2.Excerpt:  # noqa: N802
        with _Call(self._gate, "GetPassage", grpc_context) as call:
            message, context = await call.read(answer_pb2.PassageRequest, request)
            return excerpt_to_proto(await self._service.excerpt(passage_request_from_proto(message), context))
        return answer_pb2.Excerpt()

    async def AnswerStream(  # noqa: N802
        self, request: bytes, grpc_context: "RayServegRPCContext"
    ) -> AsyncIterator[answer_pb2.AnswerEvent]:
        with _Call(self._gate, "AnswerStream", grpc_context, self._streams_raise) as call:
            message, context = await call.read(answer_pb2.AnswerRequest, request)
            asked = request_from_proto(AnswerRequest, message, self._max_passages)
            async with aclosing(self._service.stream(asked, context)) as events:
                async for event in events:
                    yield event_to_proto(event)

    async def Check(  # noqa: N802
        self, request: bytes, grpc_context: "RayServegRPCContext"
    ) -> health_pb2.HealthCheckResponse:
        reply = health_pb2.HealthCheckResponse
        with _Call(None, "Check", grpc_context):
            name = parse_proto(health_pb2.HealthCheckRequest, request).service
            if name not in ("", ANSWER_SERVICE, HEALTH_SERVICE):
                raise UnknownService(f"service must be {ANSWER_SERVICE}, {HEALTH_SERVICE} or none, got {name[:100]!r}")
            try:
                await self._service.check_ready()
            except OpenbookError:
                return reply(status=reply.NOT_SERVING)
            return reply(status=reply.SERVING)
        return reply()


def _mend_grpc() -> None:
    """What Serve gets wrong of gRPC's servers.

    It asks for ports of their own in a text, which gRPC passes by: two replicas, of nodes that are one machine, would
    each hear half of what is asked of either. Who is refused a port takes the next. And it takes messages of 2 GB,
    which are read in full before anybody asks for the key of who sends them.
    """
    from ray.serve._private import grpc_util

    ours = {"grpc.so_reuseport": 0, "grpc.max_receive_message_length": MAX_MESSAGE_BYTES}
    options = grpc_util.DEFAULT_GRPC_SERVER_OPTIONS
    options[:] = [*(each for each in options if each[0] not in ours), *ours.items()]


def _is_behind_haproxy() -> bool:
    """Whether calls come to this replica without Serve's Python proxy, as Serve decides it and HAProxy as we mend it
    keeps it: without ours, that proxy gets them while no replica is up.
    """
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" and "RAY_SERVE_HAPROXY_BINARY_PATH" in os.environ


class _Call:
    """One call. Whatever goes wrong in its block ends it with the code of an error of ours.

    Then an empty reply has to be returned, which is not sent, or a stream to end: of a call that raises Serve forgets
    all but code and message. Behind Serve's Python proxy streams raise nevertheless: with no message left to send, it
    learns of the code in no other way, and would call it OK.
    """

    def __init__(self, gate: Gate | None, method: str, call: "RayServegRPCContext", raises: bool = False) -> None:
        self._gate = gate
        self._path = f"/{ANSWER_SERVICE}/{method}"
        self._call = call
        self._raises = raises
        self._headers = dict(call.invocation_metadata())
        self._request_id = with_request_id(context_of(self._headers, None), "").request_id  # of who is refused, too
        self._patience_s = math.inf
        self._identity: Identity | None = None

    async def read(self, kind: type[M], data: bytes) -> tuple[M, Context]:
        """The request and its context, once its caller is admitted. Raises InvalidRequest, and as `Gate.admit`."""
        self._identity = await self._gate.admit(self._path, self._headers) if self._gate else None
        message = parse_proto(kind, data)
        context = context_of(self._headers, self._identity)
        context = with_request_id(context, message.request_id or self._request_id)
        self._request_id = context.request_id
        self._trail([])  # Serve's Python proxy takes it from beside the messages
        self._patience_s = message.timeout_s or self._patience_s
        return message, context

    def _pushback_ms(self, error: Overloaded) -> int:
        """After which time gRPC itself is to try again (its gRFC A6); -1: not at all.

        It says the same again then, with as much time as before: what is let in may take all of it, and mostly takes
        what predictions do not spare. Who waits no longer than he said would not hear of it.
        """
        if isinstance(error, QuotaExceeded) or error.retry_after_s > self._patience_s * (1 - 1 / SPARE):
            return -1
        return math.ceil(1000 * error.retry_after_s)

    def _trail(self, more: Sequence[tuple[str, str | bytes]]) -> None:
        """End the call with the request's id, and more. One that Serve has made up would stay in front."""
        self._call.trailing_metadata().clear()
        self._call.set_trailing_metadata([("request_id", self._request_id), *more])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        quota = self._gate.quotas.headers(self._identity) if self._gate and self._identity else {}
        trailing: list[tuple[str, str | bytes]] = list(quota.items())
        if not isinstance(error, Exception):
            if error is None:
                self._trail(trailing)
            return False  # it ended well, or was cancelled
        ours = as_ours(error, self._request_id)
        self._call.set_code(grpc.StatusCode[ours.grpc_code])
        self._call.set_details(status.cut(str(ours)))
        if isinstance(ours, Overloaded):
            trailing.append(("retry-after", str(ours.retry_after_whole_s)))
            trailing.append(("grpc-retry-pushback-ms", str(self._pushback_ms(ours))))
        trailing.append((wire.ERROR_HEADER, name_of(ours)))
        trailing.append((status.KEY, status.status_of(ours, self._request_id).SerializeToString()))
        self._trail(trailing)
        if self._raises:
            raise ours from None
        return True
