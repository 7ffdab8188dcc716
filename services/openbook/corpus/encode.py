"""Passages to embeddings in a memory-mapped file: on CPUs by one process for each core, on each GPU by several.

The process that builds is one of them, once it has done what else there is to do; the others take their share as soon
as they have started. On CPUs each has one thread: two processes of one thread encode more passages than one process of
two. And the bits of an embedding depend on the number of threads, so that is the same whoever computes it; on the
company of a passage they do not depend. On a GPU one process alone would leave it idle whenever it reads passages and
cuts them into tokens.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from itertools import cycle, islice
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from openbook.config import EncoderSettings
from openbook.core.types import Float32, Passage
from openbook.errors import OpenbookError, StartupError
from openbook.index.disk.arrays import new_array
from openbook.index.disk.store import OFFSETS, PARTS, PassageReader
from openbook.logs import setup_logging
from openbook.models.checkpoint import device_of, devices_of
from openbook.models.encoder import TextEncoder
from openbook.models.gpu import told_if_gpu_full
from openbook.processes import end, of_module, start, threads

VECTORS = "vectors.npy"
ROWS = "rows.npy"
"""Which passages are to be encoded, in this order."""
ROWS_PER_PROCESS, GPU_ROWS_PER_PROCESS = 128, 1 << 14
"""Fewer passages are encoded sooner than another process has started."""
GPU_PROCESSES = 4
"""On each GPU, if there are cores for them."""
GPU_ROWS_PER_STEP = 1 << 14
"""Passages that a GPU encodes at a time. The last batch of each length is filled up: the more, the less it matters."""
READY, DONE = "ready\n", "done\n"
"""What a worker says."""
WINDOW = 1 << 16
"""Passages that are ordered at once, so that memory is bounded and what is written at one time lies together."""


Meanwhile = Callable[[Callable[[], None]], None]
"""Work beside that of others. Calls what it is given now and then, which raises if one of them has failed."""


class Elsewhere(Protocol):
    """Other machines that encode passages. They see no files of the build: passages go there, embeddings come back."""

    @property
    def on_gpu(self) -> bool:
        """Whether GPUs compute there."""

    def embeds_passages_by(self, space: str) -> str:
        """As `TextEncoder` tells it, of the encoder there, which must be of this space.

        Raises:
            InvalidModel: it cannot be loaded there, or is another one.
            StartupError: nobody can encode there.
        """

    def encode(self, blocks: Iterable[tuple[range, Sequence[Passage]]]) -> Iterator[tuple[range, Float32]]:
        """The (n, d) embeddings of each block, in any order. Blocks are taken as there is room for them.

        Raises:
            InvalidModel, StartupError: as `embeds_passages_by`.
        """


def alone(settings: EncoderSettings) -> EncoderSettings:
    """The settings of one process among those that encode: on a CPU it has one thread."""
    return settings if on_gpu(settings) else settings.model_copy(update={"n_threads": 1})


def on_gpu(settings: EncoderSettings) -> bool:
    """Whether a GPU computes, where `auto` is left to this machine."""
    return device_of(settings.device) != "cpu"


def everyone(settings: EncoderSettings) -> list[EncoderSettings]:
    """The settings of each process that encodes here, this one's first: as many as there are cores for, but no more
    than GPU_PROCESSES on each GPU, and one at least. There they share the cores, to make tokens.
    """
    n_cores = threads(settings.n_threads)
    if not on_gpu(settings):
        return [alone(settings)] * n_cores
    devices = devices_of(settings.device)
    n = max(len(devices), min(n_cores, GPU_PROCESSES * len(devices)))
    shares = {"n_threads": max(1, n_cores // n)}
    return [settings.model_copy(update={"device": device, **shares}) for device in islice(cycle(devices), n)]


def encode(
    folder: Path,
    steps: Sequence[range],
    settings: EncoderSettings,
    model: TextEncoder,
    on_written: Callable[[range], None],
    meanwhile: Meanwhile = lambda check: None,
) -> None:
    """Write the embeddings of all steps, and tell of each that is written, in any order.

    Args:
        folder: holds the passages, the file of vectors, and that of rows.
        steps: ranges of the file of rows, whose passages are encoded together.
        settings: of the encoder; `n_threads` is how many cores to use, and `cuda` all GPUs.
        model: loaded with `alone` of these settings.
        on_written: called with a step.
        meanwhile: what this process does first, while the others start and encode.

    Raises:
        StartupError: a GPU's memory is full, or a process ended before its work was done; why stands on standard error.
    """
    waiting, lock = iter(steps), Lock()

    def take(write: Callable[[range], None], first: Callable[[], None] = lambda: None) -> None:
        nonlocal waiting
        try:
            first()
            while True:
                with lock:
                    step = next(waiting, None)
                if not step:
                    return
                write(step)
                with lock:
                    on_written(step)
        except BaseException:
            waiting = iter(())  # the others end, too
            raise

    def take_when_ready(worker: Worker) -> None:
        def wait() -> None:
            worker.ready()
            starting.remove(worker)

        take(worker.write, wait)

    n_useful = sum(map(len, steps)) // (GPU_ROWS_PER_PROCESS if on_gpu(settings) else ROWS_PER_PROCESS)
    alike = settings.model_copy(update={"dtype": model.dtype})  # auto might be another one on another GPU
    others = everyone(alike)[1 : max(1, n_useful)]
    with ThreadPoolExecutor(max(1, len(others))) as pool, ExitStack() as stack:
        workers = [stack.enter_context(closing(Worker(folder, each))) for each in others]
        starting = list(workers)
        theirs = [pool.submit(take_when_ready, worker) for worker in workers]

        def check() -> None:
            for each in theirs:
                if each.done():
                    each.result()

        take(lambda step: _write(folder, step, model), lambda: meanwhile(check))
        for worker in starting.copy():
            worker.close()  # it would come too late
        for each in theirs:
            each.result()


def plan_rows(folder: Path, is_kept: NDArray[np.bool_], n_together: int) -> None:
    """Write the file of rows: the passages of a folder without those that are kept.

    Those of like length come together, so that there is little padding where `n_together` are encoded at once, and
    short ones and long ones in turn, so that the time left can be told.
    """
    offsets = np.load(folder / OFFSETS, mmap_mode="r")
    rows = new_array(folder / ROWS, np.int64, (int(np.count_nonzero(~is_kept)),))
    n_done = 0
    for first in range(0, len(is_kept), WINDOW):
        here = first + np.flatnonzero(~is_kept[first : first + WINDOW])
        sizes = offsets[PARTS * (here + 1)] - offsets[PARTS * here + 1]  # of title and text
        here = here[np.argsort(sizes, kind="stable")]
        blocks = [here[i : i + n_together] for i in range(0, len(here), n_together)]
        whole = len(here) // n_together
        order = [*np.random.default_rng(first).permutation(whole).tolist(), *range(whole, len(blocks))]
        for block in (blocks[i] for i in order):
            rows[n_done : n_done + len(block)] = block
            n_done += len(block)
    rows.flush()


def encode_elsewhere(
    folder: Path, steps: Sequence[range], elsewhere: Elsewhere, on_written: Callable[[range], None]
) -> None:
    """As `encode`, by others. Raises as `Elsewhere.encode`."""
    for step, vectors in elsewhere.encode((step, _passages(folder, step)) for step in steps):
        _put(folder, step, vectors)
        on_written(step)


def _passages(folder: Path, step: range) -> list[Passage]:
    passages = PassageReader(folder)
    return [passages[i] for i in np.load(folder / ROWS, mmap_mode="r")[step.start : step.stop].tolist()]


def _put(folder: Path, step: range, embeddings: Float32) -> None:
    vectors = np.lib.format.open_memmap(folder / VECTORS, "r+")
    vectors[np.load(folder / ROWS, mmap_mode="r")[step.start : step.stop]] = embeddings
    vectors.flush()


def _write(folder: Path, step: range, model: TextEncoder) -> None:
    what = "a GPU's memory is full; with one thread it has one process, and the same command goes on"
    with told_if_gpu_full(StartupError, what):
        _put(folder, step, model.encode_passages(_passages(folder, step)))


class Worker:
    """Another process that encodes, with settings of `everyone`."""

    def __init__(self, folder: Path, settings: EncoderSettings) -> None:
        n = settings.n_threads  # Rayon's make tokens
        of_threads = {"OMP_NUM_THREADS": n, "RAYON_NUM_THREADS": n, "TOKENIZERS_PARALLELISM": str(n > 1).lower()}
        environment = {**os.environ, **{name: str(value) for name, value in of_threads.items()}}
        command = [*of_module("openbook.corpus.encode"), str(folder), settings.model_dump_json()]
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0, "env": environment}
        self._process = start(command, **options)

    def ready(self) -> None:
        """Wait until it is, or has ended. What libraries print as they are imported is passed over."""
        while (said := self._said()) and not said.endswith(READY):
            pass

    def write(self, step: range) -> None:
        """As `_write`. Raises StartupError: it has ended, or says something else than that it is done."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # that it has ended is read below
            self._process.stdin.write(b"%d %d\n" % (step.start, step.stop))
        said = self._said()
        if said != DONE:
            why = f"said {said.rstrip()!r:.80}" if said else f"ended with code {self._process.wait()}"
            raise StartupError(f"a process that encodes passages {step.start}..{step.stop - 1} {why}")

    def _said(self) -> str:
        """The next line; nothing once it has ended."""
        assert self._process.stdout is not None
        return bytes(self._process.stdout.readline()).decode(errors="replace")

    def close(self) -> None:
        """End it."""
        end(self._process)


def main(folder: str, settings: str) -> None:
    """A worker: says that it is ready, reads steps from standard input, and says when each is done."""
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what libraries print is no word of ours
        model = TextEncoder.load(EncoderSettings.model_validate_json(settings), role="passage")
        print(READY, end="", file=out, flush=True)
        for line in sys.stdin:
            _write(Path(folder), range(*map(int, line.split())), model)
            print(DONE, end="", file=out, flush=True)


if __name__ == "__main__":
    setup_logging("encode")
    try:
        main(*sys.argv[1:])
    except OpenbookError as error:
        sys.exit(f"openbook: {error}")
