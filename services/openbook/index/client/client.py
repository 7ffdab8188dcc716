"""One index server as seen by its clients: calls with a timeout, answers as core types, failures as our errors."""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, TypeVar

import grpc
from grpc import ChannelConnectivity, StatusCode, aio

from openbook import wire
from openbook.certificates import Pem, Renewed
from openbook.config import ClientTls
from openbook.core.context import Context
from openbook.core.types import Candidates, Float32, Hits, Int64, Passage, RetrievalSettings
from openbook.errors import InvalidRequest, OpenbookError, ShardUnavailable, from_grpc_code
from openbook.index.client.stream import FrameStream, GrpcStream, Stream
from openbook.logs import Lasting
from openbook.v1 import index_pb2, index_pb2_grpc

log = logging.getLogger(__name__)

Message = TypeVar("Message")
T = TypeVar("T")
Credentials = Callable[[], grpc.ChannelCredentials | None]
"""For a connection that is made now."""

CONNECT_TIMEOUT_S = 1.0
HURRY_AGAIN_S = 5.0
RECONNECT_S = 0.05
"""Between two connections begun anew because the one before came to nothing."""
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # the index tier is next door
    # Fewer, larger pieces: with 64 queries a call takes a fifth less.
    ("grpc.http2.max_frame_size", 1 << 20),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    # A server that comes back is used again within half a second, not after gRPC's usual two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),  # what one attempt may take
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
)


def open_channel(address: str, credentials: Credentials = lambda: None, server_name: str | None = None) -> aio.Channel:
    """A connection to an index server, for the running event loop. With TLS its certificate must be of `server_name`,
    or of its address if there is none.
    """
    if (given := credentials()) is None:
        return aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    named = (("grpc.ssl_target_name_override", server_name),) if server_name else ()
    return aio.secure_channel(address, given, options=(*CHANNEL_OPTIONS, *named))


def channel_credentials(tls: ClientTls | None) -> Credentials:
    """Of the settings' files as they are when a connection is made; none for a plain connection.

    Raises:
        InvalidConfig: a file cannot be read, or used.
    """
    return Renewed("index.tls", tls, _from_pem).now if tls else lambda: None


def _from_pem(pem: Pem) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(pem.authorities, pem.key or None, pem.certificate or None)


class IndexClient:
    """One server. Make it within the event loop that uses it.

    Searches and fetches share one long-lived stream, which is opened anew when it broke; cancelling one cancels it at
    the server. It begins as one of gRPC's; where the server offers connections without gRPC and one can be had, calls
    go there from then on. Within `timeout_s` a server answers or says that it will not; how long to wait for one that
    says nothing at all is up to the caller. All calls raise the error whose gRPC code the server sent, such as
    SnapshotMismatch for another `shard`, and ShardUnavailable when the connection breaks or the answer is nonsense.
    """

    def __init__(self, address: str, credentials: Credentials = lambda: None, server_name: str | None = None) -> None:
        self.address = address
        self._credentials = credentials
        self._server_name = server_name
        self._slow = Lasting(log, f"index server {address}: going on without gRPC again", logging.INFO)
        self._left: set[asyncio.Task[None]] = set()
        self._open()

    def _open(self) -> None:
        self._connect()
        self._stream: Stream | None = None
        self._hurrying: asyncio.Task[None] | None = None
        self._hurry_at = -math.inf

    def _connect(self) -> None:
        self._channel = open_channel(self.address, self._credentials, self._server_name)
        self._stub = index_pb2_grpc.IndexServiceStub(self._channel)
        self._connected_at = monotonic()

    async def info(self, timeout_s: float) -> index_pb2.InfoResponse:
        """What the server holds."""
        try:
            with from_grpc(self.address):
                return await self._stub.Info(index_pb2.InfoRequest(), timeout=timeout_s)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) and task.cancelling():
                raise
            # gRPC cancels what waits on a channel that is closed: nobody has cancelled who asks.
            raise ShardUnavailable(f"{self.address}: the connection was closed") from None

    async def search(
        self,
        queries: Float32,
        settings: RetrievalSettings,
        snapshot_id: str,
        context: Context,
        timeout_s: float,
        shard: int | None = None,
    ) -> tuple[Hits, int]:
        """The best k of its shard for (n, d) queries, and the sequence of the server's latest publication."""
        k = settings.k
        request = index_pb2.SearchRequest(k=k, snapshot_id=snapshot_id, parameters=wire.parameters_to_wire(settings))
        call = index_pb2.Call(search=request, context=wire.context_to_wire(context), shard=shard)
        response = (await self._ask(call, timeout_s, queries)).search
        hits = self._read(wire.hits_from_wire, response)
        if hits.ids.shape != (len(queries), k) or (snapshot_id and hits.snapshot_id != snapshot_id):
            raise ShardUnavailable(
                f"{self.address}: must answer {len(queries)} x {k} hits of snapshot {snapshot_id or '(any)'}, "
                f"got {hits.ids.shape} of {hits.snapshot_id}"
            )
        return hits, response.current_sequence

    async def candidates(
        self,
        questions: Sequence[str],
        queries: Float32 | None,
        k: int,
        also: Int64 | None,
        snapshot_id: str,
        context: Context,
        timeout_s: float,
        shard: int | None = None,
    ) -> tuple[Candidates, int]:
        """Of its shard the best k by BM25 for each of n questions, and those of the (n, m) ids `also` that it holds,
        with both scores of each, the dense ones by (n, d) queries; and the sequence of the server's latest publication.
        """
        named = [] if also is None else also.reshape(-1).tolist()
        request = index_pb2.SearchRequest(k=k, snapshot_id=snapshot_id, questions=questions, also=named)
        call = index_pb2.Call(search=request, context=wire.context_to_wire(context), shard=shard)
        response = (await self._ask(call, timeout_s, queries)).search
        found = self._read(wire.candidates_from_wire, response)
        if len(found.ids) != len(questions) or (snapshot_id and found.snapshot_id != snapshot_id):
            raise ShardUnavailable(
                f"{self.address}: must answer {len(questions)} rows of snapshot {snapshot_id or '(any)'}, "
                f"got {len(found.ids)} of {found.snapshot_id}"
            )
        return found, response.current_sequence

    async def fetch(
        self,
        ids: Sequence[int],
        snapshot_id: str,
        with_vectors: bool,
        context: Context,
        timeout_s: float,
        shard: int | None = None,
    ) -> tuple[list[Passage], Float32]:
        """Passages of its shard in the order of their ids, and their exact (n, d) vectors, or (0, 0) unasked."""
        request = index_pb2.FetchRequest(ids=ids, with_vectors=with_vectors, snapshot_id=snapshot_id)
        call = index_pb2.Call(fetch=request, context=wire.context_to_wire(context), shard=shard)
        response = (await self._ask(call, timeout_s)).fetch
        passages = [wire.passage_from_wire(passage) for passage in response.passages]
        vectors = self._read(wire.matrix_from_wire, response.vectors)
        if [passage.id for passage in passages] != list(ids) or len(vectors) != (len(ids) if with_vectors else 0):
            raise ShardUnavailable(f"{self.address}: answered other passages than asked for")
        return passages, vectors

    async def find(
        self, lasting_id: str, snapshot_id: str, context: Context, timeout_s: float, shard: int | None = None
    ) -> list[Passage]:
        """The passage of its shard with this lasting id, if there is one."""
        request = index_pb2.FetchRequest(lasting_ids=[lasting_id], snapshot_id=snapshot_id)
        call = index_pb2.Call(fetch=request, context=wire.context_to_wire(context), shard=shard)
        passages = [wire.passage_from_wire(each) for each in (await self._ask(call, timeout_s)).fetch.passages]
        if [passage.lasting_id for passage in passages] not in ([], [lasting_id]):
            raise ShardUnavailable(f"{self.address}: answered other passages than asked for")
        return passages

    async def check_stream(self, patience_s: float) -> None:
        """Leave the connection of calls if it is another than that of `info` and nothing comes for so long, whatever
        is asked there. Calls under way are then asked again.
        """
        if isinstance(self._stream, FrameStream) and not self._stream.broken:
            await self._stream.check(patience_s)

    async def reset(self) -> None:
        """Begin with a new connection; calls under way fail with ShardUnavailable.

        After a partition an old connection stays silent for many seconds, until TCP tries again.
        """
        close = self._closing()
        self._open()
        await close

    async def close(self) -> None:
        """Let go of the connection."""
        await asyncio.gather(self._closing(), *self._left)

    async def _ask(self, call: index_pb2.Call, timeout_s: float, queries: Float32 | None = None) -> index_pb2.Reply:
        due = monotonic() + timeout_s
        call.timeout_s = timeout_s
        stream = self._usable()
        try:
            reply = await stream.ask(call, queries)
        except ShardUnavailable:
            # The server may have ended the stream to make room, just before the call came. To ask twice does no harm.
            if not stream.broken or stream.was_closed or monotonic() >= due:
                raise
            call.timeout_s = due - monotonic()
            reply = await self._usable().ask(call, queries)
        if reply.HasField("failure"):
            raise from_grpc_code(reply.failure.code, f"{self.address}: {reply.failure.message}")
        return reply

    def _usable(self) -> Stream:
        if self._stream is None or self._stream.broken:
            self._forget_refusal()
            self._stream = GrpcStream(self.address, self._stub.Exchange())
        if isinstance(self._stream, GrpcStream) and self._hurrying is None and monotonic() >= self._hurry_at:
            self._hurrying = asyncio.create_task(self._hurry())
        return self._stream

    def _forget_refusal(self) -> None:
        """Connect anew if the last attempt failed: for as long as gRPC waits before the next one, it would refuse calls
        on the strength of that, and the server may be there again.
        """
        failed = self._channel.get_state() is ChannelConnectivity.TRANSIENT_FAILURE
        if failed and monotonic() >= self._connected_at + RECONNECT_S:
            # Whoever asks there at this moment hears of the refusal, and is not cancelled.
            left = asyncio.create_task(self._channel.close(CONNECT_TIMEOUT_S))
            self._left.add(left)
            left.add_done_callback(self._left.discard)
            self._connect()

    async def _hurry(self) -> None:
        """Go on without gRPC, if the server offers it. What is under way is answered where it was asked."""
        self._hurry_at = monotonic() + HURRY_AGAIN_S
        try:
            info = await self.info(CONNECT_TIMEOUT_S)
            if info.HasField("frames"):
                fast = await FrameStream.open(self.address, info.frames, CONNECT_TIMEOUT_S)
                slow, self._stream = self._stream, fast
                self._slow.ended()
                if slow is not None:
                    try:
                        await slow.drained()
                    finally:
                        await slow.close()
        except OpenbookError as error:
            self._slow.met(f"index server {self.address}: going on with gRPC: {error}")
        finally:
            if self._hurrying is asyncio.current_task():  # and not that of a connection begun anew
                self._hurrying = None

    def _closing(self) -> Coroutine[Any, Any, None]:
        """What closes all that is open now. Nothing more is opened from now on: it would not be closed."""
        if self._hurrying is not None:
            self._hurrying.cancel()
        return _close(self._channel, self._hurrying, self._stream)

    def _read(self, from_wire: Callable[[Message], T], message: Message) -> T:
        """An answer that makes no sense is the server's fault, not that of who asked us."""
        try:
            return from_wire(message)
        except InvalidRequest as error:
            raise ShardUnavailable(f"{self.address}: {error}") from None


@contextmanager
def from_grpc(address: str) -> Iterator[None]:
    """A call to a server fails with the error that the server named."""
    try:
        yield
    except aio.AioRpcError as error:
        # A server that stops cancels the calls that outlast its grace. Our own cancelling never arrives here.
        code = "UNAVAILABLE" if error.code() is StatusCode.CANCELLED else error.code().name
        details = error.details() or ""
        others = "; is that an index server, or one of another version, or does a proxy refuse?"
        hint = others if wire.OTHERS.search(details) else ""
        raise from_grpc_code(code, f"{address}: {details}{hint}") from None


async def _close(channel: aio.Channel, hurrying: "asyncio.Task[None] | None", stream: Stream | None) -> None:
    if hurrying is not None:
        await asyncio.gather(hurrying, return_exceptions=True)
    if stream is not None:
        await stream.close()
    await channel.close()
