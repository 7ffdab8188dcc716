"""Training loss and its gradients beside transformers' RAG classes: CPU time, and memory beyond model and gradients.

    python benchmarks/bench_loss.py [--questions 8] [--passages 10] [--target 25] [--real 180] [--padded 300]

Each runs in its own process, with the same random weights and one thread. transformers pads contexts to the greatest
length, as its retriever does. The losses must be equal, and the gradients of one matrix. A table, and one JSON line.
"""

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from rag_side_by_side import THEIRS, Batch, build, compare, rag
from torch import Tensor

from openbook.core.types import Formulation
from openbook.models.marginal import log_likelihood
from openbook.models.seq2seq import Seq2Seq

OURS = {"openbook": True, "openbook, keeping all": False}
"""Whether the encoder runs again in the backward pass."""


def measure(args: argparse.Namespace, formulation: Formulation, whose: str) -> dict[str, Any]:
    """One loss with its gradients."""
    model, batch = build(args), Batch.random(args)
    scores = batch.scores.requires_grad_()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # part of training, not of the loss
    loss_of = contestant(whose, model, batch, formulation)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    loss = loss_of()
    loss.backward()
    return {
        "cpu_s": time.process_time() - started,
        "peak_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "loss": loss.item(),
        "gradients": [scores.grad.norm().item(), model.model.encoder.layers[0].fc1.weight.grad.norm().item()],
    }


def contestant(whose: str, model: Any, batch: Batch, formulation: Formulation) -> Callable[[], Tensor]:
    """Computes () -log p(y|x), summed over the batch."""
    if whose != THEIRS:
        reader = Seq2Seq(model, keep_mode=True, recompute=OURS[whose])
        inputs = batch.ids, batch.mask, batch.scores, batch.labels
        return lambda: -log_likelihood(reader, *inputs, formulation).sum()
    oracle = rag(model, formulation, batch.scores.shape[1])
    named = {"context_input_ids": batch.ids, "context_attention_mask": batch.mask, "doc_scores": batch.scores}
    return lambda: oracle(**named, labels=batch.labels_with_start, reduce_loss=True).loss


if __name__ == "__main__":
    compare(__doc__, "loss", list(OURS), measure, {"loss": 1e-4, "gradients": 1e-4})
