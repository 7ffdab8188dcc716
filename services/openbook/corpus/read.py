"""A corpus to passages: documents from files of any kind (`openbook.corpus.sources`), split into passages."""

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import IO

from openbook.core.documents import Document
from openbook.core.origin import Field
from openbook.core.passages import DEFAULT, split
from openbook.core.splitting import CountTokens, FindSentences, Splitting, not_given
from openbook.core.types import Passage
from openbook.corpus.measures import TokenCounts, sentence_finder
from openbook.corpus.sources.limits import Failure, Limits, OnFailure, raise_it
from openbook.corpus.sources.parsers import parsed
from openbook.corpus.sources.recognise import NAMES, Names
from openbook.corpus.sources.walk import found
from openbook.errors import InvalidDocuments, reason


def read_passages(
    path: Path,
    splitting: Splitting = DEFAULT,
    on_failure: OnFailure = raise_it,
    limits: Limits | None = None,
    n_processes: int = 1,
    fields: tuple[Field, ...] = (),
    count_tokens: CountTokens = not_given,
    names: Names = NAMES,
) -> Iterator[Passage]:
    """The passages of a file or a folder, numbered from 0, always in the same order, however many processes parse. Each
    knows where it comes from.

    Args:
        path: what to read.
        splitting: of documents into passages; DPR's `psgs_w100.tsv` comes already split.
        on_failure: told what cannot be read; the first ends it, if nobody else is.
        limits: of what each file may cost.
        n_processes: that parse.
        fields: that documents may have beside what all have; a value that is not of its type is a failure.
        count_tokens: as the encoder of passages reads them; needed by tokens alone.
        names: what tables and records call text, title and id.

    Raises:
        InvalidConfig: sentences cannot be found, for want of a library.
        InvalidDocuments: nothing is there, or something cannot be read.
    """
    number, counts = count(), TokenCounts(count_tokens)
    find_sentences: FindSentences = sentence_finder() if splitting.at == "sentences" else not_given
    for document in read_documents(path, on_failure, limits or Limits(), n_processes, fields, names):
        for text, origin in split(document, splitting, counts, find_sentences):
            yield Passage(next(number), document.id, document.title, text, origin)


def read_documents(
    path: Path,
    on_failure: OnFailure,
    limits: Limits,
    n_processes: int,
    fields: tuple[Field, ...] = (),
    names: Names = NAMES,
) -> Iterator[Document]:
    """The documents of a file or a folder, as for `read_passages`."""
    if not path.exists():
        raise InvalidDocuments(f"{path}: no such file")
    folder = path if path.is_dir() else path.parent
    for each in parsed(found(path), limits, n_processes, fields, names):
        if isinstance(each, Failure):
            name, slash, inside = each.path.partition("/")
            on_failure(replace(each, path=f"{folder / name}{slash}{inside}"))  # a `Path` would change addresses
        else:
            yield each


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a text file, also gzipped, numbered from 1.

    Raises:
        InvalidDocuments: the file cannot be read, or is not UTF-8.
    """
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except UnicodeDecodeError as error:
        raise InvalidDocuments(f"{path}:{number + 1}: not UTF-8: {error.reason} at byte {error.start}") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidDocuments(f"{path}: cannot be read: {reason(error)}") from None


def _open(path: Path) -> IO[str]:
    """Without the byte order mark that Windows puts before a text."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")
