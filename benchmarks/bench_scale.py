"""A large snapshot of generated vectors: built, served by real index servers, and searched.

    python benchmarks/bench_scale.py [--vectors 5000000] [--factory IVF4096,SQ8] [--shards 1] [--folder var/bench-scale]
        [--exact-dtype float32] [--files] [--group /sys/fs/cgroup/scarce]

With `--files`, all is done as `openbook build --vectors` does it: passages in a table as DPR's, vectors as long as the
embedded encoder's in one float16 file, of which those that are compared are the encoder's own; both files stay.

The vectors are unit length: one of many centres (themselves random directions, of Zipf-like popularity) plus noise of
0.7 of its length. Real ones are harder. Without `--files` blocks of them are made when the build asks for them. Queries
are vectors nobody stored, made alike. A finished snapshot is used again. With `--group` the servers are in a control
group that is there, with less memory than the machine: begin with nothing of the snapshot in memory (drop_caches).
Prints a table, and one JSON line.
"""

import argparse
import asyncio
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from openbook.config import EncoderSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Float32, Passage, RetrievalSettings
from openbook.corpus.build import build_corpus
from openbook.corpus.vectors import SAMPLE
from openbook.index.building.build import build_snapshot
from openbook.index.client.sharded import ShardedIndex
from openbook.index.disk.snapshot import Manifest, Snapshot
from openbook.models.encoder import TextEncoder

DIMENSION, BLOCK, NOISE = 768, 8192, 0.7
LONGEST_S = 600.0  # of a call, where nothing that it reads is in memory yet
OPENBOOK = (sys.executable, "-m", "openbook.cli")


class Generated:
    """(N, d) float32 vectors that exist only while somebody looks at them: as `build_snapshot` reads them."""

    ndim, dtype = 2, np.dtype(np.float32)

    def __init__(self, n_vectors: int, seed: int = 0, dimension: int = DIMENSION) -> None:
        self.shape = (n_vectors, dimension)
        self._seed = seed
        centres = np.random.default_rng(0).standard_normal(
            (max(16, min(50_000, n_vectors // 50)), dimension), np.float32
        )
        self._centres = centres / np.linalg.norm(centres, axis=1, keepdims=True)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Float32:
        if isinstance(rows, slice):
            rows = np.arange(*rows.indices(len(self)))
        blocks = rows // BLOCK
        parts = [self._block(block)[rows[blocks == block] % BLOCK] for block in np.unique(blocks).tolist()]
        return np.concatenate(parts)

    def _block(self, block: int) -> Float32:
        rng = np.random.default_rng((self._seed, block))
        n = len(self._centres)
        which = (n ** rng.random(BLOCK)).astype(np.int64) - 1  # p(i) about 1 / i
        d = self.shape[1]
        noise = rng.standard_normal((BLOCK, d), np.float32) * np.float32(NOISE / d**0.5)
        vectors = self._centres[which] + noise
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors


class Texts(Sequence[Passage]):
    """A passage of some hundred characters for each id."""

    def __init__(self, n_passages: int) -> None:
        self._n = n_passages

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: Any) -> Any:
        return Passage(i, f"document-{i // 5}", f"Title {i // 5}", f"Passage {i} of a generated corpus. " * 8)


def main() -> None:
    """Build, serve, search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=int, default=5_000_000)
    parser.add_argument("--factory", default="IVF4096,SQ8")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--exact-dtype", default="float32")
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("var/bench-scale"))
    parser.add_argument("--group", type=Path)
    args = parser.parse_args()
    kind = f"{args.factory.replace(',', '-')}-{args.shards}-{args.exact_dtype}{'-files' * args.files}"
    out = args.folder / f"{args.vectors}-{kind}"
    found: dict[str, Any] = {} if out.exists() else {"build": build(out, args)}
    manifest = Snapshot.open(out).manifest
    found["files_bytes"] = {
        name: sum(file.size_bytes for shard in manifest.shards for file in shard.files if file.name == name)
        for name in {file.name for shard in manifest.shards for file in shard.files}
    }
    found["recall"] = manifest.recall.model_dump() if manifest.recall else None
    with servers(out, args.shards, args.group) as (addresses, processes, start_s):
        found["start_s"] = start_s
        pids = [process.pid for process in processes]
        found["searches"] = asyncio.run(searches(addresses, pids, manifest, args))
        found["private_mb"] = [private_mb(process.pid) for process in processes]
    _report(found, manifest, args)


def build(out: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds by stage, CPU seconds, and the most private memory seen."""
    out.parent.mkdir(parents=True, exist_ok=True)
    texts = Texts(args.vectors)
    if args.files:
        documents, vectors = given(out.parent, texts)
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    started, cpu = time.monotonic(), time.process_time()
    with Progress(console=Console(stderr=True)) as progress, most_private_memory() as peak_mb:
        tasks: dict[str, Any] = {}

        def on_progress(stage: str, done: int, total: int) -> None:
            now = time.monotonic()
            began.setdefault(stage, now)
            ended[stage] = now
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)

        plan: dict[str, Any] = {"n_shards": args.shards, "factory": args.factory, "exact_dtype": args.exact_dtype}
        plan["on_progress"] = on_progress
        if args.files:
            build_corpus(documents, out, EncoderSettings(), vectors=vectors, bm25=False, **plan)
        else:
            generated: Any = Generated(args.vectors)
            build_snapshot(texts, generated, out, encoder="generated", encoder_fingerprint="generated", **plan)
    finished = time.monotonic()
    return {
        "wall_s": {
            "read": began["write"] - started,
            "write": ended["write"] - began["write"],
            "train": began["index"] - ended["write"],
            "index": ended["index"] - began["index"],
            "digest_and_certify": finished - ended["index"],
            "all": finished - started,
        },
        "cpu_s": time.process_time() - cpu,
        "peak_private_mb": peak_mb[0],
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def given(folder: Path, texts: Texts) -> tuple[Path, Path]:
    """A table of passages and a file of their vectors, as somebody brings them. Made once."""
    documents, vectors = folder / f"{len(texts)}.tsv", folder / f"{len(texts)}.npy"
    if not vectors.exists():
        with documents.open("w") as file:
            file.write("id\ttext\ttitle\n")
            for i in track(range(len(texts)), "passages", console=Console(stderr=True)):
                passage = texts[i]
                file.write(f"{passage.id}\t{passage.text}\t{passage.title}\n")
        encoder = TextEncoder.load(EncoderSettings(), "passage")
        made = Generated(len(texts), dimension=encoder.dimension)
        partial = vectors.with_suffix(".partial")
        kept = np.lib.format.open_memmap(partial, "w+", np.float16, made.shape)
        for first in track(range(0, len(made), BLOCK), "vectors", console=Console(stderr=True)):
            kept[first : first + BLOCK] = made[first : min(first + BLOCK, len(made))]
        compared = np.unique(np.linspace(0, len(made) - 1, SAMPLE).astype(np.int64))
        kept[compared] = encoder.encode_passages([texts[i] for i in compared.tolist()])
        kept.flush()
        partial.rename(vectors)
    return documents, vectors


@contextmanager
def servers(
    snapshot: Path, n_shards: int, group: Path | None
) -> Iterator[tuple[list[str], list[subprocess.Popen[str]], float]]:
    """One index server per shard; the seconds until all of them listen."""
    started = time.monotonic()
    commands = [[*OPENBOOK, "index", "serve", str(snapshot), "--shard", str(shard)] for shard in range(n_shards)]
    if group:
        enter = f"echo $$ >{shlex.quote(str(group / 'cgroup.procs'))} && exec {{}}"
        commands = [["sh", "-c", enter.format(shlex.join(command))] for command in commands]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        with ThreadPoolExecutor(n_shards) as pool:
            addresses = list(pool.map(lambda process: process.stdout.readline().strip(), processes))
        if not all(addresses):
            sys.exit("an index server did not start; its log says why")
        yield addresses, processes, time.monotonic() - started
    finally:
        for process in processes:
            process.terminate()
            process.wait(60)


async def searches(
    addresses: list[str], pids: list[int], manifest: Manifest, args: argparse.Namespace
) -> list[dict[str, float]]:
    """Milliseconds per call of the real client, one at a time, for batches of 1, 16 and 64; what servers then read."""
    queries = Generated(manifest.n_passages, seed=1, dimension=manifest.dimension)[:BLOCK]
    index, found = ShardedIndex(addresses, timeout_s=LONGEST_S), []
    await index.connect()
    try:
        for batch in (1, 16, 64):
            taken, read = [], sum(map(read_mb, pids))
            for i in range(args.rounds + 5):
                start = (i * batch) % (BLOCK - batch)
                began = time.perf_counter()
                await index.search(
                    queries[start : start + batch], RetrievalSettings(k=10), Context(Deadline.after(LONGEST_S))
                )
                taken.append(1000 * (time.perf_counter() - began))
            p50, p99 = np.percentile(taken[5:], [50, 99])
            read = (sum(map(read_mb, pids)) - read) / len(taken)
            found.append({"batch": batch, "first_ms": taken[0], "p50_ms": p50, "p99_ms": p99, "read_mb": read})
            print(found[-1], file=sys.stderr, flush=True)
    finally:
        await index.close()
    return found


@contextmanager
def most_private_memory() -> Iterator[list[float]]:
    """The most that this process has had of it, in MB, looked at ten times a second."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            peak[0] = max(peak[0], private_mb(os.getpid()))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def private_mb(pid: int) -> float:
    """Memory that is not backed by a file (RssAnon)."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024


def read_mb(pid: int) -> float:
    """What a process has had read from disks."""
    lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes")) / 1e6


def _report(found: dict[str, Any], manifest: Manifest, args: argparse.Namespace) -> None:
    table = Table("what", "seen", title=f"{manifest.n_passages:,} vectors, {manifest.factory}, {args.shards} shards")
    for name, value in found.items():
        table.add_row(name, json.dumps(value, indent=1, default=float))
    Console().print(table)
    shown = {"benchmark": "scale", "settings": vars(args), **found, "machine": platform.machine()}
    print(json.dumps(shown, default=lambda value: str(value) if isinstance(value, Path) else float(value)))


if __name__ == "__main__":
    main()
