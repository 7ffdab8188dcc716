"""One absolute deadline for all hops of a request: every wait, retry and hedge draws on the same purse."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from openbook.errors import DeadlineExceeded

Clock = Callable[[], float]
"""Monotonic seconds. Handed in, so that tests turn the hands themselves."""

Check = Callable[[], None]
"""Called between the steps of long work; raises to stop it."""


SPARE = 1.25
"""What is predicted to take a second gets so many: predictions are means, and what is late is lost."""


def go_on() -> None:
    """The check that stops nothing."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The monotonic time at which an answer is due."""

    due: float
    clock: Clock = field(default=time.monotonic, repr=False, compare=False)

    @classmethod
    def after(cls, timeout_s: float, clock: Clock = time.monotonic) -> "Deadline":
        """The deadline this many seconds from now."""
        return cls(clock() + timeout_s, clock)

    @classmethod
    def never(cls) -> "Deadline":
        """For offline work that may take as long as it takes."""
        return cls(math.inf)

    def remaining_s(self) -> float:
        """Seconds left, never negative; inf for `never`."""
        return max(0.0, self.due - self.clock())

    def __reduce__(self) -> tuple[object, tuple[float]]:
        """Clocks differ between machines: what crosses to another process are the seconds that are left."""
        return Deadline.after, (self.remaining_s(),)

    def check(self, stage: str) -> None:
        """Stop before a stage that nobody waits for any more.

        Raises:
            DeadlineExceeded: nothing is left; the message names the stage.
        """
        if self.clock() >= self.due:
            raise DeadlineExceeded(f"deadline passed before {stage}")
