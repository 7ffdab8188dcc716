"""What the kernel was told shows in its own tables."""

import ctypes
import mmap
import os
import re
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest

from openbook.errors import InvalidConfig
from openbook.index.shard.memory import SingleRows, in_huge_pages, keep, prewarm


def mapped_kb(path: Path) -> int:
    """How much of a file stands in this process's page tables."""
    _, _, after = Path("/proc/self/smaps").read_text().partition(str(path))
    found = re.search(r"Rss: +(\d+) kB", after)
    assert found is not None
    return int(found[1])


def locked_kb() -> int:
    """How much of this process's memory stays."""
    found = re.search(r"VmLck:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
def test_all_pages_are_there_before_anybody_looks_at_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, n_bytes = tmp_path / "numbers", 32 << 20
    np.ones(n_bytes // 4, np.float32).tofile(path)
    mapped = np.memmap(path, np.float32, "r")
    assert mapped_kb(path) == 0
    first, rest = mapped[: n_bytes // 8], mapped[n_bytes // 8 :]
    monkeypatch.setattr("os.sysconf", lambda name: n_bytes // mmap.PAGESIZE)
    assert prewarm(first, rest) == 1  # with the second it would be more than three quarters of such a machine
    assert mapped_kb(path) == n_bytes >> 11
    monkeypatch.undo()
    assert prewarm(first, rest) == 2
    assert mapped_kb(path) == n_bytes >> 10


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
def test_a_file_is_kept_for_as_long_as_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, n_bytes = tmp_path / "numbers", 4 << 20
    np.ones(n_bytes, np.uint8).tofile(path)
    before = locked_kb()
    held = keep(path)
    assert locked_kb() - before == n_bytes >> 10
    del held
    assert locked_kb() == before
    monkeypatch.setattr("os.sysconf", lambda name: n_bytes // mmap.PAGESIZE)
    with pytest.raises(InvalidConfig, match=r"at most 0\.0 GB are, three quarters of the memory"):
        keep(path)


def pages_in_memory(mapped: np.ndarray[Any, Any]) -> set[int]:
    """Those of its file, whoever reads it."""
    begin = mapped.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    n_bytes = mapped.ctypes.data + mapped.nbytes - begin
    told = np.zeros(-(-n_bytes // mmap.PAGESIZE), np.uint8)
    assert ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, (begin, n_bytes, told.ctypes.data))) == 0
    return set(np.flatnonzero(told & 1).tolist())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
def test_rows_are_read_all_at_once_and_none_with_what_lies_around_them(tmp_path: Path) -> None:
    path, rows = tmp_path / "rows.npy", np.arange(4096 * 768, dtype=np.float32).reshape(4096, 768)
    np.save(path, rows)
    single = SingleRows(path, np.float32, rows.shape)
    with path.open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pages_in_memory(single.rows):
        pytest.skip("the folder for temporary files is in memory")
    single.read(np.array([[4000, 7, -1], [4000, 2048, -1]]))
    wanted = {(128 + 3072 * position + at) // mmap.PAGESIZE for position in (7, 2048, 4000) for at in (0, 3071)}
    give_up = monotonic() + 60
    while pages_in_memory(single.rows) != wanted and monotonic() < give_up:
        sleep(0.001)  # the disk reads them, and nobody waits for it
    assert pages_in_memory(single.rows) == wanted
    assert (single.at(np.array([7, 2048, 4000])) == rows[[7, 2048, 4000]]).all()
    assert single.rows[1000, 0] == 768_000
    assert pages_in_memory(single.rows) == wanted | {(128 + 3072 * 1000) // mmap.PAGESIZE}
    single.are_in_memory = True
    single.read(np.arange(4096))
    assert len(pages_in_memory(single.rows)) == len(wanted) + 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can")
def test_an_array_stands_in_huge_pages() -> None:
    huge = 2 << 20
    array = np.ones(16 * huge, np.uint8)
    if not in_huge_pages(array):
        pytest.skip("this kernel has no huge pages, or not at once")
    found = re.findall(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps").read_text())
    assert sum(map(int, found)) >= 15 * huge >> 10  # but for where it begins and ends
    assert array.all()
