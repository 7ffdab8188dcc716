"""What a replica says of how busy it is, asked in one event loop, as Serve's server is, and told in another."""

import asyncio
from collections.abc import Iterator
from threading import Event, Thread

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from openbook.serving.endpoint import load
from openbook.serving.endpoint.load import LOAD_PATH, LoadTold, tell


@pytest.fixture(autouse=True)
def of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_told", None)


@pytest.fixture
def replica() -> Iterator[asyncio.AbstractEventLoop]:
    """The loop of its own code."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


async def serve(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("of Serve")(scope, receive, send)


def ask(path: str, timeout_s: float = 60) -> httpx.Response:
    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(LoadTold(serve))
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            return await asyncio.wait_for(client.get(path), timeout_s)

    return asyncio.run(get())


def tell_in(loop: asyncio.AbstractEventLoop, *loads: tuple[float, float] | None) -> None:
    told = iter(loads)

    async def tell_next() -> None:
        tell(lambda: next(told))

    asyncio.run_coroutine_threadsafe(tell_next(), loop).result()


def test_what_is_told_is_what_there_is_when_it_is_asked(replica: asyncio.AbstractEventLoop) -> None:
    assert ask(LOAD_PATH).status_code == 404
    tell_in(replica, (2.5, 0.25), None, (0.0, 1.0))
    assert [(reply.status_code, reply.text) for reply in (ask(LOAD_PATH), ask(LOAD_PATH), ask(LOAD_PATH))] == [
        (200, "2.500000 0.250000"),
        (404, ""),
        (200, "0.000000 1.000000"),
    ]


def test_all_else_is_for_serve(replica: asyncio.AbstractEventLoop) -> None:
    tell_in(replica, (2.5, 0.25))
    assert {ask(path).text for path in ("/", "/healthz", "/-/healthz", f"{LOAD_PATH}/x")} == {"of Serve"}


def test_a_replica_that_is_stuck_tells_nothing(replica: asyncio.AbstractEventLoop) -> None:
    tell_in(replica, (2.5, 0.25))
    goes_on = Event()
    replica.call_soon_threadsafe(goes_on.wait)
    try:
        with pytest.raises(TimeoutError):
            ask(LOAD_PATH, 0.05)
    finally:
        goes_on.set()
