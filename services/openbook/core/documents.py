"""What is read before it is split. Without NumPy, which the processes that parse do not need."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from openbook.core.origin import FieldValue


@dataclass(frozen=True, slots=True)
class Document:
    """A source article before splitting."""

    id: str
    title: str
    text: str
    path: str = ""
    """The file it came from, within its corpus; in an archive `archive.zip/member`."""

    is_passage: bool = False
    """It comes already split, as DPR's passages do."""

    url: str = ""
    language: str = ""
    date: str = ""
    """All three as for `Origin`."""

    fields: Mapping[str, FieldValue] = field(default_factory=dict)
    """Those that the user declared, where it has them."""

    sections: tuple[tuple[int, str], ...] = ()
    """Where in the text each begins, and its headings, as for `Origin`. It begins with the text or a line."""

    pages: tuple[int, ...] = ()
    """Where in the text each begins, likewise."""
