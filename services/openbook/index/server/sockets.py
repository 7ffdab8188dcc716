"""The two directions of a connection without gRPC."""

import select
import socket
import threading
from collections import deque

import numpy as np

from openbook.index.connection import HEADER
from openbook.index.server.reply import Reply

READ_AHEAD = 1 << 16
PIECE_BYTES = 1 << 18
"""That replies are sent in, unless one alone is larger."""


class Reader:
    """What comes over a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = memoryview(bytearray(READ_AHEAD))
        self._start = self._end = 0  # of what was read ahead
        self._arrived = select.poll()
        self._arrived.register(connection, select.POLLIN)

    def take(self, n: int) -> bytes | memoryview | None:
        """Wait for so many bytes; None if the end came before."""
        if self._start == self._end and 0 < n < READ_AHEAD:
            self._start, self._end = 0, self._connection.recv_into(self._buffer)
        end = self._start + n
        if end <= self._end:
            found, self._start = bytes(self._buffer[self._start : end]), end
            return found
        whole, at = np.empty(n, np.uint8).data, self._end - self._start
        whole[:at] = self._buffer[self._start : self._end]
        self._start = self._end
        while at < n:
            n_more = self._connection.recv_into(whole[at:])
            if n_more == 0:
                return None
            at += n_more
        return whole

    def has_more(self) -> bool:
        """Whether something came that was not asked for yet, if only the end. Does not wait."""
        return self._start < self._end or bool(self._arrived.poll(0))


class Writer:
    """Replies over a connection, from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._turn = threading.Lock()
        self._unsent: deque[bytes | memoryview] = deque()
        self._full = False
        """Whether the client takes no more, so that whoever may wait sends the rest."""

    def send(self, *replies: Reply) -> None:
        """Wait until they are sent, and what was put before. Raises OSError: the connection is gone."""
        for reply in replies:
            self._unsent.extend(_bytes_of(reply))
        while True:
            with self._turn:
                while piece := self._piece():
                    self._connection.sendall(piece)
                self._full = False
            if self.flush():
                return

    def put(self, reply: Reply) -> bool:
        """Have it sent by the next `flush`; not while the client takes no more."""
        if self._full or self._turn.locked():
            return False
        self._unsent.extend(_bytes_of(reply))
        return True

    def flush(self) -> bool:
        """Send what was put, as far as there is place for it; False when somebody must `send` the rest.
        Whoever is sending does so when he is done.
        """
        while self._unsent and not self._full and self._turn.acquire(blocking=False):
            try:
                piece = self._piece()
                try:
                    n_sent = self._connection.send(piece, socket.MSG_DONTWAIT)
                except OSError:  # there is no place for it, or the connection is gone, which others notice
                    n_sent = 0
                if n_sent < len(piece):
                    self._unsent.appendleft(memoryview(piece)[n_sent:])
                    self._full = True
                    return False
            finally:
                self._turn.release()
        return True

    def _piece(self) -> bytes | memoryview:
        """What to send next, which is then no longer here: small replies as one, so that they cost one call of the
        system, large ones alone, for nobody else can do anything while they are copied. Only for who has the turn.
        """
        if not self._unsent:
            return b""
        first = self._unsent.popleft()
        if not self._unsent:
            return first
        piece, size = [first], len(first)
        while self._unsent and size + len(self._unsent[0]) <= PIECE_BYTES:
            piece.append(self._unsent.popleft())
            size += len(piece[-1])
        return first if len(piece) == 1 else b"".join(piece)


def _bytes_of(reply: Reply) -> list[bytes | memoryview]:
    """In one piece if it is small, else in several, which nothing comes between: `deque.extend` lets nobody else at it
    meanwhile.
    """
    if not reply.fetched:
        message = reply.message.SerializeToString()
        return [HEADER.pack(len(message), 0) + message]
    parts = list(reply.parts())
    size = sum(map(len, parts))
    parts.insert(0, HEADER.pack(size, 0))
    return parts if size > PIECE_BYTES else [b"".join(parts)]
