"""Making a snapshot current at every server of a tier, in two steps: all have it, or nobody answers from it.

Run again after a crash it completes what was begun: every call to a server may be repeated, and a publication keeps its
sequence number. Rolling back is publishing the former snapshot.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import NoReturn, TypeVar

from openbook import wire
from openbook.config import IndexClientSettings
from openbook.errors import DeadlineExceeded, InvalidSnapshot, OpenbookError, ShardUnavailable, SnapshotMismatch
from openbook.files import beside, is_locked
from openbook.index.client.client import channel_credentials, from_grpc, open_channel
from openbook.index.client.discovery import addresses_now
from openbook.index.disk.root import Root
from openbook.index.disk.snapshot import MANIFEST, Snapshot
from openbook.index.remote.fetch import LOCK, snapshot_at
from openbook.index.remote.transfer import apart
from openbook.secret import bearer
from openbook.v1.index_pb2 import (
    DiscardRequest,
    DownloadRequest,
    DownloadResponse,
    InfoRequest,
    InfoResponse,
    PrepareRequest,
    PublishRequest,
)
from openbook.v1.index_pb2_grpc import IndexAdminServiceStub, IndexServiceStub

log = logging.getLogger(__name__)

Result = TypeVar("Result")
OnProgress = Callable[[str, int, int], None]
"""Called with the step and how many of how many servers are done with it."""

PREPARE_TIMEOUT_S = 3600.0  # every byte is read
TIMEOUT_S = 30.0
POLL_S = 0.5
LOOK_S = 10.0  # between two looks at a server that prepares
FETCHED, UNFINISHED = "being fetched", "unfinished"
"""Of a folder in a root: a shard of it comes now; fetching was given up, and nobody is at it."""
N_SILENT = 3  # looks, in a row, after which it is gone


@dataclass(frozen=True, slots=True)
class Listed:
    """A snapshot somewhere, as a row of a list."""

    where: str  # a server's address, or a folder's name
    state: str  # current, former, prepared, FETCHED, UNFINISHED, or nothing
    snapshot_id: str
    created_at: str
    n_passages: int  # of the shard, at a server
    factory: str
    sequence: int = 0
    recall: Mapping[int, float] = field(default_factory=dict)  # by k; empty if not measured


def sequence_for(snapshot_id: str, infos: Iterable[InfoResponse]) -> int:
    """Of a publication: one more than the latest, unless the latest is this one, begun and not finished.

    Servers that began separately, each with a snapshot of its own, all count from one.
    """
    sequences = [(held.sequence, held.snapshot_id) for info in infos for held in info.held]
    latest = max(sequence for sequence, _ in sequences)
    return latest if {each for sequence, each in sequences if sequence == latest} == {snapshot_id} else latest + 1


def waves(shards: Sequence[int]) -> list[list[int]]:
    """Positions of servers, given the shard of each: in every wave one replica of each shard, so that all the others
    serve undisturbed while these read their files.
    """
    seen: dict[int, int] = {}
    found: list[list[int]] = []
    for i, shard in enumerate(shards):
        wave = seen[shard] = seen.get(shard, -1) + 1
        found += [[]] if wave == len(found) else []
        found[wave].append(i)
    return found


async def publish(
    source: Path | str,
    settings: IndexClientSettings,
    folder_at_servers: Path | None = None,
    on_progress: OnProgress = lambda step, done, total: None,
) -> int:
    """Make a snapshot current at all servers that the settings name, those too that join meanwhile; returns its
    sequence.

    Args:
        source: its folder, which the servers see too; or a URL, from which each of them first fetches its part.
        settings: which servers.
        folder_at_servers: the folder as they see it, if elsewhere.
        on_progress: called after each step.

    Raises:
        InvalidSnapshot: there is no snapshot.
        InvalidConfig: no addresses.
        InvalidRequest, PermissionDenied: a URL that is none, or that a server may not fetch from.
        ShardUnavailable: a server does not answer, or a shard has none.
        OpenbookError: what a server refused it for; names the server. Unless it was about to be current at one already,
            it is nowhere then; nor is it if this is cancelled before the first publishes it.
    """
    reached: set[str] = set()
    while True:
        try:
            sequence, addresses = await _publish_once(source, settings, folder_at_servers, on_progress)
        except OpenbookError as error:
            if not reached:
                raise
            raise _together([error], f"; it is current at {', '.join(sorted(reached))}: publish it again") from None
        reached.update(addresses)
        try:
            named, _ = await addresses_now(settings)
        except OpenbookError as error:
            log.warning("whether a server has joined meanwhile cannot be told: %s", error)
            return sequence
        if reached.issuperset(named):
            return sequence


async def _publish_once(
    source: Path | str, settings: IndexClientSettings, folder_at_servers: Path | None, on_progress: OnProgress
) -> tuple[int, list[str]]:
    """At all servers that are named now. Returns its sequence, and where it is current."""
    url = source if isinstance(source, str) else ""
    if url:
        manifest = await asyncio.wrap_future(apart(lambda: snapshot_at(url)))
    else:
        manifest = Snapshot.open(Path(source)).manifest
    snapshot_id, n_shards = manifest.snapshot_id, len(manifest.shards)
    async with _servers(settings) as servers:
        infos = await _all_or_raise([server.info() for server in servers])
        if missing := sorted(set(range(n_shards)) - {info.shard for info in infos}):
            shards = ", ".join(map(str, missing))
            raise ShardUnavailable(
                f"shard {shards} of {n_shards} has no server among {', '.join(server.address for server in servers)}"
            )
        if url:
            folders = await _download(servers, url, snapshot_id, on_progress)
        else:
            folders = [str(folder_at_servers or _absolute(Path(source)))] * len(servers)
        try:
            said = await _prepare(servers, infos, folders, snapshot_id, on_progress)
        except (Exception, asyncio.CancelledError):
            if all(info.snapshot_id != snapshot_id for info in infos):
                await _outcomes([server.discard(snapshot_id) for server in servers])
            raise
        sequence = sequence_for(snapshot_id, said)
        publishes = [server.publish(snapshot_id, sequence) for server in servers]
        published = await _outcomes(publishes, lambda n: on_progress("publish", n, len(servers)))
        if failures := [outcome for outcome in published if isinstance(outcome, OpenbookError)]:
            raise _together(failures, "; publish it again to complete it")
        return sequence, [server.address for server in servers]


async def held_by_servers(settings: IndexClientSettings) -> list[Listed]:
    """What every server holds, in order. Raises ShardUnavailable if one does not answer, InvalidConfig for none."""
    async with _servers(settings) as servers:
        infos = await _all_or_raise([server.info() for server in servers])
        return [row for server, info in zip(servers, infos, strict=True) for row in _rows(server.address, info)]


async def held_by_one(settings: IndexClientSettings, snapshot_id: str) -> Listed:
    """What the first server that holds a snapshot says of it: those that do not answer are not needed.

    Raises:
        SnapshotMismatch: no server that answers holds it.
        InvalidConfig: no addresses.
    """
    async with _servers(settings) as servers:
        said = await _outcomes([server.info() for server in servers])
    for server, info in zip(servers, said, strict=True):
        for row in _rows(server.address, info) if isinstance(info, InfoResponse) else ():
            if row.snapshot_id == snapshot_id:
                return row
    raise SnapshotMismatch(f"no index server that answers holds snapshot {snapshot_id}")


def held_by_root(folder: Path) -> list[Listed]:
    """The snapshots in a folder, newest first, what its record says of them, and what was not fetched to its end; a
    snapshot itself. Raises InvalidSnapshot.
    """
    if (folder / MANIFEST).exists():
        return [_row(folder, folder.resolve().name, "", 0)]
    published = Root(folder).read() if Root.is_one(folder) else None
    are_fetched = {path.name: is_locked(lock) for path in folder.glob("*/") if (lock := beside(path, LOCK)).exists()}
    # Only then, for fetching may have ended since.
    names = {path.parent.name for path in folder.glob(f"*/{MANIFEST}") if not path.parent.name.startswith(".")}
    states = {
        name: UNFINISHED if is_now is False else FETCHED  # who cannot be told of may be at work
        for name, is_now in are_fetched.items()
        if is_now or name not in names
    }
    if published:
        named = {"prepared": published.prepared, "former": published.former, "current": published.current}
        states |= {name: state for state, name in named.items() if name}
    sequence = published.sequence if published else 0
    rows = [_row(folder / name, name, states.get(name, ""), sequence) for name in sorted(names | states.keys())]
    return sorted(rows, key=lambda row: row.created_at, reverse=True)


def _absolute(folder: Path) -> Path:
    return folder.resolve()  # servers have other working directories


async def _download(servers: "Sequence[_Server]", url: str, snapshot_id: str, on_progress: OnProgress) -> list[str]:
    """Have every server fetch its part, all at once; returns where each has it. Progress in megabytes of all.

    Raises:
        OpenbookError: what the first failed for; the others go on, and nobody waits for them.
    """
    bytes_of = dict.fromkeys(range(len(servers)), (0, 0))

    async def one(i: int) -> str:
        while True:
            told = await servers[i].download(url, snapshot_id)
            bytes_of[i] = told.n_bytes_done, told.n_bytes
            done, total = (ceil(sum(each) / 10**6) for each in zip(*bytes_of.values(), strict=True))
            if total:  # known, and there is something to fetch; of less than a megabyte too
                on_progress("fetch MB", done, total)
            if told.folder:
                return told.folder
            await asyncio.sleep(POLL_S)

    try:
        async with asyncio.TaskGroup() as group:
            fetched = [group.create_task(one(i)) for i in range(len(servers))]
    except ExceptionGroup as failed:
        ours, others = failed.split(OpenbookError)
        if ours is None or others is not None:
            raise
        errors = [error for error in ours.exceptions if isinstance(error, OpenbookError)]
        raise _together(errors, "; what the others fetch meanwhile is not fetched again") from None
    return [each.result() for each in fetched]


async def _prepare(
    servers: "Sequence[_Server]",
    infos: Sequence[InfoResponse],
    folders: Sequence[str],
    snapshot_id: str,
    on_progress: OnProgress,
) -> list[InfoResponse]:
    """Have every server hold it; returns what they say then. Raises OpenbookError: what they refused it for."""
    n_prepared = 0
    on_progress("prepare", 0, len(servers))
    for wave in waves([info.shard for info in infos]):
        await _all_or_raise([servers[i].prepare(folders[i], snapshot_id) for i in wave])
        n_prepared += len(wave)
        on_progress("prepare", n_prepared, len(servers))
    # It may have taken an hour, in which another one was published.
    said = await _outcomes([server.info() for server in servers])
    if lacking := _lacking(servers, said, snapshot_id):
        raise _together(lacking)
    return [each for each in said if isinstance(each, InfoResponse)]


def _row(folder: Path, name: str, state: str, sequence: int) -> Listed:
    if state in (FETCHED, UNFINISHED) and not (folder / MANIFEST).exists():
        return Listed(name, state, "", "", 0, "")
    try:
        manifest = Snapshot.open(folder).manifest
    except InvalidSnapshot as error:
        return Listed(name, f"{state} damaged: {error}".strip(), "", "", 0, "")
    return Listed(
        name,
        state,
        manifest.snapshot_id,
        manifest.created_at,
        manifest.n_passages,
        manifest.factory,
        sequence if state == "current" else 0,
        manifest.recall.by_k() if manifest.recall else {},
    )


def _rows(address: str, info: InfoResponse) -> list[Listed]:
    def state(snapshot_id: str, sequence: int) -> str:
        if snapshot_id == info.snapshot_id:
            return "current"
        return "former" if sequence else "prepared"

    return [
        Listed(
            address,
            state(held.snapshot_id, held.sequence),
            held.snapshot_id,
            held.created_at,
            held.n_passages,
            held.factory,
            held.sequence,
            dict(held.recall),
        )
        for held in info.held
    ]


class _Server:
    """The calls of publishing, to one server."""

    def __init__(self, address: str, server_name: str | None, settings: IndexClientSettings) -> None:
        self.address = address
        self.channel = open_channel(address, channel_credentials(settings.tls), server_name)
        self._stub = IndexServiceStub(self.channel)
        self._admin = IndexAdminServiceStub(self.channel)
        shown = bearer(settings.admin_token.get_secret_value() if settings.admin_token else None)
        self._metadata = (("authorization", shown),) if shown else ()

    async def info(self) -> InfoResponse:
        with from_grpc(self.address):
            return await self._stub.Info(InfoRequest(), timeout=TIMEOUT_S)

    async def download(self, url: str, snapshot_id: str) -> DownloadResponse:
        """One that begins anew meanwhile is waited for. Raises ShardUnavailable once it has been silent for N_SILENT
        looks, or says so itself of the URL.
        """
        request = DownloadRequest(url=url, snapshot_id=snapshot_id)
        broken = None
        for _ in range(N_SILENT):
            call = self._admin.Download(request, timeout=TIMEOUT_S, metadata=self._metadata, wait_for_ready=True)
            try:
                with suppress(DeadlineExceeded), from_grpc(self.address):
                    return await call
            except ShardUnavailable as error:
                if wire.ERROR_HEADER in dict(await call.trailing_metadata()):
                    raise
                broken = error  # the connection, or a proxy has no server
                await asyncio.sleep(LOOK_S)
        raise broken or self._silent("fetch")

    async def prepare(self, folder: str, snapshot_id: str) -> InfoResponse:
        """Also raises ShardUnavailable as soon as it has been silent for minutes, which takes an hour otherwise: of a
        machine that is gone no connection tells.
        """
        request = PrepareRequest(folder=folder, snapshot_id=snapshot_id)
        with from_grpc(self.address):
            call = self._admin.Prepare(request, timeout=PREPARE_TIMEOUT_S, metadata=self._metadata)
            preparing, watching = asyncio.ensure_future(call), asyncio.create_task(self._watch())
            try:
                await asyncio.wait((preparing, watching), return_when=asyncio.FIRST_COMPLETED)
                return await (preparing if preparing.done() else watching)
            finally:
                preparing.cancel()
                watching.cancel()

    async def _watch(self) -> NoReturn:
        """Until it is silent; one that refuses to answer is not."""
        n_silent = 0
        while n_silent < N_SILENT:
            await asyncio.sleep(LOOK_S)
            try:
                await self.info()
                n_silent = 0
            except (ShardUnavailable, DeadlineExceeded):
                n_silent += 1
            except OpenbookError:
                n_silent = 0
        raise self._silent("prepare")

    def _silent(self, task: str) -> ShardUnavailable:
        return ShardUnavailable(f"{self.address}: was to {task} a snapshot, and has been silent for {N_SILENT} looks")

    async def publish(self, snapshot_id: str, sequence: int) -> InfoResponse:
        request = PublishRequest(snapshot_id=snapshot_id, sequence=sequence)
        with from_grpc(self.address):
            return await self._admin.Publish(request, timeout=TIMEOUT_S, metadata=self._metadata)

    async def discard(self, snapshot_id: str) -> InfoResponse:
        request = DiscardRequest(snapshot_id=snapshot_id)
        with from_grpc(self.address):
            return await self._admin.Discard(request, timeout=TIMEOUT_S, metadata=self._metadata)


@asynccontextmanager
async def _servers(settings: IndexClientSettings) -> AsyncIterator[list[_Server]]:
    addresses, server_name = await addresses_now(settings)
    servers = [_Server(address, server_name, settings) for address in addresses]
    try:
        yield servers
    finally:
        await asyncio.gather(*(server.channel.close() for server in servers))


async def _outcomes(
    calls: Sequence[Awaitable[Result]], on_done: Callable[[int], None] = lambda n: None
) -> list[Result | OpenbookError]:
    """What came of each, also of those after one that failed."""
    n_done = 0

    async def one(call: Awaitable[Result]) -> Result | OpenbookError:
        nonlocal n_done
        try:
            return await call
        except OpenbookError as error:
            return error
        finally:
            n_done += 1
            on_done(n_done)

    on_done(0)
    return await asyncio.gather(*map(one, calls))


async def _all_or_raise(calls: Sequence[Awaitable[Result]]) -> list[Result]:
    outcomes = await _outcomes(calls)
    if errors := [outcome for outcome in outcomes if isinstance(outcome, OpenbookError)]:
        raise _together(errors)
    return [outcome for outcome in outcomes if not isinstance(outcome, OpenbookError)]


def _lacking(
    servers: "Sequence[_Server]", said: Sequence[InfoResponse | OpenbookError], snapshot_id: str
) -> list[OpenbookError]:
    """An error for every server that did not say that it holds a snapshot: it may have prepared it and begun anew, or
    have dropped it for another one.
    """
    lacking: list[OpenbookError] = []
    for server, each in zip(servers, said, strict=True):
        if isinstance(each, OpenbookError):
            lacking.append(each)
        elif snapshot_id not in {held.snapshot_id for held in each.held}:
            gone = f"{server.address}: does not hold snapshot {snapshot_id} any more: publish it again"
            lacking.append(SnapshotMismatch(gone))
    return lacking


def _together(errors: Sequence[OpenbookError], hint: str = "") -> OpenbookError:
    """One error that names every server: of the kind of the first."""
    return type(errors[0])("; ".join(map(str, errors)) + hint)
