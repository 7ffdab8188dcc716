"""Replicas that say nothing are passed by until they say something again: Serve's router, replicas of the test."""

import asyncio

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from ray.serve.request_router import PendingRequest, ReplicaID

from openbook.serving.workers import routing
from openbook.serving.workers.routing import SILENCE_S, AnsweringRouter

MODEL = DeploymentID(name="model")


async def turns() -> None:
    """Let all tasks go as far as they can by themselves."""
    for _ in range(10):
        await asyncio.sleep(0)


class Replica:
    """One that says how much it has to do, or fails, or, while it is frozen, nothing."""

    max_ongoing_requests = 10

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaID(name, MODEL)
        self.fails: Exception | None = None
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.n_asked = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        self.n_asked += 1
        await self.goes_on.wait()
        if self.fails:
            raise self.fails
        return 0


class House:
    """Two replicas behind a router whose clock stands still."""

    def __init__(self) -> None:
        self.now = 100.0
        self.router = AnsweringRouter(MODEL, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        self.router.initialize_state(lambda: self.now)
        self.replicas = [Replica("a"), Replica("b")]
        self.router.update_replicas(self.replicas)

    async def chosen(self) -> str:
        """Who may be asked now."""
        [found] = await self.router.choose_replicas(list(self.router.curr_replicas.values()))
        return "".join(sorted(each.replica_id.unique_id for each in found))

    def call(self, replica: Replica) -> None:
        self.router.on_send_request(replica.replica_id)


async def pass_by() -> None:
    house = House()
    a, b = house.replicas
    assert await house.chosen() == "ab"
    a.goes_on.clear()
    house.call(a)
    house.now += SILENCE_S
    assert await house.chosen() == "ab", "not yet"
    house.call(a)
    house.now += 0.01
    house.call(b)
    await turns()  # in which Serve asks each by itself
    before = a.n_asked
    assert [await house.chosen() for _ in range(3)] == ["b", "b", "b"], "however lately it was called once more"
    assert a.n_asked == before + 1
    house.now += 2 * SILENCE_S
    b.goes_on.clear()
    assert await house.chosen() == "ab", "both are silent"
    a.goes_on.set()
    b.goes_on.set()
    await turns()
    assert await house.chosen() == "ab", "both have answered"


def test_who_has_not_said_whether_he_takes_a_call_gets_no_other_while_others_do() -> None:
    asyncio.run(pass_by())


async def known() -> None:
    house = House()
    a, b = house.replicas
    for _ in range(3):
        house.call(a)
    house.call(b)
    house.router.on_new_queue_len_info(b.replica_id, 7)
    assert [house.router.replica_queue_len_cache.get(each.replica_id) for each in (a, b)] == [3, 7]


def test_serve_knows_how_much_each_has_to_do() -> None:
    """By which it chooses of two, and asks nobody about it first."""
    asyncio.run(known())


async def alone() -> None:
    house = House()
    a, _ = house.replicas
    house.router.update_replicas([a])
    house.call(a)
    house.now += 2 * SILENCE_S
    assert (await house.chosen(), a.n_asked) == ("a", 0)


def test_a_call_does_not_wait_for_what_the_only_replica_says() -> None:
    asyncio.run(alone())


async def answer_late() -> None:
    house = House()
    a, _ = house.replicas
    house.call(a)
    house.call(a)
    house.now += 2 * SILENCE_S
    house.router.on_new_queue_len_info(a.replica_id, 2)
    assert await house.chosen() == "ab"
    house.call(a)
    house.now += 2 * SILENCE_S
    assert await house.chosen() == "ab", "it has a moment to answer, and does"
    a.goes_on.clear()
    house.call(a)
    house.now += 2 * SILENCE_S
    assert await house.chosen() == "b"
    a.goes_on.set()
    await turns()
    assert await house.chosen() == "ab", "it answered late"
    a.fails = ActorUnavailableError("lost", None)
    house.call(a)
    house.now += 2 * SILENCE_S
    assert [await house.chosen() for _ in range(2)] == ["b", "b"]
    a.fails = ActorDiedError()
    await turns()
    assert list(house.router.curr_replicas.values()) == house.replicas[1:]


def test_a_sign_of_life_brings_it_back_and_death_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "AGAIN_S", 0.0)
    asyncio.run(answer_late())


def test_of_who_was_silent_for_long_no_question_is_waited_for_longer_than_the_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(routing, "ANSWER_S", 0.001)
    monkeypatch.setattr(routing, "MOST_ANSWER_S", 0.004)

    class Frozen(Replica):
        def __init__(self) -> None:
            super().__init__("frozen")
            self.waited_s: list[float] = []

        async def get_queue_len(self, *, deadline_s: float) -> int:
            if deadline_s < 0.1:  # which Serve gives by itself
                self.waited_s.append(deadline_s)
            if len(self.waited_s) < 5:
                await asyncio.Event().wait()
            return 0

    async def ask() -> None:
        house, frozen = House(), Frozen()
        house.router.update_replicas([*house.replicas, frozen])
        house.call(frozen)
        house.now += 2 * SILENCE_S
        await house.chosen()
        while house.router._asking:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert frozen.waited_s == [0.001, 0.002, 0.004, 0.004, 0.004]

    asyncio.run(ask())


def test_of_many_two_are_chosen_and_of_those_that_are_gone_nothing_is_kept() -> None:
    async def choose() -> None:
        house = House()
        house.router.update_replicas([*house.replicas, Replica("c")])
        request = PendingRequest(args=[], kwargs={}, metadata=None)
        [found] = await house.router.choose_replicas(list(house.router.curr_replicas.values()), request)
        assert len({each.replica_id for each in found}) == 2
        assert request.routing_context.should_backoff
        house.call(house.replicas[0])
        house.router.update_replicas(house.replicas[1:])
        house.router.update_replicas(house.replicas)
        house.now += 2 * SILENCE_S
        assert await house.chosen() == "ab"

    asyncio.run(choose())
