"""What a bi-encoder learns from: questions, each with a passage that answers it and some that only look as if they did.

Karpukhin et al. 2020, sections 3.2 and 4.2: hard negatives are the best passages by BM25 that hold no answer; where a
question brings no passage of its own, its positive is the best that does.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from openbook.core.fingerprint import json_digest
from openbook.core.types import NO_HIT, Passage
from openbook.errors import InvalidDocuments
from openbook.evaluation.score import answering
from openbook.training.data import Example
from openbook.training.retrieval import PassageFinder

log = logging.getLogger(__name__)

QUESTIONS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Pair:
    """A question with its passages."""

    example: Example
    positive: Passage
    negatives: tuple[Passage, ...]  # hardest first; none of them answers the question

    def not_negative(self) -> Callable[[Passage], bool]:
        """Whether the question must not be taught to keep away from a passage: it has an answer, or is the positive
        itself. To be asked of many."""
        has_answer = answering(self.example.question)
        return lambda passage: passage.text == self.positive.text or has_answer(passage.text)


def mined(examples: Sequence[Example], bm25: PassageFinder, depth: int, n_negatives: int) -> list[Pair]:
    """Each question with its passages, up to `n_negatives` of the best `depth`. Those without a positive are left out.

    Raises:
        InvalidDocuments: that leaves none.
    """
    pairs = list(_mined(examples, bm25, depth, n_negatives))
    if not pairs:
        raise InvalidDocuments(
            f"none of {len(examples)} questions has a context, or an answer in the best {depth} passages by BM25"
        )
    if len(pairs) < len(examples):
        missing = len(examples) - len(pairs)
        log.warning("%d of %d questions are left out: no passage that answers them", missing, len(examples))
    return pairs


def _mined(examples: Sequence[Example], bm25: PassageFinder, depth: int, n_negatives: int) -> Iterator[Pair]:
    for start in range(0, len(examples), QUESTIONS_AT_ONCE):
        some = examples[start : start + QUESTIONS_AT_ONCE]
        for example, passages in zip(some, bm25.find(some, None, depth).passages, strict=True):
            found = [passage for passage in passages if passage.id != NO_HIT]
            positive = _positive(example, found)
            if positive is not None:
                not_negative = Pair(example, positive, ()).not_negative()
                hard = (passage for passage in found if not not_negative(passage))
                yield Pair(example, positive, tuple(islice(hard, n_negatives)))


def _positive(example: Example, found: Sequence[Passage]) -> Passage | None:
    question = example.question
    if question.context:
        return Passage(NO_HIT, question.id, question.title, question.context)
    has_answer = answering(question)
    return next((passage for passage in found if has_answer(passage.text)), None)


def pool(pairs: Sequence[Pair], others: Sequence[Passage] = ()) -> tuple[list[Passage], NDArray[np.bool_]]:
    """m passages, the n positives first, and for each question (n, m) which are neither its positive nor negative."""
    passages = [pair.positive for pair in pairs] + [p for pair in pairs for p in pair.negatives] + list(others)
    not_negative = [pair.not_negative() for pair in pairs]
    # Passages outside, questions inside: the tokens of a passage are looked at by all questions in a row.
    columns = [[of_pair(passage) for of_pair in not_negative] for passage in passages]
    left_out = np.array(columns, bool).reshape(len(passages), len(pairs)).T
    left_out[np.arange(len(pairs)), np.arange(len(pairs))] = False
    return passages, left_out


def pairs_digest(pairs: Sequence[Pair]) -> str:
    """Identifies pairs and their order."""
    texts = [[p.example.text, *((z.title, z.text) for z in (p.positive, *p.negatives))] for p in pairs]
    return json_digest(texts)[:32]
