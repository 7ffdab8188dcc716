"""Answers as their passages spell them: many a tokenizer knows no capitals, no accents, and not what stands apart."""

import unicodedata
from collections.abc import Iterable, Sequence

from openbook.core.types import Passage


def as_spelled(text: str, passages: Iterable[Passage]) -> str:
    """What the first passage that has this text, as whole words, has for it; the text itself where none has.

    Letters are compared without capitals, accents and spaces. A passage's text counts before its title.
    """
    wanted, _ = _letters(text)
    for passage in passages if wanted else ():
        for given in (passage.text, passage.title):
            found = _find(wanted, given)
            if found:
                return found
    return text


def spans(beginnings: Sequence[str], spelled: str) -> list[tuple[int, int]]:
    """Where in an answer as spelled each token's characters stand: from the first to behind the last, ascending.

    beginnings: the answer's text as far as each token. A token without letters of its own has none: start is end.
    """
    _, places = _letters(spelled)
    found, end, n_before = [], 0, 0
    for text in beginnings:
        n_letters = min(len(_letters(text)[0]), len(places))
        start = end
        if n_letters > n_before:
            start, end = max(end, places[n_before]), _behind(spelled, places[n_letters - 1])
        found.append((start, end))
        n_before = max(n_before, n_letters)
    return found


def _find(wanted: str, given: str) -> str:
    letters, places = _letters(given)
    start = letters.find(wanted)
    while start >= 0:
        last = start + len(wanted) - 1
        first, end = places[start], _behind(given, places[last])
        splits = first in places[max(0, start - 1) : start] or places[last] in places[last + 1 : last + 2]  # a syllable
        if not (splits or is_inside_a_word(given, first) or is_inside_a_word(given, end)):
            return given[first:end]
        start = letters.find(wanted, start + 1)
    return ""


def _behind(text: str, place: int) -> int:
    """The end of the character that begins there, with what combines with it."""
    end = place + 1
    while unicodedata.combining(text[end : end + 1] or " "):
        end += 1
    return end


def is_inside_a_word(text: str, place: int) -> bool:
    """Whether what stands before the place and what stands there belong to one word."""
    return text[max(0, place - 1) : place].isalnum() and text[place : place + 1].isalnum()


def _letters(text: str) -> tuple[str, list[int]]:
    """What is compared, and where in the text each of it stands."""
    found = [
        (letter, place)
        for place, character in enumerate(text)
        for letter in unicodedata.normalize("NFD", character.lower())
        if not (letter.isspace() or unicodedata.combining(letter))
    ]
    return "".join(letter for letter, _ in found), [place for _, place in found]
