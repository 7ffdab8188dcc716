"""Confidence: how probable it is that an answer is right, from what the model thinks of it and where it stands.

p(y|x) says how probable a text is, not whether it is right: a long answer has less of it than a short one, and what no
passage holds may have much. A curve, fitted to answers that were judged, turns these signals into a probability.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from openbook.core.metrics import has_answer
from openbook.core.types import Formulation, Generation, Passage

SIGNALS = ("log_likelihood", "per_token", "best_posterior", "holding_posterior", "holding_prior", "best_prior")
"""log p(y|x), the same per token, the most of p(z|x,y) that one passage has, how much of p(z|x,y) and of p(z|x) the
passages have in which the answer stands (`metrics.has_answer`), and the most of p(z|x) that one has."""

LEAST_LOG = -100.0
"""Stands for all below it: the logarithm of zero too."""


def signals(generation: Generation, passages: Sequence[Passage]) -> tuple[float, ...]:
    """`SIGNALS` of an answer and the k passages that it was given."""
    prior, posterior = np.exp(generation.log_prior), np.exp(generation.log_posterior)
    holding = np.array([has_answer(passage.text, [generation.text]) for passage in passages], np.float64)
    log_likelihood = max(generation.log_likelihood, LEAST_LOG)
    found = (
        log_likelihood,
        log_likelihood / max(1, len(generation.token_ids)),
        posterior.max(),
        posterior @ holding,
        prior @ holding,
        prior.max(),
    )
    return tuple(map(float, found))


@dataclass(frozen=True, slots=True)
class Curve:
    """Signals to a probability: a weighted sum, and how often answers with such a sum were right.

    Between two of the m places, that share is interpolated; beyond the first and the last it stays.
    """

    weights: tuple[float, ...]  # of the signals
    bias: float
    sums: tuple[float, ...]  # m, rising
    right: tuple[float, ...]  # m, never falling, 0..1

    def __post_init__(self) -> None:
        if len(self.weights) != len(SIGNALS):
            raise ValueError(f"weights must be {len(SIGNALS)}, one a signal, got {len(self.weights)}")
        rising = all(list(each) == sorted(each) for each in (self.sums, self.right))
        if not rising or not 1 <= len(self.sums) == len(self.right) or not 0 <= self.right[0] <= self.right[-1] <= 1:
            raise ValueError(f"sums and right must be equally many and rise, right within 0..1, got {len(self.sums)}")
        if not np.isfinite([*self.weights, self.bias, *self.sums]).all():
            raise ValueError("weights, bias and sums must be finite")

    def confidence(self, of: Sequence[float]) -> float:
        """p(right) of an answer with these signals."""
        return float(np.interp(math.fsum(map(float.__mul__, self.weights, of)) + self.bias, self.sums, self.right))


Calibration = Mapping[Formulation, Curve]
"""Of one generator. A formulation that none was fitted for has no confidence."""

UNFITTED: Final[Calibration] = {}


def confidence(
    calibration: Calibration, formulation: Formulation, generation: Generation, passages: Sequence[Passage]
) -> float | None:
    """p(right) of an answer, where that is known: neither of a label nor where no curve was fitted."""
    curve = calibration.get(formulation)
    if curve is None or generation.classification is not None:
        return None
    return curve.confidence(signals(generation, passages))
