"""Who gets in: by places, by work, and by whether the answer can be ready in time at the rate at which answers come.

The rate is measured, so it holds whatever is behind: one worker, many replicas, a slow index tier. No I/O.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from openbook.core.context import Context
from openbook.core.deadline import SPARE, Clock
from openbook.errors import Overloaded
from openbook.telemetry import refused

MEMORY_S = 20.0
"""Of busy time, within which what was seen loses most of its weight."""
KNOWN_S = 1.0
KNOWN_N = 4
"""Busy time and answers, before which no rate is believed: the first answers of a process are slow."""
BEST_S = 60.0
"""Of busy time, within which the best rate that was seen loses most of its weight."""
KEPT = 8
"""One part in so many of the places, and of the work, is for callers who hold less than an equal share."""


class Rate:
    """Work done per second while there was some: while nothing is in flight, time does not count.

    What is done in a second says what was asked as much as what can be done: less, where one question came after the
    other, or one waited for a replica that was lost. So the best of late counts, as long as it is not too long ago.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at = clock()
        self._busy_s = self._done = 0.0  # both with older seconds weighing less
        self._n = 0
        self._best = 0.0
        self._fruitless_s = 0.0  # busy time since anything was done

    def advance(self, is_busy: bool) -> None:
        """Time has passed, in which there was work or was none."""
        now = self._clock()
        if is_busy:
            kept = math.exp((self._at - now) / MEMORY_S)
            self._busy_s = self._busy_s * kept + MEMORY_S * (1 - kept)
            self._done *= kept
            self._best *= math.exp((self._at - now) / BEST_S)
            self._fruitless_s += now - self._at
        self._at = now

    def did(self, work: float) -> None:
        """So much was done."""
        self._done += work
        self._n += work > 0
        self._fruitless_s = 0.0 if work else self._fruitless_s
        self._best = max(self._best, self.per_second)

    @property
    def is_doubtful(self) -> bool:
        """Whether nothing came of what was in flight for long: that may say what callers did, not what can be done."""
        return self._fruitless_s > MEMORY_S

    def seconds(self, work: float) -> float:
        """How long so much will take; 0 as long as that is not known."""
        return work / self.per_second if self.per_second else 0.0

    @property
    def per_second(self) -> float:
        """Work; 0 as long as that is not known."""
        if self._n < KNOWN_N or self._busy_s <= KNOWN_S:
            return 0.0
        return max(self._best, self._done / self._busy_s)


class Admission:
    """At most `max_n` requests at once, and `max_work` of their work together.

    Fair between callers: each is predicted to wait for no more than as many as he asks for himself of everybody's.
    """

    def __init__(self, max_n: int, max_work: int, clock: Clock) -> None:
        self._max_n = max_n
        self._max_work = max_work
        self._clock = clock
        self._rate = Rate(clock)
        self._tried_at = -math.inf
        self._n_of: Counter[str] = Counter()
        self._work_of: Counter[str] = Counter()

    @contextmanager
    def admitted(self, context: Context, work: int = 0) -> Iterator[None]:
        """A place, for as long as the body runs.

        Raises:
            Overloaded: there is none, or the answer would be late.
        """
        caller = context.caller
        self._rate.advance(self.work_in_flight > 0)
        self._check(caller, work, context.deadline.remaining_s())
        self._n_of[caller] += 1
        self._work_of[caller] += work
        try:
            yield
            self._rate.advance(self.work_in_flight > 0)
            self._rate.did(work)
        finally:
            self._rate.advance(self.work_in_flight > 0)
            for count, amount in ((self._n_of, 1), (self._work_of, work)):
                count[caller] -= amount
                if not count[caller]:
                    del count[caller]

    @property
    def n_in_flight(self) -> int:
        """Admitted and not yet answered."""
        return self._n_of.total()

    @property
    def work_in_flight(self) -> int:
        """Of these together."""
        return self._work_of.total()

    @property
    def work_per_second(self) -> float:
        """As it is answered while there is some; 0 as long as that is not known."""
        return self._rate.per_second

    def _check(self, caller: str, work: int, remaining_s: float) -> None:
        n = self.n_in_flight
        if n >= self._open_to(caller, self._n_of, self._max_n):
            refused("endpoint", "places").inc()
            raise Overloaded(f"{n} questions are in flight, of max_in_flight = {self._max_n}, and no more are admitted")
        in_flight = self.work_in_flight
        if in_flight + work > self._open_to(caller, self._work_of, self._max_work):
            limit = f"max_work_in_flight = {self._max_work}"
            refused("endpoint", "work").inc()
            raise Overloaded(f"work of {in_flight} is in flight, and {work} more would exceed {limit}")
        if work and in_flight:  # alone it is let in however slow things were: else nobody would learn when they are not
            n_working = sum(its_work > 0 for its_work in self._work_of.values())
            ahead = min(in_flight, n_working * self._work_of[caller])
            needed_s = SPARE * self._rate.seconds(ahead + work)
            if needed_s > remaining_s and not self._is_tried(caller):
                refused("endpoint", "time").inc()
                raise Overloaded(
                    f"the answer would be ready in {needed_s:.1f} s, as things go, and is due in {remaining_s:.1f} s",
                    retry_after_s=min(needed_s - remaining_s, MEMORY_S),
                )

    def _is_tried(self, caller: str) -> bool:
        """Whether he is let in although he would be late, for that is doubtful: who has nothing else in flight, and of
        the others one in MEMORY_S. Else who gives up all that he asks for would keep others out for as long.
        """
        if not self._rate.is_doubtful:
            return False
        if self._work_of[caller]:
            if self._clock() < self._tried_at + MEMORY_S:
                return False
            self._tried_at = self._clock()
        return True

    def _open_to(self, caller: str, held: Counter[str], most: int) -> int:
        """How much of it there may be in all for this caller to get some. Who has a name leaves room for others, though
        none of them is here yet: they would find every place taken.
        """
        n_callers = max(len(self._n_of.keys() | {caller}), 2 if caller else 1)
        has_share = n_callers > 1 and held[caller] >= most / n_callers
        return most - most // KEPT if has_share else most
