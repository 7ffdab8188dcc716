"""Two versions beside each other under load: index servers replaced one by one, to this version, back, and here again.

    python benchmarks/bench_upgrade.py SNAPSHOT --former 47eafe3

Two shards, two servers of each. Meanwhile a client of either version searches and fetches, one question after the
other, and holds every reply to its first one. The former version is that of a git revision, in this environment.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
N_SHARDS = N_SERVERS = 2
START_S, DEADLINE_S, BETWEEN_S = 60.0, 5.0, 2.0


async def ask(addresses: list[str], stop: Path) -> str:
    """Until the file is there. What became of all questions."""
    import numpy as np

    from openbook.core.context import Context
    from openbook.core.deadline import Deadline
    from openbook.core.types import RetrievalSettings
    from openbook.errors import OpenbookError
    from openbook.index.client.sharded import ShardedIndex

    tier = ShardedIndex(addresses, timeout_s=2.0)
    await tier.connect()
    query = np.random.default_rng(0).standard_normal((1, tier.dimension)).astype(np.float32)
    first, n, n_wrong, slowest, errors = None, 0, 0, 0.0, []
    while not stop.exists():  # noqa: ASYNC240 - nothing else runs in this loop
        begun = time.perf_counter()
        try:
            hits = await tier.search(query, RetrievalSettings(k=10), Context(Deadline.after(DEADLINE_S)))
            passages = await tier.fetch(hits.ids[0].tolist(), hits.snapshot_id, Context(Deadline.after(DEADLINE_S)))
            got = hits.ids.tobytes(), hits.scores.tobytes(), [passage.text for passage in passages]
            first = first or got
            n_wrong += got != first
        except OpenbookError as error:
            errors.append(f"{type(error).__name__}: {error}")
        n += 1
        slowest = max(slowest, time.perf_counter() - begun)
        await asyncio.sleep(0.005)
    await tier.close()
    return f"{n} questions, {len(errors)} failed, {n_wrong} wrong; the slowest took {slowest:.2f} s {errors[:3] or ''}"


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """The services of a revision."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "former"
        subprocess.run(["git", "worktree", "add", "--detach", "-f", at, revision], cwd=ROOT, check=True)
        try:
            yield at / "services"
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", at], cwd=ROOT, check=True)


def start(services: Path, *arguments: str, **how: object) -> "subprocess.Popen[str]":
    """This environment's Python with one version of openbook."""
    environment = {**os.environ, "PYTHONPATH": str(services), "OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
    return subprocess.Popen([sys.executable, *arguments], env=environment, text=True, **how)  # type: ignore[call-overload]


def serve(services: Path, snapshot: Path, shard: int, port: int) -> "subprocess.Popen[str]":
    """An index server that answers."""
    command = ["-m", "openbook.cli", "index", "serve", str(snapshot), "--shard", str(shard), "--port", str(port)]
    server = start(services, *command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    give_up, check = time.monotonic() + START_S, ("-m", "openbook.cli", "index", "check", f"127.0.0.1:{port}")
    while start(ROOT / "services", *check, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait():
        if time.monotonic() > give_up or server.poll() is not None:
            raise SystemExit(f"{services}: no index server of shard {shard} within {START_S:.0f} s")
    return server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("snapshot", type=Path, help="of two shards, which both versions read")
    parser.add_argument("--former", default="HEAD~1", help="a git revision")
    parser.add_argument("--ask", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ask:
        print(asyncio.run(ask(args.ask, args.snapshot)))
        return
    from openbook.processes import free_port

    snapshot, present = args.snapshot.resolve(), ROOT / "services"
    with checked_out(args.former) as former, tempfile.TemporaryDirectory() as folder:
        stop = Path(folder) / "stop"
        ports = {(shard, i): free_port() for shard, i in product(range(N_SHARDS), range(N_SERVERS))}
        servers = {(shard, i): serve(former, snapshot, shard, port) for (shard, i), port in ports.items()}
        addresses = [f"127.0.0.1:{port}" for port in ports.values()]
        names = {"the former version": former, "this version": present}
        clients = {
            name: start(
                each, __file__, str(stop), "--ask", *addresses, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            for name, each in names.items()
        }
        try:
            for services in (present, former, present):
                for (shard, i), port in ports.items():
                    servers[shard, i].terminate()
                    servers[shard, i].wait(START_S)
                    servers[shard, i] = serve(services, snapshot, shard, port)
                    time.sleep(BETWEEN_S)
            stop.touch()
            for name, client in clients.items():
                print(f"a client of {name}: {client.communicate(timeout=START_S)[0].strip()}")
        finally:
            for process in (*servers.values(), *clients.values()):
                process.kill()
                process.wait()


if __name__ == "__main__":
    main()
