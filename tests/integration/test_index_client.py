"""One client of one real server: many calls on a stream, and what becomes of those that nobody wants any more."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from grpc import ChannelConnectivity
from small_snapshot import VECTORS, N, build

from openbook.config import IndexClientSettings, IndexServerSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Float32, Hits, RetrievalSettings
from openbook.errors import InvalidRequest, OpenbookError, ShardUnavailable, SnapshotMismatch
from openbook.index.client.client import IndexClient
from openbook.index.client.publish import held_by_servers
from openbook.index.client.sharded import ShardedIndex
from openbook.index.client.stream import FrameStream, GrpcStream
from openbook.index.server.server import IndexServer
from openbook.index.shard import engine

TIMEOUT_S = 60.0


async def search(client: IndexClient, queries: Float32, k: int, snapshot_id: str = "") -> tuple[Hits, int]:
    return await client.search(queries, RetrievalSettings(k=k), snapshot_id, Context(), TIMEOUT_S)


@pytest.fixture(scope="module", params=["gRPC", "TCP", "Unix"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexServer]:
    out = build(tmp_path_factory.mktemp("built"))
    frame_port = None if request.param == "gRPC" else 0
    with IndexServer(IndexServerSettings(snapshot=out, frame_port=frame_port)) as server:
        if request.param == "TCP" and server._service.frames:  # as from another machine, where nobody has this name
            server._service.frames.name = "openbook-elsewhere"
        yield server


async def settled(client: IndexClient, server: IndexServer) -> None:
    """Returns when calls go where they will go from then on."""
    kind = GrpcStream if server._frames is None else FrameStream
    async with asyncio.timeout(TIMEOUT_S):
        await client.fetch([0], "", False, Context(), TIMEOUT_S)
        while client._hurrying is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert type(client._stream) is kind


async def arrived(server: IndexServer, n: int) -> None:
    """Returns when so many calls wait at the server, on one stream."""
    async with asyncio.timeout(TIMEOUT_S):
        while [len(s._unfinished) for s in list(server._service._streams) if s._unfinished] != [n]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def check(server: IndexServer, scenario: Callable[[IndexClient], Awaitable[None]]) -> None:
    async def run() -> None:
        client = IndexClient(server.address)
        await settled(client, server)
        await scenario(client)
        hits, current = await search(client, VECTORS[:1], 3)  # whatever happened, it goes on
        assert hits.ids.shape == (1, 3)
        assert current == server.held.sequence
        await client.close()

    asyncio.run(run())


def test_many_calls_at_once_and_each_gets_its_own_answer(server: IndexServer) -> None:
    async def scenario(client: IndexClient) -> None:
        calls = [search(client, VECTORS[i : i + 1], 1 + i % 3) for i in range(N)]
        for i, (hits, _) in enumerate(await asyncio.gather(*calls)):
            theirs = server.shard.search(VECTORS[i : i + 1], 1 + i % 3, Deadline.never())
            np.testing.assert_array_equal(hits.ids, theirs.ids)
        fetches = [client.fetch([i, N - 1 - i], "", True, Context(), TIMEOUT_S) for i in range(N)]
        for i, (passages, vectors) in enumerate(await asyncio.gather(*fetches)):
            assert [passage.id for passage in passages] == [i, N - 1 - i]
            np.testing.assert_array_equal(vectors, VECTORS[[i, N - 1 - i]])

    check(server, scenario)


def test_errors_come_as_ours_and_fail_one_call(server: IndexServer) -> None:
    async def scenario(client: IndexClient) -> None:
        bad = (
            search(client, VECTORS[:1], 0),
            search(client, VECTORS[:1], 1, "other"),
        )
        good = search(client, VECTORS[:1], 1)
        invalid, mismatch, answer = await asyncio.gather(*bad, good, return_exceptions=True)
        assert isinstance(invalid, InvalidRequest)
        assert isinstance(mismatch, SnapshotMismatch)
        assert server.address in str(invalid)
        assert not isinstance(answer, BaseException)

    check(server, scenario)


def test_who_is_no_index_server_or_one_of_another_version_is_said_to_be() -> None:
    another = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{another.add_insecure_port('127.0.0.1:0')}"
    another.start()
    hint = r"is that an index server, or one of another version, or does a proxy refuse\?"
    with pytest.raises(OpenbookError, match=f"{address}: Method not found!; {hint}"):
        asyncio.run(held_by_servers(IndexClientSettings(addresses=(address,))))
    another.stop(None).wait()


def test_a_cancelled_call_is_let_go_of_by_the_server(server: IndexServer) -> None:
    async def scenario(client: IndexClient) -> None:
        with engine._Turn(Deadline.never(), 0):  # nobody is answered
            calls = [asyncio.create_task(search(client, VECTORS[:1], 3)) for _ in range(8)]
            await arrived(server, 8)
            for call in calls[4:]:
                call.cancel()
            await asyncio.gather(*calls[4:], return_exceptions=True)
            await arrived(server, 4)
        assert all(call.cancelled() for call in calls[4:])
        await asyncio.gather(*calls[:4])

    check(server, scenario)


def test_a_reset_fails_what_waits_and_nothing_after(server: IndexServer) -> None:
    async def scenario(client: IndexClient) -> None:
        with engine._Turn(Deadline.never(), 0):
            call = asyncio.create_task(search(client, VECTORS[:1], 3))
            await arrived(server, 1)
            await client.reset()
            with pytest.raises(ShardUnavailable, match="connection was closed"):
                await call

    check(server, scenario)


def test_a_reset_fails_whoever_asks_what_the_server_holds() -> None:
    async def scenario(address: str) -> None:
        client = IndexClient(address)
        asked = asyncio.create_task(client.info(TIMEOUT_S))
        cancelled = asyncio.create_task(client.info(TIMEOUT_S))
        async with asyncio.timeout(TIMEOUT_S):
            while client._channel.get_state() is not ChannelConnectivity.CONNECTING:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        cancelled.cancel()
        await client.reset()
        with pytest.raises(ShardUnavailable, match=f"{address}: the connection was closed"):
            await asked
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await client.close()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        asyncio.run(scenario(f"127.0.0.1:{silent.getsockname()[1]}"))


def test_who_searches_for_long_keeps_the_connection(server: IndexServer) -> None:
    async def scenario(client: IndexClient) -> None:
        before = client._stream
        with engine._Turn(Deadline.never(), 0):
            call = asyncio.create_task(search(client, VECTORS[:1], 3))
            await arrived(server, 1)
            await client.check_stream(TIMEOUT_S)
            assert not call.done()
        await call
        assert client._stream is before

    check(server, scenario)


@pytest.mark.parametrize("server", ["TCP", "Unix"], indirect=True)
def test_a_connection_that_opens_while_all_is_closed_is_closed_too(
    server: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = FrameStream.open
    opened: list[FrameStream] = []

    async def scenario() -> None:
        is_open, go_on = asyncio.Event(), asyncio.Event()

        async def open_(*asked: Any) -> FrameStream:
            stream = await really_open(*asked)
            opened.append(stream)
            is_open.set()
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                await stream.close()
                raise
            return stream

        monkeypatch.setattr(FrameStream, "open", open_)
        client = IndexClient(server.address)
        await search(client, VECTORS[:1], 3)
        await is_open.wait()
        go_on.set()
        await client.close()

    asyncio.run(scenario())
    assert [stream.was_closed for stream in opened] == [True]


def test_a_closed_tier_leaves_nothing_running(server: IndexServer) -> None:
    async def scenario() -> None:
        tier = ShardedIndex([server.address, "127.0.0.1:1"], timeout_s=TIMEOUT_S)
        await tier.search(VECTORS[:1], RetrievalSettings(k=3), Context(Deadline.after(60)))
        with engine._Turn(Deadline.never(), 0):
            call = asyncio.create_task(tier.search(VECTORS[:1], RetrievalSettings(k=3), Context(Deadline.after(60))))
            await arrived(server, 1)
            await tier.close()
            with pytest.raises(ShardUnavailable):
                await call
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:  # gRPC's own, which note the end of a call: they end by themselves
            _, running = await asyncio.wait(left, timeout=TIMEOUT_S)
            assert not running

    asyncio.run(scenario())


def test_a_request_id_stands_in_the_log_of_the_server(server: IndexServer, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(client: IndexClient) -> None:
        context = Context(request_id="mine")
        await client.search(VECTORS[:1], RetrievalSettings(k=3), "", context, TIMEOUT_S)
        with pytest.raises(InvalidRequest):
            await client.search(VECTORS[:1], RetrievalSettings(k=3, nprobe=1), "", context, TIMEOUT_S)

    with caplog.at_level("DEBUG", "openbook.index.server"):
        check(server, scenario)
    assert [each.levelname for each in caplog.records if "mine" in each.getMessage()] == ["DEBUG", "INFO"]
