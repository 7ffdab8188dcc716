"""Passages on disk: one file of texts, one of offsets, both memory mapped, so that 21 million open in no time."""

import mmap
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, overload

import numpy as np
from numpy.lib import format as npy

from openbook.core.types import Passage
from openbook.errors import InvalidDocuments, InvalidSnapshot
from openbook.index.disk.arrays import read_array

TEXTS = "passages.bin"
OFFSETS = "offsets.npy"
FIELDS = 3  # document_id, title, text: each ends where the next begins
BUFFER = 1 << 15  # offsets held in memory


def write_passages(folder: Path, passages: Iterable[Passage], first_id: int = 0) -> int:
    """Write a stream of passages, whose ids count up from `first_id`, through little memory. Returns how many.

    Raises:
        InvalidDocuments: an id out of order, or a text that is not UTF-8.
    """
    size_bytes = 0
    pending = array("q", [0])
    n_passages = 0
    with (folder / TEXTS).open("wb") as texts, (folder / OFFSETS).open("wb") as offsets:
        _write_header(offsets, n_passages)
        for passage in passages:
            if passage.id != first_id + n_passages:
                raise InvalidDocuments(f"passage ids must count up: expected {first_id + n_passages}, got {passage.id}")
            for field in _encoded(passage):
                size_bytes += texts.write(field)
                pending.append(size_bytes)
            n_passages += 1
            if len(pending) >= BUFFER:
                pending.tofile(offsets)
                del pending[:]
        pending.tofile(offsets)
        offsets.seek(0)
        _write_header(offsets, n_passages)  # NumPy pads it, so that any number of rows fits in the same place
    return n_passages


def _encoded(passage: Passage) -> list[bytes]:
    try:
        return [field.encode() for field in (passage.document_id, passage.title, passage.text)]
    except UnicodeEncodeError as error:
        raise InvalidDocuments(f"passage {passage.id}: not UTF-8 text: {error}") from None


def _write_header(offsets: BinaryIO, n_passages: int) -> None:
    npy.write_array_header_1_0(offsets, {"descr": "<i8", "fortran_order": False, "shape": (FIELDS * n_passages + 1,)})


def check_offsets(folder: Path, n_passages: int) -> None:
    """Look whether each text begins where the one before it ends.

    Raises:
        InvalidSnapshot: it does not, or a file is missing or of another size.
    """
    offsets = read_array(folder / OFFSETS, np.int64, (FIELDS * n_passages + 1,))
    size_bytes = (folder / TEXTS).stat().st_size
    if (offsets[0], offsets[-1]) != (0, size_bytes):
        raise InvalidSnapshot(f"{folder / TEXTS}: its {size_bytes} bytes do not belong to {OFFSETS}")
    for start in range(0, len(offsets) - 1, BUFFER):
        if (np.diff(offsets[start : start + BUFFER + 1]) < 0).any():
            raise InvalidSnapshot(f"{folder / OFFSETS}: must ascend, and does not after row {start}")


class PassageReader(Sequence[Passage]):
    """The passages of a folder by position, each read when it is asked for. `first_id` is the id of the first.

    Raises:
        InvalidSnapshot: a file is missing or is not what `write_passages` wrote.
    """

    def __init__(self, folder: Path, first_id: int = 0) -> None:
        self._first_id = first_id
        self._offsets = read_array(folder / OFFSETS, np.int64, (None,))
        try:
            self._texts = _map(folder / TEXTS)
        except (OSError, ValueError) as error:
            raise InvalidSnapshot(f"{folder}: passages cannot be read: {error}") from None
        if len(self._offsets) % FIELDS != 1 or self._offsets[-1] != len(self._texts):
            raise InvalidSnapshot(f"{folder / TEXTS}: its {len(self._texts)} bytes do not belong to {OFFSETS}")

    def __len__(self) -> int:
        return len(self._offsets) // FIELDS

    @overload
    def __getitem__(self, position: int) -> Passage: ...
    @overload
    def __getitem__(self, position: slice) -> list[Passage]: ...
    def __getitem__(self, position: int | slice) -> Passage | list[Passage]:
        if isinstance(position, slice):
            return [self[i] for i in range(*position.indices(len(self)))]
        if not -len(self) <= position < len(self):
            raise IndexError(f"position must be 0..{len(self) - 1}, got {position}")
        position %= len(self)
        a, b, c, d = self._offsets[FIELDS * position : FIELDS * (position + 1) + 1].tolist()
        try:
            fields = [self._texts[start:end].decode() for start, end in ((a, b), (b, c), (c, d))]
        except UnicodeDecodeError as error:
            raise InvalidSnapshot(f"passage {self._first_id + position} is no text in UTF-8: {error.reason}") from None
        return Passage(self._first_id + position, *fields)


def _map(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return b""  # nothing cannot be mapped
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
