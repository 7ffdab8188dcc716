"""Replicas die, freeze and come back here without a server, a connection or a wait."""

from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.index.client.routing import (
    BUSY_S,
    FIRST_PROBE_S,
    FIRST_SHUN_S,
    MAX_PROBE_S,
    MAX_SHUN_S,
    MAX_STRIKES,
    MIN_LATENCIES,
    MIN_SLOW_S,
    N_LATENCIES,
    Action,
    Ask,
    Cancel,
    Failure,
    GiveUp,
    Health,
    Probe,
    Race,
    Router,
)

TIMEOUT_S = 2.0
DUE = 1000.0


def router(hedge_budget: float = 1.0) -> Router:
    """One that knows calls of 10 ms, so that one of more than 20 ms is slow."""
    made = Router(TIMEOUT_S, hedge_budget, Random(0))
    for _ in range(2 * MIN_LATENCIES):
        race = made.race("Search", "kind", ["elsewhere"], DUE)
        race.start(0.0)
        race.answered("elsewhere", 0.01)
    return made


def start(
    made: Router, *addresses: str, now: float = 0.0, due: float = DUE, method: str = "Search"
) -> tuple[Race, str]:
    """A race under way, and who was asked."""
    race = made.race(method, "kind", addresses, due)
    (ask,) = race.start(now)
    assert isinstance(ask, Ask)
    return race, ask.address


def other(address: str) -> str:
    return "b" if address == "a" else "a"


def test_a_slow_call_is_hedged_and_the_loser_is_cancelled() -> None:
    race, first = start(router(), "a", "b")
    assert race.wake_at == pytest.approx(0.02)
    assert race.woke(0.02) == [Ask(other(first), TIMEOUT_S, is_hedge=True)]
    assert race.answered(other(first), 0.03) == [Cancel(first)]


def test_a_replica_that_dies_during_a_hedge_leaves_the_other_one_running() -> None:
    race, first = start(router(), "a", "b")
    race.woke(0.02)
    assert race.failed(first, Failure.LOST, 0.03) == [Probe(first)]
    assert race.answered(other(first), 0.04) == []


def test_a_replica_that_fails_is_replaced_once() -> None:
    race, first = start(router(), "a", "b", "c")
    probe, ask = race.failed(first, Failure.LOST, 0.01)
    assert isinstance(ask, Ask)
    assert probe == Probe(first)
    assert race.failed(ask.address, Failure.LOST, 0.02) == [Probe(ask.address), GiveUp(late=False)]


def test_the_only_replica_is_not_asked_twice() -> None:
    race, _ = start(router(), "a")
    assert race.woke(0.02) == []
    assert race.failed("a", Failure.LOST, 0.5) == [Probe("a"), GiveUp(late=False)]


def test_a_call_that_hangs_is_tried_elsewhere_when_its_time_is_over() -> None:
    for has_spoken in (False, True):
        made = router(hedge_budget=0.0)
        race, first = start(made, "a", "b")
        race.woke(0.02)
        assert race.wake_at == TIMEOUT_S
        if has_spoken:
            made.spoke(first, 1.0)
        probes = [] if has_spoken else [Probe(first)]
        assert race.woke(TIMEOUT_S) == [Cancel(first), *probes, Ask(other(first), TIMEOUT_S)]


def test_all_attempts_draw_on_one_deadline() -> None:
    race, first = start(router(), "a", "b", due=0.1)
    assert race.woke(0.02) == [Ask(other(first), pytest.approx(0.08), is_hedge=True)]
    assert race.wake_at == pytest.approx(0.04)
    race.woke(0.04)
    assert race.wake_at == 0.1
    assert race.woke(0.1) == [Cancel(first), Cancel(other(first)), GiveUp(late=True)]


def test_a_server_that_drops_a_call_at_the_callers_deadline_has_not_failed() -> None:
    race, first = start(router(), "a", "b", due=0.1)
    assert race.failed(first, Failure.LATE, 0.0999) == [GiveUp(late=True)]
    race, first = start(router(), "a", "b")
    assert race.failed(first, Failure.LATE, 1.0) == [Ask(other(first), TIMEOUT_S)], "it dropped it before"


def test_who_fails_when_the_deadline_has_passed_is_late_and_not_unavailable() -> None:
    race, first = start(router(), "a", "b", due=0.1)
    assert race.failed(first, Failure.LOST, 0.1) == [Probe(first), GiveUp(late=True)]


def test_a_busy_replica_is_replaced_only_from_the_budget() -> None:
    generous, stingy = router(), router(hedge_budget=0.0)
    race, first = start(generous, "a", "b")
    assert race.failed(first, Failure.BUSY, 0.01) == [Ask(other(first), TIMEOUT_S)]
    race, first = start(stingy, "a", "b")
    assert race.failed(first, Failure.BUSY, 0.01) == [GiveUp(late=False)]
    assert stingy.health(first) is Health.ALIVE


def test_who_has_no_place_is_left_alone_for_a_moment() -> None:
    """He refuses at once, so that he would always have the fewest calls under way."""
    made = router(hedge_budget=0.0)
    race, busy = start(made, "a", "b")
    race.failed(busy, Failure.BUSY, 0.0)
    assert {start(made, "a", "b", now=BUSY_S / 2)[1] for _ in range(20)} == {other(busy)}
    race, last = start(made, busy, now=BUSY_S / 2)
    assert last == busy, "there is nobody else"
    assert start(made, "a", "b", now=BUSY_S)[1] == busy
    race.failed(busy, Failure.BUSY, BUSY_S)
    race, _ = start(made, busy, now=BUSY_S)
    race.answered(busy, BUSY_S)
    assert start(made, "a", "b", now=BUSY_S)[1] == busy, "he has answered"


@pytest.mark.parametrize("was_listed", [True, False])
def test_who_comes_back_may_be_another_and_have_a_place(was_listed: bool) -> None:
    made = router(hedge_budget=0.0)
    race, busy = start(made, "a", "b")
    race.failed(busy, Failure.BUSY, 0.0)
    if was_listed:
        made.lost(busy)
        made.spoke(busy, 0.0)
    else:
        made.left(busy)
        made.joined(busy)
    assert {start(made, "a", "b")[1] for _ in range(20)} == {"a", "b"}


def test_who_is_listed_no_more_stays_so_whatever_his_last_calls_end_in() -> None:
    made = router()
    made.left("a")
    made.spoke("a", 1.0)
    made.unanswered("a")
    assert made.lost("a") == []
    assert made.have_left(["a"])
    assert not made.have_left(["a", "b"])


def test_many_calls_that_broke_at_once_broke_for_one_reason() -> None:
    made = router()
    for _ in range(10):
        made.broke("a", "Search", 0.0)
    assert {start(made, "a", "b", now=FIRST_SHUN_S)[1] for _ in range(20)} == {"a", "b"}


def test_who_answers_with_errors_of_his_own_is_replaced_and_asked_ever_less_often() -> None:
    made, now, asked, fetched = router(hedge_budget=0.0), 0.0, list[float](), list[str]()
    while now < 4 * MAX_SHUN_S:
        race, first = start(made, "a", "b", now=now)
        if first == "a":
            asked.append(now)
            assert race.failed("a", Failure.BROKEN, now) == [Ask("b", TIMEOUT_S)]
        race.answered("b", now)
        race, first = start(made, "a", "b", now=now, method="Fetch")
        fetched.append(first)
        race.answered(first, now)
        now += 0.05
    assert 0.4 < fetched.count("a") / len(fetched) < 0.6, "whoever cannot search may have the texts"
    assert made.health("a") is Health.ALIVE
    waited = [later - before for before, later in pairwise(asked)]
    assert len(asked) < 11
    assert waited[0] >= FIRST_SHUN_S
    assert all(after >= before for before, after in pairwise(waited[:5]))
    assert waited[-1] >= MAX_SHUN_S
    race, _ = start(made, "a")
    race.answered("a", now)
    firsts = [start(made, "a", "b", now=now)[1] for _ in range(100)]
    assert 30 < firsts.count("a") < 70, "as soon as it works it is one like any other"


def test_a_question_at_which_all_fail_keeps_nobody_from_being_asked() -> None:
    made, firsts = router(), []
    for _ in range(100):
        race, first = start(made, "a", "b")
        assert race.failed(first, Failure.BROKEN, 0.0) == [Ask(other(first), TIMEOUT_S)]
        assert race.failed(other(first), Failure.BROKEN, 0.0) == [GiveUp(late=False)]
        race, first = start(made, "a", "b")
        race.answered(first, 0.0)
        firsts.append(first)
    assert 30 < firsts.count("a") < 70


def test_who_is_busy_and_has_no_replica_spends_nothing_of_the_budget() -> None:
    made = router()
    race, _ = start(made, "a")
    assert race.failed("a", Failure.BUSY, 0.01) == [GiveUp(late=False)]
    assert made.hedges.n_hedges == 0


def test_silence_is_suspicious_and_a_suspect_gets_no_calls() -> None:
    made = router(hedge_budget=0.0)
    races = [made.race("Search", "kind", ["a"], DUE) for _ in range(MAX_STRIKES)]
    for race in races:
        race.start(0.0)
    assert [race.woke(0.02) for race in races] == [[]] * (MAX_STRIKES - 1) + [[Probe("a")]]
    assert [start(made, "a", "b")[1] for _ in range(10)] == ["b"] * 10
    assert not made.is_gone(["a"]), "it may be at a long batch"
    assert made.probe_delay_s("a") == 0.0  # at once


def test_a_replica_that_answers_others_is_slow_and_not_silent() -> None:
    made = router(hedge_budget=0.0)
    races = [made.race("Search", "kind", ["a"], DUE) for _ in range(MAX_STRIKES + 1)]
    for race in races:
        race.start(0.0)
    races.pop().answered("a", 0.015)
    assert [race.woke(0.02) for race in races] == [[]] * MAX_STRIKES
    assert made.health("a") is Health.ALIVE


def test_a_dead_replica_is_probed_ever_less_often_and_comes_back() -> None:
    made = router()
    assert made.lost("a") == [Probe("a")]
    assert made.lost("a") == []  # a probe is under way
    delays = []
    for _ in range(8):
        delays.append(made.probe_delay_s("a"))
        made.unanswered("a")
    assert delays[:3] == [FIRST_PROBE_S, 2 * FIRST_PROBE_S, 4 * FIRST_PROBE_S]
    assert delays[-1] == MAX_PROBE_S
    made.spoke("a", 1.0)
    assert {start(made, "a", "b")[1] for _ in range(20)} == {"a", "b"}


def test_the_dead_are_asked_when_there_is_nobody_else() -> None:
    made = router()
    for address in "ab":
        made.lost(address)
    assert made.is_gone(["a", "b"])
    race, first = start(made, "a", "b")
    assert race.failed(first, Failure.LOST, 0.01) == [Ask(other(first), TIMEOUT_S)]


def test_the_dead_are_no_hedge_and_cost_none() -> None:
    made = router()
    made.lost("b")
    race, _ = start(made, "a", "b")
    assert race.woke(0.02) == []
    assert made.hedges.n_hedges == 0


def test_the_less_loaded_replica_is_asked() -> None:
    made = router()
    race, busy = start(made, "a", "b")
    assert [start(made, "a", "b")[1] for _ in range(1)] == [other(busy)]
    race.answered(busy, 0.01)
    assert start(made, "a", "b")[1] == busy


def test_load_spreads_evenly() -> None:
    made = router()
    asked = [start(made, *"abcd")[1] for _ in range(400)]
    assert max(map(asked.count, "abcd")) - min(map(asked.count, "abcd")) <= 5


def test_too_few_calls_say_nothing_of_what_is_slow() -> None:
    race, _ = start(Router(TIMEOUT_S), "a", "b")
    assert race.wake_at == TIMEOUT_S / 4


@pytest.mark.parametrize(
    ("latencies_s", "slow_s"),
    [([0.1], 0.2), ([0.1] + [0.001] * 9, 0.2), ([0.3], TIMEOUT_S / 4), ([0.0001], MIN_SLOW_S)],
)
def test_slow_is_twice_the_95th_percentile_of_late_within_limits(latencies_s: list[float], slow_s: float) -> None:
    made = router()
    for latency_s in latencies_s * N_LATENCIES:
        race, address = start(made, "a")
        race.answered(address, latency_s)
    race, _ = start(made, "a", "b")
    assert race.wake_at == pytest.approx(slow_s)


@pytest.mark.parametrize(
    ("woke_s", "end", "slow_s"),
    [
        pytest.param(0.02, lambda race: race.abandon(0.03), 0.06, id="slow-and-cancelled"),
        pytest.param(0.0, lambda race: race.abandon(0.001), 0.02, id="cancelled-before"),
        pytest.param(0.0, lambda race: race.failed("a", Failure.LATE, 1.0), TIMEOUT_S / 4, id="late"),
        pytest.param(0.0, lambda race: race.failed("a", Failure.BUSY, 0.001), 0.02, id="refused"),
    ],
)
def test_what_a_call_took_that_was_not_answered_counts_where_it_was_long(
    woke_s: float, end: Callable[[Race], object], slow_s: float
) -> None:
    made = router(hedge_budget=0.0)
    for _ in range(N_LATENCIES):
        race, _ = start(made, "a")
        race.woke(woke_s)
        end(race)
    race, _ = start(made, "a", "b")
    assert race.wake_at == pytest.approx(slow_s)


class World:
    """A client and four replicas to which anything may happen; checks what must always hold."""

    def __init__(self, seed: int, budget: float) -> None:
        self.random, self.budget, self.now = Random(seed), budget, 0.0
        self.router = Router(TIMEOUT_S, budget, self.random)
        self.running: list[tuple[Race, set[str]]] = []
        self.probing: set[str] = set()

    def follow(self, race: Race, asked: set[str], actions: list[Action]) -> bool:
        """Whether the race goes on."""
        for action in actions:
            if isinstance(action, Ask):
                assert action.address not in asked
                assert 0 < action.timeout_s <= TIMEOUT_S
                healths = [self.router.health(address) for address in "abcd" if address not in asked]
                assert self.router.health(action.address) == min(healths)
                asked.add(action.address)
                assert len(asked) <= 3
            elif isinstance(action, Probe):
                self.probing.add(action.address)
        return not any(isinstance(action, GiveUp) for action in actions)

    def begin(self) -> None:
        race, asked = (
            self.router.race("Search", "kind", "abcd", self.now + 5 * self.random.random() + 0.001),
            set[str](),
        )
        assert self.follow(race, asked, race.start(self.now))
        self.running.append((race, asked))

    def happen(self) -> None:
        race, asked = self.running.pop(self.random.randrange(len(self.running)))
        address = self.random.choice(sorted(race._running))
        match self.random.randrange(4):
            case 0:
                self.follow(race, asked, race.answered(address, self.now))
                self.probing.discard(address)  # its probe is about to succeed
                return
            case 1:
                goes_on = self.follow(race, asked, race.failed(address, self.random.choice(list(Failure)), self.now))
            case 2:
                self.now = max(self.now, race.wake_at)
                goes_on = self.follow(race, asked, race.woke(self.now))
            case _:
                race.abandon(self.now)
                goes_on = False
        if goes_on:
            assert race._running
            self.running.append((race, asked))
        else:
            assert not race._running

    def probe(self) -> None:
        if self.probing:
            address = self.random.choice(sorted(self.probing))
            if self.random.random() < 0.5:
                self.router.spoke(address, self.now)
                self.probing.discard(address)
            else:
                self.router.unanswered(address)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), budget=st.sampled_from([0.0, 0.05, 0.5, 1.0]))
def test_whatever_happens(seed: int, budget: float) -> None:
    world = World(seed, budget)
    for _ in range(150):
        world.now += world.random.expovariate(50)
        if world.random.random() < 0.4 or not world.running:
            world.begin()
        elif world.random.random() < 0.8:
            world.happen()
        else:
            world.probe()
        made = world.router
        assert made.hedges.n_hedges <= budget * made.hedges.n_calls + 1e-9
        in_flight = sum(len(race._running) for race, _ in world.running)
        assert sum(made.replica(address).n_in_flight for address in "abcd") == in_flight
        assert all(made.replica(address).n_in_flight >= 0 for address in "abcd")
        assert all(race.wake_at < float("inf") for race, _ in world.running)
        assert {a for a in "abcd" if made.health(a) is not Health.ALIVE} <= world.probing
