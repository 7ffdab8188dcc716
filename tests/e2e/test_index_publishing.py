"""Publishing while callers go on asking, and kill -9 in the middle of building and of publishing."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from time import monotonic

import pytest
from index_processes import VECTORS, Load, N, ServerProcess, make_root, running, tier_of

from openbook.config import IndexClientSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import RetrievalSettings
from openbook.errors import OpenbookError
from openbook.index.client.publish import held_by_root, held_by_servers, publish
from openbook.index.disk.root import Root
from openbook.index.disk.snapshot import Snapshot

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

N_PUBLICATIONS = 20
N_KILLED_BUILDS = 25
N_LANES, N_KILLED_PUBLICATIONS = 2, 7  # in each lane
MOMENTS = (("prepare", 0), ("prepare", 1), ("publish", 0), ("publish", 1))
"""When a server is killed, as `publish` tells it, each in one lane; the last one is too late to matter."""


def settings_of(servers: list[ServerProcess]) -> IndexClientSettings:
    return IndexClientSettings(addresses=tuple(server.address for server in servers))


def test_twenty_publications_under_load(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    root = make_root(tmp_path / "root")

    async def publish_in_turn(n: int, servers: list[ServerProcess], load: Load) -> None:
        for i in range(n):
            await publish(root / ("new", "old")[i % 2], settings_of(servers))
            await load.more(50)

    async def only_one_is_held(servers: list[ServerProcess], load: Load) -> None:
        with load.pause():
            async with asyncio.timeout(60):
                while len(await held_by_servers(settings_of(servers))) > len(servers):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

    async def scenario(servers: list[ServerProcess]) -> None:
        tier = tier_of(servers)
        async with Load(tier, root / "old", root / "new") as load:
            await publish_in_turn(2, servers, load)  # what is allocated once is not growth
            await only_one_is_held(servers, load)
            for _ in range(3):  # what is allocated once may be allocated late: a leak leaks every time
                before = [server.private_bytes() for server in servers]
                load.seen.clear()
                await publish_in_turn(N_PUBLICATIONS, servers, load)
                await only_one_is_held(servers, load)
                growth = max(server.private_bytes() / size for server, size in zip(servers, before, strict=True))
                print(f"private memory {growth:.3f} times")
                if growth <= 1.05:
                    break
        record_property("growth of private memory", growth)
        assert load.failures == []
        assert load.seen == {"old", "new"}
        assert growth <= 1.05
        await tier.close()

    with running(root, n_replicas=2) as servers:
        asyncio.run(scenario(servers))


def test_a_server_lets_go_of_the_snapshot_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("index_processes.RETAIN_S", 0.0)
    root = make_root(tmp_path / "root", n_shards=1)
    with running(root, n_replicas=1, n_shards=1) as servers:
        maps = Path(f"/proc/{servers[0].popen.pid}/maps")
        assert f"{root}/old/" in maps.read_text()
        asyncio.run(publish(root / "new", settings_of(servers)))
        limit = monotonic() + 60
        while f"{root}/old/" in maps.read_text():
            assert monotonic() < limit
        assert f"{root}/new/" in maps.read_text()


def builds(root: Path, n_kills: int) -> None:
    """Fork a process that builds snapshot after snapshot, kill it at a random moment; so often. Before these, one ends
    its build, and one is killed in the middle. No gRPC here: forking is safe, and cheaper than a new interpreter.
    """
    import time

    from index_processes import build

    def begin(n_builds: int, killed_at: tuple[str, int] = ("never", 0)) -> int:
        child = os.fork()
        if child == 0:
            for i in range(n_builds):
                build(
                    root / f"{os.getpid()}-{i}",
                    on_progress=lambda stage, done, total: (
                        os.kill(os.getpid(), signal.SIGKILL) if (stage, done) == killed_at else None
                    ),
                )
            os._exit(0)
        return child

    build(root / "imported")  # what it imports takes a hundred times as long as itself: kills would all meet that
    begun = monotonic()
    os.waitpid(begin(1), 0)
    usual_s = monotonic() - begun
    os.waitpid(begin(1, ("index", N)), 0)
    random = Random(0)
    for _ in range(n_kills):
        child = begin(1000)
        time.sleep(random.uniform(0.0, 3 * usual_s))  # the random moment
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_kill_9_while_building(tmp_path: Path) -> None:
    root = make_root(tmp_path / "root")
    subprocess.run([sys.executable, __file__, str(root), str(N_KILLED_BUILDS)], check=True)
    names = [path.name for path in root.iterdir() if path.is_dir()]
    complete = [row.where for row in held_by_root(root)]
    assert sorted(complete) == sorted(name for name in names if not name.startswith("."))
    assert len(complete) > 2
    assert len(names) > len(complete)
    for name in complete:
        snapshot = Snapshot.open(root / name)
        for shard in range(len(snapshot.manifest.shards)):
            snapshot.verify(shard)

    async def scenario(servers: list[ServerProcess]) -> None:
        assert await searched(servers) == "old"
        newest = max(set(complete) - {"old", "new"})
        await publish(root / newest, settings_of(servers))
        assert await searched(servers) == newest

    with running(root, n_replicas=1) as servers:
        asyncio.run(scenario(servers))


async def listens(server: ServerProcess) -> None:
    await asyncio.to_thread(lambda: server.address)


async def searched(servers: list[ServerProcess]) -> str:
    """The name of the snapshot that a new client finds."""
    tier = tier_of(servers)
    hits = await tier.search(VECTORS[:1], RetrievalSettings(k=5), Context(Deadline.after(60)))
    passages = await tier.fetch(hits.ids[0].tolist(), hits.snapshot_id, Context(Deadline.after(60)))
    await tier.close()
    names = {passage.text.split()[0] for passage in passages}
    assert len(names) == 1
    return names.pop()


def test_kill_9_while_publishing(tmp_path: Path) -> None:
    """At every moment that `publish` tells of, then at random ones, of which only this is known: it is one or the other
    that is found, and the new one if that was said.
    """
    outcomes: list[tuple[str, bool]] = []

    async def killed(server: ServerProcess, folder: Path, moment: tuple[str, int] | None, after_s: float) -> bool:
        """Whether the publication was said to be done."""

        def on_progress(step: str, done: int, total: int) -> None:
            if (step, done) == moment:
                server.kill()

        publishing = asyncio.create_task(publish(folder, settings_of([server]), on_progress=on_progress))
        if moment is None:
            await asyncio.sleep(after_s)
            server.kill()
        try:
            await publishing
        except OpenbookError:
            return False
        return True

    async def lane(number: int) -> None:
        random, root, usual_s = Random(number), make_root(tmp_path / f"root-{number}", n_shards=1), 0.05
        told = MOMENTS[number::N_LANES]
        server = ServerProcess(root)
        try:
            await listens(server)
            for i in range(N_KILLED_PUBLICATIONS):
                target, former = ("new", "old") if i % 2 == 0 else ("old", "new")
                moment = told[i] if i < len(told) else None
                done = await killed(server, root / target, moment, random.uniform(0.0, 1.2 * usual_s))
                server = ServerProcess(root)
                await listens(server)
                found = await searched([server])
                outcomes.append((("former", "target")[found == target], done))
                assert found == Root(root).read().current
                assert found == target if done else found in (target, former)
                if moment:
                    assert (found, done) == ((target, True) if moment == MOMENTS[-1] else (former, False))
                begun = monotonic()
                await publish(root / target, settings_of([server]))
                usual_s = monotonic() - begun if found == former else usual_s
                assert await searched([server]) == target
        finally:
            server.kill()

    async def scenario() -> None:
        await asyncio.gather(*map(lane, range(N_LANES)))

    asyncio.run(scenario())
    print({outcome: outcomes.count(outcome) for outcome in set(outcomes)})


if __name__ == "__main__":
    builds(Path(sys.argv[1]), int(sys.argv[2]))
