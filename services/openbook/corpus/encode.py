"""Passages to embeddings in a memory-mapped file: on CPUs by one process for each core, each with one thread.

Two processes of one thread encode more passages than one process of two threads. And the bits of an embedding depend on
the number of threads, so that is the same whoever computes it; on the company of a passage they do not depend.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from openbook.config import EncoderSettings
from openbook.core.types import Float32, Passage
from openbook.errors import OpenbookError, StartupError
from openbook.index.disk.store import OFFSETS, PARTS, PassageReader
from openbook.logs import setup_logging
from openbook.models.checkpoint import device_of
from openbook.models.encoder import TextEncoder
from openbook.processes import end, start, threads

VECTORS = "vectors.npy"
ROWS = "rows.npy"
"""Which passages are to be encoded, in this order."""
WINDOW = 1 << 16
"""Passages that are ordered at once, so that memory is bounded and what is written at one time lies together."""


class Elsewhere(Protocol):
    """Other machines that encode passages. They see no files of the build: passages go there, embeddings come back."""

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
    return settings.model_copy(update={"n_threads": 1}) if _on_cpu(settings) else settings


def encode(
    folder: Path,
    steps: Sequence[range],
    settings: EncoderSettings,
    model: TextEncoder,
    on_written: Callable[[range], None],
) -> None:
    """Write the embeddings of all steps, and tell of each that is written, in any order.

    Args:
        folder: holds the passages, the file of vectors, and that of rows.
        steps: ranges of the file of rows, whose passages are encoded together.
        settings: of the encoder; `n_threads` is how many cores to use.
        model: loaded with `alone` of these settings.
        on_written: called with a step.

    Raises:
        StartupError: a process ended before its work was done; it said why on standard error.
    """
    n_workers = min(threads(settings.n_threads), len(steps)) if _on_cpu(settings) else 1
    if n_workers > 1:
        _by_workers(folder, steps, settings, n_workers, on_written)
        return
    for rows in steps:
        _write(folder, rows, model)
        on_written(rows)


def _on_cpu(settings: EncoderSettings) -> bool:
    return device_of(settings.device) == "cpu"


def plan_rows(folder: Path, is_kept: NDArray[np.bool_], n_together: int) -> None:
    """Write the file of rows: the passages of a folder without those that are kept.

    Those of like length come together, so that there is little padding where `n_together` are encoded at once, and
    short ones and long ones in turn, so that the time left can be told.
    """
    offsets = np.load(folder / OFFSETS, mmap_mode="r")
    rows = np.lib.format.open_memmap(folder / ROWS, "w+", np.int64, (int(np.count_nonzero(~is_kept)),))
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
    _put(folder, step, model.encode_passages(_passages(folder, step)))


def _by_workers(
    folder: Path,
    steps: Sequence[range],
    settings: EncoderSettings,
    n_workers: int,
    on_written: Callable[[range], None],
) -> None:
    waiting = iter(steps)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "openbook.corpus.encode", str(folder), alone(settings).model_dump_json()]
    with ExitStack() as stack, DefaultSelector() as at_work:

        def give_work(worker: subprocess.Popen[bytes]) -> None:
            assert worker.stdin is not None
            assert worker.stdout is not None
            if rows := next(waiting, None):
                with suppress(BrokenPipeError):  # that it has ended is read below
                    worker.stdin.write(b"%d %d\n" % (rows.start, rows.stop))
                at_work.register(worker.stdout, EVENT_READ, (worker, rows))

        for _ in range(n_workers):
            worker = start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment)
            stack.callback(end, worker)
            give_work(worker)
        while at_work.get_map():
            for key, _ in at_work.select():
                worker, rows = key.data
                at_work.unregister(key.fileobj)
                if not worker.stdout.readline():
                    raise StartupError(
                        f"a process that encodes passages {rows.start}..{rows.stop - 1} ended with code {worker.wait()}"
                    )
                on_written(rows)
                give_work(worker)


def main(folder: str, settings: str) -> None:
    """A worker: reads steps from standard input, and says when each is done."""
    model = TextEncoder.load(EncoderSettings.model_validate_json(settings), role="passage")
    for line in sys.stdin:
        _write(Path(folder), range(*map(int, line.split())), model)
        print("done", flush=True)


if __name__ == "__main__":
    setup_logging("encode")
    try:
        main(*sys.argv[1:])
    except OpenbookError as error:
        sys.exit(f"openbook: {error}")
