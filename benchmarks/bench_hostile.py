"""What whoever means harm costs a caller of the endpoint: models that need no time, real Serve and HAProxy.

    python benchmarks/bench_hostile.py [--attacks slow ...] [--senders 1000] [--floods 8] [--calls 500] [--rounds 3]
                                       [--replicas N]

Attacks, the first three of so many senders, the others of so many floods, which begin anew whenever they are refused,
half a second later:

- slow: a connection that says that 100 bytes follow, and sends one a second.
- calls: the same over gRPC, 100 calls on each connection, of which nothing follows.
- idle: a connection on which nothing is asked.
- bodies, chunked: bodies of 100 MB, as fast as they are taken, of which the length is told or not.
- deep: JSON of 100,000 brackets in each other.
- odd: questions of NUL, bidirectional marks and markup, over HTTP.
- plain: questions as anybody's, as often, by which the former are judged.
- junk: random bytes as messages over gRPC.

The good caller asks over HTTP, one question after the other, quiet and attacked in turn; so does another over gRPC.
Beside the ratio of the p99 stands where 95 % of such ratios lie when calls are drawn anew from those of each kind: what
of it is chance. What differs between two runs, or two hours of a machine, comes on top.

There are as many replicas as `openbook up` starts on this machine, or N.

Last come threads, descriptors and memory of all replicas together and of HAProxy: before the first attack, during each,
and after the last.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import repeat
from multiprocessing.synchronize import Event
from pathlib import Path

import grpc
import httpx
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table
from slow_sender import send_slowly

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # before Ray is imported
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from small_system import QUESTION, System, index_tier, serving_tier, write_snapshot

from openbook.cache.server import RedisServer
from openbook.client import Client
from openbook.config import Settings
from openbook.core.types import Float64
from openbook.serving.launch.fitting import fitted

HEAD = "POST /v1/answer HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
UNFINISHED = f"{HEAD}Content-Length: 100\r\n\r\n".encode()
ASK = "/openbook.v1.AnswerService/Answer"
CALLS_EACH = 100
BODY_BYTES, PART = 100_000_000, b"x" * 65536
PAUSE_S = 0.5  # of one sender between two requests of attacks that are no matter of number
SETTLE_S = 12.0  # longer than any body may take
N_DRAWN = 1000

State = dict[str, tuple[int, int, float]]
"""Threads, descriptors and MB of each process that callers meet."""


async def slow(port: int) -> None:
    """One sender's connection."""
    await send_slowly(port, UNFINISHED)


async def calls(port: int) -> None:
    """A hundred senders on one connection, as many as one may have: whoever is refused begins anew."""

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.sleep(3600)
        yield b""

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", (("grpc.use_local_subchannel_pool", 1),)) as channel:
        ask = channel.stream_unary(ASK)

        async def call() -> None:
            while True:
                with suppress(grpc.RpcError):
                    await ask(nothing())
                await asyncio.sleep(1)

        await asyncio.gather(*(call() for _ in range(CALLS_EACH)))


async def idle(port: int) -> None:
    """Until it is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        await reader.read()
    finally:
        writer.close()


async def send(port: int, head: str, parts: Iterable[bytes]) -> None:
    """One request, as far as it is taken, and the reply."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(f"{HEAD}Connection: close\r\n{head}\r\n\r\n".encode())
        for part in parts:
            writer.write(part)
            await writer.drain()
        await reader.read()
    finally:
        writer.close()
        await asyncio.sleep(PAUSE_S)


async def bodies(port: int) -> None:
    await send(port, f"Content-Length: {BODY_BYTES}", repeat(PART, BODY_BYTES // len(PART)))


async def chunked(port: int) -> None:
    chunk = b"%x\r\n%b\r\n" % (len(PART), PART)
    await send(port, "Transfer-Encoding: chunked", repeat(chunk, BODY_BYTES // len(PART)))


async def deep(port: int) -> None:
    body = b'{"question": ' + b"[" * 100_000
    await send(port, f"Content-Length: {len(body)}", [body])


async def odd(port: int) -> None:
    body = json.dumps({"question": "\0\u202e<script>\u2066" * random.randrange(1, 60), "k": 5}).encode()
    await send(port, f"Content-Length: {len(body)}", [body])


async def plain(port: int) -> None:
    body = json.dumps({"question": QUESTION}).encode()
    await send(port, f"Content-Length: {len(body)}", [body])


async def junk(port: int) -> None:
    """Random bytes, one message after the other."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", (("grpc.use_local_subchannel_pool", 1),)) as channel:
        ask = channel.unary_unary(ASK)
        while True:
            with suppress(grpc.RpcError):
                await ask(random.randbytes(random.randrange(300)))
            await asyncio.sleep(PAUSE_S)


ATTACKS: dict[str, Callable[[int], Awaitable[None]]] = {
    each.__name__: each for each in (slow, calls, idle, bodies, chunked, deep, odd, plain, junk)
}
OVER_GRPC = ("calls", "junk")
MANY = ("slow", "calls", "idle")
WHEN = ("quiet", "attacked")


def attack(kind: str, port: int, n: int, standing: Event) -> None:
    """In a process of its own, until it is killed."""

    async def sender() -> None:
        while True:
            with suppress(OSError):
                await ATTACKS[kind](port)

    os.nice(19)  # it would be another machine's work

    async def all_of_them() -> None:
        tasks = [asyncio.create_task(sender()) for _ in range(n // CALLS_EACH if kind == "calls" else n)]
        await asyncio.sleep(2)
        standing.set()
        await asyncio.gather(*tasks)

    asyncio.run(all_of_them())


@contextmanager
def attacked(system: System, kind: str, n: int) -> Iterator[None]:
    standing = multiprocessing.Event()
    port = int((system.grpc if kind in OVER_GRPC else system.http).rsplit(":", 1)[1])
    process = multiprocessing.get_context("fork").Process(target=attack, args=(kind, port, n, standing), daemon=True)
    process.start()

    def check_lives() -> None:
        if not process.is_alive():
            raise RuntimeError(f"{kind}: the attacker ended with {process.exitcode}")

    try:
        while not standing.wait(1):
            check_lives()
        yield
        check_lives()
    finally:
        process.kill()
        process.join()


def seconds(ask: Callable[[], object], n: int) -> tuple[list[float], int]:
    """Of n calls, and how many of them failed."""
    taken, n_failed = [], 0
    for _ in range(n):
        began = time.perf_counter()
        try:
            ask()
        except Exception:
            n_failed += 1
        taken.append(time.perf_counter() - began)
    return taken, n_failed


def ratio(quiet: list[float], hurt: list[float]) -> tuple[float, float, float]:
    """Of the p99, and its 95 % interval by the bootstrap."""
    rng = np.random.default_rng(0)

    def drawn(taken: list[float]) -> Float64:
        found: Float64 = np.percentile(rng.choice(taken, (N_DRAWN, len(taken))), 99, axis=1)
        return found

    low, high = np.percentile(drawn(hurt) / drawn(quiet), [2.5, 97.5])
    return float(np.percentile(hurt, 99) / np.percentile(quiet, 99)), float(low), float(high)


def held() -> State:
    """As it is now, together."""
    found: State = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            name = (process.cmdline() or [""])[0].removeprefix("ray::").split("/")[-1].strip()
            if name.startswith(("ServeReplica", "haproxy")):
                these = process.num_threads(), process.num_fds(), process.memory_info().rss / 2**20
                threads, descriptors, memory = found.get(name.split(":")[0], (0, 0, 0.0))
                found[name.split(":")[0]] = threads + these[0], descriptors + these[1], memory + these[2]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", nargs="+", default=[*ATTACKS], choices=ATTACKS)
    parser.add_argument("--senders", type=int, default=1000)
    parser.add_argument("--floods", type=int, default=8)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=fitted(Settings()).serving.n_replicas)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of all that is started; `fitted` goes by it
    console = Console(width=128)
    table = Table(
        "", "good caller", "calls", "p50 quiet, ms", "attacked", "p99 quiet, ms", "attacked", "ratio (95 %)", "failed"
    )
    states: dict[str, State] = {}
    times: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    failed: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder, RedisServer() as redis:
        snapshot = write_snapshot(Path(folder) / "snapshot")
        with (
            index_tier(snapshot, redis.url, proxy="haproxy", n_replicas=args.replicas) as searched,
            serving_tier(searched) as system,
            httpx.Client(base_url=system.http, timeout=30) as http,
            Client(system.grpc, timeout_s=30) as client,
        ):
            ways: dict[str, Callable[[], object]] = {
                "HTTP": lambda: http.post("/v1/answer", json={"question": QUESTION}).raise_for_status(),
                "gRPC": lambda: client.answer(QUESTION),
            }

            def measure(kind: str, when: str) -> None:
                for name, ask in ways.items():
                    taken, n_failed = seconds(ask, args.calls)
                    times[kind, name, when] += taken
                    failed[kind, name] += n_failed

            for ask in ways.values():
                seconds(ask, 100)
            states["before"] = held()
            for kind in args.attacks:
                n = args.senders if kind in MANY else args.floods
                for _ in range(args.rounds):
                    measure(kind, "quiet")
                    with attacked(system, kind, n):
                        measure(kind, "attacked")
                        states[kind] = held()
                    time.sleep(SETTLE_S)
                states[f"after {kind}"] = held()
                for name in ways:
                    quiet, hurt = (times[kind, name, when] for when in WHEN)
                    row = (f"{1000 * np.percentile(each, p):.1f}" for p in (50, 99) for each in (quiet, hurt))
                    of = f"{failed[kind, name]} of {len(quiet) + len(hurt)}"
                    told = "{:.2f} ({:.2f} to {:.2f})".format(*ratio(quiet, hurt))
                    table.add_row(f"{kind}, {n}", name, str(len(quiet)), *row, told, of)
                    print(f"{kind}, {name}: {told}, {of} failed", file=sys.stderr)
    console.print(table)
    console.print(f"{args.replicas} replicas; threads, descriptors and MB")
    for name in states["before"]:
        for when, state in states.items():
            threads, descriptors, megabytes = state.get(name, (0, 0, 0.0))
            console.print(f"{name}, {when}: {threads} {descriptors} {megabytes:.1f}")


if __name__ == "__main__":
    main()
