"""The embedded generator behind its batches: a question that nobody waits for any more frees it within a step."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from openbook.config import AnswerDefaults, GeneratorSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Formulation, Generation, GenerationSettings, Passage, Retrieved
from openbook.errors import DeadlineExceeded
from openbook.models.generator import RagGenerator
from openbook.serving.workers.generator import LocalGenerator
from openbook.testing import ManualClock

QUESTION = "where was Marie Curie born?"
CURIE = Passage(0, "curie", "Marie Curie", "Marie Curie was born in Warsaw in 1867 and moved to Paris when she was 24.")
DEFAULTS = AnswerDefaults()


def retrieved(k: int) -> Retrieved:
    return Retrieved(tuple(replace(CURIE, id=i) for i in range(k)), np.zeros(k, np.float32), "snapshot")


AT = 2  # forward passes, after which nobody waits any more


class Steps:
    """The forward passes of a decoder, counted; after the one of number AT something may happen."""

    def __init__(self) -> None:
        self.n = 0
        self.then: Callable[[], None] = lambda: None

    def __call__(self, *_: object) -> None:
        self.n += 1
        if self.n == AT:
            self.then()


@pytest.fixture(scope="module")
def model() -> RagGenerator:
    return RagGenerator.load(GeneratorSettings())


@contextmanager
def counted(model: RagGenerator) -> Iterator[Steps]:
    counting = Steps()
    hook = model._model._twin.register_forward_hook(counting)
    yield counting
    hook.remove()


@pytest.fixture
def steps(model: RagGenerator) -> Iterator[Steps]:
    with counted(model) as counting:
        yield counting


@pytest.fixture(scope="module")
def before(model: RagGenerator) -> tuple[Generation, int]:
    """The answer of a generator that nobody left, and its forward passes."""
    with counted(model) as counting:
        [answer] = model.generate([QUESTION], [retrieved(DEFAULTS.k)], DEFAULTS.generation())
    return answer, counting.n


# Each of more than AT forward passes: it is these that count, not their width.
EXPENSIVE = {
    "thorough": (20, DEFAULTS.generation()),
    "fast, many tokens": (5, GenerationSettings(n_beams=32, max_new_tokens=128, min_new_tokens=128)),
    "token": (20, GenerationSettings(formulation=Formulation.TOKEN, n_beams=8, max_new_tokens=64, min_new_tokens=64)),
    "labels": (20, GenerationSettings(labels=tuple(f"in Paris, {year}" for year in range(1860, 1900)))),
}


@pytest.mark.parametrize("how", EXPENSIVE)
@pytest.mark.parametrize("end", ["late", "gone", "closed"])
def test_the_generator_is_free_within_a_step(
    end: str, how: str, model: RagGenerator, before: tuple[Generation, int], steps: Steps
) -> None:
    k, settings = EXPENSIVE[how]
    assert settings.work(k, DEFAULTS.max_work)  # a server permits it
    clock = ManualClock()

    async def main() -> Generation:
        generator = LocalGenerator(model, GeneratorSettings())
        asked = (QUESTION, retrieved(k), settings, Context(Deadline.after(60, clock)))
        task = asyncio.ensure_future(anext(generator.stream(*asked)) if end == "closed" else generator.generate(*asked))
        loop, has_gone = asyncio.get_running_loop(), threading.Event()
        task.add_done_callback(lambda _: has_gone.set())

        def go_away() -> None:
            loop.call_soon_threadsafe(task.cancel)
            has_gone.wait()

        steps.then = (lambda: clock.advance(60)) if end == "late" else go_away
        with pytest.raises(DeadlineExceeded if end == "late" else asyncio.CancelledError):
            await task
        default = await generator.generate(QUESTION, retrieved(DEFAULTS.k), DEFAULTS.generation(), Context())
        await generator.aclose()
        return default

    default = asyncio.run(main())
    answer, n_steps = before
    assert steps.n == AT + n_steps
    assert (default.text, default.log_likelihood) == ("Warsaw", answer.log_likelihood)
