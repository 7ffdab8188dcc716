"""Processes that we start and that end with us, and where they listen."""

import gc
import ipaddress
import math
import mmap
import os
import platform
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOP_TIMEOUT_S = 10.0
N_KEPT_FREE = 64
"""So many ranges of ports, the latest that this process was given, are not given to it again."""

# Outlasts the exec. Where the parent has died before, no signal comes any more: there is nothing to start then.
_TETHERED = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
GIVE_WAY = """
import os, sys
try:  # before the imports, which are a third of a second of work; and where it can be, below the nicest of all
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
except (AttributeError, OSError):
    os.nice(19)
"""
"""What a process begins with that is to be noticed by nobody who searches."""


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that outlives neither us nor, on Linux, the thread that started it, even if that is killed.

    In a group of its own: Ctrl-C in the terminal reaches us alone, and we decide the order of stopping. In our session:
    Linux shares the processors out by sessions first, and one that hardly works waits 0.3 s behind a busy one (6.18).
    """
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _TETHERED, str(os.getpid()), *command]
    return subprocess.Popen(command, process_group=0, **options)


def of_module(name: str) -> list[str]:
    """What runs a module of ours, which imports nothing from the current folder: any `yaml.py` may lie there."""
    return [sys.executable, "-P", "-m", name]


def of_code(text: str) -> list[str]:
    """As `of_module`, of Python itself."""
    return [sys.executable, "-P", "-c", text]


def end(process: subprocess.Popen[Any]) -> None:
    """Ask a process to end, end it if it does not, for it may be frozen, and close our ends of its pipes."""
    with process:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def on_stop_signals(heard: Callable[[signal.Signals, Callable[[], None]], None]) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP are told to `heard` while the body runs, with what gives them back to whoever heard
    them before. Those that are ignored already, SIGHUP under `nohup` say, stay so; to a thread none is told.
    """
    is_main = threading.current_thread() is threading.main_thread()
    heeded = [each for each in STOP_SIGNALS if is_main and signal.getsignal(each) is not signal.SIG_IGN]
    former = {each: signal.getsignal(each) for each in heeded}

    def give_back() -> None:
        for each, handler in former.items():
            signal.signal(each, handler)

    for each in former:
        signal.signal(each, lambda number, _: heard(signal.Signals(number), give_back))
    try:
        yield
    finally:
        give_back()


def free_port() -> int:
    """A port of loopback that nobody listens on at this moment: see `free_ports`."""
    return free_ports(1)


_given: deque[range] = deque(maxlen=N_KEPT_FREE)
_giving = threading.Lock()


def free_ports(n: int) -> int:
    """The first of n ports in a row that nobody listens on at this moment, here or for others.

    Out of a range from which neither the system nor Ray hands any out, and none of what this process was given lately:
    whoever is to listen there may take seconds to begin, and meanwhile others open dozens.
    """
    while True:
        first = 20_000 + secrets.randbelow(10_000 - n)
        ports = range(first, first + n)
        with _giving, ExitStack() as stack, suppress(OSError):
            if any(given.start < ports.stop and ports.start < given.stop for given in _given):
                continue
            for port in ports:
                stack.enter_context(socket.socket()).bind(("", port))
            _given.append(ports)
            return first


def threads(asked: int = 0) -> int:
    """As many as asked for; for 0 what OMP_NUM_THREADS says, else the cores that this process may use: those it is
    bound to, within what its control groups (a container, a service) are granted.
    """
    if asked or os.environ.get("OMP_NUM_THREADS", "").isdecimal():
        return max(1, asked or int(os.environ["OMP_NUM_THREADS"]))
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([n_cores, *map(math.ceil, granted_cores(_own_groups()))]))


def processor() -> str:
    """What this machine's is called."""
    with suppress(OSError):  # not Linux
        if named := re.search(r"^model name\s*: (.*\S)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return named[1]
    return platform.processor() or platform.machine()


@contextmanager
def loading() -> Iterator[None]:
    """For what comes to stay, such as modules, models, an index. Python's collector would look through all of it again
    and again while it comes, and whenever it looks through all there is later, which stops every thread for a third of
    a second.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def memory_bytes() -> int:
    """Of this machine, within what the control groups of this process (a container, a service) are granted."""
    return min([os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE, *granted_bytes(_own_groups())])


def granted_bytes(groups: str, root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """The limits on memory of control groups of both versions and of all that they are in, those beyond which a process
    is held up included.

    `groups` are `hierarchy:controllers:path`, as in /proc/self/cgroup. A container sees its own group as the root.
    """
    for folder, is_first in _folders(groups, "memory", root):
        for name in ("memory.limit_in_bytes",) if is_first else ("memory.max", "memory.high"):
            with suppress(OSError, ValueError):  # not seen from here, or "max"
                yield int((folder / name).read_text())


def granted_cores(groups: str, root: Path = Path("/sys/fs/cgroup")) -> Iterator[float]:
    """The limits on CPU time, as `granted_bytes` has those on memory."""
    for folder, is_first in _folders(groups, "cpu", root):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_first else ("cpu.max",)
        with suppress(OSError, ValueError):
            quota, period = (int(number) for name in names for number in (folder / name).read_text().split())
            if quota > 0:  # -1: none
                yield quota / period


def _own_groups() -> str:
    with suppress(OSError):  # not Linux
        return Path("/proc/self/cgroup").read_text()
    return ""


def _folders(groups: str, controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Of each control group, and whether it is of the first version."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top, group = root / controller if controllers else root, PurePosixPath(path.lstrip("/"))
            for each in (group, *group.parents):
                yield top / each, bool(controllers)


def is_here(address: str) -> bool:
    """Whether host:port listens on loopback: no proxy reaches it there."""
    return is_loopback(address.rpartition(":")[0].strip("[]"))


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach what listens there."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
