"""Which passage each part of an answer rests on."""

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from openbook.core.tokens import is_inside_a_word
from openbook.core.types import Citation, Float64, Token


def cite(text: str, tokens: Sequence[Token]) -> tuple[Citation, ...]:
    """The answer's parts, in order: each as many words as have the same likeliest passage, the mean over the tokens.

    Tokens without characters, such as the end of sequence, belong to none. Of passages as likely the first counts.
    """
    found = []
    for passage, words in groupby(_words(text, tokens), lambda word: int(_shares(word).argmax())):
        part = [token for word in words for token in word]
        start, end = part[0].start, part[-1].end
        assert start is not None
        assert end is not None
        found.append(Citation(start, end, passage, float(_shares(part)[passage])))
    return tuple(found)


def _shares(tokens: Sequence[Token]) -> Float64:
    """(k,) the share of these tokens that each passage is expected to have given."""
    return np.asarray(np.exp([token.log_posterior for token in tokens]).mean(0))


def _words(text: str, tokens: Sequence[Token]) -> Iterator[list[Token]]:
    word: list[Token] = []
    for token in tokens:
        if token.start is None or token.start == token.end:
            continue
        if word and not is_inside_a_word(text, token.start):
            yield word
            word = []
        word.append(token)
    if word:
        yield word
