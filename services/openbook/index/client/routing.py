"""Whom to ask, whom else when it takes long, and whom to leave alone. Events and times in, actions out; no I/O.

Every server answers for one shard, and a shard may have several: its replicas. One call to a shard is a `Race`: it asks
the less loaded of two replicas drawn at random; a second one when the first takes much longer than is usual (a hedge,
as far as the budget of extra calls allows); and one more elsewhere when a replica fails. `Router` keeps what all races
share: the health and load of every replica, usual latencies, and the budget.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from math import inf
from random import Random

from openbook.core.hedges import HEDGE_BUDGET, HedgeBudget

SLOW_FACTOR = 2.0
"""A call is slow when it has taken this many times the 95th percentile of its kind: such calls are rare enough for
the budget, and a hedge of a call that is only a little late would mostly lose."""
MIN_SLOW_S = 0.002
N_LATENCIES = 256
"""Remembered per kind of call."""
MIN_LATENCIES = 16
"""With fewer, a call is slow after a quarter of its timeout."""
MAX_STRIKES = 3
"""Slow calls in a row, while nothing at all came from a replica, until it is suspected."""
FIRST_PROBE_S = 0.05
MAX_PROBE_S = 0.5
"""Between two probes of a dead replica: so it serves again within a second of its return."""
FIRST_SHUN_S = 1.0
MAX_SHUN_S = 30.0
"""For so long a replica that answers with errors of its own is asked only if there is no other."""
BUSY_S = 0.5
"""And one that had no place, until it answers something."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Send the call to this replica."""

    address: str
    timeout_s: float
    is_hedge: bool = False  # beside a call that is slow and goes on


@dataclass(frozen=True, slots=True)
class Cancel:
    """The call at this replica is no longer wanted."""

    address: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Find out whether this replica lives, and go on until it does (`Router.probe_delay_s`, `spoke`, `unanswered`)."""

    address: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Nobody is left to ask, or the deadline has passed."""

    late: bool


Action = Ask | Cancel | Probe | GiveUp


class Failure(Enum):
    """Why a replica did not answer."""

    LOST = "lost"  # the connection broke or was refused, or the answer made no sense
    BUSY = "busy"  # it had no place in its queue
    LATE = "late"  # the time it was given passed before its turn
    BROKEN = "broken"  # it answered with an error of its own, at which others may be right


class Health(IntEnum):
    """Lower is better; calls go to the best there are."""

    ALIVE = 0
    SUSPECT = 1  # silent; being probed, its calls still wait
    DEAD = 2  # lost its connection or did not answer a probe
    LEFT = 3  # listed no more: nobody asks it, and nobody waits for it


@dataclass(slots=True)
class _Replica:
    health: Health = Health.ALIVE
    n_in_flight: int = 0
    n_strikes: int = 0
    n_failed_probes: int = 0
    spoke_at: float = -inf


@dataclass(slots=True)
class _Shun:
    """One method of one replica: who cannot search may still have the texts."""

    n_broken: int = 0  # answers in a row that were errors of its own
    until: float = -inf
    busy_until: float = -inf


class _Latencies:
    """Of the last calls of one kind, and when the next one is slow."""

    def __init__(self) -> None:
        self._latest: deque[float] = deque(maxlen=N_LATENCIES)
        self._n_new = 0
        self._slow_s: float | None = None

    def add(self, latency_s: float) -> None:
        self._latest.append(latency_s)
        self._n_new += 1
        if self._n_new >= MIN_LATENCIES:  # sorting for every call would cost more than it tells
            p95 = sorted(self._latest)[int(0.95 * len(self._latest))]
            self._n_new, self._slow_s = 0, max(MIN_SLOW_S, SLOW_FACTOR * p95)

    def slow_s(self, timeout_s: float) -> float:
        return timeout_s / 4 if self._slow_s is None else min(self._slow_s, timeout_s / 4)


class Router:
    """What all calls of one client know of the replicas."""

    def __init__(self, timeout_s: float, hedge_budget: float = HEDGE_BUDGET, random: Random | None = None) -> None:
        self.timeout_s = timeout_s
        self.hedges = HedgeBudget(hedge_budget)
        self._random = random or Random()
        self._replicas: dict[str, _Replica] = {}
        self._latencies: dict[Hashable, _Latencies] = {}
        self._shuns: dict[tuple[str, str], _Shun] = {}  # by address and method

    def race(self, method: str, kind: Hashable, addresses: Sequence[str], due: float) -> "Race":
        """One call to one shard. Calls of one kind take alike long; `addresses` are the shard's replicas."""
        return Race(self, method, self._latencies.setdefault(kind, _Latencies()), tuple(addresses), due)

    def health(self, address: str) -> Health:
        return self.replica(address).health

    def is_gone(self, addresses: Sequence[str]) -> bool:
        """Whether nobody is there to ask, as far as is known."""
        return all(self.health(address) >= Health.DEAD for address in addresses)

    def have_left(self, addresses: Sequence[str]) -> bool:
        """Whether none of them is listed any more."""
        return all(self.health(address) is Health.LEFT for address in addresses)

    def joined(self, address: str) -> None:
        """A server is listed, again perhaps: what is known of who was there before does not count."""
        replica = self.replica(address)
        replica.health, replica.n_strikes, replica.n_failed_probes, replica.spoke_at = Health.ALIVE, 0, 0, -inf
        self._forgive(address)

    def left(self, address: str) -> None:
        """A server is listed no more. Calls that it has may end there."""
        self.replica(address).health = Health.LEFT

    def replica(self, address: str) -> _Replica:
        return self._replicas.setdefault(address, _Replica())

    def suspect(self, address: str) -> list[Probe]:
        """A replica has been silent for long."""
        replica = self.replica(address)
        if replica.health is not Health.ALIVE:
            return []
        replica.health = Health.SUSPECT
        return [Probe(address)]

    def lost(self, address: str) -> list[Probe]:
        """A replica cannot be reached."""
        replica = self.replica(address)
        was_alive = replica.health is Health.ALIVE
        if replica.health < Health.DEAD:
            replica.health, replica.n_failed_probes = Health.DEAD, 1
            self._forgive(address)  # whoever comes back may be another process
        return [Probe(address)] if was_alive else []

    def spoke(self, address: str, now: float) -> None:
        """A replica answered something: it lives."""
        replica = self.replica(address)
        if replica.health is not Health.LEFT:
            replica.health, replica.n_strikes, replica.n_failed_probes, replica.spoke_at = Health.ALIVE, 0, 0, now

    def broke(self, address: str, method: str, now: float) -> None:
        """A replica answered what another one can with an error: soon done, so it would have the least load of all."""
        shun = self._shuns.setdefault((address, method), _Shun())
        if now >= shun.until:  # calls that ran at the same time broke for the same reason
            shun.until = now + min(MAX_SHUN_S, FIRST_SHUN_S * 2.0 ** min(shun.n_broken, 10))
            shun.n_broken += 1

    def was_busy(self, address: str, method: str, now: float) -> None:
        """A replica had no place for a call, perhaps because of others' calls: of ours it would have the least."""
        shun = self._shuns.setdefault((address, method), _Shun())
        shun.busy_until = now + BUSY_S

    def worked(self, address: str, method: str) -> None:
        """A replica answered as it should."""
        self._shuns.pop((address, method), None)

    def _forgive(self, address: str) -> None:
        self._shuns = {key: shun for key, shun in self._shuns.items() if key[0] != address}

    def _is_shunned(self, address: str, method: str, now: float) -> bool:
        return (shun := self._shuns.get((address, method))) is not None and now < max(shun.until, shun.busy_until)

    def unanswered(self, address: str) -> None:
        """A probe came to nothing."""
        replica = self.replica(address)
        if replica.health is not Health.LEFT:
            replica.health, replica.n_failed_probes = Health.DEAD, replica.n_failed_probes + 1

    def probe_delay_s(self, address: str) -> float:
        """How long to wait before the next probe: nothing for a suspect, ever longer for the dead."""
        n_failed: int = self.replica(address).n_failed_probes
        return min(MAX_PROBE_S, FIRST_PROBE_S * 2.0 ** min(n_failed - 1, 10)) if n_failed else 0.0

    def pick(self, addresses: Sequence[str], method: str, now: float) -> str:
        """The less loaded of two drawn at random among the healthiest that are not shunned."""
        best = min(self.health(address) for address in addresses)
        healthy = [address for address in addresses if self.health(address) == best]
        sound = [address for address in healthy if not self._is_shunned(address, method, now)] or healthy
        if len(sound) == 1:
            return sound[0]
        two = self._random.sample(sound, 2)
        return min(two, key=lambda address: self.replica(address).n_in_flight)


@dataclass(slots=True)
class _Attempt:
    began: float
    slow_at: float
    due: float
    slow: bool = False


@dataclass(slots=True)
class Race:
    """One call to one shard, until one replica has answered. Every event gives the actions that must follow."""

    _router: Router
    _method: str
    _latencies: _Latencies
    _addresses: tuple[str, ...]
    _due: float
    _running: dict[str, _Attempt] = field(default_factory=dict)
    _asked: set[str] = field(default_factory=set)
    _broken: list[str] = field(default_factory=list)
    _hedged: bool = False
    _retried: bool = False

    @property
    def wake_at(self) -> float:
        """When `woke` must be called if nothing else happened before."""
        times = [
            attempt.due if attempt.slow else min(attempt.slow_at, attempt.due) for attempt in self._running.values()
        ]
        return min(times, default=self._due)

    def start(self, now: float) -> list[Action]:
        """Begin."""
        if not (listed := self._listed(self._addresses)):
            return [GiveUp(late=False)]
        self._router.hedges.count_call()
        return [self._ask(self._router.pick(listed, self._method, now), now)]

    def answered(self, address: str, now: float) -> list[Action]:
        """A replica answered: the race is over."""
        self._end(address, now, measured=True)
        self._router.spoke(address, now)
        self._router.worked(address, self._method)
        for broken in self._broken:
            self._router.broke(broken, self._method, now)
        return self.abandon(now)

    def failed(self, address: str, failure: Failure, now: float) -> list[Action]:
        """A replica's call came to nothing."""
        at_the_last_moment = self._running[address].due >= self._due
        self._end(address, now, measured=failure is Failure.LATE)
        if failure is Failure.LOST:
            return [*self._router.lost(address), *self._instead(now)]
        self._router.spoke(address, now)
        if failure is Failure.BUSY:
            self._router.was_busy(address, self._method, now)
        if failure is Failure.BROKEN:
            self._broken.append(address)  # or is it the question at which all would?
        if failure is Failure.LATE and at_the_last_moment:
            return [*self.abandon(now), GiveUp(late=True)]
        is_last = self._retried or not self._others()
        if failure is Failure.BUSY and not self._running and not is_last and not self._router.hedges.take():
            return [GiveUp(late=False)]  # others are hardly less busy: more calls than the budget would not help them
        return self._instead(now)

    def woke(self, now: float) -> list[Action]:
        """Time has passed."""
        if now >= self._due:
            return [*self.abandon(now), GiveUp(late=True)]
        actions: list[Action] = []
        for address, attempt in list(self._running.items()):
            if now >= attempt.due:
                silent = self._router.replica(address).spoke_at < attempt.began
                self._end(address, now, measured=True)
                actions += [Cancel(address), *(self._router.suspect(address) if silent else ()), *self._instead(now)]
            elif now >= attempt.slow_at and not attempt.slow:
                attempt.slow = True
                actions += [*self._strike(address, attempt), *self._hedge(now)]
        return actions

    def abandon(self, now: float) -> list[Action]:
        """Nobody waits for the answer any more."""
        actions: list[Action] = [Cancel(address) for address in self._running]
        for address, attempt in list(self._running.items()):
            self._end(address, now, measured=attempt.slow)
        return actions

    def _ask(self, address: str, now: float, is_hedge: bool = False) -> Ask:
        timeout_s = min(self._router.timeout_s, self._due - now)
        slow_at = now + self._latencies.slow_s(self._router.timeout_s)
        self._running[address] = _Attempt(now, slow_at, min(now + timeout_s, self._due))
        self._asked.add(address)
        self._router.replica(address).n_in_flight += 1
        return Ask(address, timeout_s, is_hedge)

    def _end(self, address: str, now: float, measured: bool) -> None:
        """One attempt less. What a slow call took until it was cancelled counts too, or the slow would go unseen."""
        if measured:
            self._latencies.add(now - self._running[address].began)
        del self._running[address]
        self._router.replica(address).n_in_flight -= 1

    def _strike(self, address: str, attempt: _Attempt) -> list[Probe]:
        replica = self._router.replica(address)
        if replica.spoke_at >= attempt.began:
            return []  # it answers others: slow, not silent
        replica.n_strikes += 1
        return self._router.suspect(address) if replica.n_strikes >= MAX_STRIKES else []

    def _hedge(self, now: float) -> list[Action]:
        if self._hedged:
            return []
        others = [a for a in self._addresses if a not in self._asked and self._router.health(a) is Health.ALIVE]
        if not others or not self._router.hedges.take():
            return []
        self._hedged = True
        return [self._ask(self._router.pick(others, self._method, now), now, is_hedge=True)]

    def _instead(self, now: float) -> list[Action]:
        """After an attempt that failed: another one still runs, or one more is made elsewhere, or that was all."""
        if self._running:
            return []
        others = self._others()
        if self._retried or not others or now >= self._due:
            return [GiveUp(late=now >= self._due)]
        self._retried = True
        return [self._ask(self._router.pick(others, self._method, now), now)]

    def _others(self) -> list[str]:
        """Those that were not asked."""
        return self._listed(address for address in self._addresses if address not in self._asked)

    def _listed(self, addresses: Iterable[str]) -> list[str]:
        return [address for address in addresses if self._router.health(address) is not Health.LEFT]
