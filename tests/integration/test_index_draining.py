"""A server that is told to stop finishes what it has; who asks turns to the other one, and no question fails."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from small_snapshot import VECTORS, build

from openbook.config import IndexClientSettings, IndexServerSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import RetrievalSettings
from openbook.index.client.sharded import ShardedIndex
from openbook.index.server.server import IndexServer

N_CALLERS = 8
ENOUGH = 40


@pytest.mark.parametrize("frame_port", [0, None], ids=["frames", "grpc"])
def test_no_question_fails_while_one_of_two_servers_stops(tmp_path: Path, frame_port: int | None) -> None:
    snapshot = build(tmp_path)

    server = IndexServerSettings(snapshot=snapshot, frame_port=frame_port)

    async def scenario(first: IndexServer, second: IndexServer) -> None:
        settings = IndexClientSettings(addresses=(first.address, second.address), timeout_s=5, hedge_budget=0)
        tier = ShardedIndex.of(settings)
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
            await some_more()
            await asyncio.to_thread(first.stop)
            await some_more()
            goes_on = False
        await tier.close()

    with IndexServer(server) as first, IndexServer(server) as second:
        asyncio.run(scenario(first, second))
