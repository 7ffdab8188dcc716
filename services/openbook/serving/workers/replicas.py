"""The replicas of a model behind a handle. While it is updated, Serve sends calls to those of the former one too.

So each call says whose result it wants, and a replica with another model says so in place of one: nothing is taken, nor
kept in a cache, for what another model made.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from ray.exceptions import RayActorError

from openbook.config import ModelSettings
from openbook.core.context import Context
from openbook.core.hedges import HedgeBudget
from openbook.errors import ModelUnavailable
from openbook.logs import Lasting
from openbook.serving.workers.hop import OtherModel, call, call_stream
from openbook.serving.workers.routing import SILENCE_S
from openbook.telemetry import hop_errors

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger(__name__)

ASK_AGAIN_S = 0.2
"""Until a replica of our settings answers."""

N_TRIES = 8
"""When replicas have another model so many times in a row, the one that was is gone."""

PAUSE_S = 2 * SILENCE_S / N_TRIES
"""Between the tries of the second half: those with our model may have been silent for a moment, and passed by."""


class About(Protocol):
    """What a replica says of its model."""

    @property
    def made_by(self) -> str:
        """Where it is equal, so are results."""
        ...

    def may_follow(self, former: Self) -> bool:
        """Whether calls that were for the former one may be for this."""
        ...


A = TypeVar("A", bound=About)
Send = Callable[[str], Any]
"""Starts the call for what is made by this; gives Serve's response to wait for."""


class Replicas(Generic[A]):
    """The replicas that have one model. When none is left, that of the others is adopted."""

    def __init__(self, name: str, handle: "DeploymentHandle", hedges: HedgeBudget | None, about: A) -> None:
        self.about = about
        self._name, self._handle, self._hedges = name, handle, hedges

    @classmethod
    async def connect(cls, name: str, handle: "DeploymentHandle", settings: ModelSettings) -> Self:
        """Ask until a replica that was made with these settings says what it has."""
        waiting = Lasting(log, f"a replica of the {name} has answered", logging.INFO)
        while (about := await _describe(handle, settings)) is None:
            waiting.met(f"no replica of the {name} with these settings has answered yet: asking again")
            await asyncio.sleep(ASK_AGAIN_S)
        waiting.ended()
        return cls(name, handle, HedgeBudget() if settings.n_replicas > 1 else None, about)

    async def call(self, context: Context, send: Send) -> Any:
        """What the model returns.

        Raises:
            ModelUnavailable: no replica answers, or all have a model that may not follow this one.
            OpenbookError: as `hop.call`.
        """
        while True:
            made_by = self.about.made_by
            for i in range(N_TRIES):
                result = await call(self._name, context, partial(send, made_by), self._hedges)
                if isinstance(result, OtherModel):
                    await self._passed_by(i)
                elif self.about.made_by == made_by:  # or whoever asks would take it for what another model made
                    return result
                if self.about.made_by != made_by:  # adopted meanwhile
                    break
            else:
                await self._adopt(made_by, context)

    async def stream(self, context: Context, send: Send) -> AsyncIterator[Any]:
        """What its replica said of the model, then what that yields. Raises as `call`."""
        while True:
            about, is_told = self.about, False  # another call may adopt another one meanwhile
            for i in range(N_TRIES):
                parts = call_stream(self._name, context, partial(send, about.made_by))
                async with aclosing(parts):  # type: ignore[type-var]  # an async generator
                    async for part in parts:
                        if isinstance(part, OtherModel):
                            await self._passed_by(i)
                            break
                        if not is_told:
                            is_told = True
                            yield about
                        yield part
                    else:
                        return
            await self._adopt(about.made_by, context)

    async def _passed_by(self, i: int) -> None:
        hop_errors(self._name, OtherModel.__name__).inc()
        await asyncio.sleep(PAUSE_S if i >= N_TRIES // 2 else 0)

    async def _adopt(self, made_by: str, context: Context) -> None:
        """Go on with the model that replicas have now, if another call has not done so already."""
        found: A = await call(self._name, context, self._handle.describe.remote, self._hedges)
        if self.about.made_by != made_by or found.made_by == made_by:
            return
        if not found.may_follow(self.about):
            raise ModelUnavailable(
                f"no replica of the {self._name} has {made_by} any more, and {found.made_by} cannot take its place"
            )
        log.info("the %s's replicas have %s now, no longer %s", self._name, found.made_by, made_by)
        self.about = found


async def _describe(handle: "DeploymentHandle", settings: ModelSettings) -> Any:
    """None also where a replica of the former model ends under the call."""
    try:
        return await handle.describe.remote(settings)
    except RayActorError:
        return None
