"""What an experiment keeps of an answer: in memory, and in a folder beside its page, from which it goes on."""

from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from openbook.evaluation.record import Record
from openbook.evaluation.run import Answered
from openbook.evaluation.score import answering

ANSWERS = "answers.jsonl"


class Apart(BaseModel):
    """An answer by its passages and tokens. Everything of passages is (k,), or (t, k)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    titles: tuple[str, ...]  # of a passage without one, its first words
    hold_answer: tuple[bool, ...]
    prior: tuple[float, ...]  # p(z|x)
    posterior: tuple[float, ...]  # p(z|x,y)
    tokens: tuple[str, ...]  # (t,)
    by_token: tuple[tuple[float, ...], ...]  # (t, k) p(z|x,y_<=t)


class Kept(BaseModel):
    """An answer, what it is worth, and how long it took; where the experiment looks into it, taken apart."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    record: Record
    seconds: float
    apart: Apart | None = None

    @classmethod
    def of(cls, answered: Answered, apart: bool) -> "Kept":
        return cls(record=answered.record, seconds=answered.seconds, apart=_apart(answered) if apart else None)


def _apart(answered: Answered) -> Apart:
    generation = answered.generation
    read = answered.found.passages[: len(generation.log_prior)]
    return Apart(
        titles=tuple(each.title or each.text[:40] for each in read),
        hold_answer=tuple(map(answering(answered.question), (each.text for each in read))),
        prior=tuple(np.exp(generation.log_prior).tolist()),
        posterior=tuple(np.exp(generation.log_posterior).tolist()),
        tokens=tuple(each.text for each in generation.tokens),
        by_token=tuple(tuple(np.exp(each.log_posterior).tolist()) for each in generation.tokens),
    )


def folder_of(page: Path) -> Path:
    """Where the answers are until the page is written."""
    return page.with_name(f"{page.name}.answers")
