"""How often an index server's threads take turns."""

import os
import sys
import threading
from collections.abc import Iterator

import pytest

from openbook.index.server import switching


@pytest.fixture
def told() -> Iterator[tuple[int, int]]:
    before, ends = sys.getswitchinterval(), os.pipe()
    yield ends
    sys.setswitchinterval(before)
    for end in ends:
        os.close(end)


def test_threads_switch_often_only_while_much_is_asked_for(
    told: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seen = 0.0, list[float]()
    monkeypatch.setattr(switching, "LOOK_S", 0.001)
    monkeypatch.setattr(switching, "monotonic", lambda: now)
    # A look each quarter of a second: often from the first look that finds much, and for STAYS_S after the last one.
    asked = iter([0, switching.MUCH - 1, switching.MUCH, 0, 0, 0, switching.MUCH, 0, 0, 0, 0, 0])

    def n_under_way() -> int:
        nonlocal now
        seen.append(sys.getswitchinterval())
        now += 0.25
        n = next(asked, None)
        if n is None:
            os.write(told[1], b"x")
        return n or 0

    switching.wait_for(told[0], n_under_way)
    often = [each == pytest.approx(switching.OFTEN_S) for each in seen[1:]]
    assert often == [False] * 2 + [True] * 8 + [False] * 2


def test_it_returns_as_soon_as_it_is_told(told: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switching, "LOOK_S", 3600.0)
    waiting = threading.Thread(target=switching.wait_for, args=(told[0], lambda: 0))
    waiting.start()
    assert waiting.is_alive()
    os.write(told[1], b"x")
    waiting.join()
