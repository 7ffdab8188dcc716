"""A snapshot on disk: an immutable folder of shards under one manifest, every file with its size and digest.

manifest.json
shard-0000/  index.faiss     what FAISS searches
             vectors.npy     the exact (n, d) vectors, float32 or float16: what scores are computed from
             passages.bin    texts
             offsets.npy     where each text begins
             codes.npy, scales.npy, centre.npy   the vectors in 8 bits, if they are to be scanned
             places.npy, documents.npy, ...      where the passages come from, if it is known: see `origins`
shard-0001/  ...
bm25/        the words of all passages, if they are to be searched for: see `bm25`

Format 2 has added origins, and the declaration of the user's fields in the manifest. A reader of format n reads n - 1.
"""

import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from openbook.core.fingerprint import file_digest, json_digest
from openbook.core.origin import Field as OriginField
from openbook.core.types import Float32
from openbook.errors import InvalidSnapshot
from openbook.files import read_regular
from openbook.index.disk.arrays import check_vectors, read_array
from openbook.index.disk.bm25 import verify_bm25
from openbook.index.disk.origins import check_origins, is_of_origins, origin_files
from openbook.index.disk.records import Record, parse_record
from openbook.index.disk.store import OFFSETS, TEXTS, check_offsets

MANIFEST = "manifest.json"
INDEX = "index.faiss"
VECTORS = "vectors.npy"
FILES = (INDEX, VECTORS, TEXTS, OFFSETS)
CODES = "codes.npy"
SCALES = "scales.npy"
CENTRE = "centre.npy"
SCAN_FILES = (CODES, SCALES, CENTRE)
MAX_MANIFEST_BYTES = 1 << 24  # a hundred thousand shards
MAX_DIMENSION = 4096  # the rounding bound of core.topk and the message sizes of the server count on it

RECALL_AT = (1, 5, 10, 100)

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class FileEntry(Record):
    """One file of a shard, as it must be found."""

    name: str
    size_bytes: Count
    sha256: str

    @field_validator("name")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in (*FILES, *SCAN_FILES) and not is_of_origins(name):
            raise ValueError("no file of a shard")
        return name


class ShardEntry(Record):
    """One shard: passages first_id .. first_id + n_passages - 1."""

    first_id: Count
    n_passages: Count
    files: tuple[FileEntry, ...]

    @property
    def has_scan(self) -> bool:
        """Whether there are codes of its vectors."""
        return any(file.name == CODES for file in self.files)


class Recall(Record):
    """Share of the exact best k that a search as built finds."""

    n_queries: Count
    # given: real ones; perturbed: stored vectors with noise; exact: a Flat index finds all, by proof
    queries: Literal["given", "perturbed", "exact"]
    at_1: Share
    at_5: Share
    at_10: Share
    at_100: Share

    def by_k(self) -> dict[int, float]:
        """The share for each k."""
        return {k: getattr(self, f"at_{k}") for k in RECALL_AT}


class SearchDefaults(Record):
    """How widely to search unless a request says otherwise; None takes the index's own."""

    nprobe: int | None = None
    ef_search: int | None = None
    rerank_factor: int | None = None


class OriginsEntry(Record):
    """Of each passage it is known where it comes from."""

    fields: tuple[OriginField, ...] = ()  # that the user declared for his documents


class Manifest(Record):
    """What a snapshot is made of. Equal contents have equal ids, whenever they were made."""

    format_version: Literal[1, 2] = 2
    snapshot_id: str
    created_at: str  # ISO 8601, UTC
    encoder: str
    encoder_fingerprint: str
    dimension: Annotated[int, Field(ge=1, le=MAX_DIMENSION)]
    factory: str  # of FAISS
    n_passages: Count
    max_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # of the longest vector
    shards: Annotated[tuple[ShardEntry, ...], Field(min_length=1)]
    # Not in the first snapshots, whose ids were made without them.
    recall: Recall | None = None
    search: SearchDefaults | None = None
    # Not in format 1.
    origins: OriginsEntry | None = None
    exact_dtype: Literal["float16"] | None = None  # of the exact vectors; float32 if none is named
    embedded_by: str | None = None  # what with a passage's text determines the bits of its vector, if that is known

    @property
    def fields(self) -> tuple[OriginField, ...] | None:
        """Those that the user declared; None if origins are not known."""
        return self.origins.fields if self.origins else None

    @model_validator(mode="after")
    def _shards_count_up(self) -> "Manifest":
        expected = 0
        for number, shard in enumerate(self.shards):
            if shard.first_id != expected:
                raise ValueError(f"first_id of shard {number} must be {expected}")
            expected += shard.n_passages
        if self.n_passages != expected:
            raise ValueError(f"n_passages must be {expected}, that of all shards")
        return self

    @property
    def vectors_dtype(self) -> type[np.float16 | np.float32]:
        """Of the exact vectors."""
        return np.float16 if self.exact_dtype == "float16" else np.float32

    def content_id(self) -> str:
        """The snapshot id that this content must have."""
        return json_digest(self.model_dump(mode="json", exclude={"snapshot_id", "created_at"}, exclude_none=True))[:32]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot folder and what its manifest says."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> "Snapshot":
        """Read and check the manifest alone; `verify` looks at the files.

        Raises:
            InvalidSnapshot: it is no snapshot, of another format version, or its manifest was altered.
        """
        path = folder / MANIFEST
        try:
            data = read_regular(path, MAX_MANIFEST_BYTES)
        except OSError as error:
            raise InvalidSnapshot(f"{folder}: not a snapshot: {MANIFEST}: {error.strerror}") from None
        return cls(folder, parse_manifest(data, str(path)))

    def shard(self, shard: int) -> ShardEntry:
        """The manifest's entry of one shard.

        Raises:
            InvalidSnapshot: there is no such shard.
        """
        n_shards = len(self.manifest.shards)
        if not 0 <= shard < n_shards:
            raise InvalidSnapshot(f"{self.folder}: shard must be 0..{n_shards - 1}, got {shard}")
        return self.manifest.shards[shard]

    def shard_folder(self, shard: int) -> Path:
        """Where the files of one shard lie."""
        return shard_folder(self.folder, shard)

    def vectors(self) -> Float32:
        """(n, d) the exact vectors of all shards, in memory."""
        files = (self.shard_folder(shard) / VECTORS for shard in range(len(self.manifest.shards)))
        return np.concatenate([np.load(file).astype(np.float32, copy=False) for file in files])

    def verify(self, shard: int, with_words: bool = True) -> None:
        """Read every byte of one shard's files, and with `with_words` of the words of all shards, and compare.

        The index comes last: where all of it is more than the machine's memory, that is what Linux has by then, and
        searches read it at random.

        Raises:
            InvalidSnapshot: a file is missing, truncated or altered; names file, expected and found.
        """
        entry = self.shard(shard)
        fields = self.manifest.fields
        names = FILES + (SCAN_FILES if entry.has_scan else ()) + (() if fields is None else origin_files(fields))
        files = entry.files
        if sorted(file.name for file in files) != sorted(names):
            raise InvalidSnapshot(f"{self.folder / MANIFEST}: shard {shard} must list {', '.join(names)}")
        if with_words:
            verify_bm25(self.folder, self.manifest.snapshot_id, self.manifest.n_passages)
        for file in sorted(files, key=lambda file: file.name == INDEX):
            if file.name == INDEX:
                self._check_content(self.shard_folder(shard), entry)
            path = self.shard_folder(shard) / file.name
            try:
                found = path.stat()
                if not stat.S_ISREG(found.st_mode):
                    raise InvalidSnapshot(f"{path}: must be a regular file")
                if found.st_size != file.size_bytes:
                    raise InvalidSnapshot(f"{path}: must have {file.size_bytes} bytes, found {found.st_size}")
                sha256 = file_digest(path)
            except OSError as error:
                raise InvalidSnapshot(f"{path}: cannot be read: {error.strerror}") from None
            if sha256 != file.sha256:
                raise InvalidSnapshot(f"{path}: was altered: sha256 must be {file.sha256}, found {sha256}")

    def _check_content(self, folder: Path, entry: ShardEntry) -> None:
        """Files as their writer meant them may still hold what no search and no fetch can be right with."""
        shape = entry.n_passages, self.manifest.dimension
        check_vectors(folder / VECTORS, self.manifest.vectors_dtype, shape, self.manifest.max_norm)
        check_offsets(folder, entry.n_passages)
        if (fields := self.manifest.fields) is not None:
            check_origins(folder, fields, entry.n_passages)
        if entry.has_scan:
            scales = read_array(folder / SCALES, np.float64, (entry.n_passages, 2))
            centre = read_array(folder / CENTRE, np.float32, (self.manifest.dimension,))
            if not (np.isfinite(scales).all() and np.isfinite(centre).all()):
                raise InvalidSnapshot(f"{folder}: {SCALES} or {CENTRE} holds NaN or infinity")


def parse_manifest(data: bytes, where: str) -> Manifest:
    """A manifest as it was read from somewhere. Raises InvalidSnapshot: it is none, or was altered; names where."""
    manifest = parse_record(Manifest, data, where)
    if manifest.snapshot_id != manifest.content_id():
        raise InvalidSnapshot(f"{where}: was altered: its content is not that of snapshot {manifest.snapshot_id}")
    return manifest


def shard_folder(folder: Path, shard: int) -> Path:
    """Where the files of one shard lie, within a snapshot's folder."""
    return folder / f"shard-{shard:04d}"
