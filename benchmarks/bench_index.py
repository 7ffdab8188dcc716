"""One index server beside FAISS in this process: the same file, the same threads, in turn, CPU time of client + server.

    python benchmarks/bench_index.py [--passages 100000] [--rounds 9] [--folder var/bench-index] [--only "Flat, scan"]

FAISS is called as its users call it, except that for "FAISS" a Flat index uses BLAS from four queries on, as ours does,
and "FAISS by default" leaves its settings alone. Every contender answers the same queries in every round; a ratio is
the median of those of the rounds. Clustered vectors of 768 numbers, k 10, one thread. The snapshots are kept in the
folder for the next run. Prints a table, and one JSON line.
"""

import argparse
import asyncio
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import faiss
import grpc
import numpy as np
import uvloop

from openbook import wire
from openbook.core.context import Context
from openbook.core.types import Float32, Passage, RetrievalSettings
from openbook.index.building.build import build_snapshot
from openbook.index.client.client import IndexClient
from openbook.index.disk.snapshot import INDEX, shard_folder
from openbook.v1 import index_pb2, index_pb2_grpc

D, K = 768, 10
BEST = RetrievalSettings(k=K)
FAISS_BLAS_THRESHOLD = faiss.cvar.distance_compute_blas_threshold
SCANS = {"Flat, scan": "int8"}
# what FAISS builds, as a share of the passages, how many batches of 64 a round takes, and whether in huge pages
KINDS = {
    "Flat": ("Flat", 1.0, 1, False),
    "Flat, scan": ("Flat", 1.0, 1, False),
    "IVF": ("IVF512,SQ8", 2.0, 1, False),
    "HNSW, small": ("HNSW32", 0.5, 4, False),
    "HNSW": ("HNSW32", 2.0, 4, False),
    "HNSW, huge": ("HNSW32", 2.0, 4, True),
}

Run = Callable[[], Awaitable[None]]


def clustered(n: int, seed: int) -> Float32:
    centres = np.random.default_rng(0).standard_normal((500, D)).astype(np.float32)
    rng = np.random.default_rng(seed)
    return centres[rng.integers(0, 500, n)] + 0.7 * rng.standard_normal((n, D), dtype=np.float32)


def build(folder: Path, factory: str, vectors: Float32, n_shards: int = 1, scan: str | None = None) -> Path:
    if not folder.exists():
        passages = [Passage(i, "", "", "") for i in range(len(vectors))]
        build_snapshot(passages, vectors, folder, n_shards, factory, "none", "none", scan=scan)
    return folder


class Server:
    """One index server in a process of its own."""

    def __init__(self, command: list[str], **env: str) -> None:
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **env})
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def cpu_s(self) -> float:
        """Exact to a nanosecond where the kernel tells, and not to a tick."""
        path = Path(f"/proc/{self.process.pid}/task")
        return sum(int((task / "schedstat").read_text().split()[0]) for task in path.iterdir()) / 1e9

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


@contextmanager
def serving(folder: Path, **env: str) -> Iterator[Server]:
    server = Server([sys.executable, "-m", "openbook.cli", "index", "serve", str(folder)], **env)
    try:
        yield server
    finally:
        server.stop()


async def cpu_and_wall(run: Run, server: Server | None) -> tuple[float, float]:
    before = server.cpu_s() if server else 0.0
    cpu, wall = time.process_time(), time.perf_counter()
    await run()
    wall = time.perf_counter() - wall
    return time.process_time() - cpu + ((server.cpu_s() if server else 0.0) - before), wall


async def compare(runs: dict[str, tuple[Run, Server | None]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """CPU and wall seconds of each contender in each round, all in turn, after one round that does not count."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name, (run, server) in runs.items():
            measured = await cpu_and_wall(run, server)
            if i:
                times[name].append(measured)
    return times


def ratio(times: dict[str, list[tuple[float, float]]], theirs: str, ours: str) -> dict[str, float]:
    """How many times the throughput of `theirs` `ours` has, by CPU and by wall clock."""
    return {
        name: round(statistics.median(a[i] / b[i] for a, b in zip(times[theirs], times[ours], strict=True)), 2)
        for i, name in enumerate(("cpu", "wall"))
    }


def in_process(index: Any, queries: Float32, batch: int, blas_threshold: int) -> Run:
    async def run() -> None:
        faiss.cvar.distance_compute_blas_threshold = blas_threshold
        for i in range(0, len(queries), batch):
            index.search(queries[i : i + batch], K)

    return run


def asked(client: IndexClient, queries: Float32, batch: int) -> Run:
    async def run() -> None:
        for i in range(0, len(queries), batch):
            await client.search(queries[i : i + batch], BEST, "", Context(), 60.0)

    return run


def all_at_once(client: IndexClient, queries: Float32) -> Run:
    async def run() -> None:
        await asyncio.gather(*(client.search(query[None], BEST, "", Context(), 60.0) for query in queries))

    return run


async def against_faiss(
    folder: Path, name: str, n_batches: int, huge_pages: bool, rounds: int
) -> list[tuple[str, dict[str, float]]]:
    index = faiss.read_index(str(shard_folder(folder, 0) / INDEX), faiss.IO_FLAG_MMAP_IFC)
    queries = clustered(64 * n_batches, seed=2)
    found = []
    env = {"OPENBOOK_INDEX_SERVER__HUGE_PAGES": str(huge_pages)}
    with serving(folder, **env) as server, serving(folder, OPENBOOK_INDEX_SERVER__MAX_ROWS="1", **env) as one_by_one:
        clients = [IndexClient(server.address) for _ in range(4)]
        lonely = IndexClient(one_by_one.address)
        for batch in (64, 16, 1):
            runs: dict[str, tuple[Run, Server | None]] = {
                "FAISS": (in_process(index, queries, batch, 4 * D), None),
                "server": (asked(clients[0], queries, batch), server),
            }
            if name == "Flat" and batch == 64:
                runs["default"] = in_process(index, queries, batch, FAISS_BLAS_THRESHOLD), None
            times = await compare(runs, rounds)
            found.append((f"{name}, batch {batch}, beside FAISS", ratio(times, "FAISS", "server")))
            if "default" in runs:
                found.append((f"{name}, batch {batch}, beside FAISS by default", ratio(times, "default", "server")))
        runs = {
            "one by one": (all_at_once(lonely, queries[:64]), one_by_one),
            "coalesced": (all_at_once(clients[0], queries[:64]), server),
        }
        times = await compare(runs, rounds)
        what = f"{name}, 64 single queries in flight, coalesced beside not"
        found.append((what, ratio(times, "one by one", "coalesced")))

        async def together() -> None:
            await asyncio.gather(*(asked(client, queries, 64)() for client in clients))

        async def in_turn() -> None:
            for client in clients:
                await asked(client, queries, 64)()

        alone = in_process(index, np.tile(queries, (len(clients), 1)), 64, 4 * D), None
        times = await compare({"FAISS": alone, "one": (in_turn, server), "four": (together, server)}, rounds)
        found.append((f"{name}, four callers of batch 64 beside one", ratio(times, "one", "four")))
        found.append((f"{name}, four callers of batch 64 beside FAISS", ratio(times, "FAISS", "four")))
        for client in (*clients, lonely):
            await client.close()
    return found


def replies(calls: Iterator[index_pb2.Call], context: Any) -> Iterator[index_pb2.Reply]:
    for call in calls:
        n = call.search.queries.rows
        found = index_pb2.SearchResponse(rows=n, k=K, ids=bytes(8 * n * K), scores=bytes(4 * n * K))
        yield index_pb2.Reply(number=call.number, search=found)


def echo() -> None:
    """Serve what gRPC itself costs: nothing is done."""
    server = grpc.server(ThreadPoolExecutor(4), options=(("grpc.max_receive_message_length", -1),))
    handler = grpc.stream_stream_rpc_method_handler(
        replies,
        request_deserializer=index_pb2.Call.FromString,
        response_serializer=index_pb2.Reply.SerializeToString,
    )
    service = index_pb2.DESCRIPTOR.services_by_name["IndexService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Exchange": handler}),))
    print(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", flush=True)
    server.start()
    server.wait_for_termination()


class ThreadStream:
    """The same stream without asyncio: what a caller in a thread of its own pays."""

    def __init__(self, address: str) -> None:
        self._calls: queue.SimpleQueue[index_pb2.Call] = queue.SimpleQueue()
        self._replies = index_pb2_grpc.IndexServiceStub(grpc.insecure_channel(address)).Exchange(
            iter(self._calls.get, None)
        )

    def search(self, queries: Float32) -> None:
        search = index_pb2.SearchRequest(queries=wire.matrix_to_wire(queries), k=K)
        self._calls.put(index_pb2.Call(number=1, search=search, timeout_s=60))
        next(self._replies)


async def round_trips(empty: Path, rounds: int, loop: str) -> list[tuple[str, dict[str, float]]]:
    """Median milliseconds of one call to an empty shard, and of the same over a stream on which nothing is done.

    `loop` names the event loop that this runs in.
    """
    found = []
    bare = Server([sys.executable, __file__, "--echo"])
    with serving(empty) as server:
        stacks: dict[str, Any] = {
            "IndexClient, index server": IndexClient(server.address),
            "IndexClient, bare echo": IndexClient(bare.address),
            "threads, index server": ThreadStream(server.address),
            "threads, bare echo": ThreadStream(bare.address),
        }
        for rows, n_calls in ((1, 5), (1, 50), (64, 5), (64, 50)):  # after the others' turns the first calls are slower
            queries, context = clustered(rows, seed=3), Context()
            times: dict[str, list[float]] = {name: [] for name in stacks}
            n_turns = 150 // n_calls
            for i in range(n_turns * (rounds + 1)):
                for name, client in stacks.items():
                    for _ in range(n_calls):
                        started = time.perf_counter()
                        if isinstance(client, IndexClient):
                            await client.search(queries, BEST, "", context, 60.0)
                        else:
                            client.search(queries)
                        if i >= n_turns:
                            times[name].append(1e3 * (time.perf_counter() - started))
            for name, each in times.items():
                tenth, median = np.percentile(each, [10, 50]).round(3).tolist()
                what = f"round trip of {rows} rows, {n_calls} in turn, {name} ({loop})"
                found.append((what, {"p10 ms": tenth, "median ms": median}))
        for client in stacks.values():
            if isinstance(client, IndexClient):
                await client.close()
    bare.stop()
    return found


def main(args: argparse.Namespace) -> None:
    results: list[tuple[str, dict[str, float]]] = []
    with ExitStack() as stack:
        stack.callback(lambda: print(json.dumps(dict(results))))
        empty = build(args.folder / "empty", "Flat", clustered(1, seed=1), 2)
        loops = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
        for loop, factory in loops.items() if args.only is None else ():
            with asyncio.Runner(loop_factory=factory) as runner:  # Ray Serve's replicas run in uvloop
                results += runner.run(round_trips(empty, args.rounds, loop))
        for name, (kind, share, n_batches, huge_pages) in KINDS.items():
            if args.only not in (None, name):
                continue
            n, scan = int(args.passages * share), SCANS.get(name)
            folder = build(args.folder / f"{kind}-{n}{f'-{scan}' if scan else ''}", kind, clustered(n, seed=1), 1, scan)
            results += asyncio.run(against_faiss(folder, name, n_batches, huge_pages, args.rounds))
        print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, FAISS {faiss.__version__}")
        for what, numbers in results:
            print(f"{what:68}" + "".join(f"  {key} {value:7.3f}" for key, value in numbers.items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path("var/bench-index"))
    parser.add_argument("--only", choices=KINDS, help="this kind of index, and no round trips")
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.echo:
        echo()
    else:
        faiss.omp_set_num_threads(1)
        main(arguments)
