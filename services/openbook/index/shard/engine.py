"""The one module that talks to FAISS: its installation, its process-wide settings and its oddities."""

import ctypes
import errno
import importlib.util
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from openbook.core.deadline import Deadline
from openbook.core.types import AS_BUILT, Float32, Int64, SearchParameters
from openbook.errors import DeadlineExceeded, InvalidConfig, InvalidSnapshot, StartupError
from openbook.index.disk.arrays import Exact
from openbook.index.shard import gpu
from openbook.index.shard.memory import in_huge_pages

if TYPE_CHECKING:
    from openbook.index.shard.inverted import InvertedLists

WHEELS = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs")
MIN_PROBES = 8
SEARCH_BEAM = 64
MAX_BEAM = 4096
CALIBRATION_NUMBERS = 1 << 23  # 32 MB of vectors: beyond most caches, and searched in milliseconds
CALIBRATION_K = 10
CALIBRATION_BATCHES = (2, 4, 8, 16)
SCAN_BATCHES = (1, 2, 4, 8, 16, 32)
BUILD_BLAS_FROM = 4
NEVER = (1 << 31) - 1
FLAT_ROWS_AT = 8
"""Byte of a Flat index's file: behind its kind and its dimension."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """How this machine searches best."""

    n_threads: int = 1
    blas_from: int = 4
    """Queries from which on a Flat index is searched through BLAS. FAISS's own choice is 167 at 768-d, and 8 times
    slower at 64."""
    scan_up_to: int = 8
    """Queries up to which codes are scanned where there are any, instead of an index of the vectors."""


def check_installation() -> None:
    """Look whether Numba is there, and exactly one FAISS: all its wheels install the same module, over each other.

    Raises:
        StartupError: there is none, or there are several.
    """
    installed = [wheel for wheel in WHEELS if _is_installed(wheel)]
    if len(installed) > 1:
        raise StartupError(
            f"only one build of FAISS may be installed, found {' and '.join(installed)}: uninstall both, then one again"
        )
    for module, name in (("faiss", "FAISS"), ("numba", "Numba")):
        if importlib.util.find_spec(module) is None:
            raise StartupError(f"{name} is not installed: pip install 'openbook[cpu]', or 'openbook[gpu]'")


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

        self._faiss: Any = faiss  # its stubs miss what SWIG adds
        self._index = faiss_index
        self._factory = factory
        self.dimension = int(faiss_index.d)
        self.is_flat = type(faiss_index) in (faiss.IndexFlat, faiss.IndexFlatIP)
        """Whether it compares a query with every vector: then what it misses is known to the bit."""
        self.keeps_vectors = isinstance(faiss_index, (faiss.IndexFlat, faiss.IndexHNSWFlat, faiss.IndexIVFFlat))
        """Whether its scores are those of the vectors, up to rounding, and not of some code of them."""
        self._transforms = isinstance(faiss_index, faiss.IndexPreTransform)
        self._inner: Any = faiss.downcast_index(faiss_index.index) if self._transforms else faiss_index
        self.may_join = isinstance(faiss_index, (faiss.IndexFlat, faiss.IndexIVF, faiss.IndexHNSW))
        """Whether several threads may search it at once. On a GPU they would share memory, and what transforms queries
        uses BLAS for a single one."""
        self.knows: tuple[str, ...] = ()
        """The search parameters that it takes, besides the re-rank factor, which is not the index's affair."""
        self._most_probes = 0
        gpu_ivf = getattr(faiss, "GpuIndexIVF", ())
        lists: Any = self._inner
        if isinstance(lists, (faiss.IndexIVF, gpu_ivf)):
            self.knows = ("nprobe",)
            self._most_probes = min(lists.nlist, gpu.MAX_CANDIDATES if isinstance(lists, gpu_ivf) else NEVER)
            lists.nprobe = min(lists.nprobe, self._most_probes)
        self._is_cagra = isinstance(faiss_index, getattr(faiss, "GpuIndexCagra", ()))  # what HNSW becomes on a GPU
        if self._is_cagra or isinstance(self._inner, faiss.IndexHNSW):
            self.knows = ("ef_search",)
        self._lists: InvertedLists | None = None

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
    def read(cls, path: Path, huge_pages: bool = False) -> "Index":
        """A written index, memory mapped where its type allows. Check the file first.

        With `huge_pages` a Flat or HNSW index is read into memory of its own instead, its vectors in pages of 2 MB
        where Linux can.

        Raises:
            InvalidSnapshot: FAISS cannot read the file.
        """
        import faiss

        try:
            index = cls(faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC))
            if huge_pages and index.rows() is not None:
                index = cls(faiss.read_index(str(path)))
                in_huge_pages(cast(Float32, index.rows()))
        except RuntimeError as error:
            raise InvalidSnapshot(f"{path}: FAISS cannot read it: {_reason(error)}") from None
        index._lists = _inverted_lists(index._index)
        return index

    def moved(self, vectors: Exact, device: str) -> "Index":
        """This index, which holds these vectors, on `cuda:N`; on `cpu`, itself.

        Raises:
            StartupError: it cannot be moved there.
        """
        if device == "cpu":
            return self
        return Index(gpu.move(self._index, vectors.astype(np.float32, copy=False), device), self._factory)

    def train(self, vectors: Float32) -> None:
        """Learn centroids and codes, and choose how widely to search later; a Flat index has nothing to learn.

        Raises:
            InvalidConfig: FAISS cannot train on these vectors, most often because they are too few.
        """
        with _explained(self._factory), _Turn(Deadline.never(), BUILD_BLAS_FROM * self.dimension):
            self._index.train(vectors)
        ivf = self._faiss.try_extract_index_ivf(self._index)
        if ivf is not None:  # FAISS would look into a single list
            ivf.nprobe = min(ivf.nlist, max(MIN_PROBES, 2 * round(ivf.nlist**0.5)))
        elif "ef_search" in self.knows:
            self._inner.hnsw.efSearch = SEARCH_BEAM

    def empty_copy(self) -> "Index":
        """Another one, trained alike."""
        return Index(self._faiss.deserialize_index(self._faiss.serialize_index(self._index)), self._factory)

    def add(self, vectors: Float32) -> None:
        """Append (n, d) vectors.

        Raises:
            InvalidConfig: this type of index cannot be added to.
        """
        with _explained(self._factory), _Turn(Deadline.never(), BUILD_BLAS_FROM * self.dimension):
            self._index.add(vectors)

    def write(self, path: Path) -> None:
        """Write it to a file, without fsync. Raises OSError: the disk has no room for it."""
        try:
            self._faiss.write_index(self._index, str(path))
        except RuntimeError as error:  # FAISS tells why in words alone
            for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                if os.strerror(number) in str(error):
                    raise OSError(number, os.strerror(number), str(path)) from None
            raise

    def write_with(self, blocks: Iterable[Float32], path: Path) -> None:
        """Add (any, d) vectors to an empty index and write it. A Flat index of them is never in memory.

        Raises:
            InvalidConfig: as `add`.
        """
        if not self.is_flat:
            for block in blocks:
                self.add(block)
            self.write(path)
            return
        # The vectors end the file, as they are; before them stands how many numbers they are, and early how many rows.
        header = self._faiss.serialize_index(self._index).tobytes()
        n_rows = 0
        with path.open("wb") as file:
            file.write(header)
            for block in blocks:
                file.write(block.data)
                n_rows += len(block)
            for at, number in ((len(header) - 8, n_rows * self.dimension), (FLAT_ROWS_AT, n_rows)):
                file.seek(at)
                file.write(number.to_bytes(8, "little"))

    def search(
        self, queries: Float32, k: int, parameters: SearchParameters, tuning: Tuning, deadline: Deadline
    ) -> tuple[Float32, Int64]:
        """Approximate scores and positions of the best k of each query: (n, k) each, position -1 where there is none.

        Ignores parameters that it does not `know`, such as those that were chosen for the index this was moved from.

        Raises:
            DeadlineExceeded: it was not this search's turn in time.
        """
        with self._turn(tuning, deadline, len(queries)):
            if self._lists is not None and tuning.n_threads == 1:
                n_lists = min(parameters.nprobe or self._index.nprobe, self._index.nlist)
                centroid_scores, lists = self._index.quantizer.search(queries, n_lists)
                return self._lists.search(queries, lists, centroid_scores, k)
            scores, positions = self._index.search(queries, k, params=self._parameters(parameters, k))
        return scores, positions

    def at_least(self, query: Float32, score: float, tuning: Tuning, deadline: Deadline) -> Int64:
        """Positions of all vectors of a flat index whose approximate score with a (d,) query is not below `score`.

        Raises:
            DeadlineExceeded: as `search`.
        """
        below = float(np.nextafter(np.float32(score), np.float32(-np.inf)))  # FAISS excludes the limit itself
        with self._turn(tuning, deadline, 1):
            _, _, positions = self._index.range_search(query[None, :], below)
        found: Int64 = positions
        return found

    @property
    def max_norm(self) -> float:
        """Of what a search multiplies with a query, besides the vectors."""
        return self._lists.max_norm if self._lists else 0.0

    @property
    def mapped(self) -> list[NDArray[np.uint8]]:
        """What a search reads of the file, besides `rows`, as far as it is known here."""
        return [self._lists.memory] if self._lists else []

    def rows(self) -> Float32 | None:
        """All (n, d) vectors as the index itself holds them, where they lie in one piece and order.

        Whoever re-scores from these reads what the search has just read, and the machine caches them once. In a mapped
        file they need not lie at a multiple of four. They live as long as this index.
        """
        flat = self._index if self.is_flat else getattr(self._index, "storage", None)
        if not self.keeps_vectors or flat is None or not len(self):
            return None
        codes = self._faiss.downcast_index(flat).codes.data()
        found: Float32 = self._faiss.rev_swig_ptr(codes, len(self) * self.dimension * 4).view(np.float32)
        return found.reshape(len(self), -1)

    def wider(self, parameters: SearchParameters) -> SearchParameters:
        """Twice as wide as these parameters, as far as it goes."""
        if "nprobe" in self.knows:
            nprobe = min(2 * (parameters.nprobe or self._inner.nprobe), self._most_probes)
            return replace(parameters, nprobe=nprobe)
        if "ef_search" in self.knows:
            return replace(parameters, ef_search=min(2 * (parameters.ef_search or self._beam), MAX_BEAM))
        return parameters

    def reach(self, parameters: SearchParameters) -> int:
        """Cells, or candidates of a graph, that a search looks at, as far as there are so many; 1 of other types."""
        if "nprobe" in self.knows:
            return min(parameters.nprobe or self._inner.nprobe, self._most_probes)
        if "ef_search" in self.knows:
            return min(parameters.ef_search or self._beam, max(len(self), 1))
        return 1

    @property
    def _beam(self) -> int:
        """A graph's, as built."""
        return SEARCH_BEAM if self._is_cagra else int(self._inner.hnsw.efSearch)

    def _parameters(self, parameters: SearchParameters, k: int) -> Any:
        if self._is_cagra:  # which finds no more than it keeps, and keeps a multiple of 32
            n_kept = max(k, self.reach(parameters), SEARCH_BEAM)
            return self._faiss.SearchParametersCagra(itopk_size=32 * math.ceil(n_kept / 32))
        if parameters.nprobe is not None and "nprobe" in self.knows:
            inner = self._faiss.SearchParametersIVF(nprobe=min(parameters.nprobe, self._most_probes))
        elif parameters.ef_search is not None and "ef_search" in self.knows:
            inner = self._faiss.SearchParametersHNSW(efSearch=min(parameters.ef_search, max(len(self), 1)))
        else:
            return None  # as built
        return self._faiss.SearchParametersPreTransform(index_params=inner) if self._transforms else inner

    def _turn(self, tuning: Tuning, deadline: Deadline, n_queries: int) -> "_Turn":
        # Without BLAS, the cells of a query do not depend on which others are searched with it.
        blas_from = tuning.blas_from if self.is_flat else NEVER
        may_join = self.may_join and tuning.n_threads == 1 and n_queries < blas_from
        return _Turn(deadline, min(blas_from * self.dimension, NEVER), tuning.n_threads, may_join)


def _inverted_lists(faiss_index: Any) -> "InvertedLists | None":
    """Those of an `IVFn,SQ8` index that nothing is added to any more; they live as long as it does."""
    import faiss

    from openbook.index.shard.inverted import InvertedLists

    if type(faiss_index) is not faiss.IndexIVFScalarQuantizer or faiss_index.sq.qtype != faiss.ScalarQuantizer.QT_8bit:
        return None
    lists: Any = faiss_index.invlists
    sizes = np.array([lists.list_size(i) for i in range(lists.nlist)], np.int64)
    filled = np.flatnonzero(sizes)
    if not len(filled):
        return None
    codes, ids = np.zeros_like(sizes), np.zeros_like(sizes)  # addresses
    for i in filled.tolist():
        codes[i], ids[i] = (faiss.rev_swig_ptr(of(i), 1).ctypes.data for of in (lists.get_codes, lists.get_ids))
    begin = int(min(codes[filled].min(), ids[filled].min()))
    end = int(max((codes + sizes * lists.code_size).max(), (ids + sizes * ids.itemsize).max()))
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * (end - begin)).from_address(begin))
    minimum, extent = np.split(faiss.vector_to_array(faiss_index.sq.trained), 2)
    return InvertedLists(memory, codes - begin, ids - begin, sizes, minimum, extent, faiss_index.by_residual)


def turn(deadline: Deadline) -> "_Turn":
    """For what searches without FAISS: to be entered as such a search is. Raises DeadlineExceeded then, as a search."""
    return _Turn(deadline, None, may_join=True)


def is_searching() -> bool:
    """Whether somebody in this process is at it, so that another search may have to wait."""
    return _INSIDE.n > 0


@dataclass(slots=True)
class _Inside:
    """Who searches now."""

    n: int = 0
    n_waiting: int = 0  # until there is nobody
    blas_threshold: int | None = None  # of all of them


_INSIDE = _Inside()
_LOCK = threading.Lock()
_ALL_DONE = threading.Condition(_LOCK)


class _Turn:
    """While entered, nobody in this process changes FAISS's settings, or begins to use BLAS: concurrent searches share
    one pool of its threads and collapse, 322 queries/s alone, 20 with four. Entered with every search: as a generator
    it would take three times as long.

    Args:
        deadline: by when it must be its turn.
        blas_threshold: queries x dimension from which on BLAS is used; None for what uses no FAISS.
        n_threads: of FAISS; None leaves them as they are.
        may_join: those who search under the same settings: for what needs one thread and no BLAS. It does not while
            somebody waits for all of them to be done.

    Raises:
        DeadlineExceeded: when entered: it was not its turn in time.
    """

    __slots__ = ("_blas_threshold", "_deadline", "_may_join", "_n_threads")

    def __init__(
        self, deadline: Deadline, blas_threshold: int | None, n_threads: int | None = None, may_join: bool = False
    ) -> None:
        self._deadline = deadline
        self._blas_threshold = blas_threshold
        self._n_threads = n_threads
        self._may_join = may_join

    def __enter__(self) -> None:
        import faiss

        inside, wanted = _INSIDE, self._blas_threshold
        with _LOCK:
            is_alike = wanted == inside.blas_threshold or wanted is None or inside.blas_threshold is None
            if inside.n and not (self._may_join and is_alike and not inside.n_waiting):
                self._wait()
            if wanted != inside.blas_threshold and (wanted is not None or not inside.n):
                inside.blas_threshold = wanted
                if wanted is not None:
                    faiss.cvar.distance_compute_blas_threshold = wanted
            inside.n += 1
        if self._n_threads is not None:
            faiss.omp_set_num_threads(self._n_threads)  # counts for the calling thread alone

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _LOCK:
            _INSIDE.n -= 1
            if _INSIDE.n_waiting and not _INSIDE.n:
                _ALL_DONE.notify_all()

    def _wait(self) -> None:
        """Until nobody is inside. Raises DeadlineExceeded."""
        _INSIDE.n_waiting += 1
        try:
            timeout = min(self._deadline.remaining_s(), threading.TIMEOUT_MAX)
            if not _ALL_DONE.wait_for(lambda: not _INSIDE.n, timeout):
                raise DeadlineExceeded("deadline passed before it was this search's turn")
        finally:
            _INSIDE.n_waiting -= 1


def best_of(vectors: Float32, queries: Float32, k: int) -> tuple[Float32, Int64]:
    """Approximate scores and positions of the best k of (N, d) vectors for each query, without an index of them."""
    import faiss

    with _Turn(Deadline.never(), BUILD_BLAS_FROM * vectors.shape[1]):
        scores, positions = faiss.knn(queries, vectors, k, metric=faiss.METRIC_INNER_PRODUCT)
    return scores, positions


def calibrate(
    sample: Float32, n_threads: int, scan: Callable[[Float32, int, Deadline], object] | None = None
) -> Tuning:
    """Measure, in some tenths of a second, what searches like a Flat one over these (N, d) vectors need.

    `n_threads` 0 chooses the fewest threads within a tenth of the fastest. `scan` is `Scan.contenders` of the same
    vectors. Alone in this process while it measures.
    """
    import faiss

    index = Index(faiss.IndexFlatIP(sample.shape[1]))
    index.add(sample)

    def measured_s(n_queries: int, search: Callable[[Float32], object]) -> float:
        queries = np.resize(sample, (n_queries, sample.shape[1]))
        times = []
        for _ in range(3):
            started = time.perf_counter()
            search(queries)
            times.append(time.perf_counter() - started)
        return min(times)

    def seconds(n_queries: int, tuning: Tuning) -> float:
        return measured_s(
            n_queries, lambda queries: index.search(queries, CALIBRATION_K, AS_BUILT, tuning, Deadline.never())
        )

    if n_threads == 0:
        counts = [1 << i for i in range((os.cpu_count() or 1).bit_length())]
        measured = {count: seconds(64, Tuning(count, 1)) for count in counts if count <= (os.cpu_count() or 1)}
        n_threads = min(count for count, s in measured.items() if s <= 1.1 * min(measured.values()))
    slower = [n for n in CALIBRATION_BATCHES if seconds(n, Tuning(n_threads, 1)) > seconds(n, Tuning(n_threads, NEVER))]
    tuning = Tuning(n_threads, max(slower, default=1) + 1)
    if scan is None:
        return tuning
    faster = [
        n
        for n in SCAN_BATCHES
        if measured_s(n, lambda queries: scan(queries, CALIBRATION_K, Deadline.never())) < seconds(n, tuning)
    ]
    return replace(tuning, scan_up_to=max(faster, default=0))


@contextmanager
def _explained(factory: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise InvalidConfig(f"FAISS factory {factory!r}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """What FAISS says, without the C++ signature and the source line in front of it."""
    return re.sub(r"^Error in .*?\.(cpp|h):\d+: ", "", str(error), flags=re.DOTALL).strip()
