"""All that `make gpu` does, at tiny size on a CPU: every part runs, with torch and transformers alone."""

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
BLOCKED = ["ray", "faiss", "grpc", "grpc_reflection", "google.protobuf", "numba", "redis", "fastapi"]
BLOCKED += ["prometheus_client", "bm25s", "matplotlib", "tenacity", "tensorboardX"]

BARE = f"""
import gc, sys
for name in {BLOCKED!r}:
    sys.modules[name] = None  # importing it fails
sys.path.insert(0, {str(BENCHMARKS)!r})
import bench_gpu
from openbook.models import packing
from pretended import gpu

packing.GPU_BATCH_TOKENS = 1 << 12  # a batch has always as many rows, most of them filling here
gc.freeze()
code = bench_gpu.main(["--tiny", "--out", sys.argv[1]])
gc.freeze()
with gpu():
    sys.exit(code + bench_gpu.main(["--tiny", "--device", "cuda", "--out", sys.argv[2]]))
"""


def test_every_part_runs_and_every_check_passes_without_what_a_gpu_machine_lacks(tmp_path: Path) -> None:
    """On the CPU, then on a pretended GPU, where nothing may be left on the CPU."""
    pages = [tmp_path / "made/cpu.md", tmp_path / "gpu.md"]
    done = subprocess.run([sys.executable, "-c", BARE, *pages], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summaries = [json.loads(line)["parts"] for line in done.stdout.splitlines() if line.startswith("{")]
    for page, parts in zip(pages, summaries, strict=True):
        written = page.read_text()
        assert list(parts) == ["answers", "losses", "decoding", "steps", "embeddings", "building", "throughput"]
        for name, part in parts.items():
            assert part["passed"], name
            assert part["rows"], name
            assert not part["left_out"], name
            assert all(check["what"].replace("|", "\\|") in written for check in part["checks"])


def test_what_fails_in_one_part_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(part: Any) -> None:
        raise RuntimeError("no such kernel")

    def wrong(part: Any) -> None:
        part.check("a number", math.nan, 1.0, "for no reason")

    def hungry(part: Any) -> None:
        def run() -> None:
            raise torch.OutOfMemoryError

        part.check("measured", part.measured(run) is not None, 0, "there is no memory")

    def late(part: Any) -> None:
        part.budget_s = 0.0
        part.check("had time", part.has_time_for("the rest"), 0, "there is none")

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_gpu

    parts = {"broken": broken, "wrong": wrong, "idle": lambda part: None, "hungry": hungry, "late": late}
    monkeypatch.setattr(bench_gpu, "PARTS", {name: (f"The {name} one", 0.0) for name in parts})
    for name, run in parts.items():
        monkeypatch.setitem(sys.modules, f"gpu.{name}", SimpleNamespace(run=run))
    assert bench_gpu.main(["--tiny", "--out", str(tmp_path / "gpu.md")]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1])["parts"]
    assert {name: part["passed"] for name, part in told.items()} == {
        "broken": False,
        "wrong": False,
        "idle": False,  # a part that checks nothing has not passed
        "hungry": True,
        "late": True,
    }
    page = (tmp_path / "gpu.md").read_text()
    assert "RuntimeError: no such kernel" in page
    assert "| a number | nan | 1 | **no** |" in page
    assert "Left out, for the time was up: the rest." in page


def test_all_that_is_done_to_shards_on_a_gpu_can_be_done_to_shards_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "bench_gpu_index.py", "--tiny", "--device", "cpu", "--only", "Flat"]
    files = ["--folder", tmp_path / "snapshots", "--out", tmp_path / "made/page.md"]
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    written = (tmp_path / "made/page.md").read_text()
    assert told["passed"]
    assert [row[0] for row in told["rows"]] == ["`Flat`", "`IVF16,SQ8`"]
    assert all(f"- ok: {what}" in written for what, _ in told["checks"])
