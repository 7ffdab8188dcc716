"""Index servers move while they are asked: a list is followed, and no question fails for it."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import tls_files
from prometheus_client import REGISTRY
from small_snapshot import VECTORS, D, N, build
from typer.testing import CliRunner

from openbook.cli import app
from openbook.config import IndexClientSettings, IndexServerSettings
from openbook.core.context import Context
from openbook.core.space import Space
from openbook.core.types import Hits, RetrievalSettings
from openbook.errors import ShardUnavailable
from openbook.index.client import discovery, opening
from openbook.index.client.publish import held_by_servers
from openbook.index.client.sharded import ShardedIndex
from openbook.index.server.server import IndexServer

TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (discovery.FileSource, discovery.DnsSource):
        monkeypatch.setattr(kind, "every_s", 0.01)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built"), n_shards=2)


@pytest.fixture
def start(snapshot: Path) -> Iterator[Callable[[int], IndexServer]]:
    with ExitStack() as stack:
        yield lambda shard: stack.enter_context(IndexServer(IndexServerSettings(snapshot=snapshot, shard=shard)))


class Lines:
    """The file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *servers: IndexServer) -> None:
        new = self.path.with_suffix(".new")
        new.write_text("".join(f"{server.address}\n" for server in servers))
        new.replace(self.path)


@asynccontextmanager
async def asked(lines: Lines) -> AsyncIterator[ShardedIndex]:
    """The tier that the file lists."""
    index = ShardedIndex.of(IndexClientSettings(discover=f"file:{lines.path}", timeout_s=TIMEOUT_S))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield index
    finally:
        await index.close()


async def search(index: ShardedIndex) -> Hits:
    return await index.search(VECTORS[:3], RetrievalSettings(k=5), Context())


async def until(index: ShardedIndex, *servers: IndexServer) -> Hits:
    """Ask until these and no others are listed and answer; no question may fail on the way."""
    while True:
        hits = await search(index)
        if set(index.addresses) == {server.address for server in servers} and all(up for _, up in index.servers()):
            return hits


def broken() -> float:
    return REGISTRY.get_sample_value("openbook_index_list_errors_total") or 0.0


def test_servers_move_join_and_leave_while_they_are_asked(start: Callable[[int], IndexServer], tmp_path: Path) -> None:
    lines, first = Lines(tmp_path / "servers"), [start(0), start(1)]
    lines.write(*first)

    async def run() -> None:
        async with asked(lines) as index:
            await index.connect()
            expected = await search(index)

            replicas = [*first, start(0), start(1)]
            lines.write(*replicas)
            await until(index, *replicas)

            lines.write(*replicas[2:])  # the first ones go, and only then they end
            await until(index, *replicas[2:])
            for server in first:
                server.stop()
            assert sorted(shard for shard, _ in index.servers()) == ["0", "1"]

            elsewhere = [start(0), replicas[3]]
            lines.write(*elsewhere)
            hits = await until(index, *elsewhere)
            np.testing.assert_array_equal(hits.ids, expected.ids)
            np.testing.assert_array_equal(hits.scores, expected.scores)

    asyncio.run(run())


def test_a_server_of_another_shard_comes_to_an_address_that_is_known(snapshot: Path) -> None:
    """Of the same snapshot, whose passages it would count twice, and miss others."""

    def server(shard: int, address: str = ":0") -> IndexServer:
        port = int(address.rpartition(":")[2])
        return IndexServer(IndexServerSettings(snapshot=snapshot, shard=shard, port=port))

    async def run() -> None:
        with server(0) as first, server(1) as other:
            addresses = first.address, other.address
            index = ShardedIndex(addresses, TIMEOUT_S)
            await index.connect()
            expected = await search(index)
        with server(1, addresses[0]), server(0, addresses[1]):
            np.testing.assert_array_equal((await search(index)).ids, expected.ids)
        with server(0, addresses[0]), server(1, addresses[1]):
            passages = await index.fetch([0, N - 1], expected.snapshot_id, Context())
            assert [passage.id for passage in passages] == [0, N - 1]
        none = pytest.raises(ShardUnavailable, match="no server holds shard 0")
        with server(1, addresses[0]), server(1, addresses[1]), none:
            await search(index)
        await index.close()

    asyncio.run(run())


def test_all_servers_move_at_any_moment_of_a_question(start: Callable[[int], IndexServer], tmp_path: Path) -> None:
    lines, servers = Lines(tmp_path / "servers"), [[start(0), start(1)] for _ in range(2)]
    lines.write(*servers[0])

    async def run() -> None:
        async with asked(lines) as index:
            await index.connect()
            expected = await search(index)
            ids = expected.ids[0].tolist()
            passages = await index.fetch(ids, expected.snapshot_id, Context())
            for n_ticks in range(24):
                here, there = (
                    [server.address for server in each] for each in (servers[n_ticks % 2], servers[n_ticks % 2 - 1])
                )
                searched = asyncio.create_task(search(index))
                fetched = asyncio.create_task(index.fetch(ids, expected.snapshot_id, Context()))
                for _ in range(n_ticks):
                    await asyncio.sleep(0)
                index._changed(discovery.Change(joined=tuple(there), left=tuple(here)))
                np.testing.assert_array_equal((await searched).scores, expected.scores)
                assert await fetched == passages

    asyncio.run(run())


def test_a_list_that_breaks_changes_nothing_until_it_is_whole_again(
    start: Callable[[int], IndexServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines, servers = Lines(tmp_path / "servers"), [start(0), start(1)]
    lines.write(*servers)

    async def run() -> None:
        async with asked(lines) as index:
            await index.connect()
            for problem, spoil in (
                ("it names no server", lambda: lines.write()),
                ("line 1 must be host:port", lambda: lines.path.write_text("10.0.0.")),
                ("cannot be read", lines.path.unlink),
            ):
                before = broken()
                spoil()
                while broken() < before + 2:
                    await search(index)
                assert problem in caplog.messages[-1]
                assert set(index.addresses) == {server.address for server in servers}
            moved = [start(0), servers[1]]
            lines.write(*moved)
            await until(index, *moved)

    asyncio.run(run())


def test_a_file_that_is_not_there_yet_is_read_once_it_is(start: Callable[[int], IndexServer], tmp_path: Path) -> None:
    lines = Lines(tmp_path / "servers")

    async def run() -> None:
        async with asked(lines) as index:
            with pytest.raises(ShardUnavailable, match="the list of index servers cannot be read"):
                await index.connect()
            lines.write(start(0), start(1))
            while True:
                try:
                    await index.connect()
                    break
                except ShardUnavailable:
                    await asyncio.sleep(0)
            await search(index)

    asyncio.run(run())


def test_servers_found_by_name_show_the_certificate_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **options: Any) -> Any:
        return resolve("127.0.0.1" if host == "index.test" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    tls, trusted = tls_files(tmp_path, "index.test")
    with IndexServer(IndexServerSettings(snapshot=build(tmp_path / "one"), tls=tls)) as server:
        port = server.address.rpartition(":")[2]
        settings = IndexClientSettings(discover=f"dns://index.test:{port}", tls=trusted, timeout_s=TIMEOUT_S)

        async def run() -> None:
            index = ShardedIndex.of(settings)
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    await index.connect()  # at 127.0.0.1, whose name stands in no certificate
                    await search(index)
            finally:
                await index.close()

        asyncio.run(run())
        rows = asyncio.run(held_by_servers(settings))
        assert [row.state for row in rows] == ["current"]


def test_a_container_can_ask_its_server_whether_it_serves(tmp_path: Path) -> None:
    tls, trusted = tls_files(tmp_path, "index.test")
    environment = {"OPENBOOK_INDEX__TLS": f"{{ca: {trusted.ca}}}", "OPENBOOK_INDEX__SERVER_NAME": "index.test"}
    with IndexServer(IndexServerSettings(snapshot=build(tmp_path), tls=tls)) as server:
        check = ["index", "check", server.address]
        assert CliRunner().invoke(app, check, env=environment).exit_code == 0
        plain = CliRunner().invoke(app, check)
        assert isinstance(plain.exception, ShardUnavailable), "it speaks TLS alone"
    assert isinstance(CliRunner().invoke(app, check, env=environment).exception, ShardUnavailable)


def test_the_endpoint_waits_at_its_start_for_a_server_of_each_shard_if_it_may(
    start: Callable[[int], IndexServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(opening, "POLL_S", 0.01)
    lines = Lines(tmp_path / "servers")
    lines.write(start(0))

    async def opened(wait_s: float, min_coverage: float = 1.0) -> int:
        settings = IndexClientSettings(discover=f"file:{lines.path}", timeout_s=TIMEOUT_S, wait_s=wait_s)
        index = await opening.open_index(settings, Space("the encoder", "fingerprint", D), None, min_coverage)
        await index.close()
        return index.n_passages

    async def waited() -> int:
        task = asyncio.create_task(opened(TIMEOUT_S))
        while not any("waiting for the index tier: " in each for each in caplog.messages):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        lines.write(start(0), start(1))
        return await task

    with pytest.raises(ShardUnavailable):
        asyncio.run(opened(0.0))
    assert asyncio.run(opened(0.0, min_coverage=0.5)) == N, "it may lack half of them"
    assert asyncio.run(waited()) == N
