"""Snapshots that lie elsewhere: fetched whole or not at all, nothing twice, and published without a shared disk."""

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import aiohttp
import fsspec
import numpy as np
import pytest
from object_storage import gs, s3
from small_disk import files_of_at_most
from web_files import WebFiles, serving

from openbook.config import IndexClientSettings, IndexServerSettings
from openbook.core.types import Passage
from openbook.errors import (
    InvalidConfig,
    InvalidRequest,
    InvalidSnapshot,
    OpenbookError,
    Overloaded,
    PermissionDenied,
    ShardUnavailable,
    SnapshotMismatch,
)
from openbook.index.building.build import add_bm25, build_snapshot
from openbook.index.client.publish import held_by_root, held_by_servers, publish
from openbook.index.disk.root import Root
from openbook.index.disk.snapshot import MANIFEST, Snapshot
from openbook.index.remote import fetch as fetching
from openbook.index.remote import place as places
from openbook.index.remote.fetch import fetch
from openbook.index.remote.place import Place, is_within
from openbook.index.remote.push import push
from openbook.index.remote.transfer import Transfer, transfer_all
from openbook.index.server import download
from openbook.index.server.server import IndexServer
from openbook.testing import ManualClock

pytestmark = pytest.mark.usefixtures("hurried")

N, D = 3000, 8
TOKEN = "a token of the administrator"


def build(folder: Path, sign: int = 1) -> Path:
    passages = [Passage(i, f"doc-{i}", f"title {i}", f"{folder.name} text {i}") for i in range(N)]
    vectors = sign * np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
    build_snapshot(passages, vectors, folder, 2, "Flat", "encoder", "fingerprint")
    add_bm25(folder)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Snapshots old and new."""
    folder = tmp_path_factory.mktemp("elsewhere")
    build(folder / "old")
    build(folder / "new", -1)
    return folder


@pytest.fixture
def web(built: Path) -> Iterator[WebFiles]:
    with serving(built) as files:
        yield files


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def downloads(web: WebFiles, built: Path, tmp_path: Path, clock: ManualClock) -> download.Downloads:
    """Of a server of shard 0, into a root that has the snapshot old."""
    Root.create(tmp_path / "root", built / "old")
    return download.Downloads(tmp_path / "root", 0, (web.url,), clock)


def awaited(downloads: download.Downloads, place: str) -> download.Progress:
    """What a download comes to. Whoever asks for it also reads what its process says, which else would stop."""
    while (told := downloads.ask(place, "0" * 32)).folder is None:
        assert downloads._process is not None
        with suppress(subprocess.TimeoutExpired):
            downloads._process.wait(0.05)
    return told


def end_unheard(downloads: download.Downloads, place: str) -> None:
    """Begin a download, and wait until it has ended, of which nobody has heard."""
    while downloads._process is None:
        with suppress(OpenbookError):  # it may end at once
            downloads.ask(place, "0" * 32)
    os.waitid(os.P_PID, downloads._process.pid, os.WEXITED | os.WNOWAIT)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    """Of the snapshot new, to be damaged."""
    return Path(shutil.copytree(built / "new", tmp_path / "copy"))


def test_what_is_fetched_is_what_lies_there_and_nothing_is_fetched_twice(
    web: WebFiles, built: Path, tmp_path: Path
) -> None:
    told: list[tuple[int, int]] = []
    fetch(f"{web.url}/new", tmp_path / "new", on_bytes=lambda *now: told.append(now), piece_bytes=10_000)
    assert contents(tmp_path / "new") == contents(built / "new")
    sizes = {f"/new/{path}": len(content) for path, content in contents(built / "new").items()}
    assert web.sent == sizes
    files = sum(size for path, size in sizes.items() if not path.endswith(".json") or "vocab" in path or "par" in path)
    assert told[-1] == (files, files)
    assert told == sorted(told)
    web.sent.clear()
    fetch(f"{web.url}/new/", tmp_path / "new")
    assert set(web.sent) == {"/new/manifest.json", "/new/bm25/about.json"}


def test_one_shard_alone_then_the_other(web: WebFiles, built: Path, tmp_path: Path) -> None:
    fetch(f"{web.url}/new", tmp_path / "new", [1])
    assert not any("shard-0000" in path for path in web.sent)
    snapshot = Snapshot.open(tmp_path / "new")
    snapshot.verify(1)
    with pytest.raises(InvalidSnapshot, match="shard-0000"):
        snapshot.verify(0)
    web.sent.clear()
    fetch(f"{web.url}/new", tmp_path / "new", [0])
    assert not any("shard-0001" in path or "indices" in path for path in web.sent)
    assert contents(tmp_path / "new") == contents(built / "new")
    with pytest.raises(InvalidSnapshot, match=r"shard must be 0\.\.1, got 2"):
        fetch(f"{web.url}/new", tmp_path / "new", [2])


def test_a_shard_without_passages_has_its_empty_files(tmp_path: Path) -> None:
    passages = [Passage(i, f"doc-{i}", "", f"text {i}") for i in range(2)]
    build_snapshot(passages, np.ones((2, D), np.float32), tmp_path / "small", 3, "Flat", "encoder", "fingerprint")
    fetch(f"file://{tmp_path}/small", tmp_path / "fetched")
    assert contents(tmp_path / "fetched") == contents(tmp_path / "small")
    for shard in range(3):
        Snapshot.open(tmp_path / "fetched").verify(shard)


def test_killed_and_run_again_it_fetches_the_rest(web: WebFiles, built: Path, tmp_path: Path) -> None:
    piece = 5_000
    total = sum(map(len, contents(built / "new").values()))
    web.held_after = total // 2
    code = f"""
from hashlib import sha256
from pathlib import Path
from openbook.index.remote.fetch import fetch
fetch({web.url + "/new"!r}, Path({str(tmp_path / "new")!r}), piece_bytes={piece})
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    assert web.is_held.wait(60)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(InvalidSnapshot):
        Snapshot.open(tmp_path / "new")
    web.held_after = None
    web.go_on.set()
    fetch(f"{web.url}/new", tmp_path / "new", piece_bytes=piece)
    assert contents(tmp_path / "new") == contents(built / "new")
    # Twice: what says what there is, and pieces under way when it was killed.
    again = sum(len(contents(built / "new")[name]) for name in (MANIFEST, "bm25/about.json"))
    assert web.sent.total() <= total + again + 2 * fetching.N_FILES * piece


def test_what_was_given_up_is_listed_and_what_is_being_fetched_is_not_taken_for_it(built: Path, tmp_path: Path) -> None:
    """Else nobody would know what takes up the disk."""
    states: list[str] = []

    def look(done: int = 0, total: int = 0) -> None:
        states.extend(row.state for row in held_by_root(tmp_path))

    def give_up(done: int, total: int) -> None:
        look()
        raise KeyboardInterrupt

    url = f"file://{built}/new"
    with pytest.raises(KeyboardInterrupt):
        fetch(url, tmp_path / "new", [0], on_bytes=give_up)
    look()
    fetch(url, tmp_path / "new", [0])
    look()
    assert [*dict.fromkeys(states)] == ["being fetched", "unfinished", ""]
    states.clear()
    fetch(url, tmp_path / "new", [1], on_bytes=look)
    assert set(states) == {"being fetched"}, "another server's shard, beside one that is there"
    Root.create(tmp_path, tmp_path / "new")
    shutil.rmtree(tmp_path / "new/shard-0000")
    states.clear()
    fetch(url, tmp_path / "new", [0], on_bytes=look)
    assert set(states) == {"current"}


def test_what_cannot_be_told_to_be_fetched_is_not_called_so_once_it_is_whole(built: Path, tmp_path: Path) -> None:
    fetch(f"file://{built}/new", tmp_path / "new", [0])
    lock = tmp_path / ".new.lock"
    lock.rename(tmp_path / "moved")
    lock.symlink_to("moved")  # cannot be opened, as one of another user
    assert [row.state for row in held_by_root(tmp_path)] == [""]
    (tmp_path / "new" / MANIFEST).unlink()
    assert [row.state for row in held_by_root(tmp_path)] == ["being fetched"], "nobody shall remove it"


def test_connections_that_break_are_made_again(
    web: WebFiles, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "PAUSES_S", (0.0, 0.0, 0.0))
    web.cut = 3
    fetch(f"{web.url}/new", tmp_path / "new")
    assert web.cut == 0
    assert contents(tmp_path / "new") == contents(built / "new")
    web.cut = 100
    with pytest.raises(ShardUnavailable, match=r"manifest\.json"):
        fetch(f"{web.url}/old", tmp_path / "old")
    assert web.cut == 100 - 4, "tries are not tried again"


@pytest.mark.parametrize("status", [408, 429, 503])
def test_a_web_server_that_has_no_time_is_asked_again(
    status: int, web: WebFiles, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "PAUSES_S", (0.0, 0.0))
    place, content = Place(f"{web.url}/new"), (built / "new" / MANIFEST).read_bytes()
    web.busy = [status, status]
    assert b"".join(place.pieces(MANIFEST, 0, len(content))) == content
    web.busy = [status] * 4  # HEAD and GET, twice
    assert place.read(MANIFEST, 1 << 20) == content
    web.busy = [status] * 100
    with pytest.raises(ShardUnavailable, match=f"{MANIFEST}: {status}"):
        place.read(MANIFEST, 1 << 20)
    web.busy = [403]
    with pytest.raises(ShardUnavailable, match=f"{MANIFEST}: 403"):
        list(place.pieces(MANIFEST, 0, len(content)))


@contextmanager
def interrupted_when(is_held: threading.Event) -> Iterator[None]:
    """Ctrl-C, once a web server lets somebody wait, which it goes on with."""
    me = threading.get_ident()

    def interrupt() -> None:
        if is_held.wait(60):
            signal.pthread_kill(me, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()


@pytest.mark.parametrize("publishes", [True, False])
def test_ctrl_c_does_not_wait_for_a_silent_web_server(
    publishes: bool, web: WebFiles, built: Path, tmp_path: Path
) -> None:
    read_before = 0 if publishes else sum(len(contents(built / "new")[name]) for name in (MANIFEST, "bm25/about.json"))
    web.held_after = read_before
    with interrupted_when(web.is_held):
        if publishes:
            asyncio.run(publish(f"{web.url}/new", IndexClientSettings(addresses=("127.0.0.1:1",))))
        else:
            fetch(f"{web.url}/new", tmp_path / "new")
    assert web.sent.total() == read_before


def test_ctrl_c_may_come_while_files_are_still_named(tmp_path: Path) -> None:
    begun, answer = threading.Event(), threading.Event()

    def missing() -> Iterator[str]:
        yield "a file"
        begun.wait()
        raise KeyboardInterrupt

    def bring(file: str, transfer: Transfer) -> None:
        transfer.read(lambda: (begun.set(), answer.wait()))

    with pytest.raises(KeyboardInterrupt):
        transfer_all(tmp_path, missing(), bring, 0, 0, lambda done, total: None, 1)
    answer.set()


def test_a_place_that_does_not_answer(
    web: WebFiles, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "PAUSES_S", ())
    with pytest.raises(InvalidSnapshot, match=r"/nowhere: not a snapshot: no manifest.json"):
        fetch(f"{web.url}/nowhere", tmp_path / "new")
    with pytest.raises(ShardUnavailable, match=r"127\.0\.0\.1:1"):
        Place("http://127.0.0.1:1").about(MANIFEST)
    with serving(built) as other:
        web.elsewhere = other.url
        with pytest.raises(OpenbookError, match=r"manifest.json"):
            fetch(f"{web.url}/new", tmp_path / "new")
    assert not web.sent + other.sent
    assert not (tmp_path / "new").exists()


def test_what_says_what_there_is_must_not_fill_the_memory(built: Path) -> None:
    with pytest.raises(InvalidSnapshot, match=rf"new/{MANIFEST}: must have at most 10 bytes, found \d+"):
        Place(f"file://{built}/new").read(MANIFEST, 10)


def test_a_web_server_may_be_slow_but_not_silent(
    web: WebFiles, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.get_filesystem_class("http").clear_instance_cache()
    monkeypatch.setattr(aiohttp.client, "DEFAULT_TIMEOUT", aiohttp.ClientTimeout(total=1e-9))  # of all of an answer
    monkeypatch.setattr(places, "PAUSES_S", ())
    fetch(f"{web.url}/new", tmp_path / "new")
    assert contents(tmp_path / "new") == contents(built / "new")
    monkeypatch.setattr(places, "SILENCE_S", 0.1)
    web.held_after = 0
    with pytest.raises(ShardUnavailable, match=rf"{MANIFEST}: Timeout on reading data from socket"):
        fetch(f"{web.url}/old", tmp_path / "old")


def test_a_web_server_that_compresses_is_asked_for_bytes_as_they_are(
    web: WebFiles, built: Path, tmp_path: Path
) -> None:
    web.compresses = ".json"
    fetch(f"{web.url}/new", tmp_path / "new", piece_bytes=5_000)
    assert contents(tmp_path / "new") == contents(built / "new")


def test_a_snapshot_without_words_comes_from_where_nobody_may_see_what_is_missing(
    web: WebFiles, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(copy / "bm25")
    web.folder, web.missing = tmp_path, 403
    fetch(f"{web.url}/copy", tmp_path / "new")
    assert contents(tmp_path / "new") == contents(copy)
    with pytest.raises(ShardUnavailable, match=f"nowhere/{MANIFEST}: 403"):
        fetch(f"{web.url}/nowhere", tmp_path / "other")
    info = Place._info
    for refusal in (PermissionError(errno.EACCES, "of S3"), OSError("Forbidden: as Google's storage says it")):

        def refused(place: Place, path: str, refusal: OSError = refusal) -> object:
            if path.endswith("about.json"):
                raise refusal
            return info(place, path)

        monkeypatch.setattr(Place, "_info", refused)
        fetch(f"{web.url}/copy", tmp_path / "new")
        with pytest.raises(ShardUnavailable, match=r"about\.json"):  # a disk says what is there
            fetch(f"file://{copy}", tmp_path / "new")


@pytest.mark.parametrize("name", ["shard-0001/vectors.npy", "shard-0000/passages.bin", "bm25/data.csc.index.npy"])
def test_a_damaged_file_is_named_and_no_snapshot_appears(name: str, copy: Path, tmp_path: Path) -> None:
    content = (copy / name).read_bytes()
    (copy / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InvalidSnapshot, match=f"{name}: was altered: sha256 must be"):
        fetch(f"file://{copy}", tmp_path / "new")
    assert not (tmp_path / "new" / MANIFEST).exists()
    (copy / name).write_bytes(content[:-1])
    with pytest.raises(InvalidSnapshot, match=f"{name}: must have {len(content)} bytes, ends after {len(content) - 1}"):
        fetch(f"file://{copy}", tmp_path / "new")
    (copy / name).unlink()
    with pytest.raises(InvalidSnapshot, match=f"{name}: is not there"):
        fetch(f"file://{copy}", tmp_path / "new")
    (copy / name).write_bytes(content)
    fetch(f"file://{copy}", tmp_path / "new")
    assert contents(tmp_path / "new") == contents(copy)


def test_what_a_power_cut_left_is_fetched_anew(web: WebFiles, built: Path, tmp_path: Path) -> None:
    place = tmp_path / "new" / "shard-0000"
    place.mkdir(parents=True)
    (place / ".vectors.npy.partial").write_bytes(bytes(1000))  # the length is there, the bytes are not
    (place / ".offsets.npy.partial").write_bytes(bytes(1 << 20))
    told: list[tuple[int, int]] = []
    fetch(f"{web.url}/new", tmp_path / "new", on_bytes=lambda *now: told.append(now))
    assert contents(tmp_path / "new") == contents(built / "new")
    total = told[0][1]
    assert told[-1] == (total, total)


def test_too_little_disk_is_said_before_anything_is_fetched(
    web: WebFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 1000, 1000))
    with pytest.raises(ShardUnavailable, match=r"new: \d{6} bytes are needed, 1000 are free"):
        fetch(f"{web.url}/new", tmp_path / "new")
    assert set(web.sent) == {"/new/manifest.json", "/new/bm25/about.json"}


def test_room_is_needed_only_for_what_is_not_there(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, vectors = f"file://{built}/new", tmp_path / "new/shard-0001/vectors.npy"
    fetch(url, tmp_path / "new")
    vectors.rename(vectors.with_name(".vectors.npy.partial"))
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6, 0))
    fetch(url, tmp_path / "new")
    assert contents(tmp_path / "new") == contents(built / "new")


def test_a_disk_that_fills_up_cuts_no_file(built: Path, tmp_path: Path) -> None:
    largest = max(map(len, contents(built / "new").values()))
    with (
        files_of_at_most(largest - 1),
        pytest.raises(ShardUnavailable, match=r"cannot be written: File too large$"),
    ):
        fetch(f"file://{built}/new", tmp_path / "new")
    fetch(f"file://{built}/new", tmp_path / "new")
    assert contents(tmp_path / "new") == contents(built / "new")


def test_what_was_altered_since_it_was_fetched_is_fetched_anew(web: WebFiles, built: Path, tmp_path: Path) -> None:
    here, altered = tmp_path / "new", ("shard-0001/vectors.npy", "bm25/indices.csc.index.npy")
    fetch(f"{web.url}/new", here)
    for path in (here / name for name in altered):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    about = here / "bm25" / "about.json"
    about.write_text(about.read_text() + "\n")
    web.sent.clear()
    fetch(f"{web.url}/new", here)
    assert set(web.sent) == {f"/new/{name}" for name in (*altered, MANIFEST, "bm25/about.json")}
    assert contents(here) == contents(built / "new")
    words = here / altered[1]
    words.write_bytes(bytes(words.stat().st_size))  # alone
    fetch(f"{web.url}/new", here)
    assert contents(here) == contents(built / "new")


def test_the_same_snapshot_built_again_is_the_same(copy: Path, tmp_path: Path) -> None:
    fetch(f"file://{copy}", tmp_path / "here")
    manifest = Snapshot.open(copy).manifest.model_copy(update={"created_at": "2000-01-01T00:00:00+00:00"})
    (copy / MANIFEST).write_text(manifest.model_dump_json())
    assert fetch(f"file://{copy}", tmp_path / "here") == manifest
    assert contents(tmp_path / "here") == contents(copy)


def test_words_that_were_built_again_come_with_the_next_shard(copy: Path, tmp_path: Path) -> None:
    fetch(f"file://{copy}", tmp_path / "here", [0])
    about = json.loads((copy / "bm25/about.json").read_text())
    path = copy / "bm25" / about["files"][0]["name"]
    altered = path.read_bytes()[:-1] + b"?"
    path.write_bytes(altered)
    about["files"][0]["sha256"] = sha256(altered).hexdigest()
    (copy / "bm25/about.json").write_text(json.dumps(about))
    fetch(f"file://{copy}", tmp_path / "here", [1])
    assert contents(tmp_path / "here") == contents(copy)


def test_words_of_another_snapshot_are_none_of_this_one(copy: Path, built: Path, tmp_path: Path) -> None:
    shutil.copytree(built / "old/bm25", copy / "bm25", dirs_exist_ok=True)
    old, new = (Snapshot.open(built / name).manifest.snapshot_id for name in ("old", "new"))
    with pytest.raises(InvalidSnapshot, match=rf"about\.json: is of snapshot {old}, not of {new}"):
        fetch(f"file://{copy}", tmp_path / "here")


def test_what_was_fetched_of_another_snapshot_is_fetched_anew(web: WebFiles, built: Path, tmp_path: Path) -> None:
    fetch(f"{web.url}/old", tmp_path / "here")
    (tmp_path / "here" / MANIFEST).unlink()  # as of a fetch that was interrupted
    fetch(f"{web.url}/new", tmp_path / "here")
    assert contents(tmp_path / "here") == contents(built / "new")


def test_a_folder_is_also_where_we_are(
    web: WebFiles, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    fetch(f"{web.url}/new", Path())
    assert contents(tmp_path / "new") == contents(built / "new")


def test_a_folder_with_another_snapshot_is_left_alone(web: WebFiles, built: Path, tmp_path: Path) -> None:
    fetch(f"{web.url}/old", tmp_path / "here")
    old, new = (Snapshot.open(built / name).manifest.snapshot_id for name in ("old", "new"))
    with pytest.raises(InvalidConfig, match=f"here: holds snapshot {old}, not {new}"):
        fetch(f"{web.url}/new", tmp_path / "here")
    with pytest.raises(InvalidSnapshot, match=r"holds snapshot .*, not 00"):
        fetch(f"{web.url}/old", tmp_path / "there", snapshot_id="00")
    assert contents(tmp_path / "here") == contents(built / "old")


def test_a_backup_and_the_way_back(built: Path, tmp_path: Path) -> None:
    Root.create(tmp_path / "root", built / "old")
    url = f"file://{tmp_path}/backup"
    snapshot_id = push(tmp_path / "root", url)
    assert contents(tmp_path / "backup") == contents(built / "old")
    rotten = tmp_path / "backup" / "shard-0001" / "vectors.npy"
    rotten.write_bytes(bytes(rotten.stat().st_size))
    kept = (tmp_path / "backup" / "shard-0000" / "vectors.npy").stat().st_mtime_ns
    assert push(tmp_path / "root", url) == snapshot_id  # only what is wrong is written
    assert (tmp_path / "backup" / "shard-0000" / "vectors.npy").stat().st_mtime_ns == kept
    assert fetch(url, tmp_path / "restored").snapshot_id == snapshot_id
    assert contents(tmp_path / "restored") == contents(built / "old")


def test_a_backup_that_was_interrupted_is_no_snapshot_and_what_comes_back_altered_is_named(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, put = f"file://{tmp_path}/backup", Place.put

    def interrupted(place: Place, file: Path, path: str) -> None:
        if path.startswith("shard-0001"):
            raise KeyboardInterrupt
        put(place, file, path)

    def altered(place: Place, file: Path, path: str) -> None:
        put(place, file, path)
        (tmp_path / "backup" / path).write_bytes(b"?")

    monkeypatch.setattr(Place, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        push(built / "new", url)
    assert (tmp_path / "backup/shard-0000").exists()
    assert not (tmp_path / "backup" / MANIFEST).exists()
    monkeypatch.setattr(Place, "put", altered)
    with pytest.raises(InvalidSnapshot, match=rf"{url}/shard-0001/.*: does not come back as it was written"):
        push(built / "new", url)


def test_a_backup_of_another_snapshot_stays_as_it_is(built: Path, tmp_path: Path) -> None:
    url, backup = f"file://{tmp_path}/backup", tmp_path / "backup"
    old, new = (Snapshot.open(built / name).manifest.snapshot_id for name in ("old", "new"))
    push(built / "old", url)
    with pytest.raises(InvalidConfig, match=f"^{url}: holds snapshot {old}, not {new}"):
        push(built / "new", url)
    (backup / MANIFEST).unlink()  # as of a push that was interrupted
    with pytest.raises(InvalidConfig, match=f"^{url}: holds snapshot {old}, not {new}"):
        push(built / "new", url)
    assert contents(backup) == {path: data for path, data in contents(built / "old").items() if path != MANIFEST}
    push(built / "old", url)
    (backup / MANIFEST).write_text("{")  # damaged: nobody can tell whose it was
    push(built / "old", url)
    assert contents(backup) == contents(built / "old")


def test_the_index_of_words_is_verified_once_however_many_shards_there_are(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify, verified = Snapshot.verify, list[bool]()

    def noted(snapshot: Snapshot, shard: int, with_words: bool = True) -> None:
        verified.append(with_words)
        verify(snapshot, shard, with_words)

    monkeypatch.setattr(Snapshot, "verify", noted)
    push(built / "new", f"file://{tmp_path}/backup")
    assert verified == [True, False]


def test_what_is_damaged_is_not_pushed(copy: Path, tmp_path: Path) -> None:
    (copy / "shard-0000" / "vectors.npy").write_bytes(b"")
    with pytest.raises(InvalidSnapshot, match=r"vectors.npy: must have"):
        push(copy, f"file://{tmp_path}/backup")
    assert not (tmp_path / "backup").exists()


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/a",
        "ssh://host/a",
        "simplecache::file:///a",
        "file:///a::http://host",
        "https://user:secret@host/a",
        "https://host/a?signed=1",
        "https://host/%2e%2e/a",
        "file:///srv/../etc",
        "s3://",
        "https://host/a b",
        "https://host\\@other/a",
        "https://host/a\n",
    ],
)
def test_urls_that_are_not_read(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^url must b") as caught:
        Place(url)
    assert "secret" not in str(caught.value)


def test_a_prefix_is_a_folder_not_a_beginning() -> None:
    allowed = ("s3://bucket/snapshots", "https://host/")
    assert is_within("s3://bucket/snapshots", allowed)
    assert is_within("s3://bucket/snapshots/2026", allowed)
    assert is_within("https://host/a", allowed)
    assert not is_within("s3://bucket/snapshots-of-others/2026", allowed)
    assert not is_within("https://host.elsewhere/a", allowed)
    assert not is_within("s3://bucket", allowed)
    assert not is_within("s3://bucket", ())


@pytest.fixture
def servers(built: Path, web: WebFiles, tmp_path: Path) -> Iterator[list[IndexServer]]:
    """Two shards on two machines, two servers each: each machine a root of its own, that only its servers see."""
    with ExitStack() as stack:
        found = []
        for machine in "ab":
            shutil.copytree(built / "old", tmp_path / machine / "old")
            Root.create(tmp_path / machine, tmp_path / machine / "old")
            for shard in (0, 1):
                settings = IndexServerSettings(
                    snapshot=tmp_path / machine, shard=shard, fetch_from=(web.url,), admin_token=TOKEN
                )
                found.append(stack.enter_context(IndexServer(settings)))
        yield found


def settings_of(servers: list[IndexServer]) -> IndexClientSettings:
    return IndexClientSettings(addresses=tuple(server.address for server in servers), timeout_s=60, admin_token=TOKEN)


def test_published_from_elsewhere(servers: list[IndexServer], web: WebFiles, built: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    settings = settings_of(servers)
    new = Snapshot.open(built / "new").manifest.snapshot_id
    assert asyncio.run(publish(f"{web.url}/new", settings, on_progress=lambda *step: steps.append(step))) == 2
    assert {row.snapshot_id for row in asyncio.run(held_by_servers(settings)) if row.state == "current"} == {new}
    assert {step for step, _, _ in steps} == {"fetch MB", "prepare", "publish"}
    fetched = [(done, total) for step, done, total in steps if step == "fetch MB"]
    assert all(total for _, total in fetched), "of a few bytes too"
    assert fetched[-1][0] == fetched[-1][1]
    for machine in "ab":
        assert contents(tmp_path / machine / new) == contents(built / "new")
        assert Root(tmp_path / machine).read().current == new
    for path, content in contents(built / "new").items():
        if "json" not in path or "vocab" in path:
            assert web.sent[f"/new/{path}"] == 2 * len(content), path  # once to each machine
    asyncio.run(publish(f"{web.url}/old", settings))  # and back


def test_what_cannot_be_fetched_is_published_nowhere(
    servers: list[IndexServer], web: WebFiles, copy: Path, tmp_path: Path, built: Path
) -> None:
    settings = settings_of(servers)
    path = copy / "shard-0001" / "vectors.npy"
    path.write_bytes(bytes(path.stat().st_size))
    web.folder = tmp_path
    before = asyncio.run(held_by_servers(settings))
    with pytest.raises(OpenbookError, match=r"vectors.npy: was altered"):
        asyncio.run(publish(f"{web.url}/copy", settings))
    with pytest.raises(PermissionDenied, match=r"fetch_from allows to fetch from http://.*, not from file:///"):
        asyncio.run(publish(f"file://{built}/new", settings))
    assert asyncio.run(held_by_servers(settings)) == before


def test_a_server_that_says_what_is_not_available_is_not_silent(
    servers: list[IndexServer], web: WebFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_FETCH", f"import sys; sys.exit({f'{fetching.FAILED}UNAVAILABLE no room'!r})")
    with pytest.raises(ShardUnavailable, match="no room"):
        asyncio.run(publish(f"{web.url}/new", settings_of(servers)))


def test_off_unless_it_is_allowed(web: WebFiles, built: Path, tmp_path: Path) -> None:
    Root.create(tmp_path / "root", built / "old")
    root, alone = tmp_path / "root", built / "old"
    new = Snapshot.open(built / "new").manifest.snapshot_id
    closed = download.Downloads(root, 0, ())
    with pytest.raises(PermissionDenied, match="allows to fetch from nowhere"):
        closed.ask(f"{web.url}/new", new)
    with pytest.raises(InvalidConfig, match="no root to fetch into"):
        download.Downloads(alone, 0, (web.url,)).ask(f"{web.url}/new", new)
    for path in ("../../etc", f"{new}/../../etc", f"{new}\n"):
        with pytest.raises(InvalidRequest, match="32 hexadecimal digits"):
            download.Downloads(root, 0, (web.url,)).ask(f"{web.url}/new", path)
    assert not web.sent


def test_a_download_that_nobody_asks_for_ends_and_goes_on_later(
    downloads: download.Downloads, clock: ManualClock, web: WebFiles, built: Path, tmp_path: Path
) -> None:
    new = Snapshot.open(built / "new").manifest.snapshot_id
    web.held_after = 0
    assert downloads.ask(f"{web.url}/new", new).folder is None
    assert web.is_held.wait(60)
    downloads.end_forgotten()
    process = downloads._process
    assert process is not None
    clock.advance(download.FORGOTTEN_S + 1)
    with pytest.raises(OpenbookError, match=f"fetches snapshot {new}, or has"):  # who asks for another, not for this
        downloads.ask(f"{web.url}/old", Snapshot.open(built / "old").manifest.snapshot_id)
    downloads.end_forgotten()
    assert process.poll() is not None
    web.held_after = None
    web.go_on.set()
    downloads.ask(f"{web.url}/new", new)
    process = downloads._process
    assert process is not None
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    done = downloads.ask(f"{web.url}/new", new)
    assert (done.folder, done.n_bytes_done) == ((tmp_path / "root" / new), done.n_bytes)
    Snapshot.open(tmp_path / "root" / new).verify(0)


def test_a_download_that_has_just_begun_is_not_forgotten(
    web: WebFiles, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Root.create(tmp_path / "root", built / "old")
    has_looked = threading.Event()

    class Lock:
        """Whoever waits for it has looked too."""

        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            if not self._lock.acquire(blocking=False):
                has_looked.set()
                self._lock.acquire()

        def __exit__(self, *_: object) -> None:
            self._lock.release()

    def clock() -> float:
        if looking.ident is None:  # it is `ask` that wants to know
            looking.start()
            assert has_looked.wait(60)
        return download.FORGOTTEN_S + 1

    def look() -> None:
        downloads.end_forgotten()
        has_looked.set()

    downloads = download.Downloads(tmp_path / "root", 0, (web.url,), clock)
    monkeypatch.setattr(downloads, "_lock", Lock())
    looking = threading.Thread(target=look)
    web.held_after = 0
    downloads.ask(f"{web.url}/new", "0" * 32)
    looking.join()
    assert downloads._process is not None
    downloads.close()


def test_a_download_that_warns_a_lot_goes_on(
    downloads: download.Downloads, web: WebFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_FETCH", "import sys; sys.stderr.write('x' * (1 << 20)); print(7, 7)")
    told = awaited(downloads, f"{web.url}/new")
    assert (told.n_bytes_done, told.n_bytes) == (7, 7)


def test_a_download_that_has_ended_is_its_own_until_nobody_waits_for_it(
    downloads: download.Downloads, clock: ManualClock, web: WebFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "_FETCH", "print(7, 7)")
    new, old = f"{web.url}/new", f"{web.url}/old"
    end_unheard(downloads, new)
    clock.advance(download.LATELY_S)
    with pytest.raises(Overloaded, match="fetches snapshot"):
        downloads.ask(old, "0" * 32)
    assert downloads.ask(new, "0" * 32).folder is not None
    end_unheard(downloads, new)
    clock.advance(download.LATELY_S + 1)
    assert awaited(downloads, old).n_bytes == 7
    end_unheard(downloads, new)
    clock.advance(download.LATELY_S + 1)
    assert downloads.ask(new, "0" * 32).folder is not None, "what is there is not fetched again"


def test_what_a_download_failed_for_is_told_once_and_not_to_who_comes_later(
    downloads: download.Downloads, clock: ManualClock, web: WebFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile somebody may have mended it."""
    place = f"{web.url}/new"
    for why in ("no such place", "no room"):
        monkeypatch.setattr(download, "_FETCH", f"import sys; sys.exit({f'{fetching.FAILED}UNAVAILABLE {why}'!r})")
        end_unheard(downloads, place)
        clock.advance(download.LATELY_S)
        with pytest.raises(ShardUnavailable, match=why):
            downloads.ask(place, "0" * 32)
    end_unheard(downloads, place)
    clock.advance(download.LATELY_S + 1)
    monkeypatch.setattr(download, "_FETCH", "print(7, 7)")
    assert awaited(downloads, place).n_bytes == 7


def test_what_a_download_failed_for_is_told_whatever_is_warned_of_beside_it(
    downloads: download.Downloads, web: WebFiles, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warns = "import atexit, sys; sys.stderr.write('old: warn()'); atexit.register(sys.stderr.write, 'left')"
    monkeypatch.setattr(download, "_FETCH", f"{warns}\n{download._FETCH}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numpy.py").write_text("raise SystemExit('whatever lies there')")
    new = Snapshot.open(built / "new").manifest.snapshot_id
    with pytest.raises(SnapshotMismatch, match=f"^{web.url}/new: holds snapshot {new}, not {'0' * 32}$"):
        awaited(downloads, f"{web.url}/new")


@pytest.mark.parametrize("storage", [s3, gs])
def test_object_storage(
    storage: Callable[[], AbstractContextManager[dict[str, str]]],
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = f"{storage.__name__}://bucket"
    with storage() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        Place(bucket)._files.mkdir("bucket")
        push(built / "new", f"{bucket}/snapshots/new")
        fetch(f"{bucket}/snapshots/new", tmp_path / "new", piece_bytes=50_000)
        assert contents(tmp_path / "new") == contents(built / "new")
        with pytest.raises(InvalidSnapshot, match=f"{bucket}/nothing: not a snapshot"):
            fetch(f"{bucket}/nothing", tmp_path / "other")


def test_a_publication_must_follow(web: WebFiles, servers: list[IndexServer], tmp_path: Path) -> None:
    passages = [Passage(i, f"doc-{i}", "", f"text {i}") for i in range(4)]
    vectors = np.ones((4, D), np.float32)
    build_snapshot(passages, vectors, tmp_path / "other", 2, "Flat", "encoder", "another fingerprint")
    web.folder = tmp_path
    with pytest.raises(SnapshotMismatch, match="encoder fingerprint must be"):
        asyncio.run(publish(f"{web.url}/other", settings_of(servers)))
