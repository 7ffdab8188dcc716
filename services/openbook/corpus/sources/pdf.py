"""PDF: a document a file, its pages one after the other."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from typing import Any

from openbook.core.documents import Document
from openbook.corpus.sources import stated
from openbook.corpus.sources.limits import Failed
from openbook.corpus.sources.opened import Opened


def read(opened: Opened) -> Iterator[Document | None]:
    """None after each page, to say that there is progress.

    Raises:
        Failed: it needs a password, or holds no text, as scans do; and what pypdf raises.
    """
    from pypdf import PdfReader

    reader = PdfReader(opened.seekable())
    if reader.is_encrypted and not reader.decrypt(""):
        raise Failed("needs a password")
    pages: list[str] = []
    size = 0
    for page in reader.pages:
        pages.append(page.extract_text())
        size += len(pages[-1])
        if size > opened.limits.document_bytes:
            raise Failed(f"a document of more than {opened.limits.document_bytes} bytes")
        yield None
    text = "\n".join(pages)
    if not text.strip():
        raise Failed(f"no text on its {len(pages)} pages; are they scanned?")
    title = reader.metadata.title if reader.metadata else None
    starts = accumulate((len(page) + 1 for page in pages[:-1]), initial=0)
    title = " ".join(str(title or "").split()) or opened.stem
    yield opened.document(opened.path, title, text, pages=tuple(starts), **_known(reader))


def _known(reader: Any) -> dict[str, str]:
    """What pypdf can read of it; many a PDF has other things there."""
    known: dict[str, str] = {}
    with suppress(Exception):
        known["language"] = stated.language(reader.root_object.get("/Lang"))
    with suppress(Exception):
        known["date"] = stated.date(reader.metadata.creation_date)
    return known
