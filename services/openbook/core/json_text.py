"""JSON as others write it: its numbers may be longer than Python reads."""

import json
import sys
from typing import Any

_UNNAMED = "a number"


class LongNumber(ValueError):
    """A whole number of more digits than are read. It names the field, the limit and how many there are."""


class _Long(int):
    """How many digits one has."""


def read_json(text: str | bytes) -> Any:
    """What a text says, in whichever UTF.

    Raises:
        LongNumber: a whole number in it is too long.
        ValueError: it is no JSON.
        RecursionError: too many brackets are within each other.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # in Python's words, which name no field; or of bytes that are no text
        _check([(_UNNAMED, json.loads(text, parse_int=_measured, object_pairs_hook=_check))])
        raise


def _measured(digits: str) -> int:
    n_digits = len(digits.removeprefix("-"))
    return _Long(n_digits) if n_digits > sys.get_int_max_str_digits() else 0


def _check(fields: list[tuple[str, Any]]) -> None:
    """Of an object, once all within it are checked, which leave nothing here. Raises LongNumber."""
    for name, value in fields:
        inside = [value]
        while inside:
            each = inside.pop()
            if isinstance(each, list):
                inside += each
            elif isinstance(each, _Long):
                shown = name if name.isidentifier() or name is _UNNAMED else repr(name)
                limit = sys.get_int_max_str_digits()
                raise LongNumber(f"{shown[:100]} must have at most {limit} digits, got {int(each)}")
