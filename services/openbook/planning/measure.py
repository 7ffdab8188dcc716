"""What one index tier on this machine takes: memory, disk, time of a question, questions a second."""

import asyncio
import json
import os
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, process_time
from typing import Any

import numpy as np

from openbook.config import INDEX_SERVER, IndexClientSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.together import all_of
from openbook.core.types import Float32, Passage, RetrievalSettings
from openbook.errors import StartupError
from openbook.index.building.build import add_bm25, build_snapshot
from openbook.index.client.sharded import ShardedIndex
from openbook.processes import end, of_module, start

K = 10
IN_FLIGHT = 64
N_QUERIES = 512
ROUNDS = 8
PER_CENTRE = 50
NOISE = 0.7  # of a centre's length
WORDS = 80


@dataclass(frozen=True, slots=True)
class Asked:
    """What was measured of questions: the least of several rounds, for others' programs take cores and caches too."""

    p50_s: float  # a query by itself, by the wall clock
    rate: (
        float  # queries a second for which the busiest server, of one thread, has CPU time; 64 callers, one query each
    )
    server_cpu_s: float  # of all servers, for a query, then
    client_cpu_s: float  # of who asks


@dataclass(frozen=True, slots=True)
class Served(Asked):
    """What was measured of one tier, all of whose servers ran here, each with one thread."""

    disk_bytes: int  # of the snapshot
    memory_bytes: int  # resident, of all servers, without the files of libraries


def generated(n: int, dimension: int, seed: int = 0) -> Float32:
    """(n, dimension) unit vectors around centres. Real ones are harder to find, and cost as much to scan."""
    rng = np.random.default_rng(seed)
    n_centres = max(16, n // PER_CENTRE)
    centres = np.random.default_rng(1).standard_normal((n_centres, dimension), np.float32)
    vectors = rng.standard_normal((n, dimension), np.float32)
    vectors *= NOISE
    vectors += centres[rng.integers(0, n_centres, n)]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors


class Texts(Sequence[Passage]):
    """A passage of WORDS words for each id; words of natural rarity."""

    def __init__(self, n: int) -> None:
        self._n = n
        ranks = np.random.default_rng(0).zipf(1.3, 1 << 16) % 50_000
        self._words = [f"w{rank:04x}" for rank in ranks]

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: Any) -> Any:
        first = (i * 7919) % (len(self._words) - WORDS)
        return Passage(i, f"document-{i // 5}", f"Title {i // 5}", " ".join(self._words[first : first + WORDS]))


def build(folder: Path, n: int, dimension: int, factory: str, n_shards: int = 1, words: bool = False) -> Path:
    """A snapshot of generated vectors, whose recall nobody asks for."""
    texts, queries = Texts(n), generated(16, dimension, seed=3)
    build_snapshot(texts, generated(n, dimension), folder, n_shards, factory, "generated", "generated", queries=queries)
    if words:
        add_bm25(folder)
    return folder


def disk_bytes(folder: Path) -> int:
    """Of all files of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def served(snapshot: Path, dimension: int, seconds: float) -> Served:
    """Serve a snapshot, a process of one thread a shard, and ask it as long as that, for each of two figures.

    Raises:
        StartupError: a server did not start; carries the last that it said.
    """
    manifest = json.loads((snapshot / "manifest.json").read_text(encoding="utf-8"))
    queries = generated(N_QUERIES, dimension, seed=2)
    with ExitStack() as stack:
        servers = [stack.enter_context(_server(snapshot, shard)) for shard in range(len(manifest["shards"]))]
        addresses = tuple(_address(process, shard) for shard, process in enumerate(servers))
        pids = [process.pid for process in servers]
        asked = asyncio.run(_ask(addresses, queries, pids, seconds))
        memory = sum(_resident_bytes(pid, snapshot.resolve()) for pid in pids)
    return Served(**asdict(asked), disk_bytes=disk_bytes(snapshot), memory_bytes=memory)


@contextmanager
def _server(snapshot: Path, shard: int) -> Iterator[subprocess.Popen[str]]:
    command = [*of_module("openbook.cli"), "index", "serve", str(snapshot), "--shard", str(shard)]
    of_others = f"openbook_{INDEX_SERVER}__"  # servers of this shell's: with TLS, or a port, ours could not be asked
    env = {name: text for name, text in os.environ.items() if not name.lower().startswith(of_others)}
    process = start([*command, "--threads", "1"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        end(process)


def _address(process: subprocess.Popen[str], shard: int) -> str:
    assert process.stdout
    assert process.stderr  # of which nobody reads more: a few lines fit into the pipe
    address = process.stdout.readline().strip()
    if not address:
        said = process.stderr.read().strip().rpartition("\n")[2]
        raise StartupError(f"the index server of shard {shard} did not start: {said}")
    return address


async def _ask(addresses: tuple[str, ...], queries: Float32, pids: list[int], seconds: float) -> Asked:
    tier = ShardedIndex.of(IndexClientSettings(addresses=addresses, timeout_s=60, hedge_budget=0))
    wanted = RetrievalSettings(k=K)

    async def caller(until: float, taken: list[float]) -> None:
        while (began := monotonic()) < until or not taken:  # this process may have stalled for so long
            query = queries[len(taken) % N_QUERIES][None]
            await tier.search(query, wanted, Context(Deadline.after(60)))
            taken.append(monotonic() - began)

    async def asked(n_callers: int) -> tuple[list[float], list[float], float]:
        """How long each took; CPU time of each server, and of us, for each."""
        taken: list[float] = []
        before, ours = [*map(_cpu_s, pids)], process_time()
        until = monotonic() + seconds / ROUNDS
        await all_of(caller(until, taken) for _ in range(n_callers))
        n = len(taken)
        of_servers = [(now - then) / n for now, then in zip(map(_cpu_s, pids), before, strict=True)]
        return taken, of_servers, (process_time() - ours) / n

    try:
        for n_callers in (1, IN_FLIGHT):
            await asked(n_callers)  # warms up
        alone = [await asked(1) for _ in range(ROUNDS)]
        many = [await asked(IN_FLIGHT) for _ in range(ROUNDS)]
        p50_s = min(statistics.median(taken) for taken, _, _ in alone)
        busiest_s = min(max(of_servers) for _, of_servers, _ in many)
        servers_s = min(sum(of_servers) for _, of_servers, _ in many)
        return Asked(p50_s, 1 / busiest_s, servers_s, min(of_client for _, _, of_client in many))
    finally:
        await tier.close()


def _cpu_s(pid: int) -> float:
    """Of all threads that live."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # it has ended
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _resident_bytes(pid: int, snapshot: Path) -> int:
    """Its own memory and the snapshot's pages. Without libraries' files: whose they are depends on who else runs."""
    found, wanted = 0, ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):  # a mapping begins, of a file that comes last
            wanted = "Rss:" if len(rest) == 5 and Path(rest[4]).is_relative_to(snapshot) else "Anonymous:"
        elif first == wanted:
            found += 1024 * int(rest[0])
    return found
