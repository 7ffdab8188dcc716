"""What a former snapshot of a corpus is good for: the embeddings of all passages that it has already."""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from openbook.core.types import Passage
from openbook.errors import InvalidConfig
from openbook.index.disk.arrays import Exact, read_array
from openbook.index.disk.snapshot import VECTORS, Snapshot
from openbook.index.disk.store import PassageReader

Digests = NDArray[np.uint64]
ROWS_AT_ONCE = 8192
N_NAMED = 5


class Difference(BaseModel, frozen=True):
    """Documents that are on one side alone, or on both and differ: how many, and the names of the first of them."""

    n: int
    first: tuple[str, ...]


class Changes(BaseModel, frozen=True):
    """A corpus beside the former snapshot of it. A document is known by its id, and changed if its passages are."""

    added: Difference
    changed: Difference
    removed: Difference
    n_as_before: int
    n_passages: int
    n_kept: int  # of these, whose embeddings are taken over


@dataclass(frozen=True, slots=True)
class _Part:
    """One shard of the former snapshot."""

    first_id: int
    passages: PassageReader
    vectors: Exact


class Former:
    """A snapshot whose embeddings a build may take over, because it would make the same.

    Args:
        folder: of the snapshot.
        embedded_by: `TextEncoder.embeds_passages_by` of the build.
        exact_dtype: of the vectors that it writes.

    Raises:
        InvalidSnapshot: it is none, or damaged: every byte is read.
        InvalidConfig: its embeddings have other bits than this build's.
    """

    def __init__(self, folder: Path, embedded_by: str, exact_dtype: str) -> None:
        snapshot = Snapshot.open(folder)
        manifest = snapshot.manifest
        if manifest.embedded_by != embedded_by:
            raise InvalidConfig(
                f"{folder}: its vectors cannot be taken over: they must be those of {embedded_by}, found those of "
                f"{manifest.embedded_by or 'an encoder that it does not name'}"
            )
        if manifest.exact_dtype not in (None, exact_dtype):
            raise InvalidConfig(
                f"{folder}: has vectors in {manifest.exact_dtype}, which are not those of a build in {exact_dtype}"
            )
        self.snapshot_id = manifest.snapshot_id
        self._parts = []
        for shard, entry in enumerate(manifest.shards):
            snapshot.verify(shard)
            files = snapshot.shard_folder(shard)
            vectors = read_array(files / VECTORS, manifest.vectors_dtype, (entry.n_passages, manifest.dimension))
            self._parts.append(_Part(entry.first_id, PassageReader(files, entry.first_id), vectors))

    def take(self, passages: PassageReader, vectors: NDArray[np.float32]) -> tuple[NDArray[np.bool_], Changes]:
        """Copy the embeddings of all passages that are known, title and text, to their rows.

        Returns:
            which of the passages they are, and what has changed.
        """
        theirs, ours = _digests(self._passages(), self._n_passages), _digests(passages, len(passages))
        order = np.argsort(theirs[1], kind="stable")
        known = theirs[1][order]
        is_kept = np.zeros(len(passages), np.bool_)
        for start in range(0, len(passages), ROWS_AT_ONCE):
            wanted = ours[1][start : start + ROWS_AT_ONCE]
            places = np.searchsorted(known, wanted)
            found = np.flatnonzero(known[np.minimum(places, len(known) - 1)] == wanted)
            for i, row in zip((start + found).tolist(), order[places[found]].tolist(), strict=True):
                part = self._part(row)
                if _content(part.passages[row - part.first_id]) == _content(passages[i]):  # digests are short
                    vectors[i] = part.vectors[row - part.first_id]
                    is_kept[i] = True
        return is_kept, self._changes(theirs, ours, passages, int(is_kept.sum()))

    @property
    def _n_passages(self) -> int:
        return sum(len(part.passages) for part in self._parts)

    def _passages(self) -> Iterator[Passage]:
        for part in self._parts:
            yield from part.passages

    def _part(self, row: int) -> _Part:
        return next(part for part in reversed(self._parts) if part.first_id <= row and len(part.passages))

    def _changes(
        self, theirs: tuple[Digests, Digests], ours: tuple[Digests, Digests], passages: PassageReader, n_kept: int
    ) -> Changes:
        before, now = _documents(*theirs), _documents(*ours)
        both, old, new = np.intersect1d(before.names, now.names, return_indices=True)
        is_changed = before.contents[old] != now.contents[new]

        def named(rows: NDArray[np.int64], ours: bool) -> Difference:
            rows = np.sort(rows)
            first = rows[:N_NAMED].tolist()
            of = [passages[row] if ours else self._part(row).passages[row - self._part(row).first_id] for row in first]
            return Difference(n=len(rows), first=tuple(passage.document_id for passage in of))

        return Changes(
            added=named(now.rows[~np.isin(now.names, both)], ours=True),
            changed=named(now.rows[new[is_changed]], ours=True),
            removed=named(before.rows[~np.isin(before.names, both)], ours=False),
            n_as_before=int(len(both) - is_changed.sum()),
            n_passages=len(passages),
            n_kept=n_kept,
        )


@dataclass(frozen=True, slots=True)
class _Documents:
    names: Digests  # ascending
    contents: Digests  # of all passages together
    rows: NDArray[np.int64]  # of their first passages


def _documents(names: Digests, contents: Digests) -> _Documents:
    unique, rows, inverse = np.unique(names, return_index=True, return_inverse=True)
    total, numbers = np.zeros(len(unique), np.uint64), np.arange(len(names)) - rows[inverse]  # within its document
    np.add.at(total, inverse, contents * (2 * numbers + 1).astype(np.uint64))  # around 2^64
    return _Documents(unique, total, rows)


def _content(passage: Passage) -> tuple[str, str]:
    return passage.title, passage.text


def _digests(passages: "PassageReader | Iterator[Passage]", n: int) -> tuple[Digests, Digests]:
    """Of the document's id and of title and text, for each passage: 16 bytes of memory."""
    names, contents = np.empty(n, np.uint64), np.empty(n, np.uint64)
    for i, passage in enumerate(passages):
        names[i] = _digest(passage.document_id)
        contents[i] = _digest(f"{len(passage.title)} {passage.title}{passage.text}")
    return names, contents


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
