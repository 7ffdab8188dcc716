"""A client of connections without gRPC, as somebody would write it in another language."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from types import SimpleNamespace

from small_snapshot import D

from openbook.index.connection import HEADER, frame
from openbook.index.server.server import IndexServer
from openbook.v1 import index_pb2

TIMEOUT_S = 60.0


class Connection:
    """One, whose key was sent if it was not given another one."""

    over = "TCP"

    def __init__(self, server: IndexServer, key: bytes | None = None) -> None:
        frames = server._service.frames
        assert frames is not None
        if self.over == "TCP":
            self.socket = socket.create_connection(("127.0.0.1", frames.port), timeout=TIMEOUT_S)
        else:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(TIMEOUT_S)
            self.socket.connect(f"\0{frames.name}")
        self.socket.sendall(frames.key if key is None else key)
        self._file = self.socket.makefile("rb")

    def send(self, call: index_pb2.Call, payload: bytes = b"") -> None:
        self.socket.sendall(b"".join(frame(call.SerializeToString(), payload)))

    def reply(self) -> index_pb2.Reply | None:
        header = self._file.read(HEADER.size)
        if not header:
            return None
        n_message, n_payload = HEADER.unpack(header)
        assert n_payload == 0
        return index_pb2.Reply.FromString(self._file.read(n_message))


@contextmanager
def connected(server: IndexServer, key: bytes | None = None) -> Iterator[Connection]:
    connection = Connection(server, key)
    try:
        yield connection
    finally:
        connection.socket.close()
        connection._file.close()


def search(number: int, rows: int = 1, **queries: object) -> index_pb2.Call:
    matrix = SimpleNamespace(rows=rows, columns=D, **queries)
    return index_pb2.Call(number=number, search=index_pb2.SearchRequest(queries=vars(matrix), k=3))


class Firewall:
    """A port that forwards to that of a server's frames, and may forget connections: they stay open, and carry nothing.

    Used within the event loop of whoever connects.
    """

    def __init__(self, server: IndexServer) -> None:
        frames = server._service.frames
        assert frames is not None
        self._port, self._frames = frames.port, frames
        self._knows: set[asyncio.Task[None]] = set()
        self._forgotten: set[asyncio.Task[None]] = set()

    @property
    def n_known(self) -> int:
        """Directions of connections that carry something."""
        return len(self._knows)

    def forget(self) -> None:
        """All that are open now."""
        self._forgotten |= self._knows
        self._knows.clear()

    async def __aenter__(self) -> "Firewall":
        self._listening = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self._frames.port = self._listening.sockets[0].getsockname()[1]
        self._name, self._frames.name = self._frames.name, ""  # as if the server were on another machine
        return self

    async def __aexit__(self, *_: object) -> None:
        self._frames.port, self._frames.name = self._port, self._name
        self._listening.close()
        for task in self._knows | self._forgotten:
            task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._port)
        for source, target in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._forward(source, target))
            self._knows.add(task)
            task.add_done_callback(self._knows.discard)

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError), closing(target):
            while data := await source.read(1 << 16):
                if asyncio.current_task() in self._forgotten:
                    await asyncio.Event().wait()
                target.write(data)
