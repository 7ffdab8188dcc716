"""Where a passage comes from: its document, its place there, and the fields that a user declared for his documents."""

import hashlib
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from enum import StrEnum
from typing import Self, TypeGuard

from openbook.errors import InvalidConfig, UnknownPassage

FieldValue = str | int | float | bool

MAX_FIELDS = 100
MAX_FIELD_CHARS = 4096
"""Of one value: it comes along with every answer that rests on its document."""
WELL_KNOWN = ("url", "language", "date", "section")
"""Fields that every document may have; nobody declares them."""
LASTING_DIGITS = 32

_LASTING_ID = re.compile(rf"[0-9a-f]{{{LASTING_DIGITS}}}")
_DAY = r"\d{4}(-\d\d(-\d\d)?)?"
_TIME = r"[T ]([01]\d|2[0-4]):[0-5]\d(:[0-6]\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?"
_DATE = re.compile(rf"({_DAY})((?<=-\d\d-\d\d){_TIME})?", re.ASCII)
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class FieldType(StrEnum):
    """What the values of a field are."""

    STRING = "string"
    INT = "int"  # 64 bits, but for the least
    FLOAT = "float"  # finite
    BOOL = "bool"
    DATE = "date"  # ISO 8601, as much of it as is known: 1998, 1998-05, 1998-05-17T08:30Z


@dataclass(frozen=True, slots=True)
class Field:
    """A field that documents may have: a column of the snapshot."""

    name: str
    type: FieldType

    @classmethod
    def parse(cls, declared: str) -> Self:
        """From `name:type`, or `name` alone for a string. Names are in lower case, as they are looked for.

        Raises:
            InvalidConfig: there is no such type, or the name is empty, too long, not printable or taken.
        """
        name, colon, type_name = declared.rpartition(":")
        name = (name if colon else type_name).strip().lower()
        type_name = type_name.strip() if colon else FieldType.STRING
        if type_name not in list(FieldType):
            raise InvalidConfig(f"a field must be NAME:TYPE with a type of {', '.join(FieldType)}, got {declared!r}")
        if not (0 < len(name) <= 100 and name.isprintable()):
            raise InvalidConfig(f"a field's name must have 1..100 printable characters, got {name!r:.150}")
        if name in WELL_KNOWN:
            raise InvalidConfig(f"the fields {', '.join(WELL_KNOWN)} are read anyway, got {declared!r}")
        return cls(name, FieldType(type_name))

    def value(self, given: object) -> FieldValue | None:
        """A value as this field has it, from what a table or a record gives; None of what is missing or empty.

        Raises:
            ValueError: it is none; says which field, what it must be and what it is.
        """
        if given is None or given == "":
            return None
        try:
            value = _CONVERT[self.type](given)
        except (ValueError, TypeError, OverflowError):
            value = None
        if value is None:
            raise ValueError(f"{self.name} must be {self.type}, got {given!r:.80}")
        if isinstance(value, str) and len(value) > MAX_FIELD_CHARS:
            raise ValueError(f"{self.name} must have at most {MAX_FIELD_CHARS} characters, got {len(value)}")
        return value


def check_fields(fields: tuple[Field, ...]) -> None:
    """Raises InvalidConfig: too many are declared, or two of one name."""
    names = [each.name for each in fields]
    if len(names) > MAX_FIELDS:
        raise InvalidConfig(f"fields must be at most {MAX_FIELDS}, got {len(names)}")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidConfig(f"each field must be declared once, got {', '.join(twice)} more often")


def _string(given: object) -> str | None:
    if isinstance(given, date):  # a datetime too
        return given.isoformat()
    return str(given) if _is_plain(given) else None


def _is_plain(given: object) -> TypeGuard[str | int | float | Decimal]:
    return isinstance(given, str | int | float | Decimal) and not isinstance(given, bool)


def _int(given: object) -> int | None:
    if not _is_plain(given):
        return None
    value = int(given)
    return value if (isinstance(given, str) or value == given) and abs(value) < 1 << 63 else None


def _float(given: object) -> float | None:
    if not _is_plain(given):
        return None
    return value if math.isfinite(value := float(given)) else None


def _bool(given: object) -> bool | None:
    return given if isinstance(given, bool) else _BOOLS.get(str(given).strip().lower())


def date_of(given: object) -> str | None:
    """A date in ISO 8601; None if it is none."""
    text = given.isoformat() if isinstance(given, date) else str(given).strip()
    if found := _DATE.fullmatch(text):
        with suppress(ValueError):
            date.fromisoformat(f"{found[1]}-01-01"[:10])  # there is such a day
            return text
    return None


_CONVERT = {
    FieldType.STRING: _string,
    FieldType.INT: _int,
    FieldType.FLOAT: _float,
    FieldType.BOOL: _bool,
    FieldType.DATE: date_of,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The place of a passage in its document. What is not known is empty."""

    document_digest: str  # SHA-256, in hex, of the document's text: its words, joined by single spaces, in UTF-8
    start: int  # its first character in that text
    end: int  # behind its last one, so that text[start:end] is the passage
    path: str = ""  # of the file within its corpus; in an archive `archive.zip/member`
    url: str = ""
    section: str = ""  # in which it begins: headings, the outermost first, with " > " between
    page: int | None = None  # on which it begins, from 1
    language: str = ""  # as the document states it, such as en or pt-BR
    date: str = ""  # ISO 8601
    fields: Mapping[str, FieldValue] = field(default_factory=dict, hash=False)  # the user's own


@dataclass(frozen=True, slots=True)
class Located:
    """Where a passage stands."""

    id: int
    snapshot_id: str
    n_passages: int  # of the snapshot: its ids are 0..n_passages - 1


def lasting_id(document_id: str, origin: Origin, text: str) -> str:
    """Of document, span and text: equal in every snapshot that holds the passage, and never that of another text."""
    named = f"{origin.start}:{origin.end}:{len(document_id)}:{document_id}{text}"
    return hashlib.sha256(named.encode()).hexdigest()[:LASTING_DIGITS]


def position_of(passage_id: str) -> int:
    """The id of a passage from its digits. Raises UnknownPassage: they are none."""
    if not (passage_id.isascii() and passage_id.isdigit() and len(passage_id) < 20 and int(passage_id) < 1 << 63):
        shown = f"{passage_id[:100]!r}"
        raise UnknownPassage(f"id must be a passage's number or its lasting id of {LASTING_DIGITS} digits, got {shown}")
    return int(passage_id)


def is_lasting_id(text: str) -> bool:
    """Whether it has the form of one, which no position has."""
    return _LASTING_ID.fullmatch(text) is not None
