"""How much of one stream may be under way."""

import threading
from queue import SimpleQueue

MAX_UNSENT = 1024
"""Calls of one stream that were begun and whose replies the client has not taken; no more are read until it has."""
MAX_UNSENT_BYTES = 16 << 20
"""Of these replies together."""


class Room:
    """For the calls of a stream that were begun and the replies to them, until they are sent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_calls = self._size_bytes = 0
        self._waiting = False
        self._more: SimpleQueue[None] = SimpleQueue()

    def change(self, n_calls: int, size_bytes: int) -> None:
        """So many more."""
        with self._lock:
            self._n_calls += n_calls
            self._size_bytes += size_bytes
        if self._waiting:
            self._look_again()

    def wait(self) -> None:
        """Wait until there is room."""
        if not self._is_full():
            return
        with self._lock:
            self._waiting = self._is_full()
            if not self._waiting:
                return
        self._more.get()

    def _look_again(self) -> None:
        with self._lock:
            if not self._waiting or self._is_full():
                return
            self._waiting = False
        self._more.put(None)

    def open(self) -> None:
        """Nobody need wait any more."""
        self._more.put(None)

    def _is_full(self) -> bool:
        return self._n_calls >= MAX_UNSENT or self._size_bytes >= MAX_UNSENT_BYTES
