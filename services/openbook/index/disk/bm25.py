"""BM25 over all passages of a snapshot: one index beside the shards, so that its statistics are of all of them.

bm25/about.json        whose it is, and the other files with size and digest
     data.csc.index.npy, indices.csc.index.npy, indptr.csc.index.npy, vocab.index.json, params.index.json

The last five are as bm25s reads them: for every word the passages that have it, and what it adds to their scores. Each
server maps all of it and reads of every word the part that is of its own shard.
"""

import json
import re
import string
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Literal
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from openbook.core.fingerprint import file_digest
from openbook.core.topk import top_k
from openbook.core.types import Float32, Int64
from openbook.errors import InvalidSnapshot
from openbook.index.disk.arrays import read_array
from openbook.index.disk.records import Record, read_record

FOLDER = "bm25"
ABOUT = "about.json"
DATA, INDICES, INDPTR = "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy"
VOCABULARY, PARAMETERS = "vocab.index.json", "params.index.json"
FILES = (DATA, INDICES, INDPTR, VOCABULARY, PARAMETERS)
PIECE_CHARS = 1 << 16
"""Of the vocabulary, parsed at once: a millisecond."""

# As bm25s.tokenize finds words, and the same for ASCII in a third of the time.
_WORD = re.compile(r"(?u)\b\w\w+\b")
# What nobody sees and may stand within words: joiners, marks of direction, places where a line may be broken.
_UNSEEN = re.compile("[\xad\u200c-\u200f\u202a-\u202e\u2060-\u2069\ufeff]|(?<=[a-z0-9_])\u200b(?=[a-z0-9_])")
_LETTERS = string.ascii_lowercase + string.digits + "_"
_NO_LETTERS = {ord(char): " " for char in map(chr, range(128)) if char not in _LETTERS}


class _File(Record):
    name: Literal[
        "data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy", "vocab.index.json", "params.index.json"
    ]
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: str


class About(Record):
    """What the folder holds."""

    format_version: Literal[1] = 1
    snapshot_id: str  # whose passages these are
    n_passages: Annotated[int, Field(ge=0)]
    bm25s: str  # the version that made it
    files: Annotated[tuple[_File, ...], Field(min_length=len(FILES), max_length=len(FILES))]


def words(text: str) -> list[str]:
    """As bm25s has them of what is seen of a text: lower-case, two letters or more, no stop words."""
    no_words = not_words()
    return [word for word in candidates(text) if word not in no_words]


def candidates(text: str) -> list[str]:
    """The `words` of a text, and some that are `not_words`. It may have accents as signs of their own, as macOS has."""
    lower = text.lower()
    if lower.isascii():
        return lower.translate(_NO_LETTERS).split()
    return _WORD.findall(normalize("NFC", _UNSEEN.sub("", lower)))


@cache
def not_words() -> frozenset[str]:
    """The stop words of English, by bm25s, and single letters."""
    from bm25s.stopwords import STOPWORDS_EN

    return frozenset([*STOPWORDS_EN, *_LETTERS])


def write_about(folder: Path, snapshot_id: str, n_passages: int) -> None:
    """Describe the other files, which are there."""
    import bm25s

    described = [
        {"name": name, "size_bytes": (folder / name).stat().st_size, "sha256": file_digest(folder / name)}
        for name in FILES
    ]
    entries = tuple(map(_File.model_validate, described))
    about = About(snapshot_id=snapshot_id, n_passages=n_passages, bm25s=bm25s.__version__, files=entries)
    _write(folder, about)


def move_bm25(made: Path, snapshot: Path, snapshot_id: str) -> None:
    """Put the index of one folder into another of the same file system: that of a snapshot of the same passages."""
    folder = (made / FOLDER).rename(snapshot / FOLDER)
    _write(folder, read_record(About, folder / ABOUT).model_copy(update={"snapshot_id": snapshot_id}))


def _write(folder: Path, about: About) -> None:
    (folder / ABOUT).write_text(about.model_dump_json(indent=2), encoding="utf-8")


def has_bm25(snapshot: Path) -> bool:
    """Whether the snapshot in this folder has an index of words."""
    return (snapshot / FOLDER / ABOUT).exists()


def verify_bm25(snapshot: Path, snapshot_id: str, n_passages: int) -> None:
    """Read every byte, if there is such an index, and compare.

    Raises:
        InvalidSnapshot: a file is missing, truncated or altered, or it is the index of another snapshot.
    """
    if not has_bm25(snapshot):
        return
    folder = snapshot / FOLDER
    about = _checked(folder, snapshot_id, n_passages)
    for file in about.files:
        path = folder / file.name
        try:
            found = file_digest(path)
        except OSError as error:
            raise InvalidSnapshot(f"{path}: cannot be read: {error.strerror}") from None
        if found != file.sha256:
            raise InvalidSnapshot(f"{path}: was altered: sha256 must be {file.sha256}, found {found}")


class Bm25Index:
    """BM25 of the passages first_id .. first_id + n_passages - 1, under the statistics of all of the snapshot's.

    May be used from several threads. Scores are those of bm25s, whatever part of the passages this is.

    Raises:
        InvalidSnapshot: the folder has no such index, that of another snapshot, or a damaged one.
    """

    def __init__(self, snapshot: Path, snapshot_id: str, first_id: int, n_passages: int) -> None:
        folder = snapshot / FOLDER
        about = _checked(folder, snapshot_id, first_id + n_passages)
        for file in about.files:
            path = folder / file.name
            size_bytes = path.stat().st_size if path.is_file() else -1
            if size_bytes != file.size_bytes:
                raise InvalidSnapshot(f"{path}: must have {file.size_bytes} bytes, found {size_bytes}")
        self.version = about.bm25s
        self._first_id, self._n_passages = first_id, n_passages
        self._data = read_array(folder / DATA, np.float32, (None,))
        self._indices = read_array(folder / INDICES, np.int32, (None,))
        self._indptr = _read_ends(folder / INDPTR)
        self._vocabulary = _read_vocabulary(folder / VOCABULARY)

    def scores(self, question: str) -> Float32:
        """(n_passages,) what the words of a question add up to in each passage; 0 where it has none of them."""
        *_, scores = self.adding_up(question)
        return scores

    def adding_up(self, question: str) -> Iterator[Float32]:
        """The same, one array that grows: before the first word and after each, for who has others waiting."""
        scores = np.zeros(self._n_passages, np.float32)
        yield scores
        for word in words(question):
            if (number := self._vocabulary.get(word)) is not None:
                start, end = int(self._indptr[number]), int(self._indptr[number + 1])
                of_word = self._indices[start:end]  # ascending
                first = start + bisect_left(of_word, self._first_id)
                last = start + bisect_left(of_word, self._first_id + self._n_passages)
                scores[self._indices[first:last] - self._first_id] += self._data[first:last]
                yield scores

    def best(self, scores: Float32, k: int) -> tuple[Int64, Float32]:
        """(k,) ids and scores of the best that have a word of the question, ties by id; then empty slots."""
        kth = np.partition(scores, -k)[-k] if k < len(scores) else np.float32(0)
        candidates = np.flatnonzero(scores >= kth if kth > 0 else scores > 0)
        ids, best = top_k(candidates[None] + self._first_id, scores[None, candidates], k)
        return ids[0], best[0]


def _read_ends(path: Path) -> NDArray[np.int32] | NDArray[np.int64]:
    """Where the postings of each word end, in 4 bytes where these are enough. Raises InvalidSnapshot."""
    with suppress(InvalidSnapshot):
        return read_array(path, np.int32, (None,))
    return read_array(path, np.int64, (None,))


def _read_vocabulary(path: Path) -> dict[str, int]:
    """The number of each word: one object of JSON. It is parsed in pieces, which end at commas, for no word has one:
    as a whole it would let no other thread go on, of millions of words for seconds.

    Raises:
        InvalidSnapshot: it is not.
    """
    numbers: dict[str, int] = {}
    try:
        with path.open(encoding="utf-8") as file:
            rest = ""
            while piece := file.read(PIECE_CHARS):
                whole, comma, rest = (rest + piece).rpartition(",")
                if comma:
                    numbers.update(json.loads("{" + whole.lstrip("{ ") + "}"))
            numbers.update(json.loads("{" + rest.lstrip("{ ")))
    except (OSError, ValueError) as error:
        raise InvalidSnapshot(f"{path}: is no vocabulary: {error}") from None
    return numbers


def _checked(folder: Path, snapshot_id: str, n_passages: int) -> About:
    """What it is, which is of this snapshot and of so many passages or more. Raises InvalidSnapshot."""
    about = read_record(About, folder / ABOUT)
    if about.snapshot_id != snapshot_id:
        raise InvalidSnapshot(f"{folder}: is of snapshot {about.snapshot_id}, not of {snapshot_id}")
    if n_passages > about.n_passages:
        raise InvalidSnapshot(f"{folder}: has {about.n_passages} passages, must have {n_passages}")
    return about
