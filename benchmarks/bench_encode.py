"""Passages encoded by `openbook build`, beside the bare forward passes and beside sentence-transformers; its memory.

    python benchmarks/bench_encode.py [--n 512] [--rounds 3] [--processes 0] [--sizes 10000 100000 1000000]

The embedded encoder over passages of the embedded corpus, in turn, in every round. One process for each core with one
thread, n passages each, all at once:

- ours: what a worker of a build does with its blocks: passages read, tokenised, packed, embedded, written
- bare: the model's forward passes alone, over the same passages tokenised before, sorted by length, padded to the
  longest of each batch and no further, as many tokens at once as ours
- ours and bare again in the dtype that `--dtype auto` takes, if it is another
- tuned: sentence-transformers' `encode` as its documentation tunes it: a process for each core, in that dtype, with the
  best batch size of a few; it sorts by length itself

and `SentenceTransformer(...).encode(texts)` as users call it, in one process with a thread for each core.

Rates are passages per second of all processes together, by the wall clock; shares are medians over the rounds. Parsing
is measured by itself, in passages per second. Memory is that of a whole build with an encoder that does nothing, in a
process of its own for each size: the greatest private memory (RssAnon) of the process that builds, mapped files apart,
without the index of words, which bm25s holds in memory, 1 KB a passage.

Nothing else should run meanwhile. Prints tables, and one JSON line.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from openbook.config import EncoderSettings
from openbook.core.types import Float32, Passage
from openbook.corpus import build, encode
from openbook.corpus.read import read_passages
from openbook.index.disk.store import PassageReader, write_passages
from openbook.models.embedded import encoder_folder
from openbook.models.encoder import TextEncoder, embed, passage_ids
from openbook.models.formats import pad
from openbook.models.packing import BATCH_TOKENS
from openbook.processes import end, start, threads

NATIVE = "bfloat16" if torch.cpu.get_capabilities().get("avx512_bf16") else "float32"
DTYPES = list(dict.fromkeys(("float32", NATIVE)))
BATCHES = (8, 32, 128)
NULL_DIMENSION = 8
FLAT = 0.1


def texts(passages: Sequence[Passage]) -> list[str]:
    """As our encoder reads them."""
    return [f"{passage.title}. {passage.text}" for passage in passages]


def block_of(n: int) -> int:
    """Passages of one block of work, where a process gets n."""
    return min(n, build.ROWS_PER_STEP)


class Worker:
    """One process, which holds a share of the passages and all that is measured."""

    def __init__(self, folder: Path, number: int, n: int, n_processes: int) -> None:
        self.folder = folder
        block = block_of(n)  # in turn, as a build hands them out
        blocks = range(number * block, n * n_processes, n_processes * block)
        self.steps = [range(i, min(i + block, n * n_processes)) for i in blocks]
        rows = np.load(folder / encode.ROWS)
        reader = PassageReader(folder)
        self.passages = [reader[i] for step in self.steps for i in rows[step.start : step.stop].tolist()]
        self.all = [reader[i] for i in rows.tolist()]
        self.is_first = number == 0
        self.n_processes = n_processes
        self.encoders = {
            dtype: TextEncoder.load(EncoderSettings(dtype=dtype, n_threads=1), "passage") for dtype in DTYPES
        }
        for encoder in self.encoders.values():
            encoder._packing.alone_first = 0  # all shapes are tried by the first run

    def runs(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Everything by name, ready to be measured."""
        for dtype, encoder in self.encoders.items():
            yield f"ours, {dtype}", lambda encoder=encoder: self.ours(encoder)
            yield f"bare, {dtype}", self.bare(encoder)
        yield f"sentence-transformers tuned, {NATIVE}", self.tuned()
        yield "sentence-transformers, float32", self.as_users_call_it()

    def ours(self, encoder: TextEncoder) -> None:
        """As a worker of a build."""
        for step in self.steps:
            encode._write(self.folder, step, encoder)

    def bare(self, encoder: TextEncoder) -> Callable[[], None]:
        """Perfectly packed."""
        ids = sorted(passage_ids(encoder._tokenizer, encoder.pooling, self.passages), key=len)
        batches, first = [], 0
        while first < len(ids):
            n = max(1, BATCH_TOKENS // len(ids[min(first + 8, len(ids) - 1)]))
            batches.append(pad(ids[first : first + n], encoder._tokenizer.pad_token_id))
            first += n

        @torch.inference_mode()
        def run() -> None:
            for ids, mask in batches:
                embed(encoder._model, encoder.pooling, ids, mask)

        return run

    def tuned(self) -> Callable[[], None]:
        """The batch size is chosen now, from some passages."""
        model = sentence_transformer(NATIVE)
        mine = texts(self.passages)
        seconds = {}
        for n in BATCHES:
            model.encode(mine[:n], batch_size=n)
            begun = time.perf_counter()
            model.encode(mine[:128], batch_size=n)
            seconds[n] = time.perf_counter() - begun
        best = min(seconds, key=seconds.__getitem__)
        return lambda: model.encode(mine, batch_size=best)

    def as_users_call_it(self) -> Callable[[], None]:
        """By one of the processes alone, for all."""
        if not self.is_first:
            return lambda: None
        model, everything = sentence_transformer("float32"), texts(self.all)

        def run() -> None:
            torch.set_num_threads(self.n_processes)
            model.encode(everything)
            torch.set_num_threads(1)

        return run


def sentence_transformer(dtype: str) -> Any:
    """The same model."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(encoder_folder()), device="cpu", model_kwargs={"dtype": dtype})


def work(folder: str, number: str, n: str, n_processes: str) -> None:
    """A process: names on standard output what it can do, then does what standard input asks for, and says so."""
    torch.set_num_threads(1)
    worker = Worker(Path(folder), int(number), int(n), int(n_processes))
    runs = dict(worker.runs())
    for name, run in runs.items():
        if name.startswith("ours"):
            run()
    print(json.dumps(list(runs)), flush=True)
    for line in sys.stdin:
        runs[line.strip()]()
        print("done", flush=True)


def speed(n: int, rounds: int, n_processes: int) -> dict[str, list[float]]:
    """Passages per second of everything, round by round."""
    total = n * n_processes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        available = list(read_passages(build.embedded_documents()))
        chosen = np.linspace(0, len(available) - 1, total).astype(int).tolist()
        write_passages(folder, (Passage(i, "", available[at].title, available[at].text) for i, at in enumerate(chosen)))
        encode.plan_rows(folder, np.zeros(total, np.bool_), block_of(n))
        dimension = TextEncoder.load(EncoderSettings(n_threads=1), "passage").dimension
        np.lib.format.open_memmap(folder / encode.VECTORS, "w+", np.float32, (total, dimension)).flush()
        command = [sys.executable, __file__, "--work", name]
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        workers = [start([*command, str(i), str(n), str(n_processes)], **options) for i in range(n_processes)]
        try:
            ready = [worker.stdout.readline() for worker in workers]
            if not all(ready):
                sys.exit("a process ended before it was ready")
            names = json.loads(ready[0])
            found: dict[str, list[float]] = {each: [] for each in names}
            for _ in track(range(rounds), "rounds", console=Console(stderr=True)):
                for each in names:
                    begun = time.perf_counter()
                    for worker in workers:
                        worker.stdin.write(f"{each}\n".encode())
                    if not all(worker.stdout.readline() for worker in workers):
                        sys.exit(f"{each}: a process ended")
                    found[each].append(total / (time.perf_counter() - begun))
        finally:
            for worker in workers:
                end(worker)
    return found


def parsing(n_processes: int) -> float:
    """Passages per second of the embedded corpus, read and split."""
    begun = time.perf_counter()
    n = sum(1 for _ in read_passages(build.embedded_documents(), n_processes=n_processes))
    return n / (time.perf_counter() - begun)


class NullEncoder:
    """Embeds nothing, at once."""

    fingerprint = space = embeds_passages_by = "null"
    dtype = "float32"
    dimension = NULL_DIMENSION

    def encode_passages(self, passages: Sequence[Passage]) -> Float32:
        return np.ones((len(passages), self.dimension), np.float32)


def memory(n: str) -> None:
    """A process: builds a corpus of n passages with the encoder that does nothing; prints its greatest memory in MB."""
    greatest, done = 0, threading.Event()

    def watch() -> None:
        nonlocal greatest
        while not done.wait(0.02):
            status = Path("/proc/self/status").read_text()
            greatest = max(greatest, int(status.split("RssAnon:")[1].split()[0]))

    with tempfile.TemporaryDirectory() as name:
        documents = Path(name) / "documents.jsonl"
        words = " ".join(f"word{i}" for i in range(99))
        with documents.open("w") as file:
            for i in range(int(n)):
                file.write(json.dumps({"id": str(i), "title": f"Title {i}", "text": f"{i} {words}"}) + "\n")
        threading.Thread(target=watch, daemon=True).start()
        with mock.patch.object(TextEncoder, "load", return_value=NullEncoder()):
            build.build_corpus(documents, Path(name) / "out", EncoderSettings(n_threads=1), 2, "Flat", bm25=False)
        done.set()
    print(json.dumps(greatest / 1024))


def memories(sizes: Sequence[int]) -> dict[int, float]:
    """MB of each size."""
    command = [sys.executable, __file__, "--memory"]
    return {
        n: json.loads(subprocess.run([*command, str(n)], stdout=subprocess.PIPE, check=True).stdout)
        for n in track(sizes, "memory", console=Console(stderr=True))
    }


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("n", 512), ("rounds", 3), ("processes", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    args = parser.parse_args()
    os.environ.pop("OMP_NUM_THREADS")
    n_processes = threads(args.processes)
    os.environ["OMP_NUM_THREADS"] = "1"
    rates = speed(args.n, args.rounds, n_processes) if args.n else {}
    parsed = parsing(n_processes)
    table = Table("passages per second", *(f"round {i + 1}" for i in range(args.rounds)), "median")
    for name, found in rates.items():
        table.add_row(name, *(f"{rate:.1f}" for rate in found), f"{statistics.median(found):.1f}")
    table.add_row("parsing", *("" for _ in range(args.rounds)), f"{parsed:.0f}")
    Console().print(table)
    shares: dict[str, float] = {}
    if rates:

        def share(ours: str, theirs: str) -> None:
            of = [a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]
            shares[f"{ours} / {theirs}"] = statistics.median(of)

        for dtype in DTYPES:
            share(f"ours, {dtype}", f"bare, {dtype}")
        share("ours, float32", "sentence-transformers, float32")
        share(f"ours, {NATIVE}", "sentence-transformers, float32")
        share(f"ours, {NATIVE}", f"sentence-transformers tuned, {NATIVE}")
        encoded = statistics.median(rates[f"ours, {NATIVE}"])
        shares["parsing / (parsing + encoding), time"] = encoded / (encoded + parsed)
    for name, value in shares.items():
        print(f"{name}: {value:.3f}")
    mb = memories(args.sizes)
    for n, found_mb in mb.items():
        print(f"{n:,} passages, null encoder: {found_mb:.0f} MB")
    if len(mb) > 1:
        spread = max(mb.values()) / min(mb.values()) - 1
        print(f"memory grows by {spread:.1%}: {'flat' if spread <= FLAT else 'NOT flat'} within {FLAT:.0%}")
    settings = {"n": args.n, "rounds": args.rounds, "processes": n_processes}
    machine = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
    found_all = {"rates": rates, "parsing": parsed, "shares": shares, "memory_mb": mb}
    print(json.dumps({"benchmark": "encode", "settings": settings, **found_all, **machine}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    elif sys.argv[1:2] == ["--memory"]:
        memory(*sys.argv[2:])
    else:
        main()
