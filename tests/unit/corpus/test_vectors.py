"""Embeddings that exist already, in every format: gathered into one array, or refused with what is wrong."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from openbook.core.types import Float32
from openbook.corpus.pickled import read_pairs
from openbook.corpus.vectors import described, gathered
from openbook.errors import InvalidDocuments

N, D = 20, 6
VECTORS = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)


def table(vectors: Float32, *, fixed: bool = True) -> Any:
    numbers = pa.array(vectors.reshape(-1))
    lists = (
        pa.FixedSizeListArray.from_arrays(numbers, D) if fixed else pa.array(vectors.tolist(), pa.list_(pa.float32()))
    )
    return pa.table({"id": [str(i) for i in range(len(vectors))], "embedding": lists, "n": list(range(len(vectors)))})


def write_npy(path: Path, vectors: Float32) -> None:
    with path.open("wb") as file:  # or it would get a suffix
        np.save(file, vectors.astype(np.float64))


def write_parquet(path: Path, vectors: Float32) -> None:
    pq.write_table(table(vectors), path, row_group_size=7)


def write_parquet_of_lists(path: Path, vectors: Float32) -> None:
    pq.write_table(table(vectors, fixed=False), path)


def write_feather(path: Path, vectors: Float32) -> None:
    feather.write_feather(table(vectors, fixed=False), path)


def write_stream(path: Path, vectors: Float32) -> None:
    with pa.ipc.new_stream(path, table(vectors).schema) as writer:
        writer.write_table(table(vectors), max_chunksize=7)


def write_pickle(path: Path, vectors: Float32) -> None:
    path.write_bytes(pickle.dumps([(f"wiki:{i}", vector) for i, vector in enumerate(vectors)], protocol=4))


WRITERS = (write_npy, write_parquet, write_parquet_of_lists, write_feather, write_stream, write_pickle)


@pytest.mark.parametrize("write", WRITERS)
def test_every_format_gives_the_same_array_also_in_several_files(
    write: Callable[[Path, Float32], None], tmp_path: Path
) -> None:
    write(tmp_path / "vectors", VECTORS)
    np.testing.assert_array_equal(np.load(gathered(tmp_path / "vectors", D, tmp_path / "one.npy")), VECTORS)
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, part in ((10, VECTORS[12:]), (9, VECTORS[5:12]), (0, VECTORS[:5])):
        write(folder / f"passages_{number}", part)
    np.testing.assert_array_equal(np.load(gathered(folder, D, tmp_path / "all.npy")), VECTORS)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_an_array_that_can_be_mapped_is_not_copied(dtype: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", VECTORS.astype(dtype))
    assert gathered(tmp_path / "vectors.npy", D, tmp_path / "copy.npy") == tmp_path / "vectors.npy"
    assert not (tmp_path / "copy.npy").exists()
    before = described(tmp_path / "vectors.npy")
    assert before == described(tmp_path / "vectors.npy")
    os.utime(tmp_path / "vectors.npy", (1, 1))
    assert described(tmp_path / "vectors.npy") != before
    np.save(tmp_path / "vectors.npy", VECTORS[1:].astype(dtype))
    assert described(tmp_path / "vectors.npy") != before


def refused(path: Path, says: str) -> None:
    with pytest.raises(InvalidDocuments, match=says):
        gathered(path, D, path.with_name("gathered.npy"))


def test_what_is_none_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "vectors"
    refused(path, "vectors: no such file of vectors")
    path.write_text("1 2 3")
    refused(path, r"is of no format for vectors: a file must be \.npy, Parquet, Arrow, or DPR's pickles")
    write_npy(path, VECTORS[:, 1:])
    refused(
        path, r"must hold \(n, 6\) floating-point numbers, as the encoder has them, found float64 of shape \(20, 5\)"
    )
    path.unlink()
    np.save(tmp_path / "whole.npy", VECTORS.astype(np.int32))
    refused(tmp_path / "whole.npy", "found int32 of shape")
    path.write_bytes(b"\x93NUMPY\x01\x00")
    refused(path, "is no array")
    pq.write_table(pa.table({"id": [1], "text": ["moon"]}), path)
    refused(path, "one column must hold vectors .*, found none")
    pq.write_table(pa.table({"a": [[1.0]], "b": [[1.0]]}), path)
    refused(path, r"found \['a', 'b'\]")
    pq.write_table(pa.table({"a": [[1.0] * D, [1.0] * (D - 1)]}), path)
    refused(path, "every row must hold a vector, all of one dimension")
    pq.write_table(pa.table({"a": [[1.0] * D, [1.0] * (D - 1) + [None]]}), path)
    refused(path, "every row must hold a vector")
    pq.write_table(pa.table({"a": [[1.0] * D, None]}), path)
    refused(path, "every row must hold a vector")
    path.write_bytes(b"PAR1 and nothing more")
    refused(path, "cannot be read")
    pq.write_table(table(VECTORS).select(["embedding"]), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\xff" * 40 + whole[44:])  # what describes its first page
    refused(path, "vectors: cannot be read: ")


class Hostile:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (lambda: Hostile(eval, "1 / 0"), r"it asks for builtins\.eval"),
        (lambda: [("a", np.array([None, "x"], object))], "numbers must be f2, f4, f8, found 'O8'"),
        (lambda: [("a", np.zeros(3, ">f4"))], "must be little-endian"),
        (lambda: [("a", np.float32(1))], r"it asks for numpy\._core\.multiarray\.scalar"),
        (lambda: {"a": VECTORS}, "is no pickled list"),
        (lambda: [1, 2], "is no pickled list"),
        (lambda: [("a", "b")], "is no pickled list"),
        (lambda: [("a", VECTORS[0]), ("b", VECTORS[0, :2])], "is no pickled list"),
    ],
)
def test_a_pickle_of_anything_else_is_refused_and_runs_nothing(
    content: Callable[[], Any], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "vectors.pkl"
    path.write_bytes(pickle.dumps(content()))
    with pytest.raises(InvalidDocuments, match=says) as caught:
        read_pairs(path)
    assert "numpy.save(" in str(caught.value)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickles_is_read(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "vectors.pkl"
    content = pickle.dumps([(i, vector) for i, vector in enumerate(VECTORS)], protocol=protocol)
    path.write_bytes(content)
    np.testing.assert_array_equal(read_pairs(path), VECTORS)
    path.write_bytes(content[:-40])
    with pytest.raises(InvalidDocuments, match="is no pickled list"):
        read_pairs(path)
