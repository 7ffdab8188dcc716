"""The encoder's queue, asked for several texts at once."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from openbook.cache.memory import MemoryCache
from openbook.config import AnswerDefaults, EncoderSettings
from openbook.core.context import Context
from openbook.core.deadline import Check, Deadline, go_on
from openbook.core.types import Float32, Passage
from openbook.errors import DeadlineExceeded, InvalidRequest, Overloaded
from openbook.rag.pipeline import Pipeline
from openbook.serving.workers.encoder import LocalEncoder
from openbook.serving.workers.pace import N_KEYS
from openbook.testing import EchoGenerator, ExactIndex, HashEncoder, ManualClock

CONTEXT = Context()


class Held(HashEncoder):
    """Computes when the test lets it, and reads one word."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[str]] = []
        self.begun, self.go = threading.Event(), threading.Event()

    def padded_length(self, question: str) -> int:
        if " " in question:
            raise InvalidRequest(f"question must be one word, got {question!r}")
        return 0

    def encode_questions(self, questions: Sequence[str], check: Check = go_on) -> Float32:
        self.batches.append(list(questions))
        self.begun.set()
        self.go.wait()
        return super().encode_questions(questions, check)


@pytest.mark.parametrize("through", ["the encoder", "the pipeline"])
def test_where_one_text_cannot_be_read_the_others_leave_the_queue(through: str) -> None:
    model = Held()

    async def scenario() -> None:
        encoder = LocalEncoder(model, EncoderSettings())
        busy = asyncio.create_task(encoder.encode(["busy"], CONTEXT))
        await asyncio.to_thread(model.begun.wait)
        encode = encoder.encode if through == "the encoder" else pipeline(encoder).embed
        with pytest.raises(InvalidRequest, match="got 'too long'"):
            await encode(["these", "two", "too long"], CONTEXT)
        while ending := [task for task in asyncio.all_tasks() if task.cancelling()]:
            await asyncio.wait(ending)
        model.go.set()
        await busy
        await encoder.encode(["last"], CONTEXT)
        await encoder.aclose()

    asyncio.run(scenario())
    assert model.batches == [["busy"], ["last"]]


def test_as_many_wait_and_are_computed_at_once_as_the_settings_say() -> None:
    model = Held()

    async def scenario() -> None:
        encoder = LocalEncoder(model, EncoderSettings(max_batch=2, max_queue=3))
        busy = asyncio.create_task(encoder.encode(["busy"], CONTEXT))
        await asyncio.to_thread(model.begun.wait)
        waiting = asyncio.create_task(encoder.encode(["one", "two", "three"], CONTEXT))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await encoder.encode(["four"], CONTEXT)
        model.go.set()
        await asyncio.gather(busy, waiting)
        assert (await encoder.encode([], CONTEXT)).shape == (0, model.dimension)
        await encoder.aclose()

    asyncio.run(scenario())
    assert [len(batch) for batch in model.batches] == [1, 2, 1]


def test_passages_of_ones_own_make_no_question_forgotten() -> None:
    async def scenario() -> None:
        encoder = LocalEncoder(HashEncoder(), EncoderSettings())
        encoder._batcher.learn(["question"], 4.0)
        await encoder.encode_own([Passage(n, str(n), "", f"text {n}") for n in range(N_KEYS)], CONTEXT)
        with pytest.raises(DeadlineExceeded, match=r"it takes some 4\.0 s"):
            await encoder.encode(["question"], Context(Deadline.after(0.1, ManualClock())))
        await encoder.aclose()

    asyncio.run(scenario())


def pipeline(encoder: LocalEncoder) -> Pipeline:
    """One that is asked for queries alone."""
    passages = [Passage(0, "a", "A", "text")]
    index = ExactIndex(passages, HashEncoder().encode_passages(passages))
    return Pipeline(encoder, index, index, EchoGenerator(), MemoryCache(10), AnswerDefaults())
