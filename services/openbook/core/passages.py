"""Documents into passages: disjoint runs of 100 words, as the paper does for Wikipedia (section 3)."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from openbook.core.fingerprint import text_digest
from openbook.core.origin import FieldValue, Origin

WORDS_PER_PASSAGE = 100


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


def split_words(text: str, n_words: int = WORDS_PER_PASSAGE) -> Iterator[str]:
    """Disjoint runs of at most `n_words` words, words joined by single spaces. Text without words gives nothing.

    Raises:
        ValueError: `n_words` is less than 1.
    """
    if n_words < 1:
        raise ValueError(f"n_words must be at least 1, got {n_words}")
    words = text.split()
    for start in range(0, len(words), n_words):
        yield " ".join(words[start : start + n_words])


def joined(document: Document) -> str:
    """The document's text, whose characters spans count: words joined by single spaces; a passage stays as it is."""
    return document.text if document.is_passage else " ".join(document.text.split())


def split(document: Document, n_words: int = WORDS_PER_PASSAGE) -> Iterator[tuple[str, Origin]]:
    """The passages of a document, each with where it comes from: `joined(document)[start:end]` is its text.

    Raises:
        ValueError: as `split_words`.
    """
    text = joined(document)
    pieces = [text] if document.is_passage else split_words(text, n_words)
    sections = _words_before(document.text, [position for position, _ in document.sections])
    pages = _words_before(document.text, document.pages)
    digest = text_digest(text)
    start = 0
    for number, piece in enumerate(pieces):
        section = bisect_right(sections, number * n_words)
        yield (
            piece,
            Origin(
                document_digest=digest,
                start=start,
                end=start + len(piece),
                path=document.path,
                url=document.url,
                section=document.sections[section - 1][1] if section else "",
                page=bisect_right(pages, number * n_words) or None,
                language=document.language,
                date=document.date,
                fields=document.fields,
            ),
        )
        start += len(piece) + 1


def _words_before(text: str, positions: Sequence[int]) -> list[int]:
    """How many words stand before each of some ascending positions."""
    counts: list[int] = []
    last = n_words = 0
    for position in positions:
        n_words += len(text[last:position].split())
        counts.append(n_words)
        last = position
    return counts
