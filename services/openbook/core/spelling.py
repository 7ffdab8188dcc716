"""Answers as their passages spell them: many a tokenizer knows no capitals, no accents, and not what stands apart."""

import unicodedata
from collections.abc import Callable, Iterable, Sequence

from openbook.core.tokens import is_inside_a_word
from openbook.core.types import Passage

Letters = tuple[str, list[int]]
"""What of a text is compared, and where in it each of these stands."""


def letters_of(text: str) -> Letters:
    """Of a text. Those of two texts, one behind the other, are those of each."""
    found = [
        (letter, place)
        for place, character in enumerate(text)
        for letter in unicodedata.normalize("NFD", character.lower())
        if not (letter.isspace() or unicodedata.combining(letter))
    ]
    return "".join(letter for letter, _ in found), [place for _, place in found]


def as_spelled(text: str, passages: Iterable[Passage], letters: Callable[[str], Letters] = letters_of) -> str:
    """What the first passage that has this text, as whole words, has for it; the text itself where none has.

    Letters are compared without capitals, accents and spaces; of white space in the passage one space is told. Its text
    counts before its title. `letters` may remember those of passages that many texts are looked for in.
    """
    wanted, _ = letters_of(text)
    for passage in passages if wanted else ():
        for given in (passage.text, passage.title):
            found = _find(wanted, given, letters(given))
            if found:
                return found
    return text


def spans(beginnings: Sequence[str], spelled: str) -> list[tuple[int, int]]:
    """Where in an answer as spelled each token's characters stand: from the first to behind the last, ascending.

    beginnings: the answer's text as far as each token. A token without letters of its own has none: start is end.
    """
    _, places = letters_of(spelled)
    found, end, n_before, n_read, before = [], 0, 0, 0, ""
    for text in beginnings:  # of which only what is new is read: there are hundreds, and each begins with the former
        if not text.startswith(before):
            n_read, before = 0, ""
        n_read, before = n_read + len(letters_of(text[len(before) :])[0]), text
        n_letters = min(n_read, len(places))
        start = end
        if n_letters > n_before:
            start, end = max(end, places[n_before]), _behind(spelled, places[n_letters - 1])
        found.append((start, end))
        n_before = max(n_before, n_letters)
    return found


def _find(wanted: str, given: str, of_given: Letters) -> str:
    letters, places = of_given
    start = letters.find(wanted)
    while start >= 0:
        last = start + len(wanted) - 1
        first, end = places[start], _behind(given, places[last])
        splits = first in places[max(0, start - 1) : start] or places[last] in places[last + 1 : last + 2]  # a syllable
        if not (splits or is_inside_a_word(given, first) or is_inside_a_word(given, end)):
            return " ".join(given[first:end].split())  # a caller's own passage may break lines there
        start = letters.find(wanted, start + 1)
    return ""


def _behind(text: str, place: int) -> int:
    """The end of the character that begins there, with what combines with it."""
    end = place + 1
    while unicodedata.combining(text[end : end + 1] or " "):
        end += 1
    return end
