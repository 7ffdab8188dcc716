"""What it saves to ask the replica that says it will be done first, and not the less busy one of two drawn by chance.

    python benchmarks/bench_choosing.py SNAPSHOT [--rounds 8] [--seconds 24] [--peak 8] [--only flood ...]

One system, as `openbook up` starts it, whose HAProxy is told to do the one and the other in turn. A round asks the same
questions at the same moments both ways; which way is first alternates, as the second finds the questions' embeddings in
the cache. At 70 % of the peak, as Poisson's and evenly, and for a caller of a quarter of it beside a flood of twice it.

Prints the means of the rounds' percentiles, and one JSON line.
"""

import argparse
import asyncio
import json
import os
import platform
from collections import defaultdict
from pathlib import Path
from statistics import mean

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import psutil
from bench_serving import beside_a_flood, load, system
from rich.console import Console
from rich.table import Table

from openbook.config import Settings
from openbook.loadtest.kinds import Arrivals
from openbook.loadtest.result import Figures
from openbook.serving.launch.tls import tell

PHASES = ("flood", "poisson", "evenly")
WAYS = ("drawn", "soonest")
PERCENTILES = ("p50_s", "mean_s", "p90_s", "p99_s")


def choose(way: str) -> None:
    """Tell HAProxy."""
    found = [each.cmdline() for each in psutil.Process().children(recursive=True) if each.name() == "haproxy"]
    (folder,) = {Path(words[words.index("-f") + 1]).parent for words in found}
    drawn = int(way == "drawn")
    said = tell(folder / "c", f"experimental-mode on; set var proc.drawn int({drawn}),bool; get var proc.drawn\n")
    if f"value=<{drawn}>" not in said:
        raise RuntimeError(f"HAProxy does not choose as it was told: {said}")


def asked(phase: str, settings: Settings, seconds: float, peak: float, seed: int) -> Figures:
    """Of one way in one round."""
    if phase == "flood":
        return asyncio.run(beside_a_flood(settings, seconds, 0.25 * peak, 2 * peak, seed))
    arrivals = Arrivals.POISSON if phase == "poisson" else Arrivals.CONSTANT
    return load(settings, seconds, 0.7 * peak, arrivals=arrivals, seed=seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--peak", type=float, default=8.0, help="questions a second")
    parser.add_argument("--only", nargs="*", default=PHASES, choices=PHASES)
    args = parser.parse_args()
    found: defaultdict[tuple[str, str], list[Figures]] = defaultdict(list)
    with system(args.snapshot, None) as settings:
        load(settings, 5)
        for phase in args.only:
            for number in range(args.rounds):
                for way in WAYS if number % 2 else reversed(WAYS):
                    choose(way)
                    found[phase, way].append(asked(phase, settings, args.seconds, args.peak, 2 * number + 1))
    table = Table("", "", "asked", "answered", "p50, ms", "mean", "p90", "p99", title="means over rounds")
    for (phase, way), rounds in sorted(found.items()):
        latencies = [each.latency for each in rounds if each.latency]
        figures = (f"{1000 * mean(getattr(each, name) for each in latencies):.0f}" for name in PERCENTILES)
        numbers = (sum(each.n for each in rounds), sum(each.n for each in latencies))
        table.add_row(phase, way, *map(str, numbers), *figures)
    Console(width=100).print(table)
    rows = {" ".join(key): [each.model_dump() for each in rounds] for key, rounds in found.items()}
    print(json.dumps({"bench": "choosing", "machine": platform.machine(), "peak": args.peak, "rounds": rows}))


if __name__ == "__main__":
    main()
