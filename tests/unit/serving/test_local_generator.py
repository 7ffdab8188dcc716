"""What the generator's queue knows of how long questions take."""

import asyncio
import re
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from openbook.config import GeneratorSettings
from openbook.core.confidence import UNFITTED
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Formulation, GenerationSettings, PartSettings, Passage, Retrieved
from openbook.errors import DeadlineExceeded
from openbook.serving.workers import generator as workers
from openbook.serving.workers.generator import GeneratorModel, LocalGenerator, _Task
from openbook.serving.workers.pace import N_KEYS
from openbook.testing import ManualClock

RETRIEVED = Retrieved((Passage(0, "a", "A", "text"),), np.zeros(1, np.float32), "snapshot")
USUAL = GenerationSettings(formulation=Formulation.TOKEN, n_beams=1, max_new_tokens=128)
UNASKED = cast(GeneratorModel, SimpleNamespace(fingerprint="unasked", generates_by="unasked", calibration=UNFITTED))
"""A model that nothing comes to."""


def part(n_begun: int, first: int = 0) -> PartSettings:
    begun = tuple(range(first, first + n_begun))
    return PartSettings(**asdict(replace(USUAL, min_new_tokens=100)), begun=begun, n_more=4, begun_by=str(first))


def task(settings: GenerationSettings) -> _Task:
    return _Task("question", RETRIEVED, settings)


def test_a_part_of_an_answer_is_the_work_of_its_tokens() -> None:
    for n_begun, n_tokens in ((0, 4), (60, 64), (126, 128)):
        assert task(part(n_begun)).work == task(replace(USUAL, max_new_tokens=n_tokens)).work


@pytest.mark.parametrize(("seconds", "told"), [(0.0, r"; questions at once: 1 in .* s, .*"), (60.0, "")])
def test_a_warm_up_tells_what_it_has_measured(
    seconds: float, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    monkeypatch.setattr(workers, "monotonic", clock)
    monkeypatch.setattr(LocalGenerator, "_generate", lambda *_: clock.advance(seconds))
    caplog.set_level("INFO")
    generator = LocalGenerator(UNASKED, GeneratorSettings())
    generator.warm_up()
    asyncio.run(generator.aclose())
    assert re.fullmatch(rf"generator: warmed up in {seconds} s{told}", caplog.messages[-1])


@pytest.mark.parametrize("others", ["parts", "seeds", "labels"])
def test_settings_of_one_question_alone_make_no_others_forgotten(others: str) -> None:
    async def scenario() -> None:
        generator = LocalGenerator(UNASKED, GeneratorSettings())
        generator._batcher.learn([task(USUAL)], 4.0)
        for n in range(N_KEYS):
            settings = {
                "parts": part(4, first=n),
                "seeds": replace(USUAL, temperature=1.0, seed=n),
                "labels": replace(USUAL, labels=(f"this {n}", f"that {n}")),
            }[others]
            generator._batcher.learn([task(settings)], 1.0)
        for known, seconds in ((USUAL, 4.0), (settings, 1.0)):
            context = Context(Deadline.after(0.1, ManualClock()))
            with pytest.raises(DeadlineExceeded, match=f"it takes some {seconds} s"):
                await generator.generate("question", RETRIEVED, known, context)
        await generator.aclose()

    asyncio.run(scenario())
