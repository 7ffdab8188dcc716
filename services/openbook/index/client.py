"""One index server as seen by its clients: calls with a timeout, answers as core types, failures as our errors."""

from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from grpc import StatusCode, aio

from openbook import wire
from openbook.core.types import Float32, Hits, Passage
from openbook.errors import InvalidRequest, ShardUnavailable, from_grpc_code
from openbook.v1 import index_pb2, index_pb2_grpc

Answer = TypeVar("Answer")

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # the index tier is next door
    # A server that comes back is used again within half a second, not after gRPC's usual two minutes.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
)


class IndexClient:
    """One server. Make it within the event loop that uses it.

    All calls raise the error whose gRPC code the server sent, and ShardUnavailable when it does not answer or answers
    nonsense; DeadlineExceeded when `timeout_s` is over.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = index_pb2_grpc.IndexServiceStub(self._channel)

    async def info(self, timeout_s: float) -> index_pb2.InfoResponse:
        """What the server holds."""
        return await self._call(self._stub.Info(index_pb2.InfoRequest(), timeout=timeout_s))

    async def search(self, queries: Float32, k: int, snapshot_id: str, timeout_s: float) -> Hits:
        """The best k of its shard for (n, d) queries."""
        request = index_pb2.SearchRequest(queries=wire.matrix_to_wire(queries), k=k, snapshot_id=snapshot_id)
        response = await self._call(self._stub.Search(request, timeout=timeout_s))
        with self._blamed():
            hits = wire.hits_from_wire(response)
        if hits.ids.shape != (len(queries), k):
            raise ShardUnavailable(f"{self.address}: must answer {len(queries)} x {k} hits, got {hits.ids.shape}")
        return hits

    async def fetch(
        self, ids: Sequence[int], snapshot_id: str, with_vectors: bool, timeout_s: float
    ) -> tuple[list[Passage], Float32]:
        """Passages of its shard in the order of their ids, and their exact (n, d) vectors, or (0, 0) unasked."""
        request = index_pb2.FetchRequest(ids=ids, with_vectors=with_vectors, snapshot_id=snapshot_id)
        response = await self._call(self._stub.Fetch(request, timeout=timeout_s))
        passages = [wire.passage_from_wire(passage) for passage in response.passages]
        with self._blamed():
            vectors = wire.matrix_from_wire(response.vectors)
        if [passage.id for passage in passages] != list(ids) or len(vectors) != (len(ids) if with_vectors else 0):
            raise ShardUnavailable(f"{self.address}: answered other passages than asked for")
        return passages, vectors

    async def close(self) -> None:
        """Let go of the connection."""
        await self._channel.close()

    async def _call(self, call: Awaitable[Answer]) -> Answer:
        try:
            return await call
        except aio.AioRpcError as error:
            # A server that stops cancels the calls that outlast its grace. Our own cancelling never arrives here.
            code = "UNAVAILABLE" if error.code() is StatusCode.CANCELLED else error.code().name
            raise from_grpc_code(code, f"{self.address}: {error.details()}") from None

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """An answer that makes no sense is the server's fault, not that of who asked us."""
        try:
            yield
        except InvalidRequest as error:
            raise ShardUnavailable(f"{self.address}: {error}") from None
