"""What a client makes of a server that it asks whether it is there."""

import asyncio

import pytest

from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.errors import DeadlineExceeded
from openbook.index.client import replicas
from openbook.index.client.replicas import Replicas
from openbook.index.client.routing import Health, Router
from openbook.index.client.tier import ShardServers
from openbook.v1.index_pb2 import InfoResponse

SERVER, OTHER = "127.0.0.1:1", "127.0.0.1:2"


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
