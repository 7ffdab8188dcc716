"""What a good caller of an index server sees while others attack it, and what is left of them afterwards.

    python benchmarks/bench_attacks.py [--factory IVF256,SQ8] [--passages 50000] [--seconds 4] [--rounds 3]
    python benchmarks/bench_attacks.py --endpoint SNAPSHOT [--seconds 30]

One server, one good caller through IndexClient, or of the endpoint that `openbook up` starts in front of it, and the
attackers in a process of their own, at the lowest priority of the operating system: they stand for other machines. As
they take time of this one all the same, also beside a process that is busy and asks for nothing. Quiet, beside that and
attacked in turn, within one run. Prints a table for each attack, with p99 as a multiple of both others', then threads,
descriptors and memory of the server before and after all of them, and one JSON line.
"""

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import grpc
import numpy as np
import psutil
from bench_serving import system

from openbook.client import Client
from openbook.config import IndexServerSettings
from openbook.core.context import Context
from openbook.core.types import Float32, Passage, RetrievalSettings
from openbook.errors import OpenbookError
from openbook.index.building.build import build_snapshot
from openbook.index.client.client import IndexClient
from openbook.index.connection import frame
from openbook.loadtest.questions import embedded
from openbook.v1 import index_pb2, index_pb2_grpc

K = 10
D = 768
TIMEOUT_S = 10.0
WARM_S = 1.0
TEXT = " ".join(["words"] * 100)
SERVICE = "/openbook.v1.IndexService"
METHODS = (f"{SERVICE}/Info", f"{SERVICE}/Search", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")


# The attacks: each goes on until it is killed


def busy(address: str, index: index_pb2.InfoResponse) -> None:
    """No attack, and as busy as an attacker."""
    numbers = np.ones((500, 500), np.float32)
    while True:
        numbers = np.tanh(numbers @ numbers)


def idle_calls(address: str, index: index_pb2.InfoResponse) -> None:
    """300 calls whose message never comes, begun anew as they are cancelled."""
    over = threading.Event()

    def nothing() -> Iterator[bytes]:
        over.wait()
        yield b""

    channels = [grpc.insecure_channel(address, (("grpc.use_local_subchannel_pool", 1),)) for _ in range(4)]
    calls: list[Any] = []
    while True:
        calls = [call for call in calls if not call.done()]
        n_new = min(300 - len(calls), 20)
        calls += [channels[i % 4].stream_stream(METHODS[i % 3])(nothing()) for i in range(n_new)]
        time.sleep(0.01)


def leave_refused(address: str, index: index_pb2.InfoResponse) -> None:
    """Pipeline until refused, and leave, again and again."""
    call = index_pb2.Call(search={"queries": {"rows": 256, "columns": index.dimension}, "k": 1000})
    data = np.ones((256, index.dimension), np.float32).tobytes()
    while True:
        connection = connect(index.frames)
        with suppress(OSError):
            connection.settimeout(0.5)
            for call.number in range(1, 100):
                connection.sendall(b"".join(frame(call.SerializeToString(), data)))
        connection.close()


def idle_connections(address: str, index: index_pb2.InfoResponse) -> None:
    """64 connections with the key and as many newcomers without, begun anew ten times a second."""
    known: list[socket.socket] = []
    strangers: list[socket.socket] = []
    while True:
        known, strangers = known[-58:], strangers[-58:]  # what is dropped is closed
        for _ in range(6):
            known.append(connect(index.frames))
            strangers.append(socket.create_connection(("127.0.0.1", index.frames.port)))
        time.sleep(0.1)


def pipelined_searches(address: str, index: index_pb2.InfoResponse) -> None:
    """256 rows each, as many as the server reads."""
    queries = np.random.default_rng(1).standard_normal((256, index.dimension)).astype(np.float32)
    pipeline(
        index, index_pb2.Call(search={"queries": {"rows": 256, "columns": index.dimension}, "k": K}), queries.tobytes()
    )


def small_searches(address: str, index: index_pb2.InfoResponse) -> None:
    """Of one row each, as many as the server reads."""
    query = np.random.default_rng(1).standard_normal((1, index.dimension)).astype(np.float32)
    pipeline(
        index, index_pb2.Call(search={"queries": {"rows": 1, "columns": index.dimension}, "k": K}), query.tobytes()
    )


def fetches(address: str, index: index_pb2.InfoResponse) -> None:
    """Of 1024 passages with vectors, as many as the server reads."""
    pipeline(index, index_pb2.Call(fetch=index_pb2.FetchRequest(ids=range(1024), with_vectors=True)), b"")


def unread_fetches(address: str, index: index_pb2.InfoResponse) -> None:
    """The same, and the replies are never read, on connections that begin anew."""
    call = index_pb2.Call(fetch=index_pb2.FetchRequest(ids=range(1024), with_vectors=True))
    while True:
        connection = connect(index.frames)
        connection.settimeout(0.5)
        with suppress(OSError):
            for call.number in range(1, 2000):
                connection.sendall(b"".join(frame(call.SerializeToString())))
        connection.close()


ATTACKS: dict[str, Callable[[str, index_pb2.InfoResponse], None]] = {
    "idle calls": idle_calls,
    "refused, then gone": leave_refused,
    "idle connections": idle_connections,
    "searches of 256": pipelined_searches,
    "searches of 1": small_searches,
    "fetches": fetches,
    "fetches, unread": unread_fetches,
}
BESIDE: dict[str, Callable[[str, index_pb2.InfoResponse], None]] = {"busy": busy, **ATTACKS}


def connect(frames: index_pb2.Frames) -> socket.socket:
    """A connection that has shown the key; a Unix socket, as clients on the same machine have."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(f"\0{frames.name}")
    connection.sendall(frames.key)
    return connection


def pipeline(index: index_pb2.InfoResponse, call: index_pb2.Call, data: bytes) -> None:
    """Send a call again and again, and read whatever comes."""
    connection = connect(index.frames)

    def read() -> None:
        buffer = bytearray(1 << 20)
        while connection.recv_into(buffer):
            pass

    threading.Thread(target=read, daemon=True).start()
    while True:
        for call.number in range(1, 1 << 30):
            connection.sendall(b"".join(frame(call.SerializeToString(), data)))


def attack(name: str, address: str) -> None:
    """Attack until killed."""
    os.nice(19)
    with grpc.insecure_channel(address) as channel:
        index = index_pb2_grpc.IndexServiceStub(channel).Info(index_pb2.InfoRequest(), timeout=TIMEOUT_S)
    print("attacking", flush=True)
    while True:
        with suppress(OSError):  # the server ended a connection: begin anew
            BESIDE[name](address, index)


# The good caller, and the measuring


def serve(snapshot: Path) -> None:
    """The server, in this process."""
    from openbook.index.server import server

    server.run(IndexServerSettings(snapshot=snapshot))


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """This script in a process of its own."""
    command = [sys.executable, __file__, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        try:
            yield started
        finally:
            started.send_signal(signal.SIGKILL)


def state_of(pid: int) -> dict[str, float]:
    """Threads, descriptors and MB of memory of a process: its own, without what it has read of the snapshot's files."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    n_descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {
        "threads": int(status["Threads"]),
        "descriptors": n_descriptors,
        "memory MB": int(status["RssAnon"].split()[0]) / 1024,
    }


class GoodCaller(Protocol):
    """Asks for one thing after the other."""

    kinds: tuple[str, ...]

    async def ask(self, seconds: float) -> tuple[dict[str, list[float]], int]:
        """How long each call of a kind took, in seconds, and how many failed."""
        ...

    async def close(self) -> None:
        """Let go of the connection."""
        ...


class CallerOfEndpoint:
    """Asks questions of the endpoint."""

    kinds = ("question",)

    def __init__(self, address: str) -> None:
        self._client = Client(address, timeout_s=TIMEOUT_S)
        self._questions = itertools.cycle(random.Random(1).sample(embedded(), 1000))

    async def ask(self, seconds: float) -> tuple[dict[str, list[float]], int]:
        took, n_failed = list[float](), 0
        until = monotonic() + seconds
        while monotonic() < until:
            begun = monotonic()
            try:
                await asyncio.to_thread(self._client.answer, next(self._questions))
                took.append(monotonic() - begun)
            except OpenbookError:
                n_failed += 1
        return {"question": took}, n_failed

    async def close(self) -> None:
        self._client.close()


class CallerOfServer:
    """Searches, and fetches what was found; and asks, without a stream, for Info."""

    kinds = ("search", "fetch", "info")

    def __init__(self, address: str, queries: Float32) -> None:
        self._client = IndexClient(address)
        self._queries = queries
        self._n = 0

    async def ask(self, seconds: float) -> tuple[dict[str, list[float]], int]:
        found: dict[str, list[float]] = {kind: [] for kind in self.kinds}
        n_failed = 0
        until = monotonic() + seconds
        while monotonic() < until:
            self._n += 1
            at = self._n % len(self._queries)
            query, settings = self._queries[at : at + 1], RetrievalSettings(k=K)
            try:
                begun = monotonic()
                hits, _ = await self._client.search(query, settings, "", Context(), TIMEOUT_S)
                found["search"].append(monotonic() - begun)
                begun = monotonic()
                await self._client.fetch(hits.ids[0, :5].tolist(), "", False, Context(), TIMEOUT_S)
                found["fetch"].append(monotonic() - begun)
                begun = monotonic()
                await self._client.info(TIMEOUT_S)
                found["info"].append(monotonic() - begun)
            except OpenbookError:
                n_failed += 1
            await asyncio.sleep(0.002)
        return found, n_failed

    async def close(self) -> None:
        await self._client.close()


def summary(latencies: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    p50, p99 = np.percentile(latencies, [50, 99]) * 1000 if latencies else (np.nan, np.nan)
    return {"n": len(latencies), "p50": float(p50), "p99": float(p99)}


async def compare(
    address: str, pid: int, caller: GoodCaller, names: Sequence[str], n_rounds: int, seconds: float
) -> dict[str, Any]:
    await caller.ask(2 * WARM_S)
    before = state_of(pid)
    results: dict[str, Any] = {}
    print(f"\n{'attack':20}{'':10}{'n':>7}{'p50 ms':>9}{'p99 ms':>9}{'failed':>8}{'of quiet':>10}{'of busy':>9}")
    for name in names:
        beside = {"quiet": None, "busy": "busy", "attacked": name}
        found: dict[str, dict[str, list[float]]] = {key: {kind: [] for kind in caller.kinds} for key in beside}
        failed = dict.fromkeys(found, 0)
        for _ in range(n_rounds):
            for key, other in beside.items():
                with ExitStack() as stack:
                    if other:
                        attacker = stack.enter_context(process("--attack", other, "--address", address))
                        assert attacker.stdout is not None
                        await asyncio.to_thread(attacker.stdout.readline)
                    await caller.ask(WARM_S)
                    more, n_failed = await caller.ask(seconds)
                    if other and (ended := attacker.poll()) is not None:
                        raise RuntimeError(f"{other}: the attacker ended with {ended} before the round did")
                for kind, each in more.items():
                    found[key][kind] += each
                failed[key] += n_failed
        results[name] = {"failed": failed}
        for kind in caller.kinds:
            rows = results[name][kind] = {key: summary(found[key][kind]) for key in found}
            for key, row in rows.items():
                first, second = (name if kind == caller.kinds[0] else "", kind) if key == "quiet" else ("", f"  {key}")
                row |= {f"p99 of {base}": row["p99"] / rows[base]["p99"] for base in ("quiet", "busy")}
                ratios = f"{row['p99 of quiet']:10.2f}{row['p99 of busy']:9.2f}" if key == "attacked" else ""
                print(
                    f"{first:20}{second:10}{row['n']:7}{row['p50']:9.2f}{row['p99']:9.2f}{failed[key]:8}{ratios}",
                    flush=True,
                )
    await asyncio.sleep(12)  # what idles has had its time
    await caller.ask(WARM_S)
    after = state_of(pid)
    print("\n" + "\n".join(f"{key:12}{before[key]:9.0f} before{after[key]:9.0f} after" for key in before))
    await caller.close()
    return {"attacks": results, "before": before, "after": after}


Attacked = tuple[str, int, Callable[[], GoodCaller]]
"""An index server's address, its process, and who calls."""


@contextmanager
def server_alone(n_passages: int, factory: str) -> Iterator[Attacked]:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((200, D))
    vectors = centres[rng.integers(0, 200, n_passages)] + 0.5 * rng.standard_normal((n_passages, D))
    queries = (centres[rng.integers(0, 200, 500)] + 0.5 * rng.standard_normal((500, D))).astype(np.float32)
    passages = [Passage(i, f"doc-{i}", "title", TEXT) for i in range(n_passages)]
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Path(folder) / "snapshot"
        build_snapshot(passages, vectors.astype(np.float32), snapshot, 1, factory, "bench", "bench")
        with process("--serve", snapshot) as server:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            yield address, server.pid, lambda: CallerOfServer(address, queries)


@contextmanager
def endpoint(snapshot: Path) -> Iterator[Attacked]:
    """As `openbook up` starts it, of whose index servers the first is attacked."""
    with system(snapshot, None) as settings:
        address = settings.index.addresses[0]
        port = int(address.rpartition(":")[2])
        ours = psutil.Process().children(recursive=True)
        (pid,) = (
            each.pid for each in ours if port in (c.laddr.port for c in each.net_connections("tcp") if not c.raddr)
        )
        yield address, pid, lambda: CallerOfEndpoint(settings.serving.grpc_address)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--factory", default="IVF256,SQ8")
    parser.add_argument("--passages", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--endpoint", type=Path, metavar="SNAPSHOT")
    parser.add_argument("--only", nargs="*", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
    elif args.attack:
        attack(args.attack, args.address)
    else:
        of_it = endpoint(args.endpoint) if args.endpoint else server_alone(args.passages, args.factory)
        with of_it as (address, pid, make_caller):

            async def compared() -> dict[str, Any]:
                return await compare(address, pid, make_caller(), args.only, args.rounds, args.seconds)

            found = asyncio.run(compared())
        about = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        options = {"factory": args.factory, "passages": args.passages, "seconds": args.seconds, "rounds": args.rounds}
        print(json.dumps({"bench": "attacks", **found, **options, **about}))


if __name__ == "__main__":
    main()
