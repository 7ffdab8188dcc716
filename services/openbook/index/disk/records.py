"""Files of JSON in a snapshot and a root, each read as a whole and checked."""

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from openbook.errors import InvalidSnapshot
from openbook.files import read_regular

MAX_BYTES = 1 << 16


class Record(BaseModel):
    """What one says: known keys alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")


R = TypeVar("R", bound=Record)


def read_record(kind: type[R], path: Path) -> R:
    """From a file. Raises InvalidSnapshot: it cannot be read, or is none."""
    try:
        return parse_record(kind, read_regular(path, MAX_BYTES), str(path))
    except OSError as error:
        raise InvalidSnapshot(f"{path}: cannot be read: {error.strerror}") from None


def parse_record(kind: type[R], data: bytes, where: str) -> R:
    """As it was read from somewhere. Raises InvalidSnapshot without a word of what stands there: it may be another file
    than it should be.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]
        loc = ".".join(map(str, problem["loc"])) or "content"
        raise InvalidSnapshot(f"{where}: {loc}: {problem['msg']}") from None
