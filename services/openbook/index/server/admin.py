"""Replacing the snapshot of a server while it serves: prepare, publish, discard, each of which may be asked twice."""

import hmac
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import grpc

from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.errors import (
    DeadlineExceeded,
    InvalidRequest,
    InvalidSnapshot,
    OpenbookError,
    SnapshotMismatch,
    StartupError,
)
from openbook.index.disk.root import FIRST_SEQUENCE, Root
from openbook.index.server.download import Downloads
from openbook.index.server.held import HeldSnapshots
from openbook.index.server.info import info
from openbook.index.server.service import abort, respond
from openbook.index.server.verify import IsAwaited, check_awaited
from openbook.index.shard.shard import Shard
from openbook.processes import is_loopback
from openbook.v1 import index_pb2, index_pb2_grpc

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""Between two looks at the record of a root."""
FOLLOW_S = 600.0
"""In which a server that listens is surely listed."""


class OpenShard(Protocol):
    """Verifies, maps and tests the shard of a snapshot folder; gently, if searches go on.

    Raises:
        InvalidSnapshot: it is none, or damaged.
        DeadlineExceeded: nobody waits for it any more.
    """

    def __call__(self, folder: Path, gently: bool, is_awaited: IsAwaited = ...) -> Shard: ...


class Publishing:
    """What a server serves, in memory and, with a root, on disk. Thread-safe; one change at a time.

    Raises:
        InvalidSnapshot: neither a snapshot nor a root, or what is to be served is damaged.
    """

    def __init__(self, folder: Path, open_shard: OpenShard, retain_s: float, min_recall_at_10: float) -> None:
        self._min_recall_at_10 = min_recall_at_10
        self._open = open_shard
        self._changing = threading.Lock()
        self._root = Root(folder) if Root.is_one(folder) else None
        published = self._root.read() if self._root else None
        current = open_shard(self._root.folder_of(published.current) if self._root and published else folder, False)
        sequence = published.sequence if published else FIRST_SEQUENCE
        self.held = HeldSnapshots(current.manifest.snapshot_id, current, sequence, retain_s)
        if self._root and published and published.prepared:
            self._reopen(self._root.folder_of(published.prepared))
        if self._root:
            self._catch_up(self._root, False)  # opening may have taken an hour, in which another one was published

    def prepare(self, folder: Path, snapshot_id: str, deadline: Deadline, is_awaited: IsAwaited = lambda: True) -> None:
        """Hold a snapshot beside the current one; one that is held from another folder is held from this one then.

        Raises:
            InvalidSnapshot: the folder is no snapshot, or it is damaged, or its index is not good enough.
            SnapshotMismatch: it is another snapshot than was said, or one that cannot follow the current one.
            ShardUnavailable: with a root, it cannot be put on record.
            DeadlineExceeded: another change took too long, or nobody waits for this one any more: he would not let go
                of it, and it would take the place of what others prepared since.
        """
        with self._alone(deadline):
            check_awaited(is_awaited)
            shard = self.held.find(snapshot_id)
            if shard is None or shard.folder.resolve() != folder.resolve():
                shard = self._open(folder, True, is_awaited)
            if shard.manifest.snapshot_id != snapshot_id:
                raise SnapshotMismatch(f"{folder}: holds snapshot {shard.manifest.snapshot_id}, not {snapshot_id[:64]}")
            _check_follows(self.held.current, shard)
            _check_recall(shard, self._min_recall_at_10)
            check_awaited(is_awaited)
            if self._root:
                name = self._root.name_of(shard.folder)
                self._root.update(lambda published: published.after_prepare(name))
            self.held.prepare(snapshot_id, shard)
        log.info("prepared snapshot %s from %s", snapshot_id, folder)

    def publish(self, snapshot_id: str, sequence: int, deadline: Deadline) -> None:
        """Make a held snapshot current: on record first, so that a restart never goes back.

        Raises:
            SnapshotMismatch: it is not held, or its turn is over.
            ShardUnavailable, DeadlineExceeded: as `prepare`.
        """
        with self._alone(deadline):
            shard = self.held.check_publish(snapshot_id, sequence)
            if self._root:
                name = self._root.name_of(shard.folder)
                self._root.update(lambda published: published.after_publish(name, sequence))
            self.held.publish(snapshot_id, sequence)
        log.info("published snapshot %s as number %d", snapshot_id, sequence)

    def discard(self, snapshot_id: str, deadline: Deadline) -> None:
        """Let go of a snapshot that was prepared.

        Raises:
            SnapshotMismatch: it is the current one.
            ShardUnavailable, DeadlineExceeded: as `prepare`.
        """
        with self._alone(deadline):
            shard = self.held.find(snapshot_id)
            self.held.discard(snapshot_id)
            if self._root and shard:
                name = self._root.name_of(shard.folder)
                self._root.update(lambda published: published.after_discard(name))

    def follow(self, stopped: threading.Event) -> None:
        """For FOLLOW_S, serve what is published at others who share the root: who publishes knows of those that are
        listed, and a server is listed only after it listens. Not for ever: servers that nobody names would change over
        one by one, and let go of what the others have. What cannot be served is tried again ever more rarely: every
        byte may be read for it.
        """
        wait_s, until = LOOK_S, time.monotonic() + FOLLOW_S
        while self._root and (left_s := until - time.monotonic()) > 0 and not stopped.wait(min(wait_s, left_s)):
            try:
                if self._root.read().sequence > self.held.sequence:
                    with self._changing:
                        self._catch_up(self._root, True)
                wait_s = LOOK_S
            except Exception as error:  # whatever it is, the next look may find it gone
                if stopped.is_set():
                    return
                wait_s *= 2
                trace = None if isinstance(error, OpenbookError) else error
                log.warning("what is published may be another snapshot than is served: %s", error, exc_info=trace)

    def _reopen(self, folder: Path) -> None:
        """What was prepared when the server stopped; without it, it must be prepared again, and nothing is lost."""
        try:
            shard = self._open(folder, False)
            _check_follows(self.held.current, shard)
        except (StartupError, SnapshotMismatch) as error:
            log.warning("what was prepared is not served: %s", error)
        else:
            self.held.prepare(shard.manifest.snapshot_id, shard)

    def _catch_up(self, root: Root, gently: bool) -> None:
        while (published := root.read()).sequence > self.held.sequence:
            opened = {root.name_of(shard.folder): shard for _, shard in self.held.held()}
            shard = opened.get(published.current) or self._open(root.folder_of(published.current), gently)
            _check_follows(self.held.current, shard)
            if gently:  # at a start what is on record is served, as in a restart
                _check_recall(shard, self._min_recall_at_10)
            self.held.follow(shard.manifest.snapshot_id, shard, published.sequence)
            log.info("follow publication %d, of snapshot %s", published.sequence, shard.manifest.snapshot_id)

    @contextmanager
    def _alone(self, deadline: Deadline) -> Iterator[None]:
        if not self._changing.acquire(timeout=min(deadline.remaining_s(), threading.TIMEOUT_MAX)):
            raise DeadlineExceeded("deadline passed while another snapshot was prepared")
        try:
            yield
        finally:
            self._changing.release()


class IndexAdminService(index_pb2_grpc.IndexAdminServiceServicer):
    """The gRPC face of publishing. Without a token, only servers that listen on loopback let themselves be changed."""

    def __init__(self, publishing: Publishing, downloads: Downloads, token: str | None, host: str) -> None:
        self._publishing = publishing
        self._downloads = downloads
        self._token = token
        self._host = host

    def Download(  # noqa: N802
        self, request: index_pb2.DownloadRequest, context: grpc.ServicerContext
    ) -> index_pb2.DownloadResponse:
        def download(asked: Context) -> index_pb2.DownloadResponse:
            told = self._downloads.ask(request.url, request.snapshot_id)
            folder = str(told.folder or "")
            return index_pb2.DownloadResponse(n_bytes_done=told.n_bytes_done, n_bytes=told.n_bytes, folder=folder)

        self._check(method := "Download", context)
        return respond(method, context, download)

    def Prepare(self, request: index_pb2.PrepareRequest, context: grpc.ServicerContext) -> index_pb2.InfoResponse:  # noqa: N802
        def prepare(deadline: Deadline) -> None:
            if not request.folder or not request.snapshot_id:
                raise InvalidRequest("Prepare must name folder and snapshot_id")
            if "\0" in request.folder:
                raise InvalidRequest("folder must be a path, got a NUL in it")
            self._publishing.prepare(Path(request.folder), request.snapshot_id, deadline, context.is_active)

        return self._do("Prepare", context, prepare)

    def Publish(self, request: index_pb2.PublishRequest, context: grpc.ServicerContext) -> index_pb2.InfoResponse:  # noqa: N802
        def publish(deadline: Deadline) -> None:
            self._publishing.publish(request.snapshot_id, request.sequence, deadline)

        return self._do("Publish", context, publish)

    def Discard(self, request: index_pb2.DiscardRequest, context: grpc.ServicerContext) -> index_pb2.InfoResponse:  # noqa: N802
        return self._do("Discard", context, lambda deadline: self._publishing.discard(request.snapshot_id, deadline))

    def _do(
        self, method: str, context: grpc.ServicerContext, work: Callable[[Deadline], None]
    ) -> index_pb2.InfoResponse:
        def change(asked: Context) -> index_pb2.InfoResponse:
            work(asked.deadline)
            return info(self._publishing.held)

        self._check(method, context)
        return respond(method, context, change)

    def _check(self, method: str, context: grpc.ServicerContext) -> None:
        if refusal := self._refusal(context):
            abort(method, context, "PERMISSION_DENIED", refusal)

    def _refusal(self, context: grpc.ServicerContext) -> str:
        """Why this caller may not change anything; empty if it may."""
        if self._token is None:
            if is_loopback(self._host):
                return ""
            return (
                f"a server that listens on {self._host} is changed only with a token: "
                "set index_server.admin_token (OPENBOOK_INDEX_SERVER__ADMIN_TOKEN)"
            )
        sent = next((value for key, value in context.invocation_metadata() if key == "authorization"), "")
        given = sent if isinstance(sent, bytes) else sent.encode()
        if hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            return ""
        return "the admin token is missing or wrong: send it as metadata 'authorization: Bearer TOKEN'"


def _check_follows(current: Shard, new: Shard) -> None:
    """Raises SnapshotMismatch where queries or routing of one would be wrong for the other."""
    ours, theirs = current.manifest, new.manifest
    for what, one, other in (
        ("shards", len(ours.shards), len(theirs.shards)),
        ("dimension", ours.dimension, theirs.dimension),
        ("encoder fingerprint", ours.encoder_fingerprint, theirs.encoder_fingerprint),
    ):
        if one != other:
            raise SnapshotMismatch(
                f"snapshot {theirs.snapshot_id} cannot follow {ours.snapshot_id}: {what} must be {one}, got {other}"
            )


def _check_recall(shard: Shard, least: float) -> None:
    """Raises InvalidSnapshot for one whose certificate does not reach it."""
    recall = shard.manifest.recall
    if least > 0 and (recall is None or recall.at_10 < least):
        found = "which was not measured" if recall is None else f"found {recall.at_10}"
        raise InvalidSnapshot(f"{shard.folder}: recall at 10 must be at least min_recall_at_10 = {least}, {found}")
