"""Errors over HTTP as problem details: RFC 9457."""

import re
from http import HTTPStatus
from typing import Annotated
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field

from openbook.errors import OpenbookError

MEDIA_TYPE = "application/problem+json"
UNTYPED = "about:blank"
"""The type of what says no more than its HTTP status."""


class Problem(BaseModel):
    """What went wrong, as RFC 9457 has it, and who to ask about it."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "type": "urn:openbook:error:InvalidRequest",
                "title": "Invalid request",
                "status": 400,
                "detail": "k must be 1..100, got 0",
                "instance": "urn:openbook:request:4f1c0a9be2d34c55",
                "code": "INVALID_ARGUMENT",
                "request_id": "4f1c0a9be2d34c55",
            }
        }
    )

    type: Annotated[str, Field(description=f"Ends with the error's name in docs/errors.md; or {UNTYPED}.")]
    title: Annotated[str, Field(description="The same for every error of its type.")]
    status: Annotated[int, Field(description="That of HTTP, also where this is an event or an entry of a batch.")]
    detail: Annotated[str, Field(description="Names the thing, the value and the limit.")]
    instance: Annotated[str, Field(description="This one occurrence.")]
    code: Annotated[str, Field(description="The name of a gRPC status code.")]
    request_id: str


def problem_of(error: OpenbookError, request_id: str) -> Problem:
    """An error of ours."""
    name = name_of(error)
    title = "Internal error" if name == OpenbookError.__name__ else " ".join(words(name)).capitalize()
    return _problem(f"urn:openbook:error:{name}", title, error.http_status, str(error), error.grpc_code, request_id)


def problem_of_status(status: int, detail: str, code: str, request_id: str) -> Problem:
    """What HTTP itself has a status for: no such path, no such method."""
    return _problem(UNTYPED, HTTPStatus(status).phrase, status, detail, code, request_id)


def name_of(error: OpenbookError) -> str:
    """Its name in docs/errors.md. One that only a part of openbook knows goes under that of its nearest kin there."""
    return next(each.__name__ for each in type(error).__mro__ if each.__module__ == OpenbookError.__module__)


def words(name: str) -> list[str]:
    """Of the name of an error: Unknown, Passage."""
    return re.findall("[A-Z][a-z]*", name)


def _problem(kind: str, title: str, status: int, detail: str, code: str, request_id: str) -> Problem:
    return Problem(
        type=kind,
        title=title,
        status=status,
        detail=detail,
        instance=f"urn:openbook:request:{quote(request_id)}",
        code=code,
        request_id=request_id,
    )
