"""Files brought from elsewhere, some at once: room is looked for, bytes are counted, the first error stops all.

What stops them waits for no place that is silent: who writes is waited for, who reads is not.
"""

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from openbook.errors import ShardUnavailable

File = TypeVar("File")
T = TypeVar("T")
OnBytes = Callable[[int, int], None]
"""Called with how many bytes are there of how many."""


class Stopped(Exception):
    """The transfer was stopped."""


def apart(read: Callable[[], T]) -> Future[T]:
    """What comes of it in a thread of its own, which keeps no process from ending."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(read())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="read", daemon=True).start()
    return future


class Transfer:
    """What those who bring a file each have in common.

    Args:
        total: bytes of all, as far as sizes are known.
        on_bytes: called after each piece.
    """

    def __init__(self, total: int, on_bytes: OnBytes) -> None:
        self._stopped: Future[Any] = Future()
        self._done = 0
        self._total = total
        self._on_bytes = on_bytes
        self._lock = threading.Lock()

    def stop(self) -> None:
        """After an error of one of them, or Ctrl-C: the others need not go on."""
        self._stopped.set_result(None)

    def read(self, read: Callable[[], T]) -> T:
        """What it gives. Raises Stopped: the transfer is, and it may go on reading for nobody."""
        found = apart(read)
        wait((found, self._stopped), return_when=FIRST_COMPLETED)
        if self._stopped.done():
            raise Stopped
        return found.result()

    def pieces(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """They, none of which is empty. Raises as `read`."""
        while piece := self.read(lambda: next(pieces, b"")):
            yield piece

    def count(self, n_bytes: int) -> None:
        """So many bytes more are here."""
        with self._lock:
            self._done += n_bytes
            self._on_bytes(self._done, max(self._total, self._done))


def transfer_all(
    folder: Path,
    missing: Iterable[File],
    bring: Callable[[File, Transfer], None],
    total: int,
    begun: int,
    on_bytes: OnBytes,
    n_at_once: int,
) -> None:
    """Bring what is missing in a folder, of which `begun` bytes of the `total` are there.

    Raises:
        ShardUnavailable: the disk is too small.
        Exception: whatever the first `bring` that fails raises.
    """
    free = shutil.disk_usage(folder).free
    if total - begun > free:
        raise ShardUnavailable(f"{folder}: {total - begun} bytes are needed, {free} are free")
    transfer = Transfer(total, on_bytes)
    with ThreadPoolExecutor(n_at_once, "fetch") as threads:
        try:
            futures = [threads.submit(bring, file, transfer) for file in missing]
            ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            transfer.stop()
            threads.shutdown(cancel_futures=True)
    for future in ended:
        future.result()
