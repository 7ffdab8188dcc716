"""Round trips: who comes meanwhile shares the next, and after a failure one tries for all."""

import asyncio
from collections.abc import Sequence

import pytest

from openbook.cache.trips import MAX_ITEMS, PAUSE_S, Breaker, Lane
from openbook.testing import ManualClock


class Server:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.trips: list[list[int]] = []
        self.results: list[asyncio.Future[None]] = []

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.trips.append(list(items))
        self.results.append(asyncio.get_running_loop().create_future())
        await self.results[-1]
        return [-item for item in items]


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_who_comes_meanwhile_shares_the_next_trip() -> None:
    async def scenario() -> None:
        server = Server()
        lane = Lane(server)
        first = asyncio.create_task(lane.go([1, 2]))
        await settled()
        others = [asyncio.create_task(lane.go([n, n + 1])) for n in (3, 5, 7)]
        await settled()
        others[1].cancel()
        await settled()
        server.results[0].set_result(None)
        await settled()
        server.results[1].set_result(None)
        assert server.trips == [[1, 2], [3, 4, 7, 8]]
        assert (await first, await others[0], await others[2]) == ([-1, -2], [-3, -4], [-7, -8])

    asyncio.run(scenario())


def test_a_trip_has_so_many_items_at_most() -> None:
    async def scenario() -> None:
        server = Server()
        lane = Lane(server)
        tasks = [asyncio.create_task(lane.go([n] * 200)) for n in range(4)]
        tasks.append(asyncio.create_task(lane.go([4] * (MAX_ITEMS + 1))))
        await settled()
        for n_trips in (1, 2, 3):
            server.results[n_trips - 1].set_result(None)
            await settled()
        await asyncio.gather(*tasks)
        assert [len(trip) for trip in server.trips] == [400, 400, MAX_ITEMS + 1], "who asks for more goes alone"

    asyncio.run(scenario())


def test_a_failure_fails_all_who_wait_and_nobody_after_them() -> None:
    async def scenario() -> None:
        server = Server()
        lane = Lane(server)
        first = asyncio.create_task(lane.go([1]))
        await settled()
        second = asyncio.create_task(lane.go([2]))
        await settled()
        server.results[0].set_exception(OSError("gone"))
        failed = await asyncio.gather(first, second, return_exceptions=True)
        assert all(isinstance(error, OSError) for error in failed)
        third = asyncio.create_task(lane.go([3]))
        await settled()
        server.results[1].set_result(None)
        assert await third == [-3]

    asyncio.run(scenario())


def test_closing_cancels_who_waits() -> None:
    async def scenario() -> None:
        lane = Lane(Server())
        waiting = [asyncio.create_task(lane.go([n])) for n in range(3)]
        await settled()
        await lane.aclose()
        for task in waiting:
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(scenario())


def test_a_breaker_lets_one_try_after_its_pause() -> None:
    clock = ManualClock()
    breaker = Breaker(clock)
    assert breaker.lets_through()
    assert breaker.lets_through()
    breaker.failed()
    assert not breaker.lets_through()
    clock.advance(PAUSE_S)
    assert breaker.lets_through()
    assert not breaker.lets_through(), "one tries"
    breaker.failed()
    clock.advance(0.9 * PAUSE_S)
    assert not breaker.lets_through()
    clock.advance(0.1 * PAUSE_S)
    assert breaker.lets_through()
    breaker.succeeded()
    assert breaker.lets_through()
    assert breaker.lets_through()
