"""Sizes and times of an index tier, from its shape and the constants. Pure: no I/O, nothing is measured here."""

import re
from dataclasses import dataclass, replace
from math import log2, sqrt

from openbook.errors import InvalidRequest
from openbook.planning.constants import Constants

N_LINKS_EXTRA = 17
"""Bytes of a passage of an HNSW graph beside vector and links: levels, offsets, upper layers."""
ID_BYTES = 8
RABITQ_EXTRA = 16
"""Bytes of a passage beside its bits."""
MIN_PROBES = 8
BLAS_NUMBERS = 1 << 23
"""From so many numbers in a Flat shard on, a server tries at its start what BLAS brings, whose buffers stay."""
RERANKED = 4
"""Candidates for each hit whose exact vectors are read, where the index keeps codes."""
ORIGIN_BYTES = 8 + 4 + 20
"""Of a passage: its lasting id, the place of that, and where it stands in its document."""
DOCUMENT_BYTES = 40 + 2 * 4
"""Of a document: digest, path, address, language, date."""
OFFSET_BYTES = 3 * 8
BM25_BYTES = 8
"""Of a word that a passage has: the passage, and what it adds to the score."""


@dataclass(frozen=True, slots=True)
class Shape:
    """An index tier: what is in it, and how it is divided.

    Raises:
        InvalidRequest: an index that plans know nothing of.
    """

    n_passages: int
    dimension: int
    index: str  # of FAISS: Flat, HNSWn, IVFn,SQ8, IVFn,RaBitQfs, and n may be left out
    n_shards: int = 1
    n_words: float = 100  # of a passage
    exact_bytes: int = 4  # of a number of an exact vector: 2 for float16
    has_origins: bool = True
    has_words: bool = True  # BM25

    def __post_init__(self) -> None:
        if not re.fullmatch(r"Flat|HNSW\d+|IVF\d*,(SQ8|RaBitQfs)", self.index):
            raise InvalidRequest(f"index must be Flat, HNSWn, IVFn,SQ8 or IVFn,RaBitQfs, got {self.index}")

    @property
    def per_shard(self) -> float:
        """Passages of a shard."""
        return self.n_passages / self.n_shards

    @property
    def n_lists(self) -> int:
        """Cells of a shard's IVF: as named, else the power of two near 2 √N."""
        named = re.search(r"IVF(\d+)", self.index)
        if named:
            return int(named[1])
        if "IVF" not in self.index:
            return 0
        power = max(4, round(log2(2 * sqrt(max(1.0, self.per_shard)))))
        return 1 << power

    @property
    def n_probes(self) -> int:
        """Cells that a search looks at unless it is told otherwise."""
        return min(self.n_lists, max(MIN_PROBES, 2 * round(sqrt(self.n_lists))))

    @property
    def factory(self) -> str:
        """As `openbook build --factory` takes it."""
        return re.sub(r"IVF\d*", f"IVF{self.n_lists}", self.index)

    @property
    def code_bytes(self) -> float:
        """Of a passage, as a search scans it; 0 where it reads the vectors themselves."""
        if "IVF" not in self.index:
            return 0
        return self.dimension if "SQ8" in self.index else self.dimension / 8 + RABITQ_EXTRA

    @property
    def scanned_bytes(self) -> float:
        """Codes of a shard that a search looks at."""
        return self.per_shard * self.n_probes / self.n_lists * self.code_bytes if self.n_lists else 0

    def of(self, n_passages: int) -> "Shape":
        """The same of more or fewer passages."""
        return replace(self, n_passages=n_passages)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of all shards together, in bytes."""

    index: float
    exact: float  # vectors that scores are computed from
    texts: float
    origins: float
    words: float  # the index of words, which every server maps whole

    @property
    def snapshot(self) -> float:
        """On disk."""
        return self.divided + self.words

    @property
    def divided(self) -> float:
        """On disk, among the shards."""
        return self.index + self.exact + self.texts + self.origins


def sizes(shape: Shape, c: Constants) -> Sizes:
    """What the files of a snapshot take."""
    n, d = shape.n_passages, shape.dimension
    if shape.index == "Flat":
        index = n * d * 4.0
    elif shape.index.startswith("HNSW"):
        index = n * (d * 4 + int(shape.index[4:]) * 8 + N_LINKS_EXTRA)
    else:
        index = n * (shape.code_bytes + ID_BYTES) + shape.n_shards * shape.n_lists * d * 4
    text = shape.n_words * c["bytes_per_word"].value + c["title_bytes"].value + OFFSET_BYTES
    origin = ORIGIN_BYTES + DOCUMENT_BYTES / c["passages_per_document"].value if shape.has_origins else 0
    words = shape.n_words * c["words_indexed"].value * BM25_BYTES if shape.has_words else 0
    vocabulary = c["vocabulary_bytes"].value if shape.has_words else 0
    return Sizes(index, float(n * d * shape.exact_bytes), n * text, n * origin, n * words + vocabulary)


@dataclass(frozen=True, slots=True)
class Memory:
    """Of the servers of all shards, one of each, in bytes."""

    needed: float  # without it every search reads the disk
    wanted: float  # with it none does, whatever is asked


def memory(shape: Shape, c: Constants) -> Memory:
    """What a server maps when it starts, and what its private memory is."""
    found = sizes(shape, c)
    has_blas = shape.index == "Flat" and shape.per_shard * shape.dimension >= BLAS_NUMBERS
    private = shape.n_shards * (c["server_bytes"].value + (c["blas_bytes"].value if has_blas else 0))
    needed = private + found.index
    return Memory(needed, needed + (found.exact if shape.code_bytes else 0))


@dataclass(frozen=True, slots=True)
class Times:
    """Of a search, in seconds."""

    alone: float  # p50 of a caller alone, all shards at once
    server_cpu: float  # of all servers together, for one of many at once
    client_cpu: float  # of who asks, for the same


def asking_s(n_shards: int, c: Constants) -> float:
    """What a search of so many shards takes alone, whatever they hold."""
    return c["call_s"].value + (n_shards - 1) * c["shard_s"].value


def times(shape: Shape, c: Constants, cached: float = 1.0, k: int = 10) -> Times:
    """How long, where a share `cached` of the exact vectors is in memory."""
    v, s = {name: constant.value for name, constant in c.items()}, shape.n_shards
    read = RERANKED * k * (1 - cached) * v["rescored_s"] if shape.code_bytes else 0.0
    return Times(
        asking_s(s, c) + _scan(shape, v, "alone_s") + read,
        s * (v["call_cpu_s"] + _scan(shape, v, "s")),
        s * v["client_cpu_s"],
    )


def _scan(shape: Shape, v: dict[str, float], how: str) -> float:
    """Of a shard's index; `how`: alone_s of one query, s of one of many. Cells are found as a Flat index is scanned."""
    d = shape.dimension
    if shape.index == "Flat":
        return shape.per_shard * d * v[f"flat_{how}"]
    if shape.code_bytes:
        found = v[f"cells_{how}"] + shape.n_lists * d * v[f"flat_{how}"]
        return found + shape.scanned_bytes * v[f"codes_{how}"]
    return log2(max(2.0, shape.per_shard)) * (d * v[f"graph_{how}"] + v[f"graph_step_{how}"])
