"""`openbook calibrate`: how sure a generator's answers are, fitted to evaluations, and judged by other questions.

A logistic regression weighs the signals of an answer, and an isotonic one says how often answers with such a sum were
right. The sums that the second is fitted to are those of weights fitted without the answer (cross-fitting): its own
would know it already, and be too sure.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from openbook import files
from openbook.core import metrics
from openbook.core.confidence import SIGNALS, Curve
from openbook.core.types import Float64, Formulation
from openbook.errors import InvalidConfig
from openbook.evaluation.record import PREDICTIONS, Record, read_plan, read_records
from openbook.evaluation.score import mean
from openbook.models.checkpoint import load_generator
from openbook.models.confidence import CONFIDENCE, Confidence

N_FOLDS = 5
MIN_ANSWERS = 100
"""Of a formulation: fewer say little of how often answers are right."""
N_DRAWS = 200
GROUP = 25
"""Answers of neighbouring sums whose share of right ones is one place of the curve."""
MIN_EACH = 2 * N_FOLDS
"""Right and wrong ones: every fold needs both."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Answers of one formulation to questions that the curve was not fitted to."""

    formulation: Formulation
    n_fitted: int
    before: Float64  # (n,) p(y|x)
    after: Float64  # (n,) confidence
    right: Float64  # (n,) 1 or 0

    @property
    def error_by_chance(self) -> float:
        """The calibration error that so few answers show, on average, if each is as often right as it says."""
        draws = np.random.default_rng(0).random((N_DRAWS, len(self.after))) < self.after
        return mean([metrics.reliability(self.after, right).expected_error for right in draws])


def calibrate(model: Path, fitted: Sequence[Path], others: Sequence[Path]) -> tuple[list[Judged], list[str]]:
    """Fit a curve for each formulation in the evaluations `fitted`, write them beside the model, judge by `others`.
    Returns what they are worth, and which formulations have none, for what want of answers.

    Args:
        model: the generator's folder, in which `confidence.json` is written.
        fitted: folders of evaluations, each with answers of this generator.
        others: the same, of other questions; those that were fitted to do not count.

    Raises:
        InvalidModel: there is no such model.
        InvalidConfig: the model is no folder that can be written to; a folder holds no evaluation of answers, of
            another generator, or one whose records know no signals; there are too few answers of each formulation,
            or none; or no other questions, or none with the formulations that are fitted to.
    """
    if not (model.is_dir() and os.access(model, os.W_OK)):
        raise InvalidConfig(
            f"{model}: {CONFIDENCE} is written beside the generator, so that must be a folder that can be written to: "
            "save it to one first"
        )
    fingerprint = str(_plan(fitted[0])["generator_fingerprint"])
    if (found := load_generator(str(model)).fingerprint) != fingerprint:
        raise InvalidConfig(f"{fitted[0]}: has answers of generator {fingerprint}, {model} is {found}")
    of_fitted, of_others = (_records(folders, fingerprint) for folders in (fitted, others))
    if not of_fitted:
        raise InvalidConfig(f"{', '.join(map(str, fitted))}: holds no answer to be fitted to")
    known = {record.question for record in of_fitted}
    if not (of_others := [record for record in of_others if record.question not in known]):
        raise InvalidConfig(f"{', '.join(map(str, others))}: no question that was not fitted to is left to judge by")
    judged, curves, without = [], {}, []
    for formulation in dict.fromkeys(record.formulation for record in of_fitted):
        records = [record for record in of_fitted if record.formulation is formulation]
        try:
            curves[formulation] = curve = fit(*_arrays(records), str(formulation))
        except InvalidConfig as error:
            without.append(str(error))
            continue
        rest = [record for record in of_others if record.formulation is formulation]
        judged.append(
            Judged(
                formulation,
                len(records),
                np.array([record.probability for record in rest]),
                np.array([curve.confidence(record.signals) for record in rest]),
                _arrays(rest)[1],
            )
        )
    if not curves:
        raise InvalidConfig("; ".join(without))
    if not any(len(each.right) for each in judged):
        named = ", ".join(map(str, others))
        raise InvalidConfig(f"{named}: no answer with formulation {' or '.join(curves)} to judge by")
    written = Confidence(generator_fingerprint=fingerprint, curves=curves)
    try:
        files.write(model / CONFIDENCE, written.model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise InvalidConfig(f"{model / CONFIDENCE}: cannot be written: {error.strerror}") from None
    return judged, without


def fit(signals: Float64, right: Float64, name: str = "") -> Curve:
    """Of (n, s) signals and (n,) whether the answer was right. Raises InvalidConfig: there are too few of a kind."""
    # Half a second each: only for those who fit.
    from sklearn.isotonic import IsotonicRegression
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    n_right = int(right.sum())
    if len(right) < MIN_ANSWERS or min(n_right, len(right) - n_right) < MIN_EACH:
        raise InvalidConfig(
            f"{name or 'a curve'} needs at least {MIN_ANSWERS} answers, {MIN_EACH} of them right and {MIN_EACH} wrong, "
            f"got {len(right)}, {n_right} of them right"
        )
    mean, scale = signals.mean(axis=0), signals.std(axis=0)
    scale[scale == 0] = 1.0
    standard = (signals - mean) / scale
    weighing = LogisticRegression()
    folds = StratifiedKFold(N_FOLDS, shuffle=True, random_state=0)
    sums = cross_val_predict(weighing, standard, right, cv=folds, method="decision_function")
    groups = np.array_split(np.argsort(sums), len(sums) // GROUP)
    places = np.array([sums[group].mean() for group in groups])
    # As if one answer of each group more were there, half right: that none of them was wrong proves nothing for ever.
    shares = np.array([(right[group].sum() + 0.5) / (len(group) + 1) for group in groups])
    rising = IsotonicRegression().fit_transform(places, shares)
    weighing.fit(standard, right)
    weights = weighing.coef_[0] / scale
    bias = float(weighing.intercept_[0] - weights @ mean)
    return Curve(tuple(weights.tolist()), bias, tuple(places.tolist()), tuple(rising.tolist()))


def _arrays(records: Sequence[Record]) -> tuple[Float64, Float64]:
    signals = np.array([record.signals for record in records], np.float64).reshape(len(records), len(SIGNALS))
    return signals, np.array([float(record.em) for record in records])


def _records(folders: Iterable[Path], fingerprint: str) -> list[Record]:
    found: list[Record] = []
    for folder in folders:
        plan = _plan(folder)
        if plan["generator_fingerprint"] != fingerprint:
            raise InvalidConfig(
                f"{folder}: has answers of generator {plan['generator_fingerprint']}, not {fingerprint}"
            )
        records = read_records(folder / PREDICTIONS, Record)
        if bare := [record.id for record in records if len(record.signals) != len(SIGNALS)]:
            raise InvalidConfig(
                f"{folder}: question {bare[0]} has no signals: labels and answers with --follow have none; "
                "else evaluate it anew"
            )
        found += records
    return found


def _plan(folder: Path) -> dict[str, Any]:
    plan = read_plan(folder)
    if "generator_fingerprint" not in plan:
        raise InvalidConfig(f"{folder}: holds no evaluation of answers")
    return plan
