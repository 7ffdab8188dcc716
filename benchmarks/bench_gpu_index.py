"""Shards on a GPU beside the same shards on the CPU: what they find, how fast, in how much memory; and behind a server.

    PYTHONPATH=services python benchmarks/bench_gpu_index.py [--passages 200000] [--out var/gpu-index.md]

Clustered vectors of 768 numbers, `Flat` over four times as many as the others. CPU and GPU answer the same queries in
turn, the CPU with all cores; rates are medians of rounds. Scores must be the CPU's to the bit, what is found as good,
and what a GPU cannot hold refused with its name. Then one server on the GPU: it must answer as the shard does, publish
while it is asked, give back the memory of what it held, and outlive a GPU that is full. Writes one page of Markdown,
and prints one JSON line; ends with 1 if a check did not pass. `--tiny --device cpu` is all of it in seconds without a
GPU, to see that it runs.

Needs FAISS for GPUs (`openbook[gpu]`), not torch.
"""

import argparse
import asyncio
import ctypes
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))

import faiss
import numpy as np
from bench_index import build, clustered, serving

from openbook.config import IndexClientSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Float32, Hits, RetrievalSettings, SearchParameters
from openbook.errors import InvalidRequest, OpenbookError, StartupError
from openbook.index.client.client import IndexClient
from openbook.index.client.publish import held_by_servers, publish
from openbook.index.shard.shard import Shard

K, MAX_K = 10, 2048
SERVED = "IVF{n},SQ8"
GRAPH, HAS_GRAPHS = "HNSW32", hasattr(faiss, "GpuIndexCagra")
KINDS = {
    "Flat": 4.0,
    SERVED: 1.0,
    "IVF{n},Flat": 1.0,
    "IVF{n},PQ{codes}": 1.0,
    "PCA256,IVF{n},SQ8": 1.0,
    "IVF{m}_HNSW32,SQ8": 1.0,
    **({GRAPH: 0.5} if HAS_GRAPHS else {}),
}
"""What FAISS builds, over how many times as many passages. n and m are cells, few and many."""
REFUSED = ("PQ8x4fs", "IVF16,PQ8x4fs", "IVF16,RaBitQ")
"""What a GPU has nothing for; a graph too, but with cuVS."""
BATCHES = (1, 16, 64, 512)
LEFT = 64 << 20  # bytes of a full GPU
WIDE = 4096  # cells: more than a GPU searches


def smi(device: str, fields: str) -> str:
    """What `nvidia-smi` says of a GPU."""
    command = ["nvidia-smi", f"--id={device.removeprefix('cuda:')}", f"--query-gpu={fields}"]
    return subprocess.check_output([*command, "--format=csv,noheader,nounits"], text=True).strip()


def memory_mb(device: str) -> int:
    """In use on the GPU by all; 0 for a CPU."""
    return 0 if device == "cpu" else int(smi(device, "memory.used"))


class Checks:
    """What must hold."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, bool]] = []

    def __call__(self, what: str, holds: bool) -> None:
        self.lines.append((what, bool(holds)))
        print(f"  {'ok  ' if holds else 'FAIL'} {what}", flush=True)


def recall(found: Hits, exact: Hits) -> float:
    """The share of the exact ones that were found."""
    pairs = zip(found.ids, exact.ids, strict=True)
    return float(np.mean([len(set(a.tolist()) & set(b.tolist())) / len(b) for a, b in pairs]))


def same_scores(a: Hits, b: Hits) -> bool:
    """Whether those that both found have the same bits."""
    for ids, scores, others, other_scores in zip(a.ids, a.scores, b.ids, b.scores, strict=True):
        known = dict(zip(others.tolist(), other_scores.tolist(), strict=True))
        if any(known.get(i, s) != s for i, s in zip(ids.tolist(), scores.tolist(), strict=True)):
            return False
    return True


def rate(search: Callable[[Float32], object], queries: Float32, at_least_s: float) -> float:
    """Queries a second: so many at once, again and again."""
    search(queries)
    rounds = []
    begun = time.perf_counter()
    while len(rounds) < 3 or time.perf_counter() - begun < at_least_s:
        started = time.perf_counter()
        search(queries)
        rounds.append(time.perf_counter() - started)
    return len(queries) / statistics.median(rounds)


def beside(folder: Path, factory: str, device: str, check: Checks, seconds: float) -> list[str]:
    """One shard on both: a row of the table."""
    n_threads = os.cpu_count() or 1
    here = Shard(folder, 0, n_threads=n_threads, verify=False)
    before = memory_mb(device)
    begun = time.perf_counter()
    there = Shard(folder, 0, n_threads=n_threads, verify=False, device=device, max_k=MAX_K)
    opened_s = time.perf_counter() - begun
    there.self_test()
    used = memory_mb(device) - before
    queries = clustered(512, seed=2)
    exact = here.search_exactly(queries, K)
    ours, theirs = (shard.search(queries, K, Deadline.never()) for shard in (there, here))
    recalls = recall(theirs, exact), recall(ours, exact)
    check(
        f"{factory}: recall@10 on the GPU {recalls[1]:.4f}, on the CPU {recalls[0]:.4f}",
        recalls[1] >= recalls[0] - 0.005,
    )
    check(f"{factory}: the scores of what both found have the same bits", same_scores(ours, theirs))
    check(f"{factory}: and those of the exact search", same_scores(ours, exact))
    one_by_one = [there.search(query[None], K, Deadline.never()) for query in queries[:32]]
    alone = float(np.mean([np.array_equal(hit.ids[0], ours.ids[i]) for i, hit in enumerate(one_by_one)]))
    check(f"{factory}: {alone:.1%} of queries find alone what they find among others", alone >= 0.95)
    if "IVF" in factory:
        narrow, wide = (SearchParameters(nprobe=n) for n in (1, WIDE))
        found = [recall(s.search(queries, K, Deadline.never(), narrow), exact) for s in (here, there)]
        check(f"{factory}: with one cell {found[1]:.3f}, on the CPU {found[0]:.3f}", abs(found[0] - found[1]) < 0.01)
        all_cells = recall(there.search(queries, K, Deadline.never(), wide), exact)
        check(f"{factory}: with all cells, or {MAX_K} of them, {all_cells:.4f}", all_cells >= recalls[1] - 1e-9)
    if factory == "Flat":
        k = min(MAX_K, there.n_passages)
        many = there.search(queries[:4], k, Deadline.never())
        check(f"{factory}: k {k} finds as many", bool((many.ids >= 0).all()))
    if factory == GRAPH:
        hundred = here.search_exactly(queries, 100)
        for beam in (None, 1024):
            wide = SearchParameters(ef_search=beam)
            found = [recall(s.search(queries, 100, Deadline.never(), wide), hundred) for s in (here, there)]
            what = f"{factory}: recall@100, ef_search {beam or 'as built'}"
            check(f"{what}: {found[1]:.4f}, on the CPU {found[0]:.4f}", found[1] >= found[0] - 0.005)
    cells = [
        f"`{factory}`",
        f"{there.n_passages:,}",
        f"{opened_s:.1f}",
        f"{used:,}" if used else "",
        *(f"{r:.4f}" for r in recalls),
    ]
    for n in BATCHES:
        rates = [rate(lambda q, s=s: s.search(q, K, Deadline.never()), queries[:n], seconds) for s in (here, there)]
        cells.append(f"{rates[0]:,.0f} / {rates[1]:,.0f}")
    print("  " + ", ".join(cells), flush=True)
    return cells


def refused(folder: Path, factory: str, device: str, check: Checks) -> None:
    """Opened there, a kind that it does not have."""
    try:
        Shard(folder, 0, device=device, verify=False)
    except StartupError as error:
        check(f"{factory}: refused: {error}", str(error).startswith(f"device {device}: "))
    else:
        check(f"{factory}: refused", device == "cpu")


async def behind_a_server(folders: tuple[Path, Path], device: str, n: int, check: Checks) -> None:
    """A server on the GPU, asked while n times it is given the other snapshot."""
    shard = Shard(folders[0], 0, verify=False, device=device)
    queries = clustered(64, seed=3)
    wanted = shard.search(queries, K, Deadline.never())
    del shard
    before = memory_mb(device)
    settings = {"DEVICE": device, "RETAIN_S": "0.5"}
    with serving(folders[0], **{f"OPENBOOK_INDEX_SERVER__{key}": value for key, value in settings.items()}) as server:
        client = IndexClient(server.address)
        asked = RetrievalSettings(k=K)
        found, _ = await client.search(queries, asked, "", Context(), 60.0)
        check("a server finds what its shard finds", np.array_equal(found.ids, wanted.ids))
        check("with the same scores", np.array_equal(found.scores, wanted.scores))
        failures: list[Exception] = []
        done, n_asked, held = asyncio.Event(), 0, [memory_mb(device) - before]

        async def ask() -> None:
            nonlocal n_asked
            while not done.is_set():
                try:
                    await client.search(queries, asked, "", Context(), 60.0)
                    n_asked += 1
                except Exception as error:
                    failures.append(error)

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(ask())
            client_settings = IndexClientSettings(addresses=[server.address])
            for i in range(n):
                await publish(folders[(i + 1) % 2], client_settings)
                while len(await held_by_servers(client_settings)) > 1:  # noqa: ASYNC110 (what was current goes)
                    await asyncio.sleep(0.2)
                await asyncio.sleep(0.2)
                held.append(memory_mb(device) - before)
            done.set()
        check(
            f"{n} publications, {n_asked} batches of 64 asked meanwhile, {len(failures)} failed",
            n_asked and not failures,
        )
        check(f"MB of the GPU that the server held before and after each: {held}", max(held) <= held[0] + 64)
        try:
            await client.search(queries[:1], RetrievalSettings(k=2049), "", Context(), 60.0)
        except InvalidRequest as error:
            check(f"k 2049: {error}", True)
        else:
            check("k 2049 is refused", False)
        if device != "cpu":
            with full(device):
                try:
                    await publish(folders[1], client_settings)
                except OpenbookError as error:
                    check(f"while the GPU is full: {error}", True)
                else:
                    check("while the GPU is full a publication fails", False)
                after, _ = await client.search(queries, asked, "", Context(), 60.0)
                check("what was there answers on", np.array_equal(after.ids, wanted.ids))
            await publish(folders[1], client_settings)
            check("and when there is room again the publication succeeds", True)
        await client.close()


@contextmanager
def full(device: str) -> Iterator[None]:
    """While entered, another process has nearly all that is left of the GPU."""
    command = [sys.executable, __file__, "--fill", device]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    print(f"  filled: {process.stdout.readline().strip()}", flush=True)
    try:
        yield
    finally:
        process.communicate("")


def fill(device: str) -> None:
    """Take all but a little of the GPU's memory, until told to end."""
    loaded = Path("/proc/self/maps").read_text().splitlines()
    runtime = ctypes.CDLL(next(line.split()[-1] for line in loaded if "libcudart" in line))
    runtime.cudaSetDevice(int(device.removeprefix("cuda:")))
    free, total, memory = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p()
    runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
    code = runtime.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(free.value - LEFT))
    print(f"{free.value - LEFT} of {total.value} bytes, code {code}", flush=True)
    sys.stdin.read()


def main() -> int:
    """All of it; 0 if every check passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=200_000)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", nargs="+", default=list(KINDS), choices=KINDS, help="of these, and the server")
    parser.add_argument("--folder", type=Path, default=Path("var/bench-gpu-index"))
    parser.add_argument("--out", type=Path, default=Path("var/gpu-index.md"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--fill", metavar="DEVICE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fill:
        fill(args.fill)
        return 0
    n_passages, n_cells, seconds = (600, 16, 0.0) if args.tiny else (args.passages, 1024, 0.5)
    shutil.rmtree(args.folder, ignore_errors=True)
    check, rows = Checks(), []
    for kind, times in KINDS.items():
        if kind not in (*args.only, SERVED):
            continue
        factory, n = kind.format(n=n_cells, m=4 * n_cells, codes=8 if args.tiny else 96), int(n_passages * times)
        print(f"{factory} of {n:,}", flush=True)
        folder = build(args.folder / factory, factory, clustered(n, seed=1))
        try:
            rows.append(beside(folder, factory, args.device, check, seconds))
        except Exception as error:
            check(f"{factory}: {error}", False)
        if kind != SERVED:
            shutil.rmtree(folder)
    for factory in (*REFUSED, *([] if HAS_GRAPHS else [GRAPH])):
        refused(build(args.folder / factory, factory, clustered(600, seed=1)), factory, args.device, check)
    served = SERVED.format(n=n_cells)
    other = build(args.folder / "other", served, clustered(n_passages, seed=4))
    asyncio.run(behind_a_server((args.folder / served, other), args.device, 2 if args.tiny else 6, check))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page(rows, check, args.device))
    passed = all(holds for _, holds in check.lines)
    print(f"the page: {args.out}")
    print(json.dumps({"benchmark": "gpu-index", "passed": passed, "rows": rows, "checks": check.lines}))
    return not passed


def page(rows: list[list[str]], check: Checks, device: str) -> str:
    """Tables of what was measured and of what was checked."""
    machine = device if device == "cpu" else smi(device, "name,driver_version")
    versions = f"FAISS {faiss.__version__}, Python {sys.version.split()[0]}"
    head = ("index", "passages", "opened there in s", "MB of the GPU", "recall@10, CPU", "GPU")
    head += tuple(f"queries/s, {n} at once: CPU / GPU" for n in BATCHES)
    lines = [f"{machine}, {os.cpu_count()} cores, {versions}, {datetime.date.today()}", ""]
    lines += [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    lines += ["", *(f"- {'ok' if holds else '**FAIL**'}: {what}" for what, holds in check.lines)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
