"""Keys in a file, one a line as JSON: changed under a lock and replaced as a whole; replicas see when it changes."""

import logging
import time
from pathlib import Path

from openbook import files
from openbook.core.deadline import Clock
from openbook.errors import InvalidConfig, KeysUnavailable, reason
from openbook.serving.access.keys import KeyRecord, from_line, to_line
from openbook.serving.access.ports import LOOK_S, Decide

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 10.0
_State = tuple[int, int, int]


class KeyFileBook:
    """The file as `openbook keys` changes it. Fits `ports.KeyBook`."""

    def __init__(self, path: Path) -> None:
        self._path = files.at_home(path)

    def all(self) -> list[KeyRecord]:
        """Bare. A file that is not there has none."""
        try:
            return list(_read(self._path, strict=True).values())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InvalidConfig(f"{self._path}: cannot be read: {error.strerror}") from None

    def put(self, decide: Decide) -> KeyRecord:
        """Bare."""
        try:
            path = self._path.resolve()  # who replaced a link to it would leave the file itself as it was
            if path.exists() and not path.is_file():  # /dev/null would be one from now on, for all of the machine
                raise InvalidConfig(f"{self._path}: must be a regular file")
            with files.locked(files.beside(path, ".{}.lock"), LOCK_TIMEOUT_S):
                records = {each.digest: each for each in self.all()}
                chosen = decide(list(records.values()))
                records[chosen.digest] = chosen
                files.write(path, "".join(f"{to_line(each)}\n" for each in records.values()))
        except (OSError, RuntimeError) as error:  # the latter of links that lead to each other
            raise InvalidConfig(f"{self._path}: cannot be written: {reason(error)}") from None
        return chosen


class KeyFile:
    """The file as a replica reads it. Fits `ports.KeyStore`.

    Raises:
        InvalidConfig: it is not there.
    """

    def __init__(self, path: Path, known_for_s: float, clock: Clock = time.monotonic) -> None:
        self._path = files.at_home(path)
        self._known_for_s = known_for_s
        self._clock = clock
        try:
            self._state = _state(self._path)
            self._records = _read(self._path)
        except OSError as error:
            raise InvalidConfig(
                f"access.path = {str(path)!r}: cannot be read: {error.strerror}; `openbook keys add` makes it"
            ) from None
        self._looked_at = self._seen_at = clock()
        self._is_there = True

    async def find(self, digest: str) -> KeyRecord | None:
        now = self._clock()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._look(now)
        if self._is_there:
            return self._records.get(digest)
        if now - self._seen_at > self._known_for_s or digest not in self._records:
            raise KeysUnavailable("keys cannot be read now: try again later")
        return self._records[digest]

    async def aclose(self) -> None:
        """Nothing is open."""

    def _look(self, now: float) -> None:
        try:
            state = _state(self._path)  # before it is read: what comes in between is seen the next time
            if state != self._state:
                self._records = _read(self._path)
                self._state = state
        except OSError as error:
            if self._is_there:
                log.warning("%s: cannot be read: %s", self._path, error.strerror)
            self._is_there = False
        else:
            self._is_there, self._seen_at = True, now


def _state(path: Path) -> _State:
    """What changes when the file does. Raises OSError."""
    found = path.stat()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path, strict: bool = False) -> dict[str, KeyRecord]:
    """By digest. A line that is no key lets nobody in, and hinders no other.

    Raises:
        OSError: the file cannot be read.
        InvalidConfig: a line is no key, if that is to be said.
    """
    records = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = from_line(line)
        except ValueError:
            if strict:
                raise InvalidConfig(f"{path}: line {number} is no key of this version") from None
            log.warning("%s: line %d is no key", path, number)
            continue
        records[record.digest] = record
    return records
