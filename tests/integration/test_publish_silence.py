"""Publishing to servers that say nothing any more: scripted ones, behind real gRPC."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import grpc
import numpy as np
import pytest

from openbook.config import IndexClientSettings
from openbook.core.types import Passage
from openbook.errors import ShardUnavailable, SnapshotMismatch
from openbook.index.building.build import build_snapshot
from openbook.index.client import publish as publishing
from openbook.index.client.publish import publish
from openbook.processes import free_port
from openbook.v1 import index_pb2 as pb
from openbook.v1 import index_pb2_grpc as pb_grpc

N_REFUSED = 2 * publishing.N_SILENT
"""Looks at a server that prepares, before it is silent."""


class Scripted(pb_grpc.IndexServiceServicer, pb_grpc.IndexAdminServiceServicer):
    """Never ends what it is to prepare, to let go of or to fetch, unless it `refuses`, after it was `n_late` times; one
    that `hangs` does not even say how far it is.
    """

    def __init__(self, shard: int, port: int = 0) -> None:
        self.shard, self.refuses, self.n_late, self.hangs = shard, False, 0, False
        self.late_code = grpc.StatusCode.DEADLINE_EXCEEDED
        self.preparing, self.discarding, self.fetching, self.over = Event(), Event(), Event(), Event()
        self.n_looks = 0
        self._server = grpc.server(ThreadPoolExecutor(8))
        pb_grpc.add_IndexServiceServicer_to_server(self, self._server)
        pb_grpc.add_IndexAdminServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"

    def __enter__(self) -> "Scripted":
        self._server.start()
        return self

    def __exit__(self, *args: object) -> None:
        stopped = self._server.stop(None)  # of calls under way nothing more is said
        self.over.set()
        stopped.wait()

    def Info(self, request: pb.InfoRequest, context: grpc.ServicerContext) -> pb.InfoResponse:  # noqa: N802
        self.n_looks += self.preparing.is_set()
        if 1 < self.n_looks <= N_REFUSED + 1:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much to do")
        if self.n_looks > N_REFUSED + 1:
            self.over.wait()
        return pb.InfoResponse(shard=self.shard, snapshot_id="old")

    def Prepare(self, request: pb.PrepareRequest, context: grpc.ServicerContext) -> pb.InfoResponse:  # noqa: N802
        self.preparing.set()
        self.over.wait()
        return pb.InfoResponse()

    def Download(self, request: pb.DownloadRequest, context: grpc.ServicerContext) -> pb.DownloadResponse:  # noqa: N802
        self.fetching.set()
        if self.hangs:
            self.over.wait()
        if self.n_late:
            self.n_late -= 1
            context.abort(self.late_code, "nothing was heard of it in time")
        if self.refuses:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a file was altered")
        return pb.DownloadResponse(n_bytes=2, n_bytes_done=1)

    def Discard(self, request: pb.DiscardRequest, context: grpc.ServicerContext) -> pb.InfoResponse:  # noqa: N802
        self.discarding.set()
        self.over.wait()
        return pb.InfoResponse()


@pytest.fixture
def servers() -> Iterator[list[Scripted]]:
    """Of two shards."""
    with ExitStack() as stack:
        yield [stack.enter_context(Scripted(shard)) for shard in range(2)]


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    passages = [Passage(i, f"doc-{i}", f"title {i}", "text") for i in range(4)]
    build_snapshot(passages, np.eye(4, dtype=np.float32), tmp_path / "new", 2, "Flat", "encoder", "fingerprint")
    return tmp_path / "new"


def settings_of(servers: list[Scripted]) -> IndexClientSettings:
    return IndexClientSettings(addresses=tuple(server.address for server in servers))


def test_a_server_that_falls_silent_while_it_prepares_is_given_up(
    servers: list[Scripted], snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that takes long is waited for as long as it says something, were it that it has too much to do."""
    monkeypatch.setattr(publishing, "LOOK_S", 0.01)
    monkeypatch.setattr(publishing, "TIMEOUT_S", 0.5)
    with pytest.raises(ShardUnavailable, match=rf"{servers[0].address}: .* silent for 3 looks"):
        asyncio.run(publish(snapshot, settings_of(servers)))
    assert all(server.n_looks > N_REFUSED for server in servers)


def test_who_interrupts_it_twice_waits_for_no_server(servers: list[Scripted], snapshot: Path) -> None:
    async def scenario() -> None:
        publication = asyncio.create_task(publish(snapshot, settings_of(servers)))
        for now in ("preparing", "discarding"):
            for server in servers:
                assert await asyncio.to_thread(getattr(server, now).wait, 60)
            publication.cancel()
        await asyncio.wait({publication}, timeout=10)
        assert publication.cancelled()

    asyncio.run(scenario())


def test_where_one_cannot_fetch_it_the_others_are_not_waited_for(servers: list[Scripted], snapshot: Path) -> None:
    servers[1].refuses = True
    with pytest.raises(SnapshotMismatch, match=rf"{servers[1].address}: a file was altered; what the others fetch"):
        asyncio.run(publish(snapshot.as_uri(), settings_of(servers)))


def test_a_server_that_is_silent_for_a_while_does_not_end_what_it_fetches(
    servers: list[Scripted], snapshot: Path
) -> None:
    servers[1].refuses = True
    for n_late, why in ((publishing.N_SILENT - 1, "a file was altered"), (publishing.N_SILENT, "silent for 3 looks")):
        servers[1].n_late = n_late
        with pytest.raises((SnapshotMismatch, ShardUnavailable), match=rf"{servers[1].address}: .*{why}"):
            asyncio.run(publish(snapshot.as_uri(), settings_of(servers)))


def test_a_server_that_ends_while_it_is_asked_and_begins_anew_goes_on_with_what_it_fetches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing, "LOOK_S", 0.01)

    async def scenario() -> None:
        port = free_port()
        server = publishing._Server(f"127.0.0.1:{port}", None, IndexClientSettings())
        with Scripted(0, port) as former:
            former.hangs = True
            looks = asyncio.create_task(server.download("file:///new", "new"))
            assert await asyncio.to_thread(former.fetching.wait, 30)
        while (state := server.channel.get_state(try_to_connect=True)) != grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            await server.channel.wait_for_state_change(state)
        with Scripted(0, port):
            assert (await looks).n_bytes == 2
        await server.channel.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_where_a_proxy_has_no_server_for_long_its_own_words_are_told(
    servers: list[Scripted], snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "LOOK_S", 0.01)
    for server in servers:
        server.n_late, server.late_code = N_REFUSED, grpc.StatusCode.UNAVAILABLE
    with pytest.raises(ShardUnavailable, match="nothing was heard of it in time"):
        asyncio.run(publish(snapshot.as_uri(), settings_of(servers)))
