"""Processes that encode passages beside the one that builds. They start before anything heavy is imported here."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from openbook.config import EncoderSettings
from openbook.errors import StartupError
from openbook.processes import end, start, threads

ROWS_PER_PROCESS = 128
"""Fewer passages are encoded sooner than another process has started."""
BYTES_PER_PROCESS = 512 * ROWS_PER_PROCESS
N_AHEAD = 7
"""More are started when it is known that there is so much to encode: a build `--from` a former snapshot has little."""


class Worker:
    """One of them, with one thread: `openbook.corpus.encode` as a program. See there for what it is told."""

    def __init__(self, settings: EncoderSettings) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "openbook.corpus.encode", settings.model_dump_json()]
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0, "env": environment}
        self._process = start(command, **options)
        self._last_said = ""

    def ready(self) -> None:
        """Wait until it is, or has ended."""
        self._listen()

    def write(self, folder: Path, step: range) -> None:
        """Encode the passages of a step, and write their embeddings. Raises StartupError: it has ended."""
        assert self._process.stdin is not None
        asked = json.dumps([str(folder), step.start, step.stop])
        with suppress(BrokenPipeError):  # that it has ended is read below
            self._process.stdin.write(f"{asked}\n".encode())
        before = self._last_said
        if not self._listen():
            code = self._process.wait()
            why = f": {before}" if before not in (READY, DONE) else ""
            raise StartupError(
                f"a process that encodes passages {step.start}..{step.stop - 1} ended with code {code}{why}"
            )

    def _listen(self) -> str:
        assert self._process.stdout is not None
        self._last_said = self._process.stdout.readline().decode().strip()
        return self._last_said

    def close(self) -> None:
        """End it."""
        end(self._process)


READY, DONE = "ready", "done"
"""What a worker says: once its model is loaded, and after each step. Where it cannot be loaded, why."""


@contextmanager
def ahead(documents: Path, settings: EncoderSettings) -> Iterator[list[Worker]]:
    """Those that a corpus of such a size will need at least: they load their models while the builder loads its own."""
    most = BYTES_PER_PROCESS * (N_AHEAD + 1)
    n_workers = min(threads(settings.n_threads), _n_bytes(documents, most) // BYTES_PER_PROCESS) - 1
    with ExitStack() as stack:
        yield [stack.enter_context(closing(Worker(settings))) for _ in range(n_workers)]


def _n_bytes(documents: Path, enough: int) -> int:
    """In a file, or in all of a folder's, looked at until it is enough."""
    n_bytes = 0
    for path in documents.rglob("*") if documents.is_dir() else [documents]:
        with suppress(OSError):  # gone, or not to be read: said later
            n_bytes += path.stat().st_size
        if n_bytes >= enough:
            break
    return min(n_bytes, enough)
