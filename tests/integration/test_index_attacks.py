"""Clients that idle, flood, do not read, or go: others are served meanwhile, and nothing is left of them."""

import asyncio
import gc
import logging
import math
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from time import monotonic, sleep
from traceback import format_stack
from typing import Any

import grpc
import numpy as np
import pytest
from certificates import tls_files
from frame_connection import TIMEOUT_S, Connection, connected, search
from grpc_health.v1 import health_pb2, health_pb2_grpc
from small_snapshot import VECTORS, D, N, build

from openbook import wire
from openbook.config import IndexServerSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Passage, RetrievalSettings
from openbook.index.building.build import build_snapshot
from openbook.index.client.client import IndexClient, channel_credentials
from openbook.index.server import frames
from openbook.index.server.server import IndexServer
from openbook.index.server.threads import PART_IDS, CallThreads
from openbook.index.shard import engine
from openbook.v1 import index_pb2, index_pb2_grpc

SERVICE = "/openbook.v1.IndexService"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SOON_S = 10.0  # for what takes milliseconds, and before an attack was met took for ever


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built"))


def wait_until(holds: Callable[[], object]) -> None:
    give_up = monotonic() + SOON_S
    while not holds():
        assert monotonic() < give_up
        sleep(0.005)


# Idle calls


@pytest.fixture(params=["plain", "tls"])
def settings(request: pytest.FixtureRequest, snapshot: Path, tmp_path: Path) -> tuple[IndexServerSettings, Any]:
    """And the credentials of clients."""
    if request.param == "plain":
        return IndexServerSettings(snapshot=snapshot, max_streams=2), None
    server, client = tls_files(tmp_path)
    return IndexServerSettings(snapshot=snapshot, max_streams=2, tls=server), channel_credentials(client)()


def channel_to(server: IndexServer, credentials: Any) -> grpc.Channel:
    options = (("grpc.use_local_subchannel_pool", 1),)
    if credentials is None:
        return grpc.insecure_channel(server.address, options)
    return grpc.secure_channel(server.address, credentials, options)


@contextmanager
def idle_calls(server: IndexServer, credentials: Any, n: int) -> Iterator[list[Any]]:
    """Calls, a third of each kind, whose messages never come, and which are with the server as far as it takes them."""
    over = Event()

    def nothing() -> Iterator[bytes]:
        over.wait()
        yield from ()

    with channel_to(server, credentials) as channel:
        calls = []
        for i in range(n):
            method = (f"{SERVICE}/Search", f"{SERVICE}/Info", REFLECTION)[i % 3]
            calls.append(channel.stream_stream(method)(nothing()))
        state = server._server._state  # type: ignore[attr-defined]
        wait_until(lambda: state.active_rpc_count >= min(n, server._workers._max_workers))
        yield calls
        over.set()


def check_calls(channel: grpc.Channel) -> None:
    """Every kind of call is answered."""
    stub, health = index_pb2_grpc.IndexServiceStub(channel), health_pb2_grpc.HealthStub(channel)
    assert stub.Info(index_pb2.InfoRequest(), timeout=SOON_S).n_passages == N
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=SOON_S).status == 1
    request = index_pb2.SearchRequest(queries=wire.matrix_to_wire(VECTORS[:1]), k=3)
    assert stub.Search(request, timeout=SOON_S).rows == 1
    assert len(stub.Fetch(index_pb2.FetchRequest(ids=[1, 2]), timeout=SOON_S).passages) == 2
    calls: SimpleQueue[index_pb2.Call | None] = SimpleQueue()
    calls.put(index_pb2.Call(number=1, search=request))
    replies = stub.Exchange(iter(calls.get, None), timeout=SOON_S)
    assert next(replies).search.rows == 1
    calls.put(None)


def workers() -> int:
    return sum(thread.name.startswith("index_") for thread in threading.enumerate())


def test_idle_calls_silence_nobody(settings: tuple[IndexServerSettings, Any]) -> None:
    limits, credentials = settings
    with IndexServer(limits) as server:
        n_before = workers()
        with idle_calls(server, credentials, 90), channel_to(server, credentials) as channel:
            for _ in range(3):
                check_calls(channel)
        assert workers() == n_before


def test_who_says_nothing_is_cancelled_after_a_while(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openbook.index.server.server.DRAIN_INTERVAL_S", 0.01)
    monkeypatch.setattr("openbook.index.server.server.PATIENCE_S", 0.05, raising=False)
    with IndexServer(IndexServerSettings(snapshot=snapshot)) as server, idle_calls(server, None, 6) as calls:
        wait_until(lambda: all(call.done() for call in calls))
        assert {call.code() for call in calls} == {grpc.StatusCode.CANCELLED}


def test_a_server_stops_at_once_though_calls_idle(snapshot: Path) -> None:
    server = IndexServer(IndexServerSettings(snapshot=snapshot))
    server.start()
    with idle_calls(server, None, 6):
        stops_soon(server)


def test_a_server_stops_though_a_call_that_came_before_begins_to_wait_later(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping, cancelled = threading.Event(), threading.Event()
    cancel, wait = CallThreads.cancel_waiting, CallThreads.waiting

    def cancel_waiting(threads: CallThreads, since: float) -> None:
        cancel(threads, since)
        if stopping.is_set():
            cancelled.set()

    def waiting(threads: CallThreads, call: object, context: grpc.ServicerContext) -> Any:
        cancelled.wait()
        return wait(threads, call, context)

    monkeypatch.setattr(CallThreads, "cancel_waiting", cancel_waiting)
    monkeypatch.setattr(CallThreads, "waiting", waiting)
    server = IndexServer(IndexServerSettings(snapshot=snapshot))
    server.start()
    with idle_calls(server, None, 1):
        stopping.set()
        stops_soon(server)


def stops_soon(server: IndexServer) -> None:
    stopping = threading.Thread(target=server.stop, args=(TIMEOUT_S,))
    stopping.start()
    stopping.join(TIMEOUT_S / 2)
    assert not stopping.is_alive(), "\n".join(map("".join, map(format_stack, sys._current_frames().values())))


def test_what_is_no_message_or_none_is_one_call_and_watching_is_not_served(snapshot: Path) -> None:
    with IndexServer(IndexServerSettings(snapshot=snapshot)) as server, channel_to(server, None) as channel:
        for messages, code in (([], "UNIMPLEMENTED"), ([b"\xff"], "INTERNAL")):
            for method in (f"{SERVICE}/Info", f"{SERVICE}/Search"):
                with pytest.raises(grpc.RpcError) as caught:
                    channel.stream_unary(method)(iter(messages), timeout=SOON_S)
                assert caught.value.code().name == code
        with pytest.raises(grpc.RpcError) as caught:
            next(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=SOON_S))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        check_calls(channel)


# Newcomers and idle connections


@pytest.fixture
def unix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose buffers are small."""
    monkeypatch.setattr(Connection, "over", "Unix")


def is_served(server: IndexServer) -> bool:
    with connected(server) as connection:
        connection.socket.settimeout(SOON_S)
        connection.reply()
        connection.send(search(1), VECTORS[:1].tobytes())
        reply = connection.reply()
        return reply is not None and reply.search.rows == 1


def ends(connection: socket.socket, timeout_s: float = SOON_S) -> bool:
    """Whether the server ends it in time."""
    connection.settimeout(timeout_s)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True
    except (TimeoutError, BlockingIOError):
        return False


def test_newcomers_get_no_threads_and_the_oldest_goes(snapshot: Path) -> None:
    with IndexServer(IndexServerSettings(snapshot=snapshot)) as server, ExitStack() as stack:
        n_before = threading.active_count()
        frames_of = server._service.frames
        assert frames_of is not None
        newcomers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", frames_of.port), timeout=SOON_S))
            for _ in range(140)
        ]
        assert all(ends(newcomer) for newcomer in newcomers[:12])
        assert threading.active_count() == n_before
        assert not ends(newcomers[-1], 0.0)
        assert is_served(server)


def test_the_time_of_a_newcomer_is_for_the_whole_key(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "GREETING_S", 0.2)
    with IndexServer(IndexServerSettings(snapshot=snapshot)) as server, connected(server, key=b"") as newcomer:
        frames_of = server._service.frames
        assert frames_of is not None

        def ended(byte: int) -> bool:
            newcomer.socket.sendall(bytes([byte]))
            return ends(newcomer.socket, 0.05)

        assert any(map(ended, frames_of.key[:-1]))


@pytest.mark.parametrize("name", ["frames", "exchange"])
def test_a_thread_that_cannot_be_started_costs_one_connection(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start, refused = threading.Thread.start, Event()

    def start_unless(thread: threading.Thread) -> None:
        if thread.name == name and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    with IndexServer(IndexServerSettings(snapshot=snapshot)) as server:
        monkeypatch.setattr(threading.Thread, "start", start_unless)
        with connected(server) as connection:
            connection.socket.settimeout(SOON_S)
            while connection.reply() is not None:  # what it is told
                pass
        assert refused.is_set()
        assert is_served(server)
        wait_until(lambda: not server._service._streams)


def test_idle_connections_make_room_and_busy_ones_do_not(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openbook.index.server.streams.IDLE_S", 0.0, raising=False)
    server = IndexServer(IndexServerSettings(snapshot=snapshot, max_streams=2))
    with server, connected(server) as first, connected(server) as second:
        assert first.reply() is not None
        assert second.reply() is not None
        first.send(search(1), VECTORS[:1].tobytes())
        assert first.reply() is not None
        with connected(server) as third:
            assert third.reply() == index_pb2.Reply()
            assert ends(second.socket)
            with engine._Turn(Deadline.never(), 0):
                for connection in (first, third):
                    connection.send(search(1), VECTORS[:1].tobytes())
                wait_until(lambda: all(stream._unfinished for stream in server._service._streams))
                with connected(server) as fourth:
                    reply = fourth.reply()
                    assert reply is not None
                    assert reply.failure.code == "RESOURCE_EXHAUSTED"
            for connection in (first, third):
                answer = connection.reply()
                assert answer is not None
                assert answer.search.rows == 1


@pytest.mark.parametrize("frame_port", [None, 0])
def test_a_client_whose_stream_made_room_sees_no_failure(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, frame_port: int | None
) -> None:
    monkeypatch.setattr("openbook.index.server.streams.IDLE_S", 0.0, raising=False)

    async def scenario(server: IndexServer) -> None:
        clients = [IndexClient(server.address) for _ in range(5)]
        for i in range(50):
            client = clients[i % 5]
            hits, _ = await client.search(VECTORS[:1], RetrievalSettings(k=3), "", Context(), TIMEOUT_S)
            assert hits.ids.shape == (1, 3)
            # The client may have its reply before the server knows that it is sent, and its stream idle.
            while any(stream.idle_since == math.inf for stream in list(server._service._streams)):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        for client in clients:
            await client.close()

    with IndexServer(IndexServerSettings(snapshot=snapshot, max_streams=2, frame_port=frame_port)) as server:
        asyncio.run(scenario(server))


def test_a_call_whose_connection_breaks_is_asked_once_more(snapshot: Path) -> None:
    async def scenario(server: IndexServer) -> None:
        client = IndexClient(server.address)
        await client.fetch([0], "", False, Context(), TIMEOUT_S)
        assert client._hurrying is not None
        await client._hurrying
        assert server._frames is not None
        with engine._Turn(Deadline.never(), 0):
            searching = client.search(VECTORS[:1], RetrievalSettings(k=3), "", Context(), TIMEOUT_S)
            call = asyncio.create_task(searching)
            while not any(stream._unfinished for stream in list(server._service._streams)):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            for connection in list(server._frames._connections):
                connection.shutdown(socket.SHUT_RDWR)
        hits, _ = await call
        assert hits.ids.shape == (1, 3)
        await client.close()

    with IndexServer(IndexServerSettings(snapshot=snapshot)) as server:
        asyncio.run(scenario(server))


# What is left of who has gone


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What goes then, goes at once; pytest keeps what is logged."""
    logging.disable(logging.ERROR)
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


def flood(server: IndexServer, connection: Connection, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """So many calls that their replies fill all buffers, then some that fail, and never read."""
    large = index_pb2.Call(search=index_pb2.SearchRequest(queries={"rows": 8, "columns": D}, k=N))
    for large.number in range(1, 300):
        connection.send(large, VECTORS[:8].tobytes())
    (stream,) = server._service._streams
    wait_until(lambda: len(stream._unfinished) > 10 and not len(server._searches._queue))
    for method in ("search_checked", "fetch"):
        monkeypatch.setattr(server.shard, method, fail)
    for number in range(1000, 1020):
        call = search(number)
        if kind == "fetched":
            call = index_pb2.Call(number=number, fetch=index_pb2.FetchRequest(ids=[1]))
        elif kind == "invalid":
            call.search.k = 0
        connection.send(call, b"" if kind == "fetched" else VECTORS[:1].tobytes())
    wait_until(lambda: 1019 in stream._unfinished)
    wait_until(lambda: not len(server._searches._queue) and not server._searches._under_way)


def fail(*_: object) -> None:
    raise ZeroDivisionError


@pytest.mark.usefixtures("unix", "no_collector")
@pytest.mark.parametrize("kind", ["invalid", "searched", "fetched"])
def test_nothing_is_left_of_who_does_not_read_and_goes(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    with IndexServer(IndexServerSettings(snapshot=snapshot)) as server:
        with connected(server) as connection:
            flood(server, connection, monkeypatch, kind)
            stream = weakref.ref(next(iter(server._service._streams)))
        wait_until(lambda: stream() is None)


@pytest.mark.usefixtures("no_collector")
def test_nothing_is_left_of_a_stream_of_grpc_that_breaks(snapshot: Path) -> None:
    with IndexServer(IndexServerSettings(snapshot=snapshot)) as server:
        calls: SimpleQueue[index_pb2.Call | None] = SimpleQueue()
        with channel_to(server, None) as channel:
            replies = index_pb2_grpc.IndexServiceStub(channel).Exchange(iter(calls.get, None))
            bad = search(1)
            bad.search.k = 0
            calls.put(bad)
            assert next(replies).failure.code == "INVALID_ARGUMENT"
            stream = weakref.ref(next(iter(server._service._streams)))
        calls.put(None)
        wait_until(lambda: stream() is None)


@pytest.mark.usefixtures("unix")
def test_who_does_not_read_large_replies_is_read_no_more(snapshot: Path) -> None:
    """Of some megabytes, not of some thousand replies."""
    n_rows, n_calls = 1024, 120  # half a megabyte each
    call = index_pb2.Call(search=index_pb2.SearchRequest(queries={"rows": n_rows, "columns": D}, k=N))
    data = VECTORS[np.zeros(n_rows, int)].tobytes()
    server = IndexServer(IndexServerSettings(snapshot=snapshot, max_queued_rows=1 << 20))
    with server, connected(server) as slow:
        slow.reply()
        slow.socket.settimeout(0.5)
        n_sent = 0
        with suppress(TimeoutError):
            for call.number in range(1, n_calls):
                slow.send(call, data)
                n_sent = call.number
        assert n_sent * n_rows * N * 12 < 32 << 20
        assert is_served(server)
        slow.socket.settimeout(TIMEOUT_S)
        numbers = []
        for _ in range(n_sent):
            reply = slow.reply()
            assert reply is not None
            assert reply.search.rows == n_rows
            numbers.append(reply.number)
        assert sorted(numbers) == list(range(1, n_sent + 1))


@pytest.mark.usefixtures("unix")
def test_who_does_not_read_holds_his_place_only_for_a_while(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """His threads go with it: they do not add up."""
    monkeypatch.setattr(frames, "SEND_S", 3.0)
    monkeypatch.setattr("openbook.index.server.streams.IDLE_S", 0.0)
    call = index_pb2.Call(search=index_pb2.SearchRequest(queries={"rows": 1024, "columns": D}, k=N))
    data = VECTORS[np.zeros(1024, int)].tobytes()
    server = IndexServer(IndexServerSettings(snapshot=snapshot, max_streams=2))
    with server, ExitStack() as stack:
        for _ in range(2):
            unread = stack.enter_context(connected(server))
            for call.number in range(1, 20):
                unread.send(call, data)
        for stream in list(server._service._streams):
            wait_until(lambda stream=stream: math.isinf(stream.idle_since))  # type: ignore[misc]
        with connected(server) as third:
            reply = third.reply()
            assert reply is not None
            assert reply.failure.code == "RESOURCE_EXHAUSTED", "nobody's place is given away while he holds threads"
        wait_until(lambda: not server._service._streams)
        wait_until(lambda: not any(thread.name in ("frames", "exchange") for thread in threading.enumerate()))
        assert is_served(server)


@contextmanager
def unread_exchanges(server: IndexServer, n: int) -> Iterator[None]:
    """Streams of one connection of gRPC's, whose replies fill all buffers and are not read."""
    request = index_pb2.SearchRequest(queries=wire.matrix_to_wire(VECTORS[np.zeros(1024, int)]), k=N)
    queues = [SimpleQueue[index_pb2.Call | None]() for _ in range(n)]
    with channel_to(server, None) as channel:
        replies = [index_pb2_grpc.IndexServiceStub(channel).Exchange(iter(calls.get, None)) for calls in queues]
        for calls in queues:
            for number in range(1, 20):
                calls.put(index_pb2.Call(number=number, search=request))
        yield
        del replies
    for calls in queues:
        calls.put(None)


def test_who_does_not_read_over_grpc_holds_his_place_only_for_a_while(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openbook.index.server.server.SEND_S", 0.5, raising=False)
    server = IndexServer(IndexServerSettings(snapshot=snapshot, max_streams=2, max_queued_rows=1 << 20))
    with server, unread_exchanges(server, 2):
        wait_until(lambda: len(server._service._streams) == 2)
        wait_until(lambda: not server._service._streams)
        wait_until(lambda: not any(thread.name == "exchange" for thread in threading.enumerate()))
        assert is_served(server)


def test_who_does_not_read_over_grpc_leaves_a_place_to_others(snapshot: Path) -> None:
    server = IndexServer(IndexServerSettings(snapshot=snapshot, max_streams=2, max_queued_rows=1 << 20))
    with server, unread_exchanges(server, 2):
        wait_until(lambda: len(server._service._streams) == 2)
        wait_until(lambda: all(math.isinf(stream.idle_since) for stream in list(server._service._streams)))
        assert is_served(server)


# Who asks for much


def test_fetches_of_one_who_asks_for_many_keep_nobody_waiting(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []
    may_go = threading.Semaphore(0)

    def fetch(ids: list[int]) -> list[Passage]:
        may_go.acquire()
        fetched.append(ids[0])
        return []

    server = IndexServer(IndexServerSettings(snapshot=snapshot))
    with server, connected(server) as many, connected(server) as other:
        monkeypatch.setattr(server.shard, "fetch", fetch)
        for number in range(1, 101):
            many.send(index_pb2.Call(number=number, fetch=index_pb2.FetchRequest(ids=[0])))
        other.reply()
        wait_until(lambda: max(len(stream._unfinished) for stream in server._service._streams) == 100)
        other.send(index_pb2.Call(number=1, fetch=index_pb2.FetchRequest(ids=[1])))
        wait_until(lambda: min(len(stream._unfinished) for stream in server._service._streams) == 1)
        may_go.release(200)
        assert other.reply() is not None
        wait_until(lambda: len(fetched) == 101)
    assert fetched.index(1) <= 8  # as many as are under way, and those that they may overtake


def test_a_fetch_by_lasting_ids_is_done_in_parts(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    with IndexServer(IndexServerSettings(snapshot=snapshot)) as server, channel_to(server, None) as channel:

        def find(lasting_ids: list[str]) -> list[Passage]:
            sizes.append(len(lasting_ids))
            return []

        monkeypatch.setattr(server.shard, "find", find)
        asked = index_pb2.FetchRequest(lasting_ids=["0" * 32] * 500, ids=range(N), with_vectors=True)
        found = index_pb2_grpc.IndexServiceStub(channel).Fetch(asked, timeout=SOON_S)
    assert (sum(sizes), max(sizes)) == (500, PART_IDS)
    assert [passage.id for passage in found.passages] == list(range(N))
    np.testing.assert_array_equal(wire.matrix_from_wire(found.vectors), VECTORS)
    assert found.snapshot_id == server.shard.manifest.snapshot_id


def test_nobody_searches_more_widely_than_the_server_allows(tmp_path: Path) -> None:
    passages = [Passage(i, "", "", "") for i in range(N)]
    build_snapshot(passages, VECTORS, tmp_path / "s", 1, "SQ8", "encoder", "fingerprint")
    with IndexServer(IndexServerSettings(snapshot=tmp_path / "s")) as server, channel_to(server, None) as channel:
        stub = index_pb2_grpc.IndexServiceStub(channel)
        request = index_pb2.SearchRequest(queries=wire.matrix_to_wire(VECTORS[:1]), k=1)
        request.parameters.rerank_factor = 256
        assert stub.Search(request, timeout=SOON_S).rows == 1
        request.parameters.rerank_factor = 257
        with pytest.raises(grpc.RpcError, match="rerank_factor must be at most 256, 64 times as built"):
            stub.Search(request, timeout=SOON_S)


def test_who_calls_without_end_leaves_threads_to_others(snapshot: Path) -> None:
    request = index_pb2.SearchRequest(queries=wire.matrix_to_wire(VECTORS[:1]), k=3)
    server = IndexServer(IndexServerSettings(snapshot=snapshot, max_streams=8))
    with server, channel_to(server, None) as many, channel_to(server, None) as other:
        with engine._Turn(Deadline.never(), 0):
            search = index_pb2_grpc.IndexServiceStub(many).Search.future  # type: ignore[attr-defined]
            calls = [search(request, timeout=TIMEOUT_S) for _ in range(90)]
            wait_until(lambda: server._server._state.active_rpc_count >= 8)  # type: ignore[attr-defined]
            stub = index_pb2_grpc.IndexServiceStub(other)
            for _ in range(3):
                assert stub.Info(index_pb2.InfoRequest(), timeout=SOON_S).n_passages == N
            one = stub.Search.future(request, timeout=TIMEOUT_S)  # type: ignore[attr-defined]
        assert one.result().rows == 1
        codes = [call.code() for call in calls]
    assert {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED} <= set(codes)


def test_searches_of_one_who_pipelines_keep_nobody_waiting_and_nobody_else_is_refused(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[int] = []
    search_checked = None
    server = IndexServer(IndexServerSettings(snapshot=snapshot, max_queued_rows=512))
    with server, connected(server) as many, connected(server) as other:
        search_checked = server.shard.search_checked

        def noted(queries: Any, *arguments: Any) -> Any:
            searched.append(len(queries))
            return search_checked(queries, *arguments)

        monkeypatch.setattr(server.shard, "search_checked", noted)
        for connection in (many, other):
            connection.reply()
            connection.send(search(1), VECTORS[:1].tobytes())
            assert connection.reply() is not None
        searched.clear()
        data = VECTORS[np.zeros(256, int)].tobytes()
        with engine._Turn(Deadline.never(), 0):
            for number in range(1, 21):
                many.send(search(number, 256), data)
            many.send(index_pb2.Call(number=99, fetch=index_pb2.FetchRequest(ids=[1])))
            while (reply := many.reply()) is not None and reply.number != 99:  # by then all were read
                assert reply.failure.code == "RESOURCE_EXHAUSTED"
            other.send(search(2), VECTORS[:1].tobytes())
            wait_until(lambda: all(stream._unfinished for stream in server._service._streams))
        answer = other.reply()
        assert answer is not None
        assert answer.search.rows == 1
        replies = [many.reply() for _ in range(2)]
    assert searched[:3].count(1) == 1
    assert max(searched) <= 64
    assert len([reply for reply in replies if reply is not None and reply.search.rows == 256]) >= 1


@pytest.mark.usefixtures("no_collector")
def test_nothing_is_left_of_calls_that_were_answered_or_cancelled(snapshot: Path) -> None:
    def contexts() -> int:
        return sum(type(each).__name__ == "_Context" for each in gc.get_objects())

    with IndexServer(IndexServerSettings(snapshot=snapshot, max_streams=2)) as server:
        before = contexts()
        with channel_to(server, None) as channel:
            check_calls(channel)
        with idle_calls(server, None, 60):
            pass
        wait_until(lambda: contexts() == before)
