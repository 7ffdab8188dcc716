"""Training loss and its gradients beside transformers' RAG classes: CPU time, and memory beyond model and gradients.

    python benchmarks/bench_loss.py [--questions 8] [--passages 10] [--target 25] [--real 180] [--padded 300]

Each runs in its own process, with the same random weights and one thread. transformers pads contexts to the greatest
length, as its retriever does. The losses must be equal, and the gradients of one matrix. A table, and one JSON line.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
import transformers
from bench_decode import EOS, PAD, build, rag
from rich.console import Console
from rich.progress import track
from rich.table import Table

from openbook.core.types import Formulation
from openbook.models.marginal import log_likelihood
from openbook.models.seq2seq import Seq2Seq

OURS = {"openbook": True, "openbook, keeping all": False}
"""Whether the encoder runs again in the backward pass."""


def main() -> None:
    """Run both formulations with both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"questions": 8, "passages": 10, "target": 25, "real": 180, "padded": 300}
    for name, default in {**defaults, "d-model": 512, "layers": 6, "vocabulary": 50265}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)  # formulation and whose: what one process does
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only:
        print(json.dumps(measure(args, Formulation(args.only[0]), args.only[1])))
        return
    cases = [(formulation, whose) for formulation in Formulation for whose in ("transformers", *OURS)]
    found = {case: _in_a_process(*case) for case in track(cases, "Cases", console=Console(stderr=True))}
    _report(found, args)


def measure(args: argparse.Namespace, formulation: Formulation, whose: str) -> dict[str, Any]:
    """One loss with its gradients."""
    model, (n, k, t) = build(args), (args.questions, args.passages, args.target)
    random = torch.Generator().manual_seed(0)
    real = (torch.arange(args.padded) < args.real).long().repeat(n * k, 1)
    ids = torch.randint(5, args.vocabulary, (n * k, args.padded), generator=random).masked_fill(real == 0, PAD)
    scores = torch.randn(n, k, generator=random).requires_grad_()
    labels = torch.cat([torch.randint(5, args.vocabulary, (n, t - 1), generator=random), torch.full((n, 1), EOS)], 1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # part of training, not of the loss
    oracle = rag(model, formulation, k)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    if whose in OURS:
        reader = Seq2Seq(model, keep_mode=True, recompute=OURS[whose])
        loss = -log_likelihood(reader, ids, real, scores, labels, formulation).sum()
    else:
        shown = torch.cat([torch.full((n, 1), EOS), labels], 1)
        inputs = {"context_input_ids": ids, "context_attention_mask": real, "doc_scores": scores}
        loss = oracle(**inputs, labels=shown, reduce_loss=True).loss
    loss.backward()
    return {
        "cpu_s": time.process_time() - started,
        "peak_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "loss": loss.item(),
        "gradients": [scores.grad.norm().item(), model.model.encoder.layers[0].fc1.weight.grad.norm().item()],
    }


def _in_a_process(formulation: Formulation, whose: str) -> dict[str, Any]:
    arguments = [sys.executable, *sys.argv, "--only", formulation, whose]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _report(found: dict[tuple[Formulation, str], dict[str, Any]], args: argparse.Namespace) -> None:
    table = Table("formulation", "whose", "CPU s", "part", "MB", "part")
    for (formulation, whose), result in found.items():
        theirs = found[formulation, "transformers"]
        for name in ("loss", "gradients"):
            np.testing.assert_allclose(result[name], theirs[name], rtol=1e-4)
        figures = [(result[name], result[name] / theirs[name]) for name in ("cpu_s", "peak_mb")]
        table.add_row(formulation, whose, *(f"{figure:.2f}" for pair in figures for figure in pair))
    Console().print(table)
    summary = {
        "benchmark": "loss",
        "settings": vars(args),
        "cases": [{"formulation": f, "whose": whose, **result} for (f, whose), result in found.items()],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
