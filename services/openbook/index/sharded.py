"""All shards as one: fans out, merges, fails over, and finds its way after restarts."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from time import monotonic
from typing import Any, TypeVar

import numpy as np

from openbook.core.deadline import Deadline
from openbook.core.topk import check_search, merge
from openbook.core.types import Float32, Hits, Passage
from openbook.errors import DeadlineExceeded, InvalidConfig, OpenbookError, ShardUnavailable, SnapshotMismatch
from openbook.index.client import IndexClient
from openbook.index.routing import ShardServers, Tier
from openbook.telemetry import SHARD_ERRORS, SHARD_SECONDS
from openbook.v1.index_pb2 import InfoResponse

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class ShardedIndex:
    """The index tier behind some servers, each of which says itself which shard it holds.

    Several servers may hold one shard: calls rotate among them, and one that fails is tried once more on the next.
    A server that was dead is asked again, and a tier with a new snapshot is recognised: nothing needs a restart.
    To be used within one event loop.

    Raises:
        InvalidConfig: there are no addresses.
    """

    def __init__(self, addresses: Sequence[str], timeout_s: float) -> None:
        if not addresses:
            raise InvalidConfig("index.addresses must name at least one server, got none")
        self._addresses = tuple(addresses)
        self._timeout_s = timeout_s
        self._clients: dict[str, IndexClient] = {}
        self._tier: Tier | None = None
        self._stale = True
        self._connecting = asyncio.Lock()

    async def connect(self) -> None:
        """Ask every server what it holds. Searches do this by themselves when they must.

        Raises:
            ShardUnavailable: no server holds some shard, or none answers.
            SnapshotMismatch: the servers hold different snapshots, or by now one of another encoder than at first.
        """
        if not self._clients:
            self._clients = {address: IndexClient(address) for address in self._addresses}
        answers = await asyncio.gather(*(self._info(client) for client in self._clients.values()))
        found = dict(zip(self._clients, answers, strict=True))
        failures = [str(answer) for answer in answers if isinstance(answer, OpenbookError)]
        if failures:
            log.warning("index servers that do not answer: %s", "; ".join(failures))
        tier = Tier.of({a: info for a, info in found.items() if isinstance(info, InfoResponse)}, failures)
        if self._tier is not None and tier.encoder_fingerprint != self._tier.encoder_fingerprint:
            # Queries would still find passages, and all of them wrong.
            raise SnapshotMismatch(
                f"snapshot {tier.snapshot_id} was embedded by {tier.encoder!r} ({tier.encoder_fingerprint}), and we "
                f"began with {self._tier.encoder!r} ({self._tier.encoder_fingerprint}): start anew with its encoder"
            )
        self._tier = tier
        self._stale = False

    @property
    def snapshot_id(self) -> str:
        """Of the snapshot that the servers held when they were last asked, like all that follows."""
        return self._known().snapshot_id

    @property
    def dimension(self) -> int:
        """d"""
        return self._known().dimension

    @property
    def n_passages(self) -> int:
        """In all shards together."""
        return self._known().n_passages

    @property
    def encoder(self) -> str:
        """Name of the passage encoder."""
        return self._known().encoder

    @property
    def encoder_fingerprint(self) -> str:
        """Fingerprint of the passage encoder."""
        return self._known().encoder_fingerprint

    async def search(self, queries: Float32, k: int, deadline: Deadline) -> Hits:
        """As `openbook.rag.ports.Retriever.search`."""
        try:
            return await self._search(queries, k, deadline)
        except SnapshotMismatch:  # the tier was restarted with another snapshot since it was asked
            self._stale = True
            return await self._search(queries, k, deadline)

    async def fetch(self, ids: Sequence[int], snapshot_id: str, deadline: Deadline) -> list[Passage]:
        """As `openbook.rag.ports.PassageStore.fetch`."""
        passages, _ = await self._fetch(ids, snapshot_id, False, deadline)
        return passages

    async def fetch_with_vectors(
        self, ids: Sequence[int], snapshot_id: str, deadline: Deadline
    ) -> tuple[list[Passage], Float32]:
        """The passages in the order of their ids, and their exact (n, d) vectors. Raises as `fetch`."""
        return await self._fetch(ids, snapshot_id, True, deadline)

    async def close(self) -> None:
        """Let go of all connections."""
        await asyncio.gather(*(client.close() for client in self._clients.values()))
        self._clients, self._stale = {}, True

    async def _search(self, queries: Float32, k: int, deadline: Deadline) -> Hits:
        tier = await self._current(deadline)
        queries = check_search(queries, k, tier.dimension, tier.max_k, tier.max_rows)
        calls = [
            self._ask("Search", shard, deadline, lambda c, timeout_s: c.search(queries, k, tier.snapshot_id, timeout_s))
            for shard in tier.shards
        ]
        return merge(await _all(calls), k)

    async def _fetch(
        self, ids: Sequence[int], snapshot_id: str, with_vectors: bool, deadline: Deadline
    ) -> tuple[list[Passage], Float32]:
        tier = await self._current(deadline)
        if tier.snapshot_id != snapshot_id:
            raise SnapshotMismatch(f"the index tier holds snapshot {tier.snapshot_id}, asked for {snapshot_id}")
        parts = tier.locate(np.asarray(ids, np.int64))
        passages: dict[int, Passage] = {}
        vectors = np.empty((len(ids), tier.dimension if with_vectors else 0), np.float32)

        async def fill(shard: ShardServers, positions: list[int]) -> None:
            wanted = [ids[i] for i in positions]
            found, part = await self._ask(
                "Fetch", shard, deadline, lambda c, timeout_s: c.fetch(wanted, snapshot_id, with_vectors, timeout_s)
            )
            passages.update(zip(positions, found, strict=True))
            if with_vectors:
                vectors[positions] = part

        await _all([fill(shard, positions.tolist()) for shard, positions in parts])
        return [passages[i] for i in range(len(ids))], vectors

    async def _info(self, client: IndexClient) -> InfoResponse | OpenbookError:
        try:
            return await client.info(self._timeout_s)
        except OpenbookError as error:
            return error

    async def _current(self, deadline: Deadline) -> Tier:
        deadline.check("the index tier was asked")
        if self._stale:
            try:
                async with asyncio.timeout(deadline.remaining_s()), self._connecting:
                    if self._stale:  # unless another search saw to it meanwhile
                        await self.connect()
            except TimeoutError:
                raise DeadlineExceeded("deadline passed before the index servers said what they hold") from None
        return self._known()

    def _known(self) -> Tier:
        if self._tier is None:
            raise ShardUnavailable(f"index servers {', '.join(self._addresses)} were not asked yet what they hold")
        return self._tier

    async def _ask(
        self,
        method: str,
        shard: ShardServers,
        deadline: Deadline,
        call: Callable[[IndexClient, float], Awaitable[Answer]],
    ) -> Answer:
        """The first answer of two servers of a shard."""
        failures = []
        for address in shard.next_two():
            deadline.check(f"shard {shard.number} was asked")
            timeout_s = min(self._timeout_s, deadline.remaining_s())
            started = monotonic()
            try:
                return await call(self._clients[address], timeout_s)
            except (ShardUnavailable, DeadlineExceeded) as error:
                SHARD_ERRORS.labels(shard.number, error.grpc_code).inc()
                if isinstance(error, DeadlineExceeded) and timeout_s < self._timeout_s:
                    raise  # it was the caller's time that ran out, not the server's
                failures.append(str(error))
            finally:
                SHARD_SECONDS.labels(shard.number, method).observe(monotonic() - started)
        self._stale = True  # by now another server may hold it
        raise ShardUnavailable(f"shard {shard.number} does not answer: {'; '.join(failures)}")


async def _all(calls: Iterable[Coroutine[Any, Any, Answer]]) -> list[Answer]:
    """All results in order; the first failure ends the other calls."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
