"""A snapshot verified before it is served, by a process that gives way to searches."""

import subprocess
import threading
from pathlib import Path
from typing import Any

from openbook.errors import InvalidSnapshot, ShardUnavailable
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


class Verifier:
    """One verification at a time; it may be closed from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[Any] | None = None
        self._closed = False

    def verify(self, folder: Path, shard: int) -> None:
        """As `Snapshot.verify`, in a process that gives way to all others: whoever searches meanwhile hardly notices.

        A small shard is read at once: starting a process would take longer, and from those who search.

        Raises:
            InvalidSnapshot: as `Snapshot.verify`.
            ShardUnavailable: the server is stopping.
        """
        snapshot = Snapshot.open(folder)
        if sum(file.size_bytes for file in snapshot.shard(shard).files) < _APART_FROM:
            snapshot.verify(shard)
            return
        with self._lock:
            self._check_open()
            command = [*of_code(_VERIFY), str(folder), str(shard)]
            process = self._process = start(command, stderr=subprocess.PIPE, text=True)
        _, problem = process.communicate()
        with self._lock:
            self._process = None
            self._check_open()
        if process.returncode:
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
