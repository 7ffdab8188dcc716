"""The same documents from every format, and one line for each that is hostile."""

import csv
import io
import sys
from pathlib import Path

import every_format as formats
import pytest
from every_format import DOCUMENTS, EACH, TOGETHER
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.core.passages import Document
from openbook.corpus.read import read_documents, read_passages
from openbook.corpus.sources import tables
from openbook.corpus.sources.limits import MB, Budget, Failure, Limits
from openbook.corpus.sources.opened import Opened


def read(path: Path, limits: Limits | None = None, n_processes: int = 1) -> tuple[list[Document], list[Failure]]:
    failures: list[Failure] = []
    documents = list(read_documents(path, failures.append, limits or Limits(), n_processes))
    return documents, failures


def words(documents: list[Document]) -> list[tuple[str, str]]:
    return [(document.title, " ".join(document.text.split())) for document in documents]


EXPECTED = [(title, " ".join(text.split())) for title, text in DOCUMENTS]


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    """In one folder, by one reader: each is a folder or a file, and all are read one after the other."""
    parts = {
        **{name: {name: write(DOCUMENTS)} for name, write in TOGETHER.items()},
        **{ending: formats.files(ending, DOCUMENTS) for ending in EACH},
        "zip": {"all.zip": formats.zipped(formats.files(".md", DOCUMENTS))},
        "tar": {"all.tar": formats.tarred(formats.files(".pdf", DOCUMENTS))},
    }
    for number, members in enumerate(parts.values()):
        formats.write(tmp_path / f"{number:02}", members)
    documents, failures = read(tmp_path)
    assert failures == []
    for number, part in enumerate(parts):
        of_part = [document for document in documents if document.path.startswith(f"{number:02}/")]
        assert words(of_part) == EXPECTED, part
    again, _ = read(tmp_path, n_processes=2)
    assert again == documents


@pytest.mark.parametrize("name", TOGETHER)
def test_a_file_is_recognised_by_its_content(name: str) -> None:
    from openbook.corpus.sources.recognise import recognise

    content = TOGETHER[name](DOCUMENTS)
    assert recognise(content[: 1 << 16], "nameless") == recognise(content[: 1 << 16], name.removesuffix(".gz"))
