"""Parquet and Arrow: a row a document, of the columns that are a document's, some rows at a time."""

from collections.abc import Iterable, Iterator
from typing import Any

from openbook.core.documents import Document
from openbook.corpus.sources import records
from openbook.corpus.sources.limits import Failed, Failure, one_line
from openbook.corpus.sources.opened import Opened

ROWS_AT_ONCE = 256


def read_parquet(opened: Opened) -> Iterator[Document | Failure | None]:
    """Only the columns of documents are read. Raises Failed: none of them is a text; and what pyarrow raises."""
    pa = _arrow()
    import pyarrow.parquet as pq

    with (yield from opened.seekable()) as content:
        file = pq.ParquetFile(pa.PythonFile(content, "r"), pre_buffer=False)
        columns = _columns(opened, file.schema_arrow.names)
        batches = file.iter_batches(ROWS_AT_ONCE, columns=list(columns), use_threads=False)
        yield from _documents(opened, batches, columns)


def read_arrow_file(opened: Opened) -> Iterator[Document | Failure | None]:
    """Also Feather, version 2. Raises as `read_parquet`."""
    pa = _arrow()
    with (yield from opened.seekable()) as content:
        file = pa.ipc.open_file(pa.PythonFile(content, "r"))
        batches = (file.get_batch(i) for i in range(file.num_record_batches))
        yield from _documents(opened, batches, _columns(opened, file.schema.names))


def read_arrow_stream(opened: Opened) -> Iterator[Document | Failure]:
    """Raises as `read_parquet`."""
    pa = _arrow()
    stream = pa.ipc.open_stream(pa.PythonFile(opened.file, "r"))
    return _documents(opened, stream, _columns(opened, stream.schema.names))


def _arrow() -> Any:
    import pyarrow as pa

    # Each thread would reserve address space, of which there is a limit.
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
    return pa


def _columns(opened: Opened, names: list[str]) -> dict[str, str]:
    """The columns to read, and what a document calls them."""
    ours = opened.names
    wanted = records.wanted(opened)
    columns = {name: name.lower() for name in names if name.lower() in wanted}
    if not set(columns.values()) & set(ours.text):
        raise Failed(f"one column must be called {ours.texts()}")
    records.check_columns(opened, [name.lower() for name in names])
    return columns


def _documents(opened: Opened, batches: Iterable[Any], columns: dict[str, str]) -> Iterator[Document | Failure]:
    number = 0
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            for row in _rows(batch.slice(start, ROWS_AT_ONCE).select(list(columns))):
                number += 1
                try:
                    if isinstance(row, Failed):
                        raise row
                    yield records.document(opened, {columns[name]: value for name, value in row.items()}, number)
                except Failed as error:
                    yield Failure(f"{opened.path}:{number}", str(error))


def _rows(batch: Any) -> list[dict[str, Any] | Failed]:
    """Those of a batch; one with a text that is none, or a date out of Python's years, costs no others."""
    try:
        return list(batch.to_pylist())
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            why = f"not UTF-8: {error.reason}" if isinstance(error, UnicodeDecodeError) else one_line(str(error))
            return [Failed(why)]
        return [row for i in range(batch.num_rows) for row in _rows(batch.slice(i, 1))]
