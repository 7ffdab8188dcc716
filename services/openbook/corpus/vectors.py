"""Embeddings that exist already: files of them as one array on disk, whose row i is that of passage i."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from openbook.core.types import Passage
from openbook.corpus import pickled
from openbook.errors import InvalidDocuments
from openbook.index.disk.arrays import Exact
from openbook.models.encoder import TextEncoder

ROWS_AT_ONCE = 8192
SAMPLE = 64
"""Passages that are encoded anew, evenly drawn."""
TOLERANCE = 0.05
"""How far a vector may lie from that of its passage, of the latter's length: computed in bfloat16 or kept in float16 it
stays within 3 %; that of another passage is nearly always beyond 30 %."""

HOW = "a file must be .npy, Parquet, Arrow, or DPR's pickles"


def files_of(path: Path) -> list[Path]:
    """A file, or those of a folder in the order of the numbers in their names.

    Raises:
        InvalidDocuments: there is none.
    """
    found = [path] if path.is_file() else [each for each in path.glob("*") if each.is_file() and each.name[0] != "."]
    if not found:
        raise InvalidDocuments(f"{path}: no such file of vectors, or a folder without any")
    return sorted(found, key=lambda each: [int(part) if part.isdecimal() else part for part in _parts(each.name)])


def _parts(name: str) -> list[str]:
    return re.split(r"(\d+)", name)  # in turn: no number, a number


def described(path: Path) -> list[list[str | int]]:
    """What tells whether the files are still the same, without reading them: names, sizes, times."""
    stats = [(each.name, each.stat()) for each in files_of(path)]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def gathered(path: Path, dimension: int, into: Path) -> Path:
    """An .npy file of the (n, d) vectors: the given one, or all of them in float32, written to `into`.

    Raises:
        InvalidDocuments: a file cannot be read, or holds no vectors of this dimension.
    """
    given = files_of(path)
    if len(given) == 1 and _begins(given[0], npy.MAGIC_PREFIX) and _array(given[0]).dtype in (np.float32, np.float16):
        _check_shape(given[0], _array(given[0]), dimension)
        return given[0]
    with into.open("wb") as file:
        n_rows = 0
        _write_header(file, n_rows, dimension)
        for each in given:
            for block in _blocks(each):
                _check_shape(each, block, dimension)
                file.write(np.ascontiguousarray(block, "<f4").data)
                n_rows += len(block)
        file.seek(0)
        _write_header(file, n_rows, dimension)  # NumPy pads it, so that any number of rows fits in the same place
    return into


def _write_header(file: Any, n_rows: int, dimension: int) -> None:
    npy.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (n_rows, dimension)})


def check_sample(vectors: Exact, passages: Sequence[Passage], model: TextEncoder, name: str) -> None:
    """Encode some of the passages anew, and compare.

    Raises:
        InvalidDocuments: there are not as many vectors as passages, or one is not that of its passage; names it.
    """
    if len(vectors) != len(passages):
        raise InvalidDocuments(
            f"{name}: holds {len(vectors)} vectors for {len(passages)} passages: row i must be passage i's, also "
            "behind a document that could not be read"
        )
    rows = np.unique(np.linspace(0, len(passages) - 1, SAMPLE).astype(np.int64))
    wanted = model.encode_passages([passages[i] for i in rows.tolist()]).astype(np.float64)
    found = vectors[rows].astype(np.float64)
    lengths = np.linalg.norm(wanted, axis=1)
    distances = np.linalg.norm(found - wanted, axis=1) / np.where(lengths > 0, lengths, 1)
    bad = np.flatnonzero(~(distances <= TOLERANCE))  # NaN is not
    if len(bad):
        row = int(rows[bad[0]])
        passage = passages[row]
        raise InvalidDocuments(
            f"{name}: row {row} is not the vector of passage {row} (document {passage.document_id!r}, title "
            f"{passage.title!r}) by this encoder: it must be within {TOLERANCE:.0%} of its length, and is "
            f"{distances[bad[0]]:.0%} away; of {len(rows)} that were encoded anew, {len(bad)} differ"
        )


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def _array(path: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InvalidDocuments(f"{path}: is no array: {error}") from None
    return array


def _check_shape(path: Path, array: NDArray[Any], dimension: int) -> None:
    if array.ndim != 2 or array.dtype.kind != "f" or array.shape[1] != dimension:
        raise InvalidDocuments(
            f"{path}: must hold (n, {dimension}) floating-point numbers, as the encoder has them, found {array.dtype} "
            f"of shape {array.shape}"
        )


def _blocks(path: Path) -> Iterator[NDArray[Any]]:
    """Some rows after the other."""
    if _begins(path, npy.MAGIC_PREFIX):
        array = _array(path)
        yield from (array[i : i + ROWS_AT_ONCE] for i in range(0, len(array) if array.ndim else 1, ROWS_AT_ONCE))
    elif _begins(path, pickled.MAGIC):
        yield pickled.read_pairs(path)
    elif any(_begins(path, magic) for magic in (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
        yield from _columns(path)
    else:
        raise InvalidDocuments(f"{path}: is of no format for vectors: {HOW}")


def _columns(path: Path) -> Iterator[NDArray[Any]]:
    """Of Parquet, Arrow's files (Feather's too) and its streams."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise InvalidDocuments(f"{path}: needs pyarrow: pip install 'openbook[corpus]'") from None
    try:
        if _begins(path, b"PAR1"):
            file = pq.ParquetFile(path)
            column = _column(path, file.schema_arrow)
            batches = file.iter_batches(ROWS_AT_ONCE, columns=[column])
        elif _begins(path, b"ARROW1"):
            reader = pa.ipc.open_file(pa.memory_map(str(path)))
            column = _column(path, reader.schema)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = pa.ipc.open_stream(pa.memory_map(str(path)))
            column = _column(path, batches.schema)
        yield from (_rows(path, batch.column(column)) for batch in batches if len(batch))
    except (pa.ArrowException, OSError) as error:  # of some damage pyarrow makes an OSError
        raise InvalidDocuments(f"{path}: cannot be read: {error}") from None


def _column(path: Path, schema: Any) -> str:
    """The only one that holds lists of floating-point numbers."""
    import pyarrow.types as types

    lists = types.is_list, types.is_large_list, types.is_fixed_size_list
    found = [f.name for f in schema if any(of(f.type) for of in lists) and types.is_floating(f.type.value_type)]
    if len(found) != 1:
        raise InvalidDocuments(f"{path}: one column must hold vectors (lists of numbers), found {found or 'none'}")
    name: str = found[0]
    return name


def _rows(path: Path, column: Any) -> NDArray[Any]:
    import pyarrow.compute as pc

    numbers, lengths = column.flatten(), pc.unique(pc.list_value_length(column))
    if column.null_count or numbers.null_count or len(lengths) != 1:
        raise InvalidDocuments(f"{path}: every row must hold a vector, all of one dimension")
    array: NDArray[Any] = numbers.to_numpy(zero_copy_only=False).reshape(len(column), -1)
    return array
