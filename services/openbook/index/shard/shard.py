"""One shard of a snapshot in memory: FAISS finds candidates, the exact vectors decide."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from openbook.core.deadline import Deadline
from openbook.core.topk import canonical_scores, check_search, top_k
from openbook.core.types import AS_BUILT, NO_HIT, Float32, Float64, Hits, Int64, Passage, SearchParameters
from openbook.errors import InvalidSnapshot, UnknownPassage
from openbook.index.disk.arrays import Exact, read_array
from openbook.index.disk.snapshot import CODES, INDEX, VECTORS, SearchDefaults, Snapshot
from openbook.index.disk.store import PassageReader
from openbook.index.shard import gpu
from openbook.index.shard.engine import CALIBRATION_NUMBERS, Index, Tuning, best_of, calibrate
from openbook.index.shard.memory import SingleRows, keep, prewarm
from openbook.index.shard.width import EXTRA, Width
from openbook.index.shard.words import ShardWords

if TYPE_CHECKING:
    from openbook.index.shard.scan import Scan

log = logging.getLogger(__name__)

VECTORS_AT_ONCE, SCORES_AT_ONCE = 1 << 16, 1 << 24
MAX_CANDIDATES = 1 << 16
"""Per query: each costs a read of its vector."""
CANDIDATES_AT_ONCE = 1 << 20
"""Of all queries of a batch together: bounds memory."""
SELF_TESTS = 4
SELF_TEST_K = 10
LARGEST_SCORE = 1e38
"""Below the greatest float32 by more than any rounding: no partial sum becomes infinite."""


class Shard:
    """The passages first_id .. first_id + n_passages - 1 of a snapshot. May be used from several threads.

    For a Flat index the hits are exact; for others the scores are exact and the set of hits is as good as the index.

    `verify` reads every byte of it first; only who has just written them may do without. For `huge_pages` see
    `Index.read`. `keep_in_memory` locks what a search reads, but for the exact vectors of an index of codes. A search
    may look `max_width` times as widely as one without parameters.

    Raises:
        InvalidConfig: it cannot be kept in memory.
        InvalidSnapshot: there is no such shard, or a file is missing, truncated or altered.
    """

    def __init__(
        self,
        folder: Path,
        shard: int,
        *,
        n_threads: int = 1,
        max_k: int = 1000,
        max_rows: int = 1024,
        max_width: float = math.inf,
        device: str = "cpu",
        huge_pages: bool = False,
        keep_in_memory: bool = False,
        verify: bool = True,
    ) -> None:
        from openbook.index.shard.rescoring import rescore  # compiled, for those who have a shard

        snapshot = Snapshot.open(folder)
        if verify:
            snapshot.verify(shard)
        files, entry = snapshot.shard_folder(shard), snapshot.shard(shard)
        self._rescore = rescore
        self.folder = folder
        self.manifest = snapshot.manifest
        self.number = shard
        self.first_id, self.n_passages = entry.first_id, entry.n_passages
        self.max_k = max_k
        self.max_rows = max_rows
        self._index = Index.read(files / INDEX, huge_pages=huge_pages)
        dtype, shape = self.manifest.vectors_dtype, (self.n_passages, self.manifest.dimension)
        self._vectors: Exact = read_array(files / VECTORS, dtype, shape)  # to be read in turn
        self._single = SingleRows(files / VECTORS, dtype, shape)
        self._passages = PassageReader(files, self.first_id, self.manifest.fields)
        self._passages.read_singly()
        found = len(self._index), len(self._passages)
        if found != (self.n_passages, self.n_passages):
            raise InvalidSnapshot(f"{files}: index and passages are not those of the manifest: {found}")
        self._mapped = self._index  # who owns the memory of the next
        held = self._index.rows() if device == "cpu" else None
        self._rows: Exact = self._single.rows if held is None else held  # (n_passages, d)
        self._index = self._index.moved(self._vectors, device)
        self._longest = LARGEST_SCORE / max(self.manifest.max_norm, self._index.max_norm, 1.0)  # that a query may be
        self.is_exact = self._index.is_flat
        self._scan = None
        if entry.has_scan and device == "cpu":
            self._scan = _read_scan(files, self._vectors.shape, self.manifest.max_norm, huge_pages)
        built = SearchParameters(**(self.manifest.search or SearchDefaults()).model_dump())
        max_candidates = MAX_CANDIDATES if device == "cpu" else gpu.MAX_CANDIDATES
        self._width = Width(self._index, self.manifest.factory, built, max_candidates, max_width)
        self._tuning = _tuning(self._vectors, n_threads, self._scan)
        self.words = ShardWords(snapshot, shard, self._single)
        searched = [files / name for name in (INDEX, CODES) if keep_in_memory and (files / name).exists()]
        self._kept = [keep(path) for path in searched]  # as long as this shard is

    def search(self, queries: Float32, k: int, deadline: Deadline, parameters: SearchParameters = AS_BUILT) -> Hits:
        """The best k of this shard for each of the (n, d) queries.

        Raises:
            InvalidRequest: k, the shape or a value of the queries is out of range; names it and its limits.
            DeadlineExceeded: it was not this search's turn in time.
        """
        return self.search_checked(self.check(queries, k, parameters), k, parameters, deadline)

    def check(self, queries: Float32, k: int, parameters: SearchParameters) -> Float32:
        """The queries as `search_checked` takes them. Raises InvalidRequest as `search`."""
        queries = check_search(queries, k, self.manifest.dimension, self.max_k, self.max_rows, self._longest)
        if parameters is not AS_BUILT and parameters != AS_BUILT:
            self._width.check(k, parameters)
        return queries

    def search_checked(self, queries: Float32, k: int, parameters: SearchParameters, deadline: Deadline) -> Hits:
        """As `search`, of any number of queries that were checked before, perhaps in several parts."""
        if not self.n_passages:  # not every index type can be asked when it is empty
            shape = (len(queries), k)
            return Hits(np.full(shape, NO_HIT), np.full(shape, -np.inf, np.float32), self.manifest.snapshot_id)
        parameters = self._width.filled(parameters)
        m = min(self.n_passages, self._width.n_candidates(k, parameters))
        n = max(1, CANDIDATES_AT_ONCE // m)
        parts = [self._search(queries[i : i + n], k, m, parameters, deadline) for i in range(0, len(queries), n)]
        ids, scores = (np.concatenate(column) for column in zip(*parts, strict=True)) if len(parts) > 1 else parts[0]
        return Hits(ids, scores, self.manifest.snapshot_id)

    def search_exactly(self, queries: Float32, k: int) -> Hits:
        """The exact best k, whatever the index, up to ties within rounding: compares with every vector."""
        m = min(k + EXTRA, self.n_passages)
        scores, positions = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
        n = min(VECTORS_AT_ONCE, SCORES_AT_ONCE // len(queries) + 1)
        for start in range(0, self.n_passages, n):
            block = self._vectors[start : start + n]
            more_scores, more = best_of(block.astype(np.float32, copy=False), queries, min(m, len(block)))
            positions, scores = top_k(np.hstack([positions, more + start]), np.hstack([scores, more_scores]), m)
        return Hits(*self._rescored(queries, positions, k)[:2], self.manifest.snapshot_id)

    def width(self, parameters: SearchParameters) -> float:
        """How many times as widely as without parameters a search with these looks, at least 1."""
        return self._width.times(parameters)

    @property
    def reads_all(self) -> bool:
        """Whether a search reads every vector, and so takes hardly longer for a dozen rows than for one."""
        return self.is_exact and self._scan is None

    def goes_on_beside(self, n_rows: int) -> bool:
        """Whether a search of so many rows may go on beside another one, and be done before that."""
        if self.is_exact:
            return not self.reads_all and n_rows <= self._tuning.scan_up_to
        return self._index.may_join and self._tuning.n_threads == 1

    def wider(self, parameters: SearchParameters) -> SearchParameters | None:
        """A search about twice as wide as these parameters; None if there is none."""
        return self._width.wider(parameters)

    def prewarm(self) -> None:
        """See to it that the first searches take no longer than later ones."""
        codes = (self._scan.scales, self._scan.codes) if self._scan else ()
        read = (*codes, *self._index.mapped, self._rows)
        self._single.are_in_memory = prewarm(*read) == len(read) and self._rows is self._single.rows

    def self_test(self) -> None:
        """Look whether some stored vectors are found, and scored as they are, as by an index of other vectors they
        would not be.

        Raises:
            InvalidSnapshot: they are not.
        """
        if not self.n_passages:
            return
        rows = np.linspace(0, self.n_passages - 1, SELF_TESTS).astype(np.int64)
        queries = self._single.at(rows)
        built = self._width.built
        m = min(self.n_passages, self._width.n_candidates(SELF_TEST_K, built))
        approximate, candidates = self._index.search(queries, m, built, self._tuning, Deadline.never())
        _, best, errors = self._rescored(queries, candidates, 1)
        least = canonical_scores(queries, queries)[:, None] - 2 * errors[:, None]
        found = best >= least
        if self._index.keeps_vectors:
            scores = canonical_scores(queries[:, None], self._rows[candidates].astype(np.float32, copy=False))
            off = np.abs(approximate.astype(np.float64) - scores) > errors[:, None]
            found &= not (off[candidates >= 0].any() or (self._rows[rows] != queries).any())
        contenders = self._scan.contenders(queries, 1, Deadline.never()) if self._scan else None
        if contenders is not None:
            found &= self._rescored(queries, contenders, 1)[1] >= least
        n_good = int(np.count_nonzero(found))
        n_least = SELF_TESTS if self._index.is_flat else SELF_TESTS // 2
        if n_good < n_least:
            raise InvalidSnapshot(
                f"{self.folder}: shard {self.number}: of {SELF_TESTS} stored vectors at least {n_least} must find "
                f"themselves or better, {n_good} did: the index is not one of these vectors, or finds nothing in them"
            )

    def fetch(self, ids: Sequence[int]) -> list[Passage]:
        """The passages of these ids, in their order.

        Raises:
            UnknownPassage: an id is not of this shard.
        """
        return [self._passages[position] for position in self._positions(ids)]

    def find(self, lasting_ids: Sequence[str]) -> list[Passage]:
        """Those passages of these lasting ids that are here, in their order; none where origins are not known."""
        positions = map(self._passages.find, lasting_ids)
        return [self._passages[position] for position in positions if position is not None]

    def fetch_vectors(self, ids: Sequence[int]) -> Float32:
        """The exact (n, d) vectors of these ids, in their order. Raises as `fetch`."""
        return self._single.at(np.array(self._positions(ids), np.int64))

    def _search(
        self, queries: Float32, k: int, m: int, parameters: SearchParameters, deadline: Deadline
    ) -> tuple[Int64, Float32]:
        """The best k of m candidates each, or of a scan's contenders: ids and scores, (n, k) both."""
        if self._scan is not None and len(queries) <= self._tuning.scan_up_to:
            contenders = self._scan.contenders(queries, k, deadline)
            if contenders is not None:
                return self._rescored(queries, contenders, k)[:2]
        approximate, candidates = self._index.search(queries, m, parameters, self._tuning, deadline)
        if m <= k or not self._index.keeps_vectors:
            return self._rescored(queries, candidates, k)[:2]
        ids, scores, errors = self._rescored(queries, candidates, k, approximate)
        if self._index.is_flat and m < self.n_passages:
            # Whatever FAISS left out scores at most as the last it gave: if that is too close, look at all above.
            least = scores[:, -1] - errors
            for i in np.flatnonzero(approximate[:, -1] >= least).tolist():
                if not queries[i].any():  # nor need all be looked at to know that their scores are 0
                    ids[i], scores[i] = self.first_id + np.arange(k), 0
                    continue
                deadline.check("a query was compared with all vectors")
                positions = self._index.at_least(queries[i], least[i], self._tuning, deadline)
                (ids[i],), (scores[i],), _ = self._rescored(queries[i : i + 1], positions[None], k)
        return ids, scores

    def _rescored(
        self, queries: Float32, candidates: Int64, k: int, approximate: Float32 | None = None
    ) -> tuple[Int64, Float32, Float64]:
        """See `rescoring.rescore`."""
        if self._rows is self._single.rows:
            self._single.read(candidates)
        return self._rescore(
            queries,
            candidates,
            self._rows,
            k,
            max_norm=self.manifest.max_norm,
            first_id=self.first_id,
            approximate=approximate,
        )

    def _positions(self, ids: Sequence[int]) -> list[int]:
        last_id = self.first_id + self.n_passages - 1
        for passage_id in ids:
            if not self.first_id <= passage_id <= last_id:
                raise UnknownPassage(f"passage id must be {self.first_id}..{last_id} in this shard, got {passage_id}")
        return [passage_id - self.first_id for passage_id in ids]


def _read_scan(folder: Path, shape: tuple[int, ...], max_norm: float, huge_pages: bool) -> "Scan":
    from openbook.index.shard.scan import Scan  # compiled, for those who have one

    return Scan.read(folder, shape, max_norm, huge_pages)


_TUNINGS: dict[tuple[int, int, bool], Tuning] = {}


def _tuning(vectors: Exact, n_threads: int, scan: "Scan | None") -> Tuning:
    """Measured once in a process for each dimension, and not at all where a search takes no time anyhow."""
    n_passages, dimension = vectors.shape
    if n_passages * dimension < CALIBRATION_NUMBERS:
        return Tuning(max(1, n_threads))
    key = dimension, n_threads, scan is not None
    if key not in _TUNINGS:
        sample = np.array(vectors[: CALIBRATION_NUMBERS // dimension], np.float32)
        _TUNINGS[key] = tuning = calibrate(sample, n_threads, scan.first(len(sample)).contenders if scan else None)
        log.info("searches with %d threads, through BLAS from %d queries on", tuning.n_threads, tuning.blas_from)
        if scan:
            log.info("scans codes for up to %d queries", tuning.scan_up_to)
    return _TUNINGS[key]
