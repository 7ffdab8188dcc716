from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.core.types import Passage
from openbook.errors import InvalidDocuments, InvalidSnapshot
from openbook.index.disk import store
from openbook.index.disk.arrays import ROWS_AT_ONCE
from openbook.index.disk.store import PassageReader, write_passages

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
    n = ROWS_AT_ONCE
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
