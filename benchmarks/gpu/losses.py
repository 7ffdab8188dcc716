"""Loss and gradients beside the CPU's and beside transformers': the contestants of bench_loss.py."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from bench_loss import OURS, contestant
from rag_side_by_side import THEIRS, Batch

from gpu.part import GRADIENT_LIMITS, LIMITS, OUT_OF_MEMORY, Part, off
from openbook.core.types import Formulation

[DEFAULT] = [whose for whose, recomputes in OURS.items() if recomputes]


def run(part: Part) -> None:
    """The CPU gets one question alone, which takes it seconds."""
    part.columns = ("formulation", "dtype", "whose", "s", "GB", "loss", "loss off by", "gradients off by")
    batch, one = Batch.random(part.sizes), Batch.random(replace(part.sizes, questions=1))
    on_cpu = copy.deepcopy(part.generator)
    for formulation in Formulation:
        wanted: list[float] = []
        for dtype in LIMITS:
            model = copy.deepcopy(part.generator).to(part.device, getattr(torch, dtype))
            if dtype == "float32" and part.has_time_for(f"{formulation} on the CPU"):
                there, here = values(DEFAULT, on_cpu, one, formulation)(), values(DEFAULT, model, one, formulation)()
                check(part, f"{formulation}, {dtype}, ours on the GPU beside the CPU's", dtype, here, there)
            for whose in (THEIRS, *OURS):
                if not part.has_time_for(f"{formulation}, {dtype}, {whose}"):
                    continue
                found = part.measured(values(whose, model, batch, formulation))
                if found is None:
                    part.row(formulation, dtype, whose, None, None, OUT_OF_MEMORY, None, None)
                    continue
                if (whose, dtype) == (THEIRS, "float32"):
                    wanted = found.result
                differences = off(found.result[:1], wanted[:1]), off(found.result[1:], wanted[1:])
                part.row(formulation, dtype, whose, found.seconds, found.peak_gb, found.result[0], *differences)
                if whose != THEIRS:
                    what = f"{formulation}, {dtype}, {whose} beside transformers' float32"
                    check(part, what, dtype, found.result, wanted)
            del model


def check(part: Part, what: str, dtype: str, found: list[float], wanted: list[float]) -> None:
    """Loss and norms of gradients."""
    part.check(f"{what}: loss", off(found[:1], wanted[:1]), *LIMITS[dtype])
    part.check(f"{what}: gradients", off(found[1:], wanted[1:]), *GRADIENT_LIMITS[dtype])


def values(whose: str, model: Any, batch: Batch, formulation: Formulation) -> Callable[[], list[float]]:
    """Computes the loss, and the norms of the gradients of the scores and of all parameters."""
    batch = replace(batch, scores=batch.scores.clone()).to(model.device)  # or a copy of a leaf would be none
    batch.scores.requires_grad_()
    loss_of = contestant(whose, model, batch, formulation)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # part of training, not of the loss

    def run() -> list[float]:
        model.zero_grad(set_to_none=False)
        batch.scores.grad = None
        loss = loss_of()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norms = batch.scores.grad.norm(), torch.nn.utils.get_total_norm(gradients)
        return [loss.item(), *(norm.item() for norm in norms)]

    return run
