"""What a run tells: figures out of outcomes. Pure."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from typing import Any

import numpy as np
from hdrh.histogram import HdrHistogram
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from openbook.core.types import Float64
from openbook.errors import OpenbookError
from openbook.loadtest.histograms import US, histogram
from openbook.loadtest.outcomes import HANG, NOT_SENT, OK, REFUSED, Outcomes
from openbook.loadtest.settings import MIN_ON_TIME, ON_TIME_S, LoadSettings


class NotKeptUp(OpenbookError):
    """The load generator was measured, not the endpoint."""


class NothingMeasured(OpenbookError):
    """No question was asked in the window."""


class WrongReplies(OpenbookError):
    """Equal questions got different answers."""


class _Figures(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Latency(_Figures):
    """Of n questions, in seconds."""

    n: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    p999_s: float
    max_s: float


class Status(_Figures):
    """One way in which questions ended."""

    status: str  # the name of a gRPC code, or HANG, or NOT_SENT
    n: int
    seen: dict[str, int]  # how many came as what: over HTTP its statuses
    example: str  # the first message


class Figures(_Figures):
    """Of all questions with intended starts in one window. Rates are per second of it."""

    duration_s: float
    n: int
    offered_rate: float  # questions intended
    answered_rate: float  # answers, however late
    goodput_rate: float  # answers within the stated deadline, counted from the intended start
    statuses: tuple[Status, ...]  # the most frequent first
    n_hangs: int  # no outcome a second after the deadline
    n_refused: int  # RESOURCE_EXHAUSTED, 429
    n_checked: int  # answers compared with others to the same question from the same snapshot
    n_wrong: int  # of them, those that are not the most frequent one
    good_share: float  # goodput over offered; 0 of none
    on_time: float  # share of the questions that were sent within 50 ms of their intended start
    latency: Latency | None  # of answers, from the intended start
    refusal: Latency | None  # of refusals
    first_token: Latency | None  # of streams that were answered
    send_delay: Latency | None  # from the intended start to the sending


class Second(_Figures):
    """Of all questions with intended starts in one second of the run."""

    second: int  # from the beginning of the run
    counts: dict[str, int]  # by status
    n_good: int
    p50_s: float | None  # of answers
    p99_s: float | None
    max_s: float | None


@dataclass(frozen=True)
class Result:
    """One run. Times of `outcomes` and `seconds` count from `begun`; the warm-up is among them."""

    settings: LoadSettings
    outcomes: Outcomes
    begun: float  # monotonic time
    date: float  # the same moment, in seconds since 1970

    @cached_property
    def measured(self) -> Figures:
        """The window after the warm-up."""
        return figures(self._within(self.settings.warm_up_s, inf), self.settings, self.settings.duration_s)

    @cached_property
    def warm_up(self) -> Figures | None:
        """What is not counted, if there was any."""
        warm_up_s = self.settings.warm_up_s
        return figures(self._within(0.0, warm_up_s), self.settings, warm_up_s) if warm_up_s else None

    @cached_property
    def seconds(self) -> tuple[Second, ...]:
        """Every second of the run, warm-up included."""
        found = self.outcomes.by_second(ceil(self.settings.length_s))
        return tuple(_second(second, some, self.settings) for second, some in found)

    @property
    def counted(self) -> Outcomes:
        """Outcomes of the measured window."""
        return self._within(self.settings.warm_up_s, inf)

    def check(self) -> None:
        """Pass for a run whose figures are the endpoint's, and right.

        Raises:
            NothingMeasured: no question was asked in the window.
            WrongReplies: equal questions got different answers.
            NotKeptUp: too few questions were sent on time.
        """
        found = self.measured
        if not found.n:
            raise NothingMeasured(
                f"no question was asked within the {found.duration_s:g} s that count: "
                "raise --duration, or the --rate if there is one"
            )
        if found.n_wrong:
            raise WrongReplies(f"of {found.n_checked} answers compared {found.n_wrong} differ from their like")
        if found.on_time < MIN_ON_TIME:
            n_on_time = round(found.on_time * found.n)
            unsent = (f"; {each.n} were not sent: {each.example}" for each in found.statuses if each.status == NOT_SENT)
            within = f"within {ON_TIME_S * 1000:.0f} ms{''.join(unsent)}"
            raise NotKeptUp(
                f"the load generator could not keep up: sent/intended must be at least {MIN_ON_TIME}, got "
                f"{n_on_time}/{found.n} = {found.on_time:.3f} sent {within}. "
                "Lower the rate, or raise --processes on a machine with free cores"
            )

    def as_json(self) -> dict[str, Any]:
        """Settings and all figures but the seconds."""
        return {
            "loop": "closed" if self.settings.closed else "open",
            "settings": self.settings.model_dump(mode="json"),
            "measured": self.measured.model_dump(),
            "warm_up": self.warm_up and self.warm_up.model_dump(),
        }

    def _within(self, start_s: float, end_s: float) -> Outcomes:
        at = self.outcomes.intended_s
        return self.outcomes.where((at >= start_s) & (at < end_s))


def figures(outcomes: Outcomes, settings: LoadSettings, duration_s: float) -> Figures:
    """Of one window's outcomes."""
    answered = outcomes.where(outcomes.among(OK))
    refused = outcomes.where(outcomes.among(REFUSED))
    delay_s = np.where(outcomes.among(NOT_SENT), np.nan, outcomes.sent_s - outcomes.intended_s)
    n_good = int(good(outcomes, settings).sum())
    n_checked, n_wrong = wrong(answered)
    statuses = _statuses(outcomes)
    count = {each.status: each.n for each in statuses}
    first_s = (answered.first_s - answered.intended_s)[~np.isnan(answered.first_s)]
    return Figures(
        duration_s=duration_s,
        n=len(outcomes),
        offered_rate=len(outcomes) / duration_s,
        answered_rate=len(answered) / duration_s,
        goodput_rate=n_good / duration_s,
        statuses=statuses,
        n_hangs=count.get(HANG, 0),
        n_refused=count.get(REFUSED, 0),
        n_checked=n_checked,
        n_wrong=n_wrong,
        good_share=n_good / max(1, len(outcomes)),
        on_time=float(np.mean(delay_s <= ON_TIME_S)) if len(outcomes) else 1.0,  # NaN, not sent, is not on time
        latency=latency(answered.latency_s),
        refusal=latency(refused.latency_s),
        first_token=latency(first_s),
        send_delay=latency(delay_s[~np.isnan(delay_s)]),
    )


def good(outcomes: Outcomes, settings: LoadSettings) -> NDArray[np.bool_]:
    """(n,) which were answered within the stated deadline, counted from the intended start."""
    return outcomes.among(OK) & (outcomes.latency_s <= settings.timeout_s)


def latency(latencies_s: Float64) -> Latency | None:
    """Of (n,) seconds, to three digits; None of none."""
    return of_histogram(histogram(latencies_s), float(latencies_s.mean())) if len(latencies_s) else None


def of_histogram(of: HdrHistogram, mean_s: float) -> Latency:
    """The percentiles of a histogram that is not empty."""
    n = of.get_total_count()
    percents = [100 * rank(each, n) / n for each in (500, 900, 990, 999)]  # it would round up or down to a rank
    at = of.get_percentile_to_value_dict(percents)
    p50, p90, p99, p999 = (at[percent] / US for percent in percents)
    return Latency(
        n=n,
        mean_s=mean_s,
        p50_s=p50,
        p90_s=p90,
        p99_s=p99,
        p999_s=p999,
        max_s=of.get_max_value() / US,
    )


def rank(per_mille: int, n: int) -> int:
    """Among n, from the smallest on, 1 to n: the first that so many of a thousand do not exceed."""
    return -(-per_mille * n // 1000)  # upwards: 59 of 60 are not 99 %


def wrong(answered: Outcomes) -> tuple[int, int]:
    """How many answers were compared with others, and how many are not what most of their like are."""
    checked = answered.where(answered.about > 0)
    _, group = np.unique(checked.about, return_inverse=True)
    pairs, n_equal = np.unique(np.stack([group.astype(np.uint64), checked.digest]), axis=1, return_counts=True)
    most: Counter[int] = Counter()
    n_like: Counter[int] = Counter()
    for each, n in zip(pairs[0].tolist(), n_equal.tolist(), strict=True):
        most[each] = max(most[each], n)
        n_like[each] += n
    compared = {each for each, n in n_like.items() if n > 1}
    return sum(n_like[each] for each in compared), sum(n_like[each] - most[each] for each in compared)


def _statuses(outcomes: Outcomes) -> tuple[Status, ...]:
    found: dict[str, Status] = {}
    for label, n in zip(outcomes.labels, np.bincount(outcomes.label, minlength=len(outcomes.labels)), strict=True):
        if n:
            before = found.get(label.status) or Status(status=label.status, n=0, seen={}, example=label.example)
            found[label.status] = Status(
                status=label.status,
                n=before.n + int(n),
                seen={**before.seen, label.seen: int(n)},
                example=before.example or label.example,
            )
    return tuple(sorted(found.values(), key=lambda each: (-each.n, each.status)))


def _second(number: int, outcomes: Outcomes, settings: LoadSettings) -> Second:
    latency_s = np.sort(outcomes.where(outcomes.among(OK)).latency_s)
    p50, p99, longest = (
        float(latency_s[rank(each, len(latency_s)) - 1]) if len(latency_s) else None for each in (500, 990, 1000)
    )
    counts = {each.status: each.n for each in _statuses(outcomes)}
    n_good = int(good(outcomes, settings).sum())
    return Second(second=number, counts=counts, n_good=n_good, p50_s=p50, p99_s=p99, max_s=longest)
