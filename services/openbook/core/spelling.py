"""Answers as their passages spell them: many a tokenizer knows no capitals, no accents, and not what stands apart."""

import unicodedata
from collections.abc import Iterable

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


def _find(wanted: str, given: str) -> str:
    letters, places = _letters(given)
    start = letters.find(wanted)
    while start >= 0:
        first, last = places[start], places[start + len(wanted) - 1]
        while unicodedata.combining(given[last + 1 : last + 2] or " "):
            last += 1
        if not (_is_inside_a_word(given, first) or _is_inside_a_word(given, last + 1)):
            return given[first : last + 1]
        start = letters.find(wanted, start + 1)
    return ""


def _is_inside_a_word(text: str, place: int) -> bool:
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
