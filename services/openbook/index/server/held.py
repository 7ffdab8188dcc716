"""The snapshots that one server has in memory: the current one, a prepared one, and former ones that drain."""

import threading
import time
from dataclasses import dataclass
from typing import Generic, TypeVar

from openbook.core.deadline import Clock
from openbook.errors import SnapshotMismatch

Held = TypeVar("Held")


@dataclass(slots=True)
class _Entry(Generic[Held]):
    item: Held
    named_at: float
    sequence: int = 0  # of its publication; 0 if it never was current here
    prepared: bool = False
    is_asked_for: bool = False  # it was named by a call, since it was prepared: other servers have it as current
    n_using: int = 0


class HeldSnapshots(Generic[Held]):
    """What can be asked for by snapshot id. Thread-safe; holds whatever stands for a snapshot.

    A former snapshot goes once no call uses it and none has named it for `retain_s`; a prepared one stays until it is
    published, discarded, or another is prepared. Where it was published on other servers and not here, calls name it
    all the same: then it goes like a former one.
    """

    def __init__(
        self, snapshot_id: str, item: Held, sequence: int, retain_s: float, clock: Clock = time.monotonic
    ) -> None:
        self._lock = threading.Lock()
        self._retain_s = retain_s
        self._clock = clock
        self.published = snapshot_id, sequence
        """The current snapshot's id and the sequence of its publication: what calls get who name no snapshot."""
        self._entries = {snapshot_id: _Entry(item, clock(), sequence)}

    @property
    def current_id(self) -> str:
        return self.published[0]

    @property
    def current(self) -> Held:
        return self._entries[self.current_id].item

    @property
    def sequence(self) -> int:
        """Of the latest publication."""
        return self.published[1]

    def acquire(self, snapshot_id: str) -> tuple[str, Held]:
        """The snapshot of this id, or the current one for "", kept until `release`.

        Raises:
            SnapshotMismatch: it is not held.
        """
        with self._lock:
            name = snapshot_id or self.current_id
            entry = self._entries.get(name)
            if entry is None:
                raise SnapshotMismatch(f"this server holds snapshot {self._names()}, got a request for {name[:64]}")
            entry.n_using += 1
            entry.is_asked_for = True
            return name, entry.item

    def release(self, snapshot_id: str) -> None:
        """One user less of what `acquire` gave under this id."""
        with self._lock:
            entry = self._entries.get(snapshot_id)
            if entry is not None and entry.n_using:  # one that was discarded in use is no longer ours
                entry.n_using -= 1
                entry.named_at = self._clock()

    def find(self, snapshot_id: str) -> Held | None:
        """The snapshot of this id, if it is held."""
        entry = self._entries.get(snapshot_id)
        return entry.item if entry else None

    def prepare(self, snapshot_id: str, item: Held) -> None:
        """Hold a snapshot that is to be published; whatever else was prepared goes. What was held under this id ends
        with the calls that use it.
        """
        with self._lock:
            for other in [name for name, entry in self._entries.items() if entry.prepared and name != snapshot_id]:
                if self._entries[other].is_asked_for:
                    self._entries[other].prepared = False
                else:
                    self._unprepare(other)
            entry = self._entries.setdefault(snapshot_id, _Entry(item, self._clock()))
            entry.item, entry.prepared = item, snapshot_id != self.current_id

    def check_publish(self, snapshot_id: str, sequence: int) -> Held:
        """The snapshot that `publish` would make current. Raises as it."""
        with self._lock:
            return self._publishable(snapshot_id, sequence).item

    def publish(self, snapshot_id: str, sequence: int) -> None:
        """Make a held snapshot the current one.

        Raises:
            SnapshotMismatch: it is not held, or another publication has this sequence or a later one.
        """
        with self._lock:
            self._publish(snapshot_id, sequence)

    def follow(self, snapshot_id: str, item: Held, sequence: int) -> None:
        """Make current what others published. Whatever is prepared stays: it may be about to be published too.

        Raises:
            SnapshotMismatch: another publication has this sequence or a later one.
        """
        with self._lock:
            self._entries.setdefault(snapshot_id, _Entry(item, self._clock())).item = item
            self._publish(snapshot_id, sequence)

    def discard(self, snapshot_id: str) -> None:
        """Let go of a snapshot that was only prepared; nothing happens where there is none.

        Raises:
            SnapshotMismatch: it is the current one.
        """
        with self._lock:
            if snapshot_id == self.current_id:
                raise SnapshotMismatch(f"snapshot {snapshot_id} is current: publish another one instead")
            if snapshot_id in self._entries:
                self._unprepare(snapshot_id)

    def drain(self) -> list[str]:
        """Let go of former snapshots whose time has come; returns their ids."""
        with self._lock:
            limit = self._clock() - self._retain_s
            gone = [
                name
                for name, entry in self._entries.items()
                if name != self.current_id and not entry.prepared and not entry.n_using and entry.named_at <= limit
            ]
            for name in gone:
                del self._entries[name]
            return gone

    def held(self) -> list[tuple[int, Held]]:
        """Every snapshot with its sequence, the current one first."""
        with self._lock:
            entries = sorted(self._entries.items(), key=lambda named: (named[0] != self.current_id, -named[1].sequence))
            return [(entry.sequence, entry.item) for _, entry in entries]

    def states(self) -> list[tuple[str, str, int]]:
        """Every snapshot's id, whether it is current, prepared or former, and its sequence."""
        with self._lock:
            return [
                (name, "current" if name == self.current_id else "prepared" if e.prepared else "former", e.sequence)
                for name, e in self._entries.items()
            ]

    def _publish(self, snapshot_id: str, sequence: int) -> None:
        entry = self._publishable(snapshot_id, sequence)
        self._entries[self.current_id].named_at = self._clock()  # its time of grace begins
        entry.sequence, entry.prepared = sequence, False
        self.published = snapshot_id, sequence

    def _publishable(self, snapshot_id: str, sequence: int) -> _Entry[Held]:
        entry = self._entries.get(snapshot_id)
        if entry is None:
            raise SnapshotMismatch(f"this server holds snapshot {self._names()}, cannot publish {snapshot_id[:64]}")
        latest = self.sequence
        if sequence < latest or (sequence == latest and snapshot_id != self.current_id):
            raise SnapshotMismatch(
                f"sequence must be above {latest}, that of the current snapshot {self.current_id}, got {sequence}"
            )
        return entry

    def _unprepare(self, snapshot_id: str) -> None:
        entry = self._entries[snapshot_id]
        entry.prepared = False
        if not entry.sequence:
            del self._entries[snapshot_id]

    def _names(self) -> str:
        return ", ".join(self._entries)
