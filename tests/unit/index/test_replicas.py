"""What a client makes of a server that it asks whether it is there."""

import asyncio

import pytest

from openbook.errors import DeadlineExceeded
from openbook.index.client import replicas
from openbook.index.client.replicas import Replicas
from openbook.index.client.routing import Health, Router
from openbook.v1.index_pb2 import InfoResponse

SERVER = "127.0.0.1:1"


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

    async def close(self) -> None: ...


@pytest.mark.parametrize("answers_others", [True, False])
def test_only_who_answers_nobody_loses_his_connection(monkeypatch: pytest.MonkeyPatch, answers_others: bool) -> None:
    router = Router(1.0)
    server = Slow(router, answers_others)
    monkeypatch.setattr(replicas, "IndexClient", lambda *_, **__: server)

    async def probed() -> None:
        found = Replicas([SERVER], lambda: None, router, lambda *_: None)
        assert router.suspect(SERVER)
        found._probe(SERVER)
        await found._probes[SERVER]

    asyncio.run(probed())
    assert (server.n_asked, server.n_reset, router.health(SERVER)) == (2, int(not answers_others), Health.ALIVE)
