"""The bound of the scan holds to the last bit, and what it leaves out is in no answer."""

import errno
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from same_hits import same

from openbook.core.deadline import Deadline
from openbook.core.topk import canonical_scores, top_k
from openbook.core.types import Float32, Float64, Hits, Passage
from openbook.errors import InvalidSnapshot, StartupError
from openbook.index.building.build import build_snapshot
from openbook.index.disk.snapshot import CENTRE, VECTORS
from openbook.index.shard.engine import NEVER, SCAN_BATCHES, Tuning, best_of, calibrate
from openbook.index.shard.scan import Scan, _scan, write
from openbook.index.shard.shard import Shard

N, D = 600, 24


def gaussian(rng: np.random.Generator, n: int = N, d: int = D) -> Float32:
    return rng.standard_normal((n, d)).astype(np.float32)


def with_ties(rng: np.random.Generator) -> Float32:
    vectors = gaussian(rng)
    vectors[rng.permutation(N)[:40]] = vectors[0]
    vectors[100:110, 0] = np.nextafter(vectors[0, 0], np.float32(9))
    return vectors


def with_zeros(rng: np.random.Generator) -> Float32:
    return gaussian(rng) * (rng.random((N, 1)) < 0.7).astype(np.float32)


def huge(rng: np.random.Generator) -> Float32:
    return gaussian(rng) * np.float32(3e37)


def denormal(rng: np.random.Generator) -> Float32:
    """Many of them zero, and scales that float32 could not hold."""
    return gaussian(rng) * np.float32(2e-45)


def of_all_sizes(rng: np.random.Generator) -> Float32:
    return gaussian(rng) * np.exp2(rng.integers(-140, 60, (N, D))).astype(np.float32)


def far_from_the_origin(rng: np.random.Generator) -> Float32:
    return 1000 + gaussian(rng)


def with_an_outlier(rng: np.random.Generator) -> Float32:
    vectors = gaussian(rng)
    vectors[7, 3] = 1e20
    return vectors


def all_alike(rng: np.random.Generator) -> Float32:
    return np.tile(gaussian(rng, 1), (N, 1))


CORPORA = (
    gaussian, with_ties, with_zeros, huge, denormal, of_all_sizes, far_from_the_origin, with_an_outlier, all_alike,
)  # fmt: skip


def longest(vectors: Float32) -> float:
    return float(np.linalg.norm(vectors.astype(np.float64), axis=1).max())


def scan_of(folder: Path, vectors: Float32) -> Scan:
    np.save(folder / VECTORS, vectors)
    write(folder)
    return Scan.read(folder, vectors.shape, longest(vectors))


def queries_of(vectors: Float32, rng: np.random.Generator) -> Float32:
    """Some vectors themselves, some of other directions, all so long that no score overflows; zeros last."""
    d = vectors.shape[1]
    queries = np.concatenate([vectors[:3], gaussian(rng, 4, d), -vectors[3:5], np.zeros((1, d), np.float32)])
    limit = 1e38 / max(longest(vectors), 1.0)
    lengths = np.linalg.norm(queries.astype(np.float64), axis=1, keepdims=True)
    return (queries * np.minimum(1, 0.9 * limit / np.maximum(lengths, 1e-100))).astype(np.float32)


def bounds(scan: Scan, queries: Float32) -> tuple[Float64, Float64]:
    """Low and high of each query with each vector, as the compiled loop has them: (n, N) both."""
    whole, terms = scan._encoded(queries)
    n = len(queries)
    lows, highs = np.empty((n, len(scan.codes))), np.empty((n, len(scan.codes)))
    for i in range(len(scan.codes)):
        low, high, positions, counts = (
            np.full((n, 1), -np.inf),
            np.empty((n, 1)),
            np.empty((n, 1), int),
            np.zeros(n, int),
        )
        one = slice(i, i + 1)
        assert _scan(whole, terms, scan.codes[one], scan.scales[one], positions, high, low, counts)
        lows[:, i], highs[:, i] = low[:, 0], high[:, 0]
    return lows, highs


@pytest.mark.parametrize("corpus", CORPORA)
def test_every_score_lies_within_its_bounds(corpus: Callable[[np.random.Generator], Float32], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = corpus(rng)
    queries = queries_of(vectors, rng)
    lows, highs = bounds(scan_of(tmp_path, vectors), queries)
    scores = np.stack([canonical_scores(query, vectors) for query in queries])
    assert (lows <= scores).all()
    assert (scores <= highs).all()
    for query, low, high in zip(queries[::3].tolist(), lows[::3], highs[::3], strict=True):
        for i in range(0, N, 20):
            exact = sum(Fraction(a) * Fraction(b) for a, b in zip(query, vectors[i].tolist(), strict=True))
            assert Fraction(low[i]) <= exact <= Fraction(high[i])


def test_the_bounds_are_close(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors, queries = gaussian(rng, 300, 768), gaussian(rng, 3, 768)
    lows, highs = bounds(scan_of(tmp_path, vectors), queries)
    lengths = np.linalg.norm(queries, axis=1)[:, None] * np.linalg.norm(vectors, axis=1)
    assert ((highs - lows) / lengths).mean() < 0.018


def test_the_greatest_sums_are_exact(tmp_path: Path) -> None:
    """4096 products of the greatest numbers, all of one sign."""
    vectors = np.repeat(np.array([[1], [-1]], np.float32), 4096, axis=1)
    lows, highs = bounds(scan_of(tmp_path, vectors), vectors)
    np.testing.assert_allclose((lows + highs) / 2, [[4096, -4096], [-4096, 4096]], rtol=1e-3)


@pytest.mark.parametrize("corpus", CORPORA)
def test_all_of_the_best_are_contenders(corpus: Callable[[np.random.Generator], Float32], tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    vectors = corpus(rng)
    scan, n_narrowed = scan_of(tmp_path, vectors), 0
    for query in queries_of(vectors, rng):
        scores = canonical_scores(query, vectors)
        order = np.argsort(scores, kind="stable")
        # The best last: the buffer fills up with what is a contender only until better ones come.
        ascending = Scan(scan.codes[order], scan.scales[order], scan.centre, scan.max_norm)
        for k in (1, 10, 70):
            best = set(np.flatnonzero(scores >= np.sort(scores)[-k]).tolist())
            for found, names in (
                (scan.contenders(query[None], k, Deadline.never()), np.arange(N)),
                (ascending.contenders(query[None], k, Deadline.never()), order),
            ):
                if found is not None:
                    assert best <= set(names[found[0]].tolist())
                    n_narrowed += 1
    assert n_narrowed > 10 or corpus in (denormal, with_an_outlier, all_alike)


def test_codes_have_all_their_room_before_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StartupError, match=rf"^{tmp_path}/codes\.npy: {N * D} bytes are needed: No space left"):
        scan_of(tmp_path, gaussian(np.random.default_rng(0)))


def test_too_many_contenders_are_none(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = all_alike(rng)
    assert scan_of(tmp_path, vectors).contenders(vectors[:1], 1, Deadline.never()) is None
    vectors = gaussian(rng)
    scan = scan_of(tmp_path, vectors)
    assert scan.contenders(vectors[:1], 20, Deadline.never()) is not None
    assert scan.contenders(vectors[:1], N // 8 + 1, Deadline.never()) is None


def built(folder: Path, vectors: Float32) -> Shard:
    build_snapshot(
        [Passage(i, "", "", "") for i in range(len(vectors))], vectors, folder, 1, "Flat", "e", "f", scan="int8"
    )
    return Shard(folder, 0)


@pytest.mark.parametrize("corpus", CORPORA)
def test_a_shard_that_scans_answers_as_its_twin(
    corpus: Callable[[np.random.Generator], Float32], tmp_path: Path
) -> None:
    rng = np.random.default_rng(2)
    vectors = corpus(rng)
    queries = queries_of(vectors, rng)
    shard = built(tmp_path / "s", vectors)
    shard.prewarm()
    scores = np.stack([canonical_scores(query, vectors) for query in queries])
    for k in (1, 10, 70, N + 5):
        theirs = Hits(*top_k(np.tile(np.arange(N), (len(queries), 1)), scores, k), "")
        for tuning in (Tuning(1, NEVER, scan_up_to=len(queries)), Tuning(1, NEVER, scan_up_to=1)):
            shard._tuning = tuning
            same(shard.search(queries, k, Deadline.never()), theirs)
        for i in range(len(queries)):
            row = slice(i, i + 1)
            same(shard.search(queries[row], k, Deadline.never()), Hits(theirs.ids[row], theirs.scores[row], ""))


def test_few_queries_are_scanned_and_many_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = gaussian(np.random.default_rng(0))
    shard = built(tmp_path / "s", vectors)
    expected = shard.search(vectors[:9], 5, Deadline.never())
    monkeypatch.setattr(shard._index, "search", None)
    same(shard.search(vectors[:8], 5, Deadline.never()), Hits(expected.ids[:8], expected.scores[:8], ""))
    with pytest.raises(TypeError):
        shard.search(vectors[:9], 5, Deadline.never())


def test_from_how_many_queries_on_it_does_not_pay_is_measured() -> None:
    vectors = gaussian(np.random.default_rng(0), 3000, 64)

    def slow(queries: Float32, k: int, deadline: Deadline) -> None:
        for _ in range(20):
            best_of(vectors, queries, k)

    assert calibrate(vectors, 1, lambda *asked: None).scan_up_to == SCAN_BATCHES[-1]
    assert calibrate(vectors, 1, slow).scan_up_to == 0


def test_codes_of_other_vectors_fail_the_test_at_the_start(tmp_path: Path) -> None:
    vectors = gaussian(np.random.default_rng(0))
    shard = built(tmp_path / "s", vectors)
    shard.self_test()
    shard._scan = scan_of(tmp_path, vectors[::-1])
    with pytest.raises(InvalidSnapshot, match="of 4 stored vectors at least 4 must find themselves"):
        shard.self_test()
    np.save(tmp_path / CENTRE, np.zeros(3, np.float32))
    with pytest.raises(InvalidSnapshot, match=f"{CENTRE}: must hold float32 of shape"):
        Scan.read(tmp_path, vectors.shape, 1.0)


def test_in_huge_pages_the_codes_are_the_same(tmp_path: Path) -> None:
    scan = scan_of(tmp_path, gaussian(np.random.default_rng(0)))
    huge_pages = Scan.read(tmp_path, scan.codes.shape, scan.max_norm, huge_pages=True)
    np.testing.assert_array_equal(huge_pages.codes, scan.codes)
