import errno
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from itertools import repeat
from types import SimpleNamespace

import pytest

from openbook import processes
from openbook.errors import StartupError
from openbook.serving.launch import supervise
from openbook.serving.launch.supervise import CALM_S, MAX_DELAY_S, MAX_MISSED, Restarts, Supervised
from openbook.testing import ManualClock


def test_one_that_ends_again_and_again_is_started_ever_later() -> None:
    restarts = Restarts(ManualClock())
    delays = [restarts.ended() for _ in range(2000)]
    assert delays == [0.1 * 2**n for n in range(7)] + [MAX_DELAY_S] * 1993


def test_one_that_ran_for_long_is_started_again_at_once() -> None:
    clock = ManualClock()
    restarts = Restarts(clock)
    assert [restarts.ended() for _ in range(3)] == [0.1, 0.2, 0.4]
    restarts.serves()
    clock.advance(CALM_S / 2)
    assert restarts.ended() == 0.8
    restarts.serves()
    clock.advance(CALM_S)
    assert restarts.ended() == 0.1


def test_time_spent_on_starts_that_fail_is_not_calm() -> None:
    clock = ManualClock()
    restarts = Restarts(clock)
    for delay_s in (0.1, 0.2, 0.4):
        assert restarts.ended() == delay_s
        clock.advance(CALM_S)  # it reads its shard, and then says that a file is gone


def test_it_has_frozen_once_it_was_silent_several_times_in_a_row() -> None:
    restarts = Restarts(ManualClock())
    for _ in range(2):
        assert not any(restarts.probed(False) for _ in range(MAX_MISSED - 1))
        assert not restarts.probed(True)
    assert [restarts.probed(False) for _ in range(MAX_MISSED)] == [False] * (MAX_MISSED - 1) + [True]
    restarts.serves()
    assert not restarts.probed(False)


class Sleeper:
    """A process that once cannot be started again, and says what the test says when it is asked."""

    def __init__(self, problem: Exception | None = None, command: Sequence[str] = ("sleep", "1000")) -> None:
        self._problem, self._command = problem, command
        self.n_starts, self.is_back = 0, threading.Event()
        self.says: Iterator[bool] = repeat(True)
        self.again()

    def again(self) -> None:
        self.n_starts += 1
        if self.n_starts == 2 and self._problem:
            raise self._problem
        if self.n_starts > 1:
            self.stop()
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE)
        if self.n_starts > 2:
            self.is_back.set()

    def address(self) -> str:
        return "here"

    def answers(self, timeout_s: float) -> bool:
        return next(self.says)

    def stop(self) -> None:
        with self.process:
            self.process.kill()


@pytest.mark.parametrize(
    "problem",
    [OSError(errno.EAGAIN, "no process left"), RuntimeError("can't start new thread"), StartupError("a file is gone")],
)
def test_one_that_the_machine_cannot_start_is_tried_again_later(
    problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays = list[float | None]()

    class Recorded(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            delays.append(timeout)
            return self.is_set()

    sleeper = Sleeper(problem)
    its_own = SimpleNamespace(Event=Recorded, Lock=threading.Lock, Thread=threading.Thread)
    monkeypatch.setattr(supervise, "threading", its_own)
    supervised = Supervised("sleeper", lambda: sleeper)
    assert supervised.address() == "here"
    sleeper.process.kill()
    try:
        assert sleeper.is_back.wait(60)
    finally:
        supervised.stop()
    assert delays == [0.1, 0.2]


def test_one_that_was_started_again_has_its_time_to_answer_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "PROBE_EVERY_S", 0.001)
    monkeypatch.setattr(supervise, "FIRST_DELAY_S", 0.001)
    is_well, sleeper = threading.Event(), Sleeper()

    def says() -> Iterator[bool]:
        yield from [False] * MAX_MISSED  # and is ended
        yield from [False] * (MAX_MISSED - 1)
        is_well.set()
        yield from repeat(True)

    sleeper.says = says()
    supervised = Supervised("sleeper", lambda: sleeper)
    try:
        assert is_well.wait(60)
    finally:
        supervised.stop()
    assert sleeper.n_starts == 2


def test_one_that_does_not_end_when_it_is_told_to_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_TIMEOUT_S", 0.05)
    sleeper = Sleeper(command=["sh", "-c", "trap '' TERM; echo; exec sleep 1000"])
    assert sleeper.process.stdout
    sleeper.process.stdout.readline()
    supervised = Supervised("sleeper", lambda: sleeper)
    supervised.address()
    supervised.stop()
    assert sleeper.process.returncode == -signal.SIGKILL
