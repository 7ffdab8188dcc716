"""Builds that are killed wherever they may be: does the same command go on to the same bytes, and what is done twice?

    python benchmarks/bench_kills.py [--kills 100] [--documents 20] [--seed 0]

A corpus of openbook's own documents is built again and again, with an encoder that hashes words. Each time a phase of
the build is drawn, a point in it (an access to a file of the build, or a report of progress), and up to 20 ms more;
then the driver is killed, or, where others are at work, the process that encodes beside it, or all at once, as by a
machine that stops. Then the same is built again, by one process, and must come to the files, byte by byte, of a build
that was left in peace; and at most one block for each process that encoded may be begun twice.

Prints a table of the phases, and one JSON line; ends with 1 if anything was not so.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
from rich.console import Console
from rich.progress import track

from openbook.config import EncoderSettings
from openbook.corpus import build as corpus_build
from openbook.corpus import encode
from openbook.corpus.read import lines
from openbook.index.building import build as index_build
from openbook.models.encoder import TextEncoder
from openbook.testing import HashEncoder

BLOCK = 16
"""Passages."""
DELAY_S = 0.02
WHOM = {"read": ("driver", "all"), "encode": ("driver", "worker", "all")}
"""Who can be killed in phases in which the driver is not alone."""
ENCODE_WEIGHT = 4
"""The phase that takes longest is drawn more often."""
NOBODY = "nobody"  # it has ended before
BEGUN = "begun"
"""File of the blocks that were begun, a line for each."""


class Encoder(HashEncoder):
    """As a build needs it."""

    dtype = "float32"
    embeds_passages_by = "hashes"


class Watched:
    """A build, in the process that does it: counts its points by phases, and says when one of them is reached."""

    def __init__(self, out: Path, kill_at: tuple[str, int], reached: "Connection | None") -> None:
        self._out, self._kill_at, self._reached = out.name, kill_at, reached
        self.phase = "read"
        self.n_points: Counter[str] = Counter()

    def point(self) -> None:
        self.n_points[self.phase] += 1
        if self._reached and (self.phase, self.n_points[self.phase]) == self._kill_at:
            self._reached.send(self.phase)

    def on_progress(self, stage: str, done: int, total: int) -> None:
        self.phase = stage
        self.point()

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        is_ours = any(isinstance(each, (str, os.PathLike)) and self._out in str(each) for each in arguments)
        if event == "mmap.__new__" or (is_ours and event.split(".")[0] in ("open", "os", "shutil")):
            self.point()

    def begins(self, module: Any, name: str, phase: str, then: str) -> Any:
        """A patch: this function is a phase."""
        original = getattr(module, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.phase = phase
            self.point()
            found = original(*args, **kwargs)
            self.phase = then
            return found

        return mock.patch.object(module, name, wrapped)


def build(
    folder: Path,
    out: Path,
    n_processes: int,
    kill_at: tuple[str, int] = ("", 0),
    reached: "Connection | None" = None,
) -> None:
    """All of it, in a process of its own. Leaves how many points each phase had."""
    watched = Watched(out, kill_at, reached)
    if reached:  # what it says when a process is lost is of no interest
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.addaudithook(watched.audit)
    with ExitStack() as stack:
        stack.enter_context(watched.begins(index_build.Index, "train", "train", "index"))
        stack.enter_context(watched.begins(index_build, "certify", "certify", "name"))
        stack.enter_context(watched.begins(corpus_build, "write_bm25", "words", "encode"))
        start = encode.start

        def started(command: Sequence[str], **options: Any) -> Any:
            if command[1:3] == ["-m", encode.__name__]:
                command = [sys.executable, __file__, "--work", str(out), *command[3:]]
            return start(command, **options)

        stack.enter_context(mock.patch.object(encode, "start", started))
        stack.enter_context(mock.patch.object(corpus_build, "ROWS_PER_STEP", BLOCK))
        stack.enter_context(mock.patch.object(encode, "ROWS_PER_PROCESS", 1))
        stack.enter_context(encodings(out))
        settings = EncoderSettings(n_threads=n_processes)
        corpus_build.build_corpus(
            folder / "corpus", out, settings, 2, "IVF8,SQ8", recall_target=0.9, on_progress=watched.on_progress
        )
    (folder / "points.json").write_text(json.dumps(watched.n_points))


@contextmanager
def encodings(out: Path) -> Iterator[None]:
    """With the encoder of hashes; a line for each block that is begun."""
    write = encode._write

    def noted(work: Path, step: range, model: TextEncoder) -> None:
        with out.with_name(f"{out.name}.{BEGUN}").open("a") as file:
            file.write(f"{step.start}\n")
        write(work, step, model)

    with mock.patch.object(TextEncoder, "load", return_value=Encoder()), mock.patch.object(encode, "_write", noted):
        yield


def work(out: str, *arguments: str) -> None:
    """A process that encodes."""
    with encodings(Path(out)):
        encode.main(*arguments)


@dataclass
class Kill:
    """What came of one."""

    phase: str
    whom: str  # who was killed
    twice: int  # blocks that were begun again
    seconds: float  # of the build that went on
    problems: list[str]


class Killer:
    """A folder with a corpus and a build that was left in peace.

    Args:
        folder: empty.
        n_documents: of the corpus that ships with openbook, in four files.
    """

    def __init__(self, folder: Path, n_documents: int) -> None:
        self._folder = folder
        self._processes = multiprocessing.get_context("forkserver")  # new ones have all modules at once
        self._processes.set_forkserver_preload(["openbook.corpus.build", "openbook.index.shard.rescoring", "bm25s"])
        documents = [line for _, line in islice(lines(corpus_build.embedded_documents()), n_documents)]
        (folder / "corpus").mkdir()
        for i in range(4):
            (folder / f"corpus/{i}.jsonl").write_text("".join(documents[i::4]))
        self.n_points: dict[int, dict[str, int]] = {}  # by how many processes encode, by phase
        self.seconds = self._in_peace(1)
        self._wanted = content(folder / "quiet-1")
        self.n_blocks = len(self._begun("quiet-1"))

    def _in_peace(self, n_processes: int) -> float:
        seconds = self._finished(self._folder / f"quiet-{n_processes}", n_processes)
        self.n_points[n_processes] = json.loads((self._folder / "points.json").read_text())
        return seconds

    def kill(self, seed: int) -> Kill:
        """Kill a build, and go on with it."""
        rng = random.Random(seed)
        phase = rng.choice([*sorted(self.n_points[1]), *["encode"] * (ENCODE_WEIGHT - 1)])
        whom = rng.choice(WHOM.get(phase, ("driver",)))
        n_processes = 2 if phase == "encode" and whom != "driver" else 1  # that encode; if it is one, the driver
        if n_processes not in self.n_points:
            self._in_peace(n_processes)
            if differing(content(self._folder / f"quiet-{n_processes}"), self._wanted):
                raise SystemExit("other bytes with another number of processes")
        kill_at, delay_s = rng.randint(1, self.n_points[n_processes][phase]), rng.uniform(0, DELAY_S)
        out = self._folder / f"killed-{seed}"
        reached, tells = self._processes.Pipe(duplex=False)
        process = self._start(out, n_processes, (phase, kill_at), tells)
        wait([reached, process.sentinel])
        time.sleep(delay_s)
        whom = end(process.pid, whom)
        process.join()
        seconds = 0.0
        if (out / "manifest.json").exists():
            self._start(out, 1).join()  # is refused, for the snapshot stands, and clears away what was left beside it
        else:
            seconds = self._finished(out)
        problems = [f"{name} differs" for name in differing(content(out), self._wanted)]
        left = [*self._folder.glob(f"{out.name}.work"), *self._folder.glob(f".{out.name}.*")]
        problems += [f"{each.name} was left behind" for each in left]
        again = Counter(self._begun(out.name))
        twice = sum(n - 1 for n in again.values())
        if twice > n_processes or len(again) != self.n_blocks:
            problems.append(f"{twice} blocks begun twice, {len(again)} of {self.n_blocks} at all")
        return Kill(phase, whom, twice, seconds, [f"seed {seed}, {phase} {kill_at}: {each}" for each in problems])

    def _start(self, out: Path, n_processes: int, *kill_at: Any) -> Any:
        process = self._processes.Process(target=build, args=(self._folder, out, n_processes, *kill_at))
        process.start()
        return process

    def _finished(self, out: Path, n_processes: int = 1) -> float:
        begun = time.perf_counter()
        process = self._start(out, n_processes)
        process.join()
        if process.exitcode:
            raise SystemExit(f"{out}: the build ended with {process.exitcode}")
        return time.perf_counter() - begun

    def _begun(self, name: str) -> list[str]:
        path = self._folder / f"{name}.{BEGUN}"
        return path.read_text().split() if path.exists() else []


def end(driver: int, whom: str) -> str:
    """Kill one of a build's processes, or all; says which."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(driver)
        others = process.children(recursive=True)
        workers = [each for each in others if "--work" in each.cmdline()]
        if whom == "worker" and workers:
            workers[0].kill()
            return "worker"
        for each in (process, *(others if whom == "all" else ())):
            with suppress(psutil.NoSuchProcess):
                each.kill()
        return "all" if whom == "all" and others else "driver"
    return NOBODY


def content(snapshot: Path) -> dict[str, Any]:
    """All of its files; not when it was made."""
    files = {str(path.relative_to(snapshot)): path for path in snapshot.rglob("*") if path.is_file()}
    if path := files.pop("manifest.json", None):
        manifest = json.loads(path.read_text())
        del manifest["created_at"]
        return {name: path.read_bytes() for name, path in files.items()} | {"manifest": manifest}
    return {}


def differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Names of files."""
    return sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))


def table(kills: Sequence[Kill]) -> str:
    """A row for each phase, in Markdown."""
    rows = ["| killed in | driver | a worker | all | other bytes | begun twice, most | seconds to the end, most |"]
    rows.append("|---" * 7 + "|")
    for phase in dict.fromkeys(kill.phase for kill in kills):
        of = [kill for kill in kills if kill.phase == phase]
        by = Counter(kill.whom for kill in of)
        wrong = sum(bool(kill.problems) for kill in of)
        most = max(kill.twice for kill in of), max(kill.seconds for kill in of)
        counts = " | ".join(str(by[whom]) for whom in ("driver", "worker", "all"))
        rows.append(f"| {phase} | {counts} | {wrong} | {most[0]} | {most[1]:.1f} |")
    return "\n".join(rows)


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("kills", 100), ("documents", 20), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        killer = Killer(Path(name), args.documents)
        console = Console(stderr=True)
        kills = [killer.kill(args.seed + i) for i in track(range(args.kills), "kills", console=console)]
    print(table(kills))
    print(f"left in peace: {killer.seconds:.1f} s, {killer.n_blocks} blocks; points: {killer.n_points[1]}")
    problems = [each for kill in kills for each in kill.problems]
    n_killed = sum(kill.whom != NOBODY for kill in kills)
    print(json.dumps({"benchmark": "kills", "settings": vars(args), "n_killed": n_killed, "problems": problems}))
    sys.exit(bool(problems))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()
