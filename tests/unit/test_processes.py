"""Ports that are handed out, what memory and cores there are, and what the collector leaves alone."""

import gc
import os
import signal
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from openbook import processes
from openbook.processes import (
    GIVE_WAY,
    free_port,
    free_ports,
    granted_bytes,
    granted_cores,
    is_here,
    loading,
    memory_bytes,
    of_code,
    of_module,
    on_stop_signals,
    threads,
)


def test_no_port_is_given_twice_though_nobody_listens_there_yet() -> None:
    ranges = [range(first, first + 100) for first in (free_ports(100) for _ in range(20))]
    given = [port for ports in ranges for port in ports] + [free_port() for _ in range(40)]
    assert len(set(given)) == len(given)


def told(limits: dict[str, str], root: Path) -> Path:
    """Where Linux tells of control groups."""
    for name, limit in limits.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{limit}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "granted"),
    [
        ("0::/\n", [900]),
        ("0::/system.slice/index.service\n", [300, 200, 900]),
        ("5:devices:/\n4:memory:/docker/abc\n0::/nowhere\n", [700, 900]),  # of the first kind, in a container
        ("4:memory:/known\n1:cpu:/known\n", [500, 700]),
        ("", []),
    ],
)
def test_memory_is_what_all_control_groups_of_a_process_grant(tmp_path: Path, groups: str, granted: list[int]) -> None:
    limits = {
        "memory.max": "900",
        "system.slice/memory.max": "max",
        "system.slice/index.service/memory.max": "300",
        "system.slice/index.service/memory.high": "200",
        "memory/memory.limit_in_bytes": "700",
        "memory/known/memory.limit_in_bytes": "500",
    }
    assert list(granted_bytes(groups, told(limits, tmp_path))) == granted


@pytest.mark.parametrize(
    ("groups", "granted"),
    [
        ("0::/kubepods/pod\n", [1.5, 8.0]),
        ("5:cpuset:/pod\n4:cpu,cpuacct:/pod\n", [4.0]),  # of the first kind: -1 is no limit
        ("4:memory:/pod\n", []),
    ],
)
def test_cores_are_what_all_control_groups_of_a_process_grant(
    tmp_path: Path, groups: str, granted: list[float]
) -> None:
    limits = {
        "cpu.max": "800000 100000",
        "kubepods/cpu.max": "max 100000",
        "kubepods/pod/cpu.max": "150000 100000",
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
        "cpu/pod/cpu.cfs_quota_us": "400000",
        "cpu/pod/cpu.cfs_period_us": "100000",
    }
    assert list(granted_cores(groups, told(limits, tmp_path))) == granted


@pytest.mark.parametrize(
    ("asked", "omp", "granted", "expected"),
    [
        (3, "5", "150000 100000", 3),
        (0, "5", "150000 100000", 5),
        (0, "0", "max 100000", 1),
        (0, "", "150000 100000", 2),
        (0, "4,2", "50000 100000", 1),
        (0, "", "1600000 100000", 8),
        (0, "", "max 100000", 8),
    ],
)
def test_threads_are_as_many_as_asked_for_else_as_the_cores_that_are_granted(
    asked: int, omp: str, granted: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grants(monkeypatch, told({"cpu.max": granted}, tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", omp)
    assert threads(asked) == expected


def grants(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """This process is in the control group at the root."""
    monkeypatch.setattr(processes, "_own_groups", lambda: "0::/\n")
    for name in ("granted_cores", "granted_bytes"):
        monkeypatch.setattr(processes, name, partial(getattr(processes, name), root=root))


def test_memory_is_the_machines_within_what_is_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    for limit, expected in ((1 << 20, 1 << 20), (1 << 60, whole)):
        with monkeypatch.context() as within:
            grants(within, told({"memory.max": str(limit)}, tmp_path))
            assert memory_bytes() == expected


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:7000", True),
        ("127.1.2.3:7000", True),
        ("localhost:7000", True),
        ("[::1]:7000", True),
        ("[::ffff:127.0.0.1]:7000", True),
        ("10.0.0.5:7000", False),
        ("[fd00::1]:7000", False),
        ("index.example.org:7000", False),
        ("0.0.0.0:7000", False),
    ],
)
def test_what_listens_on_loopback_is_here(address: str, expected: bool) -> None:
    assert is_here(address) == expected


def test_a_thread_is_told_of_no_signal() -> None:
    """Python lets none but the main thread listen."""
    entered, former = list[bool](), signal.getsignal(signal.SIGTERM)

    def enter() -> None:
        with on_stop_signals(lambda *_: None):
            entered.append(signal.getsignal(signal.SIGTERM) is former)

    thread = Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [True]


def test_what_was_loaded_is_no_matter_of_the_collector_any_more() -> None:
    before = gc.get_freeze_count()
    with suppress(ValueError), loading():
        assert not gc.isenabled()
        loaded = [[] for _ in range(1000)]  # type: ignore[var-annotated]
        raise ValueError
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(loaded)


@pytest.mark.parametrize("command", [of_module("json.tool"), of_code("from json.tool import main; main()")])
def test_what_we_start_imports_nothing_that_lies_in_the_current_folder(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit('somebody else')")
    done = subprocess.run([*command, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage:")


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="of Linux")
def test_what_is_to_be_noticed_by_nobody_runs_where_nobody_else_does() -> None:
    said = f"{GIVE_WAY}\nprint(os.sched_getscheduler(0))"
    assert subprocess.check_output(of_code(said), text=True) == f"{os.SCHED_IDLE}\n"
