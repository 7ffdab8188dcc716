"""What end-to-end training is good for: the paper's Table 6 on SQuAD, at a size for two cores.

    python benchmarks/bench_ablations.py SNAPSHOT DATA OUT [--steps 60] [--seeds 2] [--k 4]

Every row trains the same reader for the same steps on SQuAD's train questions, and answers the same dev questions,
which are about other articles; the passages of both, among many others, are in SNAPSHOT (the embedded corpus). DATA
holds squad-train.jsonl.gz and squad-dev.jsonl.gz. Runs that are done are not run again.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from openbook.core.metrics import bootstrap_interval
from openbook.training.rag import RagJob
from openbook.training.run import Run
from openbook.training.settings import TrainingSettings
from openbook.training.validation import NAMES

ROWS: dict[str, dict[str, Any]] = {
    "no retrieval": {"retrieval": {"kind": "none", "k": 1}},
    "BM25": {"retrieval": {"kind": "bm25"}},
    "dense, frozen": {"models": {"train_query_encoder": False}},
    "dense, end to end": {},
}
SHOWN = {"log_likelihood": "log p(y|x)", "exact_match": "EM", "f1": "F1", "has_answer": "recall"}


def settings(row: str, seed: int, k: int, out: Path, **sizes: Any) -> TrainingSettings:
    """Of one run."""
    snapshot, data, reader, n_steps, n_dev = (sizes[name] for name in ("snapshot", "data", "reader", "steps", "dev"))
    own = ROWS[row]
    retrieval = {"kind": "dense", "k": k, "snapshot": snapshot, **own.get("retrieval", {})}
    if retrieval["kind"] == "none":
        del retrieval["snapshot"]
    return TrainingSettings.model_validate(
        {
            "task": {
                "train": [{"path": data / "squad-train.jsonl.gz"}],
                "validation": [{"path": data / "squad-dev.jsonl.gz"}],
                "max_answers": 1,
                "max_target_tokens": 24,
            },
            "retrieval": retrieval,
            "models": {"generator": reader, "dropout": False, **own.get("models", {})},
            "optimizer": {
                "learning_rate": 5e-5,
                "learning_rates": {"query_encoder.*": 2e-5},
                "warmup_steps": n_steps // 10,
            },
            "loop": {
                "out": out,
                "n_steps": n_steps,
                "batch_size": 16,
                "micro_batch_size": 8,
                "dtype": "bfloat16",
                "gradient_checkpointing": False,
                "seed": seed,
                "validate_every": n_steps,
                "checkpoint_every": max(1, n_steps // 4),
                "n_validation": n_dev,
            },
        }
    )


def measured(row: str, seed: int, k: int, out: Path, **sizes: Any) -> dict[str, Any]:
    """Per question, before and after training: (n, 6) in the order of NAMES."""
    folder = out / f"{row.replace(' ', '-').replace(',', '')}-k{k}-seed{seed}"
    result = folder / "questions.json"
    if not result.exists():
        run = Run(settings(row, seed, k, folder, **sizes))
        job = run.job
        assert isinstance(job, RagJob)
        assert job.validation is not None
        validation, job.validation = job.validation, None  # measured here, question by question, and not twice
        try:
            before = validation.measured().tolist() if seed == 0 and row != "dense, end to end" else []
            run.train()
            result.write_text(json.dumps({"before": before, "after": validation.measured().tolist()}))
        finally:
            run.close()
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def lines(results: dict[str, list[np.ndarray]]) -> Iterator[list[str]]:
    """Means over questions and seeds with their 95 % intervals: over questions, whose seeds are averaged first."""
    for row, runs in results.items():
        means = np.mean(runs, 0)  # (n, 6)
        cells = []
        for name in SHOWN:
            values = means[:, NAMES.index(name)]
            low, high = bootstrap_interval(values)
            scale = 1 if name == "log_likelihood" else 100
            cells.append(f"{scale * values.mean():.2f} ({scale * low:.2f} to {scale * high:.2f})")
        yield [row, str(len(runs)), *cells]


def main(
    snapshot: Path,
    data: Path,
    out: Path,
    steps: int = 60,
    seeds: int = 2,
    k: Annotated[list[int] | None, typer.Option()] = None,
    dev: int = 400,
    reader: str = "embedded",
) -> None:
    """Train and measure every row, then print the table."""
    sizes = {"snapshot": snapshot, "data": data, "reader": reader, "steps": steps, "dev": dev}
    results: dict[str, list[np.ndarray]] = {}
    for seed in range(seeds):
        for n_passages in k or [4]:
            for row in ROWS:
                found = measured(row, seed, n_passages, out, **sizes)
                if found["before"]:
                    results.setdefault(f"{row}, k={n_passages}, before training", []).append(np.array(found["before"]))
                results.setdefault(f"{row}, k={n_passages}", []).append(np.array(found["after"]))
    table = Table("retriever", "seeds", *SHOWN.values())
    for line in lines(results):
        table.add_row(*line)
    Console(width=150).print(table)
    print(json.dumps({row: np.mean(runs, (0, 1)).tolist() for row, runs in results.items()}))


if __name__ == "__main__":
    typer.run(main)
