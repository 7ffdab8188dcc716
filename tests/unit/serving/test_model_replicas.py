"""Callers of a model whose replicas are being replaced by those of another one."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from openbook.cache.memory import MemoryCache
from openbook.config import AnswerDefaults, GeneratorSettings, ServedEncoderSettings, ServingSettings
from openbook.core.confidence import UNFITTED
from openbook.core.context import Context
from openbook.core.deadline import Check, go_on
from openbook.core.types import (
    Float32,
    Formulation,
    Generation,
    GenerationSettings,
    PartSettings,
    Passage,
    RetrievalSettings,
    Retrieved,
    Token,
)
from openbook.errors import ModelUnavailable
from openbook.rag.answer import Answer
from openbook.rag.pipeline import Pipeline
from openbook.rag.ports import BegunByAnother, Maker
from openbook.serving.workers import encoder, generator, replicas
from openbook.serving.workers.encoder import EncoderDeployment, RemoteEncoder
from openbook.serving.workers.generator import GeneratorDeployment, RemoteGenerator
from openbook.telemetry import hop_errors
from openbook.testing import EchoGenerator, ExactIndex, HashEncoder, word_tokens

CONTEXT = Context()
PASSAGES = [Passage(0, "a", "A", "Bell patented the telephone"), Passage(1, "b", "B", "Curie was born in Warsaw")]
ONE_BY_ONE = GenerationSettings(formulation=Formulation.TOKEN, n_beams=1)


class Encoder(HashEncoder):
    """Its vectors are its own: as many times as long as its number says."""

    def __init__(self, number: int, dimension: int = 64, space: str = "") -> None:
        super().__init__(dimension)
        self.number, self.fingerprint, self.space = number, f"encoder-{number}", space or self.space

    def encode_questions(self, questions: Sequence[str], check: Check = go_on) -> Float32:
        return super().encode_questions(questions, check) * np.float32(self.number)


class Generator:
    """Answers with its number."""

    calibration = UNFITTED

    def __init__(self, number: int) -> None:
        self.fingerprint, self.generates_by, self.number = f"reader-{number}", f"generator-{number}", number

    def generate(
        self, questions: Sequence[str], retrieved: Sequence[Retrieved], settings: GenerationSettings, check: Check
    ) -> list[Generation]:
        priors = [each.scores.astype(np.float64) * 0 for each in retrieved]
        text = str(self.number)
        return [Generation(text, (0,), 0.0, prior, prior, word_tokens([text], prior, 0.0)) for prior in priors]

    def stream(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, check: Check
    ) -> Iterator[Token | Generation]:
        (generation,) = self.generate([question], [retrieved], settings, check)
        yield from generation.tokens
        yield generation


class Response:
    """As Serve's, of one replica."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __await__(self) -> Any:
        return self.result.__await__()

    async def __anext__(self) -> Any:
        return await anext(self.result)

    def cancel(self) -> None: ...


class Handle:
    """As Serve's: every call goes to the next replica, those of one that has died fail."""

    def __init__(self, *replicas: Any) -> None:
        self.replicas = list(replicas)
        self.n_calls = 0

    def options(self, stream: bool) -> "Handle":
        return self

    def __getattr__(self, method: str) -> Any:
        class Method:
            @staticmethod
            def remote(*args: Any) -> Response:
                replica = self.replicas[self.n_calls % len(self.replicas)]
                self.n_calls += 1
                return Response(getattr(replica, method)(*args) if replica else died())

        return Method


async def died() -> None:
    raise ActorDiedError


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas take the process for their own; and nobody waits between two questions."""
    for module in (encoder, generator):
        for name in ("setup_logging", "setup_tracing"):
            monkeypatch.setattr(module, name, lambda role: None)
    monkeypatch.setattr(replicas, "ASK_AGAIN_S", 0.0)


def run(scenario: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


def encoder_settings(number: int) -> ServedEncoderSettings:
    return ServedEncoderSettings(model=str(number))


def encoders(*numbers: int, dimension: int = 64, space: str = "") -> list[EncoderDeployment]:
    """A replica each."""

    def load(made: ServedEncoderSettings) -> Encoder:
        return Encoder(int(made.model), dimension, space)

    return [EncoderDeployment(encoder_settings(n), load, ServingSettings()) for n in numbers]


def generator_settings(number: int) -> GeneratorSettings:
    return GeneratorSettings(model=str(number))


def generators(*numbers: int) -> list[GeneratorDeployment]:
    """A replica each."""
    return [
        GeneratorDeployment(generator_settings(n), lambda made: Generator(int(made.model)), ServingSettings())
        for n in numbers
    ]


async def end(deployed: Sequence[Any]) -> None:
    for each in deployed:
        await getattr(each, "_encoder" if isinstance(each, EncoderDeployment) else "_generator").aclose()


def pipeline(
    the_encoder: Any, the_generator: Any, embeddings: MemoryCache[Float32], answers: MemoryCache[Generation]
) -> Pipeline:
    index = ExactIndex(PASSAGES, HashEncoder().encode_passages(PASSAGES))
    return Pipeline(the_encoder, index, index, the_generator, embeddings, AnswerDefaults(), answers=answers)


def lengths(vectors: Float32) -> list[int]:
    return np.linalg.norm(vectors, axis=1).round().astype(int).tolist()  # type: ignore[no-any-return]


def kept(cache: MemoryCache[Any]) -> dict[str, Any]:
    """By whom it says that it was made."""
    return {key.split(":")[0]: value for key, value in cache._entries.items()}


def test_who_starts_waits_for_a_replica_of_his_settings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicas, "ASK_AGAIN_S", 0.0)
    caplog.set_level(logging.INFO, replicas.__name__)

    async def scenario() -> None:
        deployed = [*encoders(1, 1, 2), *generators(1, 1, 2)]
        found = await RemoteEncoder.connect(Handle(*deployed[:2], None, deployed[2]), encoder_settings(2))  # type: ignore[arg-type]
        assert (found.fingerprint, found.space, found.dimension) == ("encoder-2", "hash-64", 64)
        reader = await RemoteGenerator.connect(Handle(*deployed[3:5], None, deployed[5]), generator_settings(2))  # type: ignore[arg-type]
        assert (reader.fingerprint, reader.generates_by, reader.calibration) == ("reader-2", "generator-2", UNFITTED)
        await end(deployed)

    run(scenario)
    assert [each.getMessage().partition(":")[0] for each in caplog.records] == [
        said.format(name)
        for name in ("encoder", "generator")
        for said in ("no replica of the {} with these settings has answered yet", "a replica of the {} has answered")
    ]


def test_replicas_of_another_model_are_passed_by() -> None:
    async def scenario() -> None:
        deployed = [*encoders(1, 2, 2), *generators(2, 1, 2)]
        handles: Any = Handle(*deployed[:3]), Handle(*deployed[3:])
        the_encoder = await RemoteEncoder.connect(handles[0], encoder_settings(1))
        the_generator = await RemoteGenerator.connect(handles[1], generator_settings(1))
        embeddings, answers = MemoryCache[Float32](100), MemoryCache[Generation](100)
        rag = pipeline(the_encoder, the_generator, embeddings, answers)
        for n in range(5):
            question = f"who {n}"
            assert lengths(await the_encoder.encode([question], CONTEXT)) == [1]
            assert lengths(await the_encoder.encode_own(PASSAGES, CONTEXT)) == [1, 1]
            assert (await rag.answer(question, RetrievalSettings(k=2), ONE_BY_ONE, CONTEXT)).text == "1"
            streamed = [part async for part in rag.stream(question, RetrievalSettings(k=2), ONE_BY_ONE, CONTEXT)]
            assert [each.text for each in streamed if isinstance(each, Token | Answer)] == ["1", "1"]
        await rag.aclose()
        assert (kept(embeddings).keys(), kept(answers).keys()) == ({"encoder-1"}, {"generator-1"})
        assert all(lengths(each[None]) == [1] for each in embeddings._entries.values())
        await end(deployed)

    run(scenario)


def test_a_replica_of_our_model_that_is_passed_by_for_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def scenario() -> None:
        deployed = encoders(1, 2)
        handle: Any = Handle(deployed[0])
        the_encoder = await RemoteEncoder.connect(handle, encoder_settings(1))
        handle.replicas, handle.n_calls = [*[deployed[1]] * replicas.N_TRIES, *[deployed[0]] * 2], 0
        before = hop_errors("encoder", "OtherModel")._value.get()
        with monkeypatch.context() as recorded:
            recorded.setattr(replicas, "asyncio", SimpleNamespace(sleep=sleep))
            assert lengths(await the_encoder.encode(["who"], CONTEXT)) == [1]
        assert hop_errors("encoder", "OtherModel")._value.get() == before + replicas.N_TRIES
        await end(deployed)

    run(scenario)
    assert sum(slept) >= replicas.SILENCE_S, "as long as one may be silent"
    assert slept[0] == 0, "to another one it goes at once"


@pytest.mark.parametrize("n_replicas", [1, 2])
def test_a_slow_call_is_made_to_another_replica_where_there_is_one(n_replicas: int) -> None:
    async def scenario() -> None:
        settings = encoder_settings(1).model_copy(update={"n_replicas": n_replicas})
        deployed = EncoderDeployment(settings, lambda made: Encoder(int(made.model)), ServingSettings())
        found = await RemoteEncoder.connect(Handle(deployed), settings)  # type: ignore[arg-type]
        assert (found._replicas._hedges is not None) == (n_replicas > 1)
        await end([deployed])

    run(scenario)


def test_where_there_is_but_one_model_no_call_is_made_twice() -> None:
    async def scenario() -> None:
        deployed = [*encoders(1), *generators(1)]
        handles: Any = Handle(deployed[0]), Handle(deployed[1])
        the_encoder = await RemoteEncoder.connect(handles[0], encoder_settings(1))
        the_generator = await RemoteGenerator.connect(handles[1], generator_settings(1))
        rag = pipeline(the_encoder, the_generator, MemoryCache(1), MemoryCache(1))
        await rag.answer("who", RetrievalSettings(k=2), ONE_BY_ONE, CONTEXT)
        assert [each.n_calls for each in handles] == [2, 2]  # and one to describe it
        await rag.aclose()
        await end(deployed)

    run(scenario)


def test_when_the_former_model_is_gone_the_new_one_is_adopted_and_kept_for_itself() -> None:
    async def scenario() -> None:
        deployed = [*encoders(1, 2), *generators(1, 2)]
        handles: Any = Handle(deployed[0]), Handle(deployed[2])
        the_encoder = await RemoteEncoder.connect(handles[0], encoder_settings(1))
        the_generator = await RemoteGenerator.connect(handles[1], generator_settings(1))
        handles[0].replicas, handles[1].replicas = [deployed[1]], [deployed[3]]
        embeddings, answers = MemoryCache[Float32](100), MemoryCache[Generation](100)
        rag = pipeline(the_encoder, the_generator, embeddings, answers)
        for is_first in (True, False):
            answer = await rag.answer("who", RetrievalSettings(k=2), ONE_BY_ONE, CONTEXT)
            await rag.aclose()
            assert (answer.text, answer.encoder_fingerprint) == ("2", "encoder-2")
            assert the_generator.generates_by == "generator-2"
            assert (not kept(embeddings), not kept(answers)) == (is_first, is_first)
        assert kept(embeddings).keys() == {"encoder-2"}
        assert lengths(kept(embeddings)["encoder-2"][None]) == [2]
        assert kept(answers)["generator-2"].text == "2"
        await end(deployed)

    run(scenario)


def test_a_stream_too_adopts_what_is_there() -> None:
    async def scenario() -> None:
        deployed = generators(1, 2)
        handle: Any = Handle(deployed[0])
        reader = await RemoteGenerator.connect(handle, generator_settings(1))
        handle.replicas = [deployed[1]]
        retrieved = Retrieved(tuple(PASSAGES), np.ones(2, np.float32), "exact")
        made_by, *parts = [part async for part in reader.stream("who", retrieved, ONE_BY_ONE, CONTEXT)]
        assert isinstance(made_by, Maker)
        assert made_by.generates_by == reader.generates_by == "generator-2"
        assert [part.text for part in parts if not isinstance(part, Maker)] == ["2", "2"]
        await end(deployed)

    run(scenario)


def test_a_stream_names_the_model_that_it_is_of_though_another_call_adopts_the_next() -> None:
    async def scenario() -> None:
        deployed = generators(1, 2)
        handle: Any = Handle(deployed[0])
        reader = await RemoteGenerator.connect(handle, generator_settings(1))
        rag = pipeline(HashEncoder(), reader, MemoryCache(1), MemoryCache(1))
        parts = rag.stream("who", RetrievalSettings(k=2), ONE_BY_ONE, CONTEXT)
        while not isinstance(await anext(parts), Token):
            pass
        handle.replicas = [deployed[1]]
        other = await rag.answer("why", RetrievalSettings(k=2), ONE_BY_ONE, CONTEXT)
        assert other.generator_fingerprint == "reader-2"
        (answer,) = [part async for part in parts]
        assert isinstance(answer, Answer)
        assert (answer.text, answer.generator_fingerprint) == ("1", "reader-1")
        await rag.aclose()
        await end(deployed)

    run(scenario)


def test_what_a_model_began_goes_to_no_other() -> None:
    async def scenario() -> None:
        deployed = generators(1, 2)
        handle: Any = Handle(deployed[0])
        reader = await RemoteGenerator.connect(handle, generator_settings(1))
        retrieved = Retrieved(tuple(PASSAGES), np.ones(2, np.float32), "exact")
        first = PartSettings(**asdict(ONE_BY_ONE), begun=(), n_more=1)
        further = replace(first, begun=(0,), begun_by="generator-1")
        assert (await reader.generate("who", retrieved, further, CONTEXT)).text == "1"
        handle.replicas = [deployed[1]]
        for _ in range(2):
            with pytest.raises(BegunByAnother, match="generator-1 began the answer, and generator-2 has come"):
                await reader.generate("who", retrieved, further, CONTEXT)
        assert (await reader.generate("who", retrieved, first, CONTEXT)).text == "2"
        await end(deployed)

    run(scenario)


@pytest.mark.parametrize("other", [{"dimension": 32, "space": "hash-64"}, {"space": "of other passages"}])
def test_an_encoder_of_another_space_takes_no_place(other: dict[str, Any]) -> None:
    async def scenario() -> None:
        deployed = [*encoders(1), *encoders(2, **other)]
        handle: Any = Handle(deployed[0])
        the_encoder = await RemoteEncoder.connect(handle, encoder_settings(1))
        handle.replicas = [deployed[1]]
        with pytest.raises(ModelUnavailable, match="no replica of the encoder has encoder-1 any more, and encoder-2"):
            await the_encoder.encode(["who"], CONTEXT)
        handle.replicas = [deployed[0]]  # the change was taken back
        assert lengths(await the_encoder.encode(["who"], CONTEXT)) == [1]
        await end(deployed)

    run(scenario)


def test_what_another_model_made_is_not_kept_where_the_first_has_come_back_meanwhile() -> None:
    """Else it would be taken for the first's: before and after the call all looks the same."""

    async def scenario() -> None:
        deployed = encoders(1, 2)
        handle: Any = Handle(deployed[0])
        the_encoder = await RemoteEncoder.connect(handle, encoder_settings(1))
        embeddings = MemoryCache[Float32](100)
        rag = pipeline(the_encoder, EchoGenerator(), embeddings, MemoryCache(1))
        begun, go, compute = asyncio.Event(), asyncio.Event(), deployed[1]._encoder.encode

        async def slow(questions: Sequence[str], context: Context) -> Float32:
            begun.set()
            await go.wait()
            return await compute(questions, context)

        deployed[1]._encoder.encode = slow  # type: ignore[method-assign]
        handle.replicas = [deployed[1]]
        asked = asyncio.create_task(rag.embed(["who"], CONTEXT))
        await begun.wait()
        handle.replicas = [deployed[0]]
        assert lengths(await the_encoder.encode(["other"], CONTEXT)) == [1]
        go.set()
        assert lengths(await asked) == [1]
        await rag.aclose()
        assert [lengths(each[None]) for each in kept(embeddings).values()] == [[1]]
        await end(deployed)

    run(scenario)
