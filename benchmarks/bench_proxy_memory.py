"""What HAProxy holds of memory while it is attacked, and afterwards: as Serve configures it and we mend it, no Ray.

    python benchmarks/bench_proxy_memory.py [--seconds 15] [--only NAME...]

Each attack comes from a process of its own, which is killed so many seconds after all have connected. A good caller
asks once in a while all along. Prints resident memory of HAProxy in MB: before, the most during, and once it no
longer changes after.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import psutil
from rich.console import Console
from rich.table import Table
from slow_sender import send_slowly

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
from behind import Behind, behind_haproxy

HEAD = "POST /Ingress/Ask HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n"
LARGE = 1_000_000
BUFFER = 16_000
"""A little less than HAProxy keeps before it passes a body on."""
N_CALLS = 100
"""Of one connection of gRPC: more it is not given at a time."""
POLL_S = 0.1
CALM_S = 5.0
SETTLE_S = 30.0

Attacker = Callable[[int, int], Awaitable[None]]
"""One connection's life, given the ports of HTTP and gRPC."""


def sends(n_bytes: int, n_begin: int) -> Attacker:
    """Says that so many bytes follow, sends the first of them, then one a second."""

    async def attacker(http: int, _: int) -> None:
        await send_slowly(http, HEAD.format(n_bytes).encode() + bytes(n_begin))

    return attacker


async def idles(http: int, _: int) -> None:
    """Connects, and says nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", http)
    try:
        await reader.read()
    finally:
        writer.close()


async def never_reads(http: int, _: int) -> None:
    """Asks for 1.5 MB again and again, and takes none of it."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", http))
        await loop.sock_sendall(connection, (HEAD.format(5).encode() + b"large") * 10)
        await asyncio.sleep(3600)


async def calls(_: int, port: int) -> None:
    """As many calls as a connection of gRPC may have, whose message never comes."""

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.sleep(3600)
        yield b""

    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        method = channel.stream_stream("/Ingress/Ask")
        under_way = [method(nothing()) for _ in range(N_CALLS)]
        await asyncio.gather(*(call.read() for call in under_way), return_exceptions=True)


ATTACKS: dict[str, tuple[str, int, Attacker]] = {
    "slow": ("1,000 senders of a byte a second", 1000, sends(100, 0)),
    "bodies": ("400 bodies of 1 MB, all but their end", 400, sends(LARGE, LARGE - 1000)),
    "idle": ("1,000 idle connections", 1000, idles),
    "unread": ("400 readers who take nothing", 400, never_reads),
    "calls": ("100 connections of gRPC, 100 calls each, no message", 100, calls),
    "most": ("4,000 senders of 16 KB each, all but their end", 4000, sends(20_000, BUFFER)),
}


def attack(name: str, http: int, grpc_port: int) -> None:
    """In a process of its own, until it is killed."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    _, n, attacker = ATTACKS[name]

    async def again_and_again() -> None:
        while True:
            with suppress(OSError, grpc.RpcError):
                await attacker(http, grpc_port)
            await asyncio.sleep(0.1)

    async def all_of_them() -> None:
        await asyncio.gather(*(again_and_again() for _ in range(n)))

    asyncio.run(all_of_them())


@contextmanager
def attacked(behind: Behind, name: str) -> Iterator[None]:
    process = multiprocessing.get_context("fork").Process(
        target=attack, args=(name, behind.http, behind.grpc), daemon=True
    )
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def megabytes(process: psutil.Process) -> float:
    return float(process.memory_info().rss) / 2**20


def settled(process: psutil.Process) -> tuple[float, float]:
    """Once it has not changed for a while, or as it is after half a minute; and the most until then."""
    last, since, give_up = megabytes(process), time.monotonic(), time.monotonic() + SETTLE_S
    most = last
    while time.monotonic() < min(since + CALM_S, give_up):
        time.sleep(POLL_S)
        if (now := megabytes(process)) != last:
            last, since, most = now, time.monotonic(), max(most, now)
    return last, most


def measure(behind: Behind, name: str, seconds: float, caller: httpx.Client) -> dict[str, float]:
    """Megabytes, descriptors and failures of the good caller."""
    process = psutil.Process(behind.pid)
    found = {"before": settled(process)[0], "most": 0.0, "descriptors": 0.0, "asked": 0.0, "failed": 0.0}
    with attacked(behind, name):
        give_up = time.monotonic() + SETTLE_S
        while process.num_fds() < ATTACKS[name][1] and time.monotonic() < give_up:
            time.sleep(POLL_S)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found["most"] = max(found["most"], megabytes(process))
            found["descriptors"] = max(found["descriptors"], process.num_fds())
            try:
                found["asked"] += 1
                caller.post("/Ingress/Ask", content=b"who").raise_for_status()
            except httpx.HTTPError:
                found["failed"] += 1
            time.sleep(POLL_S)
    found["after"], most = settled(process)  # those who leave all at once cost most of all
    return found | {"most": max(found["most"], most)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--only", nargs="*", default=list(ATTACKS), choices=list(ATTACKS))
    args = parser.parse_args()
    table = Table("attack", "descriptors", "before", "most", "after", "ratio", "asked", "failed")
    rows = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        behind_haproxy(Path(folder)) as behind,
        httpx.Client(base_url=f"http://127.0.0.1:{behind.http}", timeout=30) as caller,
    ):
        for _ in range(100):
            caller.post("/Ingress/Ask", content=b"who").raise_for_status()
        for name in args.only:
            row = rows[name] = measure(behind, name, args.seconds, caller)
            sizes = [f"{row[key]:.1f}" for key in ("before", "most", "after")]
            counts = [f"{row[key]:.0f}" for key in ("asked", "failed")]
            ratio = f"{row['after'] / row['before']:.2f}"
            table.add_row(ATTACKS[name][0], f"{row['descriptors']:.0f}", *sizes, ratio, *counts)
    Console(width=120).print(table)
    print(json.dumps({"benchmark": "proxy-memory", "rows": rows}))


if __name__ == "__main__":
    main()
