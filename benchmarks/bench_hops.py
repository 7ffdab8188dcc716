"""What an answer costs besides the models: every way through the system, with models that take no time.

    python benchmarks/bench_hops.py [--seconds 10] [--callers 32]

Each of gRPC and HTTP, `fused` and `split`, HAProxy and Serve's own proxy: the latency that one caller sees, the rate
that many reach, and the CPU time that each kind of process spends on a question then, the load generator's apart. At
first the same questions through the pipeline alone, in one process with real index servers and a real Redis. 1,000
passages of 384 dimensions in two shards. All questions are asked once before: then embeddings come from the cache.
Prints tables and one JSON line.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from openbook.cache.redis import open_embeddings
from openbook.client import Client
from openbook.config import EncoderSettings, GeneratorSettings, Settings, parse
from openbook.core.confidence import UNFITTED
from openbook.core.context import Context
from openbook.core.deadline import Check
from openbook.core.marginal import log_prior
from openbook.core.types import Float32, Generation, GenerationSettings, Passage, Retrieved, Token
from openbook.index.building.build import build_snapshot
from openbook.index.client.sharded import ShardedIndex
from openbook.loadtest.questions import embedded
from openbook.loadtest.result import Figures
from openbook.loadtest.run import run as ask
from openbook.loadtest.settings import LoadSettings
from openbook.processes import free_ports
from openbook.rag.pipeline import Pipeline
from openbook.serving.launch.local import local_tiers
from openbook.serving.workers.encoder import LocalEncoder
from openbook.serving.workers.generator import LocalGenerator

N, D = 1000, 384
WAYS = list(product(("haproxy", "python"), ("fused", "split"), ("gRPC", "HTTP")))
ROLES = {
    "ServeReplica:openbook:ingress": "ingress",
    "ServeReplica:openbook:encoder": "encoder",
    "ServeReplica:openbook:generator": "generator",
    "haproxy": "proxy",
    "ProxyActor": "proxy",
    "index serve": "index",
    "redis-server": "Redis",
    "raylet": "Ray",
    "gcs_server": "Ray",
    "ServeController": "Ray",
}
console = Console(width=132)


class NullEncoder:
    """A direction for each question, out of its length and first letters."""

    fingerprint = space = "null"
    dimension = D

    def padded_length(self, question: str) -> int:
        return 1

    def encode_questions(self, questions: Sequence[str], check: Check) -> Float32:
        vectors = np.zeros((len(questions), D), np.float32)
        for row, question in zip(vectors, questions, strict=True):
            row[len(question) % D] = 1.0
        return vectors


class NullGenerator:
    """Answers with the first words of the best passage."""

    fingerprint = generates_by = "null"
    calibration = UNFITTED

    def generate(
        self, questions: Sequence[str], retrieved: Sequence[Retrieved], settings: GenerationSettings, check: Check
    ) -> list[Generation]:
        return [self._answer(each) for each in retrieved]

    def stream(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, check: Check
    ) -> Iterator[Token | Generation]:
        yield self._answer(retrieved)

    def _answer(self, retrieved: Retrieved) -> Generation:
        prior = log_prior(retrieved.scores)
        return Generation(retrieved.passages[0].text[:20], (1,), -1.0, prior, prior)


def load_encoder(settings: EncoderSettings) -> NullEncoder:
    return NullEncoder()


def load_generator(settings: GeneratorSettings) -> NullGenerator:
    return NullGenerator()


def snapshot(folder: Path) -> Path:
    vectors = np.random.default_rng(0).standard_normal((N, D), np.float32)
    passages = [Passage(i, str(i), f"Title {i}", "words of a passage as long as they are " * 14) for i in range(N)]
    build_snapshot(passages, vectors, folder, 2, "Flat", "null", "null")
    return folder


async def pipeline_alone(settings: Settings, seconds: float, callers: int) -> tuple[float, float]:
    """Median seconds of one caller, questions a second of many, in this process."""
    index = ShardedIndex.of(settings.index)
    await index.connect()
    cache = open_embeddings(settings.cache)
    encoder = LocalEncoder(NullEncoder(), settings.encoder)
    generator = LocalGenerator(NullGenerator(), settings.generator)
    pipeline = Pipeline(encoder, index, index, generator, cache, settings.answer)
    questions, took = embedded(), []

    async def caller(until: float) -> None:
        while time.monotonic() < until:
            begun = time.monotonic()
            question = questions[len(took) % len(questions)]
            await pipeline.answer(question, settings.answer.retrieval(), settings.answer.generation(), Context())
            took.append(time.monotonic() - begun)

    for question in questions:
        await pipeline.answer(question, settings.answer.retrieval(), settings.answer.generation(), Context())
    await caller(time.monotonic() + seconds)
    p50_s = median(took)
    took.clear()
    await asyncio.gather(*(caller(time.monotonic() + seconds) for _ in range(callers)))
    await pipeline.aclose()
    await encoder.aclose()
    await generator.aclose()
    await index.close()
    await cache.aclose()
    return p50_s, len(took) / seconds


def cpu_by_role() -> Counter[str]:
    """CPU seconds so far of each kind of process."""
    spent: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        line = " ".join(process.cmdline())
        role = next((role for part, role in ROLES.items() if part in line), None)
        if role:
            times = process.cpu_times()
            spent[role] += times.user + times.system
    return spent


def through(way: tuple[str, str, str], address: str, seconds: float, callers: int) -> dict[str, Any]:
    common = {"address": address, "zipf": 0, "timeout_s": 30}

    def measured(n: int) -> Figures:
        result = ask(LoadSettings(closed=n, duration_s=seconds, warm_up_s=3, **common))
        assert [status.status for status in result.measured.statuses] == ["OK"], result.measured.statuses
        return result.measured

    one = measured(1)
    before, mine = cpu_by_role(), time.process_time()
    begun = time.monotonic()
    many = measured(callers)
    n = many.answered_rate * (time.monotonic() - begun)
    cpu = {role: 1000 * seconds / n for role, seconds in (cpu_by_role() - before).items()}
    assert one.latency
    assert many.latency
    return {
        "way": way,
        "p50_ms": 1000 * one.latency.p50_s,
        "p99_ms": 1000 * one.latency.p99_s,
        "rate": many.answered_rate,
        "many_p50_ms": 1000 * many.latency.p50_s,
        "cpu_ms": cpu,
        "client_cpu_ms": 1000 * (time.process_time() - mine) / n,
    }


def serve(proxy: str, topology: str, folder: Path, seconds: float, callers: int) -> None:
    """One kind of system, both protocols; prints a JSON line for each. One process can run one kind of proxy only."""
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    from openbook.serving.app import assemble
    from openbook.serving.launch import run

    first = free_ports(2)
    serving = {"proxy": proxy, "topology": topology, "http_port": first, "grpc_port": first + 1}
    with (
        local_tiers(folder, parse({"serving": serving})) as settings,
        run.local_serve(settings.serving, num_cpus=8, shows_logs=False),
    ):
        run.deploy(assemble(settings, load_encoder, load_generator), settings.serving)
        with Client(f"127.0.0.1:{first + 1}") as client, ThreadPoolExecutor(8) as pool:
            list(pool.map(client.retrieve, embedded()))  # the cache
        for protocol, address in (("gRPC", f"127.0.0.1:{first + 1}"), ("HTTP", f"http://127.0.0.1:{first}")):
            print(json.dumps(through((proxy, topology, protocol), address, seconds, callers)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--system", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.system:
        proxy, topology, folder = args.system
        serve(proxy, topology, Path(folder), args.seconds, args.callers)
        return
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = snapshot(Path(name) / "snapshot")
        with local_tiers(folder, Settings()) as settings:
            alone_s, alone_rate = asyncio.run(pipeline_alone(settings, args.seconds, args.callers))
        for proxy, topology in dict.fromkeys(way[:2] for way in WAYS):
            console.print(f"{proxy}, {topology} ...")
            command = [sys.executable, __file__, "--seconds", str(args.seconds), "--callers", str(args.callers)]
            done = subprocess.run(
                [*command, "--system", proxy, topology, str(folder)], check=True, stdout=subprocess.PIPE, text=True
            )
            found += [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"way"')]
    table = Table(title=f"Everything but the models: one caller, and {args.callers}; CPU in ms a question")
    roles = list(dict.fromkeys(ROLES.values()))
    for title in ("way", "p50 ms", "p99 ms", "a second", "p50 ms", "CPU", *roles):
        table.add_column(title, justify="right", no_wrap=title == "way")
    table.add_row("the pipeline alone", f"{1000 * alone_s:.2f}", "", f"{alone_rate:.0f}")
    for each in found:
        cpu = each["cpu_ms"]
        table.add_row(
            ", ".join(each["way"]),
            f"{each['p50_ms']:.2f}",
            f"{each['p99_ms']:.2f}",
            f"{each['rate']:.0f}",
            f"{each['many_p50_ms']:.1f}",
            f"{sum(cpu.values()):.2f}",
            *(f"{cpu[role]:.2f}" if role in cpu else "" for role in roles),
        )
    console.print(table)
    alone = {"p50_ms": 1000 * alone_s, "rate": alone_rate}
    print(json.dumps({"machine": platform.platform(), "alone": alone, "ways": found}))


if __name__ == "__main__":
    main()
