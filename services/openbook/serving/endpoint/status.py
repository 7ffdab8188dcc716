"""Errors over gRPC in google.rpc's words: what the trailing metadata `grpc-status-details-bin` holds."""

import re
from typing import TYPE_CHECKING

from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from openbook.errors import InvalidRequest, OpenbookError, Overloaded
from openbook.serving.endpoint.problems import name_of, words

if TYPE_CHECKING:
    from google.protobuf.message import Message

KEY = "grpc-status-details-bin"
DOMAIN = "openbook"
MAX_BYTES = 1000
"""Of a message, which is told three times, once with each byte as three: callers take 8 KB of metadata, and no more."""


def status_of(error: OpenbookError, request_id: str) -> Status:
    """An error of ours: its name and the request, which field was wrong, when to come again."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(reason="_".join(words(name_of(error))).upper(), domain=DOMAIN),
        error_details_pb2.RequestInfo(request_id=request_id),
    ]
    message = cut(str(error))
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=field_of(message), description=message)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded):
        details.append(error_details_pb2.RetryInfo(retry_delay=Duration(seconds=error.retry_after_whole_s)))
    status = Status(code=StatusCode[error.grpc_code].value[0], message=message)
    for detail in details:
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def cut(message: str) -> str:
    """As much of it as callers take."""
    whole = message.encode(errors="backslashreplace")
    return whole.decode() if len(whole) <= MAX_BYTES else f"{whole[: MAX_BYTES - 4].decode(errors='ignore')} ..."


def field_of(message: str) -> str:
    """The field that a message about a request names first, as ours do; empty where it names none."""
    found = re.match(r"[a-z][a-z0-9_.\[\]]*(?= must |: | has | is )", message)
    return found[0] if found else ""
