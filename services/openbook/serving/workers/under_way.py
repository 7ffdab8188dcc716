"""What a worker computes, until when, how much of its time goes to whom, and who is owed some. Pure."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Generic, TypeVar

from openbook.core.deadline import Clock

MEMORY_S = 30.0
"""Within which what came before others loses most of its weight."""
MOST_BEFORE = 0.5
"""Of the time to come, what at most is expected to go to who comes later and before others."""
CREDIT_S = 3.0
"""Of what somebody left to others, as much is his when he comes back: several things that he asks for at once."""
MOST_CALLERS = 1000
"""Who are told apart: they choose their names. One more is as one who comes for the first time."""

W = TypeVar("W")


class Shares:
    """How far each caller's share of the time has got, by start-time fair queueing (Goyal, Vin and Cheng, 1996).

    Who comes begins CREDIT_S before the batch under way, or later: see `goes_first`. So no more than that of what he
    left to others is a claim of his, and what he had while nobody else wanted it no debt.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}  # of those who are further than who comes

    def __len__(self) -> int:
        return len(self._ends)

    def end(self, caller: str) -> float:
        """Until where he has had his."""
        return self._ends.get(caller, self._now - CREDIT_S)

    def begin(self, callers: Iterable[str]) -> None:
        """A batch of theirs does."""
        self._now = max(self._now, min(self.end(caller) for caller in callers))
        self._ends = {caller: end for caller, end in self._ends.items() if end > self._now - CREDIT_S}

    def goes_first(self, seconds: float, others: Collection[str]) -> None:
        """So many go before a batch of others. Who comes next begins later by an equal part of them, though no later
        than these: else ever new callers, one after the other, would have all the time.
        """
        most = CREDIT_S + min((self.end(caller) for caller in others), default=-math.inf)
        self._now = max(self._now, min(most, self._now + seconds / (1 + len(others))))

    def give(self, caller: str, seconds: float) -> None:
        """He has so many."""
        self._ends[caller] = self.end(caller) + seconds
        if len(self._ends) > MOST_CALLERS:
            del self._ends[min(self._ends, key=self._ends.__getitem__)]


class UnderWay(Generic[W]):
    """A batch, and what it lets past, which stops it meanwhile. Seconds are as predicted."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.batch: Sequence[W] = ()
        self._due: float | None = None  # the batch
        self._past_due: float | None = None  # what it lets past
        self._past_s = 0.0  # that this is predicted to take
        self._before_s, self._before_at = 0.0, clock()  # what came before others, until then

    def __bool__(self) -> bool:
        return self._due is not None or self._past_due is not None

    def begin(self, batch: Sequence[W], seconds: float) -> None:
        """The worker computes this."""
        now = self._clock()
        after = max(now, self._past_due or now)  # what the batch before let past, and did not live to see the end of
        self.batch, self._due = batch, after + seconds

    def end(self) -> None:
        """It does no more. May be called twice."""
        if self._due is not None and self._past_due is not None:
            self._past_due = self._clock() + self._past_s  # begins only now: no batch ends while it is stopped
        self.batch, self._due = (), None

    def let_past(self, seconds: float) -> None:
        """The batch stops for something else, now or as soon as this may have its share of the time."""
        self._past_due, self._past_s = self._clock() + seconds, seconds
        self._put_off(seconds)

    def went_past(self, took_s: float) -> None:
        """And goes on, after so many seconds for which it stopped: it did not while that waited for its share."""
        if self._past_due is not None:
            self._put_off(took_s - self._past_s)
        self._past_due = None

    def _put_off(self, seconds: float) -> None:
        if self._due is not None:
            self._due += seconds

    def came_before(self, seconds: float) -> None:
        """So much is for somebody who came before others, whether past the batch or behind it."""
        self._before_s, self._before_at = self._recently_before_s + seconds, self._clock()

    @property
    def left_s(self) -> float:
        """Of the batch, or of what it let past and left behind."""
        due = self._past_due if self._due is None else self._due
        return 0.0 if due is None else max(0.0, due - self._clock())

    @property
    def _recently_before_s(self) -> float:
        """Of MEMORY_S, with older seconds weighing less."""
        return self._before_s * math.exp((self._before_at - self._clock()) / MEMORY_S)

    @property
    def stretch(self) -> float:
        """So many times as long as without them do others wait, if as much goes on to come before them."""
        return 1 / (1 - min(MOST_BEFORE, self._recently_before_s / MEMORY_S))
