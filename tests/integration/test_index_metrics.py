"""What index servers, and who asks them, say of themselves while things happen."""

import asyncio
from pathlib import Path

import numpy as np
import small_snapshot
from prometheus_client import REGISTRY, CollectorRegistry

from openbook.config import IndexServerSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Passage, RetrievalSettings
from openbook.index.building.build import build_snapshot
from openbook.index.client.metrics import TierMetrics
from openbook.index.client.sharded import ShardedIndex
from openbook.index.server.server import IndexServer

QUERY = np.ones((3, small_snapshot.D), np.float32)


def read(server: IndexServer, name: str, **labels: str) -> float | None:
    """As somebody reads it who asks the server's process."""
    registry = CollectorRegistry()
    registry.register(server.metrics)
    return registry.get_sample_value(f"openbook_index_{name}", labels)


def test_a_server_tells_of_its_snapshots_and_its_clients(tmp_path: Path) -> None:
    first, second = small_snapshot.build(tmp_path), tmp_path / "second"
    passages = [Passage(i, "d", "t", "x") for i in range(9)]
    vectors = small_snapshot.VECTORS[: len(passages)]
    after = build_snapshot(passages, vectors, second, 1, "Flat", "encoder", "fingerprint").snapshot_id

    async def ask(address: str) -> None:
        index = ShardedIndex([address], 5.0)
        await index.search(QUERY, RetrievalSettings(k=2), Context())
        assert read(server, "streams") in (1, 2)  # over gRPC at first
        await index.close()

    with IndexServer(IndexServerSettings(snapshot=first)) as server:
        before = server.held.current_id
        assert read(server, "passages") == small_snapshot.N
        assert read(server, "rows_waiting") == read(server, "shard") == 0
        assert read(server, "snapshots", snapshot=before, state="current") == 1
        rows = REGISTRY.get_sample_value("openbook_search_rows_sum") or 0.0
        asyncio.run(ask(server.address))
        assert REGISTRY.get_sample_value("openbook_search_rows_sum") == rows + len(QUERY)
        server._publishing.prepare(second, after, Deadline.never())
        assert read(server, "snapshots", snapshot=after, state="prepared") == 0
        server._publishing.publish(after, 2, Deadline.never())
        assert read(server, "snapshots", snapshot=after, state="current") == 2
        assert read(server, "snapshots", snapshot=before, state="former") == 1
        assert read(server, "passages") == len(passages)


def test_who_asks_the_tier_tells_which_servers_answer(tmp_path: Path) -> None:
    snapshot = small_snapshot.build(tmp_path)

    async def main() -> None:
        with IndexServer(IndexServerSettings(snapshot=snapshot)) as one:
            with IndexServer(IndexServerSettings(snapshot=snapshot)) as other:
                index = ShardedIndex([one.address, other.address, "127.0.0.1:1"], 5.0)
                registry = CollectorRegistry()
                registry.register(TierMetrics(index))

                def servers(shard: str, state: str) -> float | None:
                    return registry.get_sample_value("openbook_shard_servers", {"shard": shard, "state": state})

                assert (servers("", "gone"), servers("0", "answers")) == (3, None)
                await index.connect()
                assert (servers("0", "answers"), servers("0", "gone"), servers("", "gone")) == (2, 0, 1)
                assert registry.get_sample_value("openbook_searched_sequence") == 1
            await index.connect()
            assert (servers("0", "answers"), servers("0", "gone")) == (1, 1)
            await index.close()

    asyncio.run(main())
