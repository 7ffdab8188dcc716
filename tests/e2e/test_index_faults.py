"""Index servers that die, freeze, are cut off or run out of disk, under callers that go on asking."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
from index_processes import (
    VECTORS,
    Load,
    N,
    ServerProcess,
    build,
    is_alive,
    make_root,
    running,
    seconds_until,
    tier_of,
)

from openbook.config import IndexClientSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Coverage, RetrievalSettings
from openbook.errors import DeadlineExceeded, OpenbookError, ShardUnavailable
from openbook.index.client.publish import publish
from openbook.index.client.sharded import ShardedIndex
from openbook.index.disk.root import Root

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

REJOIN_S = 2.0
SOON_S = 3.0
NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built") / "old")


@pytest.fixture(scope="module")
def running_still(old: Path) -> Iterator[list[ServerProcess]]:
    with running(old, n_replicas=2) as found:
        yield found


@pytest.fixture
def servers(running_still: list[ServerProcess]) -> list[ServerProcess]:
    """Two replicas of each shard, for one test after the other: what a test froze goes on, what it killed is there
    again.
    """
    for i, server in enumerate(running_still):
        server.popen.send_signal(signal.SIGCONT)
        if server.popen.poll() is not None:
            running_still[i] = server.again()
    return running_still


async def rejoins(
    load: Load, alive: Callable[[], bool], hurt: Callable[[], None], heal: Callable[[], Awaitable[None]]
) -> None:
    """The client notices a fault and its end, the latter in time. On a busy machine it may take longer once or twice;
    what waits for gRPC to find out takes longer every time.
    """
    for _ in range(3):
        hurt()
        await load.more(300)
        await seconds_until(lambda: not alive())
        await heal()
        seconds = await seconds_until(alive)
        print(f"served again after {seconds:.2f} s")
        if seconds < REJOIN_S:
            return
    raise AssertionError(f"it took more than {REJOIN_S} s three times until it served again")


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_one_of_two_replicas_is_killed_or_frozen_under_load(
    old: Path, servers: list[ServerProcess], fault: signal.Signals
) -> None:
    async def scenario() -> None:
        tier = tier_of(servers)

        async def heal() -> None:
            if fault == signal.SIGKILL:
                servers[0] = await asyncio.to_thread(servers[0].again)
            else:
                servers[0].send(signal.SIGCONT)

        async with Load(tier, old) as load:
            await load.more(200)
            await rejoins(load, lambda: is_alive(tier, servers[0]), lambda: servers[0].send(fault), heal)
            servers[1].send(fault)  # now the one that came back must serve
            await load.more(300)
        assert load.failures == []
        await tier.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_all_replicas_of_a_shard_are_gone(servers: list[ServerProcess], fault: signal.Signals) -> None:
    async def check(tier: ShardedIndex) -> None:
        for _ in range(3):
            begun = monotonic()
            with pytest.raises((ShardUnavailable, DeadlineExceeded), match="shard 1"):
                await tier.search(VECTORS[:1], RetrievalSettings(k=N), Context(Deadline.after(SOON_S)))
            hits = await tier.search(
                VECTORS[:1], RetrievalSettings(k=N, min_coverage=0.5), Context(Deadline.after(SOON_S))
            )
            assert hits.coverage == Coverage(N // 2, N, (1,))
            assert sorted(hits.ids[0, : N // 2]) == list(range(N // 2))
            assert (await tier.fetch([0], hits.snapshot_id, Context(Deadline.after(SOON_S))))[0].text == "old 0"
            with pytest.raises(ShardUnavailable, match=f"{N // 2} of {N} passages: shard 1"):
                await tier.search(
                    VECTORS[:1], RetrievalSettings(k=N, min_coverage=0.51), Context(Deadline.after(SOON_S))
                )
            assert monotonic() - begun < 4 * SOON_S + 10  # four calls, on a machine that may be busy

    async def scenario() -> None:
        tier = tier_of(servers)
        whole = await tier.search(VECTORS[:1], RetrievalSettings(k=N), Context(Deadline.after(60)))
        assert whole.coverage == Coverage(N, N)
        for server in servers[2:]:
            server.send(fault)
        await check(tier)
        newcomer = tier_of(servers)  # has never seen the shard that is gone
        hits = await newcomer.search(VECTORS[:1], RetrievalSettings(k=N, min_coverage=0.5), Context(Deadline.after(10)))
        assert hits.coverage == Coverage(N // 2, N, (1,))
        if fault == signal.SIGKILL:
            await check(newcomer)
            servers[2] = await asyncio.to_thread(servers[2].again)
        else:
            servers[2].send(signal.SIGCONT)
        await seconds_until(lambda: is_alive(tier, servers[2]))
        again = await tier.search(VECTORS[:1], RetrievalSettings(k=N, min_coverage=0.5), Context(Deadline.after(60)))
        assert again.coverage == Coverage(N, N)
        np.testing.assert_array_equal(again.ids, whole.ids)
        await seconds_until(lambda: is_alive(newcomer, servers[2]))
        again = await newcomer.search(VECTORS[:1], RetrievalSettings(k=N), Context(Deadline.after(60)))
        np.testing.assert_array_equal(again.ids, whole.ids)
        await tier.close()
        await newcomer.close()

    asyncio.run(scenario())


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def test_a_replica_is_cut_off_by_the_network(tmp_path: Path) -> None:
    """All of it in a network namespace of its own: the addresses and links of this machine are not touched."""
    unshare = ["unshare", "--net", "--mount"]
    if shutil.which("ip") is None or subprocess.run([*unshare, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs ip (iproute2) and the right to make network namespaces")
    old = build(tmp_path / "old", n_shards=1)
    done = subprocess.run([*unshare, sys.executable, __file__, str(old)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def cut_off(old: Path) -> None:
    """One of two replicas behind a link that goes down and up again."""

    async def scenario(servers: list[ServerProcess]) -> None:
        tier = tier_of(servers)

        async def heal() -> None:
            run(f"ip netns exec {other} ip link set inner up")

        async with Load(tier, old) as load:
            await load.more(200)
            hurt = f"ip netns exec {other} ip link set inner down"
            await rejoins(load, lambda: is_alive(tier, servers[1]), lambda: run(hurt), heal)
            servers[0].kill()
            await load.more(300)
        assert load.failures == []
        await tier.close()

    other = f"openbook-{os.getpid()}"  # the names of namespaces are this machine's
    run("ip link set lo up")
    run(f"ip netns add {other}")
    try:
        run(f"ip link add outer type veth peer name inner netns {other}")
        run("ip address add 198.51.100.1/30 dev outer")
        run("ip link set outer up")
        run(f"ip netns exec {other} ip address add 198.51.100.2/30 dev inner")
        run(f"ip netns exec {other} ip link set inner up")
        with running(old, n_replicas=1, n_shards=1) as servers:
            servers.append(ServerProcess(old, host="198.51.100.2", inside=f"ip netns exec {other}"))
            asyncio.run(scenario(servers))
    finally:
        run(f"ip netns del {other}")


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    try:
        run(f"mount -t tmpfs -o size={size} tmpfs {folder}")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small disk cannot be mounted here: {error}")
    try:
        yield
    finally:
        run(f"umount {folder}")


@NEEDS_ROOT
def test_the_disk_is_full_while_building_and_while_publishing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    new = build(tmp_path / "new", -1, n_shards=1)

    def served() -> str:
        """The snapshot that is searched after a restart."""
        servers[0].kill()
        servers[0] = servers[0].again()

        async def search() -> str:
            tier = tier_of(servers)
            hits = await tier.search(VECTORS[:1], RetrievalSettings(k=1), Context(Deadline.after(60)))
            passages = await tier.fetch(hits.ids[0].tolist(), hits.snapshot_id, Context(Deadline.after(60)))
            await tier.close()
            return passages[0].text.split()[0]

        return asyncio.run(search())

    with small_disk(disk, "256k"):
        Root.create(disk, build(disk / "old", n_shards=1))
        before = list(disk.iterdir())
        filler = disk / "filler"
        filler.write_bytes(bytes(shutil.disk_usage(disk).free - 3 * 4096))
        with pytest.raises((OSError, OpenbookError), match="No space left"):
            build(disk / "built", -1, n_shards=1)
        assert set(disk.iterdir()) == {*before, filler}
        with filler.open("ab") as file:
            file.write(bytes(shutil.disk_usage(disk).free))
        with running(disk, n_replicas=1, n_shards=1) as servers:
            settings = IndexClientSettings(addresses=(servers[0].address,))
            with pytest.raises(OpenbookError, match=f"{servers[0].address}: .*No space left"):
                asyncio.run(publish(new, settings))
            assert served() == "old"
            filler.unlink()
            assert asyncio.run(publish(new, settings)) == 2
            assert served() == "new"


def test_a_corrupted_byte_is_never_served(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root", n_shards=1)
    with running(root, n_replicas=1, n_shards=1) as servers:
        settings = IndexClientSettings(addresses=(servers[0].address,))
        for name in ("index.faiss", "vectors.npy", "passages.bin", "offsets.npy"):
            path = root / "new" / "shard-0000" / name
            content = path.read_bytes()
            middle = len(content) // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
            with pytest.raises(OpenbookError, match=rf"{name}: was altered"):
                asyncio.run(publish(root / "new", settings))
            assert Root(root).read().current == "old"
            path.write_bytes(content)


if __name__ == "__main__":
    cut_off(Path(sys.argv[1]))


def test_a_server_told_to_stop_many_times_at_once_ends(old: Path) -> None:
    """As one does whose parent is killed while a supervisor stops it: a handler may be interrupted by itself, and
    Python takes handlers away while it ends."""
    server = ServerProcess(old)
    assert server.address
    try:
        deadline = monotonic() + 60
        while server.popen.poll() is None and monotonic() < deadline:
            server.popen.send_signal(signal.SIGTERM)
        assert server.popen.poll() == 0
    finally:
        server.kill()
