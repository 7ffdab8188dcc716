"""Documents into passages, each with its place in its document; and passages around another."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from openbook.core.documents import Document
from openbook.core.fingerprint import text_digest
from openbook.core.origin import Origin
from openbook.core.splitting import (
    WORDS_PER_PASSAGE,
    CountTokens,
    FindSentences,
    Splitting,
    not_given,
    spans,
    word_begins,
)
from openbook.core.types import Passage
from openbook.errors import InvalidRequest

DEFAULT = Splitting()
MAX_AROUND = 50
"""Passages before one, and behind, that can be asked for with it."""

_WORD = re.compile(r"\S+")  # as `str.split` finds them


def split_words(text: str, n_words: int = WORDS_PER_PASSAGE) -> Iterator[str]:
    """The passages of a text alone: disjoint runs of at most `n_words` words, joined by single spaces.

    Raises:
        InvalidConfig: `n_words` is less than 1.
    """
    words = text.split()
    whole = " ".join(words)
    return (whole[start:end].rstrip() for start, end in spans(words, Splitting(n_words)))


def joined(document: Document) -> str:
    """The document's text, whose characters spans count: words joined by single spaces; a passage stays as it is."""
    return document.text if document.is_passage else " ".join(document.text.split())


def split(
    document: Document,
    splitting: Splitting = DEFAULT,
    count_tokens: CountTokens = not_given,
    find_sentences: FindSentences = not_given,
) -> Iterator[tuple[str, Origin]]:
    """The passages of a document, each with where it comes from: `joined(document)[start:end]` is its text.

    Args:
        document: what is split, unless it is a passage; without words it gives none.
        splitting: how.
        count_tokens: needed by tokens.
        find_sentences: needed at sentences.
    """
    text, words = joined(document), document.text.split()
    sections = _places(document.text, words, [position for position, _ in document.sections])
    pages = _places(document.text, words, document.pages)
    digest = text_digest(text)
    for start, end in _spans(document, words, sections, splitting, count_tokens, find_sentences):
        piece = text if document.is_passage else text[start:end].rstrip()
        section = bisect_right(sections, start)
        yield (
            piece,
            Origin(
                document_digest=digest,
                start=start,
                end=start + len(piece),
                path=document.path,
                url=document.url,
                section=document.sections[section - 1][1] if section else "",
                page=bisect_right(pages, start) or None,
                language=document.language,
                date=document.date,
                fields=document.fields,
            ),
        )


def _spans(
    document: Document,
    words: Sequence[str],
    sections: Sequence[int],
    splitting: Splitting,
    count_tokens: CountTokens,
    find_sentences: FindSentences,
) -> Iterable[tuple[int, int]]:
    if document.is_passage:
        return [(0, len(document.text))]
    ends: Sequence[int] = ()
    if splitting.at == "sentences":  # of the text as it is: where a paragraph ends, a sentence does
        ends = _places(document.text, words, find_sentences(document.text, document.language))
    return spans(words, splitting, sections, ends, count_tokens)


def _places(text: str, words: Sequence[str], positions: Sequence[int]) -> list[int]:
    """Where in the words of a text, joined by single spaces, stands what is at some ascending positions of the text; of
    what lies between words, the next one."""
    if not positions:
        return []
    begins, firsts = word_begins(words), [found.start() for found in _WORD.finditer(text)]
    places = []
    for position in positions:
        at = bisect_right(firsts, position) - 1
        inside = at >= 0 and position < firsts[at] + len(words[at])
        places.append(begins[at] + position - firsts[at] if inside else begins[at + 1])
    return places


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
