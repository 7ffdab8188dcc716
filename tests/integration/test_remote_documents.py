"""Documents that lie elsewhere: what is built of them is what a copy gives, and nothing is fetched twice."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from object_storage import gs, make_folder, s3
from small_disk import files_of_at_most
from typer.testing import CliRunner
from web_files import WebFiles, serving

from openbook.cli import app
from openbook.corpus.remote import _Fetch, fetched
from openbook.corpus.sources.limits import Failure, raise_it
from openbook.errors import InvalidConfig, InvalidDocuments, InvalidRequest
from openbook.index.disk.snapshot import Snapshot
from openbook.index.disk.store import PassageReader
from openbook.index.remote.place import Listed, Place

PIECE = 1000
PROBED = 1
"""Bytes asked for to see whether a web server knows ranges."""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "sub").mkdir(parents=True)
    (folder / "a b.txt").write_text("Rivers run to the sea. " * 300)
    (folder / "sub" / "ü.md").write_text("# Bread\n\nBread is baked.\n")
    (folder / ".hidden").write_text("nobody means this")
    return folder


@pytest.fixture
def web(corpus: Path) -> Iterator[WebFiles]:
    with serving(corpus) as files:
        yield files


def contents(folder: Path) -> dict[str, bytes]:
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if not path.name.startswith(".")}


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("storage", [s3, gs])
def test_a_build_from_an_object_store_is_that_of_a_copy(
    storage: Callable[[], AbstractContextManager[dict[str, str]]],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = Place(f"{storage.__name__}://corpora")
    with storage() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        bucket._files.mkdir("corpora")
        for path in ("docs", "docs/sub"):
            make_folder(environment, "corpora", path)
        for path in ("a b.txt", "sub/ü.md", ".hidden"):
            bucket.put(corpus / path, f"docs/{path}")
        for where, out in ((f"{bucket.url}/docs", "fetched"), (str(corpus), "copied")):
            done = CliRunner().invoke(app, ["build", where, "--out", str(tmp_path / out), "--threads", "1"])
            assert done.exit_code == 0, done.output
        with fetched(f"{bucket.url}/docs/sub/ü.md", tmp_path / "one", raise_it) as file:
            assert file.read_bytes() == (corpus / "sub" / "ü.md").read_bytes()
        new = tmp_path / "new.txt"
        new.write_text("Seas rise into the sky. " * 300)

        def change(done: int, total: int) -> None:
            if 3 * PIECE <= done < 4 * PIECE:  # the other file may come before or behind
                bucket.put(new, "docs/a b.txt")

        with fetched(f"{bucket.url}/docs", tmp_path / "changed", raise_it, change, PIECE) as folder:
            assert (folder / "a b.txt").read_bytes() == new.read_bytes()
    assert passages(tmp_path / "fetched") == passages(tmp_path / "copied")
    assert {origin for _, origin in passages(tmp_path / "fetched")} == {"a b.txt", "sub/ü.md"}
    assert not (tmp_path / "fetched.documents").exists()


def passages(snapshot: Path) -> list[tuple[str, str]]:
    reader = PassageReader(Snapshot.open(snapshot).shard_folder(0), 0, ())
    return [(passage.text, passage.origin.path) for passage in reader if passage.origin]


def test_what_was_fetched_is_not_fetched_again_and_what_changed_is(corpus: Path, tmp_path: Path) -> None:
    told: list[int] = []

    def fetch() -> dict[str, bytes]:
        told.clear()
        with (
            pytest.raises(ZeroDivisionError),
            fetched(f"file://{corpus}", tmp_path / "out", raise_it, lambda done, _: told.append(done)) as folder,
        ):
            raise ZeroDivisionError(0)
        return contents(folder)

    assert fetch() == contents(corpus)
    assert told[-1] == sum(map(len, contents(corpus).values()))
    assert fetch() == contents(corpus)
    assert told == []
    (corpus / "new.txt").write_text("new")
    (corpus / "sub" / "ü.md").unlink()
    (corpus / "a b.txt").write_text("changed")
    assert fetch() == contents(corpus)
    assert told[-1] == len("new" + "changed")
    (corpus / "sub").rmdir()
    (corpus / "sub").write_text("a file by now")
    assert fetch() == contents(corpus)
    with fetched(f"file://{corpus}/new.txt", tmp_path / "out", raise_it) as file:
        assert names(file.parent) == [".fetched.jsonl", ".lock", "new.txt"], "of another URL nothing is kept"
    assert not file.parent.exists()


def test_a_file_goes_on_where_it_stopped_unless_it_changed(web: WebFiles, corpus: Path, tmp_path: Path) -> None:
    url, file = f"{web.url}/a%20b.txt", corpus / "a b.txt"
    size = file.stat().st_size

    def stop(done: int, total: int) -> None:
        assert total == size
        if done >= 4 * PIECE:
            raise KeyboardInterrupt

    def whole() -> int:
        """Bytes that it took."""
        web.sent.clear()
        with suppress(ZeroDivisionError), fetched(url, tmp_path / "out", raise_it, piece_bytes=PIECE) as got:
            assert (got.name, got.read_bytes()) == (file.name, file.read_bytes())
            raise ZeroDivisionError
        return web.sent.total()

    for version in ('"1"', '"2"'):
        web.version = version
        with pytest.raises(KeyboardInterrupt), fetched(url, tmp_path / "out", raise_it, stop, PIECE):
            raise AssertionError
        if version == '"1"':
            web.version = '"other"'
            assert whole() > size, "of another version nothing is used"
            assert whole() == PROBED
        else:
            assert whole() == size - 3 * PIECE + 2 * PROBED


@pytest.mark.parametrize(("is_restless", "n_words"), [(False, 300), (False, 30), (True, 300)])
def test_a_file_that_changes_while_it_is_fetched_is_no_mixture(
    web: WebFiles, corpus: Path, tmp_path: Path, is_restless: bool, n_words: int
) -> None:
    url, file = f"{web.url}/a%20b.txt", corpus / "a b.txt"
    web.version = '"0"'

    def change(done: int, total: int) -> None:
        if is_restless or done == 3 * PIECE:
            web.version = f'"{done}"'
            file.write_text("Seas rise into the sky. " * n_words)

    fetching = fetched(url, tmp_path / "out", raise_it, change, PIECE)
    if is_restless:
        with pytest.raises(InvalidDocuments, match=f"^{url}: has changed 3 times while it was fetched$"):
            fetching.__enter__()
    else:
        with fetching as got:
            assert got.read_bytes() == file.read_bytes()


@pytest.mark.parametrize("becomes", ["Bread is baked, and then it is eaten. " * 9, "Bread."])
def test_a_small_file_that_changed_since_it_was_listed_is_fetched_whole(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    listing = Place.listing

    def then_changed(place: Place) -> dict[str, Listed]:
        found = listing(place)
        (corpus / "sub" / "ü.md").write_text(becomes)
        return found

    monkeypatch.setattr(Place, "listing", then_changed)
    with fetched(f"file://{corpus}", tmp_path / "out", raise_it) as folder:
        assert (folder / "sub" / "ü.md").read_text() == becomes


def test_killed_as_it_begins_anew_it_takes_nothing_of_the_former_version(
    web: WebFiles, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, file = f"{web.url}/a%20b.txt", corpus / "a b.txt"
    web.version, note = '"1"', _Fetch._note

    def stop(done: int, total: int) -> None:
        if done >= 4 * PIECE:
            raise KeyboardInterrupt

    def killed(fetch: _Fetch, name: str, listed: Listed, is_whole: bool) -> None:
        note(fetch, name, listed, is_whole)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), fetched(url, tmp_path / "out", raise_it, stop, PIECE):
        raise AssertionError
    file.write_text("Seas rise into the sky. " * 300)
    web.version = '"2"'
    with monkeypatch.context() as patch:
        patch.setattr(_Fetch, "_note", killed)
        with pytest.raises(KeyboardInterrupt), fetched(url, tmp_path / "out", raise_it, piece_bytes=PIECE):
            raise AssertionError
    with fetched(url, tmp_path / "out", raise_it, piece_bytes=PIECE) as got:
        assert got.read_bytes() == file.read_bytes()


def test_a_server_that_tells_another_version_each_time_says_nothing_of_changes(
    web: WebFiles, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about, numbers = Place.about, count()
    monkeypatch.setattr(Place, "about", lambda place, path: replace(about(place, path), version=str(next(numbers))))
    with fetched(f"{web.url}/a%20b.txt", tmp_path / "out", raise_it, piece_bytes=PIECE) as got:
        assert got.read_bytes() == (corpus / "a b.txt").read_bytes()


def test_wherever_it_is_killed_the_folder_is_known_as_ours(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, unlink, entries = tmp_path / "out.documents", Path.unlink, Path.iterdir

    def killed(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        raise KeyboardInterrupt

    folder.mkdir()
    (folder / "..fetched.jsonl.partial").touch()
    with pytest.raises(ZeroDivisionError), fetched(f"file://{corpus}", tmp_path / "out", raise_it):
        raise ZeroDivisionError
    url = f"file://{corpus}/sub"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", lambda folder: iter(sorted(entries(folder))))  # the journal comes first
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt), fetched(url, tmp_path / "out", raise_it):
            raise AssertionError
    left: list[list[str]] = []
    remove = shutil.rmtree
    with monkeypatch.context() as patch, fetched(url, tmp_path / "out", raise_it) as got:
        assert contents(got) == contents(corpus / "sub")
        patch.setattr(shutil, "rmtree", lambda path: (left.append(names(path)), remove(path)))
    assert left[-1:] == [[".fetched.jsonl", ".lock"]], "documents go before what says whose they are"


def test_one_build_of_a_target_at_a_time(corpus: Path, tmp_path: Path) -> None:
    with fetched(f"file://{corpus}", tmp_path / "out", raise_it) as folder:
        with pytest.raises(InvalidConfig, match=r"out\.documents: another process is at work here"):
            fetched(f"file://{corpus}", tmp_path / "out", raise_it).__enter__()
        assert contents(folder) == contents(corpus)


def test_what_a_build_left_that_was_killed_when_its_snapshot_stood_is_removed(corpus: Path, tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "out.work"
    with pytest.raises(ZeroDivisionError), fetched(f"file://{corpus}", out, raise_it):
        raise ZeroDivisionError
    for folder, name in ((out, "manifest.json"), (work, "note.json")):
        folder.mkdir()
        (folder / name).touch()
    with pytest.raises(InvalidConfig, match="out: exists"):
        fetched(f"file://{corpus}", out, raise_it).__enter__()
    assert names(tmp_path) == ["corpus", "out"]


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_web_servers_that_know_no_ranges_and_send_us_on(
    web: WebFiles, corpus: Path, tmp_path: Path, is_elsewhere: bool
) -> None:
    web.knows_ranges = False
    with serving(corpus) as other:
        if is_elsewhere:
            other.elsewhere = web.url
        (corpus / "sub").rename(corpus / "s u b")
        url = f"{other.url if is_elsewhere else web.url}/s%20u%20b/%C3%BC.md?download=1&x=a/b"
        with fetched(url, tmp_path / "out", raise_it) as file:
            assert (file.name, file.read_bytes()) == ("ü.md", (corpus / "s u b" / "ü.md").read_bytes())


def test_names_that_no_disk_has_are_failures_and_hidden_ones_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = (
        "../out.txt",
        "a/../../b.txt",
        "/etc/passwd",
        "a//b",
        "x" * 250,
        "é" * 125,
        "good.txt/below.txt",
        "nul\0.txt",
    )
    there = {name: Listed("good.txt", 4, "1") for name in (*bad, "good.txt", "sub/.git/config")}
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "good.txt").write_text("good")
    monkeypatch.setattr(Place, "listing", lambda _: there)
    failures: list[Failure] = []
    with fetched(f"file://{tmp_path}/there", tmp_path / "out", failures.append) as folder:
        assert contents(folder) == {"good.txt": b"good"}
    assert sorted(failure.path for failure in failures) == sorted(bad)
    assert names(tmp_path) == ["there"]


@pytest.mark.parametrize("path", ["%2e%2e", "a%2F..%2F..", ".lock", ".fetched.jsonl", "a/b/..", "?x=/../y"])
def test_a_web_address_names_no_file_outside(
    path: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Place, "about", lambda _, path: Listed(path, 4, "1"))
    monkeypatch.setattr(Place, "pieces", lambda *_: iter([b"good"]))
    with fetched(f"http://host/{path}", tmp_path / "out", raise_it) as file:
        assert (file.read_bytes(), file.parent) == (b"good", tmp_path / "out.documents")
        assert file.name.strip(".")
        assert set(names(file.parent)) == {".fetched.jsonl", ".lock", file.name}


def test_a_disk_that_fills_up_cuts_no_document(corpus: Path, tmp_path: Path) -> None:
    with files_of_at_most(3 * PIECE), pytest.raises(InvalidDocuments, match=r"cannot be written: File too large$"):
        fetched(f"file://{corpus}", tmp_path / "out", raise_it).__enter__()
    with fetched(f"file://{corpus}", tmp_path / "out", raise_it) as folder:
        assert contents(folder) == contents(corpus)


def test_what_is_here_needs_no_room_again(web: WebFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(done: int, total: int) -> None:
        if done >= 4 * PIECE:
            raise KeyboardInterrupt

    web.version = '"1"'
    url = f"{web.url}/a%20b.txt"
    with pytest.raises(KeyboardInterrupt), fetched(url, tmp_path / "out", raise_it, stop, PIECE):
        raise AssertionError
    size = (web.folder / "a b.txt").stat().st_size
    for free in (size - 3 * PIECE - 1, size - 3 * PIECE):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        if free < size - 3 * PIECE:
            with pytest.raises(InvalidDocuments, match=f"{free + 1} bytes are needed, {free} are free"):
                fetched(url, tmp_path / "out", raise_it, piece_bytes=PIECE).__enter__()
        else:
            with fetched(url, tmp_path / "out", raise_it, piece_bytes=PIECE) as file:
                assert file.stat().st_size == size


@pytest.mark.parametrize(
    ("url", "error", "said"),
    [
        ("ftp://host/a", InvalidRequest, "url must begin with"),
        ("s3://bucket/a::b", InvalidRequest, "url must be that of a folder"),
        ("file:///nowhere/at/all", InvalidDocuments, "file:///nowhere/at/all: is not there"),
        ("WEB/nothing.txt", InvalidDocuments, "/nothing.txt: is not there"),
    ],
)
def test_what_cannot_be_fetched_is_said(
    url: str, error: type[Exception], said: str, web: WebFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error, match=said), fetched(url.replace("WEB", web.url), tmp_path / "out", raise_it):
        raise AssertionError
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    for out in (tmp_path / "out", Path()):
        with pytest.raises(InvalidConfig, match="out: exists; a snapshot is never changed"):
            fetched(f"{web.url}/a", out, raise_it).__enter__()
    (tmp_path / "other.documents").mkdir()
    (tmp_path / "other.documents" / "mine").write_text("mine")
    with pytest.raises(InvalidConfig, match="holds something else"):
        fetched(f"{web.url}/a", tmp_path / "other", raise_it).__enter__()
