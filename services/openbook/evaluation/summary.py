"""From the records of an evaluation to numbers and tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import exp, isnan
from typing import Any

import numpy as np

from openbook.core import metrics
from openbook.evaluation.record import Record
from openbook.evaluation.score import mean

HAS_ANSWER_AT = (1, 5, 20)
ANSWERED_SHARES = (1.0, 0.75, 0.5, 0.25, 0.1)


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over questions and its 95 % bootstrap interval. NaN where there is nothing to average."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Mean":
        return cls(mean(values), *metrics.bootstrap_interval(values))


@dataclass(frozen=True, slots=True)
class Group:
    """Answers to questions whose first passage with an answer lies in the same place."""

    n: int
    right: float  # share
    median_confidence_wrong: float  # p(y|x) of the wrong ones
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
    has_answer: Mapping[int, Mean]  # at k
    prior_entropy: float  # mean, in nats
    mean_confidence: float  # of p(y|x)
    calibration_error: float
    auroc: float  # of confidence, for right against wrong
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
    confidence, right = [record.confidence for record in records], [float(record.em) for record in records]
    texts = [record for record in records if record.answers]
    return Result(
        file=file,
        formulation=formulation,
        n=len(records),
        em=Mean.of(right),
        f1=Mean.of([record.f1 for record in records if record.f1 is not None]),
        rouge_l=Mean.of([record.rouge_l for record in records if record.rouge_l is not None]),
        bleu_1=metrics.bleu_1([record.prediction for record in texts], [record.answers for record in texts]),
        has_answer={at: Mean.of([float(record.has_answer_at(at)) for record in records]) for at in HAS_ANSWER_AT},
        prior_entropy=mean([record.prior_entropy for record in records]),
        mean_confidence=mean(confidence),
        calibration_error=metrics.reliability(confidence, right).expected_error,
        auroc=metrics.auroc(confidence, right),
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
    wrong = [record.confidence for record in records if not record.em]
    return Group(
        n=len(records),
        right=mean([float(record.em) for record in records]),
        median_confidence_wrong=float(np.median(wrong)) if wrong else float("nan"),
        surely_wrong=mean([float(not record.em and record.confidence >= 0.5) for record in records]),
    )


def _cuts(records: Sequence[Record]) -> tuple[Cut, ...]:
    """For each share the highest threshold under which at least so many are answered."""
    curve = metrics.risk_coverage([r.log_likelihood for r in records], [float(r.em) for r in records])
    at = np.searchsorted(curve.coverage, np.array(ANSWERED_SHARES) - 1e-9)
    columns = curve.threshold[at].tolist(), curve.coverage[at].tolist(), (1 - curve.risk[at]).tolist()
    return tuple(Cut(*row) for row in zip(*columns, strict=True))


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """For a JSON file, which has no NaN: null."""
    return [_without_nan(asdict(result)) for result in results]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and isnan(value) else value


def as_markdown(plan: Mapping[str, Any], results: Sequence[Result]) -> str:
    """Tables for people, the conditions beside every number."""
    conditions = [_index(plan), str(plan["k"]), _search(plan)]
    main = [
        [
            r.file,
            r.formulation,
            str(r.n),
            *map(_percent, (r.em, r.f1)),
            *map(_percent, r.has_answer.values()),
            *conditions,
        ]
        for r in results
    ]
    trust = [
        [r.file, r.formulation, *map(_number, (r.mean_confidence, r.em.value, r.calibration_error, r.auroc))]
        for r in results
    ]
    places = [
        [r.file, r.formulation, name, str(g.n), *map(_number, (1 - g.right, g.median_confidence_wrong, g.surely_wrong))]
        for r in results
        for name, g in r.by_place.items()
    ]
    cuts = [
        [r.file, r.formulation, f"{c.threshold:.2f}", _number(exp(c.threshold)), _number(c.answered), _number(c.right)]
        for r in results
        for c in r.cuts
    ]
    at = [f"answer in top {k}" for k in HAS_ANSWER_AT]
    who = ["questions", "formulation"]
    return "\n".join(
        [
            "# Evaluation",
            "",
            "Per cent, with 95 % bootstrap intervals over the questions. Confidence is p(y|x), the log-likelihood its logarithm.",
            "",
            *_table([*who, "n", "EM", "F1", *at, "index", "k", "decoding"], main),
            "",
            "## How far its confidence can be trusted",
            "",
            *_table([*who, "mean confidence", "right", "calibration error", "AUROC"], trust),
            "",
            "## Wrong answers, by where the first passage with an answer lies",
            "",
            "It always answers, also when nothing it has read holds an answer.",
            "",
            *_table(
                [*who, "answer", "n", "wrong", "median confidence of the wrong", "wrong and at least half sure"], places
            ),
            "",
            "## Answering only above a threshold",
            "",
            *_table([*who, "log-likelihood at least", "confidence at least", "answered", "right of those"], cuts),
            "",
        ]
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


def _percent(mean: Mean) -> str:
    if isnan(mean.value):
        return "–"
    return f"{100 * mean.value:.1f} ({100 * mean.low:.1f}–{100 * mean.high:.1f})"


def _number(value: float) -> str:
    return "–" if isnan(value) else f"{value:.3f}"


def _index(plan: Mapping[str, Any]) -> str:
    index = plan["index"]
    if index is None:
        return "gold context"
    recall = index["recall"]
    at_5 = f"recall@5 {recall['5']:.3f}" if recall else "recall not measured"
    return f"{index['factory']}, {index['n_passages']:,} passages, {at_5}"


def _search(plan: Mapping[str, Any]) -> str:
    if plan["labels"]:
        return f"one of {len(plan['labels'])} labels"
    return "greedy" if plan["n_beams"] == 1 else f"{plan['n_beams']} beams"
