"""The servers of a tier and what is known of them: carries out what `routing` decides."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from time import monotonic
from typing import Any, TypeVar

from openbook.core.context import Context
from openbook.errors import DeadlineExceeded, OpenbookError, Overloaded, ShardUnavailable
from openbook.index.client.client import Credentials, IndexClient
from openbook.index.client.routing import Action, Ask, Cancel, Failure, GiveUp, Health, Probe, Router
from openbook.index.client.tier import ShardServers
from openbook.logs import about
from openbook.telemetry import INDEX_SERVERS_SILENT, SHARD_ERRORS, SHARD_HEDGES, SHARD_SECONDS
from openbook.tracing.ports import Recording
from openbook.tracing.spans import span
from openbook.v1.index_pb2 import InfoResponse

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Call = Callable[[IndexClient, Context, float], Awaitable[Result]]
"""One call to one server, on behalf of somebody, within so many seconds."""

PROBE_TIMEOUT_S = 0.5
ALONE_S = 2.0
"""Of silence until who has no other replica loses his connection: half a second may be a machine that is very busy."""
FAILURES: dict[type[OpenbookError], Failure] = {
    ShardUnavailable: Failure.LOST,
    Overloaded: Failure.BUSY,
    DeadlineExceeded: Failure.LATE,
    OpenbookError: Failure.BROKEN,  # itself: INTERNAL, and codes that none of ours has
}


class Moved(Exception):
    """All replicas of a shard that were known are listed no more: others may be."""


class Replicas:
    """Connections to all servers, which may come and go. `on_info` hears what a server holds, each time one was asked,
    and when that was.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        credentials: Credentials,
        router: Router,
        on_info: Callable[[str, InfoResponse, float], None],
        server_name: str | None = None,
    ) -> None:
        self.router = router
        self._make = partial(IndexClient, credentials=credentials, server_name=server_name)
        self._clients = {address: self._make(address) for address in addresses}
        self._on_info = on_info
        self._closed = False
        self._changing: set[asyncio.Task[None]] = set()
        self._probes: dict[str, asyncio.Task[None]] = {}
        self._shards: dict[str, ShardServers] = {}  # for which each was asked last
        self.problems: dict[str, OpenbookError] = {}
        """Of those that did not say what they hold when they were last asked."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all servers listed now."""
        return tuple(self._clients)

    async def ask(self, method: str, shard: ShardServers, size: int, context: Context, call: Call[Result]) -> Result:
        """The first answer of a shard's replicas to a call of so many rows.

        Raises:
            ShardUnavailable: none of them answers; says what was heard of each.
            DeadlineExceeded: none did in time.
            Overloaded: those asked have no place for it.
            OpenbookError: what one of them answered; itself, if those asked all failed at it.
            Moved: none of them is listed any more.
        """
        deadline = context.deadline
        deadline.check(f"shard {shard.number} was asked")
        kind = method, shard.number, size.bit_length()
        race = self.router.race(method, kind, shard.addresses, monotonic() + deadline.remaining_s())
        calls: dict[asyncio.Task[Result], str] = {}
        heard: list[OpenbookError] = []
        self._shards |= dict.fromkeys(shard.addresses, shard)

        def follow(actions: Sequence[Action]) -> None:
            for action in actions:
                match action:
                    case Ask(address, timeout_s, is_hedge):
                        if is_hedge:
                            SHARD_HEDGES.labels(shard.number).inc()
                        one = span(
                            f"{method} shard {shard.number}",
                            context,
                            "client",
                            shard=shard.number,
                            replica=shard.addresses.index(address),
                            hedge=is_hedge,
                            retry=bool(heard),
                        )
                        begin = partial(self._call, address, call, one.context, timeout_s)
                        task = asyncio.create_task(self._timed(method, shard, one, begin))
                        task.add_done_callback(_take_notice)
                        calls[task] = address
                    case Cancel(address):
                        for task in [task for task, asked in calls.items() if asked == address]:
                            task.cancel()
                            del calls[task]
                    case Probe(address):
                        self._probe(address)
                    case GiveUp(late):
                        if not late and self.router.have_left(shard.addresses):
                            raise Moved
                        raise _why(late, shard, heard)

        try:
            follow(race.start(monotonic()))
            while True:
                timeout_s = max(0.0, race.wake_at - monotonic())
                done, _ = await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    follow(race.woke(monotonic()))
                for task in done:
                    address, error = calls.pop(task), task.exception()
                    failure = FAILURES.get(type(error)) if isinstance(error, OpenbookError) else None
                    if failure is None or not isinstance(error, OpenbookError):
                        race.answered(address, monotonic())
                        return task.result()
                    heard.append(error)
                    follow(race.failed(address, failure, monotonic()))
        finally:
            race.abandon(monotonic())
            for task in calls:
                task.cancel()

    async def info_of_all(self, timeout_s: float) -> None:
        """Ask every server what it holds, but for those known not to answer; see `on_info` and `problems`. One that is
        merely silent may be at a long batch, and hold what nobody else does.
        """
        began = monotonic()
        asked = [address for address in self._clients if self.router.health(address) <= Health.SUSPECT]
        await asyncio.gather(*(self._info(address, timeout_s, began) for address in asked))

    def change(self, joined: Sequence[str], left: Sequence[str], timeout_s: float) -> None:
        """Ask those who joined what they hold, and those who left nothing more; calls that they have may end there."""
        for address in left:
            self.router.left(address)
            self.problems.pop(address, None)
            if probe := self._probes.pop(address, None):
                probe.cancel()
            self._begin(self._let_go(self._clients.pop(address)))
        for address in joined:
            self.router.joined(address)
            self._clients[address] = self._make(address)
            self._begin(self._info(address, timeout_s, monotonic()))

    async def close(self) -> None:
        """Let go of all connections, and of servers that are waited for."""
        self._closed = True
        tasks = [*self._probes.values(), *self._changing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    def _begin(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(change)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)

    async def _let_go(self, client: IndexClient) -> None:
        try:
            await asyncio.sleep(self.router.timeout_s)  # no call takes longer
        finally:
            await client.close()

    async def _call(self, address: str, call: Call[Result], context: Context, timeout_s: float) -> Result:
        if address not in self._clients:  # it left just now
            raise ShardUnavailable(f"{address}: is listed no more")
        return await call(self._clients[address], context, timeout_s)

    async def _timed(
        self, method: str, shard: ShardServers, one: Recording, begin: Callable[[], Awaitable[Result]]
    ) -> Result:
        started = monotonic()
        try:
            with one as context:
                return await begin()
        except OpenbookError as error:
            SHARD_ERRORS.labels(shard.number, error.grpc_code).inc()
            why = f"{method} at shard {shard.number} failed, request id {context.request_id}: {error}"
            log.info("%s", why, extra=about(context, method=method, shard=shard.number, code=error.grpc_code))
            raise
        finally:
            SHARD_SECONDS.labels(shard.number, method).observe(monotonic() - started)

    async def _info(self, address: str, timeout_s: float, began: float) -> None:
        client = self._clients.get(address)
        if client is None:
            return
        try:
            info = await client.info(timeout_s)
        except OpenbookError as error:
            if self._clients.get(address) is not client:
                return
            self.problems[address] = error
            silent = isinstance(error, DeadlineExceeded)
            for action in self.router.suspect(address) if silent else self.router.lost(address):
                self._probe(action.address)
        else:
            if self._clients.get(address) is client:
                self._told(address, info, began)

    def _told(self, address: str, info: InfoResponse, asked_at: float) -> None:
        self.problems.pop(address, None)
        self.router.spoke(address, monotonic())
        self._on_info(address, info, asked_at)

    def _probe(self, address: str) -> None:
        if address in self._clients and address not in self._probes and not self._closed:
            self._probes[address] = task = asyncio.create_task(self._until_it_answers(address))
            INDEX_SERVERS_SILENT.inc()
            task.add_done_callback(lambda _: self._forget_probe(address, task))

    def _forget_probe(self, address: str, task: "asyncio.Task[None]") -> None:
        INDEX_SERVERS_SILENT.dec()
        if self._probes.get(address) is task:  # and not that of one who joined anew
            del self._probes[address]
            if not task.cancelled() and (error := task.exception()):
                log.error("probing index server %s failed", address, exc_info=error)
                self.router.unanswered(address)  # or the next one would follow at once
            # A call may have found it lost between its answer and now, and nobody else would look for it.
            if address in self._clients and self.router.health(address) in (Health.SUSPECT, Health.DEAD):
                self._probe(address)

    async def _until_it_answers(self, address: str) -> None:
        client = self._clients[address]
        patient_until = monotonic() + ALONE_S
        while True:
            await asyncio.sleep(self.router.probe_delay_s(address))
            began = monotonic()
            try:
                info = await client.info(PROBE_TIMEOUT_S)
                break
            except OpenbookError as error:
                if isinstance(error, DeadlineExceeded) and self.router.health(address) is Health.ALIVE:
                    continue  # it answered others meanwhile, and a new connection would cost those who still wait
                if address not in self.problems:
                    log.warning("index server does not answer: %s", error)
                self.problems[address] = error
                self.router.unanswered(address)
                if isinstance(error, DeadlineExceeded) and began < patient_until and not self._has_others(address):
                    continue
                await client.reset()  # what waits there is asked elsewhere
                patient_until = monotonic() + ALONE_S
        if self.router.health(address) is Health.SUSPECT:
            self._on_info(address, info, began)  # whoever waits for that waits no longer
            # A firewall may have forgotten the connection of its calls alone. Whoever computes for long may be silent
            # for as long as a call may take.
            await client.check_stream(max(ALONE_S, self.router.timeout_s))
        if address in self.problems:
            log.warning("index server %s answers again", address)
        self._told(address, info, began)

    def _has_others(self, address: str) -> bool:
        """Whether another replica of its shard can be asked."""
        addresses = self._shards[address].addresses if address in self._shards else ()
        return any(each != address and self.router.health(each) is Health.ALIVE for each in addresses)


def _why(late: bool, shard: ShardServers, heard: Sequence[OpenbookError]) -> OpenbookError:
    reasons = "; ".join(map(str, heard)) or f"nothing heard from {', '.join(shard.addresses)}"
    if late:
        return DeadlineExceeded(f"deadline passed before shard {shard.number} answered: {reasons}")
    if len(kinds := set(map(type, heard))) == 1 and kinds <= {Overloaded, OpenbookError}:
        return heard[-1]
    return ShardUnavailable(f"shard {shard.number} does not answer: {reasons}")


def _take_notice(task: "asyncio.Task[Result]") -> None:
    """Of what a call that lost its race ended with, or asyncio complains that nobody did."""
    if not task.cancelled():
        task.exception()
