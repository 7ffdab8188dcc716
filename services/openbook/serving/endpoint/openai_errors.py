"""Errors as OpenAI's clients know them. Every error passes here, by the path of its request."""

from typing import Annotated

from pydantic import BaseModel, Field

from openbook.errors import InvalidRequest, OpenbookError
from openbook.serving.endpoint.problems import name_of, words
from openbook.serving.endpoint.status import field_of

PATHS = ("/v1/chat", "/v1/completions", "/v1/embeddings", "/v1/models", "/v1/responses")
"""What begins with these is OpenAI's, also where we have no such path."""

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}
"""By HTTP status. The rest below 500 is the request's fault, the rest above the server's."""

CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}
"""That OpenAI has a word of its own for; other errors have the name that docs/errors.md gives them."""


class OpenAIErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: Annotated[str | None, Field(description="The field of the request that is at fault, if one is.")]
    code: str | None


class OpenAIError(BaseModel):
    """The one shape of OpenAI's errors."""

    error: OpenAIErrorDetail


class Refused(InvalidRequest):
    """A parameter that OpenAI's protocol has and we do not, or not with this value."""

    def __init__(self, message: str, param: str = "", code: str = "unsupported_parameter") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnknownModel(OpenbookError):
    """No model of this name is served here."""

    grpc_code = "NOT_FOUND"
    http_status = 404
    code = "model_not_found"
    param = "model"


def speaks_openai(path: str) -> bool:
    """Whether who asks for this path expects OpenAI's shapes."""
    return any(path == each or path.startswith(f"{each}/") for each in PATHS)


def openai_error(error: OpenbookError) -> OpenAIError:
    """An error of ours in OpenAI's shape."""
    message = str(error)
    param = getattr(error, "param", "") or (field_of(message) if isinstance(error, InvalidRequest) else "")
    code = getattr(error, "code", "") or CODES.get(error.http_status) or "_".join(words(name_of(error))).lower()
    return _error(error.http_status, message, param, code)


def openai_error_of_status(status: int, message: str) -> OpenAIError:
    """What HTTP itself has a status for: no such path, no such method."""
    return _error(status, message, "", None)


def _error(status: int, message: str, param: str, code: str | None) -> OpenAIError:
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    message, param = (text.encode(errors="backslashreplace").decode() for text in (message, param))
    return OpenAIError(error=OpenAIErrorDetail(message=message, type=kind, param=param or None, code=code))
