"""Publishing to real servers: everywhere or nowhere, again after a crash, and back."""

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from typer.testing import CliRunner

from openbook.cli import app
from openbook.config import ClientTls, IndexClientSettings, IndexServerSettings, ServerTls
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Coverage, Passage, RetrievalSettings
from openbook.errors import InvalidSnapshot, OpenbookError, ShardUnavailable, SnapshotMismatch
from openbook.index.building.build import build_snapshot
from openbook.index.client.publish import held_by_one, held_by_root, held_by_servers, publish, sequence_for, waves
from openbook.index.client.sharded import ShardedIndex
from openbook.index.disk.root import Root
from openbook.index.server.server import IndexServer
from openbook.v1.index_pb2 import HeldSnapshot, InfoResponse

N, D = 40, 4
VECTORS = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)


def build(out: Path, sign: int = 1, n_shards: int = 2) -> str:
    passages = [Passage(i, f"doc-{i}", f"title {i}", f"{out.name} {i}") for i in range(N)]
    return build_snapshot(passages, sign * VECTORS, out, n_shards, "Flat", "encoder", "fingerprint").snapshot_id


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With snapshots old, which is current, and new."""
    folder = tmp_path / "root"
    build(folder / "old")
    build(folder / "new", -1)
    Root.create(folder, folder / "old")
    return folder


@pytest.fixture
def servers(root: Path) -> Iterator[list[IndexServer]]:
    """Two shards, two servers each."""
    with ExitStack() as stack:
        settings = [IndexServerSettings(snapshot=root, shard=shard, retain_s=3600) for shard in (0, 0, 1, 1)]
        yield [stack.enter_context(IndexServer(each)) for each in settings]


def settings_of(servers: Sequence[IndexServer]) -> IndexClientSettings:
    return IndexClientSettings(addresses=tuple(server.address for server in servers), timeout_s=60)


@contextmanager
def altered(root: Path) -> Iterator[None]:
    """A file of shard 1 of the snapshot new."""
    path, kept = root / "new" / "shard-0001" / "passages.bin", root.parent / "kept"
    path.rename(kept)  # a server may have mapped it
    path.write_bytes(kept.read_bytes()[:-1] + b"?")
    yield
    kept.replace(path)


def states(servers: Sequence[IndexServer], root: Path) -> list[str]:
    """What each server holds, by the names of the folders."""
    names = {row.snapshot_id: row.where for row in held_by_root(root)}
    rows = asyncio.run(held_by_servers(settings_of(servers)))
    return [
        ", ".join(f"{row.state} {names[row.snapshot_id]} {row.sequence}" for row in rows if row.where == server.address)
        for server in servers
    ]


def test_publishing_and_rolling_back(servers: list[IndexServer], root: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    settings = settings_of(servers)
    assert asyncio.run(publish(root / "new", settings, on_progress=lambda *step: steps.append(step))) == 2
    prepared = [("prepare", n, 4) for n in (0, 2, 4)]  # one server of each shard at a time
    assert steps == prepared + [("publish", n, 4) for n in range(5)]
    assert states(servers, root) == ["current new 2, former old 1"] * 4
    assert asyncio.run(publish(root / "new", settings)) == 2  # nothing is left to do
    assert asyncio.run(publish(root / "old", settings)) == 3
    assert states(servers, root) == ["current old 3, former new 2"] * 4


def test_what_is_said_of_a_snapshot_is_said_by_any_server_that_holds_it(servers: list[IndexServer], root: Path) -> None:
    servers[0].stop(grace_s=0)
    settings, current = settings_of(servers), build_id(root / "old")
    with pytest.raises(ShardUnavailable, match=servers[0].address):
        asyncio.run(held_by_servers(settings))
    row = asyncio.run(held_by_one(settings, current))
    assert (row.where, row.state, row.snapshot_id) == (servers[1].address, "current", current)
    with pytest.raises(SnapshotMismatch, match="no index server that answers holds snapshot gone"):
        asyncio.run(held_by_one(settings, "gone"))


def test_a_client_follows_and_mixes_nothing(servers: list[IndexServer], root: Path) -> None:
    settings = settings_of(servers)

    async def scenario() -> None:
        tier = ShardedIndex.of(settings)
        for name in ("new", "old", "new"):
            before = await tier.search(VECTORS[:1], RetrievalSettings(k=N), Context(Deadline.after(60)))
            assert await publish(root / name, settings) > 1
            hits = await tier.search(VECTORS[:1], RetrievalSettings(k=N), Context(Deadline.after(60)))
            seen = hits.snapshot_id
            assert seen != before.snapshot_id
            assert hits.coverage == Coverage(N, N)
            np.testing.assert_array_equal(hits.ids, before.ids[:, ::-1])
            assert (await tier.fetch([39], seen, Context(Deadline.after(60))))[0].text == f"{name} 39"
            assert (await tier.fetch([39], before.snapshot_id, Context(Deadline.after(60))))[0].text != f"{name} 39"
        await tier.close()

    asyncio.run(scenario())


def test_a_client_gives_passages_of_what_another_one_heard_of_first(servers: list[IndexServer], root: Path) -> None:
    """Whoever searched was told where they lie; this one has not searched since."""
    settings = settings_of(servers)

    async def scenario() -> None:
        tiers = [ShardedIndex.of(settings) for _ in range(2)]
        for tier in tiers:
            await tier.search(VECTORS[:1], RetrievalSettings(k=N), Context(Deadline.after(60)))
        await publish(root / "new", settings)
        new = build_id(root / "new")
        assert (await tiers[0].fetch([39], new, Context(Deadline.after(60))))[0].text == "new 39"
        assert (await tiers[1].locate("39", new, Context(Deadline.after(60)))).snapshot_id == new
        with pytest.raises(SnapshotMismatch, match="asked for no such"):
            await tiers[0].fetch([39], "no such", Context(Deadline.after(60)))
        for tier in tiers:
            await tier.close()

    asyncio.run(scenario())


def test_a_client_that_slept_through_it_searches_again(root: Path) -> None:
    with ExitStack() as stack:
        settings = [IndexServerSettings(snapshot=root, shard=shard, retain_s=0) for shard in (0, 1)]
        servers = [stack.enter_context(IndexServer(each)) for each in settings]

        async def scenario() -> None:
            tier = ShardedIndex.of(settings_of(servers))
            before = await tier.search(VECTORS[:1], RetrievalSettings(k=3), Context(Deadline.after(60)))
            await publish(root / "new", settings_of(servers))
            for server in servers:
                server.held.drain()
            after = await tier.search(VECTORS[:1], RetrievalSettings(k=3), Context(Deadline.after(60)))
            assert after.snapshot_id != before.snapshot_id
            with pytest.raises(SnapshotMismatch, match=before.snapshot_id):
                await tier.fetch([1], before.snapshot_id, Context(Deadline.after(60)))
            await tier.close()

        asyncio.run(scenario())


def test_one_refusal_stops_it_everywhere(servers: list[IndexServer], root: Path) -> None:
    why = rf"{servers[2].address}: .*passages\.bin: was altered"
    with altered(root), pytest.raises(SnapshotMismatch, match=why) as caught:
        asyncio.run(publish(root / "new", settings_of(servers)))
    assert servers[0].address not in str(caught.value)
    assert states(servers, root) == ["current old 1"] * 4
    assert Root(root).read().prepared is None


@pytest.mark.parametrize("last", [0, 3])
def test_interrupted_while_a_server_prepares_it_is_nowhere(
    last: int, servers: list[IndexServer], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        loop, publishing = asyncio.get_running_loop(), servers[last]._publishing
        prepare = publishing.prepare

        def prepare_in_vain(*asked: Any) -> None:
            prepare(*asked)
            loop.call_soon_threadsafe(publication.cancel)

        monkeypatch.setattr(publishing, "prepare", prepare_in_vain)
        publication = asyncio.create_task(publish(root / "new", settings_of(servers)))
        await publication

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scenario())
    assert states(servers, root) == ["current old 1"] * 4
    assert Root(root).read().prepared is None


def test_a_server_that_is_down_stops_it_everywhere(servers: list[IndexServer], root: Path) -> None:
    def meanwhile(step: str, n_done: int, n_servers: int) -> None:
        if (step, n_done) == ("prepare", n_servers):
            servers[3].stop(grace_s=0)

    for _ in ("it goes", "it is gone"):
        with pytest.raises(ShardUnavailable, match=servers[3].address):
            asyncio.run(publish(root / "new", settings_of(servers), on_progress=meanwhile))
        assert states(servers[:3], root) == ["current old 1"] * 3
    with pytest.raises(ShardUnavailable, match=f"shard 1 of 2 has no server among {servers[0].address}"):
        asyncio.run(publish(root / "new", settings_of(servers[:1])))


def test_a_server_that_refuses_at_the_end_is_named_and_it_is_completed_when_run_again(
    servers: list[IndexServer], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*asked: Any) -> None:
        raise InvalidSnapshot("no room for the record")

    with monkeypatch.context() as full:
        full.setattr(servers[3]._publishing, "publish", refuse)
        why = f"^{servers[3].address}: no room for the record; publish it again to complete it$"
        with pytest.raises(SnapshotMismatch, match=why):
            asyncio.run(publish(root / "new", settings_of(servers)))
    assert asyncio.run(publish(root / "new", settings_of(servers))) == 2
    assert states(servers, root) == ["current new 2, former old 1"] * 4


def test_it_is_completed_when_run_again(servers: list[IndexServer], root: Path) -> None:
    """The coordinator died when one of four servers had published, and another had not even prepared it."""
    new_id = build_id(root / "new")
    for server in servers[:3]:
        server._publishing.prepare(root / "new", new_id, Deadline.never())
    servers[0]._publishing.publish(new_id, 2, Deadline.never())

    async def search() -> str:
        tier = ShardedIndex.of(settings_of(servers))
        try:
            return (await tier.search(VECTORS[:1], RetrievalSettings(k=3), Context(Deadline.after(60)))).snapshot_id
        finally:
            await tier.close()

    assert asyncio.run(search()) == new_id  # all shards can serve it
    with altered(root), pytest.raises(SnapshotMismatch, match=f"{servers[3].address}: .*was altered"):
        asyncio.run(publish(root / "new", settings_of(servers)))
    assert asyncio.run(search()) == new_id  # still
    assert asyncio.run(publish(root / "new", settings_of(servers))) == 2
    assert states(servers, root) == ["current new 2, former old 1"] * 4


def build_id(folder: Path) -> str:
    return next(row.snapshot_id for row in held_by_root(folder.parent) if row.where == folder.name)


def test_one_replica_of_each_shard_is_prepared_at_a_time() -> None:
    assert waves([0, 0, 1, 1]) == [[0, 2], [1, 3]]
    assert waves([1, 0, 0, 0]) == [[0, 1], [2], [3]]
    assert waves([]) == []


def test_the_next_sequence() -> None:
    def info(*held: tuple[str, int]) -> InfoResponse:
        return InfoResponse(held=[HeldSnapshot(snapshot_id=name, sequence=sequence) for name, sequence in held])

    assert sequence_for("new", [info(("old", 1)), info(("old", 1), ("new", 0))]) == 2
    assert sequence_for("new", [info(("old", 1)), info(("new", 2))]) == 2
    assert sequence_for("old", [info(("old", 1)), info(("new", 2), ("old", 1))]) == 3
    assert sequence_for("new", [info(("old", 1)), info(("new", 1))]) == 2  # they began separately


def test_servers_that_began_with_different_snapshots_come_together(root: Path) -> None:
    with ExitStack() as stack:
        folders = [(name, shard) for name in ("old", "new") for shard in (0, 1)]
        settings = [IndexServerSettings(snapshot=root / name, shard=shard, retain_s=3600) for name, shard in folders]
        servers = [stack.enter_context(IndexServer(each)) for each in settings]
        assert asyncio.run(publish(root / "new", settings_of(servers))) == 2
        assert states(servers, root)[2:] == ["current new 2"] * 2
        assert {server.held.current_id for server in servers} == {build_id(root / "new")}


def test_what_was_published_while_a_snapshot_was_prepared_counts(servers: list[IndexServer], root: Path) -> None:
    def meanwhile(step: str, n_done: int, n_servers: int) -> None:
        if (step, n_done) == ("prepare", n_servers):
            for server in servers:
                server._publishing.publish(build_id(root / "old"), 7, Deadline.never())

    assert asyncio.run(publish(root / "new", settings_of(servers), on_progress=meanwhile)) == 8
    assert states(servers, root) == ["current new 8, former old 7"] * 4


def test_a_server_that_lost_what_it_had_prepared_stops_it_everywhere(servers: list[IndexServer], root: Path) -> None:
    new_id = build_id(root / "new")

    def meanwhile(step: str, n_done: int, n_servers: int) -> None:
        if (step, n_done) == ("prepare", n_servers):  # as after a restart
            servers[1].held.discard(new_id)

    with pytest.raises(SnapshotMismatch, match=f"{servers[1].address}: does not hold snapshot {new_id} any") as caught:
        asyncio.run(publish(root / "new", settings_of(servers), on_progress=meanwhile))
    assert servers[0].address not in str(caught.value)
    assert states(servers, root) == ["current old 1"] * 4
    assert asyncio.run(publish(root / "new", settings_of(servers))) == 2


def listed(path: Path, *addresses: str) -> IndexClientSettings:
    """Whom a file lists, from now on."""
    path.write_text("\n".join(addresses))
    return IndexClientSettings(discover=f"file:{path}", timeout_s=60)


def test_a_server_that_joins_the_list_meanwhile_has_it_too(
    servers: list[IndexServer], root: Path, tmp_path: Path
) -> None:
    lines, known = tmp_path / "servers", [server.address for server in servers]
    with IndexServer(IndexServerSettings(snapshot=root / "old", shard=0)) as late:

        def meanwhile(step: str, n_done: int, n_servers: int) -> None:
            if (step, n_done) == ("prepare", n_servers):
                listed(lines, *known[1:], late.address)  # one has left

        assert asyncio.run(publish(root / "new", listed(lines, *known), on_progress=meanwhile)) == 2
        assert states([*servers, late], root)[:4] == ["current new 2, former old 1"] * 4
        assert late.held.current_id == build_id(root / "new")


def test_a_server_that_joins_the_list_and_cannot_have_it_is_named(
    servers: list[IndexServer], root: Path, tmp_path: Path
) -> None:
    lines, known = tmp_path / "servers", [server.address for server in servers]

    def meanwhile(step: str, n_done: int, n_servers: int) -> None:
        if (step, n_done) == ("publish", n_servers):
            listed(lines, *known, "127.0.0.1:1")

    with pytest.raises(
        ShardUnavailable, match=rf"127\.0\.0\.1:1.*; it is current at {', '.join(sorted(known))}: publish"
    ):
        asyncio.run(publish(root / "new", listed(lines, *known), on_progress=meanwhile))
    assert states(servers, root) == ["current new 2, former old 1"] * 4


def test_a_list_that_cannot_be_read_afterwards_makes_nothing_undone(
    servers: list[IndexServer], root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = tmp_path / "servers"

    def meanwhile(step: str, n_done: int, n_servers: int) -> None:
        if (step, n_done) == ("publish", n_servers):
            lines.unlink()

    settings = listed(lines, *(server.address for server in servers))
    assert asyncio.run(publish(root / "new", settings, on_progress=meanwhile)) == 2
    assert "whether a server has joined meanwhile cannot be told" in caplog.text


def test_tls_and_the_admin_token(root: Path, tmp_path: Path) -> None:
    ca = trustme.CA()
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "server", "server_key", "client", "client_key")}
    ca.cert_pem.write_to_path(files["ca"])
    for name in ("server", "client"):
        certificate = ca.issue_cert("localhost")
        certificate.private_key_pem.write_to_path(files[f"{name}_key"])
        certificate.cert_chain_pems[0].write_to_path(files[name])
    tls = ServerTls(certificate=files["server"], key=files["server_key"], client_ca=files["ca"])
    token = "a token of the administrator"
    ours = ClientTls(ca=files["ca"], certificate=files["client"], key=files["client_key"])
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                IndexServer(
                    IndexServerSettings(snapshot=root, shard=shard, host="localhost", tls=tls, admin_token=token)
                )
            )
            for shard in (0, 1)
        ]

        async def found(tls: ClientTls | None) -> Coverage:
            tier = ShardedIndex([server.address for server in servers], 60, tls=tls)
            try:
                return (await tier.search(VECTORS[:1], RetrievalSettings(k=3), Context(Deadline.after(60)))).coverage
            finally:
                await tier.close()

        assert asyncio.run(found(ours)) == Coverage(N, N)
        for theirs in (None, ClientTls(ca=files["ca"])):
            with pytest.raises(ShardUnavailable):
                asyncio.run(found(theirs))
        addresses = tuple(server.address for server in servers)
        with pytest.raises(OpenbookError, match=f"{addresses[0]}: the admin token is missing.*{addresses[1]}"):
            asyncio.run(publish(root / "new", IndexClientSettings(addresses=addresses, tls=ours)))
        settings = IndexClientSettings(addresses=addresses, tls=ours, admin_token=token)
        with altered(root), pytest.raises(SnapshotMismatch, match="was altered"):
            asyncio.run(publish(root / "new", settings))
        assert Root(root).read().prepared is None
        assert asyncio.run(publish(root / "new", settings)) == 2


def test_the_commands(servers: list[IndexServer], root: Path) -> None:
    addresses = [server.address for server in servers]
    result = CliRunner().invoke(app, ["publish", str(root / "new"), *(f"--index={address}" for address in addresses)])
    assert result.exit_code == 0, result.output
    assert "current at all servers, publication 2" in result.output
    shutil.copytree(root / "old", root / "copy")
    (root / "copy" / "manifest.json").write_text("{")
    listed = {row.where: row for row in held_by_root(root)}
    assert [listed[name].state for name in ("new", "old")] == ["current", "former"]
    assert listed["copy"].state.startswith("damaged: ")
    snapshot = [str(root / "new")]
    for where, state in (([str(root)], "current"), (addresses, "current"), (snapshot, "not served")):
        result = CliRunner().invoke(app, ["snapshots", *where], env={"COLUMNS": "80"})
        assert result.exit_code == 0, result.output
        assert listed["new"].snapshot_id[:12] in result.output
        assert state in result.output


def test_a_folder_that_is_no_snapshot(servers: list[IndexServer], root: Path) -> None:
    with pytest.raises(InvalidSnapshot, match="not a snapshot"):
        asyncio.run(publish(root, settings_of(servers)))
    assert states(servers, root) == ["current old 1"] * 4
