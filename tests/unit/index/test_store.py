import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.core.types import Passage
from openbook.errors import InvalidDocuments, InvalidSnapshot
from openbook.index import store
from openbook.index.store import PassageReader, prewarm, write_passages

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=30)
@given(texts=st.lists(st.tuples(TEXT, TEXT, TEXT), max_size=20), first_id=st.integers(0, 2**40))
def test_passages_come_back_whatever_is_in_them(
    tmp_path: Path, texts: list[tuple[str, str, str]], first_id: int
) -> None:
    passages = [Passage(first_id + i, *fields) for i, fields in enumerate(texts)]
    assert write_passages(tmp_path, iter(passages), first_id) == len(passages)
    reader = PassageReader(tmp_path, first_id)
    assert list(reader) == passages
    assert reader[1:-1] == passages[1:-1]


def test_more_passages_than_are_held_in_memory(tmp_path: Path) -> None:
    n = store.BUFFER
    write_passages(tmp_path, (Passage(i, str(i), "", "x" * (i % 7)) for i in range(n)))
    reader = PassageReader(tmp_path)
    assert len(reader) == n
    for i in (0, n // 3, n - 1):
        assert reader[i] == reader[i - n] == Passage(i, str(i), "", "x" * (i % 7))
    with pytest.raises(IndexError, match=f"got {n}"):
        reader[n]


def test_ids_must_count_up(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocuments, match="expected 6, got 7"):
        write_passages(tmp_path, [Passage(5, "", "", ""), Passage(7, "", "", "")], first_id=5)


def test_a_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocuments, match="passage 0: not UTF-8"):
        write_passages(tmp_path, [Passage(0, "d", "\ud800", "")])


@pytest.mark.parametrize("name", [store.TEXTS, store.OFFSETS])
def test_a_missing_or_truncated_file_is_not_read(tmp_path: Path, name: str) -> None:
    write_passages(tmp_path, [Passage(0, "d", "t", "text")])
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidSnapshot, match=str(tmp_path)):
        PassageReader(tmp_path)
    path.unlink()
    with pytest.raises(InvalidSnapshot, match=name):
        PassageReader(tmp_path)


def mapped_kb(path: Path) -> int:
    """How much of a file stands in this process's page tables."""
    _, _, after = Path("/proc/self/smaps").read_text().partition(str(path))
    found = re.search(r"Rss: +(\d+) kB", after)
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
    assert prewarm(first, rest) == 1  # the second would be more than half of such a machine
    assert mapped_kb(path) == n_bytes >> 11
    monkeypatch.undo()
    assert prewarm(first, rest) == 2
    assert mapped_kb(path) == n_bytes >> 10
