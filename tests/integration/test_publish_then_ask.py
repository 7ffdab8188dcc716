"""What is asked after a publication is answered from it, whoever asks, and nobody goes back."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import monotonic

import numpy as np
import pytest
from test_index_failures import Process

from openbook.config import IndexClientSettings, IndexServerSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Passage, RetrievalSettings
from openbook.errors import ShardUnavailable
from openbook.index.building.build import build_snapshot
from openbook.index.client.client import IndexClient
from openbook.index.client.publish import publish
from openbook.index.client.sharded import ShardedIndex
from openbook.index.server.server import IndexServer
from openbook.v1.index_pb2 import InfoResponse

N, D = 8, 4
VECTORS = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
N_PUBLICATIONS = 24  # of `N_IDLE` clients each is asked three times, once for half
N_IDLE = 8
PATIENCE_S = 1.5
"""With a server that is frozen."""
BEST, HALF = RetrievalSettings(k=3), RetrievalSettings(k=3, min_coverage=0.5)


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three, by id; the first is what servers start with."""
    folder, found = tmp_path_factory.mktemp("built"), {}
    for name in "abc":
        passages = [Passage(i, f"doc-{i}", f"title {i}", f"{name} {i}") for i in range(N)]
        manifest = build_snapshot(passages, VECTORS, folder / name, 2, "Flat", "encoder", "fingerprint")
        found[manifest.snapshot_id] = folder / name
    return found


@pytest.fixture(params=["frames", "gRPC"])
def servers(request: pytest.FixtureRequest, snapshots: dict[str, Path]) -> Iterator[list[IndexServer]]:
    """Two shards, two servers each."""
    first, frame_port = next(iter(snapshots.values())), 0 if request.param == "frames" else None
    settings = [IndexServerSettings(snapshot=first, shard=shard, frame_port=frame_port) for shard in (0, 0, 1, 1)]
    with ExitStack() as stack:
        yield [stack.enter_context(IndexServer(each)) for each in settings]


def addresses_of(servers: Sequence[IndexServer | Process]) -> list[str]:
    return [server.address for server in servers]


@asynccontextmanager
async def client(addresses: Sequence[str], timeout_s: float = 60.0) -> AsyncIterator[ShardedIndex]:
    tier = ShardedIndex(addresses, timeout_s)
    try:
        yield tier
    finally:
        await tier.close()


async def ask(tier: ShardedIndex, settings: RetrievalSettings = BEST) -> str:
    """The id of the snapshot that the answer is from."""
    return (await tier.search(VECTORS[:1], settings, Context(Deadline.after(60)))).snapshot_id


@dataclass
class Publications:
    """What was published, and what was said to be."""

    snapshots: dict[str, Path]
    addresses: Sequence[str]
    begun: list[str] = field(default_factory=list)
    n_done: int = 1
    _random: Random = field(default_factory=lambda: Random(0))

    def __post_init__(self) -> None:
        self.begun.append(next(iter(self.snapshots)))

    async def one_more(self) -> str:
        """The id of another snapshot, which is published now. Some were published before."""
        target = self._random.choice([each for each in self.snapshots if each != self.begun[-1]])
        self.begun.append(target)
        await publish(self.snapshots[target], IndexClientSettings(addresses=tuple(self.addresses)))
        self.n_done = len(self.begun)
        return target


async def ask_on(tier: ShardedIndex, publications: Publications, settings: RetrievalSettings) -> None:
    """Ask without a pause: answers come from what was published when they were asked for, or later, and never from
    what came before the last answer.
    """
    latest = 0
    while True:
        latest = max(latest, publications.n_done - 1)
        found = await ask(tier, settings)
        assert found in publications.begun[latest:], "an answer came from a former snapshot"
        latest = publications.begun.index(found, latest)


def test_a_publication_while_the_servers_are_asked_has_them_asked_again(
    servers: list[IndexServer], snapshots: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the new one just one server has told: no reason to say that nobody holds the rest of it."""
    addresses = addresses_of(servers)
    publications = Publications(snapshots, addresses)

    async def scenario() -> tuple[str, str]:
        async with client(addresses) as tier:
            published, replicas = list[str](), tier._connected()
            info_of_all = replicas.info_of_all

            async def info_then_publish(timeout_s: float) -> None:
                await info_of_all(timeout_s)
                if not published:
                    published.append(await publications.one_more())
                    await replicas._info(addresses[0], 60, monotonic())

            monkeypatch.setattr(replicas, "info_of_all", info_then_publish)
            return await ask(tier), published[0]

    found, published = asyncio.run(scenario())
    assert found == published


def test_the_first_question_after_each_publication(servers: list[IndexServer], snapshots: dict[str, Path]) -> None:
    addresses = addresses_of(servers)
    publications = Publications(snapshots, addresses)

    async def scenario() -> None:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            idle = [await stack.enter_async_context(client(addresses)) for _ in range(N_IDLE)]
            busy = await stack.enter_async_context(client(addresses))
            for tier in idle:
                assert await ask(tier) == publications.begun[0]
            tasks = [group.create_task(ask_on(busy, publications, each)) for each in (BEST, HALF)]
            for i in range(N_PUBLICATIONS):
                target = await publications.one_more()
                asked = [ask(busy), ask(idle[i % N_IDLE], (BEST, HALF)[i % 3 == 0])]
                assert await asyncio.gather(*asked) == [target, target]
                if i % 8 == 0:
                    async with client(addresses) as fresh:
                        assert await ask(fresh) == target
            for task in tasks:
                task.cancel()

    asyncio.run(scenario())


def test_while_a_replica_is_frozen_dead_and_back_with_what_it_had(
    servers: list[IndexServer], snapshots: dict[str, Path]
) -> None:
    """It is left out of the publications: nobody could publish to it."""

    async def scenario(left_out: Process) -> None:
        addresses = [left_out.address, *addresses_of(servers)]
        publications = Publications(snapshots, addresses_of(servers))
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            idle, late, busy = [await stack.enter_async_context(client(addresses, PATIENCE_S)) for _ in range(3)]
            for tier in (idle, late, busy):
                assert await ask(tier) == publications.begun[0]
            task = group.create_task(ask_on(busy, publications, BEST))
            left_out.freeze()
            for tier in (idle, idle, busy, idle):
                target = await publications.one_more()
                assert await ask(tier) == target
            async with client(addresses, PATIENCE_S) as fresh:
                assert await ask(fresh) == publications.begun[-1]
            left_out.popen.send_signal(signal.SIGCONT)
            for tier in (idle, late, busy) * 20:
                assert await ask(tier) == publications.begun[-1]
            os.kill(left_out.popen.pid, signal.SIGKILL)
            for tier in (idle, late, busy):
                target = await publications.one_more()
                assert await ask(tier) == target
            task.cancel()

    with Process(next(iter(snapshots.values()))) as left_out:
        asyncio.run(scenario(left_out))


def test_servers_that_disagree_for_long_are_asked_once(
    servers: list[IndexServer], snapshots: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One shard has heard of a publication, the other can never follow."""
    first, second, *_ = snapshots
    n_infos = 0
    info = IndexClient.info

    async def counted(self: IndexClient, timeout_s: float) -> InfoResponse:
        nonlocal n_infos
        n_infos += 1
        return await info(self, timeout_s)

    async def scenario() -> None:
        nonlocal n_infos
        async with client(addresses_of(servers)) as tier, asyncio.timeout(60):
            while any(each._stream is None or each._hurrying for each in clients_of(tier)):  # these ask for Info too
                assert await ask(tier) == first
            for server in servers[:2]:
                server._publishing.prepare(snapshots[second], second, Deadline.never())
                server._publishing.publish(second, 2, Deadline.never())
            monkeypatch.setattr(IndexClient, "info", counted)
            for _ in range(50):
                assert await ask(tier) == first
            assert n_infos <= 3 * len(servers)  # each of two replicas is heard once
            for server in servers[2:]:
                server._publishing.prepare(snapshots[second], second, Deadline.never())
                server._publishing.publish(second, 2, Deadline.never())
            assert await ask(tier) == second

    asyncio.run(scenario())


def clients_of(tier: ShardedIndex) -> Sequence[IndexClient]:
    return list(tier._replicas._clients.values()) if tier._replicas else []


def test_a_publication_under_way_that_fails(servers: list[IndexServer], snapshots: dict[str, Path]) -> None:
    """All have it, one has published it, and nobody goes on: whoever has heard of it keeps to it."""
    first, second, *_ = snapshots

    async def scenario() -> None:
        addresses = addresses_of(servers)
        async with client(addresses) as tier:
            assert await ask(tier) == first
            for server in servers:
                server._publishing.prepare(snapshots[second], second, Deadline.never())
            servers[0]._publishing.publish(second, 2, Deadline.never())
            found = [await ask(tier) for _ in range(50)]
            assert found == sorted(found, key=[first, second].index)
            assert found[-1] == second
            servers[0].stop(grace_s=0)  # no other server knows that it was published
            for _ in range(5):
                assert await ask(tier) == second
            servers[1].stop(grace_s=0)
            with pytest.raises(ShardUnavailable, match="shard 0 does not answer"):
                await ask(tier)
            assert await ask(tier, HALF) == second

    asyncio.run(scenario())
