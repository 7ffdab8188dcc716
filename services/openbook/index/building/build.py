"""Turns passages and their vectors into a snapshot: all of it, or nothing that looks like one."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from openbook import files
from openbook.core.fingerprint import file_digest
from openbook.core.origin import Field
from openbook.core.types import Float32, Passage
from openbook.errors import InvalidConfig, InvalidDocuments
from openbook.index.building.certify import certify
from openbook.index.building.words import write_bm25
from openbook.index.disk.arrays import Exact, row_norms
from openbook.index.disk.bm25 import move_bm25
from openbook.index.disk.origins import origin_files
from openbook.index.disk.snapshot import (
    FILES,
    INDEX,
    MANIFEST,
    MAX_DIMENSION,
    SCAN_FILES,
    VECTORS,
    FileEntry,
    Manifest,
    OriginsEntry,
    ShardEntry,
    Snapshot,
    shard_folder,
)
from openbook.index.disk.store import PassageReader, write_passages
from openbook.index.shard.engine import Index, check_installation
from openbook.index.shard.shard import Shard

ROWS_AT_ONCE = 8192
LOCK = ".lock"
ExactDtype = Literal["float32", "float16"]
DType = type[np.float32 | np.float16]
TRAINING_ROWS = 1 << 18
ROWS_PER_CELL = 39
"""FAISS's own least. So many an index is trained on if it has more than 6,700 cells, and TRAINING_ROWS if not."""

OnProgress = Callable[[str, int, int], None]
"""Called with the stage, how many passages are done and how many there are; 0: nobody knows yet."""


def build_snapshot(
    passages: Sequence[Passage],
    vectors: Exact,
    out: Path,
    n_shards: int,
    factory: str,
    encoder: str,
    encoder_fingerprint: str,
    on_progress: OnProgress = lambda stage, done, total: None,
    *,
    queries: Float32 | None = None,
    recall_target: float | None = None,
    scan: str | None = None,
    fields: Sequence[Field] | None = None,
    exact_dtype: ExactDtype = "float32",
    embedded_by: str | None = None,
    words: Path | None = None,
    texts: Path | None = None,
) -> Manifest:
    """Write a snapshot folder. It appears under its name only when it is complete; until then it is `.NAME.partial`
    beside it, where the next build of the same name begins anew if this one is killed.

    Args:
        passages: with ids 0..N-1, in order.
        vectors: (N, d) float32 or float16, a memory map of them, or what makes them when it is sliced: row i belongs to
            passage i.
        out: must not exist.
        n_shards: contiguous ranges of nearly equal length; with more shards than passages, some are empty.
        factory: what FAISS builds each shard with, such as "Flat", "HNSW32" or "IVF256,SQ8".
        encoder: name of the passage encoder, for people.
        encoder_fingerprint: of the same, for machines.
        on_progress: told about the stages "write" and "index".
        queries: (n, d) real ones to measure recall with; stored vectors with noise if there are none.
        recall_target: at 10, 0..1; the search is widened until it is reached, where it can be.
        scan: "int8" for codes of the vectors beside them, for a Flat index alone: one query is then found in a quarter
            of the memory, as exactly. See `openbook.index.shard.scan`.
        fields: declared for the documents, maybe none; then all passages know their origin, which is written too.
        exact_dtype: what vectors are rounded to before anything is made of them: they are the truth then.
        embedded_by: what determines the bits of a vector besides the text of its passage, if that is known.
        words: where `write_bm25` put the index of their words, if they can be found by these too. It is moved, so it
            must be on the file system of `out`.
        texts: where `write_texts` put these passages for so many shards, with these fields; moved as well. They are
            written here if it did not.

    Raises:
        InvalidConfig: `out` exists or is being built, `n_shards` or `recall_target` is out of its range, `scan` is not
            of this factory, or FAISS cannot build it from these vectors.
        InvalidDocuments: there are no passages, not as many as vectors, ids out of order, or a vector is not finite, in
            `exact_dtype`.
    """
    dtype = _dtype(exact_dtype)
    _check_vectors(len(passages), vectors)
    n_passages, dimension = vectors.shape
    empty = check_plan(out, n_shards, factory, dimension, scan, recall_target=recall_target)
    ranges = _shard_ranges(n_passages, n_shards)
    partial = files.partial_of(out)
    with undisturbed(partial), _removed_on_failure(partial):
        check_new(out)  # nobody can finish it from now on but us
        clear(partial)
        max_norm = 0.0
        for shard, rows in enumerate(ranges):
            folder = shard_folder(partial, shard)
            if texts:
                shard_folder(texts, shard).rename(folder)
            else:
                _write_shard(folder, passages, rows, fields, lambda done: None)
            max_norm = max(max_norm, _write_vectors(folder / VECTORS, vectors, dtype, rows, on_progress))
            if scan is not None:
                from openbook.index.shard.scan import write as write_codes  # compiled, for those who want it

                write_codes(folder)
        if not empty.is_flat:
            empty.train(_training_sample(vectors, dtype, _training_rows(factory)))
        for shard, rows in enumerate(ranges):
            _write_index(shard_folder(partial, shard), empty.empty_copy(), rows, n_passages, on_progress)
        about: dict[str, Any] = {"encoder": encoder, "encoder_fingerprint": encoder_fingerprint, "factory": factory}
        about |= {"embedded_by": embedded_by} if embedded_by else {}
        about |= {"exact_dtype": exact_dtype} if exact_dtype != "float32" else {}
        names = FILES + (SCAN_FILES if scan else ())
        if fields is not None:
            names += origin_files(fields)
            about["origins"] = OriginsEntry(fields=tuple(fields))
        manifest = _describe(partial, ranges, names, {**about, "dimension": dimension, "max_norm": max_norm})
        _write_manifest(partial, manifest)
        shards = [Shard(partial, shard, verify=False) for shard in range(n_shards)]
        recall, search = certify(shards, queries, recall_target)
        manifest = _identified(manifest.model_copy(update={"recall": recall, "search": search}))
        _write_manifest(partial, manifest)
        if words:
            move_bm25(words, partial, manifest.snapshot_id)
        files.put(partial, out)
        (out / LOCK).unlink(missing_ok=True)
    return manifest


def write_texts(
    folder: Path,
    passages: Sequence[Passage],
    n_shards: int,
    fields: Sequence[Field] | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> None:
    """Write what `build_snapshot` does not need vectors for, while they are made: the passages of each shard.

    Raises:
        InvalidDocuments: as `build_snapshot`.
    """
    for shard, rows in enumerate(_shard_ranges(len(passages), n_shards)):
        _write_shard(
            shard_folder(folder, shard), passages, rows, fields, lambda done: on_progress("texts", done, len(passages))
        )


def has_texts(folder: Path, n_shards: int) -> bool:
    """Whether just these are there: `build_snapshot` moves them away one by one, and may be killed meanwhile."""
    wanted = {shard_folder(folder, shard) for shard in range(n_shards)}
    return folder.exists() and set(folder.iterdir()) == wanted


def add_bm25(snapshot: Path, on_progress: OnProgress = lambda stage, done, total: None) -> int:
    """Index the words of a snapshot that was built without them; returns how many passages it has.

    Args:
        snapshot: its folder.
        on_progress: told about the stage "words".

    Raises:
        InvalidConfig: it has such an index already, or another process makes one.
        InvalidSnapshot: it is no snapshot, or its texts cannot be read.
    """
    held = Snapshot.open(snapshot)
    shards = range(len(held.manifest.shards))
    readers = [PassageReader(held.shard_folder(i), held.shard(i).first_id) for i in shards]
    n_passages, every = held.manifest.n_passages, chain.from_iterable(readers)
    with undisturbed(snapshot):
        try:
            write_bm25(snapshot, every, held.manifest.snapshot_id, lambda done: on_progress("words", done, n_passages))
        finally:
            (snapshot / LOCK).unlink(missing_ok=True)  # who opened it before another one removed it has none
    return n_passages


@contextmanager
def undisturbed(folder: Path) -> Iterator[None]:
    """Alone at work in a folder, which is made if it is not there. Whoever is killed there leaves it to the next.

    Raises:
        InvalidConfig: another process is at work in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder / LOCK, timeout_s=0):
        yield


def clear(folder: Path, but: str = "") -> None:
    """Remove what another one left in a folder where we are `undisturbed`, but for something of this name."""
    for path in folder.iterdir():
        if path.name in (LOCK, but):
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            clear(folder)
            (folder / LOCK).unlink()
            folder.rmdir()
        raise


def check_plan(
    out: Path,
    n_shards: int,
    factory: str,
    dimension: int,
    scan: str | None = None,
    exact_dtype: str = "float32",
    recall_target: float | None = None,
) -> Index:
    """What can be found wrong before hours of encoding; gives the empty index of the factory. Raises InvalidConfig."""
    check_installation()
    check_new(out)
    if n_shards < 1:
        raise InvalidConfig(f"n_shards must be at least 1, got {n_shards}")
    if recall_target is not None and not 0 <= recall_target <= 1:
        raise InvalidConfig(f"recall at 10 must be 0..1, got {recall_target}")
    _dtype(exact_dtype)
    if scan not in (None, "int8"):
        raise InvalidConfig(f"scan must be int8 or none, got {scan!r}")
    index = Index.from_factory(factory, dimension)
    if scan is not None and not index.is_flat:
        raise InvalidConfig(f"scan {scan} is for the factory Flat alone, got {factory!r}")
    return index


def check_new(out: Path) -> None:
    """Raises InvalidConfig: something has the name already."""
    if out.exists() or out.is_symlink():  # to what is not there
        raise InvalidConfig(f"{out}: exists; a snapshot is never changed, build another one")


def _dtype(name: str) -> DType:
    if name not in get_args(ExactDtype):
        raise InvalidConfig(f"exact dtype must be {' or '.join(get_args(ExactDtype))}, got {name!r}")
    return np.float16 if name == "float16" else np.float32


def _check_vectors(n_passages: int, vectors: Exact) -> None:
    known = vectors.dtype in (np.float32, np.float16)
    if vectors.ndim != 2 or not known or not 1 <= vectors.shape[1] <= MAX_DIMENSION:
        wanted = f"(N, 1..{MAX_DIMENSION}) float32 or float16"
        raise InvalidDocuments(f"vectors must be {wanted}, got {vectors.shape} {vectors.dtype}")
    if n_passages != len(vectors):
        raise InvalidDocuments(f"every passage must have one vector, got {n_passages} passages, {len(vectors)} vectors")
    if not n_passages:
        raise InvalidDocuments("a snapshot must have at least one passage, got none")


def _shard_ranges(n_passages: int, n_shards: int) -> list[range]:
    return [range(*pair) for pair in pairwise(n_passages * shard // n_shards for shard in range(n_shards + 1))]


def _write_shard(
    folder: Path,
    passages: Sequence[Passage],
    rows: range,
    fields: Sequence[Field] | None,
    on_read: Callable[[int], None],
) -> None:
    def read() -> Iterator[Passage]:
        for block in _blocks(rows):
            yield from (passages[i] for i in block)
            on_read(block.stop)

    folder.mkdir()
    write_passages(folder, read(), rows.start, fields)


def _blocks(rows: range) -> Iterator[range]:
    return (rows[i : i + ROWS_AT_ONCE] for i in range(0, len(rows), ROWS_AT_ONCE))


def _write_vectors(path: Path, vectors: Exact, dtype: DType, rows: range, on_progress: OnProgress) -> float:
    """Copy one shard's vectors; returns the greatest norm among them."""
    max_norm = 0.0
    with path.open("wb") as file:
        descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
        header = {"descr": descr, "fortran_order": False, "shape": (len(rows), vectors.shape[1])}
        np.lib.format.write_array_header_1_0(file, header)
        for block in _blocks(rows):
            part = _rounded(vectors[block.start : block.stop], dtype)
            norms = row_norms(part)
            finite = np.isfinite(norms)
            if not finite.all():
                row = block.start + int(np.argmin(finite))
                raise InvalidDocuments(f"vectors must be finite in {part.dtype}, got NaN or infinity in row {row}")
            max_norm = max(max_norm, float(norms.max()))
            part.tofile(file)
            on_progress("write", block.stop, len(vectors))
    return max_norm


def _rounded(vectors: Exact, dtype: DType) -> Exact:
    with np.errstate(over="ignore"):  # infinity is found later
        return cast(Exact, np.ascontiguousarray(vectors, dtype))


def _training_rows(factory: str) -> int:
    cells = [int(n) for n in re.findall(r"IVF(\d+)", factory)]
    return max([TRAINING_ROWS, *(ROWS_PER_CELL * n for n in cells)])


def _training_sample(vectors: Exact, dtype: DType, n_rows: int) -> Float32:
    """All vectors, or so many: the same ones every time."""
    if len(vectors) <= n_rows:
        return _rounded(vectors[:], dtype).astype(np.float32, copy=False)
    rows = np.random.default_rng(0).choice(len(vectors), n_rows, replace=False)
    return _rounded(vectors[np.sort(rows)], dtype).astype(np.float32, copy=False)


def _write_index(folder: Path, index: Index, rows: range, total: int, on_progress: OnProgress) -> None:
    vectors = np.load(folder / VECTORS, mmap_mode="r")

    def read() -> Iterator[Float32]:
        for block in _blocks(range(len(rows))):
            yield np.ascontiguousarray(vectors[block.start : block.stop], np.float32)
            on_progress("index", rows.start + block.stop, total)

    index.write_with(read(), folder / INDEX)


def _describe(folder: Path, ranges: Sequence[range], names: Sequence[str], about: Mapping[str, Any]) -> Manifest:
    shards = [
        ShardEntry(
            first_id=rows.start,
            n_passages=len(rows),
            files=tuple(_describe_file(shard_folder(folder, shard) / name) for name in names),
        )
        for shard, rows in enumerate(ranges)
    ]
    draft = Manifest.model_validate(
        {
            **about,
            "snapshot_id": "",
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "n_passages": ranges[-1].stop,
            "shards": shards,
        }
    )
    return _identified(draft)


def _identified(draft: Manifest) -> Manifest:
    return draft.model_copy(update={"snapshot_id": draft.content_id()})


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=2, exclude_none=True), encoding="utf-8")


def _describe_file(path: Path) -> FileEntry:
    return FileEntry.model_validate({"name": path.name, "size_bytes": path.stat().st_size, "sha256": file_digest(path)})
