"""What stops a run, held back while it finishes what it has under way."""

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from openbook.processes import on_stop_signals

log = logging.getLogger(__name__)


@contextmanager
def held_back(until: str) -> Iterator[Sequence[signal.Signals]]:
    """The first signal that comes takes effect after the body, which is given a list that then has it, and ends soon;
    the second one at once. See `on_stop_signals` for which are held back.

    Raises:
        KeyboardInterrupt, SystemExit: SIGINT came; another, with the code that shells give to whom it kills.
    """
    heard: list[signal.Signals] = []

    def hear(told: signal.Signals, give_back: Callable[[], None]) -> None:
        give_back()
        heard.append(told)
        log.warning("%s: stopping after %s; once more stops at once", told.name, until)

    with on_stop_signals(hear):
        yield heard
    if heard:
        raise KeyboardInterrupt if heard[0] == signal.SIGINT else SystemExit(128 + heard[0])
