"""When each question is to be sent and which one it is, all of it drawn before the run. Pure."""

from dataclasses import dataclass
from math import ceil

import numpy as np

from openbook.core.types import Float64, Int64
from openbook.loadtest.kinds import Arrivals
from openbook.loadtest.settings import LoadSettings

N_CLOSED = 1 << 16
"""Questions drawn at least for a closed loop, of which nobody knows how many it will ask."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """n questions, by time."""

    intended_s: Float64  # (n,) from the beginning of the run, ascending
    choice: Int64  # (n,) which question

    def share(self, number: int, of: int) -> "Schedule":
        """Every `of`-th question from `number` on: those of one of several processes."""
        return Schedule(self.intended_s[number::of], self.choice[number::of])


def draw(settings: LoadSettings, n_questions: int) -> Schedule:
    """The whole run's schedule, warm-up included. That of callers in a closed loop has no times, and begins anew."""
    times, questions = np.random.SeedSequence(settings.seed).spawn(2)
    if settings.closed is not None:
        n = ceil(N_CLOSED / n_questions) * n_questions  # a replay begins anew where the file does
        return Schedule(np.zeros(n), choices(n, n_questions, settings, np.random.default_rng(questions)))
    cv = {Arrivals.CONSTANT: 0.0, Arrivals.POISSON: 1.0, Arrivals.GAMMA: settings.cv}[settings.arrivals]
    intended_s = arrivals(settings.rate, settings.length_s, cv, np.random.default_rng(times))
    return Schedule(intended_s, choices(len(intended_s), n_questions, settings, np.random.default_rng(questions)))


def arrivals(rate: float, duration_s: float, cv: float, random: np.random.Generator) -> Float64:
    """(n,) ascending times within [0, duration_s) whose gaps have the mean 1/rate and this coefficient of variation.

    The gaps are independent and gamma distributed: at a `cv` of 1 a Poisson process, at 0 constant.
    """
    if cv == 0:
        return np.arange(np.ceil(rate * duration_s)) / rate
    shape = cv**-2
    found = np.empty(0)
    end = 0.0
    while end < duration_s:
        gaps = random.gamma(shape, 1 / (rate * shape), int(rate * (duration_s - end) * 1.05) + 16)
        found = np.concatenate([found, end + np.cumsum(gaps)])
        end = float(found[-1])
    return found[: np.searchsorted(found, duration_s)]


def choices(n: int, n_questions: int, settings: LoadSettings, random: np.random.Generator) -> Int64:
    """(n,) numbers below n_questions: in turn, or drawn in proportion to 1 / (number + 1) ** zipf."""
    if settings.replay:
        return np.arange(n) % n_questions
    weights = np.arange(1, n_questions + 1) ** -settings.zipf
    return random.choice(n_questions, n, p=weights / weights.sum())
