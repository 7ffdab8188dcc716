"""The endpoint under load, beside the bare generator on the same batches.

    python benchmarks/bench_serving.py SNAPSHOT [--config FILE] [--seconds 60] [--flood-seconds 60] [--out FOLDER]

Starts the whole system as `openbook up` does, and asks it over gRPC, in this order:

- saturated: 16 callers in a closed loop. Directly after it, while nobody asks the endpoint, as many processes as there
  are replicas, each with the generator alone, answer the same questions from the same passages in batches of the sizes
  that the endpoint computed. Both twice in turn, for the machine's speed changes within minutes.
- at 70 % of that rate, open loop, as Poisson's and evenly: p99 beside p50. See bench_waiting.py for the least there is.
- at 3 and 10 times that rate: goodput beside the peak, how soon refusals come.
- a flood of one caller: p90 and p99 of another, beside the same without the flood. It asks a quarter of that rate; of
  fewer than a hundred answers p99 is nearly the slowest: --flood-seconds has it ask for longer.

Prints tables and one JSON line. Everything is on this machine, the load generator too.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean
from typing import Any
from urllib.error import URLError

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from openbook import config
from openbook.client import Client
from openbook.config import GeneratorSettings, Settings
from openbook.core.types import Passage, Retrieved
from openbook.loadtest.kinds import Arrivals
from openbook.loadtest.questions import embedded
from openbook.loadtest.result import Figures
from openbook.loadtest.run import measure, run
from openbook.loadtest.settings import LoadSettings
from openbook.processes import free_ports, threads
from openbook.serving.app import ENVIRONMENT
from openbook.serving.launch.fitting import fitted
from openbook.serving.launch.local import local_system
from openbook.telemetry import N_METRICS_PORTS

CALLERS = 16
WARM_UP_S = 10.0
N_BARE = 48
SATURATED = ("saturated", "saturated, again")
console = Console(width=124)


@contextmanager
def system(snapshot: Path, path: Path | None) -> Iterator[Settings]:
    """The whole system on free ports."""
    settings = config.load(path)
    first = free_ports(2 + N_METRICS_PORTS)
    ports = {"http_port": first, "grpc_port": first + 1, "metrics_port": first + 2}
    settings = settings.model_copy(update={"serving": settings.serving.model_copy(update=ports)})
    with local_system(snapshot, settings, shows_logs=False) as complete:
        yield fitted(complete)


def metric(settings: Settings, pattern: str) -> Counter[str]:
    """Samples of the replicas' metrics whose name and labels match, of all replicas together."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    found: Counter[str] = Counter()
    first = settings.serving.metrics_port or 0
    for port in range(first, first + N_METRICS_PORTS):
        with suppress(URLError), opener.open(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            samples = (line.rsplit(" ", 1) for line in reply.read().decode().splitlines() if not line.startswith("#"))
            found.update({name: float(value) for name, value in samples if re.search(pattern, name)})  # type: ignore[arg-type]
    return found


def batches_computed(settings: Settings) -> dict[int, float]:
    """How many batches of which sizes the generator has computed; sizes between two steps count as the upper one."""
    found = metric(settings, r'batch_size_bucket\{.*model="generator"')
    steps = sorted((float(re.search(r'le="([^"]+)"', name).group(1)), n) for name, n in found.items())  # type: ignore[union-attr]
    below, sizes = 0.0, {}
    for size, n in steps:
        if n > below and np.isfinite(size):
            sizes[int(size)] = n - below
        below = n
    return sizes


def replica_memory() -> int:
    """Bytes that the ingress replicas hold for themselves."""
    ours = psutil.Process().children(recursive=True)
    found = [each for each in ours if "ServeReplica:openbook:ingress" in " ".join(each.cmdline())]
    return sum(p.memory_full_info().uss for p in found)


def processor_s() -> float:
    """Seconds of a core that all processes of the system have had."""
    ours = psutil.Process().children(recursive=True)
    return sum(sum(each.cpu_times()[:2]) for each in ours)


def load(settings: Settings, seconds: float, rate: float = 1.0, **options: Any) -> Figures:
    """One run over gRPC."""
    address = settings.serving.grpc_address
    result = run(LoadSettings(address=address, rate=rate, duration_s=seconds, warm_up_s=WARM_UP_S, zipf=0, **options))
    result.check()
    return result.measured


def bare(path: Path, sizes: dict[int, float], settings: Settings) -> float:
    """Questions a second of the generators alone, each in a process of its own, in batches of these sizes."""
    command = [
        sys.executable,
        __file__,
        str(path),
        "--bare",
        json.dumps(list(sizes.items())),
        settings.generator.model_dump_json(),
    ]
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(threads(settings.generator.n_threads))}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(settings.serving.n_replicas)
    ]
    return sum(float(each.communicate()[0].split()[-1]) for each in started)


def read_contexts(path: Path) -> list[tuple[str, Retrieved]]:
    """What `remember_contexts` wrote down."""
    stored = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        (each["question"], Retrieved(tuple(Passage(*p) for p in each["passages"]), np.float32(each["scores"]), ""))
        for each in stored
    ]


def run_bare(path: Path, sizes: Sequence[tuple[int, float]], settings: GeneratorSettings) -> float:
    """What `bare` starts."""
    from openbook.config import AnswerDefaults
    from openbook.models.generator import RagGenerator

    asked = read_contexts(path)
    generator, defaults = RagGenerator.load(settings), AnswerDefaults().generation()
    generator.generate(*zip(*asked[:4], strict=True), defaults)
    rng, n, total_s = random.Random(0), 0, 0.0
    ns, weights = zip(*sizes, strict=True)
    while n < max(N_BARE, 4 * max(ns)):
        (size,) = rng.choices(ns, weights)
        batch = [asked[(n + i) % len(asked)] for i in range(size)]
        begun = time.perf_counter()
        generator.generate(*zip(*batch, strict=True), defaults)
        total_s += time.perf_counter() - begun
        n += size
    return n / total_s


def remember_contexts(settings: Settings, path: Path) -> None:
    """Write down questions with what is found for them."""
    questions = embedded()
    random.Random(1).shuffle(questions)
    with Client(settings.serving.grpc_address) as client, path.open("w") as out:
        for question in questions[:N_BARE]:
            found = client.retrieve(question).evidence
            passages = [(e.passage.id, e.passage.document_id, e.passage.title, e.passage.text) for e in found]
            out.write(
                json.dumps({"question": question, "passages": passages, "scores": [e.score for e in found]}) + "\n"
            )


async def beside_a_flood(settings: Settings, seconds: float, rate: float, flood: float, seed: int = 1) -> Figures:
    """A good caller's figures while another one asks `flood` times a second."""
    address = settings.serving.grpc_address
    common = {
        "address": address,
        "duration_s": seconds,
        "warm_up_s": WARM_UP_S,
        "zipf": 0,
        "arrivals": Arrivals.POISSON,
    }
    good = measure(LoadSettings(rate=rate, caller="good", seed=seed, **common))
    if not flood:
        return (await good).measured
    flooding = measure(LoadSettings(rate=flood, caller="flood", seed=seed + 1, **common))
    found, _ = await asyncio.gather(good, flooding)
    return found.measured


def row(name: str, f: Figures, peak: float) -> tuple[str, ...]:
    latency, refusal = f.latency, f.refusal
    return (
        name,
        f"{f.offered_rate:.2f}",
        f"{f.goodput_rate:.2f}",
        f"{f.goodput_rate / peak:.2f}",
        str(latency.n) if latency else "",
        f"{latency.p50_s * 1000:.0f}" if latency else "",
        f"{latency.p90_s * 1000:.0f}" if latency else "",
        f"{latency.p99_s * 1000:.0f}" if latency else "",
        f"{latency.p99_s / latency.p50_s:.2f}" if latency else "",
        str(f.n_refused),
        f"{refusal.p50_s * 1000:.1f} / {refusal.p99_s * 1000:.1f}" if refusal else "",
        ", ".join(f"{s.status} {s.n}" for s in f.statuses),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--flood-seconds", type=float, help="as --seconds, if not given")
    parser.add_argument("--only", nargs="*", default=["saturated", "seventy", "overload", "flood"])
    parser.add_argument("--peak", type=float, help="questions a second, where `saturated` is left out")
    parser.add_argument("--out", type=Path, default=Path("var/bench_serving"))
    parser.add_argument("--bare", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare:
        print(run_bare(args.snapshot, json.loads(args.bare[0]), GeneratorSettings.model_validate_json(args.bare[1])))
        return
    if "saturated" not in args.only and not args.peak:
        parser.error("without `saturated` among --only, --peak must say how many questions a second are the peak")
    args.out.mkdir(parents=True, exist_ok=True)
    contexts = args.out / "contexts.jsonl"
    told: dict[str, Any] = {"machine": platform.processor() or platform.machine()}
    table = Table(title="the endpoint under load, rates in questions/s, times in ms")
    for title in (
        "",
        "offered",
        "goodput",
        "of peak",
        "answers",
        "p50",
        "p90",
        "p99",
        "p99/p50",
        "refused",
        "refusal p50/p99",
        "outcomes",
    ):
        table.add_column(title, overflow="fold")
    rows: dict[str, Figures] = {}
    with system(args.snapshot, args.config) as settings:
        remember_contexts(settings, contexts)
        if "saturated" in args.only:
            load(settings, 5, closed=CALLERS)
            for name in SATURATED:
                before = batches_computed(settings)
                rows[name] = load(settings, args.seconds, closed=CALLERS, timeout_s=60)
                after = batches_computed(settings)
                sizes = {n: count - before.get(n, 0) for n, count in after.items() if count > before.get(n, 0)}
                used, begun = processor_s(), time.perf_counter()
                alone = bare(contexts, sizes, settings)
                idle = (processor_s() - used) / (time.perf_counter() - begun)
                share = rows[name].answered_rate / alone
                told[name] = {"bare": alone, "batches": sizes, "idle_cores": idle, "share_of_bare": share}
                console.print(
                    f"{name}: {rows[name].answered_rate:.2f}/s; the bare generators on the same batches ({sizes}) "
                    f"{alone:.2f}/s, while the idle endpoint took {idle:.2f} of a core: {share:.3f} of them"
                )
        peak = args.peak or mean(rows[name].answered_rate for name in SATURATED)
        if "seventy" in args.only:
            for name, arrivals in (("70 %", Arrivals.POISSON), ("70 %, evenly", Arrivals.CONSTANT)):
                rows[name] = load(settings, 2 * args.seconds, 0.7 * peak, arrivals=arrivals)
        if "overload" in args.only:
            memory = replica_memory()
            for times in (3, 10):
                rows[f"{times} x peak"] = load(settings, args.seconds, times * peak, arrivals=Arrivals.POISSON)
            told |= {"replica_mb": [memory / 1e6, replica_memory() / 1e6]}
        if "flood" in args.only:
            lasts = args.flood_seconds or args.seconds
            for name, flood in (("good caller, quiet", 0.0), ("good caller, flood", 3 * peak)):
                rows[name] = asyncio.run(beside_a_flood(settings, lasts, 0.25 * peak, flood))
    for name, figures in rows.items():
        table.add_row(*row(name, figures, peak))
    console.print(table)
    print(json.dumps(told | {"peak": peak, "figures": {name: each.model_dump() for name, each in rows.items()}}))


if __name__ == "__main__":
    main()
