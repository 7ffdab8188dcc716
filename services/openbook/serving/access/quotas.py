"""Callers' accounts: what each may ask for, charged in Redis, and by each replica for itself while there is none."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from openbook.errors import InvalidRequest, ModelUnavailable, Overloaded, ShardUnavailable
from openbook.serving.access.counters import Counters
from openbook.serving.access.keys import Identity
from openbook.serving.access.quota import (
    Asked,
    Policy,
    Taken,
    add,
    headers,
    policies_of,
    priced,
    refusal,
    standings,
    take,
)
from openbook.telemetry import refused

N_ACCOUNTS = 100_000


@dataclass(slots=True)
class _Account:
    policies: tuple[Policy, ...]
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # of this replica
    owed: dict[str, tuple[Policy, int, int]] = field(default_factory=dict)  # to Redis: of which window, and how much
    last: tuple[Asked, Taken, float] | None = None  # and when, by our clock: Redis counts by its own

    def owe(self, asked: Asked, now: int) -> None:
        """This is to be given back in Redis."""
        for policy, cost in asked:
            window = now // policy.window_s
            _, former, so_far = self.owed.get(policy.name, (policy, window, 0))
            self.owed[policy.name] = policy, window, cost + (so_far if former == window else 0)


class Quotas:
    """For one event loop. Without Redis a caller has his limits at each replica: never none, and never an error."""

    def __init__(self, shared: Counters | None, clock: Callable[[], float] = time.time) -> None:
        self._shared = shared
        self._clock = clock
        self._accounts: OrderedDict[str, _Account] = OrderedDict()  # the one longest unused first
        self._giving: set[asyncio.Task[Taken | None]] = set()

    def open(self, identity: Identity) -> None:
        """This caller was let in, with these limits."""
        policies = policies_of(identity.limits)
        account = self._accounts.get(identity.caller)
        if account is None:
            account = self._accounts[identity.caller] = _Account(policies)
            if len(self._accounts) > N_ACCOUNTS:
                self._accounts.popitem(last=False)
        account.policies = policies
        self._accounts.move_to_end(identity.caller)

    async def charge(self, caller: str, n_questions: int = 1, n_tokens: int = 0) -> tuple[Asked, bool]:
        """Count this, all or nothing, and say what was counted, and whether in Redis.

        Raises:
            QuotaExceeded: not before the next window.
            InvalidRequest: no window grants so much.
        """
        account = self._accounts.get(caller)
        if account is None or not account.policies:
            return (), False
        try:
            asked = priced(account.policies, n_questions, n_tokens)
        except InvalidRequest:
            refused("endpoint", "quota").inc()
            raise
        await self._settle(caller, account)
        shared = await self._shared.take(caller, asked) if self._shared else None
        if shared is None:
            taken = take(account.counts, asked, int(self._clock()))
        else:
            taken = shared
            if taken.granted:  # so that it is known should Redis go
                add(account.counts, asked, taken.now)
        account.last = asked, taken, self._clock()
        if not taken.granted:
            refused("endpoint", "quota").inc()
            raise refusal(asked, taken)
        return asked, shared is not None

    @asynccontextmanager
    async def charged(self, caller: str, n_questions: int = 1, n_tokens: int = 0) -> AsyncIterator[None]:
        """Charge for the body, and give it back where a place, a shard or a model is missing: clients ask again then,
        and it is still one question. Raises as `charge`.
        """
        asked, is_shared = await self.charge(caller, n_questions, n_tokens)
        try:
            yield
        except (Overloaded, ShardUnavailable, ModelUnavailable):
            account = self._accounts.get(caller)
            if account and asked:
                await self._give_back(caller, account, asked, is_shared)
            raise

    async def _give_back(self, caller: str, account: _Account, asked: Asked, is_shared: bool) -> None:
        """Where it was counted: elsewhere it would make room that nobody took."""
        now, shared = int(self._clock()), None
        if is_shared:
            account.owe(asked, now)
            due, shared = await self._settle(caller, account)
            if [policy for policy, _ in due] != [policy for policy, _ in asked]:
                shared = None  # also what he asked for by another key: it says nothing of these together
        taken = take(account.counts, [(policy, -cost) for policy, cost in asked], shared.now if shared else now)
        account.last = asked, shared or taken, self._clock()

    async def _settle(self, caller: str, account: _Account) -> tuple[Asked, Taken | None]:
        """Give Redis back what is owed to it in these windows; all that it says of it if it answers."""
        now = int(self._clock())
        due = [(policy, cost) for policy, window, cost in account.owed.values() if window == now // policy.window_s]
        account.owed = {}  # who asks meanwhile does not give it back again
        if not due or self._shared is None:
            return due, None
        # Not on behalf of whoever asks, who may go: Redis would have it, and be given it again.
        giving = asyncio.create_task(self._give(self._shared, caller, account, due, now))
        self._giving.add(giving)
        giving.add_done_callback(self._giving.discard)
        return due, await asyncio.shield(giving)

    async def _give(self, shared: Counters, caller: str, account: _Account, due: Asked, now: int) -> Taken | None:
        taken = await shared.take(caller, [(policy, -cost) for policy, cost in due])
        if taken is None:
            account.owe(due, now)
        return taken

    def headers(self, identity: Identity) -> dict[str, str]:
        """What this caller is told of where he stands now, under the limits of this key, by lower-case name."""
        account = self._accounts.get(identity.caller)
        if account is None or account.last is None:
            return {}
        asked, taken, at = account.last
        if policies_of(identity.limits) != tuple(policy for policy, _ in asked):  # another key's, or a former limit's
            return {}
        return headers(standings(asked, taken, max(0, int(self._clock()) - int(at))))

    async def aclose(self) -> None:
        """Close all connections."""
        if self._shared:
            await self._shared.aclose()
