"""Connections without gRPC, as both ends know them: frames on TCP or, within a machine, a Unix socket without a file.

The client begins with the key that `Info` told it, so that nobody ever talks to whoever has taken the port meanwhile;
the server greets with an empty reply. Then both sides send frames: two little-endian uint32, the sizes of message and
payload, and these two. The message is a Call or a Reply. The payload of a search are the numbers of its queries, which
the message then leaves out: copying them into it and out again costs more than sending them. A reply to no call (number
0) that is a failure ends the connection and says why.
"""

import secrets
import socket
import struct
import sys

HEADER = struct.Struct("<II")
KEY_BYTES = 16
# A client whose machine vanished is noticed within a minute: also while something is on its way to it, for then nobody
# asks whether it is alive, and by itself TCP sends that again for a quarter of an hour.
KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
if sys.platform == "linux":
    KEEPALIVE[socket.TCP_USER_TIMEOUT] = 60_000


def frame(message: bytes, payload: memoryview | bytes = b"") -> list[bytes | memoryview]:
    """The parts of a frame, to be sent one after the other."""
    return [HEADER.pack(len(message), len(payload)) + message, payload]


def listen_here() -> socket.socket | None:
    """A socket that listens to clients on this machine who know its name; only Linux has such, and may forbid it."""
    if sys.platform != "linux":
        return None
    try:
        listener = socket.socket(socket.AF_UNIX)
    except OSError:
        return None
    listener.bind(f"\0openbook-{secrets.token_hex(KEY_BYTES)}")
    listener.listen()
    return listener


def connect_here(name: str) -> socket.socket | None:
    """A connection to who listens under this name; None if nobody does on this machine."""
    if sys.platform != "linux" or not name:
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        return None
    return connection


def tune(connection: socket.socket) -> None:
    """A connection for many small messages that may live for months."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return  # not TCP
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
