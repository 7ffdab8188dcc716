"""A Ray of our own: what is ours stays ours while it runs, and it leaves nothing behind."""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import psutil
import pytest
import ray

from openbook import local_ray
from openbook.errors import StartupError
from openbook.serving.launch.environment import guards
from openbook.serving.launch.local import until_stopped

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def ours(number: int, frame: FrameType | None) -> None:
    """A handler of signals."""


@pytest.fixture(scope="module")
def running() -> Iterator[ExitStack]:
    """What ends it."""
    former = signal.signal(signal.SIGTERM, ours)
    try:
        # Not where others' are. Not pytest's folder: the paths of Ray's sockets may have 107 characters.
        with (
            tempfile.TemporaryDirectory(prefix="ob-") as folder,
            pytest.MonkeyPatch.context() as patch,
            ExitStack() as stack,
        ):
            patch.setenv("RAY_TMPDIR", folder)
            stack.enter_context(local_ray.started(1, guards(), log_to_driver=False))
            yield stack
    finally:
        signal.signal(signal.SIGTERM, former)


def session() -> Path:
    """Its folder."""
    return Path(ray._private.worker._global_node.get_session_dir_path())


def test_what_is_done_at_sigterm_is_still_what_we_said(running: ExitStack) -> None:
    assert signal.getsignal(signal.SIGTERM) is ours


def test_sigterm_while_ray_starts_stops_us_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does first of all
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    before = signal.getsignal(signal.SIGTERM)
    with until_stopped(), local_ray.started(1, {}):
        pytest.fail("it goes on")
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_signal_to_our_group_reaches_its_processes_before_we_stop_them(running: ExitStack) -> None:
    """As a terminal that closes, a shell's `kill %1` and `timeout` send it: answers under way would be cut off."""
    ray.get(ray.remote(lambda: None).remote())  # there is a worker, too
    others = psutil.Process().children(recursive=True)
    assert {"gcs_server", "raylet"} <= {each.name() for each in others}
    assert [each.name() for each in others if os.getpgid(each.pid) == os.getpgrp()] == []


def test_there_is_no_process_that_nobody_asks(running: ExitStack) -> None:
    """Ray's autoscaler, and its dashboard's server: 200 MB."""
    programs = {Path(word).name for each in psutil.Process().children(recursive=True) for word in each.cmdline()}
    assert "log_monitor.py" in programs
    assert programs.isdisjoint({"monitor.py", "dashboard.py"})


def test_what_a_replica_writes_does_not_grow_for_ever(running: ExitStack) -> None:
    def written() -> int:
        for _ in range(2):
            os.write(2, b"x" * (1 << 23) + b"\n")
        return os.getpid()

    pid, give_up = ray.get(ray.remote(written).remote()), time.monotonic() + 60
    while not list(session().glob(f"logs/worker-*-{pid}.err.1")):  # of a process that writes it down
        assert time.monotonic() < give_up
        time.sleep(0.05)


def test_it_leaves_no_files(running: ExitStack) -> None:
    folder = session()
    running.close()
    assert [each for each in os.listdir(folder.parent) if each.startswith("session_")] == []


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of each Ray that is started here, which is none."""
    folder = tmp_path / f"ray/session_2026-01-02_{os.getpid()}"
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "init", lambda **_: folder.mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return folder


def test_of_one_that_failed_the_logs_stay(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="no such model"), local_ray.started(1, {}):
        raise StartupError("no such model")
    assert begun.exists()
    with local_ray.started(1, {}):
        pass
    assert begun.exists()


def test_one_that_is_stopped_while_it_starts_leaves_no_files(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        ray.init()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(local_ray, "_start", start)
    with until_stopped(), local_ray.started(1, {}):
        pytest.fail("it goes on")
    assert begun.parent.exists()
    assert not begun.exists()


def test_the_link_to_the_latest_leads_to_one_that_is_there(begun: Path) -> None:
    latest, others = begun.with_name("session_latest"), [begun.with_name(f"session_2026-01-0{day}_1") for day in (0, 1)]
    for each in others:
        each.mkdir(parents=True)
    with local_ray.started(1, {}):
        latest.symlink_to(begun)
    assert latest.readlink() == others[1]
