"""The calls of `Exchange` without gRPC, a third of what its streams cost: see `connection` for what is sent."""

import hmac
import logging
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Protocol

from google.protobuf.message import DecodeError

from openbook.errors import InvalidRequest, OpenbookError
from openbook.index.connection import HEADER, KEY_BYTES, tune
from openbook.index.server.exchange import Asked, CallStream, Peer, Sender
from openbook.index.server.failed import Failed
from openbook.index.server.reply import Reply
from openbook.index.server.sockets import Reader, Writer
from openbook.v1 import index_pb2

log = logging.getLogger(__name__)

GREETING_S = 5.0
"""Within which a newcomer must have shown the key."""
SEND_S = 30.0
"""In which a client must take something of what is sent to him, over gRPC a reply: else his threads and replies would
be his for ever.
"""
MAX_NEWCOMERS = 128
ACCEPT_AGAIN_S = 0.1
PACE_S = 5e-3
"""Between two connections that get threads: to make those takes what calls under way need."""


class Streams(Protocol):
    """Who answers the calls of connections."""

    def admit(
        self,
        calls: Iterator[Asked],
        peer: Peer,
        break_off: Callable[[], object],
        has_more: Callable[[], bool],
        sender: Sender,
    ) -> CallStream:
        """Make the calls of a connection a stream. Raises OpenbookError where it is one too many."""

    def leave(self, stream: CallStream) -> None:
        """It is over."""


@dataclass(slots=True)
class _Newcomer:
    """A connection that has not shown the whole key."""

    due: float
    key: bytes = b""


class FrameServer:
    """Answers all connections to some listening sockets.

    One thread takes connections and their keys; only those that know the key, and have a place, get threads.

    Args:
        listeners: taken over.
        streams: see `Streams`.
        max_bytes: of a call, payload included.
    """

    def __init__(self, listeners: Sequence[socket.socket], streams: Streams, max_bytes: int) -> None:
        self.key = secrets.token_bytes(KEY_BYTES)
        self._listeners = listeners
        self._streams = streams
        self._max_bytes = max_bytes
        self._stopped = threading.Event()
        self._newcomers: dict[socket.socket, _Newcomer] = {}  # the oldest first
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._accepting = threading.Thread(target=self._accept, name="accept", daemon=True)

    def start(self) -> None:
        """Take connections from now on."""
        for listener in self._listeners:
            listener.setblocking(False)
        self._accepting.start()

    def refuse(self) -> None:
        """Take no more connections."""
        self._stopped.set()
        for listener in self._listeners:
            _hang_up(listener)  # or the accepting thread would not notice
        if self._accepting.ident is not None:
            self._accepting.join()
        for listener in self._listeners:
            listener.close()

    def stop(self, grace_s: float) -> None:
        """Wait for connections whose calls are no more read to send their last replies, then close them all."""
        self.refuse()
        until = monotonic() + grace_s
        for connection, thread in list(self._connections.items()):
            thread.join(max(0.0, until - monotonic()))
            _hang_up(connection)
            thread.join()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ)
            while True:
                due = next((newcomer.due for newcomer in self._newcomers.values()), None)
                ready = selector.select(None if due is None else max(0.0, due - monotonic()))
                if self._stopped.is_set():
                    break
                for key, _ in ready:
                    connection = key.fileobj
                    if not isinstance(connection, socket.socket):
                        continue
                    if connection in self._listeners:
                        self._take_from(connection, selector)
                    elif connection in self._newcomers:  # or it had to go for another one
                        self._read_key(connection, selector)
                now = monotonic()
                for connection in [each for each, newcomer in self._newcomers.items() if newcomer.due <= now]:
                    self._turn_away(connection, selector)
            for connection in list(self._newcomers):
                self._turn_away(connection, selector)

    def _take_from(self, listener: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return  # it is gone again
        except OSError as error:
            if not self._stopped.wait(ACCEPT_AGAIN_S):
                log.warning("cannot take a connection: %s", error)
            return
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
        self._newcomers[connection] = _Newcomer(monotonic() + GREETING_S)
        if len(self._newcomers) > MAX_NEWCOMERS:
            self._turn_away(next(iter(self._newcomers)), selector)

    def _turn_away(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        self._settle(connection, selector)
        _close(connection)

    def _settle(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        """It is no newcomer any more."""
        del self._newcomers[connection]
        selector.unregister(connection)

    def _read_key(self, connection: socket.socket, selector: selectors.BaseSelector) -> None:
        newcomer = self._newcomers[connection]
        try:
            more = connection.recv(KEY_BYTES - len(newcomer.key))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        newcomer.key += more
        if more and len(newcomer.key) < KEY_BYTES:
            return
        if hmac.compare_digest(newcomer.key, self.key):
            self._settle(connection, selector)
            if self._serve(connection):
                self._stopped.wait(PACE_S)
        else:
            self._turn_away(connection, selector)

    def _serve(self, connection: socket.socket) -> bool:
        """Have its calls answered, or tell why not. Does not wait. Returns whether they will be."""
        connection.setblocking(True)
        seconds = struct.pack("ll", int(SEND_S), int(SEND_S % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        reader, writer, refused = Reader(connection), Writer(connection), list[Failed]()
        try:
            tune(connection)
            calls, break_off = self._calls(reader, refused), partial(_hang_up, connection)
            stream = self._streams.admit(calls, _peer(connection), break_off, reader.has_more, writer)
        except (OpenbookError, OSError) as error:
            if isinstance(error, OpenbookError):
                writer.put(Reply(Failed(error.grpc_code, str(error)).reply()))
                writer.flush()
            _close(connection)
            return False
        arguments = connection, stream, writer, refused
        thread = threading.Thread(target=self._answer, args=arguments, name="frames", daemon=True)
        self._connections[connection] = thread
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("cannot serve a connection: %s", error)
            self._part(connection, stream)
            return False
        return True

    def _answer(self, connection: socket.socket, stream: CallStream, writer: Writer, refused: Sequence[Failed]) -> None:
        try:
            writer.send(Reply(index_pb2.Reply()))
            for reply in stream.replies():
                writer.send(reply)
                del reply  # which the next may take long to follow
            writer.send(*(Reply(reason.reply()) for reason in refused))
        except OpenbookError as error:
            writer.put(Reply(Failed(error.grpc_code, str(error)).reply()))
            writer.flush()
        except OSError:
            pass  # the client is gone
        finally:
            self._part(connection, stream)

    def _part(self, connection: socket.socket, stream: CallStream) -> None:
        self._streams.leave(stream)
        del self._connections[connection]
        _close(connection)

    def _calls(self, reader: Reader, refused: list[Failed]) -> Iterator[Asked]:
        """Until the client ends its side, or sends what is no call: then `refused` has the reason."""
        while header := reader.take(HEADER.size):
            n_message, n_payload = HEADER.unpack(header)
            if n_message + n_payload > self._max_bytes:
                size = n_message + n_payload
                refused.append(_invalid(f"a call must have at most {self._max_bytes} bytes, got {size}"))
                return
            message, payload = reader.take(n_message), reader.take(n_payload)
            if message is None or payload is None:
                return
            try:
                call = index_pb2.Call.FromString(bytes(message))
            except DecodeError:
                refused.append(_invalid(f"{n_message} bytes are no call"))
                return
            yield call, payload if n_payload else call.search.queries.data


def _peer(connection: socket.socket) -> Peer:
    """Raises OSError: it is gone."""
    name = connection.getpeername()  # host and port, or nothing over Unix
    return Peer(name[0] if isinstance(name, tuple) else "", f"frames {connection.fileno()}")


def _invalid(why: str) -> Failed:
    return Failed(InvalidRequest.grpc_code, why)


def _close(connection: socket.socket) -> None:
    _hang_up(connection)
    connection.close()


def _hang_up(connection: socket.socket) -> None:
    """Wake whoever waits for it."""
    with suppress(OSError):  # it is over already
        connection.shutdown(socket.SHUT_RDWR)
