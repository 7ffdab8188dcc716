"""What documents state of themselves: address, language, date, headings, and the fields that the user declared."""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from openbook.core.origin import Field, FieldValue, date_of
from openbook.corpus.sources.limits import Failed, one_line

Sections = tuple[tuple[int, str], ...]

URL_FIELDS = ("url", "link", "wikipedia_url")
LANGUAGE_FIELDS = ("language", "lang")
DATE_FIELDS = ("date", "published", "timestamp")
SECTION_FIELDS = ("section",)
"""What tables and records call them: the first that is there."""

MAX_URL_CHARS = 2048
MAX_HEADING_CHARS = 200
MAX_SECTION_CHARS = 1000
FARTHEST = 20
"""Headings that may be missing in a text before one that is there."""

_URL = re.compile(r"https?://[!-~\u00a0-\U0010ffff]+")
_LANGUAGE = re.compile(r"[A-Za-z]{2,8}([-_][A-Za-z0-9]{1,8})*")


def url(given: object) -> str:
    """An address on the web; empty if it is none."""
    text = given.strip() if isinstance(given, str) else ""
    return text if len(text) <= MAX_URL_CHARS and _URL.fullmatch(text) else ""


def language(given: object) -> str:
    """A tag such as en or pt-BR; empty if it is none."""
    text = given.strip() if isinstance(given, str) else ""
    return text.replace("_", "-") if _LANGUAGE.fullmatch(text) else ""


def date(given: object) -> str:
    """In ISO 8601; empty if it is none."""
    return (date_of(given) if given is not None else None) or ""


def section(given: object) -> Sections:
    """Of a whole document."""
    text = one_line(given, MAX_SECTION_CHARS) if isinstance(given, str) else ""
    return ((0, text),) if text else ()


def first_of(record: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """What a record has under the first of these names that it has."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def known(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of all this, what a record has; the options of `Opened.document`."""
    return {
        "url": url(first_of(record, URL_FIELDS)),
        "language": language(first_of(record, LANGUAGE_FIELDS)),
        "date": date(first_of(record, DATE_FIELDS)),
    }


def declared(fields: Sequence[Field], record: Mapping[str, Any]) -> dict[str, FieldValue]:
    """The user's fields that a record has, whatever the case of their names.

    Raises:
        Failed: a value is not of its type.
    """
    if not fields:
        return {}
    lower = {name.lower(): value for name, value in record.items() if isinstance(name, str)}
    try:
        values = ((field.name, field.value(lower.get(field.name))) for field in fields)
        return {name: value for name, value in values if value is not None}
    except ValueError as error:
        raise Failed(one_line(str(error))) from None


class Outline:
    """The sections that headings open, as they come. One that only says the document's title again opens none."""

    def __init__(self, title: str = "") -> None:
        self._title = title
        self._open: list[tuple[int, str]] = []
        self._sections: list[tuple[int, str]] = []

    def add(self, position: int, level: int, heading: str) -> None:
        """A heading, which begins there; the outermost level is the least."""
        heading = one_line(heading, MAX_HEADING_CHARS)
        while self._open and self._open[-1][0] >= level:
            self._open.pop()
        self._open.append((level, "" if heading == self._title else heading))
        names = " > ".join(name for _, name in self._open if name)
        self._sections.append((position, one_line(names, MAX_SECTION_CHARS)))

    @property
    def sections(self) -> Sections:
        """As a document has them."""
        return tuple(self._sections)


def sections_of(text: str, headings: Sequence[tuple[int, str]], title: str = "") -> Sections:
    """The sections of a text in which headings, each with its level, stand on lines of their own, in this order. A
    heading that does not is passed over.
    """
    outline, numbers = Outline(title), dict[str, list[int]]()
    for number, (_, heading) in enumerate(headings):
        numbers.setdefault(" ".join(heading.split()), []).append(number)
    numbers.pop("", None)
    last, position = -1, 0
    for line in text.split("\n") if numbers else ():
        if here := numbers.get(" ".join(line.split())):
            at = bisect_right(here, last)
            if at < len(here) and here[at] - last <= FARTHEST:
                last = here[at]
                outline.add(position, headings[last][0], headings[last][1])
        position += len(line) + 1
    return outline.sections
