"""How often Python lets another thread on. Often costs every call that goes through several threads half as much again,
so only while much is asked for: then who asks for little would wait for each of many others, several times.
"""

import select
import sys
from collections.abc import Callable
from time import monotonic

SELDOM_S = 5e-3
"""Python's own."""
OFTEN_S = 2e-5
MUCH = 4
"""Calls under way at once."""
LOOK_S = 0.05
STAYS_S = 1.0


def wait_for(told_to_stop: int, n_under_way: Callable[[], int]) -> None:
    """Return once something can be read there; until then switch as often as is needed."""
    often_until = 0.0
    while not select.select([told_to_stop], (), (), LOOK_S)[0]:
        now = monotonic()
        if n_under_way() >= MUCH:
            often_until = now + STAYS_S
        sys.setswitchinterval(OFTEN_S if now < often_until else SELDOM_S)
