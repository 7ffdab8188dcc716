import re
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest
from same_hits import same

from openbook.core.deadline import Deadline
from openbook.core.topk import canonical_scores, top_k
from openbook.core.types import AS_BUILT, Float32, Hits, Int64, Passage, SearchParameters
from openbook.errors import DeadlineExceeded, InvalidConfig, InvalidRequest, InvalidSnapshot, StartupError
from openbook.index.building.build import build_snapshot
from openbook.index.shard import gpu
from openbook.index.shard import shard as shard_module
from openbook.index.shard.engine import NEVER, Index, Tuning, calibrate
from openbook.index.shard.shard import Shard

N, D = 600, 16
RNG = np.random.default_rng(0)
VECTORS = RNG.standard_normal((N, D)).astype(np.float32)
QUERIES = RNG.standard_normal((30, D)).astype(np.float32)
BEAM_OF_64 = SearchParameters(ef_search=64)


def build(out: Path, factory: str, vectors: Float32 = VECTORS) -> Shard:
    passages = [Passage(i, "d", "", "") for i in range(len(vectors))]
    build_snapshot(passages, vectors, out, 1, factory, "e", "f")
    return Shard(out, 0)


def twin(queries: Float32, k: int) -> Hits:
    """The exact best k: every score, then a sort."""
    scores = np.stack([canonical_scores(query, VECTORS) for query in queries])
    return Hits(*top_k(np.tile(np.arange(N), (len(queries), 1)), scores, k), "")


@pytest.mark.parametrize(
    ("factory", "parameters", "message"),
    [
        ("Flat", SearchParameters(nprobe=1), "type Flat takes no search parameters: it is exact, got nprobe"),
        ("Flat", SearchParameters(rerank_factor=2), "type Flat takes no search parameters"),
        ("HNSW8", SearchParameters(nprobe=1), "type HNSW8 takes only ef_search and rerank_factor, got nprobe"),
        ("IVF4,SQ8", SearchParameters(ef_search=9), "takes only nprobe and rerank_factor, got ef_search"),
        ("PCA8,IVF4,SQ8", SearchParameters(ef_search=9), "takes only nprobe and rerank_factor, got ef_search"),
        ("SQ8", SearchParameters(nprobe=9), "type SQ8 takes only rerank_factor, got nprobe"),
        ("SQ8", SearchParameters(rerank_factor=65537), r"k \* rerank_factor must be at most 65536, got 1 \* 65537"),
    ],
)
def test_parameters_that_an_index_does_not_know(
    tmp_path: Path, factory: str, parameters: SearchParameters, message: str
) -> None:
    shard = build(tmp_path / "s", factory)
    with pytest.raises(InvalidRequest, match=message):
        shard.search(QUERIES, 1, Deadline.never(), parameters)


@pytest.mark.parametrize(
    ("factory", "wide", "most", "times"),
    [
        ("IVF16,Flat", SearchParameters(nprobe=1 << 20), "nprobe must be at most 8, 1 times as built", 2.0),
        ("HNSW12", SearchParameters(ef_search=1 << 20), "ef_search must be at most 64, 1 times as built", N / 64),
        ("SQ8", SearchParameters(rerank_factor=60), "rerank_factor must be at most 4, 1 times as built", 15.0),
        ("IVF16,SQ8", SearchParameters(nprobe=1, rerank_factor=5), "rerank_factor must be at most 4", 1.25),
    ],
)
def test_how_many_times_as_widely_as_built_an_index_is_searched(
    tmp_path: Path, factory: str, wide: SearchParameters, most: str, times: float
) -> None:
    shard = build(tmp_path / "s", factory)
    assert (shard.width(AS_BUILT), shard.width(SearchParameters(rerank_factor=1))) == (1.0, 1.0)
    assert shard.width(wide) == times
    limited = Shard(tmp_path / "s", 0, max_width=1)
    limited.search(QUERIES, 10, Deadline.never())
    with pytest.raises(InvalidRequest, match=most):
        limited.search(QUERIES, 10, Deadline.never(), wide)
    enough = Shard(tmp_path / "s", 0, max_width=15)
    same(enough.search(QUERIES, 10, Deadline.never(), wide), shard.search(QUERIES, 10, Deadline.never(), wide))


@pytest.mark.parametrize(
    ("factory", "narrow", "wide"),
    [
        ("IVF16,Flat", SearchParameters(nprobe=1), SearchParameters(nprobe=1 << 20)),
        ("PCA16,IVF16,SQ8", SearchParameters(nprobe=1), SearchParameters(nprobe=16, rerank_factor=60)),
        ("HNSW12", SearchParameters(ef_search=1), SearchParameters(ef_search=1 << 20)),
        ("PQ4x4fs", SearchParameters(rerank_factor=1), SearchParameters(rerank_factor=60)),
    ],
)
def test_wider_finds_everything_and_narrower_less(
    tmp_path: Path, factory: str, narrow: SearchParameters, wide: SearchParameters
) -> None:
    shard, exact = build(tmp_path / "s", factory), build(tmp_path / "flat", "Flat")
    best = exact.search(QUERIES, 10, Deadline.never())
    same(shard.search(QUERIES, 10, Deadline.never(), wide), best)
    found = shard.search(QUERIES, 10, Deadline.never(), narrow)
    assert np.mean(found.ids == best.ids) < 0.9
    for query, ids, scores in zip(QUERIES, found.ids, found.scores, strict=True):
        assert canonical_scores(query, VECTORS[ids]).tolist() == scores.tolist()
    same(shard.search(QUERIES, 10, Deadline.never(), AS_BUILT), shard.search(QUERIES, 10, Deadline.never()))


def test_a_graph_behind_a_transform_is_searched_as_widely_as_others(tmp_path: Path) -> None:
    shard = build(tmp_path / "s", "PCA8,HNSW12")
    same(shard.search(QUERIES, 3, Deadline.never()), shard.search(QUERIES, 3, Deadline.never(), BEAM_OF_64))
    assert (shard.width(BEAM_OF_64), shard.wider(AS_BUILT)) == (1, SearchParameters(ef_search=128, rerank_factor=8))


def test_how_widely_a_graph_is_searched_is_what_its_file_says() -> None:
    index = Index.from_factory("PCA8,HNSW12", D)
    index.train(VECTORS)
    index.add(VECTORS)
    assert index.reach(AS_BUILT) == 64
    index._inner.hnsw.efSearch = 16  # as it was built until November 2026
    assert (index.reach(AS_BUILT), index.wider(AS_BUILT)) == (16, SearchParameters(ef_search=32))


def test_a_large_batch_is_searched_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = build(tmp_path / "s", "Flat")
    whole = shard.search(QUERIES, 10, Deadline.never())
    monkeypatch.setattr(shard_module, "CANDIDATES_AT_ONCE", 100)
    same(shard.search(QUERIES, 10, Deadline.never()), whole)


def test_a_query_of_zeros_is_compared_with_nothing_and_finds_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = build(tmp_path / "s", "Flat")
    queries = np.concatenate([QUERIES[:2], np.zeros((2, D), np.float32), -np.zeros((1, D), np.float32)])
    monkeypatch.setattr(type(shard._index), "at_least", None)
    found = shard.search(queries, 10, Deadline.never())
    same(found, twin(queries, 10))
    assert found.ids[2:].tolist() == 3 * [list(range(10))]
    assert not found.scores[2:].view(np.int32).any()


def test_what_must_be_compared_with_all_vectors_stops_at_its_deadline(tmp_path: Path) -> None:
    shard = build(tmp_path / "s", "Flat")
    tiny = np.full((2, D), 1e-38, np.float32)
    same(shard.search(tiny, 10, Deadline.never()), twin(tiny, 10))
    with pytest.raises(DeadlineExceeded):
        shard.search(tiny, 10, Deadline.after(0))


@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "SQ8", "IVF16,SQ8"])
def test_the_longest_query_that_is_taken_overflows_nowhere(tmp_path: Path, factory: str) -> None:
    shard = build(tmp_path / "s", factory)
    short = shard.search(QUERIES, 10, Deadline.never())
    norm = np.linalg.norm(QUERIES.astype(np.float64), axis=1).max()
    scale = np.float32(2.0 ** np.floor(np.log2(shard._longest / norm)))
    long = shard.search(QUERIES * scale, 10, Deadline.never())
    same(long, Hits(short.ids, short.scores * scale, ""))
    with pytest.raises(InvalidRequest, match="norms up to"):
        shard.search(QUERIES * scale * 4, 10, Deadline.never())


def test_the_index_of_other_vectors_fails_its_test(tmp_path: Path) -> None:
    for factory in ("Flat", "IVF16,SQ8"):
        shard, other = build(tmp_path / factory, factory), build(tmp_path / f"{factory}-", factory, VECTORS[::-1])
        shard.self_test()
        shard._index = other._index
        with pytest.raises(InvalidSnapshot, match="the index is not one of these vectors"):
            shard.self_test()


@pytest.mark.parametrize("factory", ["Flat", "HNSW8"])
def test_vectors_in_the_index_are_read_there_and_must_be_those_stored(tmp_path: Path, factory: str) -> None:
    shard = build(tmp_path / "s", factory)
    assert not np.shares_memory(shard._rows, shard._single.rows)
    np.testing.assert_array_equal(shard._rows, VECTORS)
    shard._single.rows = VECTORS[::-1]
    with pytest.raises(InvalidSnapshot, match="the index is not one of these vectors"):
        shard.self_test()


@pytest.mark.parametrize("factory", ["Flat", "HNSW8", "IVF16,SQ8"])
def test_in_huge_pages_it_answers_the_same(tmp_path: Path, factory: str) -> None:
    mapped, huge = build(tmp_path / "s", factory), Shard(tmp_path / "s", 0, huge_pages=True)
    huge.prewarm()
    huge.self_test()
    same(huge.search(QUERIES, 10, Deadline.never()), mapped.search(QUERIES, 10, Deadline.never()))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is locked")
def test_what_is_searched_stays_in_memory_where_that_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = build(tmp_path / "s", "IVF16,SQ8")
    kept = Shard(tmp_path / "s", 0, keep_in_memory=True)
    assert len(re.findall(r"Locked: +[1-9]\d* kB", Path("/proc/self/smaps").read_text())) == 1
    same(kept.search(QUERIES, 10, Deadline.never()), mapped.search(QUERIES, 10, Deadline.never()))
    monkeypatch.setattr("os.sysconf", lambda name: 1)
    with pytest.raises(InvalidConfig, match=r"keep_in_memory: the .* of .*index.faiss cannot be kept: at most 0.0 GB"):
        Shard(tmp_path / "s", 0, keep_in_memory=True)


def test_what_goes_on_beside_a_longer_search(tmp_path: Path) -> None:
    factories = ("Flat", "HNSW8", "IVF16,SQ8", "IVF16,Flat", "OPQ4,IVF16,Flat")
    assert [build(tmp_path / each, each).goes_on_beside(4) for each in factories] == [False, True, True, True, False]
    assert not Shard(tmp_path / "HNSW8", 0, n_threads=2).goes_on_beside(1)
    passages = [Passage(i, "", "", "") for i in range(len(VECTORS))]
    build_snapshot(passages, VECTORS, tmp_path / "scanned", 1, "Flat", "e", "f", scan="int8")
    scanned = Shard(tmp_path / "scanned", 0)
    n = scanned._tuning.scan_up_to
    assert (scanned.goes_on_beside(n), scanned.goes_on_beside(n + 1)) == (True, False)


def test_an_empty_shard_passes_its_test(tmp_path: Path) -> None:
    passages = [Passage(0, "d", "", "")]
    build_snapshot(passages, VECTORS[:1], tmp_path / "s", 2, "Flat", "e", "f")
    for number in (0, 1):
        Shard(tmp_path / "s", number).self_test()


def test_tuning_is_measured_and_any_tuning_answers_the_same(tmp_path: Path) -> None:
    for n_threads in (0, 1):
        tuning = calibrate(VECTORS, n_threads)
        assert tuning.n_threads >= 1
        assert tuning.blas_from >= 2
    shard = build(tmp_path / "s", "Flat")
    hits = shard.search(QUERIES, 10, Deadline.never())
    for tuning in (Tuning(1, 1), Tuning(2, 1), Tuning(1, NEVER)):
        shard._tuning = tuning
        same(shard.search(QUERIES, 10, Deadline.never()), hits)


def test_a_gpu_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = build(tmp_path / "s", "Flat")
    assert shard._index.moved(VECTORS, "cpu") is shard._index
    if not hasattr(faiss, "StandardGpuResources"):
        with pytest.raises(
            StartupError, match=r"device cuda:0: this FAISS was built for CPUs: it takes 'openbook\[gpu\]"
        ):
            Shard(tmp_path / "s", 0, device="cuda:0")
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    with pytest.raises(StartupError, match="device cuda:2: must be below cuda:2, FAISS sees 2 GPUs"):
        Shard(tmp_path / "s", 0, device="cuda:2")
    monkeypatch.setattr(gpu, "_free_bytes", lambda number: number << 30)
    with pytest.raises(StartupError, match=r"cuda:1: must have 2 GiB free, and room for the index; has 1\.0"):
        shard._index.moved(VECTORS, "cuda:1")
    monkeypatch.setattr(gpu, "_free_bytes", lambda number: None)  # not to be seen
    graph = build(tmp_path / "graph", "HNSW8")
    if not hasattr(faiss, "GpuIndexCagra"):
        with pytest.raises(StartupError, match="HNSW becomes CAGRA there, which needs the build faiss-gpu-cuvs"):
            graph._index.moved(VECTORS, "cuda:1")


class _KeptByCagra:
    """Search parameters, as FAISS for GPUs has them."""

    def __init__(self, itopk_size: int = 64) -> None:
        self.itopk_size = itopk_size


class _Cagra:
    """A graph on a GPU, as far as cuVS's limit goes: no more is found than is kept on the way."""

    def __init__(self, vectors: Float32) -> None:
        self.ntotal, self.d = vectors.shape
        self.kept: list[int] = []
        self._flat = faiss.IndexFlatIP(self.d)
        self._flat.add(vectors)

    def search(self, queries: Float32, k: int, params: _KeptByCagra | None = None) -> tuple[Float32, Int64]:
        kept = (params or _KeptByCagra()).itopk_size
        if k > kept or kept % 32:
            raise RuntimeError(f"topk = {k} must be smaller than itopk_size = {kept}")
        self.kept.append(kept)
        scores, positions = self._flat.search(queries, k)
        return scores, positions


@pytest.mark.parametrize(
    ("k", "parameters", "kept"),
    [
        (10, AS_BUILT, 64),
        (17, AS_BUILT, 96),
        (100, AS_BUILT, 416),
        (10, SearchParameters(ef_search=200), 224),
        (10, SearchParameters(ef_search=1 << 20), 608),
        (100, SearchParameters(rerank_factor=5), 512),
    ],
)
def test_a_graph_on_a_gpu_keeps_all_that_it_has_to_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, k: int, parameters: SearchParameters, kept: int
) -> None:
    monkeypatch.setattr(faiss, "GpuIndexCagra", _Cagra, raising=False)
    monkeypatch.setattr(faiss, "SearchParametersCagra", _KeptByCagra, raising=False)
    there = _Cagra(VECTORS)
    monkeypatch.setattr(gpu, "move", lambda index, vectors, device: there)
    build(tmp_path / "s", "HNSW8")
    shard = Shard(tmp_path / "s", 0, device="cuda:0")
    same(shard.search(QUERIES, k, Deadline.never(), parameters), twin(QUERIES, k))
    assert there.kept == [kept]


@pytest.mark.parametrize("factory", ["IVF16_HNSW8,SQ8", "PCA8,IVF16_HNSW8,Flat", "IVF16,SQ8", "Flat"])
def test_cells_chosen_by_all_centroids_are_those_that_a_graph_of_them_chooses(factory: str) -> None:
    index = faiss.index_factory(VECTORS.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    index.train(VECTORS)
    index.add(VECTORS)
    before = index.search(QUERIES, 10)
    for _ in range(2):
        gpu.compare_all_centroids(index)
    scores, found = index.search(QUERIES, 10)
    assert np.array_equal(found, before[1])
    # Some types add the centroid's score to that of the rest, and a graph's sums are in another order than a scan's.
    assert np.allclose(scores, before[0], rtol=1e-5, atol=1e-5)
    ivf = faiss.try_extract_index_ivf(index)
    assert ivf is None or isinstance(faiss.downcast_index(ivf.quantizer), faiss.IndexFlat)
