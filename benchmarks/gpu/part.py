"""What the parts share: sizes, a clock that waits for the GPU, memory, checks, and a table for the page."""

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch

T = TypeVar("T")
Cell = str | int | float | None

OUT_OF_MEMORY = "out of memory"
SLOW_S = 2.0
"""A run that takes so long is not repeated."""

LIMITS = {
    "float32": (1e-5, "a hundred times what a CPU's float32 is off float64; TF32 rounds to 0.05 % and would be more"),
    "bfloat16": (5e-3, "ten times what a CPU's bfloat16 is off float64: states and weights are rounded to 0.4 %"),
}
"""By how much log p(y|x) in a dtype may be off float32's of another device or implementation, relatively, and why. A
loss of BART-large's shape on a CPU was 1e-7 off float64's in float32, and 4e-4 in bfloat16."""

GRADIENT_LIMITS = {
    "float32": (1e-3, "five times what a CPU's float32 is off float64"),
    "bfloat16": (0.1, "ten times what a CPU's bfloat16 is off float64"),
}
"""The same for norms of gradients; on the CPU they were 2e-4 and 1e-2 off."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything. `rag_side_by_side` builds models and batches of it, by these names."""

    d_model: int = 1024  # BART-large: 12 + 12 layers
    layers: int = 12
    vocabulary: int = 50265
    questions: int = 8
    passages: int = 10
    target: int = 25
    real: int = 180  # tokens of a context, of which all have `padded`
    padded: int = 300
    new_tokens: int = 16
    decoded_passages: tuple[int, ...] = (5, 10, 50)
    batches: tuple[int, ...] = (1, 4, 16, 64, 256)
    asked: int = 144  # random questions to openbook and transformers: every combination of settings once
    steps: int = 3
    encoded: int = 1024  # passages of at most `words` of `different` words
    built: int = 250_000  # and as a build does, in steps of so many
    step: int = 1 << 14
    words: int = 100
    different: int = 30_000
    dpr: tuple[int, int] = (768, 12)  # width and layers
    minilm: tuple[int, int] = (384, 6)
    repeats: int = 2


TINY = Sizes(
    d_model=64,
    layers=1,
    vocabulary=300,
    questions=2,
    passages=3,
    target=5,
    real=12,
    padded=16,
    new_tokens=4,
    decoded_passages=(3,),
    batches=(1, 3),
    asked=4,
    steps=2,
    encoded=40,
    built=60,
    step=16,
    words=10,
    different=50,
    dpr=(24, 2),
    minilm=(12, 1),
    repeats=1,
)


@dataclass(frozen=True, slots=True)
class Check:
    """Something that must be no greater than a limit."""

    what: str
    found: float
    at_most: float
    why: str  # this limit

    @property
    def passed(self) -> bool:
        """Not a number is no pass."""
        return self.found <= self.at_most


@dataclass(frozen=True, slots=True)
class Measured(Generic[T]):
    """A run, and what it took."""

    result: T
    seconds: float
    peak_gb: float | None  # allocated at once beyond what was there before; None where torch does not count


@dataclass
class Part:
    """One part as it goes: under a time budget, and with what it has found so far."""

    name: str
    does: str
    budget_s: float
    sizes: Sizes
    device: torch.device
    generator: Any  # a BART of the sizes, on the CPU in float32; to be copied
    columns: Sequence[str] = ()
    rows: list[Sequence[Cell]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0
    _begun: float = field(default_factory=time.monotonic)

    @property
    def passed(self) -> bool:
        """It ran to its end, it checked something, and every check passed."""
        return self.error is None and bool(self.checks) and all(check.passed for check in self.checks)

    def has_time_for(self, what: str) -> bool:
        """Whether the budget is not spent; else `what` counts as left out."""
        if time.monotonic() - self._begun < self.budget_s:
            return True
        self.left_out.append(what)
        return False

    def check(self, what: str, found: float, at_most: float, why: str) -> None:
        """That `found` is at most so much."""
        self.checks.append(Check(what, float(found), at_most, why))

    def row(self, *cells: Cell) -> None:
        """One more, and on the terminal too: a run that is cut off has shown what it saw."""
        self.rows.append(cells)
        named = zip(self.columns, map(shown, cells), strict=True)
        print(f"  {', '.join(f'{name} {cell}' for name, cell in named)}", flush=True)

    def measured(self, run: Callable[[], T], repeats: int = 0, slow_s: float = SLOW_S) -> Measured[T] | None:
        """What a first run gives, and the least time of some more, or its own if it is slow. None: out of memory."""
        counted = self.device.type == "cuda"
        before = 0
        if counted:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        try:
            seconds, result = self._timed(run)  # also loads and chooses kernels
            if seconds < slow_s:
                seconds = min(self._timed(run)[0] for _ in range(repeats or self.sizes.repeats))
        except torch.OutOfMemoryError:
            return None
        peak_gb = (torch.cuda.max_memory_allocated(self.device) - before) / 1e9 if counted else None
        return Measured(result, seconds, peak_gb)

    def _timed(self, run: Callable[[], T]) -> tuple[float, T]:
        self._wait()
        begun = time.perf_counter()
        result = run()
        self._wait()
        return time.perf_counter() - begun, result

    def _wait(self) -> None:
        """A GPU works on after the call that asked it to."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def off(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference; not a number where a number is missing or none."""
    if len(found) != len(wanted) or not found:
        return math.nan
    return float(np.max(np.abs(np.asarray(found) - wanted) / np.maximum(np.abs(wanted), 1e-30)))


def shown(cell: Cell) -> str:
    """As the tables have it."""
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return "" if cell is None else str(cell)
