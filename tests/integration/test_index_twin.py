"""The index tier and its exact twin get the same questions and must give the same answers, to the bit."""

import asyncio
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from same_hits import same

from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.topk import merge, top_k
from openbook.core.types import AS_BUILT, Float32, Hits, Passage, RetrievalSettings, SearchParameters
from openbook.errors import InvalidSnapshot
from openbook.index.building.build import build_snapshot
from openbook.index.client.sharded import ShardedIndex
from openbook.index.shard.shard import Shard
from openbook.testing import ExactIndex, served

D = 24
BATCHES = (1, 16, 64)
KS = (1, 5, 100, 1000)


def gaussian(rng: np.random.Generator) -> Float32:
    return rng.standard_normal((900, D)).astype(np.float32)


def small_integers(rng: np.random.Generator) -> Float32:
    """Ties everywhere, and every score exact in any arithmetic."""
    return rng.integers(-2, 3, (700, D)).astype(np.float32)


def identical_masses(rng: np.random.Generator) -> Float32:
    """Hundreds of passages with one vector, in every shard, and some that differ from it in the last bit."""
    vectors = gaussian(rng)
    vectors[rng.permutation(900)[:600]] = vectors[0]
    vectors[100:140, 0] = np.nextafter(vectors[0, 0], np.float32(9))
    return vectors


def all_alike(rng: np.random.Generator) -> Float32:
    return np.ones((300, D), np.float32)


def far_from_the_origin(rng: np.random.Generator) -> Float32:
    """Scores so large beside their differences that float32 sums get the order wrong."""
    return (1000 + rng.standard_normal((800, D)) * 1e-4).astype(np.float32)


def fewer_than_shards(rng: np.random.Generator) -> Float32:
    return rng.standard_normal((5, D)).astype(np.float32)


CORPORA = (gaussian, small_integers, identical_masses, all_alike, far_from_the_origin, fewer_than_shards)


def passages_of(vectors: Float32) -> list[Passage]:
    return [Passage(i, f"doc-{i // 3}", f"title {i}", f"text {i}") for i in range(len(vectors))]


def questions(vectors: Float32, n: int, rng: np.random.Generator) -> Float32:
    """Half of them passages themselves, so that masses of equal vectors come out on top."""
    queries = rng.integers(-3, 4, (n, D)).astype(np.float32)
    own = rng.integers(0, len(vectors), (n + 1) // 2)
    queries[: len(own)] = vectors[own]
    return queries


def rounded(vectors: Float32, exact_dtype: str) -> Float32:
    """What a snapshot holds of them."""
    return vectors.astype(exact_dtype).astype(np.float32)


@pytest.mark.parametrize(("exact_dtype", "n_shards"), [*(("float32", n) for n in (1, 2, 4, 7)), ("float16", 4)])
@pytest.mark.parametrize("corpus", CORPORA)
def test_the_tier_answers_as_its_twin(
    corpus: Callable[[np.random.Generator], Float32], n_shards: int, exact_dtype: Any, tmp_path: Path
) -> None:
    rng = np.random.default_rng(n_shards)
    given = corpus(rng)
    passages, vectors = passages_of(given), rounded(given, exact_dtype)
    manifest = build_snapshot(
        passages, given, tmp_path / "s", n_shards, "Flat", "none", "none", exact_dtype=exact_dtype
    )
    twin = ExactIndex(passages, vectors, manifest.snapshot_id)

    async def scenario() -> None:
        with served(tmp_path / "s") as servers:
            tier = ShardedIndex([server.address for server in servers], timeout_s=60)
            for n in BATCHES:
                queries = questions(vectors, n, rng)
                for k in KS:
                    ours = await tier.search(queries, RetrievalSettings(k=k), Context())
                    theirs = await twin.search(queries, RetrievalSettings(k=k), Context())
                    same(ours, theirs)
                    assert ours.snapshot_id == theirs.snapshot_id
            wanted = rng.integers(0, len(vectors), 50).tolist()
            found, stored = await tier.fetch_with_vectors(wanted, tier.snapshot_id, Context())
            assert found == [passages[i] for i in wanted]
            np.testing.assert_array_equal(stored, vectors[wanted])
            await tier.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("exponent", [-30, 0, 30])
def test_scores_are_the_inner_products_that_anybody_computes(exponent: int, tmp_path: Path) -> None:
    """Against plain integer arithmetic, which shares nothing with ours: the twin is not merely of our own opinion."""
    rng = np.random.default_rng(0)
    whole = rng.integers(-40, 41, (500, D))
    asked = rng.integers(-40, 41, (16, D))
    vectors, queries = (np.ldexp(a.astype(np.float32), exponent).astype(np.float32) for a in (whole, asked))
    build_snapshot(passages_of(vectors), vectors, tmp_path / "s", 3, "Flat", "none", "none")
    products = (asked @ whole.T).tolist()  # exact: integers
    expected = [sorted((-score, i) for i, score in enumerate(row))[:20] for row in products]

    async def scenario() -> None:
        with served(tmp_path / "s") as servers:
            tier = ShardedIndex([server.address for server in servers], timeout_s=60)
            hits = await tier.search(queries, RetrievalSettings(k=20), Context())
            await tier.close()
        assert hits.ids.tolist() == [[i for _, i in row] for row in expected]
        assert hits.scores.tolist() == [[-score * 4.0**exponent for score, _ in row] for row in expected]

    asyncio.run(scenario())


SCANNED = ", scanned"
FACTORIES = (
    "Flat",
    f"Flat{SCANNED}",
    "HNSW32",
    "HNSW32,SQ8",
    "SQ8",
    "SQfp16",
    "PQ12x4fs",
    "RaBitQ",
    "RaBitQfs",
    "IVF8,Flat",
    "IVF8,SQ8",
    "IVF8_HNSW32,SQ8",
    "IVF8,PQ12x4fs",
    "OPQ12,IVF8,PQ12x4fs",
    "PCA16,IVF8,SQ8",
    "IVF8,RaBitQ",
    "IVF8,RaBitQfs",
)
CORPORA_OF = {
    # A graph of vectors that are almost or quite alike has parts that no search reaches.
    "HNSW32": (gaussian,),
    "HNSW32,SQ8": (gaussian,),
    # Finds nothing where all vectors are their mean; see below.
    "RaBitQfs": (gaussian, small_integers, identical_masses, far_from_the_origin),
}


def built(
    passages: list[Passage],
    vectors: Float32,
    out: Path,
    n_shards: int,
    factory: str,
    *,
    queries: Float32 | None = None,
    exact_dtype: Any = "float32",
) -> None:
    kind = factory.removesuffix(SCANNED)
    scan = "int8" if kind != factory else None
    build_snapshot(
        passages, vectors, out, n_shards, kind, "none", "none", queries=queries, scan=scan, exact_dtype=exact_dtype
    )


def everything(factory: str) -> SearchParameters:
    """Every cell, every node, every candidate: then any index is exact."""
    return SearchParameters(
        nprobe=1 << 20 if "IVF" in factory else None,
        ef_search=1 << 20 if factory.startswith("HNSW") else None,
        rerank_factor=None if factory.startswith("Flat") else 60,
    )


def shards_of(folder: Path, n_shards: int) -> list[Shard]:
    """All of a snapshot, each tested as before it is served."""
    shards = [Shard(folder, number) for number in range(n_shards)]
    for shard in shards:
        shard.prewarm()
        shard.self_test()
    return shards


def ask(shards: Sequence[Shard], queries: Float32, k: int, parameters: SearchParameters) -> Hits:
    """The best over all shards."""
    return merge([shard.search(queries, k, Deadline.never(), parameters) for shard in shards], k)


async def over_the_wire(folder: Path, queries: Float32, k: int) -> Hits:
    """What the tier finds, as it was built."""
    with served(folder) as servers:
        tier = ShardedIndex([server.address for server in servers], timeout_s=60)
        hits = await tier.search(queries, RetrievalSettings(k=k), Context())
        await tier.close()
        return hits


@cache
def asked_of_twin(
    corpus: Callable[[np.random.Generator], Float32], seed: int, exact_dtype: str
) -> tuple[list[Passage], Float32, Float32, list[tuple[Float32, int, Hits]]]:
    """Passages with their vectors, as given and as held; and queries and k with what the twin finds: for every kind of
    index the same.
    """
    rng = np.random.default_rng(seed)
    given = corpus(rng)
    passages, vectors = passages_of(given), rounded(given, exact_dtype)
    twin = ExactIndex(passages, vectors)
    asked = [(queries, k) for queries in [questions(vectors, n, rng) for n in (1, 33)] for k in (17, 900)]
    found = [(q, k, asyncio.run(twin.search(q, RetrievalSettings(k=k), Context()))) for q, k in asked]
    return passages, given, vectors, found


@cache
def clustered() -> tuple[list[Passage], Float32, Float32, Hits]:
    """3000 passages and 64 queries about the same centres; and their thousand nearest."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((40, D))
    vectors = (centres[rng.integers(0, 40, 3000)] + 0.3 * rng.standard_normal((3000, D))).astype(np.float32)
    queries = (centres[rng.integers(0, 40, 64)] + 0.3 * rng.standard_normal((64, D))).astype(np.float32)
    passages = passages_of(vectors)
    nearest = ExactIndex(passages, vectors).search(queries, RetrievalSettings(k=1000), Context())
    return passages, vectors, queries, asyncio.run(nearest)


@pytest.mark.parametrize(("exact_dtype", "n_shards"), [("float32", 1), ("float32", 3), ("float16", 3)])
@pytest.mark.parametrize("factory", FACTORIES)
def test_every_index_searched_as_widely_as_it_goes_is_its_twin(
    factory: str, n_shards: int, exact_dtype: str, tmp_path: Path
) -> None:
    corpora = CORPORA_OF.get(factory, CORPORA[:-1])
    if exact_dtype == "float16":
        corpora = tuple(each for each in corpora if each in (gaussian, identical_masses))
    for corpus in corpora:
        passages, given, vectors, asked = asked_of_twin(corpus, n_shards, exact_dtype)
        folder = tmp_path / corpus.__name__
        built(passages, given, folder, n_shards, factory, queries=vectors[:9], exact_dtype=exact_dtype)
        shards = shards_of(folder, n_shards)
        for queries, k, theirs in asked:
            same(ask(shards, queries, k, everything(factory)), theirs)


@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("factory", FACTORIES)
def test_every_index_as_built_finds_most_and_scores_exactly(factory: str, n_shards: int, tmp_path: Path) -> None:
    passages, vectors, queries, exact = clustered()
    built(passages, vectors, tmp_path / "s", n_shards, factory, queries=queries)
    shards = shards_of(tmp_path / "s", n_shards)
    ours = ask(shards, queries, 10, AS_BUILT)
    alone = [ask(shards, query[None], 10, AS_BUILT) for query in queries[:16]]
    if n_shards > 1:
        same(asyncio.run(over_the_wire(tmp_path / "s", queries, 10)), ours)
    best = exact.ids[:, :10]
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(ours.ids.tolist(), best.tolist(), strict=True)]) > 0.8
    for row in range(len(queries)):
        scores = dict(zip(exact.ids[row].tolist(), exact.scores[row].tolist(), strict=True))
        assert ours.scores[row].tolist() == [scores[i] for i in ours.ids[row].tolist()]
    ids, ordered = top_k(ours.ids, ours.scores, 10)
    same(ours, Hits(ids, ordered, ours.snapshot_id))
    for row, hits in enumerate(alone):  # the company in which a query is searched changes nothing
        same(hits, Hits(ours.ids[row : row + 1], ours.scores[row : row + 1], ours.snapshot_id))


def test_an_index_that_finds_nothing_is_not_served(tmp_path: Path) -> None:
    vectors = all_alike(np.random.default_rng(0))
    build_snapshot(passages_of(vectors), vectors, tmp_path / "s", 1, "RaBitQfs", "none", "none")
    with (
        pytest.raises(InvalidSnapshot, match="finds nothing in them"),
        served(tmp_path / "s"),
    ):
        pass


@pytest.mark.parametrize("factory", [f"Flat{SCANNED}", "HNSW32", "IVF4,Flat", "IVF4,SQ8", "SQ8", "PQ8x4fs"])
def test_empty_and_tiny_shards_of_any_kind(factory: str, tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((16, D)).astype(np.float32)
    passages = passages_of(vectors)
    built(passages, vectors, tmp_path / "s", 20, factory)

    async def scenario() -> None:
        with served(tmp_path / "s") as servers:
            tier = ShardedIndex([server.address for server in servers], timeout_s=60)
            ours = await tier.search(vectors[:3], RetrievalSettings(k=20), Context())
            theirs = await ExactIndex(passages, vectors).search(vectors[:3], RetrievalSettings(k=20), Context())
            np.testing.assert_array_equal(ours.ids, theirs.ids)
            np.testing.assert_array_equal(ours.scores, theirs.scores)
            await tier.close()

    asyncio.run(scenario())
