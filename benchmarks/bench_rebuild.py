"""A corpus of which 1 % has changed, built again from the former snapshot; and what a build killed at 99 % has left.

    python benchmarks/bench_rebuild.py [CORPUS] [--documents 0] [--share 0.01] [--dtype float32] [--once]

With the embedded encoder, over JSON lines, by default the corpus that ships with openbook, or its first documents:

- first: the corpus as it is
- again: with every hundredth document's words in reverse, so that all its passages are others, `--from` the first
- fresh: the same without `--from`, killed when 99 % of the passages are encoded
- rest: the fresh one, continued; its snapshot must have the bytes of `again`

With `--once`, for a corpus that takes an hour: the first build itself is killed at 99 % and continued, nothing is built
fresh and no bytes are compared. The first build's seconds are then those of both its parts.

All of them are `openbook build`, in a process of its own, from its start to its end; the one that is killed notes its
progress after every 32 passages, not 512, so that it has a 99 % (not with `--once`). CPU seconds are those of all
processes (of the killed one's they are not known): on a machine that does something else too, trust their ratios.
Prints a table, and one JSON line; ends with 1 if bytes differ.
"""

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench_kills import content
from rich.console import Console
from rich.table import Table

from openbook.cli import app
from openbook.corpus import build
from openbook.corpus.read import lines

BLOCK = 32
STOP_AT = 0.99


def openbook(arguments: Sequence[str]) -> None:
    """A process: `openbook build`; with STOP in the environment it ends before all is encoded."""
    encode = build._encoded_all

    def stopped(*args: object) -> object:
        *before, on_progress = args

        def watched(stage: str, done: int, total: int) -> None:
            on_progress(stage, done, total)  # type: ignore[operator]
            if done >= STOP_AT * total:
                os._exit(9)  # those that encode for it end with it

        return encode(*before, watched)  # type: ignore[arg-type]

    if "STOP" in os.environ:
        build._encoded_all = stopped  # type: ignore[assignment]
        build.ROWS_PER_STEP = int(os.environ["STOP"])
    app(["build", *arguments], standalone_mode=False)


def timed(documents: Path, out: Path, *options: str, block: int = 0) -> tuple[float, float]:
    """Seconds by the clock, and of CPU; with a block, killed at 99 % of blocks of so many passages."""
    command = [sys.executable, __file__, "--build", str(documents), "--out", str(out), "--shards", "2", *options]
    begun, before = time.perf_counter(), cpu_s()
    done = subprocess.run(command, env=os.environ | ({"STOP": str(block)} if block else {}), check=False)
    if done.returncode != (9 if block else 0):
        sys.exit(f"{out.name} ended with {done.returncode}")
    return time.perf_counter() - begun, cpu_s() - before


def cpu_s() -> float:
    """Of all processes that have ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def changed(documents: Sequence[str], share: float) -> Iterator[str]:
    """Some of them with their words in reverse."""
    every = round(1 / share)
    for i, line in enumerate(documents):
        document = json.loads(line)
        if i % every == every // 2:
            document["text"] = " ".join(reversed(document["text"].split()))
        yield json.dumps(document) + "\n"


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path, nargs="?", default=build.embedded_documents())
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.01)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--once", action="store_true")
    args = parser.parse_args()
    documents = [line for _, line in lines(args.corpus)][: args.documents or None]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before, after = folder / "before.jsonl", folder / "after.jsonl"
        before.write_text("".join(documents))
        after.write_text("".join(changed(documents, args.share)))
        options = ("--dtype", args.dtype)
        found = {}
        if args.once:
            stopped_s, _ = timed(before, folder / "first", *options, block=build.ROWS_PER_STEP)
            found["rest"] = timed(before, folder / "first", *options)
            found["first"] = stopped_s + found["rest"][0], math.nan
        else:
            found["first"] = timed(before, folder / "first", *options)
        found["again"] = timed(after, folder / "again", *options, "--from", str(folder / "first"))
        is_same = None
        if not args.once:
            timed(after, folder / "fresh", *options, block=BLOCK)
            found["rest"] = timed(after, folder / "fresh", *options)
            is_same = content(folder / "again") == content(folder / "fresh")
        n_passages = json.loads((folder / "first/manifest.json").read_text())["n_passages"]
    table = Table(f"{n_passages} passages", "seconds", "of the first", "CPU seconds", "of the first")
    for what, (seconds, cpu) in found.items():
        shares = (seconds / found["first"][0], cpu / found["first"][1])
        table.add_row(what, f"{seconds:.1f}", f"{shares[0]:.1%}", f"{cpu:.1f}", f"{shares[1]:.1%}")
    Console().print(table)
    if is_same is not None:
        print(f"the snapshots have {'the same bytes' if is_same else 'OTHER BYTES'}")
    print(
        json.dumps(
            {
                "benchmark": "rebuild",
                "settings": vars(args) | {"corpus": args.corpus.name},
                "seconds": found,
                "same": is_same,
            }
        )
    )
    sys.exit(is_same is False)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--build"]:
        openbook(sys.argv[2:])
    else:
        main()
