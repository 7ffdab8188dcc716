"""Index servers and Redis for one machine: whatever ends the start, nothing is left running."""

from pathlib import Path

import numpy as np
import pytest

from openbook.cache import server as redis_servers
from openbook.config import Settings
from openbook.core.types import Passage
from openbook.errors import InvalidConfig, StartupError
from openbook.index.build import build_snapshot
from openbook.serving import local
from openbook.serving.local import IndexProcess, local_tiers


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    passages = [Passage(i, "d", "t", "x") for i in range(4)]
    build_snapshot(passages, np.eye(4, dtype=np.float32), tmp_path / "s", 2, "Flat", "e", "f")
    return tmp_path / "s"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[IndexProcess]:
    """Every index process that is started during the test."""
    processes: list[IndexProcess] = []

    class Recorded(IndexProcess):
        def __init__(self, snapshot: Path, shard: int) -> None:
            super().__init__(snapshot, shard)
            processes.append(self)

    monkeypatch.setattr(local, "IndexProcess", Recorded)
    monkeypatch.setattr(redis_servers, "STOP_TIMEOUT_S", 60.0)  # one that is slow to end was not killed
    return processes


def test_they_are_named_in_the_settings_while_they_run(snapshot: Path, started: list[IndexProcess]) -> None:
    with local_tiers(snapshot, Settings()) as settings:
        assert len(set(settings.index.addresses)) == 2
        assert str(settings.cache.url).startswith("redis://127.0.0.1:")
        assert all(each.process.poll() is None for each in started)
    assert [each.process.poll() for each in started] == [0, 0]


def test_a_start_that_fails_leaves_nothing_behind(snapshot: Path, started: list[IndexProcess]) -> None:
    vectors = snapshot / "shard-0001" / "vectors.npy"
    vectors.write_bytes(vectors.read_bytes()[:-1])
    with (
        pytest.raises(StartupError, match="index server of shard 1 ended with code 1"),
        local_tiers(snapshot, Settings()),
    ):
        pass
    assert all(each.process.poll() is not None for each in started)


def test_an_interruption_while_they_read_their_shards_leaves_nothing_behind(
    snapshot: Path, started: list[IndexProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: IndexProcess) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(IndexProcess, "address", interrupted)
    with pytest.raises(KeyboardInterrupt), local_tiers(snapshot, Settings()):
        pass
    assert len(started) == 2
    assert all(each.process.poll() is not None for each in started)


def test_with_nothing_to_serve_it_says_what_to_name() -> None:
    with pytest.raises(InvalidConfig, match="name a snapshot to serve"), local_tiers(None, Settings()):
        pass
