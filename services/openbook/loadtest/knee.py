"""How much an endpoint can take: the highest rate at which nearly all it is asked is answered in time."""

from collections.abc import Callable
from dataclasses import dataclass

from openbook.errors import InvalidRequest
from openbook.loadtest.result import Result
from openbook.loadtest.run import run
from openbook.loadtest.settings import MAX_QUESTIONS, MIN_ON_TIME, LoadSettings

MIN_QUESTIONS = 10
"""In the window of a step: fewer tell nothing."""

GOOD_SHARE = 0.99
"""Of the questions of a rate that holds: answered within the deadline."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a rate must meet to hold, and how the search goes."""

    good_share: float = GOOD_SHARE
    p99_s: float | None = None
    factor: float = 2.0  # from one rising step to the next
    precision: float = 0.05  # the knee is known to this share of it
    max_steps: int = 20

    def missed(self, result: Result) -> str:
        """Which limit a step missed; nothing if it holds."""
        found = result.measured
        if found.good_share < self.good_share:
            return f"goodput/offered {found.good_share:.3f} < {self.good_share}"
        if self.p99_s is not None and found.latency and found.latency.p99_s > self.p99_s:
            return f"p99 {found.latency.p99_s:.3f} s > {self.p99_s} s"
        return ""


@dataclass(frozen=True, slots=True)
class Knee:
    """What the search found."""

    rate: float | None  # the highest that held; None: not even the first
    above: float | None  # the lowest that did not; None: none was tried
    steps: tuple[Result, ...]  # in the order in which they were run; at least one
    missed: tuple[str, ...]  # of each, the limit that it missed
    ended: str  # why it ended


def find(settings: LoadSettings, limits: Limits, measure: Callable[[LoadSettings], Result] = run) -> Knee:
    """From `settings.rate` double the rate until a limit is missed, or halve it until none is; then bisect.

    A step at which the load generator does not keep up tells nothing of the endpoint, and ends the search.

    Raises:
        InvalidRequest: the first step would have too few questions.
    """
    steps: list[Result] = []
    missed: list[str] = []
    low: float | None = None
    high: float | None = None
    rate, ended = settings.rate, f"after {limits.max_steps} steps"
    while len(steps) < limits.max_steps:
        if not MIN_QUESTIONS <= rate * settings.duration_s <= rate * settings.length_s <= MAX_QUESTIONS:
            ended = f"a step has {MIN_QUESTIONS} to {MAX_QUESTIONS:,} questions, and would not at {rate:g} a second"
            break
        steps.append(measure(settings.model_copy(update={"rate": rate})))
        missed.append(limits.missed(steps[-1]))
        if steps[-1].measured.on_time < MIN_ON_TIME:
            missed[-1] = "the load generator did not keep up"
            ended = f"{missed[-1]} at {rate:g} a second: --processes, or more cores"
            break
        if missed[-1]:
            high = rate
        else:
            low = rate
        if high is None:
            rate *= limits.factor
        elif low is None:
            rate /= limits.factor
        elif high <= low * (1 + limits.precision):
            ended = f"known to {limits.precision:.0%}"
            break
        else:
            rate = (low + high) / 2
    if not steps:
        raise InvalidRequest(f"nothing was measured: {ended}: raise --rate or --duration")
    return Knee(low, high, tuple(steps), tuple(missed), ended)
