"""Builds that are killed, and builds of one target at once: what they leave is the next one's, and never in its way."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from openbook import files
from openbook.core.types import Passage
from openbook.errors import InvalidConfig
from openbook.index.building.build import LOCK, OnProgress, build_snapshot
from openbook.index.disk.snapshot import Snapshot


def build(out: Path, on_progress: OnProgress = lambda *_: None) -> str:
    passages = [Passage(i, "d", "t", f"text {i}") for i in range(8)]
    return build_snapshot(
        passages, np.eye(8, dtype=np.float32), out, 2, "Flat", "e", "f", on_progress=on_progress
    ).snapshot_id


def killed(stage: str, done: int, total: int) -> None:
    if (stage, done) == ("index", total):
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_build_left_is_taken_over(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, __file__, str(tmp_path / "s")], check=False)
    assert done.returncode == -signal.SIGKILL
    (partial,) = tmp_path.iterdir()
    assert (partial / "shard-0000" / "index.faiss").exists()
    (partial / "shard-0007").mkdir()  # of one with more shards
    assert build(tmp_path / "s") == build(tmp_path / "other")
    assert {path.name for path in tmp_path.iterdir()} == {"s", "other"}
    assert {path.name for path in (tmp_path / "s").iterdir()} == {"manifest.json", "shard-0000", "shard-0001"}
    Snapshot.open(tmp_path / "s").verify(1)


def test_one_build_of_a_target_at_a_time(tmp_path: Path) -> None:
    refused = []

    def another(stage: str, done: int, total: int) -> None:
        with pytest.raises(InvalidConfig, match=r"\.s\.partial: another process is at work here"):
            build(tmp_path / "s")
        refused.append(stage)

    build(tmp_path / "s", another)
    assert set(refused) == {"write", "index"}
    with pytest.raises(InvalidConfig, match="exists"):
        build(tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_build_whose_snapshot_stands_has_succeeded_whoever_tidied_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = files.put

    def put_and_tidied(partial: Path, path: Path) -> None:
        put(partial, path)
        (path / LOCK).unlink(missing_ok=True)

    monkeypatch.setattr(files, "put", put_and_tidied)
    assert build(tmp_path / "s") == Snapshot.open(tmp_path / "s").manifest.snapshot_id


if __name__ == "__main__":
    build(Path(sys.argv[1]), killed)
