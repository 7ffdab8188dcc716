"""A snapshot to elsewhere, read back and compared, the manifest last: what has one is whole."""

from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ValidationError

from openbook.core.fingerprint import file_digest
from openbook.errors import InvalidConfig, InvalidSnapshot
from openbook.index.disk import bm25
from openbook.index.disk.records import MAX_BYTES
from openbook.index.disk.root import served_by
from openbook.index.disk.snapshot import MANIFEST, MAX_MANIFEST_BYTES, Snapshot
from openbook.index.remote.fetch import RemoteFile, shard_files
from openbook.index.remote.place import Place
from openbook.index.remote.transfer import OnBytes


class _Named(BaseModel):
    """A manifest, or what an index of words says of itself."""

    snapshot_id: str


def push(folder: Path, url: str, on_bytes: OnBytes = lambda done, total: None) -> str:
    """Copy a snapshot, or what a root serves, under a URL; returns its id. Interrupted, run it again.

    What lies there already is read, and kept if it is the same. Every file is read back after it was written.

    Raises:
        InvalidSnapshot: the folder is no snapshot or a file of it was altered; or one comes back altered.
        InvalidRequest: as `Place`.
        InvalidConfig: another snapshot lies there.
        ShardUnavailable: the place cannot be written or read.
    """
    snapshot, place = Snapshot.open(served_by(folder)), Place(url)
    for shard in range(len(snapshot.manifest.shards)):
        snapshot.verify(shard, with_words=shard == 0)
    _check_free(place, snapshot.manifest.snapshot_id)
    wanted = list(shard_files(snapshot.manifest))
    if bm25.has_bm25(snapshot.folder):
        wanted += [_described(snapshot.folder, f"{bm25.FOLDER}/{name}") for name in (*bm25.FILES, bm25.ABOUT)]
    wanted.append(_described(snapshot.folder, MANIFEST))
    done, total = 0, sum(file.size_bytes for file in wanted)
    for file in wanted:
        if place.digest(file.path, file.size_bytes) != file.sha256:
            place.put(snapshot.folder / file.path, file.path)
            if place.digest(file.path, file.size_bytes) != file.sha256:
                raise InvalidSnapshot(f"{place.at(file.path)}: does not come back as it was written")
        done += file.size_bytes
        on_bytes(done, total)
    return snapshot.manifest.snapshot_id


def _check_free(place: Place, snapshot_id: str) -> None:
    """Raises InvalidConfig: another snapshot lies there, which would be neither old nor new on the way."""
    for path, most in ((MANIFEST, MAX_MANIFEST_BYTES), (f"{bm25.FOLDER}/{bm25.ABOUT}", MAX_BYTES)):
        with suppress(ValidationError):  # damaged: it is written anew
            held = _Named.model_validate_json(place.read(path, most) or b"").snapshot_id
            if held != snapshot_id:
                raise InvalidConfig(f"{place.url}: holds snapshot {held}, not {snapshot_id}: push to another URL")


def _described(folder: Path, path: str) -> RemoteFile:
    return RemoteFile(path, (folder / path).stat().st_size, file_digest(folder / path))
