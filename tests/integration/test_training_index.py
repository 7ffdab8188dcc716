"""What a run fetches from a live index tier, beside the snapshot in memory and the exact twin."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import tiny_training as tiny
import torch

from openbook.config import IndexClientSettings, IndexServerSettings
from openbook.core.context import Context
from openbook.core.types import RetrievalSettings
from openbook.corpus.questions import Question
from openbook.errors import InvalidRequest, ShardUnavailable, SnapshotMismatch
from openbook.index.building.build import build_snapshot
from openbook.index.server.server import IndexServer
from openbook.testing import ExactIndex, served
from openbook.training.data import Example
from openbook.training.opening import open_retriever
from openbook.training.retrieval import Found, LiveIndex, MemoryIndex
from openbook.training.settings import RetrieverSettings

N = 50
VECTORS = np.concatenate([tiny.vectors(30), tiny.vectors(20)])  # the first 20 are there twice
QUERIES = tiny.vectors(5, seed=2)
ASKED = [Example(f"question {i}", "", Question(str(i), "")) for i in range(5)]


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "snapshot"
    build_snapshot(tiny.passages(N), VECTORS, out, 3, "Flat", "tiny", tiny.SPACE)
    return out


@contextmanager
def live(servers: list[IndexServer]) -> Iterator[LiveIndex]:
    addresses = tuple(server.address for server in servers)
    index = LiveIndex(IndexClientSettings(addresses=addresses, timeout_s=60), 0, tiny.asks_for())
    try:
        yield index
    finally:
        index.close()


def same(one: Found, other: Found) -> None:
    assert one.ids.tolist() == other.ids.tolist()
    assert one.scores.tobytes() == other.scores.tobytes()
    assert one.passages == other.passages
    assert one.vectors is not None
    assert other.vectors is not None
    assert one.vectors.tobytes() == other.vectors.tobytes()


@pytest.mark.parametrize("k", [1, 7, N, N + 13])
def test_the_tier_the_snapshot_in_memory_and_the_exact_twin_find_the_same(snapshot: Path, k: int) -> None:
    """Ids, score bits, texts and vectors; ties by id; empty slots where there are fewer than k."""
    memory = MemoryIndex(snapshot, torch.device("cpu")).find(ASKED, QUERIES, k)
    with served(snapshot) as servers, live(servers) as index:
        same(index.find(ASKED, QUERIES, k), memory)
    twin = asyncio.run(ExactIndex(tiny.passages(N), VECTORS).search(QUERIES, RetrievalSettings(k=k), Context()))
    assert memory.ids.tolist() == twin.ids.tolist()
    assert memory.scores.tobytes() == twin.scores.tobytes()


def test_more_passages_than_a_server_gives_at_once(tmp_path: Path) -> None:
    """As for regular expressions: 16 questions with 100 passages each."""
    vectors = tiny.vectors(1500)
    build_snapshot(tiny.passages(1500), vectors, tmp_path / "s", 1, "Flat", "tiny", tiny.SPACE)
    queries, asked = tiny.vectors(16, seed=4), ASKED[:1] * 16
    with served(tmp_path / "s") as servers, live(servers) as index:
        found = index.find(asked, queries, 100)
        with pytest.raises(InvalidRequest, match=r"k must be 1\.\.1000, got 1001"):
            index.find(asked, queries, 1001)
    same(found, MemoryIndex(tmp_path / "s", torch.device("cpu")).find(asked, queries, 100))


def test_servers_that_take_few_queries_at_once_find_what_others_find(snapshot: Path) -> None:
    few = (IndexServerSettings(snapshot=snapshot, shard=shard, max_rows=2, max_streams=8) for shard in range(3))
    with ExitStack() as stack, live([stack.enter_context(IndexServer(each)) for each in few]) as index:
        same(index.find(ASKED, QUERIES, 7), MemoryIndex(snapshot, torch.device("cpu")).find(ASKED, QUERIES, 7))


def test_a_tier_of_another_space_is_refused(snapshot: Path) -> None:
    with served(snapshot) as servers:
        asked = IndexClientSettings(addresses=tuple(server.address for server in servers), timeout_s=60)
        open_retriever(RetrieverSettings(index=asked), tiny.asks_for(), torch.device("cpu")).close()
        with pytest.raises(SnapshotMismatch, match=r"by encoder other, but snapshot .* by encoder wikipedia"):
            open_retriever(RetrieverSettings(index=asked), tiny.asks_for("other"), torch.device("cpu"))


def test_a_tier_that_is_not_there_is_said_at_the_start(snapshot: Path) -> None:
    with served(snapshot) as servers:
        addresses = tuple(server.address for server in servers)
    with pytest.raises(ShardUnavailable):
        LiveIndex(IndexClientSettings(addresses=addresses), 0, tiny.asks_for())
