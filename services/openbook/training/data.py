"""Questions as examples: what is read, and what is to be written (sections 3.1 to 3.4)."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from openbook.core.fingerprint import json_digest
from openbook.corpus.questions import Question, drawn
from openbook.errors import InvalidConfig, InvalidDocuments
from openbook.evaluation.kilt import read
from openbook.training.settings import QuestionFile, TaskSettings

Search = Callable[[Sequence[str]], list[list[str]]]
"""Texts of passages for each question: what a regular expression finds its answer in."""

QUESTIONS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Example:
    """x and y."""

    text: str  # x
    target: str  # y
    question: Question  # where it is from


def read_examples(task: TaskSettings, seed: int, search: Search | None = None) -> list[Example]:
    """The training examples, in the order of the files.

    Every pair of a question and an answer is one. Where answers are a regular expression, the answer is what it matches
    most often in the passages that `search` finds, as in the paper (appendix D, "CuratedTrec preprocessing"); there,
    questions without any match got permutations of the pattern, here they are left out, for nothing can be learned
    from "Sept?(ember)?" written out.

    Raises:
        InvalidDocuments: a file cannot be read, or there is no example in all of them.
        InvalidConfig: there are answers by regular expression, and nothing to search in.
    """
    examples: list[Example] = []
    for file in task.train:
        examples += file.repeat * _resolved(list(_examples(task, _read(file, seed))), search, file.path)
    if not examples:
        raise InvalidDocuments(f"{', '.join(str(file.path) for file in task.train)}: not one example for {task.kind}")
    return examples


def read_validation(task: TaskSettings, n_questions: int) -> list[Example]:
    """One example of each question, as many of every file as its share; the same in every run, and perhaps none.

    Raises:
        InvalidDocuments: a file cannot be read.
    """
    examples: list[Example] = []
    for file in task.validation:
        found = list(_examples(task.model_copy(update={"max_answers": 1}), _read(file, 0)))
        examples += drawn(found, -(-n_questions // len(task.validation)), 0)
    return examples


def examples_digest(examples: Sequence[Example]) -> str:
    """Identifies examples and their order."""
    return json_digest([[each.text, each.target, each.question.title, each.question.context] for each in examples])[:32]


def _read(file: QuestionFile, seed: int) -> list[Question]:
    return drawn(list(read(file.path, None)), file.limit, seed)


def _examples(task: TaskSettings, questions: Sequence[Question]) -> Iterator[Example]:
    for question in questions:
        answers = question.answers[: task.max_answers]
        if task.kind == "question_generation":
            yield from (Example(answer, question.text, question) for answer in answers)
        elif task.kind == "classification":
            words = [task.labels[label] for label in answers if label in task.labels]
            yield from (Example(question.text, word, question) for word in words)
        elif answers:
            yield from (Example(question.text, answer, question) for answer in answers)
        elif question.answer_regex:  # of KILT's some have no answer at all
            yield Example(question.text, "", question)


def _resolved(examples: list[Example], search: Search | None, path: Path) -> list[Example]:
    """With the answers that regular expressions stand for."""
    open_ones = [example for example in examples if not example.target]
    if not open_ones:
        return examples
    if search is None:
        raise InvalidConfig(
            f"{path}: answers by regular expression need passages to match: retrieval.kind must be dense or bm25"
        )
    found = dict[int, str]()
    for start in range(0, len(open_ones), QUESTIONS_AT_ONCE):
        some = open_ones[start : start + QUESTIONS_AT_ONCE]
        for example, texts in zip(some, search([each.text for each in some]), strict=True):
            found[id(example)] = most_frequent_match(example.question.answer_regex or "", texts)
    resolved = (Example(each.text, found[id(each)], each.question) if id(each) in found else each for each in examples)
    return [example for example in resolved if example.target]


def most_frequent_match(pattern: str, texts: Sequence[str]) -> str:
    """What a pattern matches most often, the first found of the most frequent; empty if it matches nowhere."""
    expression = re.compile(pattern, re.IGNORECASE | re.MULTILINE)
    matches = Counter(match.group().strip() for text in texts for match in expression.finditer(text))
    del matches[""]
    return matches.most_common(1)[0][0] if matches else ""
