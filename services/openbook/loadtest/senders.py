"""Who sends a question and says how it ended, over either protocol. What a caller can meet becomes a status."""

import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Protocol

from openbook.core.types import Formulation
from openbook.errors import OpenbookError
from openbook.loadtest.kinds import Check, What
from openbook.loadtest.outcomes import Reply
from openbook.loadtest.settings import LoadSettings
from openbook.secret import bearer

CONNECT_TIMEOUT_S = 10.0


class Unreachable(OpenbookError):
    """Nobody answers at the address: nothing was measured."""


class Sender(Protocol):
    """A caller of the endpoint. Safe to use by any number of tasks of its event loop."""

    async def send(self, number: int) -> Reply:
        """Ask the question of this number, and wait for however it ends. Raises nothing that the endpoint can cause."""
        ...


def options(settings: LoadSettings) -> dict[str, Any]:
    """What each request asks for besides its question, by the names of answer.proto."""
    of_answers = ["formulation", "decoding", "n_beams", "max_new_tokens"]
    names = ["k", *(of_answers if settings.what is not What.RETRIEVE else ())]
    asked = {name: getattr(settings, name) for name in ("timeout_s", *names)}
    # Only so are tokens decided one by one.
    usual = {"formulation": Formulation.TOKEN, "n_beams": 1} if settings.what is What.STREAM else {}
    return usual | {name: value for name, value in asked.items() if value is not None}


def who_asks(settings: LoadSettings) -> dict[str, str]:
    """Headers, or metadata, that say so. A key is in the environment alone: settings are written into the results.

    Raises:
        InvalidConfig: as `bearer`.
    """
    said = {"x-caller": settings.caller, "authorization": bearer(os.environ.get("OPENBOOK_API_KEY"))}
    return {name: value for name, value in said.items() if value}


def about(question: str, snapshot_id: str, missing_shards: Iterable[int]) -> int:
    """What replies must be equal for."""
    return _digest(question, snapshot_id, *missing_shards) or 1


def digest(check: Check, answer: str, ids: Sequence[int], numbers: Sequence[float]) -> int:
    """Of what must be equal: the text and the passages, and to the bit the scores and priors if that is checked.

    Not the answer's own probabilities: the generator rounds differently in batches of other sizes.
    """
    return _digest(answer, *ids, *(numbers if check is Check.BITS else ()))


def _digest(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(errors="backslashreplace"), digest_size=8).digest())
