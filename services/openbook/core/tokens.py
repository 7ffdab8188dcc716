"""A text's tokens as DPR has them: what tells whether a passage holds an answer, and what words are counted."""

import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby


def tokens(text: str) -> Iterator[str]:
    """Runs of letters, numbers and marks, and every other visible character by itself, of the text in Unicode's form
    NFD, in lower case."""
    for kind, run in groupby(unicodedata.normalize("NFD", text), _kind):
        if kind == "word":
            yield "".join(run).lower()
        elif kind == "sign":
            yield from (sign.lower() for sign in run)


def words_of(text: str) -> list[str]:
    """Those that are runs."""
    return [token for token in tokens(text) if _kind(token[0]) == "word"]


def is_inside_a_word(text: str, place: int) -> bool:
    """Whether what stands before the place and what stands there belong to one word. A mark is of what it stands on: an
    emoji's selector is of none.
    """
    before = place - 1
    while before > 0 and unicodedata.category(text[before])[0] == "M":
        before -= 1
    return 0 < place < len(text) and _kind(text[before]) == _kind(text[place]) == "word"


@lru_cache(maxsize=1024)  # many questions are asked of one passage
def joined(text: str) -> str:
    """The tokens with a character between and around them that no token holds, so `in` compares whole tokens."""
    return "\0".join(["", *tokens(text), ""])


@lru_cache(maxsize=4096)
def _kind(character: str) -> str:
    """`[\\p{L}\\p{N}\\p{M}]+|[^\\p{Z}\\p{C}]` is what DPR asks of the module `regex`."""
    category = unicodedata.category(character)[0]
    return "word" if category in "LNM" else "gap" if category in "ZC" else "sign"
