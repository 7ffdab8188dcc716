"""What Linux is told about the memory that searches read."""

import ctypes
import mmap
import os
import sys

import numpy as np
from numpy.typing import NDArray

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
    limit, total = mmap.PAGESIZE * os.sysconf("SC_PHYS_PAGES") * 3 // 4, 0
    for n_done, each in enumerate(mapped):
        total += each.nbytes
        if total > limit or not (_advise(each, _MADV_WILLNEED) and _advise(each, _MADV_POPULATE_READ)):
            return n_done
    return len(mapped)


def in_huge_pages(array: NDArray[np.generic]) -> bool:
    """Have an array of this process's own stand in pages of 2 MB, a twentieth to a tenth less for searches that jump.

    Linux 6.1 and newer can at once, 2.6.38 and newer by and by; whether it could at once.
    """
    return sys.platform == "linux" and _advise(array, _MADV_HUGEPAGE) and _advise(array, _MADV_COLLAPSE)


def _advise(array: NDArray[np.generic], advice: int) -> bool:
    begin = array.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    size = array.ctypes.data + array.nbytes - begin
    done: int = ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), advice)
    return done == 0
