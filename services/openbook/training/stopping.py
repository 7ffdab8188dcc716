"""Ctrl-C, SIGTERM and SIGHUP, held back while something finishes what it has under way."""

import logging
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_back(until: str) -> Iterator[Sequence[int]]:
    """The first signal that comes takes effect after the body, which is given a list that then has it, and ends soon;
    the second one at once. One that is ignored already stays so, and threads, which none reaches, hold back nothing.

    Raises:
        KeyboardInterrupt, SystemExit: SIGINT came; another, with the code that shells give to whom it kills.
    """
    heard: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    heeded = [each for each in STOP_SIGNALS if is_main and signal.getsignal(each) is not signal.SIG_IGN]
    former = {each: signal.getsignal(each) for each in heeded}

    def let_through() -> None:
        for each, handler in former.items():
            signal.signal(each, handler)

    def hear(number: int, frame: FrameType | None) -> None:
        let_through()
        heard.append(number)
        log.warning("%s: stopping after %s; once more stops at once", signal.Signals(number).name, until)

    for each in former:
        signal.signal(each, hear)
    try:
        yield heard
    finally:
        let_through()
    if heard:
        raise KeyboardInterrupt if heard[0] == signal.SIGINT else SystemExit(128 + heard[0])
