"""What end-to-end training is good for: the paper's Table 6, at a size for two cores.

    python benchmarks/bench_ablations.py DATA OUT [--reader DIR] [--steps 60] [--seed 0 --seed 1] [--k 4]

DATA is what deploy/default-model/prepare.py wrote, with squad-dev.jsonl.gz and an index of its documents as `snapshot`.
The query encoder begins as the passage encoder. Every row trains the same reader for the same steps on the same
questions of SQuAD and EntityQuestions, and answers the same dev questions, which are about other articles. What is done
is not run again.
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
COMPARED = ("dense, end to end", "dense, frozen", "no retrieval")
TRAIN = ("squad-passages", "entityquestions-train-passages")
DEV = ("squad-dev", "entityquestions-dev-passages")
SHOWN = {"log_likelihood": "log p(y|x)", "exact_match": "EM", "f1": "F1", "has_answer": "recall"}


Results = dict[str, dict[int, np.ndarray]]
"""Of each title and seed, per question: (n, 6) in the order of NAMES."""


def passages(row: str, k: int) -> int:
    """How many each question gets."""
    return int(ROWS[row].get("retrieval", {}).get("k", k))


def title(row: str, k: int) -> str:
    """Of a row of the table."""
    return f"{row}, k={passages(row, k)}"


def settings(row: str, seed: int, k: int, out: Path, **sizes: Any) -> TrainingSettings:
    """Of one run."""
    data, reader, n_steps, n_dev = (sizes[name] for name in ("data", "reader", "steps", "dev"))
    own = ROWS[row]
    retrieval = {"kind": "dense", "k": k, "snapshot": data / "snapshot", **own.get("retrieval", {})}
    if retrieval["kind"] == "none":
        del retrieval["snapshot"]
    return TrainingSettings.model_validate(
        {
            "task": {
                "train": [{"path": data / f"{name}.jsonl.gz"} for name in TRAIN],
                "validation": [{"path": data / f"{name}.jsonl.gz"} for name in DEV],
                "max_answers": 1,
            },
            "retrieval": retrieval,
            "models": {
                "query_encoder": str(data / "encoder"),
                "generator": reader,
                "dropout": False,
                **own.get("models", {}),
            },
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
                "seed": seed,
                "validate_every": n_steps,
                "checkpoint_every": max(1, n_steps // 4),
                "n_validation": n_dev,
            },
        }
    )


def measured(row: str, seed: int, k: int, out: Path, **sizes: Any) -> dict[str, Any]:
    """Per question, before and after training: (n, 6) in the order of NAMES."""
    folder = out / f"{row.replace(' ', '-').replace(',', '')}-k{passages(row, k)}-seed{seed}"
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


def lines(results: Results, rows: slice) -> Iterator[list[str]]:
    """Means over questions and seeds with their 95 % intervals: over questions, whose seeds are averaged first."""
    for name, runs in results.items():
        means = np.mean(list(runs.values()), 0)[rows]  # (n, 6)
        cells = []
        for number in SHOWN:
            values = means[:, NAMES.index(number)] * (1 if number == "log_likelihood" else 100)
            low, high = bootstrap_interval(values)
            cells.append(f"{values.mean():.2f} ({low:.2f} to {high:.2f})")
        yield [name, str(len(runs)), *cells]


def gain(results: Results, better: str, worse: str, rows: slice) -> str:
    """How much one is ahead of another on the same questions: a paired comparison."""
    seeds = sorted(results[better].keys() & results[worse].keys())
    pairs = [results[better][seed] - results[worse][seed] for seed in seeds]
    differences = np.mean(pairs, 0)[rows]
    cells = []
    for number, shown in SHOWN.items():
        values = differences[:, NAMES.index(number)] * (1 if number == "log_likelihood" else 100)
        low, high = bootstrap_interval(values)
        cells.append(f"{shown} {values.mean():+.2f} ({low:+.2f} to {high:+.2f})")
    return f"{better} over {worse}: {', '.join(cells)}"


def main(
    data: Path,
    out: Path,
    seed: Annotated[list[int] | None, typer.Option(help="Several, for several runs of each row.")] = None,
    k: Annotated[list[int] | None, typer.Option()] = None,
    steps: int = 60,
    dev: int = 300,
    reader: str = "embedded",
) -> None:
    """Train and measure every row, then print a table for each file of dev questions."""
    sizes = {"data": data, "reader": reader, "steps": steps, "dev": dev}
    results: Results = {}
    for number in seed or [0]:
        for n_passages in k or [4]:
            for row in ROWS:
                found = measured(row, number, n_passages, out, **sizes)
                name = title(row, n_passages)
                if found["before"]:
                    results.setdefault(f"{name}, before training", {})[number] = np.array(found["before"])
                results.setdefault(name, {})[number] = np.array(found["after"])
    n_each = dev // len(DEV)
    parts = [(name, slice(i * n_each, (i + 1) * n_each)) for i, name in enumerate(DEV)]
    for name, rows in parts:
        table = Table("retriever", "runs", *SHOWN.values(), title=f"{name}, {n_each} questions, {steps} steps")
        for line in lines(results, rows):
            table.add_row(*line)
        Console(width=160).print(table)
    for name, rows in (*parts, ("all", slice(None))):
        for n_passages in k or [4]:
            trained, frozen, alone = (title(row, n_passages) for row in COMPARED)
            print(f"{name}: {gain(results, trained, frozen, rows)}")
            print(f"{name}: {gain(results, frozen, alone, rows)}")
    print(json.dumps({row: np.mean(list(runs.values()), (0, 1)).tolist() for row, runs in results.items()}))


if __name__ == "__main__":
    typer.run(main)
