"""Nodes of a Ray cluster lost one by one under open load: what callers notice, and how soon all is there again.

    python benchmarks/bench_nodes.py [--seconds 25] [--per-node 1] [--rate 20] [--page FILE]

A head, which has proxy and controller and no models, and three nodes. The system in `split` topology: two replicas of
the ingress, of the encoder and of the generator on the nodes; two servers of each of two shards, which belong to the
first two nodes and end with them. Models need no time. Questions come at a rate over gRPC, each with a deadline of 3 s.
After 5 s a node is killed with all that runs on it (SIGKILL); 10 s later another one joins in its place, and its index
servers are started again. Then the next one. Columns:

- on it: what was killed, of how many. in flight: questions sent and not answered at that moment.
- failed: those without an answer, by status; wrong: answers that are not the exact twin's.
- recovery: seconds until the last question that failed was sent. worst: the longest that an answer took from then on.
- whole: seconds until as many replicas and index servers run as before; the index servers wait for the new node.
"""

import argparse
import os
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import psutil
from faults import inject
from faults.load import Callers, Moments, Twin, probe, verdict
from faults.system import N_PASSAGES, System, node, processes, running

N_NODES = 3
SHARE = "-8"
ANSWERING = ("ingress", "encoder", "generator", "index")
KILL_AT_S, JOIN_AFTER_S = 5.0, 10.0
WHOLE_TIMEOUT_S = 90.0
COLUMNS = ("node", "on it", "sent", "in flight", "failed", "wrong", "recovery, s", "worst, ms", "whole, s")
BEGIN, END = "<!-- table -->", "<!-- end -->"


def hurry() -> None:
    """Give all that we start a larger share of a busy machine's cores than others have, where we may: else nodes of Ray
    give up before they are ready. By session, for that is how Linux shares them out.
    """
    while True:
        for each in psutil.Process().children(recursive=True):
            with suppress(OSError, psutil.Error):
                Path(f"/proc/{each.pid}/autogroup").write_text(SHARE)
        time.sleep(0.5)


def questions(folder: Path, name: str, n: int = 1500) -> tuple[Path, list[str]]:
    """New ones, so that encoder, index and generator are asked for each."""
    asked = [f"where does word{i % N_PASSAGES} stand, {name} {time.time_ns():x} {i}?" for i in range(n)]
    path = folder / "questions"
    path.write_text("\n".join(asked))
    return path, asked


def serving() -> Counter[str]:
    """How many processes of each kind that answers run."""
    return Counter(kind for kind in processes().values() if kind in ANSWERING)


def lose(system: System, number: int) -> tuple[Counter[str], float]:
    """Kill a node with all that runs on it; what that was, and when."""
    of_ray = system.nodes[number]
    family = [of_ray.pid, *(each.pid for each in psutil.Process(of_ray.pid).children(recursive=True))]
    all_kinds = processes()
    kinds = Counter(kind for pid in family if (kind := all_kinds.get(pid)) in ANSWERING)
    index = system.index[number::2] if number < 2 else []
    killed_at = monotonic()
    inject.kill(*family, *(each.process.pid for each in index))
    kinds["index"] = len(index)
    return +kinds, killed_at


def run(
    system: System, callers: Callers, twin: Twin, number: int, rate: float, seconds: float, stack: ExitStack
) -> dict[str, Any]:
    """One node lost and replaced under load."""
    path, asked = questions(system.folder, f"node {number}")
    asking = callers.ask(system.grpc, path, rate, seconds, caller="load", seed=1)
    time.sleep(max(0.0, asking.begun + KILL_AT_S - monotonic()))
    before = serving()
    lost, hurt = lose(system, number)
    time.sleep(max(0.0, hurt + JOIN_AFTER_S - monotonic()))
    system.nodes[number] = stack.enter_context(node())
    for each in system.index[number::2] if number < 2 else []:
        each.again()
        each.wait()
    whole = None
    while whole is None and monotonic() < hurt + WHOLE_TIMEOUT_S:
        time.sleep(0.25)
        whole = monotonic() if serving() >= before else None
    outcomes = asking.result.result().outcomes
    found = verdict([asking], twin.digests(asked), Moments(hurt, None, asking.begun + seconds))
    at = hurt - asking.begun
    in_flight = int(np.sum((outcomes.sent_s <= at) & (outcomes.done_s > at)))
    give_up = monotonic() + 60
    while not probe(system, callers, path) and monotonic() < give_up:
        pass
    return {
        **found,
        "node": number,
        "lost": lost,
        "before": before,
        "in_flight": in_flight,
        "whole_s": whole and whole - hurt,
    }


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    return (
        "ABC"[row["node"]],
        ", ".join(f"{n} of {row['before'][kind]} {kind}" for kind, n in sorted(row["lost"].items())) or "nothing",
        str(row["sent"]),
        str(row["in_flight"]),
        ", ".join(f"{n} {name.removeprefix('gRPC ')}" for name, n in row["failed"].items()) or "0",
        str(row["wrong"]),
        "none" if row["recovery_s"] is None else f"{row['recovery_s']:.1f}",
        f"{1000 * row['worst_s']:.0f}",
        f"{row['whole_s']:.1f}" if row["whole_s"] else "never",
    )


def main() -> None:
    """Every node in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=25.0, help="of load, for each node")
    parser.add_argument("--per-node", type=int, default=1, help="serving.max_replicas_per_node; 0: none is set")
    parser.add_argument("--rate", type=float, default=20.0, help="questions a second")
    parser.add_argument("--page", type=Path, help="whose table is written anew")
    args = parser.parse_args()
    callers, rows = Callers(), []
    threading.Thread(target=hurry, daemon=True).start()
    serving = {"max_replicas_per_node": args.per_node or None}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        system = stack.enter_context(running("apart", Path(name), N_NODES, serving=serving))
        twin = Twin(system.snapshot)
        path, _ = questions(system.folder, "warm")
        while not probe(system, callers, path):
            pass
        for number in range(N_NODES):
            rows.append(row := run(system, callers, twin, number, args.rate, args.seconds, stack))
            print(" | ".join(cells(row)), row["examples"], flush=True)
    table = "\n".join(f"| {' | '.join(each)} |" for each in (COLUMNS, ["---"] * len(COLUMNS), *map(cells, rows)))
    print(table)
    if args.page:
        before, _, rest = args.page.read_text(encoding="utf-8").partition(BEGIN)
        args.page.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
