"""Citations: parts of an answer with the passage that carries most of each."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.core.citations import cite
from openbook.core.types import Citation, Token

TEXT = "Alexander Graham Bell in 1876"


def token(start: int, end: int, *shares: float) -> Token:
    return Token(TEXT[start:end], -0.1, tuple(np.log(shares)), start, end)


def test_words_of_one_passage_are_cited_together_and_pieces_of_a_word_are_never_parted() -> None:
    tokens = [
        token(0, 4, 0.8, 0.2),
        token(4, 9, 0.4, 0.6),  # of one word: .6 of it is the first passage's
        token(10, 16, 0.9, 0.1),
        token(17, 21, 0.7, 0.3),
        token(22, 24, 0.2, 0.8),
        token(25, 29, 0.1, 0.9),
        Token("", -0.1, tuple(np.log([1.0, 1e-9])), 29, 29),
    ]
    first, second = cite(TEXT, tokens)
    assert (TEXT[first.start : first.end], first.evidence) == ("Alexander Graham Bell", 0)
    assert (TEXT[second.start : second.end], second.evidence) == ("in 1876", 1)
    assert first.probability == pytest.approx((0.8 + 0.4 + 0.9 + 0.7) / 4)
    assert second.probability == pytest.approx(0.85)


@pytest.mark.parametrize("word", ["सत्य", "ที่", "שָׁלוֹם", "cafe\u0301s"])
def test_marks_part_no_word(word: str) -> None:
    tokens = [Token(word[i], -0.1, tuple(np.log([i % 2 or 0.4, 1 - i % 2 or 0.6])), i, i + 1) for i in range(len(word))]
    (only,) = cite(word, tokens)
    assert (only.start, only.end) == (0, len(word))


def test_nothing_said_is_not_cited() -> None:
    assert cite("", []) == ()
    assert cite("", [Token("", 0.0, (0.0,), 0, 0)]) == ()
    assert cite("x", [Token("x", 0.0, (0.0,), 0, 1)]) == (Citation(0, 1, 0, 1.0),)


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.floats(0.01, 0.99)), min_size=1, max_size=12))
def test_citations_cover_every_word_once_in_order(pieces: list[tuple[int, bool, float]]) -> None:
    text, tokens = "", []
    for length, begins, share in pieces:
        text += " " if begins and text else ""
        tokens.append(Token("", 0.0, (float(np.log(share)), float(np.log1p(-share))), len(text), len(text) + length))
        text += "x" * length
    found = cite(text, tokens)
    covered = [i for each in found for i in range(each.start, each.end)]
    assert covered == sorted(set(covered))
    assert {i for i, c in enumerate(text) if c != " "} <= set(covered)
    assert all(a.evidence != b.evidence for a, b in pairwise(found))
    assert all(0.5 <= each.probability <= 1 for each in found)
