"""A snapshot from elsewhere into a folder: whole or not there, and after a kill only what is missing.

Every file is written beside its place, compared with its digest, and takes its name then; the manifest takes its name
last, so that no folder is a snapshot before all that was asked for is in it. What lies in the folder already may have
been altered since, or be another snapshot's: it is compared too, and fetched anew.
"""

import hashlib
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from openbook import files
from openbook.core.fingerprint import file_digest
from openbook.errors import InvalidConfig, InvalidSnapshot, OpenbookError, ShardUnavailable
from openbook.index.disk import bm25
from openbook.index.disk.records import MAX_BYTES, parse_record
from openbook.index.disk.snapshot import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    Snapshot,
    parse_manifest,
    shard_folder,
)
from openbook.index.remote.place import PIECE_BYTES, Place, Refused
from openbook.index.remote.transfer import OnBytes, Transfer, transfer_all

LOCK = ".{}.lock"
"""Beside the folder; it stays."""
N_FILES = 4  # at once
FAILED = "\nfetching failed: "
"""Before an error's code and message: libraries may warn of something before them and after."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as it must be found; its path is relative to the snapshot's folder."""

    path: str
    size_bytes: int
    sha256: str


def fetch(
    url: str,
    folder: Path,
    shards: Collection[int] | None = None,
    snapshot_id: str | None = None,
    on_bytes: OnBytes = lambda done, total: None,
    piece_bytes: int = PIECE_BYTES,
) -> Manifest:
    """Bring a snapshot, or some of its shards, into a folder. Interrupted, the next one goes on where it stopped.

    Args:
        url: of the snapshot's folder.
        folder: the snapshot's, here; it may hold some of it already.
        shards: which ones; all if not given.
        snapshot_id: what it must be; none: whatever lies there.
        on_bytes: called after each piece.
        piece_bytes: read by one request.

    Raises:
        InvalidRequest: as `Place`.
        InvalidSnapshot: there is none, another one, or a file of it is missing or altered. The folder is no snapshot
            then, unless it was one before. Or the folder is a damaged one.
        InvalidConfig: the folder holds another snapshot.
        ShardUnavailable: the place cannot be read; or the disk is too small, which is known before it begins.
    """
    place = Place(url)
    text, manifest = _manifest(place)
    if snapshot_id is not None and manifest.snapshot_id != snapshot_id:
        raise InvalidSnapshot(f"{url}: holds snapshot {manifest.snapshot_id}, not {snapshot_id}")
    about = _about(place, manifest)
    words = [(f"{bm25.FOLDER}/{bm25.ABOUT}", about[0])] if about else []
    of_shards, of_words = [*shard_files(manifest, shards)], [*(word_files(about[1]) if about else ())]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with files.locked(files.beside(folder, LOCK)):
            is_one = (folder / MANIFEST).exists()
            if is_one and (held := Snapshot.open(folder).manifest.snapshot_id) != manifest.snapshot_id:
                raise InvalidConfig(f"{folder}: holds snapshot {held}, not {manifest.snapshot_id}")
            has_some = any((folder / file.path).exists() for file in of_shards)
            # Words are every server's: who comes for a shard that was not here does not read the same ones again.
            is_known = is_one and not has_some and all(_holds(folder / path, content) for path, content in words)
            missing = [file for file in of_shards if not _is_there(folder, file)]
            missing += [file for file in of_words if not _is_there(folder, file, not is_known)]
            _fetch_files(place, folder, missing, on_bytes, piece_bytes)
            for path, content in (*words, (MANIFEST, text)):
                if not _holds(folder / path, content):
                    (folder / path).parent.mkdir(exist_ok=True)
                    files.write(folder / path, content)
    except OSError as error:
        raise ShardUnavailable(f"{folder}: cannot be written: {error.strerror}") from None
    return manifest


def _holds(path: Path, content: str) -> bool:
    return path.exists() and path.read_bytes() == content.encode()


def shard_files(manifest: Manifest, shards: Collection[int] | None = None) -> Iterator[RemoteFile]:
    """Those of some shards, or of all. Raises InvalidSnapshot: there is no such shard."""
    n_shards = len(manifest.shards)
    for shard in range(n_shards) if shards is None else shards:
        if not 0 <= shard < n_shards:
            raise InvalidSnapshot(f"shard must be 0..{n_shards - 1}, got {shard}")
        name = shard_folder(Path(), shard).as_posix()
        for file in manifest.shards[shard].files:
            yield RemoteFile(f"{name}/{file.name}", file.size_bytes, file.sha256)


def word_files(about: bm25.About) -> Iterator[RemoteFile]:
    """Those of the index of words."""
    return (RemoteFile(f"{bm25.FOLDER}/{file.name}", file.size_bytes, file.sha256) for file in about.files)


def snapshot_at(url: str) -> Manifest:
    """The manifest of the snapshot under a URL. Raises as `fetch`."""
    return _manifest(Place(url))[1]


def _manifest(place: Place) -> tuple[str, Manifest]:
    data = place.read(MANIFEST, MAX_MANIFEST_BYTES)
    if data is None:
        raise InvalidSnapshot(f"{place.url}: not a snapshot: no {MANIFEST}")
    manifest = parse_manifest(data, place.at(MANIFEST))
    return data.decode(), manifest


def _about(place: Place, manifest: Manifest) -> tuple[str, bm25.About] | None:
    """Of its index of words, if it has one."""
    path = f"{bm25.FOLDER}/{bm25.ABOUT}"
    try:
        data = place.read(path, MAX_BYTES)
    except Refused:  # whoever may read the manifest may read this one
        if place.url.startswith("file:"):
            raise
        data = None
    if data is None:
        return None
    about = parse_record(bm25.About, data, place.at(path))
    if about.snapshot_id != manifest.snapshot_id:
        raise InvalidSnapshot(f"{place.at(path)}: is of snapshot {about.snapshot_id}, not of {manifest.snapshot_id}")
    return data.decode(), about


def _fetch_files(place: Place, folder: Path, missing: list[RemoteFile], on_bytes: OnBytes, piece_bytes: int) -> None:
    total = sum(file.size_bytes for file in missing)
    begun = sum(min(file.size_bytes, _size(files.partial_of(folder / file.path))) for file in missing)

    def fetch_one(file: RemoteFile, transfer: Transfer) -> None:
        _fetch_file(place, folder, file, transfer, piece_bytes)

    largest_first = sorted(missing, key=lambda file: -file.size_bytes)
    transfer_all(folder, largest_first, fetch_one, total, begun, on_bytes, N_FILES)


def _fetch_file(
    place: Place,
    folder: Path,
    file: RemoteFile,
    transfer: Transfer,
    piece_bytes: int,
) -> None:
    path = folder / file.path
    path.parent.mkdir(exist_ok=True)
    partial = files.partial_of(path)
    while True:
        begun = _size(partial)
        if begun > file.size_bytes:
            partial.unlink()
            begun = 0
        with partial.open("a+b") as out:
            out.seek(0)
            sha256 = hashlib.file_digest(out, "sha256") if begun else hashlib.sha256()
            transfer.count(begun)
            for piece in transfer.pieces(place.pieces(file.path, begun, file.size_bytes, piece_bytes)):
                out.write(piece)
                out.flush()  # who is killed goes on here
                sha256.update(piece)
                transfer.count(len(piece))
        if sha256.hexdigest() == file.sha256:
            files.put(partial, path)
            return
        partial.unlink()
        if not begun:
            found = sha256.hexdigest()
            raise InvalidSnapshot(f"{place.at(file.path)}: was altered: sha256 must be {file.sha256}, found {found}")
        transfer.count(-file.size_bytes)  # what was begun was damaged, by a power cut: all of it once more


def _is_there(folder: Path, file: RemoteFile, is_compared: bool = True) -> bool:
    path = folder / file.path
    has_its_size = path.exists() and path.stat().st_size == file.size_bytes
    return has_its_size and (not is_compared or file_digest(path) == file.sha256)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def main() -> None:
    """With arguments URL FOLDER SHARD SNAPSHOT_ID: what a server starts, for itself to go on undisturbed.

    Writes `done total` in bytes, a line each; ends with FAILED, an error's gRPC code and its message, which is a line.
    """
    url, folder, shard, snapshot_id = sys.argv[1:]

    def tell(done: int, total: int) -> None:
        print(done, total, flush=True)

    try:
        fetch(url, Path(folder), [int(shard)], snapshot_id, tell)
    except OpenbookError as error:
        message = str(error).replace("\n", " ")
        sys.exit(f"{FAILED}{error.grpc_code} {message}")


if __name__ == "__main__":
    main()
