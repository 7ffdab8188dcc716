import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.core.documents import Document
from openbook.core.passages import split
from openbook.core.splitting import Splitting
from openbook.corpus.read import read_passages
from openbook.corpus.sources.limits import Failure, Limits
from openbook.errors import InvalidDocuments


def write_jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_documents_become_numbered_passages_that_know_their_document(tmp_path: Path) -> None:
    text = " ".join(f"w{i}" for i in range(5))
    path = write_jsonl(
        tmp_path / "a.jsonl", {"id": "x", "title": "X", "text": text}, {"id": 7, "title": "Y", "text": "z"}
    )
    passages = list(read_passages(path, Splitting(2)))
    assert [(p.id, p.document_id, p.title, p.text) for p in passages] == [
        (0, "x", "X", "w0 w1"),
        (1, "x", "X", "w2 w3"),
        (2, "x", "X", "w4"),
        (3, "7", "Y", "z"),
    ]


def test_beirs_corpus_is_read(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "corpus.jsonl", {"_id": "4983", "title": "", "text": "some words", "metadata": {}})
    assert [(p.document_id, p.title, p.text) for p in read_passages(path)] == [("4983", "", "some words")]


def test_dpr_passages_are_taken_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "psgs_w100.tsv.gz"
    long = " ".join(["word"] * 150)
    with gzip.open(path, "wt") as file:
        file.write(f'id\ttext\ttitle\n1\t"Aaron said ""no"" twice"\tAaron\n2\t{long}\t"The ""Book"""\n')
    first, second = read_passages(path)
    assert (first.document_id, first.title, first.text) == ("1", "Aaron", 'Aaron said "no" twice')
    assert (second.title, second.text) == ('The "Book"', long)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"id": "1", "title": "t"}\n', r"a\.jsonl:1: has no text or .* or body; --text names another$"),
        (b'{"id": "1", "title": "t", "text": "x"}\n[1]\n', r"a\.jsonl:2: must be an object"),
        (b'\n{"id": \n', r"a\.jsonl:2: not JSON"),
        (b'{\n{"id": "1", "title": "t", "text": "x"}\n', r"a\.jsonl:1: not JSON"),
        (b'["t"]\n{"id": "1", "title": "t", "text": "x"}\n', r"a\.jsonl:1: must be an object"),
        (b'{"id": "1", "title": "t", "text": "\xff"}\n', r"a\.jsonl:1: not UTF-8"),
        (b'{"id": "1", "title": "t", "text": "\\ud800"}\n', r"a\.jsonl:1: not UTF-8"),
        (b'{"id": "1", "title": "t", "text": true}\n', r"a\.jsonl:1: text must be a string, got True"),
        (b"[" * 100_000, r"a\.jsonl:1: not JSON"),
        (b'{"id": ' + b"9" * 5000, r"a\.jsonl:1: not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidDocuments, match=message):
        list(read_passages(path))


def test_an_id_of_too_many_digits_is_told_with_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"id": {"9" * 5000}, "text": "x"}}\n')
    with pytest.raises(InvalidDocuments) as raised:
        list(read_passages(path))
    assert str(raised.value) == f"{path}:1: id must have at most 4300 digits, got 5000"


def test_what_each_passage_has_again_is_short(tmp_path: Path) -> None:
    record = {"id": "1", "title": "t" * 5000, "text": "x"}
    path = write_jsonl(tmp_path / "a.jsonl", record | {"id": "x" * 16384}, record | {"id": "x" * 16385})
    failures: list[Failure] = []
    (passage,) = read_passages(path, on_failure=failures.append)
    assert passage.title == "t" * 4096
    assert failures == [Failure(f"{path}:2", "id must have at most 16384 characters, got 16385")]


def test_a_missing_file_and_a_cut_or_damaged_archive_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocuments, match=r"none\.jsonl: no such file"):
        list(read_passages(tmp_path / "none.jsonl"))
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b'{"id": "1", "title": "t", "text": "x"}\n' * 9)[:-12])
    with pytest.raises(InvalidDocuments, match=r"cut\.jsonl\.gz: EOFError: Compressed file ended before"):
        list(read_passages(cut))
    damaged = bytearray(gzip.compress(b'{"id": "1", "title": "t", "text": "x"}\n'))
    damaged[12:16] = b"\xff\xff\xff\xff"
    cut.write_bytes(damaged)
    with pytest.raises(InvalidDocuments, match=r"cut\.jsonl\.gz: error: Error -3 while decompressing"):
        list(read_passages(cut))


def test_a_quote_that_never_ends_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text('1\tfine\tt\n2\t"never closed\tt\n' + "3\tand so on\tt\n" * 9)
    with pytest.raises(InvalidDocuments, match=r"a\.tsv: line 2: not separated values: field larger than.*: what lies"):
        list(read_passages(path, limits=Limits(document_bytes=30)))


@pytest.mark.parametrize(
    ("content", "n_read", "line"),
    [
        ('id\ttext\n1\tone\n2\t"Hello world, he began\n3\tthree\n4\tfour\n', 1, 3),
        ('id\t"text\n1\tone\n', 0, 1),
        ('id\ttext\n1\t"cut off', 0, 2),
    ],
)
def test_a_stray_quote_is_named_where_it_takes_all_rows_behind_it(
    tmp_path: Path, content: str, n_read: int, line: int
) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(content)
    failures: list[Failure] = []
    assert len(list(read_passages(path, on_failure=failures.append))) == n_read
    assert failures == [Failure(str(path), f"line {line}: a quote that never ends: what lies behind it is left out")]


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n"])
def test_a_quote_that_ends_with_its_file_is_no_stray_one(tmp_path: Path, end: str) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(f'id\ttext\n1\t"one\n and a half"{end}', newline="")
    assert [passage.text for passage in read_passages(path)] == ["one and a half"]


@settings(max_examples=50)
@given(st.text(), st.integers(1, 7))
def test_splitting_loses_no_word_and_makes_none_too_long(text: str, n_words: int) -> None:
    pieces = [piece for piece, _ in split(Document("id", "title", text), Splitting(n_words))]
    assert " ".join(pieces).split() == text.split()
    assert all(1 <= len(piece.split()) <= n_words for piece in pieces)
    assert all(len(piece.split()) == n_words for piece in pieces[:-1])
