"""Everything that changes while an endpoint serves, one after the other, under a constant rate: no question may fail.

    python benchmarks/bench_change.py [--minutes 10] [--rate 1] [--out FOLDER]

`openbook up ROOT --config FILE`, the embedded models, two shards. Over the time given, evenly: a publication, its
roll-back, another generator, two replicas, one again, other defaults, Redis killed. Questions come over gRPC and HTTP
at half the rate each, with a deadline of 20 s. Prints a table of the seconds around each change, and one JSON line.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from openbook.client import Client
from openbook.corpus.build import embedded_documents
from openbook.corpus.read import lines
from openbook.loadtest.kinds import Arrivals
from openbook.loadtest.result import Result
from openbook.loadtest.run import measure
from openbook.loadtest.settings import LoadSettings
from openbook.models.embedded import reader_folder
from openbook.processes import end, free_ports, start

WARM_UP_S = 10.0
TIMEOUT_S = 20.0
N_DOCUMENTS = (150, 100)  # of the two snapshots
IN_FORCE_S = 180.0
console = Console(width=110)


def openbook(*arguments: object) -> None:
    """A command that must succeed."""
    subprocess.run([sys.executable, "-m", "openbook.cli", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def build(out: Path) -> Path:
    """A root with two snapshots, the first of which is served."""
    root = out / "root"
    if not (root / "published.json").exists():
        for number, n in enumerate(N_DOCUMENTS):
            documents = out / f"documents-{number}.jsonl"
            documents.write_text("\n".join(line for _, line in islice(lines(embedded_documents()), n)))
            openbook("build", documents, "--out", root / str(number), "--shards", 2, "--dtype", "bfloat16")
        openbook("index", "root", root, root / "0")
    return root


class Up:
    """`openbook up`, its log, and the file that it follows."""

    def __init__(self, root: Path, out: Path) -> None:
        self.root, self.config, self.log = root, out / "openbook.yaml", out / "up.log"
        first = free_ports(2)
        self.http, self.grpc = f"http://127.0.0.1:{first}", f"127.0.0.1:{first + 1}"
        self.serving = f"http_port: {first}, grpc_port: {first + 1}"
        self.write()
        command = [sys.executable, "-m", "openbook.cli", "up", str(root), "--config", str(self.config)]
        with self.log.open("w") as log:
            self.process = start(command, stdout=log, stderr=subprocess.STDOUT)
        self.await_log("ready:")
        self.index = re.findall(r"--index (\S+)", self.log.read_text())

    def write(self, serving: str = ", n_replicas: 1", more: str = "") -> None:
        new = self.config.with_suffix(".new")
        new.write_text(f"serving: {{{self.serving}{serving}}}\n{more}\n")
        os.replace(new, self.config)

    def await_log(self, text: str, n: int = 1) -> None:
        give_up = time.monotonic() + IN_FORCE_S
        while self.log.read_text().count(text) < n:
            if time.monotonic() > give_up or self.process.poll() is not None:
                raise RuntimeError(f"{text!r} did not come {n} times: {self.log.read_text()[-2000:]}")
            time.sleep(0.1)

    def change(self, serving: str = ", n_replicas: 1", more: str = "") -> None:
        n = self.log.read_text().count("in force")
        self.write(serving, more)
        self.await_log("in force", n + 1)

    def publish(self, snapshot: str) -> None:
        openbook("publish", self.root / snapshot, *(part for each in self.index for part in ("--index", each)))

    def kill_redis(self) -> None:
        children = psutil.Process(self.process.pid).children(recursive=True)
        (redis,) = (each for each in children if each.name() == "redis-server")
        redis.send_signal(signal.SIGKILL)


@contextmanager
def running(root: Path, out: Path) -> Iterator[Up]:
    up = Up(root, out)
    try:
        yield up
    finally:
        end(up.process)


def steps(up: Up) -> dict[str, Callable[[], None]]:
    reader = f"generator: {{model: {reader_folder()}}}"
    return {
        "publication": lambda: up.publish("1"),
        "roll-back": lambda: up.publish("0"),
        "another generator": lambda: up.change(more=reader),
        "two replicas": lambda: up.change(", n_replicas: 2", reader),
        "one replica": lambda: up.change(more=reader),
        "other defaults": lambda: up.change(more="answer: {k: 3}"),
        "Redis killed": up.kill_redis,
    }


async def both(up: Up, seconds: float, rate: float, on_begin: Callable[[float], None]) -> tuple[Result, Result]:
    common = {"rate": rate / 2, "duration_s": seconds, "warm_up_s": WARM_UP_S, "timeout_s": TIMEOUT_S}
    settings = [
        LoadSettings(address=address, arrivals=Arrivals.CONSTANT, seed=seed, **common)
        for seed, address in enumerate((up.grpc, up.http))
    ]
    over_grpc, over_http = await asyncio.gather(measure(settings[0], on_begin=on_begin), measure(settings[1]))
    return over_grpc, over_http


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("var/bench_change"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    root = build(args.out)
    seconds, done = 60 * args.minutes, []

    with running(root, args.out) as up:
        planned = steps(up)
        begun: list[float] = []

        def carry_out() -> None:
            for number, (name, step) in enumerate(planned.items()):
                due = begun[0] + WARM_UP_S + (number + 0.3) * seconds / len(planned)
                time.sleep(max(0.0, due - time.monotonic()))
                started = time.monotonic()
                step()
                done.append((name, started - begun[0], time.monotonic() - begun[0]))
                console.print(f"{name}: {done[-1][2] - done[-1][1]:.1f} s")

        def on_begin(moment: float) -> None:
            begun.append(moment)
            threading.Thread(target=carry_out, daemon=True).start()

        results = asyncio.run(both(up, seconds, args.rate, on_begin))
        with Client(up.grpc) as client:
            snapshot_at_the_end = client.answer("who invented the telephone?").snapshot_id
    for result in results:
        result.check()
    told = []
    table = Table(
        title=f"{args.rate:g} questions/s for {args.minutes:g} minutes: what became of them around each change"
    )
    for title in ("change", "took s", "asked", "answered", "others", "worst s"):
        table.add_column(title, justify="left" if title == "change" else "right")
    ends = [(name, begin, until + TIMEOUT_S) for name, begin, until in done]
    for name, begin, until in [*ends, ("all of it", 0.0, WARM_UP_S + seconds)]:
        around = [each for result in results for each in result.seconds if begin - 1 <= each.second <= until]
        counts = sum((Counter(each.counts) for each in around), Counter[str]())
        others = {status: n for status, n in counts.items() if status != "OK"}
        worst = max((each.max_s for each in around if each.max_s is not None), default=0.0)
        took = "" if name == "all of it" else f"{until - TIMEOUT_S - begin:.1f}"
        table.add_row(name, took, str(counts.total()), str(counts["OK"]), str(others or ""), f"{worst:.2f}")
        told.append({"change": name, "took_s": took, "counts": counts, "worst_s": worst})
    console.print(table)
    for result in results:
        for each in result.measured.statuses:
            if each.status != "OK":
                console.print(
                    f"{result.settings.address}: {each.n} {each.status} ({each.seen}), such as: {each.example}"
                )
    missing = [name for name in planned if name not in {each[0] for each in done}]
    print(json.dumps({"changes": told, "missing": missing, "snapshot": snapshot_at_the_end}))
    shutil.rmtree(args.out / "root", ignore_errors=True)


if __name__ == "__main__":
    main()
