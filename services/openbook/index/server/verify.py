"""A snapshot verified before it is served, by a process that gives way to searches."""

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openbook.errors import DeadlineExceeded, InvalidSnapshot, ShardUnavailable
from openbook.index.disk.snapshot import Snapshot
from openbook.processes import GIVE_WAY, of_code, start

_VERIFY = f"""{GIVE_WAY}
from pathlib import Path
from openbook.errors import InvalidSnapshot
from openbook.index.disk.snapshot import Snapshot
try:
    Snapshot.open(Path(sys.argv[1])).verify(int(sys.argv[2]))
except InvalidSnapshot as error:
    sys.exit(str(error))
"""
_APART_FROM = 1 << 25  # bytes: about as many as are read while a process starts
LOOK_S = 0.5  # between two looks at who waits

IsAwaited = Callable[[], bool]
"""Whether somebody waits for what is done."""


class Verifier:
    """One verification at a time; it may be closed from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[Any] | None = None
        self._closed = False

    def verify(self, folder: Path, shard: int, is_awaited: IsAwaited = lambda: True) -> None:
        """As `Snapshot.verify`, in a process that gives way to all others: whoever searches meanwhile hardly notices.

        A small shard is read at once: starting a process would take longer, and from those who search.

        Raises:
            InvalidSnapshot: as `Snapshot.verify`.
            ShardUnavailable: the server is stopping.
            DeadlineExceeded: nobody waits for it any more.
        """
        snapshot = Snapshot.open(folder)
        if sum(file.size_bytes for file in snapshot.shard(shard).files) < _APART_FROM:
            snapshot.verify(shard)
            return
        with self._lock:
            self._check_open()
            command = [*of_code(_VERIFY), str(folder), str(shard)]
            process = self._process = start(command, stderr=subprocess.PIPE, text=True)
        problem = None
        while problem is None:
            try:
                _, problem = process.communicate(timeout=LOOK_S)
            except subprocess.TimeoutExpired:
                if not is_awaited():
                    process.kill()
        with self._lock:
            self._process = None
            self._check_open()
        if process.returncode:
            check_awaited(is_awaited)
            _, _, why = problem.strip().rpartition("\n")  # the last line of a traceback, or after warnings
            raise InvalidSnapshot(why or f"{folder}: verifying it ended with code {process.returncode}")

    def close(self) -> None:
        """End one that is under way, begin no other. It has only read: nothing is left behind."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _check_open(self) -> None:
        if self._closed:
            raise ShardUnavailable("this server is stopping")


def check_awaited(is_awaited: IsAwaited) -> None:
    """Raises DeadlineExceeded where nobody waits."""
    if not is_awaited():
        raise DeadlineExceeded("nobody waits for it any more")
