"""NumPy's files in a snapshot: mapped, and looked at for what neither a search nor a fetch can be right with."""

import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray

from openbook.errors import InvalidSnapshot, StartupError

Exact = NDArray[np.float32] | NDArray[np.float16]
"""Vectors that scores are computed from."""

PARSING = threading.Lock()
"""NumPy parses headers as Python, whose parser can fail where several threads are at it: 3.11, SystemError."""

ROWS_AT_ONCE = 1 << 14
ROUNDING = 1e-9
"""Relative, of a norm in float64: other processors add in another order."""


class ArrayWriter:
    """A one-dimensional array written row by row, through little memory: nobody knows yet how long it will be.

    Rows are numbers, or tuples of a structured type. To be closed.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._file = path.open("wb")
        self._rows: list[Any] = []
        self._n_written = 0
        self._write_header()

    def __len__(self) -> int:
        return self._n_written + len(self._rows)

    def append(self, row: Any) -> None:
        """One more."""
        self._rows.append(row)
        if len(self._rows) >= ROWS_AT_ONCE:
            self._flush()

    def extend(self, rows: NDArray[Any]) -> None:
        """Many more."""
        self._flush()
        rows.astype(self._dtype, copy=False).tofile(self._file)
        self._n_written += len(rows)

    def close(self) -> None:
        """Write what is still held, and how many they are."""
        self._flush()
        self._file.seek(0)
        self._write_header()  # NumPy pads it, so that any number of rows fits in the same place
        self._file.close()

    def _flush(self) -> None:
        np.array(self._rows, self._dtype).tofile(self._file)
        self._n_written += len(self._rows)
        self._rows.clear()
        self._file.flush()

    def _write_header(self) -> None:
        descr = npy.dtype_to_descr(self._dtype)
        npy.write_array_header_1_0(self._file, {"descr": descr, "fortran_order": False, "shape": (self._n_written,)})


def new_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> "np.memmap[Any, np.dtype[Any]]":
    """An array of zeros, mapped from a new file that has all its room on the disk: a store into a mapping of a full one
    would kill us without a word.

    Raises:
        StartupError: there is no such room.
    """
    size_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        array = np.lib.format.open_memmap(path, "w+", dtype, shape)
        if hasattr(os, "posix_fallocate"):  # macOS has none
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise StartupError(f"{path}: {size_bytes} bytes are needed: {error.strerror}") from None
    return array


def read_array(path: Path, dtype: "type[np.generic] | np.dtype[Any]", shape: tuple[int | None, ...]) -> NDArray[Any]:
    """The array in a file, memory mapped. None in the shape is any number.

    Raises:
        InvalidSnapshot: the file cannot be read, or holds another type or shape.
    """
    try:
        with PARSING:
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidSnapshot(f"{path}: is no array: {error}") from None
    fits = len(mapped.shape) == len(shape) and all(n in (None, m) for n, m in zip(shape, mapped.shape, strict=True))
    if mapped.dtype != dtype or not fits or not mapped.flags.c_contiguous:
        wanted = f"{np.dtype(dtype)} of shape {shape}"
        raise InvalidSnapshot(f"{path}: must hold {wanted}, found {mapped.dtype} of shape {mapped.shape}")
    array: NDArray[Any] = mapped.view(np.ndarray)  # as a memmap every slice costs microseconds
    return array


def check_vectors(path: Path, dtype: type[np.generic], shape: tuple[int, int], max_norm: float) -> None:
    """Look at every number of (n, d) vectors.

    Raises:
        InvalidSnapshot: as `read_array`; a vector with NaN or infinity in it, or longer than `max_norm`.
    """
    vectors = read_array(path, dtype, shape)
    for start in range(0, len(vectors), ROWS_AT_ONCE):
        norms = row_norms(vectors[start : start + ROWS_AT_ONCE])
        good = norms <= max_norm * (1 + ROUNDING)  # NaN is not
        if not good.all():
            row = int(np.argmin(good))
            raise InvalidSnapshot(f"{path}: row {start + row}: norm must be at most {max_norm}, found {norms[row]}")


def row_norms(block: Exact) -> NDArray[np.float64]:
    """(n,) Euclidean norms of (n, d) vectors, in float64."""
    norms: NDArray[np.float64] = np.linalg.norm(block.astype(np.float64), axis=1)
    return norms
