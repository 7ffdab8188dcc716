"""What a former snapshot of a corpus, or an interrupted build, is good for: the embeddings of passages that it has."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

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
    """One shard of the former snapshot, or all of a build."""

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
        self.exact_dtype = manifest.exact_dtype
        self._parts = []
        for shard, entry in enumerate(manifest.shards):
            snapshot.verify(shard, with_words=shard == 0)  # they are of all shards
            files = snapshot.shard_folder(shard)
            vectors = read_array(files / VECTORS, manifest.vectors_dtype, (entry.n_passages, manifest.dimension))
            self._parts.append(_Part(entry.first_id, PassageReader(files, entry.first_id), vectors))

    def take(self, passages: PassageReader, vectors: NDArray[np.float32]) -> tuple[NDArray[np.bool_], Changes]:
        """Copy the embeddings of all passages that are known, title and text, to their rows.

        Returns:
            which of the passages they are, and what has changed.
        """
        theirs = _digests([part.passages for part in self._parts])
        ours = _digests([passages])
        is_kept = np.zeros(len(passages), np.bool_)
        _copy(self._parts, np.argsort(theirs[1], kind="stable"), theirs[1], passages, ours[1], vectors, is_kept)
        return is_kept, self._changes(theirs, ours, passages, int(is_kept.sum()))

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


def take_left(
    folder: Path,
    is_there: NDArray[np.bool_],
    passages: PassageReader,
    vectors: NDArray[np.float32],
    is_kept: NDArray[np.bool_],
) -> None:
    """As `Former.take`, of a build that was interrupted: the embeddings that are there of passages not kept yet, which
    then are.
    """
    part = _Part(0, PassageReader(folder), np.load(folder / VECTORS, mmap_mode="r"))
    theirs, ours = _digests([part.passages])[1], _digests([passages])[1]
    order = np.argsort(theirs, kind="stable")
    _copy([part], order[is_there[order]], theirs, passages, ours, vectors, is_kept)


def _copy(
    parts: Sequence[_Part],
    order: NDArray[np.int64],
    theirs: Digests,
    passages: PassageReader,
    ours: Digests,
    vectors: NDArray[np.float32],
    is_kept: NDArray[np.bool_],
) -> None:
    """The embeddings of passages whose digests are among theirs; `order` is of those that have one, ascending."""
    known = theirs[order]
    for start in range(0, len(passages) if len(known) else 0, ROWS_AT_ONCE):
        wanted = ours[start : start + ROWS_AT_ONCE]
        places = np.searchsorted(known, wanted)
        is_known = known[np.minimum(places, len(known) - 1)] == wanted
        found = np.flatnonzero(is_known & ~is_kept[start : start + ROWS_AT_ONCE])
        mine, row_of = start + found, order[places[found]]
        for part in parts:
            here = np.flatnonzero((part.first_id <= row_of) & (row_of < part.first_id + len(part.passages)))
            pairs = zip(mine[here].tolist(), (row_of[here] - part.first_id).tolist(), strict=True)
            same = [_content(part.passages, row) == _content(passages, i) for i, row in pairs]  # digests are short
            kept = here[np.array(same, np.bool_)]
            vectors[mine[kept]] = part.vectors[row_of[kept] - part.first_id]
            is_kept[mine[kept]] = True


@dataclass(frozen=True, slots=True)
class _Documents:
    names: Digests  # ascending
    contents: Digests  # of all passages together
    rows: NDArray[np.int64]  # of their first passages


def _documents(names: Digests, contents: Digests) -> _Documents:
    unique, rows, inverse, counts = np.unique(names, return_index=True, return_inverse=True, return_counts=True)
    total, numbers = np.zeros(len(unique), np.uint64), np.empty(len(names), np.int64)
    # Each passage's number within its document, whose passages need not lie together.
    numbers[np.argsort(inverse, kind="stable")] = np.arange(len(names)) - np.repeat(counts.cumsum() - counts, counts)
    np.add.at(total, inverse, contents * (2 * numbers + 1).astype(np.uint64))  # around 2^64
    return _Documents(unique, total, rows)


def _content(passages: PassageReader, position: int) -> list[bytes]:
    """Title and text."""
    return passages.undecoded(position)[1:]


def _digests(parts: Sequence[PassageReader]) -> tuple[Digests, Digests]:
    """Of the document's id and of title and text, for each passage: 16 bytes of memory."""
    names, contents = bytearray(), bytearray()
    for passages in parts:
        for i in range(len(passages)):
            document_id, title, text = passages.undecoded(i)
            names += _digest(document_id)
            contents += _digest(b"%d %b%b" % (len(title), title, text))
    return np.frombuffer(names, np.uint64), np.frombuffer(contents, np.uint64)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=8).digest()
