"""PDF: a document a file, its pages one after the other."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from typing import IO, Any

from openbook.core.documents import Document
from openbook.corpus.sources import stated
from openbook.corpus.sources.limits import Failed, Failure, Spent, one_line
from openbook.corpus.sources.opened import Opened


def read(opened: Opened) -> Iterator[Document | Failure | None]:
    """None after each page, to say that there is progress. One that cannot be read is a failure, and left out.

    Raises:
        Failed: it needs a password, or holds no text, as scans do; and what pypdf raises.
    """
    with (yield from opened.seekable()) as content:
        yield from _read(opened, content)


def _read(opened: Opened, content: IO[bytes]) -> Iterator[Document | Failure | None]:
    from pypdf import PdfReader

    reader = PdfReader(content)
    if reader.is_encrypted and not reader.decrypt(""):
        raise Failed("needs a password")
    pages: list[str] = []
    bad: list[Failed] = []
    size = 0
    for number, page in enumerate(reader.pages, start=1):
        try:
            pages.append(_characters(page.extract_text()))
        except (Spent, MemoryError, ModuleNotFoundError):
            raise
        except Exception as error:  # one page is no reason to lose the others
            pages.append("")
            bad.append(Failed(f"page {number}: {type(error).__name__}: {one_line(str(error))}"))
        size += len(pages[-1])
        if size > opened.limits.document_bytes:
            raise Failed(f"a document of more than {opened.limits.document_bytes} bytes")
        yield None
    text = "\n".join(pages)
    if not text.strip():
        raise bad[0] if bad else Failed(f"no text on its {len(pages)} pages; are they scanned?")
    yield from (Failure(opened.path, str(error)) for error in bad)
    title = reader.metadata.title if reader.metadata else None
    starts = accumulate((len(page) + 1 for page in pages[:-1]), initial=0)
    title = " ".join(_characters(str(title or "")).split()) or opened.stem
    yield opened.document(opened.path, title, text, pages=tuple(starts), **_known(reader))


def _characters(text: str) -> str:
    """The text, with a mark in place of each half of a character, which pypdf may give."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _known(reader: Any) -> dict[str, str]:
    """What pypdf can read of it; many a PDF has other things there."""
    known: dict[str, str] = {}
    with suppress(Exception):
        known["language"] = stated.language(reader.root_object.get("/Lang"))
    with suppress(Exception):
        known["date"] = stated.date(reader.metadata.creation_date)
    return known
