"""What a client makes of servers that it asks whether they are there, and of what they hold by then."""

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from time import monotonic
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Candidates, Float32, Hits, Passage, RetrievalSettings, RetrieverKind
from openbook.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OpenbookError,
    Overloaded,
    ShardUnavailable,
    SnapshotMismatch,
    from_grpc_code,
)
from openbook.index.client import replicas
from openbook.index.client.discovery import Change
from openbook.index.client.metrics import TierMetrics
from openbook.index.client.replicas import Replicas
from openbook.index.client.routing import FIRST_PROBE_S, Health, Router
from openbook.index.client.sharded import ShardedIndex
from openbook.index.client.tier import ShardServers
from openbook.telemetry import SHARD_ERRORS, SHARD_HEDGES
from openbook.v1.index_pb2 import HeldSnapshot, InfoResponse

SERVER, OTHER = "127.0.0.1:1", "127.0.0.1:2"
LASTING = "0" * 32


class Slow:
    """A server whose first answer about itself comes too late. Meanwhile it answers others, or nobody."""

    def __init__(self, router: Router, answers_others: bool) -> None:
        self._router, self._answers_others = router, answers_others
        self.n_asked, self.n_reset = 0, 0

    async def info(self, timeout_s: float) -> InfoResponse:
        self.n_asked += 1
        if self.n_asked == 2:
            return InfoResponse()
        if self._answers_others:
            self._router.spoke(SERVER, 1.0)
        raise DeadlineExceeded("late")

    async def reset(self) -> None:
        self.n_reset += 1

    async def check_stream(self, patience_s: float) -> None: ...

    async def close(self) -> None: ...


async def probe(found: Replicas, router: Router) -> None:
    """Until the server answers."""
    assert router.suspect(SERVER)
    found._probe(SERVER)
    await found._probes[SERVER]


@pytest.mark.parametrize(
    ("answers_others", "others_alive", "patience_s", "n_reset"),
    [
        pytest.param(True, True, 0.0, 0, id="it-answers-others"),
        pytest.param(False, True, 9.0, 1, id="another-replica-can-be-asked"),
        pytest.param(False, False, 9.0, 0, id="alone-and-perhaps-busy"),
        pytest.param(False, False, 0.0, 1, id="alone-and-silent-for-long"),
    ],
)
def test_who_loses_his_connection(
    monkeypatch: pytest.MonkeyPatch, answers_others: bool, others_alive: bool, patience_s: float, n_reset: int
) -> None:
    router = Router(1.0)
    server = Slow(router, answers_others)
    monkeypatch.setattr(replicas, "IndexClient", lambda *_, **__: server)
    monkeypatch.setattr(replicas, "ALONE_S", patience_s)
    shard = ShardServers(0, 0, 1, (SERVER, OTHER))

    async def probed() -> None:
        found = Replicas([SERVER, OTHER], lambda: None, router, lambda *_: None)
        assert await found.ask("search", shard, 1, Context(Deadline.after(9.0)), lambda *_: answer()) is None
        if not others_alive:
            router.left(OTHER)
        await probe(found, router)

    asyncio.run(probed())
    assert (server.n_asked, server.n_reset, router.health(SERVER)) == (2, n_reset, Health.ALIVE)


async def answer() -> None:
    """Of a call."""


@pytest.mark.parametrize("n_broken", [1, 2])
def test_a_server_that_fails_at_everything_costs_nobody_his_answer(
    monkeypatch: pytest.MonkeyPatch, n_broken: int
) -> None:
    broken, asked = (SERVER, OTHER)[:n_broken], list[str]()
    errors = SHARD_ERRORS.labels(0, "INTERNAL")
    before = errors._value.get()
    monkeypatch.setattr(replicas, "IndexClient", lambda address, **_: address)

    async def call(client: Any, context: Context, timeout_s: float) -> str:
        asked.append(client)
        if client in broken:
            raise from_grpc_code("INTERNAL", f"{client}: IndexError: it is broken")
        return "an answer"

    async def asked_often() -> None:
        found = Replicas([SERVER, OTHER], lambda: None, Router(1.0), lambda *_: None)
        shard = ShardServers(0, 0, 1, (SERVER, OTHER))
        for _ in range(50):
            assert await found.ask("search", shard, 1, Context(Deadline.after(9.0)), call) == "an answer"

    if n_broken == 2:
        with pytest.raises(OpenbookError, match=r"^INTERNAL: .*it is broken$"):
            asyncio.run(asked_often())
        assert sorted(asked) == [SERVER, OTHER]
    else:
        asyncio.run(asked_often())
        assert 0 < asked.count(SERVER) < 5, "it is the quickest to answer, and asked no more often for that"
    assert errors._value.get() - before == sum(asked.count(each) for each in broken)


class Hanging:
    """Calls of which the second alone ends by itself."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.cancelled: list[str] = []
        self.begun = asyncio.Event()

    async def __call__(self, client: Any, context: Context, timeout_s: float) -> str:
        self.asked.append(client)
        self.begun.set()
        if len(self.asked) == 2:
            return "an answer"
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(client)
            raise
        raise AssertionError


@pytest.mark.parametrize(("n_hedges", "timeout_s"), [(0, 0.05), (1, 1.0)])
def test_a_call_whose_place_another_takes_is_cancelled_and_hedges_are_counted(
    n_hedges: int, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "IndexClient", lambda address, **_: address)
    call, hedges = Hanging(), SHARD_HEDGES.labels(0)
    before = hedges._value.get()

    async def scenario() -> None:
        found = Replicas([SERVER, OTHER], lambda: None, Router(timeout_s, n_hedges), lambda *_: None)
        shard = ShardServers(0, 0, 1, (SERVER, OTHER))
        found._closed = True  # so that it does not probe who is silent
        assert await found.ask("search", shard, 1, Context(Deadline.after(60.0)), call) == "an answer"
        await asyncio.sleep(0)
        assert (len(call.asked), call.cancelled) == (2, call.asked[:1])

    asyncio.run(scenario())
    assert hedges._value.get() == before + n_hedges


def test_who_goes_leaves_no_call_and_no_load_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "IndexClient", lambda address, **_: address)

    async def scenario() -> None:
        call, router = Hanging(), Router(60.0)
        found = Replicas([SERVER], lambda: None, router, lambda *_: None)
        asking = asyncio.create_task(
            found.ask("search", ShardServers(0, 0, 1, (SERVER,)), 1, Context(Deadline.after(60.0)), call)
        )
        await call.begun.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(0)
        assert (call.cancelled, router.replica(SERVER).n_in_flight) == ([SERVER], 0)

    asyncio.run(scenario())


class Holder:
    """A server of one shard; `holds`: snapshots and the sequences of their publications, the current one last."""

    def __init__(self, address: str, shard: int, n_shards: int) -> None:
        self.address, self.shard, self.n_shards = address, shard, n_shards
        self.holds = {"old": 1}
        self.fingerprint = "fingerprint"
        self.n_refused = 0
        self.is_busy = False  # with a batch that does not end, for as long as it is asked for the old one
        self.asked = asyncio.Event()
        self.remaining_s: float | None = None  # when it was last searched

    async def info(self, timeout_s: float) -> InfoResponse:
        held = [
            HeldSnapshot(
                snapshot_id=name,
                sequence=sequence,
                n_shards=self.n_shards,
                n_passages=5,
                first_id=5 * self.shard,
                dimension=2,
                encoder="encoder",
                encoder_fingerprint=self.fingerprint,
                n_passages_total=5 * self.n_shards,
            )
            for name, sequence in self.holds.items()
        ]
        return InfoResponse(
            snapshot_id=list(self.holds)[-1], shard=self.shard, n_shards=self.n_shards, max_k=9, max_rows=9, held=held
        )

    async def search(
        self,
        queries: Float32,
        settings: RetrievalSettings,
        snapshot_id: str,
        context: Context,
        timeout_s: float,
        shard: int,
    ) -> tuple[Hits, int]:
        self.remaining_s = context.deadline.remaining_s()
        if self.is_busy and snapshot_id == "old":
            await asyncio.Event().wait()
        self._check(snapshot_id, shard)
        ids = np.full((len(queries), settings.k), 5 * self.shard, np.int64)
        return Hits(ids, np.ones(ids.shape, np.float32), snapshot_id), list(self.holds.values())[-1]

    async def candidates(
        self,
        questions: Sequence[str],
        queries: Float32 | None,
        k: int,
        also: object,
        snapshot_id: str,
        context: Context,
        timeout_s: float,
        shard: int,
    ) -> tuple[Candidates, int]:
        self._check(snapshot_id, shard)
        ids = np.full((len(questions), k), 5 * self.shard, np.int64)
        scores = np.ones(ids.shape, np.float32)
        return Candidates(ids, scores, scores, snapshot_id), list(self.holds.values())[-1]

    async def fetch(
        self,
        ids: Sequence[int],
        snapshot_id: str,
        with_vectors: bool,
        context: Context,
        timeout_s: float,
        shard: int,
    ) -> tuple[list[Passage], Float32]:
        self._check(snapshot_id, shard)
        return [Passage(i, "doc", "title", "text") for i in ids], np.empty((0, 0), np.float32)

    async def find(
        self, lasting_id: str, snapshot_id: str, context: Context, timeout_s: float, shard: int
    ) -> list[Passage]:
        self._check(snapshot_id, shard)
        return [Passage(3, "doc", "title", "text")] if lasting_id == LASTING else []

    def _check(self, snapshot_id: str, shard: int) -> None:
        assert shard == self.shard
        if snapshot_id not in self.holds:
            self.n_refused += 1
            raise SnapshotMismatch(f"holds {', '.join(self.holds)}, got a request for {snapshot_id}")

    async def check_stream(self, patience_s: float) -> None:
        self.asked.set()
        if self.is_busy:
            await asyncio.Event().wait()

    async def reset(self) -> None: ...

    async def close(self) -> None: ...


def test_a_server_lost_just_as_it_had_answered_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    router = Router(1.0)
    monkeypatch.setattr(replicas, "IndexClient", lambda address, **_: Holder(address, 0, 1))

    async def scenario() -> None:
        is_back, answers = asyncio.Event(), 0

        def on_info(*_: object) -> None:
            nonlocal answers
            answers += router.health(SERVER) is Health.ALIVE
            if answers == 1:  # a call breaks before the probe is forgotten
                for action in router.lost(SERVER):
                    found._probe(action.address)
            elif answers == 2:
                is_back.set()

        found = Replicas([SERVER], lambda: None, router, on_info)
        assert router.suspect(SERVER)
        found._probe(SERVER)
        try:
            async with asyncio.timeout(10):
                await is_back.wait()
        finally:
            await found.close()

    asyncio.run(scenario())
    assert router.health(SERVER) is Health.ALIVE


def test_a_probe_that_fails_as_nobody_foresaw_is_followed_by_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    router, delays_s = Router(1.0), list[float]()
    is_back = asyncio.Event()

    class Odd(Holder):
        async def info(self, timeout_s: float) -> InfoResponse:
            delays_s.append(router.probe_delay_s(SERVER))
            if len(delays_s) == 1:
                raise RuntimeError("can't start new thread")
            is_back.set()
            return await super().info(timeout_s)

    monkeypatch.setattr(replicas, "IndexClient", lambda address, **_: Odd(address, 0, 1))

    async def scenario() -> None:
        found = Replicas([SERVER], lambda: None, router, lambda *_: None)
        assert router.suspect(SERVER)
        found._probe(SERVER)
        try:
            async with asyncio.timeout(10):
                await is_back.wait()
        finally:
            await found.close()

    asyncio.run(scenario())
    assert delays_s == [0.0, FIRST_PROBE_S]


def test_a_silent_server_is_asked_what_was_published_and_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        servers = {SERVER: Holder(SERVER, 0, 2), OTHER: Holder(OTHER, 1, 2)}
        monkeypatch.setattr(replicas, "IndexClient", lambda address, **_: servers[address])
        tier = ShardedIndex([SERVER, OTHER], 2.0)
        await tier.connect()
        found, silent = tier._connected(), servers[OTHER]
        silent.is_busy = True
        assert found.router.suspect(OTHER)
        found._probe(OTHER)
        await silent.asked.wait()
        assert found.router.health(OTHER) is Health.SUSPECT
        for server in servers.values():
            server.holds["new"] = 2
        queries = np.ones((1, 2), np.float32)
        hits = await tier.search(queries, RetrievalSettings(k=1), Context(Deadline.after(60.0)))
        assert hits.snapshot_id == "new"
        await tier.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("method", ["fetch", "locate"])
def test_a_replica_that_began_anew_with_another_snapshot_costs_nobody_his_passages(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        servers = {each: Holder(each, 0, 1) for each in (SERVER, OTHER)}
        monkeypatch.setattr(replicas, "IndexClient", lambda address, **_: servers[address])
        tier = ShardedIndex([SERVER, OTHER], 2.0)
        await tier.connect()

        async def ask() -> int:
            context = Context(Deadline.after(60.0))
            if method == "locate":
                return (await tier.locate(LASTING, "old", context)).id
            return (await tier.fetch([3], "old", context))[0].id

        servers[OTHER].holds = {"other": 1}
        assert await asyncio.gather(ask(), ask()) == [3, 3]  # one of each server
        assert servers[OTHER].n_refused == 1
        servers[SERVER].holds = {"other": 1}
        with pytest.raises(SnapshotMismatch, match="old"):
            await ask()
        await tier.close()

    asyncio.run(scenario())


class Contrary(Holder):
    """Refuses what it says that it holds."""

    def _check(self, snapshot_id: str, shard: int) -> None:
        self.n_refused += 1
        raise SnapshotMismatch(f"does not hold {snapshot_id}")


@pytest.mark.parametrize("method", ["search", "fetch", "locate"])
def test_a_tier_that_contradicts_itself_is_asked_once_more_and_not_until_the_deadline(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        servers = {each: Contrary(each, 0, 1) for each in (SERVER, OTHER)}
        monkeypatch.setattr(replicas, "IndexClient", lambda address, **_: servers[address])
        tier, context = ShardedIndex([SERVER, OTHER], 2.0), Context(Deadline.after(2.0))
        asking = {
            "search": lambda: tier.search(np.ones((1, 2), np.float32), RetrievalSettings(k=1), context),
            "fetch": lambda: tier.fetch([3], "old", context),
            "locate": lambda: tier.locate(LASTING, "old", context),
        }[method]
        with pytest.raises(SnapshotMismatch, match="does not hold old"):
            await asking()
        assert sum(each.n_refused for each in servers.values()) == 2
        await tier.close()

    asyncio.run(scenario())


def test_what_was_published_just_now_is_ranked_by_words_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        server = Holder(SERVER, 0, 1)
        monkeypatch.setattr(replicas, "IndexClient", lambda *_, **__: server)
        tier = ShardedIndex([SERVER], 2.0)
        await tier.connect()
        server.holds["new"] = 2
        by_words = RetrievalSettings(k=1, retriever=RetrieverKind.BM25, without=(1, 2))
        found = await tier.candidates(["a question"], None, by_words, Context(Deadline.after(60.0)))
        assert (found.snapshot_id, found.n_named) == ("new", 3)
        await tier.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("has_begun", [False, True])
def test_passages_of_a_snapshot_of_which_another_endpoint_has_heard_first(
    has_begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        servers = {SERVER: Holder(SERVER, 0, 2), OTHER: Holder(OTHER, 1, 2)}
        monkeypatch.setattr(replicas, "IndexClient", lambda address, **_: servers[address])
        tier = ShardedIndex([SERVER, OTHER], 2.0)
        if has_begun:  # the one has it when we first ask
            servers[SERVER].holds["new"] = 2
        await tier.connect()
        for server in servers.values():
            server.holds["new"] = 2
        if has_begun:  # and the other names it in a reply
            tier._told.reply(OTHER, 2, monotonic())
        (found,) = await tier.fetch([7], "new", Context(Deadline.after(60.0)))
        assert found.id == 7
        await tier.close()

    asyncio.run(scenario())


class Gone(Holder):
    """Nobody is there."""

    async def info(self, timeout_s: float) -> InfoResponse:
        raise ShardUnavailable(f"{self.address}: refused")


def test_who_may_lack_a_shard_begins_without_it_and_keeps_to_the_encoder_that_he_began_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        servers = {SERVER: Holder(SERVER, 0, 2), OTHER: Gone(OTHER, 1, 2)}
        monkeypatch.setattr(replicas, "IndexClient", lambda address, **_: servers[address])
        tier, half = ShardedIndex([SERVER, OTHER], 2.0), RetrievalSettings(k=1, min_coverage=0.5)
        queries = np.ones((1, 2), np.float32)
        with pytest.raises(ShardUnavailable, match="no server holds shard 1 of 2"):
            await tier.connect()
        with pytest.raises(ShardUnavailable, match=r"0\.6, got 5 of 10 passages: shard 1 does not answer; .*refused"):
            await tier.connect(0.6)
        await tier.connect(0.5)
        assert (tier.snapshot_id, tier.encoder_fingerprint, tier.n_passages) == ("old", "fingerprint", 10)
        hits = await tier.search(queries, half, Context(Deadline.after(60.0)))
        assert (hits.ids.tolist(), hits.coverage.missing_shards) == ([[0]], (1,))
        assert (await tier.locate(LASTING, "old", Context(Deadline.after(60.0)))).id == 3
        with pytest.raises(ShardUnavailable, match=r"shard 1 of 2, and passage f{32} may be in one of those"):
            await tier.locate("f" * 32, "old", Context(Deadline.after(60.0)))
        servers[SERVER].holds, servers[SERVER].fingerprint = {"new": 2}, "another"
        with pytest.raises(SnapshotMismatch, match="we began with fingerprint:"):
            await tier.search(queries, half, Context(Deadline.after(60.0)))
        await tier.close()

    asyncio.run(scenario())


def test_who_may_lack_a_shard_waits_neither_for_the_dead_nor_to_the_last_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        servers = {SERVER: Holder(SERVER, 0, 2), OTHER: Holder(OTHER, 1, 2)}
        monkeypatch.setattr(replicas, "IndexClient", lambda address, **_: servers[address])
        tier = ShardedIndex([SERVER, OTHER], 2.0)
        await tier.connect()
        tier._connected().router.lost(OTHER)
        half = RetrievalSettings(k=1, min_coverage=0.5)
        hits = await tier.search(np.ones((1, 2), np.float32), half, Context(Deadline.after(60.0)))
        assert (hits.coverage.missing_shards, servers[OTHER].remaining_s) == ((1,), None)
        assert servers[SERVER].remaining_s is not None
        assert servers[SERVER].remaining_s < 55, "the rest is for what comes after"
        await tier.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("was_whole", [False, True])
def test_a_shard_whose_servers_are_listed_no_more_counts_as_one_without_servers(
    was_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        servers = {SERVER: Holder(SERVER, 0, 2), OTHER: Holder(OTHER, 1, 2)}
        monkeypatch.setattr(replicas, "IndexClient", lambda address, **_: servers[address])
        tier, registry = ShardedIndex(list(servers) if was_whole else [SERVER], 2.0), CollectorRegistry()
        registry.register(TierMetrics(tier))
        with nullcontext() if was_whole else pytest.raises(ShardUnavailable):
            await tier.connect()
        if was_whole:
            tier._listed.addresses = (SERVER,)
            tier._changed(Change((), (OTHER,)))
            queries, context = np.ones((1, 2), np.float32), Context(Deadline.after(5.0))
            with pytest.raises(ShardUnavailable, match="no server holds shard 1 of 2"):
                await tier.search(queries, RetrievalSettings(k=1), context)
        for shard, n in (("0", 1), ("1", 0)):
            labels = {"shard": shard, "state": "answers"}
            assert registry.get_sample_value("openbook_shard_servers", labels) == n
        await tier.close()

    asyncio.run(scenario())


class Failing(Holder):
    """A server that answers every search with one error, if it is given one."""

    error: OpenbookError | None = None

    async def search(self, *arguments: Any, **named: Any) -> tuple[Hits, int]:
        if self.error:
            raise self.error
        return await super().search(*arguments, **named)


def searched(monkeypatch: pytest.MonkeyPatch, settings: RetrievalSettings, *errors: OpenbookError | None) -> Hits:
    """What is found in two shards, whose servers fail with these errors; by words too if that is the retriever."""
    servers = {each: Failing(each, i, 2) for i, each in enumerate((SERVER, OTHER))}
    for server, error in zip(servers.values(), errors, strict=True):
        server.error = error
    monkeypatch.setattr(replicas, "IndexClient", lambda address, **_: servers[address])

    async def scenario() -> Hits:
        tier = ShardedIndex([SERVER, OTHER], 90.0)
        queries, context = np.ones((1, 2), np.float32), Context(Deadline.after(60.0))
        try:
            if settings.retriever is RetrieverKind.HYBRID:
                await tier.candidates(["a question"], queries, settings, context)
            return await tier.search(queries, settings, context)
        finally:
            await tier.close()

    return asyncio.run(scenario())


def test_a_shard_whose_servers_fail_is_missing_and_one_that_is_busy_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    broken, half = from_grpc_code("INTERNAL", "it is broken"), RetrievalSettings(k=1, min_coverage=0.5)
    for error in (broken, DeadlineExceeded("late")):
        hits = searched(monkeypatch, half, None, error)
        assert hits.ids.tolist() == [[0]]
        assert (hits.coverage.n_searched, hits.coverage.missing_shards) == (5, (1,))
    with pytest.raises(ShardUnavailable, match=r"shard 1 does not answer; .*it is broken"):
        searched(monkeypatch, RetrievalSettings(k=1, min_coverage=0.6), None, broken)
    with pytest.raises(OpenbookError, match=r"^INTERNAL: .*it is broken$"):
        searched(monkeypatch, RetrievalSettings(k=1), None, broken)
    with pytest.raises(Overloaded, match="full"):
        searched(monkeypatch, half, None, Overloaded("full"))


def test_who_asked_for_few_is_told_why_many_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = InvalidRequest("k * rerank_factor must be at most 65536, got 9 * 9000")
    hybrid = RetrievalSettings(k=5, retriever=RetrieverKind.HYBRID, rerank_factor=9000)
    with pytest.raises(InvalidRequest, match=r"got 9 \* 9000 \(hybrid ranks 9 passages for k = 5\)$"):
        searched(monkeypatch, hybrid, refusal, refusal)
    with pytest.raises(InvalidRequest, match=r"got 900$"):  # which is not about k
        searched(monkeypatch, hybrid, *2 * (InvalidRequest("nprobe must be at most 64, got 900"),))
    left_out = RetrievalSettings(k=8, retriever=RetrieverKind.HYBRID, without=(1, 2, 2))
    with pytest.raises(InvalidRequest, match=r"^k and the passages of without must be at most 9, got 8 and 2$"):
        searched(monkeypatch, left_out, None, None)
    with pytest.raises(InvalidRequest, match=r"got 9 \* 9000$"):
        searched(monkeypatch, RetrievalSettings(k=9, rerank_factor=9000), refusal, refusal)
