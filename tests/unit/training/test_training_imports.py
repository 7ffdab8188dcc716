"""A run needs torch and transformers, and no cluster, index server or plotting library: it runs on any GPU machine."""

import subprocess
import sys
from pathlib import Path

import tiny_training as tiny

BLOCKED = ["ray", "faiss", "grpc", "google.protobuf", "redis", "fastapi", "bm25s", "tenacity"]
BLOCKED += ["matplotlib", "tensorboardX"]

ONE_RUN = f"""
import sys
for name in {BLOCKED!r}:
    sys.modules[name] = None  # importing it fails
import openbook.training.batches, openbook.training.checkpoints, openbook.training.data, openbook.training.loop
import openbook.training.loss, openbook.training.rag, openbook.training.retrieval, openbook.training.validation
from openbook.training.run import Run, train
from openbook.training.settings import TrainingSettings

settings = TrainingSettings.model_validate_json(sys.argv[1])
run = Run(settings)
report = next(run.loop.run())
print(report.step, report.gradient_norm > 0, run.job.validate()["prior_entropy"] > 0)
run.close()
print((train(settings) / "config.json").exists())
"""


def test_a_run_needs_neither_ray_nor_faiss_nor_grpc_nor_matplotlib(tmp_path: Path) -> None:
    encoder, generator = tiny.models(tmp_path)
    questions = [{"path": str(tiny.questions(tmp_path))}]
    asked = tiny.settings(
        task={"train": questions, "validation": questions},
        retrieval={"snapshot": str(tiny.snapshot(tmp_path))},
        models={"query_encoder": encoder, "generator": generator},
        loop={"out": str(tmp_path / "out")},
    )
    code = [sys.executable, "-c", ONE_RUN, asked.model_dump_json()]
    done = subprocess.run(code, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("1 True True\nTrue\n", 0), done.stderr
