"""All shards as one: fans out, merges, keeps to one snapshot, and finds its way after restarts and publications."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from time import monotonic
from typing import TypeVar

import numpy as np

from openbook.config import ClientTls, IndexClientSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.fusion import depth, joined
from openbook.core.hedges import HEDGE_BUDGET
from openbook.core.origin import Located, is_lasting_id, position_of
from openbook.core.together import all_of
from openbook.core.topk import check_coverage, check_questions, check_search, check_without, merge, told_why
from openbook.core.types import Candidates, Coverage, Float32, Hits, Passage, RetrievalSettings
from openbook.errors import (
    DeadlineExceeded,
    InvalidConfig,
    OpenbookError,
    ShardUnavailable,
    SnapshotMismatch,
    UnknownPassage,
)
from openbook.index.client.client import IndexClient, channel_credentials
from openbook.index.client.discovery import Change, Followed, Listed, Source, source_of
from openbook.index.client.replicas import Moved, Replicas
from openbook.index.client.routing import Router
from openbook.index.client.tier import ShardServers, Tier, check_complete, no_server
from openbook.index.client.told import Told
from openbook.v1.index_pb2 import InfoResponse

log = logging.getLogger(__name__)

Result = TypeVar("Result")

PARTIAL_SHARE = 0.9
"""Of the time left, what a search that may be partial waits for its shards: the rest is for what comes after."""


class ShardedIndex:
    """The index tier behind some servers, each of which says itself which shard it holds.

    Several servers may hold one shard (see `routing` for who is asked when). A search and its fetches keep to one
    snapshot: the one published last that all shards can serve. Every reply names the latest publication: a search that
    hears of one it did not know is made again (see `told`). A server that was dead is used again soon after its return:
    nothing needs a restart. With a source, servers come and go as its list says. To be used within one event loop.

    Raises:
        InvalidConfig: there are neither addresses nor a source, or a file for TLS cannot be read.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        hedge_budget: float = HEDGE_BUDGET,
        tls: ClientTls | None = None,
        source: Source | None = None,
        server_name: str | None = None,
    ) -> None:
        if not addresses and source is None:
            raise InvalidConfig("index.addresses or index.discover must name at least one server, got none")
        self._listed = Listed(tuple(dict.fromkeys(addresses)))
        self._source = source
        self._server_name = server_name or (source.server_name if source else None)
        self._followed: Followed | None = None
        self._timeout_s = timeout_s
        self._hedge_budget = hedge_budget
        self._credentials = channel_credentials(tls)
        self._replicas: Replicas | None = None
        self._told = Told()
        self._tier: Tier | None = None  # the last whole one, or the part that we began with
        self._is_latest = False  # whether nobody has said anything since it was chosen
        self._asking: asyncio.Task[None] | None = None
        self._something_said = asyncio.Event()  # another one each time

    @classmethod
    def of(cls, settings: IndexClientSettings, source: Source | None = None) -> "ShardedIndex":
        """As the settings say; the source is theirs unless it is given."""
        source = source or source_of(settings)
        return cls(
            settings.addresses, settings.timeout_s, settings.hedge_budget, settings.tls, source, settings.server_name
        )

    async def connect(self, min_coverage: float = 1.0) -> None:
        """Ask every server what it holds. Searches do this by themselves when they must.

        Raises:
            ShardUnavailable: no server of some shard answers, and the others have less than `min_coverage`.
            SnapshotMismatch: the servers hold no snapshot in common, or by now one of another encoder than at first.
        """
        await self._ask_all(Deadline.never())
        failures = self._failures()
        if failures:
            log.warning("index servers that do not answer: %s", "; ".join(failures))
        tier, router = self._current(), self._connected().router
        if tier is None or min_coverage == 1.0:
            tier = check_complete(tier, self._alive(), failures)
        within_reach = [shard.number for shard in tier.shards if not router.is_gone(shard.addresses)]
        check_coverage(tier.coverage(within_reach), min_coverage, failures)
        begun = self._as_begun(tier)
        self._tier = self._tier or begun

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the servers that are listed by now."""
        return self._listed.addresses

    @property
    def named(self) -> tuple[str, ...]:
        """All that an error may name: addresses, also of servers that left lately, and the name in certificates."""
        return (*self._listed.addresses, *self._listed.former, *filter(None, [self._server_name]))

    @property
    def snapshot_id(self) -> str:
        """Of the snapshot that is searched, as far as the servers were asked, like all that follows."""
        return self._known().snapshot_id

    @property
    def n_shards(self) -> int:
        """0 before any server said it."""
        if self._tier:
            return self._tier.n_shards
        return max((tier.n_shards for tier in self._told.tiers.values()), default=0)

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

    @property
    def max_k(self) -> int:
        """Of hits, that every server gives at once."""
        return self._known().max_k

    @property
    def max_rows(self) -> int:
        """Of queries or questions, that every server takes at once."""
        return self._known().max_rows

    async def search(self, queries: Float32, settings: RetrievalSettings, context: Context) -> Hits:
        """As `openbook.rag.ports.Retriever.search`."""

        async def once(tier: Tier) -> Hits:
            checked = check_search(queries, settings.k, tier.dimension, tier.max_k, tier.max_rows)

            async def call(shard: int, client: IndexClient, inner: Context, timeout_s: float) -> Hits:
                hits, sequence = await client.search(checked, settings, tier.snapshot_id, inner, timeout_s, shard)
                self._check_latest(tier, client, sequence)
                return hits

            hits, coverage = await self._of_shards("Search", tier, len(checked), call, settings, context)
            return merge(hits, settings.k, coverage)

        return await self._on_latest(once, settings, context)

    async def candidates(
        self, questions: Sequence[str], queries: Float32 | None, settings: RetrievalSettings, context: Context
    ) -> Candidates:
        """As `openbook.rag.ports.Retriever.candidates`."""

        async def once(tier: Tier) -> Candidates:
            check_questions(questions, settings.k, tier.max_k, tier.max_rows)
            check_without(settings.k, settings.without, tier.max_k)
            wide = replace(settings, k=depth(settings, tier.max_k))
            why = f"{settings.retriever} ranks {wide.k} passages for k = {settings.k}"
            checked = queries
            if queries is not None:
                checked = check_search(queries, wide.k, tier.dimension, tier.max_k, tier.max_rows)

            async def call(shard: int, client: IndexClient, inner: Context, timeout_s: float) -> Candidates:
                also = None
                if checked is not None:
                    with told_why(wide.k, settings.k, why):
                        hits, sequence = await client.search(checked, wide, tier.snapshot_id, inner, timeout_s, shard)
                    self._check_latest(tier, client, sequence)
                    also = hits.ids
                asked = questions, checked, wide.k, also
                found, sequence = await client.candidates(*asked, tier.snapshot_id, inner, timeout_s, shard)
                self._check_latest(tier, client, sequence)
                return found

            found, coverage = await self._of_shards("Candidates", tier, len(questions), call, settings, context)
            return replace(joined(found), coverage=coverage, n_named=wide.k)

        return await self._on_latest(once, settings, context)

    async def fetch(self, ids: Sequence[int], snapshot_id: str, context: Context) -> list[Passage]:
        """As `openbook.rag.ports.PassageStore.fetch`."""
        passages, _ = await self._fetch(ids, snapshot_id, False, context)
        return passages

    async def fetch_with_vectors(
        self, ids: Sequence[int], snapshot_id: str, context: Context
    ) -> tuple[list[Passage], Float32]:
        """The passages in the order of their ids, and their exact (n, d) vectors. Raises as `fetch`."""
        return await self._fetch(ids, snapshot_id, True, context)

    async def locate(self, passage_id: str, snapshot_id: str, context: Context) -> Located:
        """As `openbook.rag.ports.PassageStore.locate`."""

        async def tier_of() -> Tier:
            context.deadline.check("a passage was looked for")
            return await (self._tier_of(snapshot_id, context) if snapshot_id else self._usable(context.deadline, 0.0))

        async def once(tier: Tier) -> Located:
            if not is_lasting_id(passage_id):
                return Located(position_of(passage_id), tier.snapshot_id, tier.n_passages)

            async def find(shard: int, client: IndexClient, inner: Context, timeout_s: float) -> list[Passage]:
                return await client.find(passage_id, tier.snapshot_id, inner, timeout_s, shard)

            ask = self._connected().ask
            found = await all_of([ask("Fetch", each, 1, context, partial(find, each.number)) for each in tier.shards])
            for passage in chain.from_iterable(found):
                return Located(passage.id, tier.snapshot_id, tier.n_passages)
            if tier.missing:
                raise ShardUnavailable(f"{no_server(tier)}, and passage {passage_id} may be in one of those")
            raise UnknownPassage(f"no passage of snapshot {tier.snapshot_id} has the lasting id {passage_id}")

        return await self._in_one(tier_of, once, context)

    async def close(self) -> None:
        """Let go of all connections and of what runs in the background."""
        if self._followed is not None:
            followed, self._followed = self._followed, None
            await followed.close()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        if self._replicas is not None:
            replicas, self._replicas = self._replicas, None
            await replicas.close()
        self._told, self._is_latest = Told(), False

    def servers(self) -> Iterator[tuple[str, bool]]:
        """Of each server its shard, "" if it never answered, and whether it answers as far as is known."""
        infos, replicas = self._told.infos, self._replicas
        for address in self._listed.addresses:
            is_gone = replicas is None or replicas.router.is_gone([address])
            yield str(infos[address].shard) if address in infos else "", address in infos and not is_gone

    @property
    def sequence(self) -> int:
        """Of the publication of the snapshot that is searched; 0 before the servers were asked."""
        return self._tier.sequence if self._tier else 0

    async def _on_latest(
        self, once: Callable[[Tier], Awaitable[Result]], settings: RetrievalSettings, context: Context
    ) -> Result:
        """What `once` finds in the snapshot published last."""
        return await self._in_one(lambda: self._usable(context.deadline, settings.min_coverage), once, context)

    async def _in_one(
        self, tier_of: Callable[[], Awaitable[Tier]], once: Callable[[Tier], Awaitable[Result]], context: Context
    ) -> Result:
        """What `once` finds, all of it in one snapshot: it is made again when another one is to be searched meanwhile,
        when servers have left, and, after all were asked, when one does not hold the snapshot any more.
        """
        refused = ""
        while True:
            tier = await tier_of()
            try:
                return await once(tier)
            except (_Outdated, Moved):
                continue
            except SnapshotMismatch:  # published or restarted since the servers were asked
                if tier.snapshot_id == refused:
                    raise
                refused = tier.snapshot_id
                await self._ask_all(context.deadline)

    def _check_latest(self, tier: Tier, client: IndexClient, sequence: int) -> None:
        """Raises _Outdated where a server's reply names a publication after that of the tier."""
        if sequence > tier.sequence and self._is_outdated(tier, client.address, sequence):
            raise _Outdated

    async def _of_shards(
        self,
        method: str,
        tier: Tier,
        n_rows: int,
        call: Callable[[int, IndexClient, Context, float], Awaitable[Result]],
        settings: RetrievalSettings,
        context: Context,
    ) -> tuple[list[Result], Coverage]:
        """What one replica of every shard answers, or of as many as cover enough; and how much they do."""
        replicas, min_coverage = self._connected(), settings.min_coverage

        async def ask(shard: ShardServers, context: Context) -> Result:
            return await replicas.ask(method, shard, n_rows, context, partial(call, shard.number))

        if min_coverage == 1.0:
            searches = [ask(shard, context) for shard in tier.shards]
            return await all_of(searches), Coverage(tier.n_passages, tier.n_passages)
        alive = [shard for shard in tier.shards if not replicas.router.is_gone(shard.addresses)]
        soon = replace(context, deadline=Deadline.after(PARTIAL_SHARE * context.deadline.remaining_s()))

        async def ask_or_error(shard: ShardServers) -> Result | OpenbookError:
            try:
                return await ask(shard, soon)
            except OpenbookError as error:
                # One that is itself: its servers fail at it. What others say, as that it is busy, is of the question.
                if type(error) is OpenbookError or isinstance(error, ShardUnavailable | DeadlineExceeded):
                    return error
                raise

        found = dict(zip(alive, await all_of(map(ask_or_error, alive)), strict=True))
        answers = {shard.number: each for shard, each in found.items() if not isinstance(each, OpenbookError)}
        problems = [str(each) for each in found.values() if isinstance(each, OpenbookError)]
        coverage = tier.coverage(answers)
        check_coverage(coverage, min_coverage, problems)
        return list(answers.values()), coverage

    async def _fetch(
        self, ids: Sequence[int], snapshot_id: str, with_vectors: bool, context: Context
    ) -> tuple[list[Passage], Float32]:
        async def tier_of() -> Tier:
            context.deadline.check("passages were fetched")
            return await self._tier_of(snapshot_id, context)

        async def once(tier: Tier) -> tuple[list[Passage], Float32]:
            passages: dict[int, Passage] = {}
            vectors = np.empty((len(ids), tier.dimension if with_vectors else 0), np.float32)

            async def fill(shard: ShardServers, positions: list[int]) -> None:
                wanted = [ids[i] for i in positions]

                async def fetch(client: IndexClient, inner: Context, timeout_s: float) -> tuple[list[Passage], Float32]:
                    return await client.fetch(wanted, snapshot_id, with_vectors, inner, timeout_s, shard.number)

                found, part = await self._connected().ask("Fetch", shard, len(wanted), context, fetch)
                passages.update(zip(positions, found, strict=True))
                if with_vectors:
                    vectors[positions] = part

            await all_of(fill(shard, where.tolist()) for shard, where in tier.locate(np.asarray(ids, np.int64)))
            return [passages[i] for i in range(len(ids))], vectors

        return await self._in_one(tier_of, once, context)

    async def _tier_of(self, snapshot_id: str, context: Context) -> Tier:
        tier = self._told.tiers.get(snapshot_id)
        if tier is not None and tier.missing and not self._have_all_spoken():
            await self._ask_all(context.deadline)
            tier = self._told.tiers.get(snapshot_id)
        if tier is None:
            current = await self._usable(context.deadline, 0.0)
            if snapshot_id not in self._told.tiers:  # another endpoint may have heard of it first
                await self._ask_all(context.deadline)
            tier = self._told.tiers.get(snapshot_id)
            if tier is None:
                raise SnapshotMismatch(f"the index tier holds snapshot {current.snapshot_id}, asked for {snapshot_id}")
        return tier

    async def _usable(self, deadline: Deadline, min_coverage: float) -> Tier:
        """The snapshot to search, once the servers have said what they hold."""
        deadline.check("the index tier was asked")
        tier = self._current()
        is_known = tier is not None and self._told.is_known(tier)
        if tier is not None and is_known and not tier.missing:
            return tier
        if min_coverage == 1.0:
            await self._ask_all(deadline, self._has_news)
        elif tier is not None and is_known:
            self._begin_asking()
            return self._as_begun(tier)
        else:
            with suppress(DeadlineExceeded):  # some may have answered
                await self._ask_all(Deadline.after(deadline.remaining_s() / 2), self._has_news)
        tier = self._current()
        if tier is None or min_coverage == 1.0:
            return check_complete(tier, self._alive(), self._failures())
        return self._as_begun(tier)

    def _have_all_spoken(self) -> bool:
        """Whether every server that is listed has said what it holds, or does not answer."""
        replicas = self._connected()
        known = {*self._told.recent(), *replicas.problems}  # what was said before the latest publication is no answer
        return all(each in known or replicas.router.is_gone([each]) for each in replicas.addresses)

    def _has_news(self) -> bool:
        """Whether the latest snapshot that was named is whole: nobody needs to wait for those who are still silent."""
        tier = self._current()
        return tier is not None and not tier.missing and self._told.is_known(tier)

    async def _ask_all(self, deadline: Deadline, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Ask all servers what they hold, once for all who want to know. What they say is of now.

        Raises:
            DeadlineExceeded: not all have answered in time, or were found not to, nor was it enough before.
        """
        since = monotonic()
        try:
            async with asyncio.timeout(deadline.remaining_s()):
                # Another one may be published while they are asked: what was said before then says nothing of it. And
                # other servers may join, who were not asked.
                while not is_enough() and not (
                    self._told.all_asked_at >= max(since, self._told.outdated_before) and self._have_all_spoken()
                ):
                    await self._next_said()
        except TimeoutError:
            raise DeadlineExceeded("deadline passed before the index servers said what they hold") from None

    def _is_outdated(self, tier: Tier, address: str, sequence: int) -> bool:
        """Whether another one is perhaps to be searched in its place, for all that we know and this server's reply."""
        if self._told.reply(address, sequence, monotonic()):
            self._is_latest = False
        latest = self._current()
        return latest is None or latest.snapshot_id != tier.snapshot_id or not self._told.is_known(latest)

    def _begin_asking(self) -> asyncio.Task[None]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return self._asking

    async def _ask(self) -> None:
        if self._source is not None:
            self._followed = self._followed or Followed(self._source, self._listed, self._changed)
            await self._followed.begin()
        began = monotonic()
        await self._connected().info_of_all(self._timeout_s)
        self._told.all_asked_at, self._is_latest = began, False

    async def _next_said(self) -> None:
        """Returns when one more server has said what it holds, or all were asked."""
        asking, said = self._begin_asking(), asyncio.create_task(self._something_said.wait())
        try:
            await asyncio.wait({asking, said}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            said.cancel()
        if asking.done():
            asking.result()

    def _alive(self) -> dict[str, InfoResponse]:
        """What the servers said lately that are not known to be gone."""
        router = self._connected().router
        return {address: info for address, info in self._told.recent().items() if not router.is_gone([address])}

    def _failures(self) -> list[str]:
        problems = self._connected().problems
        of_the_list = ["the list of index servers cannot be read"] if self._listed.problem else []  # the log says more
        return of_the_list + [str(problems[address]) for address in self._listed.addresses if address in problems]

    def _connected(self) -> Replicas:
        if self._replicas is None:
            router = Router(self._timeout_s, self._hedge_budget)
            self._replicas = Replicas(self.addresses, self._credentials, router, self._on_info, self._server_name)
        return self._replicas

    def _changed(self, change: Change) -> None:
        """Servers joined the list, or left it."""
        for address in change.left:
            self._told.forget(address)
        self._is_latest = False
        self._connected().change(change.joined, change.left, self._timeout_s)

    def _on_info(self, address: str, info: InfoResponse, asked_at: float) -> None:
        self._told.info(address, info, asked_at)
        self._is_latest = False
        self._something_said.set()
        self._something_said = asyncio.Event()

    def _current(self) -> Tier | None:
        """The snapshot to search, as far as is known.

        Raises:
            SnapshotMismatch: it was embedded by another encoder than the one we began with.
        """
        known = self._tier
        if known is not None and self._is_latest:
            return known
        tier = self._told.latest(self._alive(), known)
        if tier is None or tier.missing:
            return tier
        self._tier, self._is_latest = self._as_begun(tier), True
        return tier

    def _as_begun(self, tier: Tier) -> Tier:
        """The tier. Raises SnapshotMismatch: it was embedded by another encoder than the one we began with."""
        known = self._tier
        if known is not None and tier.encoder_fingerprint != known.encoder_fingerprint:
            # Queries would still find passages, and all of them wrong.
            raise SnapshotMismatch(
                f"snapshot {tier.snapshot_id} was embedded by encoder {tier.encoder_fingerprint}, and we began with "
                f"{known.encoder_fingerprint}: start anew with its encoder"  # their names may be folders
            )
        return tier

    def _known(self) -> Tier:
        if self._tier is None:
            raise ShardUnavailable(f"index servers {', '.join(self.addresses)} were not asked yet what they hold")
        return self._tier


class _Outdated(Exception):
    """The snapshot that is searched is perhaps no longer the one to search."""
