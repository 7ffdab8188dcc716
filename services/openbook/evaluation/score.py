"""Predictions, and passages, against the questions they answer. Pure: training looks for answers with it too."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from openbook.core import metrics
from openbook.corpus.questions import Question
from openbook.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Scores:
    """Means over n questions. F1 and what follows are of those whose answers are texts: NaN where none are."""

    n: int
    exact_match: float
    f1: float
    rouge_l: float
    bleu_1: float  # of all together, not a mean


def evaluate_answers(predictions: Sequence[str], questions: Sequence[Question]) -> Scores:
    """What the predictions are worth, one for each question.

    Raises:
        InvalidRequest: there is not one prediction for each question.
    """
    if len(predictions) != len(questions):
        raise InvalidRequest(f"predictions must be {len(questions)}, one a question, got {len(predictions)}")
    pairs = list(zip(predictions, questions, strict=True))
    texts = [(prediction, question.answers) for prediction, question in pairs if question.answers]
    return Scores(
        n=len(pairs),
        exact_match=mean([is_right(*pair) for pair in pairs]),
        f1=mean([metrics.f1(*pair) for pair in texts]),
        rouge_l=mean([metrics.rouge_l(*pair) for pair in texts]),
        bleu_1=metrics.bleu_1([text for text, _ in texts], [answers for _, answers in texts]),
    )


def is_right(prediction: str, question: Question, is_label: bool = False) -> bool:
    """Exact match with an answer, or a match of the question's regular expression where it has one.

    A label is an answer letter for letter: C, C++ and C# are three classes.
    """
    if question.answer_regex is not None:
        return metrics.regex_match(prediction, question.answer_regex)
    return (metrics.label_accuracy if is_label else metrics.exact_match)(prediction, question.answers)


def answering(question: Question) -> Callable[[str], bool]:
    """Whether an answer to the question stands in a passage's text; for many texts, as the answers are parted once."""
    if (pattern := question.answer_regex) is not None:
        return lambda text: metrics.has_regex_answer(text, pattern)
    return metrics.holding(question.answers)


def mean(values: Sequence[float]) -> float:
    """NaN for none."""
    return float(np.mean(values)) if values else nan
