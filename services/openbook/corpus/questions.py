"""Questions with their answers, from JSON lines, also gzipped: what is trained on and measured with.

A line is an object with `question` (or FEVER's `claim`) and one of `answers` (any of them is right), `answer_regex` (a
regular expression that a right answer matches, as CuratedTrec has) and `label` (the answer is this class). `id`, and
`title` and `context` of a passage that answers it, may be there; whatever else there is, is left alone.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from openbook.core.json_text import read_json
from openbook.corpus.read import lines
from openbook.errors import InvalidDocuments

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question:
    """A question and what counts as its answer."""

    id: str  # that of the file, or else the line's number
    text: str
    answers: tuple[str, ...] = ()
    answer_regex: str | None = None
    title: str = ""
    context: str = ""  # a passage that answers it, where one is known


def read_questions(path: Path, needs_answers: bool = True) -> Iterator[Question]:
    """The questions of a file, in its order; of a log of what was asked nobody knows the answers.

    Raises:
        InvalidDocuments: the file cannot be read, or a line is not a question; names file, line and field.
    """
    for number, line in lines(path):
        if line.strip():
            try:
                yield _question(read_json(line), number, needs_answers)
            except (ValueError, RecursionError) as error:  # a JSON error is a ValueError
                raise InvalidDocuments(f"{path}:{number}: {error}") from None


def drawn(items: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """So many of them at random, in their order; all where there is no limit, or are no more."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[i] for i in sorted(np.random.default_rng(seed).choice(len(items), limit, replace=False))]


def id_of(record: dict[str, Any], number: int) -> str:
    """That of a question, or where there is none, or null, its line's number."""
    id = record.get("id")
    return str(number if id is None else id)


def check_whole(text: str, field: str) -> None:
    """Raises ValueError of half a character, which JSON's escapes can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field}: {error}") from None


def _question(record: Any, number: int, needs_answers: bool) -> Question:
    if not isinstance(record, dict):
        raise ValueError("must be an object with question")
    text = _text(record, "question") or _text(record, "claim")
    if not text.strip():
        raise ValueError(f"question must be a string that is not empty, got {repr(text) if text else 'none'}")
    answers = record["answers"] if "answers" in record else [_text(record, "label")]
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"answers must be a list of strings, got {answers!r}")
    check_whole("".join(answers), "answers")
    answers = [answer for answer in answers if answer.strip()]  # Natural Questions has some that are empty
    regex = _text(record, "answer_regex") or None
    if needs_answers and not answers and not regex:
        raise ValueError("one of answers, answer_regex and label is needed, and not empty")
    if regex:
        try:
            re.compile(regex, re.IGNORECASE | re.MULTILINE)
        except re.error as error:
            raise ValueError(f"answer_regex {regex!r}: {error}") from None
    title, context = _text(record, "title"), _text(record, "context")
    name = id_of(record, number)
    check_whole(name, "id")
    return Question(name, text, tuple(answers), regex, title, context)


def _text(record: dict[str, Any], field: str) -> str:
    value = record.get(field, "")
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a string, got {value!r}")
    check_whole(value, field)
    return value
