"""Connections without gRPC: the same calls, the same replies, and nothing that a stranger sends does harm."""

import asyncio
import gc
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from certificates import tls_files
from frame_connection import TIMEOUT_S, Connection, connected, search
from small_snapshot import VECTORS, D, N, build

from openbook import wire
from openbook.config import ClientTls, IndexServerSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Float32, Hits, RetrievalSettings
from openbook.errors import PortInUse, ShardUnavailable
from openbook.index.client import client as client_module
from openbook.index.client.client import IndexClient, channel_credentials
from openbook.index.client.stream import FrameStream, GrpcStream
from openbook.index.connection import HEADER, KEY_BYTES
from openbook.index.server.server import IndexServer
from openbook.index.shard import engine
from openbook.v1 import index_pb2


async def found_by(client: IndexClient, queries: Float32, k: int, snapshot_id: str = "") -> tuple[Hits, int]:
    return await client.search(queries, RetrievalSettings(k=k), snapshot_id, Context(), TIMEOUT_S)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def server(snapshot: Path) -> Iterator[IndexServer]:
    with IndexServer(IndexServerSettings(snapshot=snapshot, max_rows=8)) as server:
        yield server


@pytest.fixture(autouse=True, params=["TCP", "Unix"])
def over(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How connections are made, those of clients too."""
    monkeypatch.setattr(Connection, "over", request.param)
    if request.param == "TCP":  # as if the server were on another machine
        monkeypatch.setattr("openbook.index.client.stream.connect_here", lambda name: None)
    return str(request.param)


def test_numbers_beside_the_message_and_in_it_are_the_same_question(server: IndexServer) -> None:
    data = VECTORS[:2].tobytes()
    with connected(server) as connection:
        assert connection.reply() == index_pb2.Reply()
        connection.send(search(1, 2), data)
        connection.send(search(2, 2, data=data))
        replies = [connection.reply() for _ in range(2)]
    expected = server.shard.search(VECTORS[:2], 3, Deadline.never())
    for number, reply in enumerate(replies, 1):
        assert reply is not None
        assert reply.number == number
        hits = wire.hits_from_wire(reply.search)
        np.testing.assert_array_equal(hits.ids, expected.ids)
        np.testing.assert_array_equal(hits.scores, expected.scores)


def test_what_is_wrong_with_a_call_is_told_and_the_connection_goes_on(server: IndexServer) -> None:
    with connected(server) as connection:
        connection.reply()
        connection.send(search(1, 2), bytes(16))
        connection.send(index_pb2.Call(number=2))
        connection.send(search(3), VECTORS[:1].tobytes())
        replies = [connection.reply() for _ in range(3)]
    assert [reply.failure.code for reply in replies if reply] == ["INVALID_ARGUMENT", "INVALID_ARGUMENT", ""]
    assert replies[0] is not None
    assert replies[0].failure.message == "matrix of 2 x 4 float32 must have 32 bytes, got 16"


def test_what_is_no_call_ends_the_connection_and_says_why(server: IndexServer) -> None:
    limit = server._max_bytes
    for sent, message in [
        (HEADER.pack(limit, 1), f"a call must have at most {limit} bytes, got {limit + 1}"),
        (HEADER.pack(3, 0) + b"\xff\xff\xff", "3 bytes are no call"),
    ]:
        with connected(server) as connection:
            connection.reply()
            connection.socket.sendall(sent)
            reply = connection.reply()
            assert reply is not None
            assert (reply.number, reply.failure.code, reply.failure.message) == (0, "INVALID_ARGUMENT", message)
            assert connection.reply() is None


def test_who_does_not_know_the_key_hears_nothing(server: IndexServer) -> None:
    for key in (bytes(16), b"GET / HTTP/1.1\r\n"):
        with connected(server, key) as connection:
            assert connection.reply() is None


def test_half_a_call_and_a_vanished_client_leave_nothing_behind(server: IndexServer) -> None:
    for _ in range(10):
        with connected(server) as connection:
            connection.reply()
            with engine._Turn(Deadline.never(), 0):
                connection.send(search(1), VECTORS[:1].tobytes())
                connection.socket.sendall(HEADER.pack(100, 0) + b"half")
                connection.socket.shutdown(socket.SHUT_RDWR)
    threads = list(server._frames._connections.values()) if server._frames else []
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert server._frames is not None
    assert not server._frames._connections
    assert not server._service._streams


def test_replies_that_nobody_takes_hold_up_no_other_connection(snapshot: Path) -> None:
    """More of them than the buffers between the two hold, so that one is sent in part and the others wait."""
    with IndexServer(IndexServerSettings(snapshot=snapshot, max_queued_rows=1 << 20)) as server:
        check_slow_reader(server)


def check_slow_reader(server: IndexServer) -> None:
    data, n_calls = VECTORS[np.zeros(8, int)].tobytes(), 20_000
    call = index_pb2.Call(search=index_pb2.SearchRequest(queries={"rows": 8, "columns": D}, k=N))
    with connected(server) as slow, connected(server) as other:
        slow.reply()
        other.reply()
        slow.socket.settimeout(0.2)
        n_sent = 0
        try:
            for number in range(1, n_calls):
                call.number = number
                slow.send(call, data)
                n_sent = number
        except TimeoutError:  # the server reads no more of them until their replies are taken
            pass
        other.send(search(1), VECTORS[:1].tobytes())
        reply = other.reply()
        assert reply is not None
        assert reply.search.rows == 1
        assert 0 < n_sent < n_calls
        slow.socket.settimeout(TIMEOUT_S)
        replies = [slow.reply() for _ in range(n_sent)]
    expected = server.shard.search(VECTORS[np.zeros(8, int)], N, Deadline.never())
    for answered in replies:
        assert answered is not None
        np.testing.assert_array_equal(wire.hits_from_wire(answered.search).ids, expected.ids)
    assert sorted(answered.number for answered in replies if answered) == list(range(1, n_sent + 1))


def test_one_connection_too_many_is_told_so(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openbook.index.server.streams.IDLE_S", math.inf)
    settings = IndexServerSettings(snapshot=snapshot, max_streams=1)
    with IndexServer(settings) as server, connected(server) as first:
        assert first.reply() == index_pb2.Reply()
        with connected(server) as second:
            reply = second.reply()
            assert reply is not None
            assert (reply.failure.code, reply.failure.message) == ("RESOURCE_EXHAUSTED", "at most 1 streams at once")
            assert second.reply() is None


def test_a_server_that_stops_answers_what_it_began(snapshot: Path) -> None:
    with IndexServer(IndexServerSettings(snapshot=snapshot)) as server, connected(server) as connection:
        connection.reply()
        connection.send(search(1), VECTORS[:1].tobytes())
        assert connection.reply() is not None
        server.stop()
        assert connection.reply() is None


def test_what_was_answered_is_sent_before_the_end(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the thread that searched has not come to it."""
    answered, stopped = threading.Event(), threading.Event()

    def finish(*later: object) -> None:
        if later:
            answered.set()
            assert stopped.wait(TIMEOUT_S)

    monkeypatch.setattr("openbook.index.server.coalesce.finish", finish)
    with IndexServer(IndexServerSettings(snapshot=snapshot)) as server, connected(server) as connection:
        connection.reply()
        connection.send(search(1), VECTORS[:1].tobytes())
        assert answered.wait(TIMEOUT_S)
        server.stop()
        assert connection.reply() is not None
        assert connection.reply() is None
        stopped.set()


def test_a_port_that_is_taken_is_named(snapshot: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = IndexServer(IndexServerSettings(snapshot=snapshot, frame_port=port))
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}: another process listens here"):
            server.start()
        server.stop()


def test_a_connection_that_cannot_be_made_leaves_no_error_that_nobody_asked_for() -> None:
    told: list[dict[str, Any]] = []

    async def scenario() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, about: told.append(about))
        with socket.socket() as bound:  # and does not listen
            bound.bind(("127.0.0.1", 0))
            frames = index_pb2.Frames(port=bound.getsockname()[1], key=bytes(KEY_BYTES))
            with pytest.raises(ShardUnavailable, match="cannot be reached"):
                await FrameStream.open("127.0.0.1:7000", frames, 10.0)
        gc.collect()

    asyncio.run(scenario())
    assert not told


def test_a_client_goes_on_with_grpc_where_there_is_nothing_else(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls, client_tls = tls_files(tmp_path)
    encrypted = IndexServerSettings(snapshot=snapshot, tls=tls), client_tls
    without = IndexServerSettings(snapshot=snapshot, frame_port=None), None
    unreachable = IndexServerSettings(snapshot=snapshot), None

    async def refused(*_: object) -> FrameStream:
        raise ShardUnavailable("cannot be reached")

    async def ask(server: IndexServer, tls: ClientTls | None) -> None:
        client = IndexClient(server.address, channel_credentials(tls))
        for _ in range(3):
            hits, _ = await found_by(client, VECTORS[:1], 3)
            assert hits.ids.shape == (1, 3)
            if client._hurrying is not None:
                await client._hurrying
        assert type(client._stream) is GrpcStream
        await client.close()

    for settings, client_tls in (encrypted, without):
        with IndexServer(settings) as server:
            assert server._service.frames is None
            asyncio.run(ask(server, client_tls))
    monkeypatch.setattr(FrameStream, "open", refused)
    with IndexServer(unreachable[0]) as server:
        asyncio.run(ask(server, None))


def test_that_there_is_nothing_but_grpc_is_told_once_and_that_it_is_over(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "HURRY_AGAIN_S", 0.0)
    caplog.set_level(logging.INFO, client_module.__name__)

    async def refused(*_: object) -> FrameStream:
        raise ShardUnavailable("cannot be reached")

    async def scenario(address: str) -> None:
        client = IndexClient(address)

        async def ask() -> None:
            await found_by(client, VECTORS[:1], 3)
            if client._hurrying is not None:
                await client._hurrying

        with monkeypatch.context() as patch:
            patch.setattr(FrameStream, "open", refused)
            for _ in range(3):
                await ask()
        await ask()
        assert type(client._stream) is FrameStream
        await client.close()

    with IndexServer(IndexServerSettings(snapshot=snapshot)) as server:
        asyncio.run(scenario(server.address))
    told = [each.getMessage() for each in caplog.records if each.name == client_module.__name__]
    assert [each.partition(": ")[2] for each in told] == [
        "going on with gRPC: cannot be reached",
        "going on without gRPC again",
    ]


def test_where_unix_sockets_are_forbidden_there_is_tcp(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = socket.socket

    def forbidden(family: int = socket.AF_INET, *args: object) -> socket.socket:
        if family == socket.AF_UNIX:
            raise PermissionError("Address family not supported")
        return make(family, *args)  # type: ignore[arg-type]

    monkeypatch.setattr("openbook.index.connection.socket.socket", forbidden)
    server = IndexServer(IndexServerSettings(snapshot=snapshot))
    with server:
        assert server._service.frames is not None
        assert server._service.frames.name == ""
        assert server._service.frames.port


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_calls_of_all_sizes_in_either_event_loop(
    server: IndexServer, loop: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture, over: str
) -> None:
    """Ray Serve's replicas run in uvloop."""

    async def scenario() -> None:
        client = IndexClient(server.address)
        await client.fetch([0], "", False, Context(), TIMEOUT_S)
        assert client._hurrying is not None
        await client._hurrying
        assert type(client._stream) is FrameStream
        assert client._stream._transport is not None
        family = client._stream._transport.get_extra_info("socket").family
        assert family == (socket.AF_INET if over == "TCP" else socket.AF_UNIX)
        calls = [found_by(client, VECTORS[: 1 + i % 8], 1 + i % N) for i in range(200)]
        for i, (hits, _) in enumerate(await asyncio.gather(*calls)):
            expected = server.shard.search(VECTORS[: 1 + i % 8], 1 + i % N, Deadline.never())
            np.testing.assert_array_equal(hits.ids, expected.ids)
        await client.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())
    # gRPC has one poller for all event loops, which finds those of earlier tests closed.
    assert not [record for record in caplog.records if "PollerCompletionQueue" not in record.getMessage()]


def test_a_client_finds_a_server_that_came_back_with_another_port_and_key(snapshot: Path) -> None:
    async def scenario() -> None:
        server = IndexServer(IndexServerSettings(snapshot=snapshot))
        server.start()
        client = IndexClient(server.address)
        await found_by(client, VECTORS[:1], 3)
        assert client._hurrying is not None
        await client._hurrying
        assert type(client._stream) is FrameStream
        await asyncio.to_thread(server.stop)
        again = IndexServer(IndexServerSettings(snapshot=snapshot, port=server.port))
        again.start()
        with suppress(ShardUnavailable):  # if it has not noticed yet
            await found_by(client, VECTORS[:1], 3)
        hits, _ = await found_by(client, VECTORS[:1], 3)
        assert hits.ids.shape == (1, 3)
        await client.close()
        await asyncio.to_thread(again.stop)

    asyncio.run(scenario())
