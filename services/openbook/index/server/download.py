"""A server's part of a snapshot from elsewhere, brought into its root by a process that gives way to searches."""

import logging
import os
import re
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openbook.core.deadline import Clock
from openbook.errors import InvalidConfig, InvalidRequest, OpenbookError, Overloaded, PermissionDenied, from_grpc_code
from openbook.index.disk.root import Root
from openbook.index.remote.fetch import FAILED
from openbook.index.remote.place import Place, is_within
from openbook.processes import GIVE_WAY, end, of_code, start

log = logging.getLogger(__name__)

FORGOTTEN_S = 30.0
"""After which nobody waits for it any more."""
LATELY_S = 10.0
"""Within which whoever waits for it has asked."""
MOST_KEPT = 1 << 16
"""Bytes of what the process says."""
SNAPSHOT_ID = re.compile(r"[0-9a-f]{32}")
_FETCH = f"""{GIVE_WAY}
from openbook.index.remote.fetch import main
main()
"""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is, in bytes; the total is 0 while it is not yet known, the folder none until all is there."""

    n_bytes_done: int = 0
    n_bytes: int = 0
    folder: Path | None = None


class Downloads:
    """One at a time. Thread-safe.

    Args:
        folder: a root; in any other folder there is no place for another snapshot.
        shard: whose files are brought.
        allowed: URLs below which it may be told to read. Whoever may publish still cannot make it read others.
    """

    def __init__(self, folder: Path, shard: int, allowed: tuple[str, ...], clock: Clock = time.monotonic) -> None:
        self._folder, self._shard, self._allowed, self._clock = folder, shard, allowed, clock
        self._lock = threading.Lock()
        self._wanted: tuple[str, str] = ("", "")
        self._process: subprocess.Popen[Any] | None = None
        self._told = self._problem = b""
        self._asked_at = 0.0

    def ask(self, url: str, snapshot_id: str) -> Progress:
        """Begin it, or tell how far it is.

        Raises:
            InvalidRequest: no URL, or no id of a snapshot.
            PermissionDenied: it must not read there.
            InvalidConfig: this server has no root.
            Overloaded: it fetches another one.
            OpenbookError: what it failed for, told once.
        """
        place = Place(url)
        if not SNAPSHOT_ID.fullmatch(snapshot_id):
            raise InvalidRequest("snapshot_id must be 32 hexadecimal digits")
        if not is_within(place.url, self._allowed):
            allowed = ", ".join(self._allowed) or "nowhere"
            raise PermissionDenied(
                f"index_server.fetch_from allows to fetch from {allowed}, not from {place.url[:200]}"
            )
        if not Root.is_one(self._folder):
            raise InvalidConfig(f"{self._folder}: is no root to fetch into: make one with `openbook index root`")
        folder = self._folder.resolve() / snapshot_id
        with self._lock:
            wanted = (place.url, snapshot_id)
            if self._process and self._is_past(self._process, wanted):
                end(self._process)
                self._process = None
            if self._process is None:
                log.info("fetching snapshot %s from %s", snapshot_id, place.url)
                command = [*of_code(_FETCH), place.url, str(folder), str(self._shard), snapshot_id]
                self._process = start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                for pipe in (self._process.stdout, self._process.stderr):
                    os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]
                self._wanted, self._told, self._problem = wanted, b"", b""
            elif self._wanted != wanted:
                other = f"this server fetches snapshot {self._wanted[1]}, or has just done so"
                raise Overloaded(f"{other}: try again {LATELY_S:.0f} s after that has ended")
            self._asked_at = self._clock()
            return self._look(self._process, folder)

    def end_forgotten(self) -> None:
        """End one that nobody has asked for lately."""
        with self._lock:
            if self._process is None or self._clock() - self._asked_at <= FORGOTTEN_S:
                return
            log.info("nobody asks for snapshot %s any more: no longer fetched", self._wanted[1])
            process, self._process = self._process, None
        end(process)

    def close(self) -> None:
        """End it; the next one goes on where it was."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            end(process)

    def _is_past(self, process: subprocess.Popen[Any], wanted: tuple[str, str]) -> bool:
        """Whether it has ended when nobody waited, and is nothing to who asks now: of another snapshot, or failed."""
        code = process.poll()
        is_unheard = code is not None and self._clock() - self._asked_at > LATELY_S
        return is_unheard and (self._wanted != wanted or code != 0)

    def _look(self, process: subprocess.Popen[Any], folder: Path) -> Progress:
        code = process.poll()
        self._told = _drained(process.stdout, self._told)[-100:]  # the last whole line
        self._problem = _drained(process.stderr, self._problem)  # a full pipe would stop it
        whole, _, _ = self._told.rpartition(b"\n")
        done, total = map(int, whole.rpartition(b"\n")[2].split() or (0, 0))
        if code is None:
            return Progress(done, total)
        self._process = None
        with process:
            problem = self._problem.decode(errors="replace")
        if code:
            raise _failure(problem, code)
        return Progress(done, total, folder)


def _drained(pipe: Any, kept: bytes) -> bytes:
    """The last of what was kept and what a pipe has now."""
    while told := pipe.read(1 << 16):
        kept = (kept + told)[-MOST_KEPT:]
    return kept


def _failure(problem: str, code: int) -> OpenbookError:
    if told := re.search(rf"{FAILED}([A-Z_]+) (.*)", problem):
        return from_grpc_code(*told.groups())
    log.error("fetching ended with code %d: %s", code, problem.strip())
    return OpenbookError(f"fetching ended with code {code}: the server's log says why")
