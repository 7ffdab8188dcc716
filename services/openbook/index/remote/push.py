"""A snapshot to elsewhere, read back and compared, the manifest last: what has one is whole."""

from pathlib import Path

from openbook.core.fingerprint import file_digest
from openbook.errors import InvalidSnapshot
from openbook.index.disk import bm25
from openbook.index.disk.root import served_by
from openbook.index.disk.snapshot import MANIFEST, Snapshot
from openbook.index.remote.fetch import RemoteFile, shard_files
from openbook.index.remote.place import Place
from openbook.index.remote.transfer import OnBytes


def push(folder: Path, url: str, on_bytes: OnBytes = lambda done, total: None) -> str:
    """Copy a snapshot, or what a root serves, under a URL; returns its id. Interrupted, run it again.

    What lies there already is read, and kept if it is the same. Every file is read back after it was written.

    Raises:
        InvalidSnapshot: the folder is no snapshot or a file of it was altered; or one comes back altered.
        InvalidRequest: as `Place`.
        ShardUnavailable: the place cannot be written or read.
    """
    snapshot, place = Snapshot.open(served_by(folder)), Place(url)
    for shard in range(len(snapshot.manifest.shards)):
        snapshot.verify(shard)
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


def _described(folder: Path, path: str) -> RemoteFile:
    return RemoteFile(path, (folder / path).stat().st_size, file_digest(folder / path))
