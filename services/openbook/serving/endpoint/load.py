"""How busy this replica is, told to HAProxy in front of Serve: through Serve it takes three times as much."""

import asyncio
from collections.abc import Callable

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOAD_PATH = "/-/load"
"""Beside Serve's own `/-/healthz`. Callers do not get it: `launch.soonest`."""

_told: tuple[Callable[[], tuple[float, float] | None], asyncio.AbstractEventLoop] | None = None
"""Of this process, which is all that Serve's middleware and the replica's own code have in common."""


def tell(load: Callable[[], tuple[float, float] | None]) -> None:
    """From now on `LoadTold` tells what `load` gives, the seconds until a replica has done all that it has and those of
    one question more. It is called in the event loop that runs now: one that is stuck tells nothing.
    """
    global _told
    _told = load, asyncio.get_running_loop()


class LoadTold:
    """Middleware that answers LOAD_PATH. 404 where there is nothing to tell."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != LOAD_PATH:
            await self._app(scope, receive, send)
            return
        load = await _load()
        reply = PlainTextResponse(" ".join(f"{seconds:.6f}" for seconds in load or ()), 200 if load else 404)
        await reply(scope, receive, send)


async def _load() -> tuple[float, float] | None:
    if not _told:
        return None
    load, loop = _told

    async def call() -> tuple[float, float] | None:
        return load()

    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(), loop))
