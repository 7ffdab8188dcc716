"""Index servers in processes of their own, to which faults can be done, and callers who check every answer."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

import numpy as np

from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Passage, RetrievalSettings
from openbook.errors import OpenbookError
from openbook.index.building.build import OnProgress, build_snapshot
from openbook.index.client.routing import Health
from openbook.index.client.sharded import ShardedIndex
from openbook.index.disk.root import Root
from openbook.index.disk.snapshot import Snapshot

N, D, N_SHARDS = 40, 4, 2
VECTORS = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
DEADLINE_S = 10.0
RETAIN_S = 10.0
"""A former snapshot: as long as between a search and its fetch may pass."""


def build(
    out: Path, sign: int = 1, n_shards: int = N_SHARDS, on_progress: OnProgress = lambda stage, done, total: None
) -> Path:
    """A snapshot whose texts begin with its folder's name; sign -1 turns every order of hits around."""
    passages = [Passage(i, f"doc-{i}", f"title {i}", f"{out.name} {i}") for i in range(N)]
    build_snapshot(passages, sign * VECTORS, out, n_shards, "Flat", "encoder", "fingerprint", on_progress=on_progress)
    return out


def make_root(folder: Path, n_shards: int = N_SHARDS) -> Path:
    """With the snapshots old, which is current, and new, its reverse."""
    build(folder / "old", 1, n_shards)
    build(folder / "new", -1, n_shards)
    Root.create(folder, folder / "old")
    return folder


class ServerProcess:
    """One server; starts at once, and `address` waits until it listens."""

    def __init__(
        self, folder: Path, shard: int = 0, host: str = "127.0.0.1", port: str = "0", inside: str = ""
    ) -> None:
        self._arguments = folder, shard, host, inside
        command = [*inside.split(), sys.executable, "-m", "openbook.cli", "index", "serve", str(folder)]
        self.popen = subprocess.Popen(
            [*command, "--shard", str(shard), "--host", host, "--port", port],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OPENBOOK_INDEX_SERVER__RETAIN_S": str(RETAIN_S)},
        )
        self._address = ""

    @property
    def address(self) -> str:
        if not self._address:
            assert self.popen.stdout is not None
            self._address = self.popen.stdout.readline().strip()
            assert self._address, "the server ended before it listened"
        return self._address

    def again(self) -> "ServerProcess":
        """Another one where this one was; it listens."""
        folder, shard, host, inside = self._arguments
        successor = ServerProcess(folder, shard, host, self.address.rpartition(":")[2], inside)
        assert successor.address == self.address
        return successor

    def send(self, number: signal.Signals) -> None:
        """Returns when the signal has done its work: frozen is a process once all its threads stand still."""
        if number == signal.SIGKILL:
            self.kill()
            return
        self.popen.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitpid(self.popen.pid, os.WUNTRACED)

    def kill(self) -> None:
        """End it, and wait for the end."""
        with self.popen:
            self.popen.kill()

    def private_bytes(self) -> int:
        """Memory that is its own and not a file's."""
        status = Path(f"/proc/{self.popen.pid}/status").read_text()
        return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


@contextmanager
def running(folder: Path, n_replicas: int, n_shards: int = N_SHARDS) -> Iterator[list[ServerProcess]]:
    """The replicas of shard 0, then those of shard 1. What stands in the list at the end is stopped."""
    servers = [ServerProcess(folder, shard) for shard in range(n_shards) for _ in range(n_replicas)]
    try:
        for server in servers:
            assert server.address
        yield servers
    finally:
        for server in servers:
            server.kill()


def tier_of(servers: Sequence[ServerProcess], timeout_s: float = 10.0) -> ShardedIndex:
    return ShardedIndex([server.address for server in servers], timeout_s)


def is_alive(tier: ShardedIndex, server: ServerProcess) -> bool:
    """Whether the client sends calls there."""
    assert tier._replicas is not None
    return tier._replicas.router.health(server.address) is Health.ALIVE


async def seconds_until(condition: Callable[[], bool]) -> float:
    started = monotonic()
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # what is waited for happens in another process
            await asyncio.sleep(0.01)
    return monotonic() - started


class Load:
    """Callers who search and fetch without a pause, each time within a deadline, and check what they get."""

    def __init__(self, tier: ShardedIndex, *snapshots: Path) -> None:
        self._tier = tier
        self._names = {Snapshot.open(folder).manifest.snapshot_id: folder.name for folder in snapshots}
        order = np.argsort(-(VECTORS @ VECTORS.T), axis=1, kind="stable")
        self._orders = {"old": order, "new": order[:, ::-1]}
        self._progress = asyncio.Condition()
        self._may_ask = asyncio.Event()
        self._may_ask.set()
        self._callers: list[asyncio.Task[None]] = []
        self.n_done = 0
        self.failures: list[str] = []
        self.seen: set[str] = set()

    async def more(self, n: int) -> None:
        """Let so many more questions be answered."""
        target = self.n_done + n
        async with self._progress:
            await asyncio.wait_for(self._progress.wait_for(lambda: self.n_done >= target), 240)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Nobody asks anew."""
        self._may_ask.clear()
        try:
            yield
        finally:
            self._may_ask.set()

    async def __aenter__(self) -> "Load":
        self._callers = [asyncio.create_task(self._call(i)) for i in range(6)]
        return self

    async def __aexit__(self, *error: object) -> None:
        for caller in self._callers:
            caller.cancel()
        ended = await asyncio.gather(*self._callers, return_exceptions=True)
        for reason in ended:  # cancelled, unless something was raised that nobody counted on
            if isinstance(reason, Exception):
                raise reason

    async def _call(self, i: int) -> None:
        while True:
            i = (i + 7) % N
            await self._may_ask.wait()
            try:
                problem = await self._ask(i)
            except OpenbookError as error:
                problem = f"{type(error).__name__}: {error}"
            if problem:
                self.failures.append(problem)
            async with self._progress:
                self.n_done += 1
                self._progress.notify_all()

    async def _ask(self, i: int) -> str:
        context = Context(Deadline.after(DEADLINE_S))
        hits = await self._tier.search(VECTORS[i : i + 1], RetrievalSettings(k=5), context)
        name = self._names[hits.snapshot_id]
        self.seen.add(name)
        if hits.ids[0].tolist() != self._orders[name][i, :5].tolist():
            return f"{hits.ids[0].tolist()} are not the hits of {i} in {name}"
        passages = await self._tier.fetch(hits.ids[0].tolist(), hits.snapshot_id, context)
        if [passage.text for passage in passages] != [f"{name} {j}" for j in hits.ids[0]]:
            return f"{passages} are not of {name}"
        return ""
