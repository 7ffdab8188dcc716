"""The BM25 index of a snapshot's words, made in little memory: bit for bit what bm25s computes from all words at once.

Passages are read once. Their words, as numbers, are counted in runs that fit in memory, each sorted and put on disk;
then the runs are merged, some words at a time, and every word's passages written with their scores.
"""

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openbook import files
from openbook.core.types import Int64, Passage
from openbook.errors import InvalidConfig
from openbook.index.disk import bm25
from openbook.index.disk.arrays import ArrayWriter

Int32 = NDArray[np.int32]
Vocabulary = defaultdict[str, int]
K1, B = 1.5, 0.75
TEXTS_AT_ONCE = 1 << 12
AT_ONCE = 1 << 22
"""Words read, then postings merged, in memory together: some 200 MB."""
NO_WORD = -1
"""The number of what is none, in place of one of its own."""
RUN = np.dtype([("word", "<i4"), ("passage", "<i4"), ("count", "<i4")])


def write_bm25(
    snapshot: Path,
    passages: Iterable[Passage],
    snapshot_id: str,
    on_read: Callable[[int], None] = lambda n_passages: None,
    at_once: int = AT_ONCE,
) -> None:
    """Put the index of all passages of a snapshot, in the order of their ids, into its folder.

    It appears there when it is complete. Memory: the vocabulary, 4 bytes a passage and what `at_once` takes; on disk it
    needs 12 bytes a posting for a while beside the 8 that stay. The same passages give the same bytes.

    Args:
        snapshot: the folder.
        passages: with their titles, which count as words too.
        snapshot_id: the snapshot's, so that the index is not taken for another's.
        on_read: told how many passages have been read.
        at_once: how many words, or postings, are held in memory together.

    Raises:
        InvalidConfig: there is one already.
    """
    import bm25s

    folder = snapshot / bm25.FOLDER
    if folder.exists():
        raise InvalidConfig(f"{folder}: exists")
    with files.new_folder(folder) as partial:
        vocabulary: Vocabulary = defaultdict(count().__next__)
        vocabulary.update(dict.fromkeys(bm25.not_words(), NO_WORD))
        with tempfile.TemporaryDirectory(dir=partial) as scratch:
            lengths: Int32 = np.zeros(0, np.int32)
            runs: list[Path] = []
            for numbers, n_words in _portions(passages, vocabulary, on_read, at_once):
                runs.append(Path(scratch) / f"{len(runs)}.npy")
                _put_run(runs[-1], numbers, n_words, len(lengths))
                lengths = np.concatenate([lengths, n_words])
            numbers_of = {word: number for word, number in vocabulary.items() if number != NO_WORD}
            _write_postings(partial, runs, lengths, len(numbers_of), at_once)
        numbers_of.setdefault("", len(numbers_of))  # as bm25s has it, for a question without words
        (partial / bm25.VOCABULARY).write_text(json.dumps(numbers_of, ensure_ascii=False), encoding="utf-8")
        parameters = {
            "k1": K1, "b": B, "delta": 0.5, "method": "lucene", "idf_method": "lucene", "dtype": "float32",
            "int_dtype": "int32", "num_docs": len(lengths), "version": bm25s.__version__, "backend": "numpy",
        }  # fmt: skip
        (partial / bm25.PARAMETERS).write_text(json.dumps(parameters, indent=4), encoding="utf-8")
        bm25.write_about(partial, snapshot_id, len(lengths))


def _portions(
    passages: Iterable[Passage], vocabulary: Vocabulary, on_read: Callable[[int], None], at_once: int
) -> Iterator[tuple[Int32, Int32]]:
    """The words of some passages after the other, and how many each of these passages has.

    A word is a number, which it gets from the vocabulary when it is first asked for. No step is a line of Python for
    each word, which would take as long as finding them.
    """
    numbers: list[Int32] = []
    lengths: list[Int32] = []
    unread, n_read = iter(passages), 0
    while some := list(islice(unread, TEXTS_AT_ONCE)):
        found = [bm25.candidates(f"{passage.title}. {passage.text}") for passage in some]
        n_all = list(map(len, found))
        all_numbers = np.fromiter(map(vocabulary.__getitem__, chain.from_iterable(found)), np.int32, sum(n_all))
        counts = all_numbers != NO_WORD
        numbers.append(all_numbers[counts])
        of_passage = np.repeat(np.arange(len(some)), n_all)
        lengths.append(np.bincount(of_passage[counts], minlength=len(some)).astype(np.int32))
        n_read += len(some)
        on_read(n_read)
        if sum(map(len, numbers)) >= at_once:
            yield np.concatenate(numbers), np.concatenate(lengths)
            numbers, lengths = [], []
    if lengths:
        yield np.concatenate(numbers), np.concatenate(lengths)


def _put_run(path: Path, numbers: Int32, n_words: Int32, first: int) -> None:
    """The postings of the passages from `first` on, by word, then passage."""
    passages = np.repeat(np.arange(len(n_words)), n_words)
    keys, counts = np.unique(numbers.astype(np.int64) * len(n_words) + passages, return_counts=True)
    run = np.empty(len(keys), RUN)
    run["word"], run["passage"], run["count"] = keys // len(n_words), first + keys % len(n_words), counts
    np.save(path, run)


def _of_words(path: Path, first: int, last: int) -> NDArray[Any]:
    """Of a run, the postings of words first .. last - 1. Mapped for so long only, or all runs would stay in memory."""
    run = np.load(path, mmap_mode="r")
    ends = np.searchsorted(run["word"], np.array((first, last), np.int32))  # of another type it would copy the run
    return np.array(run[slice(*ends)])


def _write_postings(folder: Path, runs: Sequence[Path], lengths: Int32, n_words: int, at_once: int) -> None:
    """What each word adds to the scores of its passages: idf * tf / (tf + k1 (1 - b + b length / average length))."""
    held_by = np.zeros(n_words, np.int64)  # passages
    for run in runs:
        held_by += np.bincount(_of_words(run, 0, n_words)["word"], minlength=n_words)
    idf = np.array([math.log(1 + (len(lengths) - n + 0.5) / (n + 0.5)) for n in held_by.tolist()], np.float32)
    weights = K1 * ((1 - B) + B * lengths / (lengths.mean() or 1))
    ends = np.concatenate([[0], np.cumsum(held_by)])
    np.save(folder / bm25.INDPTR, ends.astype(np.int32 if ends[-1] < 1 << 31 else np.int64))
    data = ArrayWriter(folder / bm25.DATA, np.dtype(np.float32))
    indices = ArrayWriter(folder / bm25.INDICES, np.dtype(np.int32))
    for first, last in _ranges(ends, at_once):
        merged = np.concatenate([_of_words(run, first, last) for run in runs])
        merged = merged[np.argsort(merged["word"], kind="stable")]  # runs are in the order of their passages
        tf = merged["count"].astype(np.float64)
        data.extend(idf[merged["word"]] * (tf / (weights[merged["passage"]] + tf)))
        indices.extend(merged["passage"])
    data.close()
    indices.close()


def _ranges(ends: Int64, at_once: int) -> Iterator[tuple[int, int]]:
    """Words first .. last - 1 that have so many postings together at the most; a word with more is alone."""
    first = 0
    while first < len(ends) - 1:
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + at_once, "right")) - 1)
        yield first, last
        first = last
