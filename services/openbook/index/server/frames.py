"""The calls of `Exchange` without gRPC, a third of what its streams cost: see `connection` for what is sent."""

import hmac
import logging
import secrets
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from time import monotonic
from typing import Protocol

import numpy as np
from google.protobuf.message import DecodeError

from openbook.errors import InvalidRequest, OpenbookError
from openbook.index.connection import HEADER, KEY_BYTES, frame, tune
from openbook.index.server.exchange import Asked, CallStream, Sender
from openbook.v1 import index_pb2

log = logging.getLogger(__name__)

GREETING_S = 5.0
READ_AHEAD = 1 << 16
ACCEPT_AGAIN_S = 0.1


class Admit(Protocol):
    """Makes the calls of a connection a stream. Raises OpenbookError where it is one too many."""

    def __call__(
        self, calls: Iterator[Asked], has_more: Callable[[], bool], sender: Sender
    ) -> AbstractContextManager[CallStream]: ...


class FrameServer:
    """Answers all connections to some listening sockets.

    Args:
        listeners: taken over.
        admit: see `Admit`.
        max_bytes: of a call, payload included.
    """

    def __init__(self, listeners: Sequence[socket.socket], admit: Admit, max_bytes: int) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._listeners = listeners
        self._admit = admit
        self._max_bytes = max_bytes
        self._stopped = threading.Event()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._accepting = [
            threading.Thread(target=self._accept, args=(listener,), name="accept", daemon=True)
            for listener in listeners
        ]

    def start(self) -> None:
        """Take connections from now on."""
        for thread in self._accepting:
            thread.start()

    def refuse(self) -> None:
        """Take no more connections."""
        self._stopped.set()
        for listener, thread in zip(self._listeners, self._accepting, strict=True):
            _hang_up(listener)  # or `accept` would not notice
            if thread.ident is not None:
                thread.join()
            listener.close()

    def stop(self, grace_s: float) -> None:
        """Wait for connections whose calls are no more read to send their last replies, then close them all."""
        self.refuse()
        until = monotonic() + grace_s
        for connection, thread in list(self._connections.items()):
            thread.join(max(0.0, until - monotonic()))
            _hang_up(connection)
            thread.join()

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if not self._stopped.wait(ACCEPT_AGAIN_S):
                    log.warning("cannot take a connection: %s", error)
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), name="frames", daemon=True)
            self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            tune(connection)
            connection.settimeout(GREETING_S)
            reader = _Reader(connection)
            key = reader.take(KEY_BYTES)
            if key is not None and hmac.compare_digest(key, self.key):
                connection.settimeout(None)
                self._answer(reader, _Writer(connection))
        except OSError:
            pass  # the client is gone, or never said who it is
        finally:
            _hang_up(connection)
            del self._connections[connection]
            connection.close()

    def _answer(self, reader: "_Reader", writer: "_Writer") -> None:
        refused: list[OpenbookError] = []
        try:
            with self._admit(self._calls(reader, refused), reader.has_more, writer) as stream:
                writer.send(index_pb2.Reply())
                for reply in stream.replies():
                    writer.send(reply)
                writer.send()
        except OpenbookError as error:
            refused.append(error)
        for reason in refused:
            writer.send(index_pb2.Reply(failure=index_pb2.Failure(code=reason.grpc_code, message=str(reason))))

    def _calls(self, reader: "_Reader", refused: list[OpenbookError]) -> Iterator[Asked]:
        """Until the client ends its side, or sends what is no call: then `refused` has the reason."""
        while header := reader.take(HEADER.size):
            n_message, n_payload = HEADER.unpack(header)
            if n_message + n_payload > self._max_bytes:
                size = n_message + n_payload
                refused.append(InvalidRequest(f"a call must have at most {self._max_bytes} bytes, got {size}"))
                return
            message, payload = reader.take(n_message), reader.take(n_payload)
            if message is None or payload is None:
                return
            try:
                call = index_pb2.Call.FromString(bytes(message))
            except DecodeError:
                refused.append(InvalidRequest(f"{n_message} bytes are no call"))
                return
            yield call, payload if n_payload else call.search.queries.data


class _Reader:
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


class _Writer:
    """Replies over a connection, from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._turn = threading.Lock()
        self._unsent: deque[bytes] = deque()

    def send(self, *replies: index_pb2.Reply) -> None:
        """Wait until they are sent, and what was put before. Raises OSError: the connection is gone."""
        with self._turn:
            self._connection.sendall(b"".join((*self._taken(), *map(_bytes_of, replies))))
        self.flush()

    def put(self, reply: index_pb2.Reply) -> bool:
        """Have it sent by the next `flush`; not while the client takes no more."""
        if self._turn.locked():
            return False
        self._unsent.append(_bytes_of(reply))
        return True

    def flush(self) -> None:
        """Send what was put, in one piece. Whoever is sending does so when he is done."""
        while self._unsent and self._turn.acquire(blocking=False):
            rest = b"".join(self._taken())
            with suppress(OSError):  # there is no place for it, or the connection is gone, which others notice
                rest = rest[self._connection.send(rest, socket.MSG_DONTWAIT) :]
            if rest:
                threading.Thread(target=self._finish, args=(rest,), name="frames", daemon=True).start()
            else:
                self._turn.release()

    def _taken(self) -> list[bytes]:
        """What was put, which is then no longer here. Only for who has the turn."""
        return [self._unsent.popleft() for _ in range(len(self._unsent))]

    def _finish(self, rest: bytes) -> None:
        with suppress(OSError):
            self._connection.sendall(rest)
        self._turn.release()
        self.flush()


def _bytes_of(reply: index_pb2.Reply) -> bytes:
    return b"".join(frame(reply.SerializeToString()))


def _hang_up(connection: socket.socket) -> None:
    """Wake whoever waits for it."""
    with suppress(OSError):  # it is over already
        connection.shutdown(socket.SHUT_RDWR)
