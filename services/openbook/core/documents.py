"""What is read before it is split. Without NumPy, which the processes that parse do not need."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from unicodedata import is_normalized, normalize

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


_UNSEEN = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad]")  # no white space: `str.split` finds that


def canonical(document: Document) -> Document:
    """The document with the same characters whatever file it came from: Unicode's canonical form (NFC), without soft
    hyphens and control characters; those from 128 on are what Windows-1252 has there, as browsers read them. A passage
    stays as it is.
    """
    if document.is_passage:
        return document
    begins = sorted({0, *(at for at, _ in document.sections), *document.pages})
    pieces = [_canonical(document.text[at:end]) for at, end in pairwise([*begins, len(document.text)])]
    now = dict(zip(begins, accumulate(map(len, pieces), initial=0), strict=False))
    return replace(
        document,
        title=_canonical(document.title),
        text="".join(pieces),
        sections=tuple((now[at], _canonical(name)) for at, name in document.sections),
        pages=tuple(now[at] for at in document.pages),
    )


def seen(text: str) -> str:
    """The text without soft hyphens and control characters, as for `canonical`."""
    return _UNSEEN.sub(lambda found: _of_windows(found[0]), text) if _UNSEEN.search(text) else text


def _canonical(text: str) -> str:
    text = seen(text)
    return text if is_normalized("NFC", text) else normalize("NFC", text)


def _of_windows(unseen: str) -> str:
    return unseen.encode("latin-1").decode("cp1252", "ignore") if "\x80" <= unseen <= "\x9f" else ""
