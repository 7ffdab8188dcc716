"""A Ray of our own: what is ours stays ours while it runs, and it leaves nothing behind."""

import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType

import pytest

from openbook import local_ray
from openbook.serving.launch.environment import guards

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def ours(number: int, frame: FrameType | None) -> None:
    """A handler of signals."""


@pytest.fixture(scope="module")
def running() -> Iterator[ExitStack]:
    """What ends it."""
    former = signal.signal(signal.SIGTERM, ours)
    try:
        # Not where others' are. Not pytest's folder: the paths of Ray's sockets may have 107 characters.
        with (
            tempfile.TemporaryDirectory(prefix="ob-") as folder,
            pytest.MonkeyPatch.context() as patch,
            ExitStack() as stack,
        ):
            patch.setenv("RAY_TMPDIR", folder)
            stack.enter_context(local_ray.started(1, guards(), log_to_driver=False))
            yield stack
    finally:
        signal.signal(signal.SIGTERM, former)


def test_what_is_done_at_sigterm_is_still_what_we_said(running: ExitStack) -> None:
    assert signal.getsignal(signal.SIGTERM) is ours
