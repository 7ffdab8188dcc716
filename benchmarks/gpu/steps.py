"""A training step beside transformers': the contestants of bench_train.py."""

import copy
import math
from typing import Any

from bench_train import HALF, OURS, TWICE, Parts, Step, ours, theirs
from rag_side_by_side import THEIRS, dpr

from gpu.part import GRADIENT_LIMITS, LIMITS, OUT_OF_MEMORY, Part, off
from openbook.core.types import Formulation

LOSS_LIMITS = LIMITS | {"float32": (1e-4, "Adam makes whole steps of gradients that are rounding")}
CONTESTANTS = [THEIRS, OURS, OURS + TWICE, THEIRS + HALF, OURS + HALF]


def run(part: Part) -> None:
    """All from the same weights; memory is all of it: weights, gradients, moments, activations."""
    part.columns = ("formulation", "whose", "s", "GB", "loss", "losses off by", "gradients off by")
    encoder = dpr(part.sizes.d_model, part.sizes.layers)
    for formulation in Formulation:
        wanted: list[tuple[float, float]] = []
        for whose in CONTESTANTS:
            if not part.has_time_for(f"{formulation}, {whose}"):
                continue
            found = part.measured(Steps(part, formulation, whose, encoder), part.sizes.steps - 1, slow_s=math.inf)
            if found is None:
                part.row(formulation, whose, None, None, OUT_OF_MEMORY, None, None)
                continue
            if whose == THEIRS:
                wanted = found.result
            losses, norms = (off([step[i] for step in found.result], [step[i] for step in wanted]) for i in (0, 1))
            part.row(formulation, whose, found.seconds, found.peak_gb, found.result[0][0], losses, norms)
            if not whose.startswith(THEIRS):
                dtype = "bfloat16" if whose.endswith(HALF) else "float32"
                what = f"{formulation}, {whose} beside transformers' float32, {part.sizes.steps} steps"
                part.check(f"{what}: losses", losses, *LOSS_LIMITS[dtype])
                part.check(f"{what}: gradients", norms, *GRADIENT_LIMITS[dtype])


class Steps:
    """Takes one step after the other; models and optimiser are made for the first, so that their memory counts."""

    def __init__(self, part: Part, formulation: Formulation, whose: str, encoder: Any) -> None:
        self._part, self._formulation, self._whose, self._encoder = part, formulation, whose, encoder
        self._step: Step | None = None
        self._taken: list[tuple[float, float]] = []

    def __call__(self) -> list[tuple[float, float]]:
        """The loss and the norm of the gradients of every step so far."""
        self._step = self._step or self._first()
        self._taken.append(self._step())
        return self._taken

    def _first(self) -> Step:
        models = (copy.deepcopy(model).to(self._part.device) for model in (self._encoder, self._part.generator))
        parts = Parts.random(self._part.sizes, self._formulation, self._whose.endswith(HALF), *models)
        return theirs(parts) if self._whose.startswith(THEIRS) else ours(parts, recompute=TWICE in self._whose)
