"""One index server: a process that holds one shard and answers for it until it is told to stop."""

import ctypes
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from openbook.certificates import Pem, Renewed
from openbook.config import IndexServerSettings, ServerTls
from openbook.core.address import address_of
from openbook.errors import PortInUse, StartupError, reason
from openbook.index.connection import listen_here
from openbook.index.disk.snapshot import MAX_DIMENSION
from openbook.index.server.admin import IndexAdminService, Publishing
from openbook.index.server.coalesce import Coalescer
from openbook.index.server.download import Downloads
from openbook.index.server.frames import SEND_S, FrameServer
from openbook.index.server.metrics import ServerMetrics
from openbook.index.server.service import IndexService
from openbook.index.server.streams import OpenStreams
from openbook.index.server.switching import wait_for
from openbook.index.server.threads import SPARED_S, CallThreads, Fetches, Patience
from openbook.index.server.verify import IsAwaited, Verifier
from openbook.index.shard.engine import check_installation
from openbook.index.shard.shard import Shard
from openbook.processes import loading
from openbook.telemetry import MetricsServer
from openbook.v1 import index_pb2, index_pb2_grpc

log = logging.getLogger(__name__)

N_WORKERS = 32  # unary calls at once, streams apart; searches take turns anyhow
MAX_FETCHED_IDS = 1 << 16
MAX_WAITING_CALLS = 1024
DRAIN_INTERVAL_S = 0.05
PATIENCE_S = 10.0  # with a client whose message does not come
STOP_GRACE_S = 5.0
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# M_TRIM_THRESHOLD, M_MMAP_THRESHOLD and M_ARENA_MAX of malloc.h. To give back every reply at once would cost time.
MALLOC_OPTIONS = {-1: 4 << 20, -3: 32 << 20, -8: 4}
EXCHANGE = f"/{index_pb2.DESCRIPTOR.services_by_name['IndexService'].full_name}/Exchange"  # has its own limit
SERVICES = tuple(service.full_name for service in index_pb2.DESCRIPTOR.services_by_name.values())


class IndexServer:
    """One replica of one shard. Checks every byte of the shard before it listens.

    Raises:
        InvalidSnapshot: the folder is no snapshot, has no such shard, or a file of it was altered.
        StartupError: FAISS is missing or installed twice.
    """

    def __init__(self, settings: IndexServerSettings) -> None:
        check_installation()
        self._settings = settings
        self._verifier = Verifier()
        self.port = settings.port
        self._publishing = Publishing(settings.snapshot, self._open, settings.retain_s, settings.min_recall_at_10)
        self.held = self._publishing.held
        self._downloads = Downloads(settings.snapshot, settings.shard, settings.fetch_from)
        self._searches = Coalescer(settings.max_queued_rows, settings.max_rows)
        self._fetches = Fetches(MAX_FETCHED_IDS)
        n_workers = N_WORKERS + settings.max_streams  # a stream takes one for as long as it lives
        self._workers = CallThreads(n_workers, n_spared=N_WORKERS // 2)
        self._streams = OpenStreams(settings.max_streams)
        self._service = IndexService(self.held, self._searches, self._fetches, self._workers, self._streams)
        self.metrics = ServerMetrics(self.held, self._searches, self._streams)
        self._stopped = threading.Event()
        self._drainer = threading.Thread(target=self._drain, name="drain", daemon=True)
        self._follower = threading.Thread(
            target=self._publishing.follow, args=(self._stopped,), name="follow", daemon=True
        )
        self._health = health.HealthServicer()
        self._max_bytes = settings.max_rows * MAX_DIMENSION * 4 + (1 << 16)
        self._frames: FrameServer | None = None
        self._server = grpc.server(
            self._workers,
            interceptors=[Patience(self._workers, EXCHANGE)],
            maximum_concurrent_rpcs=n_workers + MAX_WAITING_CALLS,
            options=(
                ("grpc.so_reuseport", 0),  # or a second server would silently take half of the calls
                ("grpc.max_receive_message_length", self._max_bytes),
                ("grpc.max_send_message_length", -1),
                # 64 queries are 196 KB: in frames of 16 KB, of which 64 KB may be under way, they take a fifth longer.
                ("grpc.http2.max_frame_size", 1 << 20),
                ("grpc.http2.lookahead_bytes", 4 << 20),
            ),
        )
        index_pb2_grpc.add_IndexServiceServicer_to_server(self._service, self._server)
        token = settings.admin_token.get_secret_value() if settings.admin_token else None
        admin = IndexAdminService(self._publishing, self._downloads, token, settings.host)
        index_pb2_grpc.add_IndexAdminServiceServicer_to_server(admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    @property
    def shard(self) -> Shard:
        """Of the current snapshot."""
        return self.held.current

    @property
    def address(self) -> str:
        """host:port, the real one once it was started on port 0."""
        return address_of(self._settings.host, self.port)

    def n_under_way(self) -> int:
        """Calls, and parts of fetches."""
        return self._streams.n_under_way + self._workers.n_working + self._fetches.n_parts

    def start(self) -> None:
        """Listen.

        Raises:
            PortInUse: another process listens there.
            StartupError: the address cannot be listened on.
            InvalidConfig: the files of TLS cannot be used.
        """
        try:
            if self._settings.tls:
                self.port = self._server.add_secure_port(self.address, _credentials(self._settings.tls))
            else:
                self.port = self._server.add_insecure_port(self.address)
        except RuntimeError:
            raise _why_not(self._settings.host, self.port) from None
        self._fetches.start()
        self._workers.start()
        if self._settings.frame_port is not None and not self._settings.tls:
            listener = _listen(self._settings.host, self._settings.frame_port)
            here = listen_here()
            self._frames = FrameServer([listener, here] if here else [listener], self._service, self._max_bytes)
            self._service.frames = index_pb2.Frames(port=listener.getsockname()[1], key=self._frames.key)
            if here is not None:
                self._service.frames.name = here.getsockname()[1:].decode()
            self._frames.start()
        self._server.start()
        self._drainer.start()
        self._follower.start()
        for service in ("", *SERVICES):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Take no more calls, finish those begun, within the grace. May be called twice."""
        self._health.enter_graceful_shutdown()
        self._stopped.set()
        self._downloads.close()
        stopped = self._server.stop(grace_s)
        if self._frames is not None:
            self._frames.refuse()
        self._service.end_streams()
        if self._frames is not None:
            self._frames.stop(grace_s)
        while not stopped.wait(SPARED_S):  # again and again: a call that came before may begin to wait only now
            self._workers.cancel_waiting(monotonic() - SPARED_S)
        self._verifier.close()  # or what is prepared would keep a thread for as long as reading a snapshot takes
        self._searches.close()
        self._fetches.stop()
        self._workers.shutdown()
        if self._follower.ident is not None:
            self._follower.join(STOP_GRACE_S)  # no longer: a disk may never answer

    def _open(self, folder: Path, gently: bool, is_awaited: IsAwaited = lambda: True) -> Shard:
        """Verified, which also reads every byte into the page cache, mapped and tested."""
        if gently:
            self._verifier.verify(folder, self._settings.shard, is_awaited)
        limits = self._settings
        shard = Shard(
            folder,
            limits.shard,
            device=limits.device,
            huge_pages=limits.huge_pages,
            keep_in_memory=limits.keep_in_memory,
            n_threads=limits.n_threads,
            max_k=limits.max_k,
            max_rows=limits.max_rows,
            max_width=limits.max_width,
            verify=not gently,
        )
        shard.prewarm()
        shard.self_test()
        if gently and self.held.current.words.are_open:
            shard.words.open()  # or it would be done while somebody waits for his passages
        return shard

    def _drain(self) -> None:
        while not self._stopped.wait(DRAIN_INTERVAL_S):
            for snapshot_id in self.held.drain():
                log.info("let go of snapshot %s", snapshot_id)
            self._downloads.end_forgotten()
            self._workers.cancel_waiting(monotonic() - PATIENCE_S)
            self._streams.end_unread(monotonic() - SEND_S)

    def __enter__(self) -> "IndexServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def run(settings: IndexServerSettings) -> None:
    """Serve until SIGTERM or SIGINT; print the address on standard output once it listens. Raises as `IndexServer`."""
    # Written to when a signal comes: Python's handlers run in this thread, which a signal to another one does not wake.
    told_to_stop, tells = os.pipe()
    os.set_blocking(tells, False)
    _give_back_memory()
    with loading():
        server = IndexServer(settings)  # reads every byte: until it is done, a signal just ends the process
    signal.set_wakeup_fd(tells)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    # Metrics last: of their ports one may be the server's own.
    with server.metrics, server, MetricsServer(f"index-{settings.shard}", settings.host, settings.metrics_port):
        _tell(server)
        print(server.address, flush=True)
        wait_for(told_to_stop, server.n_under_way)
        log.info("stopping")
    for number in STOP_SIGNALS:  # a handler of ours is taken away while Python ends: one more signal would kill
        signal.signal(number, signal.SIG_IGN)


def _tell(server: IndexServer) -> None:
    shard = server.shard  # not a name of `run`, which would hold its memory long after the last one who asks it
    log.info(
        "serving shard %d, %d passages of snapshot %s, at %s",
        shard.number,
        shard.n_passages,
        shard.manifest.snapshot_id,
        server.address,
    )


def _give_back_memory() -> None:
    """To the system, what was freed: left to itself, glibc keeps for every few threads what they once needed."""
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in MALLOC_OPTIONS.items():
            mallopt(option, value)


def _credentials(tls: ServerTls) -> grpc.ServerCredentials:
    files = Renewed("index_server.tls", tls, _configuration)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """gRPC asks at each new connection, one after the other, whether there is something new."""
        return files.current if files.changed() else None

    given = cast("Callable[[], grpc.ServerCertificateConfiguration]", renewed)  # gRPC's types know of no None
    return grpc.dynamic_ssl_server_credentials(files.current, given, tls.client_ca is not None)


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.authorities or None)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        PortInUse: another process does.
        StartupError: it cannot be listened on.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:  # the latter of a name that no host can have
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise PortInUse(f"{address_of(host, port)}: another process listens here") from None
        raise StartupError(f"{address_of(host, port)}: cannot listen: {reason(error)}") from None
    return listener


def _why_not(host: str, port: int) -> StartupError:
    """gRPC says that it cannot bind, not why: ask the socket."""
    try:
        _listen(host, port).close()
    except StartupError as error:
        return error
    return StartupError(f"{address_of(host, port)}: cannot listen")
