"""Documents into passages: disjoint runs of 100 words, as the paper does for Wikipedia (section 3)."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from openbook.core.documents import Document
from openbook.core.fingerprint import text_digest
from openbook.core.origin import Origin
from openbook.core.types import Passage
from openbook.errors import InvalidRequest

WORDS_PER_PASSAGE = 100
MAX_AROUND = 50
"""Passages before one, and behind, that can be asked for with it."""


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


def ids_around(id: int, around: int, n_passages: int) -> range:
    """The ids of a passage and of at most `around` on both sides of it, of those that a snapshot has.

    Raises:
        InvalidRequest: `around` is out of its range.
    """
    if not 0 <= around <= MAX_AROUND:
        raise InvalidRequest(f"around must be 0..{MAX_AROUND}, got {around}")
    if id >= n_passages:
        return range(id, id + 1)  # who fetches it will say so
    return range(max(0, id - around), min(id + around + 1, n_passages))


def in_document(passages: Sequence[Passage], at: int) -> tuple[list[Passage], list[Passage]]:
    """Of consecutive passages those before and those behind one that are of its document, in their order."""
    first = at
    while first and _continues(passages[first - 1], passages[first]):
        first -= 1
    end = at + 1
    while end < len(passages) and _continues(passages[end - 1], passages[end]):
        end += 1
    return list(passages[first:at]), list(passages[at + 1 : end])


def _continues(one: Passage, other: Passage) -> bool:
    """Whether a passage and the one behind it are of the same document, for all that is known of them."""
    if (one.document_id, one.title) != (other.document_id, other.title):
        return False
    if one.origin is None or other.origin is None:
        return one.origin is other.origin
    same = (one.origin.document_digest, one.origin.path) == (other.origin.document_digest, other.origin.path)
    return same and one.origin.start < other.origin.start
