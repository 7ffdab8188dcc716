"""Texts on disk: one file of their bytes, one of where each begins, both memory mapped."""

import mmap
from pathlib import Path

import numpy as np

from openbook.errors import InvalidSnapshot
from openbook.index.disk.arrays import ROWS_AT_ONCE, ArrayWriter, read_array


class StringsWriter:
    """Texts one after the other, through little memory. To be closed."""

    def __init__(self, texts: Path, offsets: Path) -> None:
        self._texts = texts.open("wb")
        self._offsets = ArrayWriter(offsets, np.dtype("<i8"))
        self._size_bytes = 0
        self._offsets.append(0)

    def append(self, text: str) -> None:
        """Raises UnicodeEncodeError: it is not UTF-8."""
        self._size_bytes += self._texts.write(text.encode())
        self._offsets.append(self._size_bytes)

    def close(self) -> None:
        """Write what is still held."""
        self._texts.close()
        self._offsets.close()


class Strings:
    """The texts of two files by position, each read when it is asked for.

    Raises:
        InvalidSnapshot: a file is missing or is not what `StringsWriter` wrote.
    """

    def __init__(self, texts: Path, offsets: Path) -> None:
        self._offsets = read_array(offsets, np.dtype("<i8"), (None,))
        try:
            self._texts = _map(texts)
        except (OSError, ValueError) as error:
            raise InvalidSnapshot(f"{texts}: cannot be read: {error}") from None
        if not len(self._offsets) or self._offsets[-1] != len(self._texts):
            raise InvalidSnapshot(f"{texts}: its {len(self._texts)} bytes do not belong to {offsets.name}")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def read_singly(self) -> None:
        """From now on without what lies around a text on the disk: for who reads here and there, not in turn."""
        if isinstance(self._texts, mmap.mmap):
            self._texts.madvise(mmap.MADV_RANDOM)

    def __getitem__(self, position: int) -> str:
        return self._texts[self._offsets.item(position) : self._offsets.item(position + 1)].decode()

    def some(self, first: int, n: int) -> list[str]:
        """As many from a position on. Raises UnicodeDecodeError."""
        places = self._offsets[first : first + n + 1].tolist()
        return [self._texts[places[i] : places[i + 1]].decode() for i in range(n)]

    def undecoded(self, first: int, n: int) -> list[bytes]:
        """As `some`, for who only compares."""
        places = self._offsets[first : first + n + 1].tolist()
        return [self._texts[places[i] : places[i + 1]] for i in range(n)]


def check_strings(texts: Path, offsets: Path, n: int | None) -> int:
    """Look whether each text begins where the one before it ends. Returns how many they are.

    Raises:
        InvalidSnapshot: it does not, they are not `n`, or a file is missing or of another size.
    """
    rows = read_array(offsets, np.dtype("<i8"), (None if n is None else n + 1,))
    size_bytes = texts.stat().st_size
    if not len(rows) or (rows[0], rows[-1]) != (0, size_bytes):
        raise InvalidSnapshot(f"{texts}: its {size_bytes} bytes do not belong to {offsets.name}")
    for start in range(0, len(rows) - 1, ROWS_AT_ONCE):
        if (np.diff(rows[start : start + ROWS_AT_ONCE + 1]) < 0).any():
            raise InvalidSnapshot(f"{offsets}: must ascend, and does not after row {start}")
    return len(rows) - 1


def _map(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        if not path.stat().st_size:
            return b""  # nothing cannot be mapped
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
