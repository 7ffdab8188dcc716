"""Snapshots that somebody forged: every digest is right, and what the files hold is not."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openbook.core.deadline import Deadline
from openbook.core.fingerprint import file_digest, json_digest
from openbook.core.types import Passage
from openbook.errors import InvalidSnapshot
from openbook.index.building.build import build_snapshot
from openbook.index.disk.root import PUBLISHED, Root
from openbook.index.disk.snapshot import MANIFEST, MAX_MANIFEST_BYTES, Snapshot
from openbook.index.shard.shard import Shard

N, D = 60, 8
VECTORS = np.random.default_rng(0).standard_normal((N, D)).astype(np.float32)
SECRET = "what only the server may read"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built") / "snapshot"
    passages = [Passage(i, f"doc-{i}", f"title {i}", f"text {i}") for i in range(N)]
    build_snapshot(passages, VECTORS, out, 2, "Flat", "hash", "hash-8", scan="int8")
    return out


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "snapshot"))


def forge(folder: Path, change: Callable[[dict[str, Any]], None] = lambda manifest: None) -> None:
    """A manifest in which all is as it is found."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for number, shard in enumerate(manifest["shards"]):
        for file in shard["files"]:
            path = folder / f"shard-{number:04d}" / file["name"]
            file |= {"size_bytes": path.stat().st_size, "sha256": file_digest(path)}
    change(manifest)
    content = {key: value for key, value in manifest.items() if key not in ("snapshot_id", "created_at")}
    content["recall"] = {key: value for key, value in content["recall"].items() if value is not None}
    manifest["snapshot_id"] = json_digest({key: value for key, value in content.items() if value is not None})[:32]
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_a_manifest_forged_without_a_change_is_the_same(copy: Path) -> None:
    before = Snapshot.open(copy).manifest.snapshot_id
    forge(copy)
    assert Snapshot.open(copy).manifest.snapshot_id == before


def altered(**changes: Any) -> Callable[[Any], Any]:
    """The array with some rows replaced."""

    def change(array: Any) -> Any:
        array = array.copy()
        for row, value in changes.items():
            array[int(row.removeprefix("row"))] = value
        return array

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vectors.npy", lambda a: a.astype(object), "is no array"),
        ("vectors.npy", lambda a: a.astype(np.float64), "must hold float32 .* found float64"),
        ("vectors.npy", lambda a: a.astype(">f4"), "must hold float32 .* found >f4"),
        ("vectors.npy", np.asfortranarray, "must hold float32 of shape"),
        ("vectors.npy", lambda a: a[0, 0], r"found float32 of shape \(\)"),
        ("vectors.npy", lambda a: a[:0], r"found float32 of shape \(0, 8\)"),
        ("vectors.npy", lambda a: a[:-1], r"found float32 of shape \(29, 8\)"),
        ("vectors.npy", altered(row7=np.nan), "row 7: norm must be at most .* found nan"),
        ("vectors.npy", altered(row7=np.inf), "row 7: norm must be at most .* found inf"),
        ("vectors.npy", altered(row7=1e30), "row 7: norm must be at most"),
        ("offsets.npy", lambda a: a.astype(object), "is no array"),
        ("offsets.npy", lambda a: a.astype(np.float64), "must hold int64 .* found float64"),
        ("offsets.npy", lambda a: a[-1], r"found int64 of shape \(\)"),
        ("offsets.npy", lambda a: a[:0], r"found int64 of shape \(0,\)"),
        ("offsets.npy", altered(row5=0), "must ascend"),
        ("offsets.npy", altered(row5=-1), "must ascend"),
        ("offsets.npy", altered(row5=1 << 62), "must ascend"),
        ("offsets.npy", altered(row0=1), "do not belong"),
        ("codes.npy", lambda a: a.astype(np.int16), "must hold int8"),
        ("scales.npy", altered(row3=np.nan), "NaN or infinity"),
        ("centre.npy", altered(row3=np.inf), "NaN or infinity"),
        ("centre.npy", lambda a: a[0], r"found float32 of shape \(\)"),
    ],
)
def test_what_an_array_may_not_hold(copy: Path, name: str, change: Callable[[Any], Any], message: str) -> None:
    path = copy / "shard-0000" / name
    np.save(path, change(np.load(path)), allow_pickle=True)
    forge(copy)
    with pytest.raises(InvalidSnapshot, match=message):
        Shard(copy, 0)
    assert Shard(copy, 1).search(VECTORS[:1], 1, Deadline.never()).ids.shape == (1, 1)  # none the worse for it


@pytest.mark.parametrize("name", ["vectors.npy", "offsets.npy", "codes.npy", "index.faiss", "passages.bin"])
@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"\0" * 100], ids=["empty", "cut short", "zeros"])
def test_what_is_no_array_at_all(copy: Path, name: str, content: bytes) -> None:
    (copy / "shard-0000" / name).write_bytes(content)
    forge(copy)
    with pytest.raises(InvalidSnapshot):
        Shard(copy, 0)


@pytest.mark.parametrize("first_id", [1, 29, 1 << 62, 1 << 63, 1 << 80])
def test_ids_count_up_from_shard_to_shard(copy: Path, first_id: int) -> None:
    forge(copy, lambda manifest: manifest["shards"][1].update(first_id=first_id))
    with pytest.raises(InvalidSnapshot, match="first_id of shard 1 must be 30"):
        Snapshot.open(copy)


def test_the_number_of_passages_is_that_of_the_shards(copy: Path) -> None:
    forge(copy, lambda manifest: manifest.update(n_passages=61))
    with pytest.raises(InvalidSnapshot, match="n_passages must be 60"):
        Snapshot.open(copy)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "secret"])
def test_a_manifest_names_no_other_files(copy: Path, name: str) -> None:
    """Who fetches a snapshot from elsewhere writes where it says."""
    forge(copy, lambda manifest: manifest["shards"][0]["files"][0].update(name=name))
    with pytest.raises(InvalidSnapshot, match="no file of a shard"):
        Snapshot.open(copy)


def test_a_text_cut_within_a_character_is_told_when_it_is_fetched(copy: Path) -> None:
    path = copy / "shard-0000" / "passages.bin"
    path.write_bytes(path.read_bytes().replace(b"text 7", b"text \xc3"))
    forge(copy)
    shard = Shard(copy, 0)
    assert shard.fetch([6])[0].text == "text 6"
    with pytest.raises(InvalidSnapshot, match="passage 7 is no text in UTF-8"):
        shard.fetch([7])


def fifo(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


def link(path: Path) -> None:
    secret = path.parent.parent / "secret"
    secret.write_text(SECRET)
    path.symlink_to(secret)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (fifo, "no regular file"),
        (sparse, f"must have at most {MAX_MANIFEST_BYTES} bytes, found {3 << 30}"),
        (link, "Too many levels of symbolic links"),
        (Path.mkdir, "Is a directory"),
        (lambda path: path.write_text(SECRET), "Invalid JSON"),
        (lambda path: path.write_text(json.dumps({"snapshot_id": SECRET, "colour": SECRET})), "Field required"),
    ],
    ids=["fifo", "sparse", "link", "folder", "another file", "almost one"],
)
def test_what_is_no_manifest_is_refused_at_once_and_not_told(
    copy: Path, put: Callable[[Path], None], message: str
) -> None:
    (copy / MANIFEST).unlink()
    put(copy / MANIFEST)
    with pytest.raises(InvalidSnapshot, match=message) as refused:
        Snapshot.open(copy)
    assert SECRET not in str(refused.value)


def test_a_record_is_read_as_carefully(copy: Path) -> None:
    for put in (fifo, sparse, link):
        put(copy / PUBLISHED)
        with pytest.raises(InvalidSnapshot, match=PUBLISHED) as refused:
            Root(copy).read()
        assert SECRET not in str(refused.value)
        (copy / PUBLISHED).unlink()


@pytest.mark.parametrize("name", ["passages.bin", "vectors.npy"])
def test_a_pipe_among_the_files_keeps_nobody_waiting(copy: Path, name: str) -> None:
    path = copy / "shard-0000" / name
    path.write_bytes(b"")
    forge(copy)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(InvalidSnapshot, match="must be a regular file"):
        Shard(copy, 0)
