"""What callers of the index tier see when calls stall, and when snapshots are published under them.

    python benchmarks/bench_routing.py [--calls 6000] [--callers 4] [--passages 20000] [--publications 20]

Real servers in processes of their own, two replicas of one shard. Both parts compare in turn, within one run: searches
with hedges and without while 2 % of calls stall by 200 ms; searches while snapshots are published and while none is.
Prints a table, and one JSON line.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np

from openbook.config import IndexClientSettings, IndexServerSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.hedges import HEDGE_BUDGET
from openbook.core.types import Passage, RetrievalSettings
from openbook.index.building.build import build_snapshot
from openbook.index.client.publish import held_by_servers, publish
from openbook.index.client.sharded import ShardedIndex
from openbook.index.disk.root import Root

STALLED, STALL_S = 0.02, 0.2
N_TURNS = 10


def serve(root: Path, seed: int, stalled: float) -> None:
    """One server of shard 0 in this process, which lets a share of its searches wait before they begin."""
    from openbook.index.server import server
    from openbook.index.server.service import IndexService

    random = np.random.default_rng(seed)

    class Stalling(IndexService):
        def _begin_search(self, *arguments: Any) -> None:
            if random.random() < stalled:
                threading.Timer(STALL_S, self._begin_late, arguments).start()
            else:
                super()._begin_search(*arguments)

        def _begin_late(self, *arguments: Any) -> None:
            super()._begin_search(*arguments)
            self._searches.go()

    server.IndexService = Stalling  # type: ignore[misc]
    server.run(IndexServerSettings(snapshot=root, retain_s=0))


@contextmanager
def servers(root: Path, stalled: float) -> Iterator[tuple[str, ...]]:
    """The addresses of two replicas."""
    command = [sys.executable, __file__, "--serve", str(root), "--stalled", str(stalled), "--seed"]
    processes = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for seed in range(2)
    ]
    try:
        yield tuple(process.stdout.readline().strip() for process in processes if process.stdout)
    finally:
        for process in processes:
            with process:
                process.kill()


async def ask(tier: ShardedIndex, queries: np.ndarray[Any, Any], n_calls: int, n_callers: int) -> list[float]:
    """How long each of so many searches took, in seconds."""
    latencies = []

    async def caller() -> None:
        while len(latencies) < n_calls:
            i = len(latencies) % len(queries)
            begun = monotonic()
            await tier.search(queries[i : i + 1], RetrievalSettings(k=10), Context(Deadline.after(10)))
            latencies.append(monotonic() - begun)

    await asyncio.gather(*(caller() for _ in range(n_callers)))
    return latencies


async def compare_hedging(addresses: tuple[str, ...], queries: Any, n_calls: int, n_callers: int) -> dict[str, Any]:
    tiers = {budget: ShardedIndex(addresses, 2.0, hedge_budget=budget) for budget in (0.0, HEDGE_BUDGET)}
    latencies: dict[float, list[float]] = {budget: [] for budget in tiers}
    for tier in tiers.values():
        await ask(tier, queries, 200, n_callers)
    routers = {budget: tier._connected().router for budget, tier in tiers.items()}
    before = {budget: (router.hedges.n_calls, router.hedges.n_hedges) for budget, router in routers.items()}
    for _ in range(N_TURNS):
        for budget, tier in tiers.items():
            latencies[budget] += await ask(tier, queries, n_calls // N_TURNS, n_callers)
    router, (n_before, hedges_before) = routers[HEDGE_BUDGET], before[HEDGE_BUDGET]
    for tier in tiers.values():
        await tier.close()
    plain, hedged = summary(latencies[0.0]), summary(latencies[HEDGE_BUDGET])
    return {
        "without": plain,
        "with": hedged,
        "p99 ratio": hedged["p99"] / plain["p99"],
        "extra calls": (router.hedges.n_hedges - hedges_before) / (router.hedges.n_calls - n_before),
    }


async def compare_publishing(
    addresses: tuple[str, ...], root: Path, queries: Any, n_publications: int, n_callers: int
) -> dict[str, Any]:
    tier = ShardedIndex(addresses, 2.0)
    settings = IndexClientSettings(addresses=addresses)
    quiet, busy, took = [], [], []
    await ask(tier, queries, 500, n_callers)
    for i in range(n_publications):
        begun = monotonic()
        publishing = asyncio.create_task(publish(root / ("new", "old")[i % 2], settings))
        while not publishing.done():
            busy += await ask(tier, queries, n_callers, n_callers)
        await publishing
        took.append(monotonic() - begun)
        while len(await held_by_servers(settings)) > len(addresses):  # what is held need not be read again
            await ask(tier, queries, 10 * n_callers, n_callers)
        until = monotonic() + took[-1]
        while monotonic() < until:
            quiet += await ask(tier, queries, n_callers, n_callers)
    await tier.close()
    calm, under = summary(quiet), summary(busy)
    ratio, publication_s = under["p99"] / calm["p99"], float(np.median(took))
    return {"without": calm, "with": under, "p99 ratio": ratio, "publication_s": publication_s}


def summary(latencies: Sequence[float]) -> dict[str, float]:
    """In milliseconds."""
    p50, p95, p99 = np.percentile(latencies, [50, 95, 99]) * 1000
    return {"n": len(latencies), "p50": float(p50), "p95": float(p95), "p99": float(p99)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=6000)
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--passages", type=int, default=20_000)
    parser.add_argument("--dimension", type=int, default=768)
    parser.add_argument("--publications", type=int, default=20)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--stalled", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.seed, args.stalled)
        return
    random = np.random.default_rng(0)
    vectors = random.standard_normal((args.passages, args.dimension), dtype=np.float32)
    queries = random.standard_normal((100, args.dimension), dtype=np.float32)
    passages = [Passage(i, f"doc-{i}", "title", f"text {i}") for i in range(args.passages)]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, sign, n in (("old", 1, args.passages), ("new", -1, args.passages), ("tiny", 1, 100)):
            build_snapshot(
                passages[:n], sign * vectors[:n], root / name, 1, "IVF64,Flat" if n > 5000 else "Flat", "bench", "bench"
            )
        Root.create(root, root / "old")
        with servers(root / "tiny", STALLED) as addresses:
            hedging = asyncio.run(compare_hedging(addresses, queries, args.calls, args.callers))
        with servers(root, 0.0) as addresses:
            publishing = asyncio.run(compare_publishing(addresses, root, queries, args.publications, args.callers))
    for title, result in (("2 % of calls stall by 200 ms, hedges", hedging), ("publications", publishing)):
        print(f"\n{title:42}{'n':>8}{'p50 ms':>9}{'p95 ms':>9}{'p99 ms':>9}")
        for name in ("without", "with"):
            row = result[name]
            print(f"  {name:40}{row['n']:8}{row['p50']:9.2f}{row['p95']:9.2f}{row['p99']:9.2f}")
        print("  " + ", ".join(f"{key} {value:.3f}" for key, value in result.items() if isinstance(value, float)))
    about = {
        "machine": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        **vars(args),
        "serve": None,
    }
    print(json.dumps({"bench": "routing", "hedging": hedging, "publishing": publishing, **about}))


if __name__ == "__main__":
    main()
