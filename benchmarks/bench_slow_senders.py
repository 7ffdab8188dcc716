"""What slow senders cost a caller of the endpoint who sends at once: models that need no time, real Serve and HAProxy.

    python benchmarks/bench_slow_senders.py [--senders 1000] [--calls 500] [--rounds 3] [--over grpc]

Each sender opens a connection, says that 100 bytes follow, sends one a second, and begins anew when it is refused.
Over gRPC there are 100 of them on each connection, with 100 calls of which nothing follows. The good caller asks over
HTTP, one question after the other, quiet and attacked in turn; so does another over gRPC. Last come threads,
descriptors and memory of the replica and of HAProxy: before the first attack, during each, and after the last.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path

import grpc
import httpx
import psutil
from rich.console import Console
from rich.table import Table
from slow_sender import send_slowly

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # before Ray is imported
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from small_system import QUESTION, System, serving_tier, write_snapshot

from openbook.cache.server import RedisServer
from openbook.client import Client

UNFINISHED = b"POST /v1/answer HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
ASK = "/openbook.v1.AnswerService/Answer"
CALLS_EACH = 100
SETTLE_S = 12.0  # longer than any body may take

State = dict[str, tuple[int, int, float]]
"""Threads, descriptors and MB of each process that callers meet."""


async def over_http(port: int) -> None:
    """One sender's connection."""
    await send_slowly(port, UNFINISHED)


async def over_grpc(port: int) -> None:
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


def attack(over: str, port: int, n: int, standing: Event) -> None:
    """In a process of its own, until it is killed."""
    connection: Callable[[int], Awaitable[None]] = {"http": over_http, "grpc": over_grpc}[over]

    async def sender() -> None:
        while True:
            with suppress(OSError):
                await connection(port)

    os.nice(19)  # it would be another machine's work

    async def all_of_them() -> None:
        tasks = [asyncio.create_task(sender()) for _ in range(n if over == "http" else n // CALLS_EACH)]
        await asyncio.sleep(2)
        standing.set()
        await asyncio.gather(*tasks)

    asyncio.run(all_of_them())


@contextmanager
def attacked(system: System, over: str, n: int) -> Iterator[None]:
    standing = multiprocessing.Event()
    port = int(getattr(system, over).rsplit(":", 1)[1])
    process = multiprocessing.get_context("fork").Process(target=attack, args=(over, port, n, standing), daemon=True)
    process.start()
    standing.wait()
    try:
        yield
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


def held() -> State:
    """As it is now."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            name = (process.cmdline() or [""])[0].removeprefix("ray::").split("/")[-1].strip()
            if name.startswith(("ServeReplica", "haproxy")):
                memory = process.memory_info().rss / 2**20
                found[name.split(":")[0]] = (process.num_threads(), process.num_fds(), memory)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--senders", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--over", default="http", choices=("http", "grpc"))
    args = parser.parse_args()
    during: list[State] = []
    times: dict[tuple[str, str], list[float]] = {}
    failed: dict[str, int] = dict.fromkeys(("quiet", "attacked"), 0)
    with tempfile.TemporaryDirectory() as folder, RedisServer() as redis:
        snapshot = write_snapshot(Path(folder) / "snapshot")
        with (
            serving_tier(snapshot, redis.url, {"proxy": "haproxy"}) as system,
            httpx.Client(base_url=system.http, timeout=30) as http,
            Client(system.grpc, timeout_s=30) as client,
        ):
            ways: dict[str, Callable[[], object]] = {
                "HTTP": lambda: http.post("/v1/answer", json={"question": QUESTION}).raise_for_status(),
                "gRPC": lambda: client.answer(QUESTION),
            }

            def measure(when: str) -> None:
                for name, ask in ways.items():
                    taken, n_failed = seconds(ask, args.calls)
                    times.setdefault((name, when), []).extend(taken)
                    failed[when] += n_failed

            for ask in ways.values():
                seconds(ask, 100)
            before = held()
            for _ in range(args.rounds):
                measure("quiet")
                with attacked(system, args.over, args.senders):
                    measure("attacked")
                    during.append(held())
                time.sleep(SETTLE_S)
            after = held()
    report(times, failed, [before, *during, after])


def report(times: dict[tuple[str, str], list[float]], failed: dict[str, int], states: list[State]) -> None:
    table = Table("", "p50 quiet, ms", "attacked", "p99 quiet, ms", "attacked", "ratio")
    for name in ("HTTP", "gRPC"):
        quiet, attacked = (statistics.quantiles(times[name, when], n=100) for when in ("quiet", "attacked"))
        row = [quiet[49], attacked[49], quiet[98], attacked[98]]
        table.add_row(name, *(f"{1000 * value:.1f}" for value in row), f"{attacked[98] / quiet[98]:.2f}")
    console = Console(width=100)
    console.print(table)
    console.print(f"failed: {failed['quiet']} quiet, {failed['attacked']} attacked")
    console.print("threads, descriptors and MB: before, in each attack, after")
    for name in states[0]:
        each = (f"{state[name][0]} {state[name][1]} {state[name][2]:.1f}" for state in states)
        console.print(f"{name}: {', '.join(each)}")


if __name__ == "__main__":
    main()
