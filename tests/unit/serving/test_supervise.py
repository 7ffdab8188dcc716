import errno
import subprocess
import threading

from openbook.serving.launch.supervise import CALM_S, MAX_DELAY_S, MAX_MISSED, Restarts, Supervised
from openbook.testing import ManualClock


def test_one_that_ends_again_and_again_is_started_ever_later() -> None:
    restarts = Restarts(ManualClock())
    delays = [restarts.ended() for _ in range(10)]
    assert delays == [0.1 * 2**n for n in range(7)] + [MAX_DELAY_S] * 3


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
    """A process that once cannot be started again, for the machine has none left."""

    def __init__(self) -> None:
        self.n_starts, self.is_back = 0, threading.Event()
        self.again()

    def again(self) -> None:
        self.n_starts += 1
        if self.n_starts == 2:
            raise OSError(errno.EAGAIN, "no process left")
        self.process = subprocess.Popen(["sleep", "1000"])
        if self.n_starts > 2:
            self.is_back.set()

    def address(self) -> str:
        return "here"

    def answers(self, timeout_s: float) -> bool:
        return True

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def test_one_that_the_machine_cannot_start_is_tried_again() -> None:
    sleeper = Sleeper()
    supervised = Supervised("sleeper", lambda: sleeper)
    assert supervised.address() == "here"
    sleeper.process.kill()
    try:
        assert sleeper.is_back.wait(60)
    finally:
        supervised.stop()
