"""A root: a folder of snapshots with a file that says which of them is served, so that a restart knows it too.

published.json  {"sequence": 7, "current": "2026-11-02", "former": "2026-10-01", "prepared": null}
2026-10-01/     a snapshot
2026-11-02/     another

Several servers may share one root: each writes the same, and none what is older than what it finds.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from openbook import files
from openbook.errors import InvalidConfig, ShardUnavailable
from openbook.index.disk.records import Record, read_record
from openbook.index.disk.snapshot import Snapshot

PUBLISHED = "published.json"
LOCK = ".published.lock"
FIRST_SEQUENCE = 1
"""Of the snapshot that a server was started with, where no publication is on record."""


class Published(Record):
    """What a root serves. Folders are names within the root, or absolute paths."""

    format_version: Literal[1] = 1
    sequence: Annotated[int, Field(ge=FIRST_SEQUENCE)]
    current: Annotated[str, Field(min_length=1)]
    former: str | None = None
    prepared: str | None = None

    def after_prepare(self, name: str) -> "Published":
        """What is to be on record once a snapshot is prepared."""
        return self.model_copy(update={"prepared": None if name == self.current else name})

    def after_publish(self, name: str, sequence: int) -> "Published":
        """What is to be on record once a snapshot is published; nothing changes for one that is older than ours."""
        if sequence < self.sequence:
            return self
        if name == self.current:
            return self.model_copy(update={"sequence": sequence})
        prepared = None if name == self.prepared else self.prepared
        return Published(sequence=sequence, current=name, former=self.current, prepared=prepared)

    def after_discard(self, name: str) -> "Published":
        """What is to be on record once a prepared snapshot was let go."""
        return self.model_copy(update={"prepared": None}) if name == self.prepared else self


def served_by(folder: Path) -> Path:
    """The snapshot that is served from a folder: itself, or what a root has on record. Raises as `Root.read`."""
    root = Root(folder)
    return root.folder_of(root.read().current) if Root.is_one(folder) else folder


class Root:
    """The record of one root on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @staticmethod
    def is_one(folder: Path) -> bool:
        """Whether a folder has a record of what it serves."""
        return (folder / PUBLISHED).exists()

    @classmethod
    def create(cls, folder: Path, snapshot: Path) -> "Root":
        """Make a root that serves a snapshot.

        Raises:
            InvalidConfig: it is a root already.
            InvalidSnapshot: there is no such snapshot.
            ShardUnavailable: as `update`.
        """
        Snapshot.open(snapshot)
        folder.mkdir(parents=True, exist_ok=True)
        root = cls(folder)
        with root._alone():
            if cls.is_one(folder):
                raise InvalidConfig(f"{folder / PUBLISHED}: exists: publish another snapshot instead")
            root._write(Published(sequence=FIRST_SEQUENCE, current=root.name_of(snapshot)))
        return root

    def read(self) -> Published:
        """What it serves.

        Raises:
            InvalidSnapshot: the record is missing or damaged.
        """
        return read_record(Published, self._folder / PUBLISHED)

    def folder_of(self, name: str) -> Path:
        """The folder that a name in the record means."""
        return self._folder / name

    def name_of(self, folder: Path) -> str:
        """What a folder is called in the record."""
        absolute = folder.resolve()
        return absolute.name if absolute.parent == self._folder.resolve() else str(absolute)

    def update(self, change: Callable[[Published], Published]) -> None:
        """Replace the record by what `change` makes of it, all at once, safe from a power cut.

        Raises:
            InvalidSnapshot: as `read`.
            ShardUnavailable: it cannot be written, for want of space or rights; it is as it was.
        """
        with self._alone():
            before = self.read()
            after = change(before)
            if after != before:
                self._write(after)

    def _write(self, published: Published) -> None:
        files.write(self._folder / PUBLISHED, published.model_dump_json(indent=2) + "\n")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One writer at a time, among all processes of this machine."""
        try:
            with files.locked(self._folder / LOCK):
                yield
        except OSError as error:
            raise ShardUnavailable(f"{self._folder / PUBLISHED}: cannot be written: {error.strerror}") from None
