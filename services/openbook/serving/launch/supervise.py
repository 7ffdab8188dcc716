"""Processes of this machine that come back: whatever ends one, or freezes it, it is started again where it was."""

import logging
import signal
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import Any, Protocol

from openbook import processes
from openbook.core.deadline import Clock
from openbook.errors import StartupError

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 10.0
CALM_S = 60.0
"""Whoever has run for so long is started again at once, whatever was before."""
PROBE_EVERY_S = 2.0
PROBE_TIMEOUT_S = 3.0
MAX_MISSED = 3
"""Probes in a row without an answer until a process counts as frozen: after 9 to 15 s."""


class Service(Protocol):
    """A process that others ask."""

    process: subprocess.Popen[Any]

    def address(self) -> str:
        """Where it is to be asked, once it can be. Raises StartupError if it ended before, with what it said."""

    def again(self) -> None:
        """Start it once more, to be asked where it was. The former process is ended first, should it live."""

    def answers(self, timeout_s: float) -> bool:
        """Whether it says anything at all."""

    def stop(self) -> None:
        """Let it finish what it does, then end it and remove what it left."""


class Restarts:
    """How long to wait before the next start, and when a silent process has frozen. No I/O."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._n_ends = 0
        self._n_missed = 0
        self._serves_since: float | None = None

    def serves(self) -> None:
        """It can be asked from now on."""
        self._serves_since, self._n_missed = self._clock(), 0

    def ended(self) -> float:
        """It has ended, or did not start: the seconds to wait. They double each time, up to ten."""
        if self._serves_since is not None and self._clock() - self._serves_since >= CALM_S:
            self._n_ends = 0
        self._serves_since = None
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self._n_ends, 10))
        self._n_ends += 1
        return delay_s

    def probed(self, answered: bool) -> bool:
        """It was asked for a sign of life; whether it has frozen."""
        self._n_missed = 0 if answered else self._n_missed + 1
        return self._n_missed >= MAX_MISSED


class Supervised:
    """A service that is started again until it is stopped. `begin` makes it, and starts it for the first time.

    One thread starts the processes and lives as long as they, for they end with the thread that started them.
    """

    def __init__(self, name: str, begin: Callable[[], Service]) -> None:
        self._name = name
        self._begin = begin
        self._first: Future[str] = Future()
        self._service: Service | None = None
        self._changing = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def address(self) -> str:
        """Where it is to be asked, once it can be for the first time. Raises what its first start does."""
        return self._first.result()

    def or_anew(self) -> "Supervised":
        """Itself; another one in its place where its first start failed, after which it does nothing any more."""
        error = self._first.exception() if self._first.done() else None
        if error is None:
            return self
        log.warning("%s does not start, and is begun anew: %s", self._name, error)
        self.stop()
        return Supervised(self._name, self._begin)

    def stop(self) -> None:
        """Let it finish what it does, then end it, and start it no more."""
        with self._changing:
            self._stopping.set()
            process = self._service.process if self._service else None
        if process is not None:
            process.terminate()
            self._thread.join(processes.STOP_TIMEOUT_S)
            if self._thread.is_alive():  # it waits for one that is frozen
                process.kill()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._changing:
                if not self._stopping.is_set():
                    self._service = self._begin()
            if self._service:
                address = self._service.address()
        except BaseException as error:
            self._first.set_exception(error)
        else:
            self._first.set_result(address if self._service else "")
        restarts = Restarts()
        restarts.serves()
        while self._service and not self._first.exception() and not self._stopping.is_set():
            if why := self._watched(self._service, restarts):
                self._revive(self._service, why, restarts)
        if self._service:
            if self._stopping.is_set():
                self._service.process.wait()  # it was told to end: twice might cut short what it does
            self._service.stop()

    def _watched(self, service: Service, restarts: Restarts) -> str:
        """What has become of it; nothing if it is to be stopped."""
        while True:
            try:
                code = service.process.wait(PROBE_EVERY_S)
                return "" if self._stopping.is_set() else f"ended with {_name(code)}"
            except subprocess.TimeoutExpired:
                frozen = restarts.probed(service.answers(PROBE_TIMEOUT_S))
            if self._stopping.is_set():
                return ""
            if frozen:
                service.process.kill()
                service.process.wait()
                return f"did not answer {MAX_MISSED} times in a row, within {PROBE_TIMEOUT_S:g} s each, and was ended"

    def _revive(self, service: Service, why: str, restarts: Restarts) -> None:
        ended_at = monotonic()
        while not self._stopping.is_set():
            delay_s = restarts.ended()
            log.warning("%s %s; it is started again in %.1f s", self._name, why, delay_s)
            if self._stopping.wait(delay_s):
                return
            try:
                with self._changing:
                    if self._stopping.is_set():
                        return
                    service.again()
                address = service.address()
            except (StartupError, OSError, RuntimeError) as error:  # it may have no memory, process or thread left
                why = f"does not start: {error}"
            else:
                restarts.serves()
                log.warning("%s serves again at %s, %.1f s after it ended", self._name, address, monotonic() - ended_at)
                return


def _name(code: int) -> str:
    """An exit code in words."""
    try:
        return signal.Signals(-code).name if code < 0 else f"code {code}"
    except ValueError:
        return f"code {code}"
