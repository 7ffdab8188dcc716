"""Faults under open load: real processes are killed, frozen, slowed and cut off while questions are asked.

    python benchmarks/bench_faults.py [--only NAME...] [--out FOLDER] [--again] [--page FILE]

The whole system as `openbook up` starts it, with models that need no time, is asked 20 times a second over gRPC and 10
times over HTTP, each with a deadline of 3 s, for 20 s. After 4 s something breaks; what the benchmark heals, it heals
after 9 s. Every answer is compared with the exact twin's, scores to the bit. Columns of the table:

- wrong: answers that differ from the twin's. hangs: no outcome a second after the deadline.
- failed: whatever was no answer, by protocol and status. "not ours": those whose status or message nobody here wrote.
- recovery: seconds until the last failed question was sent, from the fault, or from the healing if it was waited for;
  then at least 2 s without a failure. whole: seconds from the fault until all processes were there again.
- worst: the longest that an answer took, from the fault on.

Results are kept in FOLDER as JSON lines: a run that was interrupted goes on. A case that leaves the system broken costs
a new one. All on this machine, the load generator too. The page's table is written anew from all results.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from faults.cases import CASES, END_S, HEAL_AT_S, HURT_AT_S, Case, Scene
from faults.load import GRPC_RATE, HTTP_RATE, Callers, Moments, Twin, probe, verdict
from faults.system import N_PASSAGES, System, running
from rich.console import Console
from rich.table import Table

WHOLE_TIMEOUT_S = 25.0
"""After a case, until all of the system is there again."""
WARM_TIMEOUT_S = 60.0
BROKEN = 3
"""Exit code of a system that a case left broken."""
N_FEW, N_MANY = 50, 2000
BEGIN, END = "<!-- table -->", "<!-- end -->"
COLUMNS = ("case", "what breaks", "sent", "wrong", "hangs", "failed", "not ours", "recovery", "whole", "worst, ms")
console = Console(width=150)


def questions(case: Case, folder: Path) -> tuple[Path, list[str]]:
    """Few, or so many that hardly one is asked twice; of no other run."""
    n, nonce = (N_FEW if case.repeats else N_MANY), f"{time.time_ns():x}"
    asked = [f"where does word{i % N_PASSAGES} stand, {case.name} {nonce} {i}?" for i in range(n)]
    path = folder / "questions"
    path.write_text("\n".join(asked))
    return path, asked


def run_case(case: Case, system: System, callers: Callers, twin: Twin) -> dict[str, Any]:
    """One case under load; what `verdict` says, and whether the system is whole again."""
    path, asked = questions(case, system.folder)
    scene = Scene(system, callers, path, [])
    askings = [
        callers.ask(system.grpc, path, GRPC_RATE, END_S, caller="load", seed=1),
        callers.ask(system.http, path, HTTP_RATE, END_S, caller="load", seed=2),
    ]
    begun = askings[0].begun
    time.sleep(max(0.0, begun + HURT_AT_S - monotonic()))
    hurt, healed = monotonic(), None
    with case.fault(scene):
        if case.heals:
            time.sleep(max(0.0, begun + HEAL_AT_S - monotonic()))
            healed = monotonic()
    whole = None
    while whole is None and monotonic() < begun + END_S + WHOLE_TIMEOUT_S:
        time.sleep(0.25)
        whole = monotonic() if system.is_whole() else None
    expected = twin.digests(asked)
    found = verdict(askings, expected, Moments(hurt, healed, begun + END_S))
    found["whole_s"] = round(whole - hurt, 1) if whole else None
    found["serves_after"] = probe(system, callers, path)
    return {"case": case.name, "what": case.what, **found, "notes": scene.notes}


def inside(layout: str, names: Sequence[str], out: Path) -> int:
    """Cases of one layout, on one system, until one leaves it broken."""
    callers = Callers()
    with tempfile.TemporaryDirectory() as name, running(layout, Path(name)) as system:
        twin = Twin(system.snapshot)
        path, _ = questions(CASES[0], system.folder)
        give_up = monotonic() + WARM_TIMEOUT_S
        while not probe(system, callers, path):  # the first questions of a process are slow
            if monotonic() > give_up:
                raise RuntimeError(
                    f"the system is not fit to be hurt: it fails questions {WARM_TIMEOUT_S:.0f} s after its start"
                )
        for case in CASES:
            if case.name not in names:
                continue
            console.print(f"[bold]{case.name}[/]: {case.what}")
            row = run_case(case, system, callers, twin)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            console.print(
                "   ", ", ".join(f"{title} {cell}" for title, cell in zip(COLUMNS[2:], cells(row)[2:], strict=True))
            )
            for said in (*row["notes"], *(f"{name}: {text}" for name, text in row["examples"].items())):
                console.print("     ", said, style="dim", markup=False)
            if row["whole_s"] is None or not row["serves_after"]:
                return BROKEN
    return 0


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    recovery = {"never failed": "0", "no": "none"}.get(row["recovered"]) or f"{row['recovery_s']:.1f} s"
    recovery += " after healing" if row["recovered"] == "when healed" else ""
    failed = ", ".join(f"{n} {name}" for name, n in row["failed"].items()) or "0"
    whole = "never" if row["whole_s"] is None else f"{row['whole_s']:.1f} s"
    numbers = [str(row[name]) for name in ("sent", "wrong", "hangs")]
    return [
        row["case"],
        row["what"],
        *numbers,
        failed,
        str(row["foreign"]),
        recovery,
        whole,
        f"{1000 * row['worst_s']:.0f}",
    ]


def results(out: Path) -> dict[str, dict[str, Any]]:
    """The latest of each case."""
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    return {row["case"]: row for row in rows}


def write_page(page: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Put the table between its marks."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(cells, rows)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=[case.name for case in CASES])
    parser.add_argument("--out", type=Path, default=Path("var/bench_faults"))
    parser.add_argument("--again", action="store_true", help="the cases that have results, too")
    parser.add_argument("--page", type=Path, help="whose table is written anew")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    out = args.out / "results.jsonl"
    if args.inside:
        return inside(args.inside, args.only, out)
    done = () if args.again else results(out)
    left = [case for case in CASES if case.name in (args.only or {case.name}) and case.name not in done]
    while left:
        layout, n_before = left[0].layout, len(out.read_text().splitlines()) if out.exists() else 0
        names = [case.name for case in left if case.layout == layout]
        console.rule(f"{layout}, {len(left)} to go")
        command = [sys.executable, __file__, "--inside", layout, "--out", str(args.out), "--only", *names]
        code = subprocess.run(command, check=False).returncode
        new = [json.loads(line)["case"] for line in out.read_text().splitlines()[n_before:]] if out.exists() else []
        if code not in (0, BROKEN) and not new:
            return code
        left = [case for case in left if case.name not in new]
    found = results(out)
    rows = [found[case.name] for case in CASES if case.name in found]
    table = Table(*COLUMNS, title="faults under load")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    if args.page:
        write_page(args.page, rows)
    print(json.dumps({"benchmark": "faults", "machine": platform.processor() or platform.machine(), "rows": rows}))
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
