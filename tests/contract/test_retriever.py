"""What `Retriever` and `PassageStore` promise, of the index tier and of its exact twin alike."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.origin import Located, Origin
from openbook.core.types import NO_HIT, Coverage, Passage, RetrievalSettings
from openbook.errors import DeadlineExceeded, InvalidRequest, ShardUnavailable, SnapshotMismatch, UnknownPassage
from openbook.index.building.build import build_snapshot
from openbook.index.client.sharded import ShardedIndex
from openbook.rag.ports import PassageStore, Retriever
from openbook.testing import ExactIndex, served

PASSAGES = [
    Passage(
        i, f"doc-{i}", f"title {i}", f"text {i} ü", Origin(document_digest=f"{i:064x}", start=0, end=8, page=i or None)
    )
    for i in range(7)
]
VECTORS = np.array([[1, 0], [0, 1], [2, 0], [1, 0], [-1, 0], [1, 1], [0, -1]], np.float32)
EAST = np.array([[1, 0]], np.float32)


def soon() -> Context:
    return Context(Deadline.after(60))


class Index(Retriever, PassageStore, Protocol):
    """Both ports in one."""

    @property
    def snapshot_id(self) -> str: ...


Scenario = Callable[[Index], Awaitable[None]]
N_SHARDS = 3  # passages 0 1, 2 3, 4 5 6


@pytest.fixture
def lost() -> list[Callable[[int], None]]:
    """Holds, while a scenario runs, the function that takes a shard away."""
    return []


@pytest.fixture(params=["exact twin", "index tier"])
def check(
    request: pytest.FixtureRequest, tmp_path: Path, lost: list[Callable[[int], None]]
) -> Callable[[Scenario], None]:
    """Runs a scenario against one of the two."""

    @asynccontextmanager
    async def index() -> AsyncIterator[Index]:
        if request.param == "exact twin":
            twin = ExactIndex(PASSAGES, VECTORS, n_shards=N_SHARDS)
            lost.append(twin.missing_shards.add)
            yield twin
            return
        build_snapshot(PASSAGES, VECTORS, tmp_path / "s", N_SHARDS, "Flat", "none", "none", fields=())
        with served(tmp_path / "s") as servers:
            lost.append(lambda shard: servers[shard].stop(grace_s=0))
            tier = ShardedIndex([server.address for server in servers], timeout_s=60)
            await tier.connect()
            yield tier
            await tier.close()

    async def run(scenario: Scenario) -> None:
        async with index() as one:
            await scenario(one)

    return lambda scenario: asyncio.run(run(scenario))


def test_the_best_come_first_and_ties_by_id(check: Callable[[Scenario], None]) -> None:
    async def scenario(index: Index) -> None:
        hits = await index.search(EAST, RetrievalSettings(k=4), soon())
        assert hits.ids.tolist() == [[2, 0, 3, 5]]
        assert hits.scores.tolist() == [[2, 1, 1, 1]]
        assert [hits.ids.dtype.name, hits.scores.dtype.name] == ["int64", "float32"]
        assert hits.snapshot_id == index.snapshot_id
        assert hits.coverage == Coverage(7, 7)

    check(scenario)


def test_without_a_shard_it_is_as_much_as_was_asked_for_or_nothing(
    check: Callable[[Scenario], None], lost: list[Callable[[int], None]]
) -> None:
    async def scenario(index: Index) -> None:
        lost[0](1)
        for _ in range(3):
            hits = await index.search(EAST, RetrievalSettings(k=4, min_coverage=5 / 7), soon())
            assert hits.ids.tolist() == [[0, 5, 1, 6]]
            assert hits.coverage == Coverage(5, 7, (1,))
            assert [passage.id for passage in await index.fetch([0, 6], hits.snapshot_id, soon())] == [0, 6]
            for min_coverage in (0.72, 1.0):
                with pytest.raises(ShardUnavailable, match="shard 1"):
                    await index.search(EAST, RetrievalSettings(k=4, min_coverage=min_coverage), soon())
            with pytest.raises(ShardUnavailable, match="shard 1"):
                await index.fetch([0, 3], hits.snapshot_id, soon())
        for shard in (0, 2):
            lost[0](shard)
        with pytest.raises(ShardUnavailable):
            await index.search(EAST, RetrievalSettings(k=4, min_coverage=0.01), soon())

    check(scenario)


def test_what_is_missing_is_an_empty_slot(check: Callable[[Scenario], None]) -> None:
    async def scenario(index: Index) -> None:
        hits = await index.search(EAST, RetrievalSettings(k=9), soon())
        assert hits.ids.tolist() == [[2, 0, 3, 5, 1, 6, 4, NO_HIT, NO_HIT]]
        assert hits.scores.tolist() == [[2, 1, 1, 1, 0, 0, -1, -np.inf, -np.inf]]

    check(scenario)


def test_passages_come_in_the_order_of_their_ids(check: Callable[[Scenario], None]) -> None:
    async def scenario(index: Index) -> None:
        found = await index.fetch([6, 0, 3, 0], index.snapshot_id, soon())
        assert found == [PASSAGES[i] for i in (6, 0, 3, 0)]
        assert await index.fetch([], index.snapshot_id, soon()) == []

    check(scenario)


@pytest.mark.parametrize("k", [-1, 0, 1001, 10_000_000, 2**40])
def test_k_out_of_range(check: Callable[[Scenario], None], k: int) -> None:
    async def scenario(index: Index) -> None:
        with pytest.raises(InvalidRequest, match=rf"k must be 1\.\.1000, got {k}"):
            await index.search(EAST, RetrievalSettings(k=k), soon())

    check(scenario)


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        ([[1, 2, 3]], "dimension 2, got 3"),
        ([[1, np.nan]], "NaN or infinity in row 0"),
        ([[1, 2], [np.inf, 1]], "NaN or infinity in row 1"),
        (np.empty((0, 2)), r"shape \(0, 2\)"),
        (np.ones((1025, 2)), r"shape \(1025, 2\)"),
    ],
)
def test_queries_out_of_range(check: Callable[[Scenario], None], queries: list[list[float]], message: str) -> None:
    async def scenario(index: Index) -> None:
        with pytest.raises(InvalidRequest, match=message):
            await index.search(np.array(queries, np.float32), RetrievalSettings(k=1), soon())

    check(scenario)


def test_what_is_not_there_is_said(check: Callable[[Scenario], None]) -> None:
    async def scenario(index: Index) -> None:
        for unknown in (-1, 7):
            with pytest.raises(UnknownPassage, match=rf"0\.\.6.*got {unknown}"):
                await index.fetch([0, unknown], index.snapshot_id, soon())
        with pytest.raises(SnapshotMismatch, match=f"{index.snapshot_id}, asked for another"):
            await index.fetch([0], "another", soon())

    check(scenario)


def test_a_passage_is_found_by_its_lasting_id(
    check: Callable[[Scenario], None], lost: list[Callable[[int], None]]
) -> None:
    async def scenario(index: Index) -> None:
        last = PASSAGES[6]
        for snapshot_id in ("", index.snapshot_id):
            assert await index.locate(last.lasting_id, snapshot_id, soon()) == Located(6, index.snapshot_id, 7)
            assert await index.locate("3", snapshot_id, soon()) == Located(3, index.snapshot_id, 7)
        with pytest.raises(
            UnknownPassage, match=f"no passage of snapshot {index.snapshot_id} has the lasting id {'0' * 32}"
        ):
            await index.locate("0" * 32, "", soon())
        with pytest.raises(UnknownPassage, match="number or its lasting id of 32 digits, got 'doc-1'"):
            await index.locate("doc-1", "", soon())
        with pytest.raises(SnapshotMismatch, match=f"{index.snapshot_id}, asked for another"):
            await index.locate("3", "another", soon())
        with pytest.raises(DeadlineExceeded):
            await index.locate("3", "", Context(Deadline.after(0)))
        lost[0](2)
        with pytest.raises(ShardUnavailable, match="shard 2"):
            await index.locate(last.lasting_id, "", soon())

    check(scenario)


def test_nothing_is_done_after_the_deadline(check: Callable[[Scenario], None]) -> None:
    async def scenario(index: Index) -> None:
        with pytest.raises(DeadlineExceeded):
            await index.search(EAST, RetrievalSettings(k=1), Context(Deadline.after(0)))
        with pytest.raises(DeadlineExceeded):
            await index.fetch([0], index.snapshot_id, Context(Deadline.after(0)))

    check(scenario)
