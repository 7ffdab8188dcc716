"""A client of connections without gRPC, as somebody would write it in another language."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
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
