"""A batch that was answered, as records: what each is worth, and how long it took."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from openbook.config import section
from openbook.core.types import Formulation, Generation, Passage, Retrieved
from openbook.evaluation import run
from openbook.evaluation.kilt import WithPages
from openbook.evaluation.settings import EvaluationSettings


class Alike:
    """Answers every question in the same words."""

    settings = section(EvaluationSettings, "test", questions=["q.jsonl"], out="out", snapshot="snapshot")

    async def answer(
        self, questions: Sequence[WithPages], found: Sequence[Retrieved], formulation: Formulation
    ) -> list[Generation]:
        return [Generation("Ann", (7,), -0.1, np.zeros(3), np.zeros(3), ended=True)] * len(questions)


def test_a_page_counts_once_and_a_question_takes_its_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "perf_counter", iter((10.0, 13.0)).__next__)
    questions = [WithPages(f"q{i}", "who?", ("Ann",), provenance=(frozenset("ab"),)) for i in range(2)]
    passages = tuple(Passage(i, page, "", "text") for i, page in enumerate("aab"))
    found = Retrieved(passages, np.zeros(3, np.float32), "s")
    answered = asyncio.run(run.answer(Alike(), "f", questions, [found] * 2, Formulation.SEQUENCE))
    assert [(each.record.em, each.record.page_rank, each.record.r_precision) for each in answered] == [
        (True, 1, 1.0)
    ] * 2
    assert [each.seconds for each in answered] == [1.5] * 2
