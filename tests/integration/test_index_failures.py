"""Servers that die, come back, freeze or change under a client that goes on asking."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from frame_connection import Firewall

from openbook.config import IndexServerSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Float32, Passage, RetrievalSettings
from openbook.errors import DeadlineExceeded, InvalidConfig, ShardUnavailable, SnapshotMismatch
from openbook.index.building.build import build_snapshot
from openbook.index.client.sharded import ShardedIndex
from openbook.index.server.server import IndexServer
from openbook.testing import ManualClock, served

Answer = TypeVar("Answer")

N, D = 40, 4
VECTORS = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)
QUERIES = VECTORS[:2]  # the best hits of which are passages 0 and 1


def build(out: Path, vectors: Float32 = VECTORS, n_shards: int = 2, fingerprint: str = "fingerprint") -> str:
    passages = [Passage(i, f"doc-{i}", f"title {i}", f"text {i}") for i in range(len(vectors))]
    return build_snapshot(passages, vectors, out, n_shards, "Flat", "encoder", fingerprint).snapshot_id


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "snapshot"
    build(out)
    return out


def tier_of(*servers: IndexServer, timeout_s: float = 60.0) -> ShardedIndex:
    return ShardedIndex([server.address for server in servers], timeout_s)


async def eventually(call: Callable[[], Awaitable[Answer]]) -> Answer:
    """The first answer: reconnecting takes gRPC a moment."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except ShardUnavailable:
                await asyncio.sleep(0.01)


def again(server: IndexServer, snapshot: Path) -> IndexServer:
    """Another server where one was."""
    return IndexServer(IndexServerSettings(snapshot=snapshot, shard=server.shard.number, port=server.port))


def test_a_dead_shard_is_named_and_used_again_when_it_is_back(snapshot: Path) -> None:
    async def scenario() -> None:
        with served(snapshot) as servers:
            tier = tier_of(*servers)
            before = await tier.search(QUERIES, RetrievalSettings(k=5), Context(Deadline.after(60)))
            servers[1].stop(grace_s=0)
            for _ in range(3):
                with pytest.raises(ShardUnavailable, match=rf"shard 1.*{servers[1].address}"):
                    await tier.search(QUERIES, RetrievalSettings(k=5), Context(Deadline.after(60)))
            with pytest.raises(ShardUnavailable, match=servers[1].address):
                await tier.fetch([39], before.snapshot_id, Context(Deadline.after(60)))
            with again(servers[1], snapshot):
                after = await eventually(
                    lambda: tier.search(QUERIES, RetrievalSettings(k=5), Context(Deadline.after(60)))
                )
                assert after.ids.tolist() == before.ids.tolist()
                assert (await tier.fetch([39], after.snapshot_id, Context(Deadline.after(60))))[0].id == 39
            await tier.close()

    asyncio.run(scenario())


def test_a_tier_that_was_down_when_it_was_first_asked(snapshot: Path) -> None:
    async def scenario() -> None:
        with served(snapshot) as servers:
            pass
        tier = tier_of(*servers)
        with pytest.raises(ShardUnavailable, match="were not asked yet"):
            _ = tier.dimension
        with pytest.raises(
            ShardUnavailable, match=f"no index server answers: {servers[0].address}.*{servers[1].address}"
        ):
            await tier.connect()
        with again(servers[0], snapshot):
            half = tier_of(*servers)
            with pytest.raises(ShardUnavailable, match=f"no server holds shard 1 of 2.*{servers[1].address}"):
                await half.connect()
            with again(servers[1], snapshot):
                hits = await eventually(
                    lambda: tier.search(QUERIES, RetrievalSettings(k=1), Context(Deadline.after(60)))
                )
        assert hits.ids.shape == (2, 1)
        assert (tier.dimension, tier.n_passages) == (D, N)
        assert (tier.encoder, tier.encoder_fingerprint) == ("encoder", "fingerprint")
        await tier.close()
        await half.close()

    asyncio.run(scenario())


def test_another_replica_stands_in(snapshot: Path) -> None:
    async def scenario() -> None:
        with served(snapshot, n_replicas=2) as servers:
            tier = tier_of(*servers)
            before = await tier.search(QUERIES, RetrievalSettings(k=5), Context(Deadline.after(60)))
            servers[0].stop(grace_s=0)
            servers[3].stop(grace_s=0)
            for _ in range(6):
                hits = await tier.search(QUERIES, RetrievalSettings(k=5), Context(Deadline.after(60)))
                assert hits.ids.tolist() == before.ids.tolist()
                assert len(await tier.fetch([0, 39], hits.snapshot_id, Context(Deadline.after(60)))) == 2
            await tier.close()

    asyncio.run(scenario())


def test_a_replica_that_was_dead_at_first_is_found_when_it_is_needed(snapshot: Path) -> None:
    async def scenario() -> None:
        with served(snapshot, n_replicas=2) as servers:
            servers[0].stop(grace_s=0)
            tier = tier_of(*servers)
            before = await tier.search(QUERIES, RetrievalSettings(k=5), Context(Deadline.after(60)))
            servers[1].stop(grace_s=0)
            with again(servers[0], snapshot):
                after = await eventually(
                    lambda: tier.search(QUERIES, RetrievalSettings(k=5), Context(Deadline.after(60)))
                )
            assert after.ids.tolist() == before.ids.tolist()
            await tier.close()

    asyncio.run(scenario())


def test_a_tier_restarted_with_another_snapshot(snapshot: Path, tmp_path: Path) -> None:
    new_id = build(tmp_path / "new", -VECTORS)

    async def scenario() -> None:
        with served(snapshot) as servers:
            tier = tier_of(*servers)
            old = await tier.search(QUERIES, RetrievalSettings(k=N), Context(Deadline.after(60)))
        with again(servers[0], tmp_path / "new"), again(servers[1], tmp_path / "new"):
            new = await eventually(lambda: tier.search(QUERIES, RetrievalSettings(k=N), Context(Deadline.after(60))))
            assert new.snapshot_id == tier.snapshot_id == new_id
            np.testing.assert_array_equal(new.ids, old.ids[:, ::-1])
            with pytest.raises(SnapshotMismatch, match=f"holds snapshot {new_id}, asked for {old.snapshot_id}"):
                await tier.fetch([0], old.snapshot_id, Context(Deadline.after(60)))
        await tier.close()

    asyncio.run(scenario())


def test_a_tier_restarted_with_a_snapshot_of_another_encoder_is_refused(snapshot: Path, tmp_path: Path) -> None:
    build(tmp_path / "new", fingerprint="another space")

    async def scenario() -> None:
        with served(snapshot) as servers:
            tier = tier_of(*servers)
            await tier.connect()
        with again(servers[0], tmp_path / "new"), again(servers[1], tmp_path / "new"):
            for _ in range(2):
                with pytest.raises(
                    SnapshotMismatch, match=r"embedded by encoder another space, and.*began with fingerprint"
                ):
                    await eventually(lambda: tier.search(QUERIES, RetrievalSettings(k=N), Context(Deadline.after(60))))
        await tier.close()

    asyncio.run(scenario())


def test_half_a_tier_of_another_snapshot_is_never_mixed_in(snapshot: Path, tmp_path: Path) -> None:
    new_id = build(tmp_path / "new", -VECTORS)

    async def scenario() -> None:
        with served(snapshot) as old, served(tmp_path / "new") as new:
            tier = tier_of(old[0], new[1])
            both = f"{old[0].address} holds {old[0].shard.manifest.snapshot_id}|{new[1].address} holds {new_id}"
            with pytest.raises(SnapshotMismatch, match=f"({both}), ({both})"):
                await tier.connect()
            await tier.close()

    asyncio.run(scenario())


RUN = (
    "import sys; from openbook.config import IndexServerSettings; from openbook.index.server.server import run;"
    "run(IndexServerSettings(snapshot=sys.argv[1], port=sys.argv[2]))"
)


class Process:
    """One server of a snapshot in a process of its own."""

    def __init__(self, snapshot: Path, port: str = "0") -> None:
        command = [sys.executable, "-c", RUN, str(snapshot), port]
        self.popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.popen.stdout is not None
        self.address = self.popen.stdout.readline().strip()

    def freeze(self) -> None:
        """Stop it, and wait until all its threads stand still."""
        self.popen.send_signal(signal.SIGSTOP)
        os.waitpid(self.popen.pid, os.WUNTRACED)

    def kill(self) -> None:
        """End it, and wait for the end."""
        with self.popen:
            self.popen.kill()

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def test_a_killed_process_and_its_successor(tmp_path: Path) -> None:
    build(tmp_path / "s", n_shards=1)

    async def scenario(first: Process) -> None:
        tier = ShardedIndex([first.address], timeout_s=60)
        before = await tier.search(QUERIES, RetrievalSettings(k=3), Context(Deadline.after(60)))
        first.kill()
        with pytest.raises(ShardUnavailable, match=first.address):
            await tier.search(QUERIES, RetrievalSettings(k=3), Context(Deadline.after(60)))
        with Process(tmp_path / "s", first.address.rpartition(":")[2]):
            after = await eventually(lambda: tier.search(QUERIES, RetrievalSettings(k=3), Context(Deadline.after(60))))
        assert after.ids.tolist() == before.ids.tolist()
        await tier.close()

    with Process(tmp_path / "s") as first:
        asyncio.run(scenario(first))


def test_a_frozen_process_costs_no_more_than_its_timeout(tmp_path: Path) -> None:
    build(tmp_path / "s", n_shards=1)

    async def scenario(frozen: Process, healthy: IndexServer) -> None:
        alone, patient = ShardedIndex([frozen.address], timeout_s=0.5), ShardedIndex([frozen.address], timeout_s=60)
        pair = ShardedIndex([frozen.address, healthy.address], timeout_s=10)  # the healthy one has that long too
        soon = Deadline.after(0.1, ManualClock())  # not over before it begins to wait
        for tier in (alone, patient, pair):
            await eventually(tier.connect)
        frozen.freeze()
        with pytest.raises(ShardUnavailable, match=frozen.address):
            await alone.search(QUERIES, RetrievalSettings(k=3), Context(Deadline.after(60)))
        with pytest.raises(DeadlineExceeded):
            await patient.search(QUERIES, RetrievalSettings(k=3), Context(soon))
        newcomer = ShardedIndex([frozen.address], timeout_s=60)
        with pytest.raises(DeadlineExceeded, match="what they hold"):
            await newcomer.search(QUERIES, RetrievalSettings(k=3), Context(soon))
        for _ in range(2):
            assert (await pair.search(QUERIES, RetrievalSettings(k=3), Context(Deadline.after(60)))).ids[
                :, 0
            ].tolist() == [0, 1]
        for tier in (alone, patient, pair, newcomer):
            await tier.close()

    with Process(tmp_path / "s") as frozen, served(tmp_path / "s") as servers:
        asyncio.run(scenario(frozen, servers[0]))


def test_a_connection_that_stays_open_and_carries_nothing_is_left(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openbook.index.client.replicas.ALONE_S", 0.1)

    async def scenario(servers: Sequence[IndexServer]) -> None:
        tier = tier_of(*servers, timeout_s=0.5)

        async def search() -> list[int]:
            hits = await tier.search(QUERIES, RetrievalSettings(k=3), Context(Deadline.after(60)))
            return hits.ids[:, 0].tolist()

        async with Firewall(servers[0]) as firewall:
            await eventually(search)
            async with asyncio.timeout(60):
                while firewall.n_known < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            firewall.forget()
            assert await eventually(search) == [0, 1]
        await tier.close()

    with served(snapshot) as servers:
        asyncio.run(scenario(servers))


def test_a_tier_of_no_servers() -> None:
    with pytest.raises(InvalidConfig, match="at least one server"):
        ShardedIndex([], timeout_s=1)
