"""The one module that talks to FAISS: its installation, its process-wide settings and its oddities."""

import importlib.util
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from openbook.core.deadline import Deadline
from openbook.core.types import Float32, Int64
from openbook.errors import DeadlineExceeded, InvalidConfig, InvalidSnapshot, StartupError

WHEELS = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs")
MIN_PROBES = 8
SEARCH_BEAM = 64

# Concurrent searches in one process share one pool of BLAS threads and collapse: 322 queries/s alone, 20 with four.
_ONE_AT_A_TIME = threading.Lock()


def check_installation() -> None:
    """Look whether exactly one FAISS is there: all wheels install the same module, over each other.

    Raises:
        StartupError: there is none, or there are several.
    """
    installed = [wheel for wheel in WHEELS if _is_installed(wheel)]
    if len(installed) > 1:
        raise StartupError(
            f"only one build of FAISS may be installed, found {' and '.join(installed)}: uninstall both, then one again"
        )
    if importlib.util.find_spec("faiss") is None:
        raise StartupError("FAISS is not installed: pip install 'openbook[cpu]', or 'openbook[gpu]'")


def _is_installed(wheel: str) -> bool:
    try:
        metadata.version(wheel)
    except metadata.PackageNotFoundError:
        return False
    return True


class Index:
    """One FAISS index under inner product. Never hand it anything unchecked: FAISS may end the process."""

    def __init__(self, faiss_index: Any, factory: str = "") -> None:
        import faiss

        self._faiss = faiss
        self._index = faiss_index
        self._factory = factory
        self.dimension = int(faiss_index.d)
        self.is_flat = type(faiss_index) in (faiss.IndexFlat, faiss.IndexFlatIP)
        """Whether it compares a query with every vector: then what it misses is known to the bit."""

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @classmethod
    def from_factory(cls, factory: str, dimension: int) -> "Index":
        """An empty index.

        Raises:
            InvalidConfig: FAISS does not know the factory string, or not for inner products.
        """
        import faiss

        if re.search(r"(?<!\d)0+(?!\d)", factory):  # HNSW0 and PQ8x0 end the process
            raise InvalidConfig(f"FAISS factory {factory!r}: numbers in it must be at least 1, got 0")
        with _explained(factory):
            return cls(faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT), factory)

    @classmethod
    def read(cls, path: Path) -> "Index":
        """A written index, memory mapped where its type allows. Check the file first.

        Raises:
            InvalidSnapshot: FAISS cannot read the file.
        """
        import faiss

        try:
            return cls(faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC))
        except RuntimeError as error:
            raise InvalidSnapshot(f"{path}: FAISS cannot read it: {_reason(error)}") from None

    def train(self, vectors: Float32) -> None:
        """Learn centroids and codes, and choose how widely to search later; a Flat index has nothing to learn.

        Raises:
            InvalidConfig: FAISS cannot train on these vectors, most often because they are too few.
        """
        with _explained(self._factory):
            self._index.train(vectors)
        ivf = self._faiss.try_extract_index_ivf(self._index)
        if ivf is not None:  # FAISS would look into a single list
            ivf.nprobe = min(ivf.nlist, max(MIN_PROBES, 2 * round(ivf.nlist**0.5)))
        elif hasattr(self._index, "hnsw"):
            self._index.hnsw.efSearch = SEARCH_BEAM

    def empty_copy(self) -> "Index":
        """Another one, trained alike."""
        return Index(self._faiss.deserialize_index(self._faiss.serialize_index(self._index)), self._factory)

    def add(self, vectors: Float32) -> None:
        """Append (n, d) vectors.

        Raises:
            InvalidConfig: this type of index cannot be added to.
        """
        with _explained(self._factory):
            self._index.add(vectors)

    def write(self, path: Path) -> None:
        """Write it to a file, without fsync."""
        self._faiss.write_index(self._index, str(path))

    def search(self, queries: Float32, k: int, n_threads: int, deadline: Deadline) -> tuple[Float32, Int64]:
        """Approximate scores and positions of the best k of each query: (n, k) each, position -1 where there is none.

        Raises:
            DeadlineExceeded: it was not this search's turn in time.
        """
        with self._turn(n_threads, deadline):
            scores, positions = self._index.search(queries, k)
        return scores, positions

    def at_least(self, query: Float32, score: float, n_threads: int, deadline: Deadline) -> Int64:
        """Positions of all vectors of a flat index whose approximate score with a (d,) query is not below `score`.

        Raises:
            DeadlineExceeded: as `search`.
        """
        below = float(np.nextafter(np.float32(score), np.float32(-np.inf)))  # FAISS excludes the limit itself
        with self._turn(n_threads, deadline):
            _, _, positions = self._index.range_search(query[None, :], below)
        found: Int64 = positions
        return found

    @contextmanager
    def _turn(self, n_threads: int, deadline: Deadline) -> Iterator[None]:
        if not _ONE_AT_A_TIME.acquire(timeout=min(deadline.remaining_s(), threading.TIMEOUT_MAX)):
            raise DeadlineExceeded("deadline passed before it was this search's turn")
        try:
            self._faiss.omp_set_num_threads(n_threads)  # counts for the calling thread alone
            # BLAS from four queries on: 2,366 ms by default and 284 ms with it for 64 queries in 200,000 vectors.
            self._faiss.cvar.distance_compute_blas_threshold = 4 * self.dimension
            yield
        finally:
            _ONE_AT_A_TIME.release()


@contextmanager
def _explained(factory: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise InvalidConfig(f"FAISS factory {factory!r}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """What FAISS says, without the C++ signature and the source line in front of it."""
    return re.sub(r"^Error in .*?\.(cpp|h):\d+: ", "", str(error), flags=re.DOTALL).strip()
