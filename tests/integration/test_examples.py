"""The programs in examples/ that need no endpoint; tests/e2e/test_whole_system.py runs those that ask one."""

import runpy
import sys
from pathlib import Path

import pytest
import small_snapshot

from openbook.index.building.build import build_snapshot
from openbook.index.disk.root import Root
from openbook.testing import served

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> None:
    """As `python examples/NAME ARGUMENTS`, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_documents_become_a_snapshot_that_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    run("build_and_search.py", "who invented the telephone?")
    best, second = capsys.readouterr().out.splitlines()
    assert "Alexander Graham Bell: " in best
    assert float(best.split()[0]) > float(second.split()[0])


def test_tensors_are_decoded(capsys: pytest.CaptureFixture[str]) -> None:
    run("decode_tensors.py")
    *answers, loss = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in answers] == ["RAG-sequence"] * 2 + ["RAG-token"] * 2
    assert loss.startswith("loss ")


def test_a_snapshot_is_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passages = [small_snapshot.Passage(i, f"doc-{i}", f"title {i}", f"new text {i}") for i in range(small_snapshot.N)]
    first = small_snapshot.build(tmp_path / "root", 2)
    second = tmp_path / "root" / "second"
    built = build_snapshot(passages, small_snapshot.VECTORS, second, 2, "Flat", "encoder", "fingerprint")
    Root.create(tmp_path / "root", first)
    with served(first) as servers:
        run("publish.py", str(second), *(server.address for server in servers))
    said = capsys.readouterr().out
    assert f"{second}: publication 2" in said
    assert said.count(f"current {built.snapshot_id[:12]}, 20 passages") == 2


def test_every_example_is_run() -> None:
    folder = Path(__file__).parent
    tests = [Path(__file__), folder / "test_loadtest.py", folder.parent / "e2e" / "test_whole_system.py"]
    said = "".join(path.read_text(encoding="utf-8") for path in tests)
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in said] == []
