"""Memory, threads and open files of every process while an endpoint is offered ten times what it can answer.

    python benchmarks/bench_soak.py [--minutes 30] [--times 10]

The whole system with models that sleep: a batch takes 0.1 s and 0.1 s a question, so the machine is free for all else,
and what is measured is the system's own. Half of the questions come over gRPC, half over HTTP, with a deadline of 5 s.
Prints a line a minute, and one JSON line.
"""

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from bench_hops import ROLES, NullGenerator, load_encoder, snapshot
from rich.console import Console

from openbook.config import GeneratorSettings, parse
from openbook.core.deadline import Check
from openbook.core.types import Generation, GenerationSettings, Retrieved
from openbook.loadtest.result import Result
from openbook.loadtest.run import measure
from openbook.loadtest.settings import LoadSettings
from openbook.processes import free_ports
from openbook.serving.launch.local import local_tiers

START_S, EACH_S, MAX_BATCH = 0.1, 0.1, 16
PEAK = MAX_BATCH / (START_S + MAX_BATCH * EACH_S)
WARM_UP_S = 10.0
console = Console()


class SleepingGenerator(NullGenerator):
    """Takes time, and no processor."""

    def generate(
        self, questions: Sequence[str], retrieved: Sequence[Retrieved], settings: GenerationSettings, check: Check
    ) -> list[Generation]:
        until = time.monotonic() + START_S + EACH_S * len(questions)
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.02))
            check()
        return super().generate(questions, retrieved, settings, check)


def load_sleeping(settings: GeneratorSettings) -> SleepingGenerator:
    return SleepingGenerator()


def held() -> dict[str, dict[str, float]]:
    """Of each kind of process: private megabytes, threads, open files."""
    total: dict[str, Counter[str]] = {}
    for process in psutil.Process().children(recursive=True):
        line = " ".join(process.cmdline())
        role = next((role for part, role in ROLES.items() if part in line), None)
        if role:
            found = {
                "mb": process.memory_full_info().uss / 1e6,
                "threads": process.num_threads(),
                "fds": process.num_fds(),
            }
            total.setdefault(role, Counter()).update(found)  # type: ignore[arg-type]
    return {role: {name: round(value, 1) for name, value in each.items()} for role, each in total.items()}


async def one_minute(addresses: Sequence[str], rate: float, minute: int) -> list[Result]:
    common = {"rate": rate / len(addresses), "duration_s": 60 - WARM_UP_S, "warm_up_s": WARM_UP_S, "timeout_s": 5}
    callers = [f"caller-{minute}-{n}" for n in range(len(addresses))]
    return await asyncio.gather(
        *(
            measure(LoadSettings(address=address, zipf=0, seed=minute, caller=caller, **common))
            for address, caller in zip(addresses, callers, strict=True)
        )
    )


async def soak(addresses: Sequence[str], minutes: int, rate: float) -> list[dict[str, Any]]:
    told = []
    for minute in range(minutes):
        results = await one_minute(addresses, rate, minute)
        statuses: Counter[str] = Counter()
        for result in results:
            statuses.update({each.status: each.n for each in result.measured.statuses})
        goodput = sum(result.measured.goodput_rate for result in results)
        told.append({"minute": minute + 1, "goodput": goodput, "statuses": statuses, "held": held()})
        memory = {role: each["mb"] for role, each in told[-1]["held"].items()}
        console.print(f"{minute + 1:3} min  {goodput:.2f}/s  {dict(statuses)}  MB {memory}")
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--times", type=float, default=10.0)
    args = parser.parse_args()

    import ray

    for module in (__name__, "bench_hops"):
        ray.cloudpickle.register_pickle_by_value(sys.modules[module])
    from openbook.serving.app import assemble
    from openbook.serving.launch import run

    first = free_ports(2)
    values = {
        "serving": {"http_port": first, "grpc_port": first + 1},
        "encoder": {"n_threads": 1},
        "generator": {"n_threads": 1, "max_batch": MAX_BATCH},
    }
    with (
        tempfile.TemporaryDirectory() as name,
        local_tiers(snapshot(Path(name) / "snapshot"), parse(values)) as settings,
        run.local_serve(settings.serving, num_cpus=8, shows_logs=False),
    ):
        run.deploy(assemble(settings, load_encoder, load_sleeping), settings.serving)
        addresses = (f"127.0.0.1:{first + 1}", f"http://127.0.0.1:{first}")
        begun = held()
        told = asyncio.run(soak(addresses, args.minutes, args.times * PEAK))
    console.print(f"peak by construction {PEAK:.2f}/s")
    print(json.dumps({"machine": platform.platform(), "peak": PEAK, "before": begun, "minutes": told}))


if __name__ == "__main__":
    main()
