"""All passages of a snapshot on disk as one, without its index."""

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from openbook.core.origin import is_lasting_id, position_of
from openbook.core.types import Passage
from openbook.errors import UnknownPassage
from openbook.index.disk.root import served_by
from openbook.index.disk.snapshot import Snapshot
from openbook.index.disk.store import PassageReader


class SnapshotPassages(Sequence[Passage]):
    """The passages of a snapshot, or of what is served from a root, by id; each with its origin, where that is known.

    Raises:
        InvalidSnapshot: it is none, or a file of texts is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.snapshot = Snapshot.open(served_by(folder))
        manifest = self.snapshot.manifest
        self._first_ids = [shard.first_id for shard in manifest.shards]
        self._shards = [
            PassageReader(self.snapshot.shard_folder(number), shard.first_id, manifest.fields)
            for number, shard in enumerate(manifest.shards)
        ]

    def __len__(self) -> int:
        return self.snapshot.manifest.n_passages

    @overload
    def __getitem__(self, id: int) -> Passage: ...
    @overload
    def __getitem__(self, id: slice) -> list[Passage]: ...
    def __getitem__(self, id: int | slice) -> Passage | list[Passage]:
        if isinstance(id, slice):
            return [self[i] for i in range(*id.indices(len(self)))]
        if not 0 <= id < len(self):
            raise IndexError(f"id must be 0..{len(self) - 1}, got {id}")
        # Of shards that begin with the same id all but the last are empty.
        shard = bisect_right(self._first_ids, id) - 1
        return self._shards[shard][id - self._first_ids[shard]]

    def locate(self, passage_id: str) -> int:
        """The id of the passage with a lasting id, or from its digits. Raises UnknownPassage: there is none such."""
        snapshot_id = self.snapshot.manifest.snapshot_id
        if not is_lasting_id(passage_id):
            if (id := position_of(passage_id)) >= len(self):
                raise UnknownPassage(f"passage id must be 0..{len(self) - 1} in {snapshot_id}, got {id}")
            return id
        for first_id, shard in zip(self._first_ids, self._shards, strict=True):
            if (position := shard.find(passage_id)) is not None:
                return first_id + position
        raise UnknownPassage(f"no passage of snapshot {snapshot_id} has the lasting id {passage_id}")
