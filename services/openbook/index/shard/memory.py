"""What Linux is told about the memory that searches read."""

import ctypes
import mmap
import os
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from openbook.errors import InvalidConfig

_MADV_WILLNEED = 3  # reads in large pieces; to enter pages of a file that is read at random reads each by itself
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_COLLAPSE = 25


def prewarm(*mapped: NDArray[np.generic]) -> int:
    """Enter all pages of mapped arrays into this process's tables; of how many of them, the first ones first.

    Each page would otherwise cost the search that first touches it a microsecond, and a search touches hundreds; where
    it is still on disk, a tenth of a millisecond, and Linux reads it by itself alone. Linux 5.14 and newer can. What
    would take more than three quarters of the machine's memory is left: it would push itself out again.
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


def in_huge_pages(array: NDArray[np.generic]) -> bool:
    """Have an array of this process's own stand in pages of 2 MB, a twentieth to a tenth less for searches that jump.

    Linux 6.1 and newer can at once, 2.6.38 and newer by and by; whether it could at once.
    """
    return sys.platform == "linux" and _advise(array, _MADV_HUGEPAGE) and _advise(array, _MADV_COLLAPSE)


def _limit() -> int:
    """Bytes: three quarters of the machine's memory."""
    return mmap.PAGESIZE * os.sysconf("SC_PHYS_PAGES") * 3 // 4


def _advise(array: NDArray[np.generic], advice: int) -> bool:
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = array.ctypes.data + array.nbytes - begin
    done: int = ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
    return done == 0
