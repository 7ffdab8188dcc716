"""Documents from files: JSON lines, or DPR's `psgs_w100.tsv`, which comes already split. Either may be gzipped."""

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from openbook.core.passages import WORDS_PER_PASSAGE, Document, split_words
from openbook.core.types import Passage
from openbook.errors import InvalidDocuments

if TYPE_CHECKING:
    import _csv

MAX_FIELD_CHARS = 100_000_000


def read_passages(path: Path, n_words: int = WORDS_PER_PASSAGE) -> Iterator[Passage]:
    """The passages of a corpus, numbered from 0 in the order of the file.

    Raises:
        InvalidDocuments: the file is missing, of an unknown kind, not UTF-8, or a line is not a document.
    """
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    if suffixes[-1:] == [".tsv"]:
        # psgs_w100.tsv holds passages of 100 words: one document each.
        pieces = ((document, document.text) for document in _read_tsv(path))
    elif suffixes[-1:] in ([".jsonl"], [".json"]):
        pieces = (
            (document, text) for document in _read_json_lines(path) for text in split_words(document.text, n_words)
        )
    else:
        raise InvalidDocuments(f"{path}: documents must be .jsonl or .tsv, or one of them .gz")
    for number, (document, text) in enumerate(pieces):
        yield Passage(number, document.id, document.title, text)


def _read_json_lines(path: Path) -> Iterator[Document]:
    for number, line in lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # also of numbers too long, and of brackets too deep
            raise InvalidDocuments(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise InvalidDocuments(f"{path}:{number}: must be an object with id, title and text")
        record.setdefault("id", record.get("_id"))  # as BEIR calls it
        for field in ("id", "title", "text"):
            if not isinstance(record.get(field), str | int) or isinstance(record[field], bool):
                raise InvalidDocuments(f"{path}:{number}: {field} must be a string, got {record.get(field)!r}")
        yield _document(path, number, str(record["id"]), str(record["title"]), str(record["text"]))


def _read_tsv(path: Path) -> Iterator[Document]:
    csv.field_size_limit(MAX_FIELD_CHARS)
    rows = csv.reader((line for _, line in lines(path)), delimiter="\t")
    for row in _parsed(path, rows):
        if rows.line_num == 1 and row == ["id", "text", "title"]:
            continue
        if len(row) != 3:
            raise InvalidDocuments(f"{path}:{rows.line_num}: must have 3 columns (id, text, title), got {len(row)}")
        yield _document(path, rows.line_num, row[0], row[2], row[1])


def _parsed(path: Path, rows: "_csv.Reader") -> Iterator[list[str]]:
    try:
        yield from rows
    except csv.Error as error:
        raise InvalidDocuments(f"{path}:{rows.line_num}: not tab-separated values: {error}") from None


def _document(path: Path, number: int, id: str, title: str, text: str) -> Document:
    try:
        # JSON's escapes can spell half a character, which nothing behind us could store.
        (id + title + text).encode()
    except UnicodeEncodeError as error:
        raise InvalidDocuments(f"{path}:{number}: not UTF-8: {error.reason}") from None
    return Document(id, title, text)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file, also gzipped, numbered from 1. Raises InvalidDocuments as `read_passages`."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except UnicodeDecodeError as error:
        raise InvalidDocuments(f"{path}:{number + 1}: not UTF-8: {error.reason} at byte {error.start}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidDocuments(f"{path}: cannot be read: {error}") from None


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")
