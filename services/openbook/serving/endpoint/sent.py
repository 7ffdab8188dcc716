"""What a caller sent: known fields alone, of the kinds that they are, or one line that says what is wrong."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from openbook.errors import InvalidRequest

# What protobuf holds. Without limits of their own, numbers of any length would be read, and told back in messages.
Whole32 = Annotated[int, Field(strict=True, ge=-(1 << 32), lt=1 << 32)]
Whole64 = Annotated[int, Field(strict=True, ge=-(1 << 64), lt=1 << 64)]
Real = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, BeforeValidator(lambda sent: "" if sent is None else sent)]
"""That may be left out, and so be null."""

MAX_TOLD = 10
"""Problems of one request: a body of 1 MB may have half a million."""


class Sent(BaseModel):
    """What callers send: known fields alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _has_few_unknown(cls, sent: Any) -> Any:
        """Of each unknown field pydantic makes an error: of a hundred thousand in most of a second."""
        n = len(cls.model_fields)
        if isinstance(sent, dict) and len(sent) > n + MAX_TOLD:
            said = "there are {n} fields, and not {sent}"
            raise PydanticCustomError("too_many_fields", said, {"n": n, "sent": len(sent)})
        return sent


S = TypeVar("S", bound=BaseModel)


def parsed(kind: type[S], sent: Any) -> S:
    """What a caller sent. Raises InvalidRequest: it is no such thing."""
    try:
        return kind.model_validate(sent)
    except ValidationError as error:
        raise InvalidRequest(describe(error.errors())) from None


def describe(problems: Sequence[Any]) -> str:
    """Pydantic's problems, the first of them, as one line that names field, value and what was expected."""
    told = "; ".join(map(_describe_one, problems[:MAX_TOLD]))
    return told if len(problems) <= MAX_TOLD else f"{told}; and {len(problems) - MAX_TOLD} more"


def _describe_one(problem: Mapping[str, Any]) -> str:
    # FastAPI puts "body" in front, then the field's name or, for text that is no JSON, a position.
    path = problem["loc"][problem["loc"][:1] == ("body",) :]
    name, value = ".".join(map(str, path)) if path else "body", repr(problem.get("input"))[:100]
    match problem["type"]:
        case "extra_forbidden":
            message = f"unknown key {name!r}"
        case "missing":
            message = f"{name} is missing"
        case "json_invalid":
            message = f"body must be JSON: {problem.get('ctx', {}).get('error', 'it is not')} at character {name}"
        case "model_attributes_type" | "model_type":
            sent_as = "" if path else ", sent as application/json"
            message = f"{name} must be a JSON object{sent_as}, got {value}"
        case "tuple_type":
            message = f"{name} must be a list, got {value}"
        case "string_unicode":
            message = f"{name} must be UTF-8 text, got {value}"
        case _:
            message = f"{name}: {problem['msg']}, got {value}"
    return message.encode(errors="backslashreplace").decode()
