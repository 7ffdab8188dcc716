"""Documents into passages: disjoint runs of 100 words, as the paper does for Wikipedia (section 3)."""

from collections.abc import Iterator
from dataclasses import dataclass

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
