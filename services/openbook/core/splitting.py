"""Where passages begin and end: how much one holds, in words or tokens, and which sentences and sections stay whole."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, count, pairwise
from operator import add
from typing import Literal, Never, Self, get_args

from openbook.errors import InvalidConfig

Unit = Literal["words", "tokens"]
At = Literal["words", "sentences", "headings"]

WORDS_PER_PASSAGE = 100
CHARS_OF_PIECE = 8
"""Of a word that is too long for a passage: more would leave passages emptier, fewer count tokens that are none."""

CountTokens = Callable[[Sequence[str]], Sequence[int]]
"""Of each of some words, without special tokens."""
FindSentences = Callable[[str, str], Sequence[int]]
"""Where in a text of a language sentences end, in ascending characters."""


@dataclass(frozen=True, slots=True)
class Splitting:
    """How documents become passages. The default is the paper's (section 3): disjoint runs of 100 words.

    Raises:
        InvalidConfig: a value is out of its range.
    """

    size: int = WORDS_PER_PASSAGE  # of a passage, at most
    unit: Unit = "words"  # that size and overlap are counted in
    at: At = "words"  # where a passage may end
    overlap: int = 0  # at the end of a passage, with which the next one begins again, at most

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise InvalidConfig(f"passages are measured in {', '.join(get_args(Unit))}, got {self.unit!r}")
        if self.at not in get_args(At):
            raise InvalidConfig(f"passages end at {', '.join(get_args(At))}, got {self.at!r}")
        if self.size < 1:
            raise InvalidConfig(f"{self.unit} per passage must be at least 1, got {self.size}")
        if not 0 <= self.overlap < self.size:
            raise InvalidConfig(
                f"overlap must be at least 0 and less than the {self.size} {self.unit} of a passage, got {self.overlap}"
            )

    @classmethod
    def of(cls, words: int | None, tokens: int | None, at: At = "words", overlap: int = 0) -> Self:
        """As the command line gives it. Raises InvalidConfig: both sizes are given, or as above."""
        if words is not None and tokens is not None:
            raise InvalidConfig(f"passages are measured in words or in tokens, got {words} words and {tokens} tokens")
        if tokens is not None:
            return cls(tokens, "tokens", at, overlap)
        return cls(WORDS_PER_PASSAGE if words is None else words, "words", at, overlap)


def not_given(*_: object) -> Never:
    """Stands for a function that this splitting does not need."""
    raise ValueError("splitting by tokens needs `count_tokens`, at sentences `find_sentences`")


def spans(
    words: Sequence[str],
    splitting: Splitting,
    sections: Sequence[int] = (),
    sentences: Sequence[int] = (),
    count_tokens: CountTokens = not_given,
) -> Iterator[tuple[int, int]]:
    """Where passages begin, and where the next one may: characters in the words joined by single spaces.

    Only a word that alone has more tokens than a passage may hold is cut, at sentences where any end in it.

    Args:
        words: of a document.
        splitting: how.
        sections: where they begin, ascending characters likewise.
        sentences: where they end, likewise.
        count_tokens: needed by tokens.
    """
    begins: Sequence[int] = word_begins(words)
    totals: Sequence[int] = range(len(begins))  # words, or tokens, before each
    if splitting.unit == "tokens":
        begins, totals = _by_tokens(words, begins, sentences, splitting.size, count_tokens)
    last = len(begins) - 1
    inner = {bisect_left(begins, place) for place in sections}
    ends: Sequence[int] = range(last + 1)
    if splitting.at == "sentences":  # the text above a heading has no full stop, often
        ends = sorted(inner | {bisect_left(begins, place) for place in sentences} | {0, last})
    parts = sorted(inner | {0, last}) if splitting.at == "headings" else [0, last]
    for first, stop in pairwise(parts):
        for start, end in _runs(totals, ends, first, stop, splitting):
            yield begins[start], begins[end]


def word_begins(words: Sequence[str]) -> list[int]:
    """(n + 1,): the first character of each in all of them joined by single spaces, and of one more behind them."""
    return list(map(add, accumulate(map(len, words), initial=0), count()))  # their letters, and as many spaces


def _runs(
    totals: Sequence[int], ends: Sequence[int], first: int, last: int, splitting: Splitting
) -> Iterator[tuple[int, int]]:
    """Passages of what lies between two of the `totals`: each ends behind the one before, at one of the `ends` if it
    can, and begins behind where that began."""
    start = end = first
    while end < last:
        fits = bisect_right(totals, totals[start] + splitting.size) - 1
        fits = min(max(fits, end + 1), last)
        whole = ends[bisect_right(ends, fits) - 1]
        end = whole if whole > end else fits
        yield start, end
        if end == last:
            return
        following = ends[bisect_right(ends, end)]  # must fit behind the overlap, if it does without one
        if totals[following] - totals[end] > splitting.size:
            following = end + 1
        least = max(totals[end] - splitting.overlap, totals[following] - splitting.size)
        start = bisect_left(totals, least, start + 1, end)
        if end == whole:
            start = ends[bisect_left(ends, start)]


def _by_tokens(
    words: Sequence[str], begins: Sequence[int], sentences: Sequence[int], size: int, count_tokens: CountTokens
) -> tuple[list[int], list[int]]:
    """Where words, and pieces of words that are too long, begin, and the tokens before each. Each has one at least."""
    places, totals = [], [0]
    for word, begin, n_tokens in zip(words, begins, count_tokens(words), strict=False):  # one more begins
        pieces = [(word, n_tokens)]
        if n_tokens > size:
            inner = sentences[bisect_right(sentences, begin) : bisect_left(sentences, begin + len(word))]
            pieces = _pieces(word, [place - begin for place in inner], size, count_tokens)
        for piece, n in pieces:
            places.append(begin)
            totals.append(totals[-1] + max(n, 1))
            begin += len(piece)
    return [*places, begins[-1]], totals


def _pieces(word: str, sentences: Sequence[int], size: int, count_tokens: CountTokens) -> list[tuple[str, int]]:
    """A word, most often of a language without spaces, in pieces that end where sentences do, and their tokens."""
    parts = [word[start:stop] for start, stop in pairwise([0, *sentences, len(word)])]
    pieces = [part[i : i + CHARS_OF_PIECE] for part in parts for i in range(0, len(part), CHARS_OF_PIECE)]
    counts = count_tokens(pieces)
    if max(counts) > size:
        pieces = list(word)
        counts = count_tokens(pieces)
    return list(zip(pieces, counts, strict=True))
