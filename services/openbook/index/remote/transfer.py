"""Files brought from elsewhere, some at once: room is looked for, bytes are counted, the first error stops all."""

import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from openbook.errors import ShardUnavailable

File = TypeVar("File")
OnBytes = Callable[[int, int], None]
"""Called with how many bytes are there of how many."""


class Transfer:
    """What those who bring a file each have in common.

    Args:
        total: bytes of all, as far as sizes are known.
        on_bytes: called after each piece.
    """

    def __init__(self, total: int, on_bytes: OnBytes) -> None:
        self.stopped = threading.Event()
        """An error of one of them, or Ctrl-C: the others need not go on."""
        self._done = 0
        self._total = total
        self._on_bytes = on_bytes
        self._lock = threading.Lock()

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
        futures = [threads.submit(bring, file, transfer) for file in missing]
        try:
            ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            transfer.stopped.set()
            threads.shutdown(cancel_futures=True)
    for future in ended:
        future.result()
