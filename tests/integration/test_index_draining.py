"""Servers stop and come back while they are asked: who asks turns to the other one, and no question fails."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from small_snapshot import VECTORS, build

from openbook.config import IndexClientSettings, IndexServerSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import RetrievalSettings
from openbook.index.client import client, routing
from openbook.index.client.sharded import ShardedIndex
from openbook.index.server.server import IndexServer

N_CALLERS = 8
ENOUGH = 40
N_ROUNDS = 3
NEVER_S = 1e6


SomeMore = Callable[[], Awaitable[None]]


@pytest.fixture(params=[0, None], ids=["frames", "grpc"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> IndexServerSettings:
    return IndexServerSettings(snapshot=build(tmp_path), frame_port=request.param)


@asynccontextmanager
async def asked(*addresses: str) -> AsyncIterator[SomeMore]:
    """Both are, all the time, and none of the questions fails. For the body: waits until some more are answered."""
    tier = ShardedIndex.of(IndexClientSettings(addresses=addresses, timeout_s=5, hedge_budget=0))
    expected = await tier.search(VECTORS[:1], RetrievalSettings(k=5), Context(Deadline.after(30)))
    goes_on, answered = True, asyncio.Semaphore(0)

    async def caller() -> None:
        while goes_on:
            hits = await tier.search(VECTORS[:1], RetrievalSettings(k=5), Context(Deadline.after(30)))
            np.testing.assert_array_equal(hits.ids, expected.ids)
            answered.release()

    async def some_more() -> None:
        while not answered.locked():
            await answered.acquire()  # those of before
        for _ in range(ENOUGH):
            await answered.acquire()

    async with asyncio.TaskGroup() as group:
        for _ in range(N_CALLERS):
            group.create_task(caller())
        yield some_more
        goes_on = False
    await tier.close()


def test_no_question_fails_while_one_of_two_servers_stops(settings: IndexServerSettings) -> None:
    async def scenario(first: IndexServer, second: IndexServer) -> None:
        async with asked(first.address, second.address) as some_more:
            await some_more()
            await asyncio.to_thread(first.stop)
            await some_more()

    with IndexServer(settings) as first, IndexServer(settings) as second:
        asyncio.run(scenario(first, second))


def test_no_question_fails_while_servers_are_restarted_one_after_the_other(
    settings: IndexServerSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as soon as the one before listens again, which whoever asks has not noticed by then."""
    monkeypatch.setattr(client, "RECONNECT_S", 0.0)  # for as long is believed what a connection met just before
    monkeypatch.setattr(routing, "FIRST_PROBE_S", NEVER_S)
    monkeypatch.setattr(routing, "MAX_PROBE_S", NEVER_S)
    with ExitStack() as stack:

        def start(port: int = 0) -> IndexServer:
            return stack.enter_context(IndexServer(settings.model_copy(update={"port": port})))

        async def scenario(servers: list[IndexServer]) -> None:
            async with asked(*(server.address for server in servers)) as some_more:
                await some_more()
                for turn in range(2 * N_ROUNDS):
                    await asyncio.to_thread(servers[turn % 2].stop)
                    servers[turn % 2] = await asyncio.to_thread(start, servers[turn % 2].port)
                await some_more()

        asyncio.run(scenario([start(), start()]))
