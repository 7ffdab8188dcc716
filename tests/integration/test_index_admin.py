"""Publishing on one server: what it refuses, that searches go on, and what a restart finds."""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import trustme
from pydantic import SecretStr

from openbook import wire
from openbook.config import IndexServerSettings, ServerTls
from openbook.core.deadline import Deadline
from openbook.core.types import Float32, Passage
from openbook.errors import DeadlineExceeded, InvalidConfig, InvalidSnapshot, ShardUnavailable
from openbook.index.building.build import build_snapshot
from openbook.index.disk.root import PUBLISHED, Published, Root
from openbook.index.disk.snapshot import Manifest
from openbook.index.server.server import IndexServer
from openbook.index.shard.shard import Shard
from openbook.processes import start
from openbook.testing import ManualClock
from openbook.v1 import index_pb2, index_pb2_grpc

N, D = 40, 4
VECTORS = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
TOKEN = "a token of some length"


def build(out: Path, vectors: Float32, n_shards: int = 2, fingerprint: str = "f", factory: str = "Flat") -> str:
    passages = [Passage(i, f"doc-{i}", f"title {i}", f"text {i}") for i in range(len(vectors))]
    return build_snapshot(passages, vectors, out, n_shards, factory, "encoder", fingerprint).snapshot_id


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Snapshots a, b, c that can follow each other, and some that cannot."""
    folder = tmp_path_factory.mktemp("built")
    for i, name in enumerate("abc"):
        build(folder / name, VECTORS * (i + 1))
    build(folder / "three-shards", VECTORS, n_shards=3)
    build(folder / "another-encoder", VECTORS, fingerprint="g")
    build(folder / "another-dimension", VECTORS[:, :3])
    shutil.copytree(folder / "b", folder / "damaged")
    path = folder / "damaged" / "shard-0000" / "vectors.npy"
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\0")
    return folder


def id_of(folder: Path) -> str:
    from openbook.index.disk.snapshot import Snapshot

    return Snapshot.open(folder).manifest.snapshot_id


class Admin:
    """The admin calls of one server."""

    def __init__(self, channel: grpc.Channel, token: str | None = None) -> None:
        self._stub = index_pb2_grpc.IndexAdminServiceStub(channel)
        self.index = index_pb2_grpc.IndexServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()

    def prepare(self, folder: Path, snapshot_id: str | None = None) -> index_pb2.InfoResponse:
        request = index_pb2.PrepareRequest(folder=str(folder), snapshot_id=snapshot_id or id_of(folder))
        return self._stub.Prepare(request, timeout=60, metadata=self._metadata)

    def publish(self, snapshot_id: str, sequence: int) -> index_pb2.InfoResponse:
        request = index_pb2.PublishRequest(snapshot_id=snapshot_id, sequence=sequence)
        return self._stub.Publish(request, timeout=60, metadata=self._metadata)

    def discard(self, snapshot_id: str) -> index_pb2.InfoResponse:
        request = index_pb2.DiscardRequest(snapshot_id=snapshot_id)
        return self._stub.Discard(request, timeout=60, metadata=self._metadata)

    def search(self, snapshot_id: str = "") -> index_pb2.SearchResponse:
        queries = wire.matrix_to_wire(VECTORS[:1])
        return self.index.Search(index_pb2.SearchRequest(queries=queries, k=1, snapshot_id=snapshot_id), timeout=60)


@pytest.fixture
def admin(built: Path, tmp_path: Path) -> Iterator[Admin]:
    """Of a server of a root that serves a."""
    Root.create(tmp_path / "root", built / "a")
    server = IndexServer(IndexServerSettings(snapshot=tmp_path / "root", retain_s=3600))
    with server, grpc.insecure_channel(server.address) as channel:
        yield Admin(channel)


def refusal(call: Any, *arguments: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments)
    error: Any = caught.value
    return error.code().name, error.details()


def held(info: index_pb2.InfoResponse) -> list[tuple[int, str]]:
    return [(each.sequence, each.snapshot_id) for each in info.held]


def test_a_publication_and_the_way_back(admin: Admin, built: Path) -> None:
    a, b = id_of(built / "a"), id_of(built / "b")
    for _ in range(2):
        assert held(admin.prepare(built / "b")) == [(1, a), (0, b)]
    assert (admin.search().snapshot_id, admin.search(b).snapshot_id) == (a, b)
    assert admin.search(b).current_snapshot_id == a
    for _ in range(2):
        info = admin.publish(b, 5)
        assert (held(info), info.snapshot_id) == ([(5, b), (1, a)], b)
    old, new = admin.search(a), admin.search()
    assert (old.snapshot_id, old.current_snapshot_id, new.snapshot_id) == (a, b, b)
    assert wire.hits_from_wire(new).scores[0, 0] == 2 * wire.hits_from_wire(old).scores[0, 0]
    assert held(admin.prepare(built / "a")) == [(5, b), (1, a)]
    assert held(admin.publish(a, 6)) == [(6, a), (5, b)]


@pytest.fixture
def verifying(monkeypatch: pytest.MonkeyPatch) -> "SimpleQueue[subprocess.Popen[str]]":
    """The processes that verify from now on, which do not end."""
    begun = SimpleQueue[subprocess.Popen[str]]()

    def slowly(command: list[str], **options: Any) -> "subprocess.Popen[str]":
        process = start([sys.executable, "-c", "import time; time.sleep(3600)"], **options)
        begun.put(process)
        return process

    monkeypatch.setattr("openbook.index.server.verify._APART_FROM", 0)
    monkeypatch.setattr("openbook.index.server.verify.start", slowly)
    return begun


def test_a_server_stops_while_it_verifies(built: Path, verifying: "SimpleQueue[subprocess.Popen[str]]") -> None:
    server = IndexServer(IndexServerSettings(snapshot=built / "a"))
    with server, ThreadPoolExecutor() as threads, grpc.insecure_channel(server.address) as channel:
        prepared = threads.submit(refusal, Admin(channel).prepare, built / "b")
        process = verifying.get(timeout=60)
        stopped = threading.Thread(target=server.stop, args=(0,), daemon=True)
        stopped.start()
        stopped.join(30)
        has_stopped = not stopped.is_alive()
        process.kill()
        assert has_stopped
        assert prepared.result()[0] in ("CANCELLED", "UNAVAILABLE")


def test_what_nobody_waits_for_any_more_is_not_verified_to_its_end(
    admin: Admin, built: Path, verifying: "SimpleQueue[subprocess.Popen[str]]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openbook.index.server.verify.LOOK_S", 0.01)
    call = admin._stub.Prepare.future(index_pb2.PrepareRequest(folder=str(built / "b"), snapshot_id="b"), timeout=60)
    process = verifying.get(timeout=60)
    call.cancel()
    try:
        process.wait(10)
    finally:
        process.kill()


@pytest.mark.parametrize(("waits", "n_opened"), [([False], 0), ([True, False], 1)])
def test_what_nobody_waits_for_any_more_is_neither_held_nor_on_record(
    waits: list[bool], n_opened: int, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He may have gone while another one was prepared, or while this one was."""
    record, looks, opened, opens = Root.create(tmp_path / "root", built / "a"), iter(waits), list[Path](), Shard.prewarm
    publishing = IndexServer(IndexServerSettings(snapshot=tmp_path / "root"))._publishing
    before = record.read()

    def prewarm(self: Shard) -> None:
        opened.append(self.folder)
        opens(self)

    monkeypatch.setattr(Shard, "prewarm", prewarm)
    with pytest.raises(DeadlineExceeded, match="nobody waits for it"):
        publishing.prepare(built / "b", id_of(built / "b"), Deadline.never(), lambda: next(looks))
    assert [shard.folder for _, shard in publishing.held.held()] == [built / "a"]
    assert record.read() == before
    assert opened == [built / "b"] * n_opened


def test_what_cannot_follow_is_refused_and_nothing_changes(admin: Admin, built: Path, tmp_path: Path) -> None:
    before = admin.index.Info(index_pb2.InfoRequest())
    record = (tmp_path / "root" / PUBLISHED).read_text()
    for folder, message in (
        ("three-shards", "shards must be 2, got 3"),
        ("another-encoder", "encoder fingerprint must be f, got g"),
        ("another-dimension", "dimension must be 4, got 3"),
        ("damaged", "vectors.npy: was altered"),
    ):
        code, details = refusal(admin.prepare, built / folder)
        assert code == "FAILED_PRECONDITION"
        assert message in details
    code, details = refusal(admin.prepare, built / "b", "other")
    assert (code, details.endswith("not other")) == ("FAILED_PRECONDITION", True)
    assert "not a snapshot" in refusal(admin.prepare, tmp_path, "any")[1]
    assert refusal(admin.publish, "other", 2)[0] == "FAILED_PRECONDITION"
    assert refusal(admin.discard, before.snapshot_id)[0] == "FAILED_PRECONDITION"
    assert admin.index.Info(index_pb2.InfoRequest()) == before
    assert (tmp_path / "root" / PUBLISHED).read_text() == record


def test_recall_below_what_is_configured_is_refused(built: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((2000, D)).astype(np.float32)
    for factory in ("IVF32,Flat", "PQ1x4fs"):
        build(tmp_path / factory, vectors, factory=factory)
    shutil.copytree(built / "b", tmp_path / "old")
    manifest = json.loads((tmp_path / "old" / "manifest.json").read_text())
    del manifest["recall"], manifest["search"]
    manifest["snapshot_id"] = Manifest.model_validate(manifest).content_id()  # as the first ones were
    (tmp_path / "old" / "manifest.json").write_text(json.dumps(manifest))
    server = IndexServer(IndexServerSettings(snapshot=built / "a", min_recall_at_10=0.9))
    with server, grpc.insecure_channel(server.address) as channel:
        admin = Admin(channel)
        good = admin.prepare(tmp_path / "IVF32,Flat").held[1]
        assert 0.9 < good.recall[10] <= 1
        assert (good.n_passages_total, sorted(good.recall)) == (2000, [1, 5, 10, 100])
        code, details = refusal(admin.prepare, tmp_path / "PQ1x4fs")
        assert code == "FAILED_PRECONDITION"
        assert "recall at 10 must be at least min_recall_at_10 = 0.9, found 0." in details
        assert "which was not measured" in refusal(admin.prepare, tmp_path / "old")[1]

    class OneLook(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            was_set = self.is_set()
            self.set()
            return was_set

    root = Root.create(tmp_path / "root", built / "a")
    server = IndexServer(IndexServerSettings(snapshot=tmp_path / "root", min_recall_at_10=0.9))
    root.update(lambda published: published.after_publish(str(tmp_path / "old"), 2))
    server._publishing.follow(OneLook())
    assert server.shard.folder == built / "a", "others may ask for less"
    server.stop(0)


def test_what_cannot_be_put_on_record_is_not_served(admin: Admin, built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a restart would go back."""

    def full(*_: object) -> None:
        raise ShardUnavailable("published.json: cannot be written")

    a, b = id_of(built / "a"), id_of(built / "b")
    admin.prepare(built / "b")
    monkeypatch.setattr(Root, "update", full)
    assert refusal(admin.publish, b, 2) == ("UNAVAILABLE", "published.json: cannot be written")
    assert held(admin.index.Info(index_pb2.InfoRequest())) == [(1, a), (0, b)]


def test_a_discarded_snapshot_is_gone(admin: Admin, built: Path) -> None:
    b = id_of(built / "b")
    admin.prepare(built / "b")
    for _ in range(2):
        assert len(admin.discard(b).held) == 1
    assert refusal(admin.search, b)[0] == "FAILED_PRECONDITION"


def test_a_former_snapshot_drains(built: Path) -> None:
    server = IndexServer(IndexServerSettings(snapshot=built / "a", retain_s=0))
    with server, grpc.insecure_channel(server.address) as channel:
        admin = Admin(channel)
        admin.prepare(built / "b")
        admin.publish(id_of(built / "b"), 2)
        gone = threading.Event()

        def look() -> None:
            while len(admin.index.Info(index_pb2.InfoRequest()).held) > 1:
                pass
            gone.set()

        threading.Thread(target=look, daemon=True).start()
        assert gone.wait(60)


def test_a_restart_finds_what_was_published_and_what_was_prepared(built: Path, tmp_path: Path) -> None:
    root, b, c = tmp_path / "root", id_of(built / "b"), id_of(built / "c")
    shutil.copytree(built / "c", root / "c")
    Root.create(root, built / "a")
    settings = IndexServerSettings(snapshot=root, shard=1)
    with IndexServer(settings) as server, grpc.insecure_channel(server.address) as channel:
        admin = Admin(channel)
        admin.prepare(built / "b")
        admin.publish(b, 2)
        admin.prepare(root / "c")
    with IndexServer(settings) as server, grpc.insecure_channel(server.address) as channel:
        assert held(Admin(channel).publish(c, 3)) == [(3, c), (2, b)]
    assert Root(root).read().current == "c"
    with IndexServer(settings) as server:
        assert (server.shard.manifest.snapshot_id, server.held.sequence) == (c, 3)


def test_a_copy_takes_the_place_of_what_is_held_once_it_is_verified(built: Path, tmp_path: Path) -> None:
    root, a = tmp_path / "root", id_of(built / "a")
    for name in ("first", "copy", "bad"):
        shutil.copytree(built / "a", root / name)
    damaged = root / "bad" / "shard-0000" / "vectors.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    record = Root.create(root, root / "first")
    settings = IndexServerSettings(snapshot=root)
    with IndexServer(settings) as server, grpc.insecure_channel(server.address) as channel:
        admin, before = Admin(channel), record.read()
        assert "bad/shard-0000/vectors.npy: was altered" in refusal(admin.prepare, root / "bad")[1]
        assert record.read() == before
        admin.prepare(root / "copy")
        for _ in range(2):
            assert held(admin.publish(a, 1)) == [(1, a)]
        assert record.read().current == "copy"
        shutil.rmtree(root / "first")
        assert admin.search().snapshot_id == a
    with IndexServer(settings) as server:
        assert (server.shard.folder, server.held.sequence) == (root / "copy", 1)


@pytest.mark.parametrize("was_prepared", [False, True])
def test_what_is_published_while_a_server_opens_is_what_it_serves(
    was_prepared: bool, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, opened, opens = Root.create(tmp_path / "root", built / "a"), list[Path](), IndexServer._open
    if was_prepared:
        root.update(lambda published: published.after_prepare(str(built / "b")))

    def publishes(self: IndexServer, folder: Path, gently: bool) -> Shard:
        opened.append(folder)
        if folder == built / ("b" if was_prepared else "a"):
            root.update(lambda published: published.after_publish(str(built / "b"), 2))
        return opens(self, folder, gently)

    monkeypatch.setattr(IndexServer, "_open", publishes)
    with IndexServer(IndexServerSettings(snapshot=tmp_path / "root")) as server:
        found = [(sequence, shard.manifest.snapshot_id) for sequence, shard in server.held.held()]
    assert found == [(2, id_of(built / "b")), (1, id_of(built / "a"))]
    assert opened == [built / "a", built / "b"]


def test_what_is_published_before_a_server_is_listed_is_followed_and_what_is_prepared_stays(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openbook.index.server.admin.LOOK_S", 0.01)
    root, (a, b, c) = Root.create(tmp_path / "root", built / "a"), (id_of(built / name) for name in "abc")
    server = IndexServer(IndexServerSettings(snapshot=tmp_path / "root", retain_s=3600))
    with server, grpc.insecure_channel(server.address) as channel:
        admin = Admin(channel)
        admin.prepare(built / "c")
        root.update(lambda published: published.after_publish(str(built / "b"), 2))
        until = time.monotonic() + 60
        while server.held.sequence < 2 and time.monotonic() < until:
            pass
        assert held(admin.index.Info(index_pb2.InfoRequest())) == [(2, b), (1, a), (0, c)]
        assert held(admin.publish(c, 3)) == [(3, c), (2, b), (1, a)]


def test_a_server_that_began_long_ago_serves_on_what_it_has(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else servers that nobody names would change over one by one, until no snapshot is held by all of them."""
    monkeypatch.setattr("openbook.index.server.admin.FOLLOW_S", 0)
    monkeypatch.setattr("openbook.index.server.admin.LOOK_S", 0.01)
    root = Root.create(tmp_path / "root", built / "a")
    server = IndexServer(IndexServerSettings(snapshot=tmp_path / "root"))
    root.update(lambda published: published.after_publish(str(built / "b"), 2))
    with server:
        server._follower.join(10)
        assert (server._follower.is_alive(), server.shard.folder.name) == (False, "a")


def test_what_is_on_record_and_cannot_be_served_is_tried_again_ever_more_rarely(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root, opens = Root.create(tmp_path / "root", built / "a"), IndexServer._open
    opened, serving, waits = list[str](), list[str](), list[float | None]()
    records = iter(
        [
            root.read(),
            *[Published(sequence=2, current=str(built / "damaged"))] * 2,
            "half a record",
            Published(sequence=3, current=str(built / "three-shards")),
            Published(sequence=4, current=str(built / "b")),
            Published(sequence=2, current=str(built / "c")),
            Published(sequence=5, current=str(built / "a")),
        ]
    )

    class Looks(threading.Event):
        """Before each there is another record."""

        def wait(self, timeout: float | None = None) -> bool:
            serving.append(server.shard.folder.name)
            waits.append(timeout)
            record = next(records, None)
            if isinstance(record, Published):
                root._write(record)
            elif record:
                (tmp_path / "root" / PUBLISHED).write_text(record)
            return record is None

    def open_shard(self: IndexServer, folder: Path, gently: bool) -> Shard:
        opened.append(folder.name)
        return opens(self, folder, gently)

    monkeypatch.setattr(IndexServer, "_open", open_shard)
    server = IndexServer(IndexServerSettings(snapshot=tmp_path / "root", retain_s=3600))
    server._publishing.follow(Looks())
    assert serving == ["a"] * 6 + ["b"] * 2 + ["a"]
    assert waits == [2, 2, 4, 8, 16, 32, 2, 2, 2]
    assert opened == ["a", "damaged", "damaged", "three-shards", "b"]
    assert [record.levelname for record in caplog.records].count("WARNING") == 4
    server.stop(0)


def test_a_record_is_followed_for_ten_minutes_and_no_longer_however_rarely_it_is_looked_at(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Root.create(tmp_path / "root", built / "a")
    clock, looks = ManualClock(), list[float]()

    class Passes(threading.Event):
        """Its time passes at once."""

        def wait(self, timeout: float | None = None) -> bool:
            clock.advance(timeout or 0)
            return False

    def read(self: Root) -> Published:
        looks.append(clock())
        raise InvalidSnapshot("the disk is gone")

    server = IndexServer(IndexServerSettings(snapshot=tmp_path / "root"))
    monkeypatch.setattr("openbook.index.server.admin.time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(Root, "read", read)
    begun = clock()
    server._publishing.follow(Passes())
    assert [look - begun for look in looks] == [2, 6, 14, 30, 62, 126, 254, 510, 600]
    server.stop(0)


def test_no_failure_ends_the_following_of_a_record(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("openbook.index.server.admin.LOOK_S", 0.01)
    root, opens = Root.create(tmp_path / "root", built / "a"), IndexServer._open
    failures, followed = [MemoryError(), OSError("the disk is away")], threading.Event()

    def open_shard(self: IndexServer, folder: Path, gently: bool) -> Shard:
        if gently and failures:
            raise failures.pop()
        if gently:
            followed.set()
        return opens(self, folder, gently)

    monkeypatch.setattr(IndexServer, "_open", open_shard)
    with IndexServer(IndexServerSettings(snapshot=tmp_path / "root")):
        root.update(lambda published: published.after_publish(str(built / "b"), 2))
        assert followed.wait(10)
    assert [record.exc_info is not None for record in caplog.records if record.levelname == "WARNING"] == [True] * 2


def test_a_server_stops_while_the_disk_of_its_root_is_silent(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("openbook.index.server.admin.LOOK_S", 0.01)
    monkeypatch.setattr("openbook.index.server.server.STOP_GRACE_S", 0.01)
    Root.create(tmp_path / "root", built / "a")
    looks, answers = threading.Event(), threading.Event()

    def read(self: Root) -> Published:
        looks.set()
        answers.wait()
        raise InvalidSnapshot("the disk is gone")

    server = IndexServer(IndexServerSettings(snapshot=tmp_path / "root"))
    monkeypatch.setattr(Root, "read", read)
    server.start()
    assert looks.wait(60)
    stopping = threading.Thread(target=server.stop, args=(0,))
    stopping.start()
    stopping.join(10)
    has_stopped = not stopping.is_alive()
    answers.set()
    stopping.join()
    server._follower.join()
    assert has_stopped
    assert "the disk is gone" not in caplog.text, "nobody serves any more"


def test_a_damaged_prepared_snapshot_is_ignored_and_a_damaged_current_one_is_not(built: Path, tmp_path: Path) -> None:
    root = Root.create(tmp_path / "root", built / "a")
    settings = IndexServerSettings(snapshot=tmp_path / "root")
    for name in ("another-encoder", "damaged"):
        root.update(lambda published, name=name: published.after_prepare(str(built / name)))
        with IndexServer(settings) as server:
            assert [shard.manifest.snapshot_id for _, shard in server.held.held()] == [id_of(built / "a")]
    root.update(lambda published: published.after_publish(str(built / "damaged"), 2))
    with pytest.raises(InvalidSnapshot, match="was altered"):
        IndexServer(settings)


def test_a_prepared_snapshot_that_this_machine_cannot_open_any_more_is_ignored(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one for which there is too little memory now."""
    Root.create(tmp_path / "root", built / "a").update(lambda published: published.after_prepare(str(built / "b")))
    opened = IndexServer._open

    def refuses(self: IndexServer, folder: Path, gently: bool) -> Shard:
        if folder == built / "b":
            raise InvalidConfig("keep_in_memory: too little may be locked")
        return opened(self, folder, gently)

    monkeypatch.setattr(IndexServer, "_open", refuses)
    with IndexServer(IndexServerSettings(snapshot=tmp_path / "root")) as server:
        assert [shard.manifest.snapshot_id for _, shard in server.held.held()] == [id_of(built / "a")]


def test_two_servers_share_one_root(built: Path, tmp_path: Path) -> None:
    Root.create(tmp_path / "root", built / "a")
    b = id_of(built / "b")
    servers = [IndexServer(IndexServerSettings(snapshot=tmp_path / "root", shard=shard)) for shard in (0, 1)]
    with servers[0], servers[1]:
        channels = [grpc.insecure_channel(server.address) for server in servers]
        for channel in channels:
            Admin(channel).prepare(built / "b")
        for channel in channels:
            Admin(channel).publish(b, 2)
        for channel in channels:
            assert Admin(channel).search().snapshot_id == b
            channel.close()
    published = Root(tmp_path / "root").read()
    assert (published.sequence, published.current, published.former) == (2, str(built / "b"), str(built / "a"))
    assert published.prepared is None


def test_the_token_is_needed_where_one_is_set(built: Path) -> None:
    server = IndexServer(IndexServerSettings(snapshot=built / "a", admin_token=SecretStr(TOKEN)))
    with server, grpc.insecure_channel(server.address) as channel:
        for token in (None, "wrong", TOKEN + "x"):
            code, details = refusal(Admin(channel, token).prepare, built / "b")
            assert (code, "missing or wrong" in details) == ("PERMISSION_DENIED", True)
        assert len(Admin(channel, TOKEN).prepare(built / "b").held) == 2
        assert Admin(channel).search().rows == 1


def test_beyond_loopback_nothing_is_changed_without_a_token(built: Path) -> None:
    server = IndexServer(IndexServerSettings(snapshot=built / "a", host="0.0.0.0"))
    with server, grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for call in (
            lambda a: a.prepare(built / "b"),
            lambda a: a.publish("x", 2),
            lambda a: a.discard("x"),
            lambda a: a._stub.Download(index_pb2.DownloadRequest(), timeout=60),
        ):
            code, details = refusal(call, Admin(channel))
            assert (code, "index_server.admin_token" in details) == ("PERMISSION_DENIED", True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA, a server and a client with certificates of it, and a stranger with one of another CA."""
    folder = tmp_path_factory.mktemp("keys")
    ours, other = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(str(folder / "ca.pem"))
    for name, ca in (("server", ours), ("client", ours), ("stranger", other)):
        certificate = ca.issue_cert("127.0.0.1")
        certificate.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
        certificate.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    return folder


def channel_with(keys: Path, address: str, name: str | None) -> grpc.Channel:
    pair = ((keys / f"{name}.key").read_bytes(), (keys / f"{name}.pem").read_bytes()) if name else (None, None)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials((keys / "ca.pem").read_bytes(), *pair))


def test_tls_and_mutual_tls(built: Path, keys: Path) -> None:
    for client_ca, clients in ((None, {None: True, "client": True}), (keys / "ca.pem", {"client": True, None: False})):
        tls = ServerTls(certificate=keys / "server.pem", key=keys / "server.key", client_ca=client_ca)
        with IndexServer(IndexServerSettings(snapshot=built / "a", tls=tls)) as server:
            for name, welcome in (clients | ({"stranger": False} if client_ca else {})).items():
                with channel_with(keys, server.address, name) as channel:
                    if welcome:
                        assert Admin(channel).search().rows == 1
                    else:
                        assert refusal(Admin(channel).search)[0] == "UNAVAILABLE"
            with grpc.insecure_channel(server.address) as plain:
                assert refusal(Admin(plain).search)[0] == "UNAVAILABLE"


def test_a_missing_key_is_named(built: Path, tmp_path: Path) -> None:
    tls = ServerTls(certificate=tmp_path / "no.pem", key=tmp_path / "no.key")
    server = IndexServer(IndexServerSettings(snapshot=built / "a", tls=tls))
    with pytest.raises(InvalidConfig, match=rf"index_server\.tls: {tmp_path}/no\.pem: cannot be read"):
        server.start()
    server.stop()
