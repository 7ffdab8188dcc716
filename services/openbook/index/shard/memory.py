"""What Linux is told about the memory that searches read."""

import ctypes
import mmap
import os
import sys
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from openbook.core.types import Float32, Int64
from openbook.errors import InvalidConfig
from openbook.index.disk.arrays import Exact, read_array
from openbook.processes import memory_bytes

_MADV_RANDOM = 1
_MADV_WILLNEED = 3  # reads in large pieces; to enter pages of a file that is read at random reads each by itself
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_COLLAPSE = 25


def prewarm(*mapped: NDArray[np.generic]) -> int:
    """Enter all pages of mapped arrays into this process's tables; of how many of them, the first ones first.

    Each page would otherwise cost the search that first touches it a microsecond, and a search touches hundreds; where
    it is still on disk, a tenth of a millisecond, and Linux reads it by itself alone. Linux 5.14 and newer can. What
    would take more than three quarters of the memory is left: it would push itself out again.
    """
    if sys.platform != "linux":
        return 0
    limit, total = _limit(), 0
    for n_done, each in enumerate(mapped):
        total += each.nbytes
        if total > limit or not (_advise(each, _MADV_WILLNEED) and _advise(each, _MADV_POPULATE_READ)):
            return n_done
    return len(mapped)


def keep(path: Path) -> mmap.mmap:
    """Read a file into memory, where it stays as long as what is returned: Linux pushes out none of it for what else is
    read, however it is mapped by others.

    Raises:
        InvalidConfig: this process may not lock as much, or it would be more than three quarters of the memory.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    address = np.frombuffer(mapped, np.uint8).ctypes.data
    libc, why = ctypes.CDLL(None, use_errno=True), ""
    if len(mapped) > _limit():
        why = f"at most {_limit() / 1e9:.1f} GB are, three quarters of the memory"
    elif libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(mapped))):
        why = f"{os.strerror(ctypes.get_errno())}; `ulimit -l` must allow as much"
    if why:
        raise InvalidConfig(
            f"index_server.keep_in_memory: the {len(mapped) / 1e9:.1f} GB of {path} cannot be kept: {why}"
        )
    return mapped


class SingleRows:
    """(n, d) rows of a mapped file that are looked at here and there: Linux reads none with what lies around it, and
    all that are asked for at once.

    By default a row that is not in memory is read when its turn comes, while all others wait, and with it as much as
    the disk reads ahead. On some that is 8 MB: for the 40 candidates of one query 190 MB were read, and as much else
    was pushed out of memory.
    """

    def __init__(self, path: Path, dtype: "type[np.generic]", shape: tuple[int, int]) -> None:
        """Raises InvalidSnapshot as `read_array`."""
        self.rows: Exact = read_array(path, dtype, shape)
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._n_bytes = self.rows.itemsize * shape[1]
        self._begin = path.stat().st_size - self.rows.nbytes
        self.are_in_memory = False  # all of them, as far as it is known
        if sys.platform == "linux":
            _advise(self.rows, _MADV_RANDOM)

    def read(self, positions: Int64) -> None:
        """Those at positions of any shape, -1 for none, before they are looked at one after the other."""
        if sys.platform == "linux" and not self.are_in_memory:
            for position in np.unique(positions[positions >= 0]).tolist():
                begin = self._begin + position * self._n_bytes
                os.posix_fadvise(self._file, begin, self._n_bytes, os.POSIX_FADV_WILLNEED)

    def at(self, positions: Int64) -> Float32:
        """(n, d), those at (n,) positions."""
        self.read(positions)
        return self.rows[positions].astype(np.float32, copy=False)


def in_huge_pages(array: NDArray[np.generic]) -> bool:
    """Have an array of this process's own stand in pages of 2 MB, a twentieth to a tenth less for searches that jump.

    Linux 6.1 and newer can at once, 2.6.38 and newer by and by; whether it could at once.
    """
    return sys.platform == "linux" and _advise(array, _MADV_HUGEPAGE) and _advise(array, _MADV_COLLAPSE)


def _limit() -> int:
    """Bytes: three quarters of the memory that there is for this process."""
    return memory_bytes() * 3 // 4


def _advise(array: NDArray[np.generic], advice: int) -> bool:
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = array.ctypes.data + array.nbytes - begin
    done: int = ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
    return done == 0
