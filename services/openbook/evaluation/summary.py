"""From the records of an evaluation to its numbers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isnan, nan
from typing import TYPE_CHECKING, Any

import numpy as np

from openbook.core import metrics
from openbook.core.ranking import kilt_scores
from openbook.evaluation.record import Record
from openbook.evaluation.score import mean

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

HAS_ANSWER_AT = (1, 5, 20)
HAS_PAGE_AT = (1, 10)
"""As the paper looks for gold articles of FEVER."""
ANSWERED_SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over questions and its 95 % interval: `of_shares` Wilson's, else the bootstrap's. NaN for no questions."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        return cls(mean(values), *metrics.bootstrap_interval(values))

    @classmethod
    def of_shares(cls, values: Sequence[float]) -> "Mean":
        """The same of values that are 0 or 1, with Wilson's interval; of others as `of`."""
        if set(values) - {0.0, 1.0}:
            return cls.of(values)
        return cls(mean(values), *metrics.wilson_interval(round(sum(values)), len(values)))

    @classmethod
    def of_each(cls, values: Mapping[str, Sequence[float]]) -> "dict[str, Mean]":
        """The same of several metrics, each of them of all questions."""
        columns = np.array(list(values.values()), np.float64).T  # (n, m)
        numbers = columns.mean(axis=0), *metrics.bootstrap_intervals(columns)
        return {name: cls(*row) for name, row in zip(values, np.transpose(numbers).tolist(), strict=True)}


@dataclass(frozen=True, slots=True)
class Group:
    """Answers to questions whose first passage with an answer lies in the same place."""

    n: int
    wrong: float  # share
    median_probability_wrong: float  # p(y|x) of the wrong ones
    surely_wrong: float  # share that is wrong with p(y|x) of at least one half


@dataclass(frozen=True, slots=True)
class Cut:
    """What comes of answering only where log p(y|x) is at least the threshold."""

    threshold: float
    answered: float  # share of all questions
    right: float  # share of those answered


@dataclass(frozen=True, slots=True)
class Result:
    """One file under one formulation."""

    file: str
    formulation: str
    n: int
    em: Mean
    f1: Mean
    rouge_l: Mean
    bleu_1: float  # of all answers together
    distinct_3: float  # share of their tri-grams that differ
    label_accuracy: Mean  # share that is an answer letter for letter
    has_answer: Mapping[int, Mean]  # at k
    has_page: Mapping[int, Mean]  # at k, of those whose pages are known, as of the three below
    r_precision: Mean
    kilt_em: Mean  # right, and R-precision is 1
    kilt_f1: Mean
    prior_entropy: float  # mean, in nats
    mean_probability: float  # of p(y|x)
    calibration_error: float
    auroc: float  # of p(y|x), for right against wrong
    by_place: Mapping[str, Group]
    cuts: tuple[Cut, ...]


def grouped(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """By file and formulation, in the order of their first records."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.file, record.formulation.value), []).append(record)
    return groups


def summarise(records: Sequence[Record], k: int) -> list[Result]:
    """Each file under each formulation, of answers from k passages."""
    return [_result(*key, of_key, k) for key, of_key in grouped(records).items()]


def _result(file: str, formulation: str, records: Sequence[Record], k: int) -> Result:
    probability, right = [record.probability for record in records], [float(record.em) for record in records]
    texts = [record for record in records if record.answers]
    judged = [record for record in records if record.r_precision is not None]
    found = [record.r_precision or 0.0 for record in judged]
    return Result(
        file=file,
        formulation=formulation,
        n=len(records),
        em=Mean.of(right),
        f1=Mean.of([record.f1 for record in records if record.f1 is not None]),
        rouge_l=Mean.of([record.rouge_l for record in records if record.rouge_l is not None]),
        bleu_1=metrics.bleu_1([record.prediction for record in texts], [record.answers for record in texts]),
        distinct_3=metrics.distinct_n_grams([record.prediction for record in records]),
        label_accuracy=Mean.of([float(metrics.label_accuracy(r.prediction, r.answers)) for r in texts]),
        has_answer={at: Mean.of([float(record.has_answer_at(at)) for record in records]) for at in HAS_ANSWER_AT},
        has_page={at: Mean.of([float((r.page_rank or inf) <= at) for r in judged]) for at in HAS_PAGE_AT},
        r_precision=Mean.of(found),
        kilt_em=Mean.of(kilt_scores([float(r.em) for r in judged], found).tolist()),
        kilt_f1=Mean.of(kilt_scores([r.f1 or 0.0 for r in judged], found).tolist()),
        prior_entropy=mean([record.prior_entropy for record in records]),
        mean_probability=mean(probability),
        calibration_error=metrics.reliability(probability, right).expected_error,
        auroc=metrics.auroc(probability, right),
        by_place=_by_place(records, k),
        cuts=_cuts(records),
    )


def _by_place(records: Sequence[Record], k: int) -> dict[str, Group]:
    places: dict[str, Callable[[Record], bool]] = {
        "read": lambda record: record.has_answer_at(k),
        "found, not read": lambda record: record.answer_rank is not None and record.answer_rank > k,
        "not found": lambda record: record.answer_rank is None,
    }
    return {name: _group([record for record in records if is_in(record)]) for name, is_in in places.items()}


def _group(records: Sequence[Record]) -> Group:
    wrong = [record.probability for record in records if not record.em]
    return Group(
        n=len(records),
        wrong=mean([float(not record.em) for record in records]),
        median_probability_wrong=float(np.median(wrong)) if wrong else nan,
        surely_wrong=mean([float(not record.em and record.probability >= 0.5) for record in records]),
    )


def _cuts(records: Sequence[Record]) -> tuple[Cut, ...]:
    """For each share the highest threshold under which at least so many are answered."""
    curve = metrics.risk_coverage([r.log_likelihood for r in records], [float(r.em) for r in records])
    at = np.searchsorted(curve.coverage, np.array(ANSWERED_SHARES) - 1e-9)
    columns = curve.threshold[at].tolist(), curve.coverage[at].tolist(), (1 - curve.risk[at]).tolist()
    return tuple(Cut(*row) for row in zip(*columns, strict=True))


def as_json(results: Sequence["DataclassInstance"]) -> list[dict[str, Any]]:
    """For a JSON file, which has no NaN: null."""
    return [_without_nan(asdict(result)) for result in results]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and isnan(value) else value
