"""How soon the generator's worker is free once nobody waits for an answer any more: random questions, ended at random.

    python benchmarks/bench_stopping.py [--n 1000] [--seed 0] [--longest 1.5]

The embedded generator behind its batches, as an endpoint has it. Settings are drawn from all that may be asked for,
and again where a server would refuse them for `answer.max_work`. Each question is cancelled or expires at a random
moment of up to `--longest` seconds, and then a question of one token waits. Counted is the time from that moment until
the worker takes the one that waits, beside the longest time between two checks of the question that was stopped: a
decoding step, or a portion of passages. Prints a table, the worst cases, and one JSON line.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice, pairwise
from time import monotonic
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from openbook.config import AnswerDefaults, GeneratorSettings
from openbook.core.confidence import UNFITTED
from openbook.core.context import Context
from openbook.core.deadline import Check, Deadline
from openbook.core.types import (
    Decoding,
    Formulation,
    Generation,
    GenerationSettings,
    Passage,
    Retrieved,
    Token,
)
from openbook.corpus.build import embedded_documents
from openbook.corpus.read import read_passages
from openbook.errors import DeadlineExceeded, InvalidRequest
from openbook.models.generator import RagGenerator
from openbook.serving.workers.generator import LocalGenerator

LIMITS = AnswerDefaults()
QUESTION = "which of them was there first, and where is it told?"
NEXT = GenerationSettings(n_beams=1, max_new_tokens=1)
"""Of the question that waits; no other has them."""
ALLOWED_S = 0.2
N_WORST = 5


@dataclass
class Watched:
    """The generator, which notes when it takes the question that waits, and when any other looks at its check."""

    model: RagGenerator
    fingerprint: str = ""
    generates_by: str = ""
    calibration = UNFITTED
    looked_at: list[float] = field(default_factory=list)
    took_next_at: float = 0.0

    def generate(
        self, questions: Sequence[str], retrieved: Sequence[Retrieved], settings: GenerationSettings, check: Check
    ) -> list[Generation]:
        if settings == NEXT:
            self.took_next_at = monotonic()
            return self.model.generate(questions, retrieved, settings, check)
        with self._noting(check) as noted:
            return self.model.generate(questions, retrieved, settings, noted)

    def stream(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, check: Check
    ) -> Iterator[Token | Generation]:
        with self._noting(check) as noted:
            yield from self.model.stream(question, retrieved, settings, noted)

    @contextmanager
    def _noting(self, check: Check) -> Iterator[Check]:
        def noted() -> None:
            self.looked_at.append(monotonic())
            check()

        self.looked_at.append(monotonic())
        try:
            yield noted
        finally:
            self.looked_at.append(monotonic())


@dataclass(frozen=True)
class Asked:
    """One question, and how it ends."""

    k: int
    settings: GenerationSettings
    streams: bool
    end: str  # cancelled, expired
    after_s: float  # from its beginning

    @property
    def kind(self) -> str:
        """The row of the table it stands in."""
        how = self.settings
        if how.labels:
            return "labels"
        search = "sampled" if how.temperature else "greedy" if how.n_beams == 1 else "beams"
        name = "token" if how.formulation is Formulation.TOKEN else f"sequence {how.decoding}"
        return f"{name}, {search}" + (", stream" if self.streams else "")


@dataclass(frozen=True)
class Stopped:
    """What became of it."""

    asked: Asked
    step_s: float  # the longest time between two checks
    free_s: float  # from its end until the worker took the next question


def draw(dice: random.Random, longest_s: float, words: Sequence[str]) -> Asked:
    """Anything that may be asked for: small numbers and large ones alike often."""

    def between(low: float, high: float) -> float:
        return math.exp(dice.uniform(math.log(low), math.log(high)))

    def up_to(most: int) -> int:
        return int(between(1, most + 0.99))

    n_tokens = up_to(512)
    labels: tuple[str, ...] = ()
    if dice.random() < 0.15:
        n_words = dice.randrange(n_tokens // 4 + 1)
        labels = tuple(" ".join([str(i), *dice.choices(words, k=n_words)]) for i in range(1 + up_to(255)))
    settings = GenerationSettings(
        formulation=dice.choice(list(Formulation)),
        decoding=dice.choice(list(Decoding)),
        n_beams=up_to(32),
        max_new_tokens=n_tokens,
        min_new_tokens=dice.choice([0, dice.randint(0, n_tokens)]),
        early_stopping=dice.random() < 0.5,
        temperature=1.0 if dice.random() < 0.2 else 0.0,
        labels=labels,
    )
    end = dice.choice(["cancelled", "expired"])
    return Asked(up_to(LIMITS.max_k), settings, dice.random() < 0.3, end, between(0.01, longest_s))


def is_permitted(asked: Asked) -> bool:
    """Whether a server would take it."""
    try:
        asked.settings.work(asked.k, LIMITS.max_work)
    except InvalidRequest:
        return False
    return True


async def ask(asked: Asked, generator: LocalGenerator, model: Watched, passages: Sequence[Passage]) -> Stopped | None:
    """The question and its end, and the next one. None where the answer came first, or the model refused it."""
    read = Retrieved(tuple(passages), np.zeros(asked.k, np.float32), "snapshot")
    model.looked_at.clear()
    ends_at = monotonic() + asked.after_s
    context = Context(Deadline(ends_at)) if asked.end == "expired" else Context()

    async def answer() -> None:
        if asked.streams:
            async for _ in generator.stream(QUESTION, read, asked.settings, context):
                pass
        else:
            await generator.generate(QUESTION, read, asked.settings, context)

    task = asyncio.create_task(answer())
    await asyncio.sleep(0)
    done, _ = await asyncio.wait([task], timeout=ends_at - monotonic())
    if done and not isinstance(task.exception(), DeadlineExceeded):
        with suppress(InvalidRequest):  # labels that are alike, or longer than an answer may be
            task.result()
        return None
    if asked.end == "cancelled":
        ends_at = monotonic()
        task.cancel()
    await generator.generate(QUESTION, Retrieved(read.passages[:1], read.scores[:1], ""), NEXT, Context())
    await asyncio.gather(task, return_exceptions=True)
    step_s = max((later - earlier for earlier, later in pairwise(model.looked_at)), default=0.0)  # 0: it never began
    return Stopped(asked, step_s, model.took_next_at - ends_at)


async def run(args: argparse.Namespace) -> tuple[list[Stopped], int, int]:
    """All that were stopped, how many had their answer before, and how many were refused."""
    dice = random.Random(args.seed)
    passages = list(islice(read_passages(embedded_documents()), 2000))
    words = sorted({word for passage in passages[:50] for word in passage.text.lower().split() if word.isalpha()})
    model = Watched(RagGenerator.load(GeneratorSettings()))
    generator = LocalGenerator(model, GeneratorSettings())
    stopped, n_answered, n_refused = [], 0, 0
    for _ in track(range(args.n), "Questions", console=Console(stderr=True)):
        while not is_permitted(asked := draw(dice, args.longest, words)):
            n_refused += 1
        found = await ask(asked, generator, model, dice.sample(passages, asked.k))
        n_answered += found is None
        stopped += [found] if found else []
    await generator.aclose()
    return stopped, n_answered, n_refused


def main() -> None:
    """Ask, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1000, help="questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=1.5, help="seconds, before which a question ends")
    args = parser.parse_args()
    torch.set_num_threads(1)
    stopped, n_answered, n_refused = asyncio.run(run(args))
    _report(stopped, n_answered, n_refused, args)


def _report(stopped: Sequence[Stopped], n_answered: int, n_refused: int, args: argparse.Namespace) -> None:
    console = Console()
    table = Table("question", "stopped", "longest step s", "most", "free after s", "most", "beyond a step, most")
    rows = []
    for kind in [*sorted({each.asked.kind for each in stopped}), "all"]:
        of_kind = [each for each in stopped if kind in (each.asked.kind, "all")]
        step, free = (np.array([getattr(each, name) for each in of_kind]) for name in ("step_s", "free_s"))
        figures = [np.median(step), step.max(), np.median(free), free.max(), (free - step).max()]
        rows.append({"question": kind, "n": len(of_kind), "s": [round(float(figure), 4) for figure in figures]})
        table.add_row(kind, str(len(of_kind)), *(f"{figure:.3f}" for figure in figures))
    console.print(table)
    late = [each for each in stopped if each.free_s > each.step_s + ALLOWED_S]
    for each in late + sorted(stopped, key=lambda each: each.free_s, reverse=True)[:N_WORST]:
        console.print(f"free after {each.free_s:.2f} s, longest step {each.step_s:.2f} s: {_told(each.asked)}")
    console.print(f"{len(late)} of {len(stopped)} later than a step and {ALLOWED_S} s; {n_answered} answered before")
    summary = {
        "benchmark": "stopping",
        "settings": vars(args),
        "n_stopped": len(stopped),
        "n_answered": n_answered,
        "n_refused": n_refused,
        "n_late": len(late),
        "rows": rows,
        "machine": platform.processor() or platform.machine(),
    }
    print(json.dumps(summary))


def _told(asked: Asked) -> str:
    how, usual = asdict(asked.settings), asdict(GenerationSettings())
    how["labels"] = len(asked.settings.labels)
    said: dict[str, Any] = {name: value for name, value in how.items() if value not in (usual[name], 0)}
    return f"k {asked.k}, {'stream, ' if asked.streams else ''}{said}, {asked.end} after {asked.after_s:.2f} s"


if __name__ == "__main__":
    main()
