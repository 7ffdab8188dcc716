"""What users ask stands in no tier's log, whatever goes wrong with it, unless that is asked for."""

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import httpx
import pytest

from openbook.cache.memory import MemoryCache
from openbook.config import EncoderSettings, GeneratorSettings, ServingSettings, parse
from openbook.core.confidence import UNFITTED
from openbook.core.context import Context
from openbook.core.types import Float32, GenerationSettings, Passage, Retrieved
from openbook.errors import InvalidRequest, OpenbookError
from openbook.logs import JsonFormatter
from openbook.rag.pipeline import Pipeline
from openbook.serving.endpoint.http import build_app
from openbook.serving.endpoint.ingress import AnswerIngress
from openbook.serving.endpoint.service import AnswerService
from openbook.serving.workers.encoder import EncoderDeployment
from openbook.serving.workers.generator import GeneratorDeployment
from openbook.testing import EchoGenerator, ExactIndex, HashEncoder
from openbook.v1 import answer_pb2

QUESTION = "does Quetzalcoatl have the flu?"
SECRET = "Quetzalcoatl"
PASSAGES = [Passage(0, "a", "A", "Bell patented the telephone"), Passage(1, "b", "B", "Curie was born in Warsaw")]
SETTINGS = parse({"answer": {"k": 2, "max_question_chars": 40}})
SERVING = ServingSettings()


class Quoting(HashEncoder):
    """Fails with the question in its mouth."""

    def __init__(self, error: Callable[[str], Exception]) -> None:
        super().__init__()
        self._error = error

    def encode_questions(self, questions: Sequence[str]) -> Float32:
        raise self._error(f"cannot read {questions[0]!r}")


class Model(Quoting):
    """Of a replica."""

    generates_by = "quoting"
    calibration = UNFITTED

    def padded_length(self, question: str) -> int:
        return 1

    def encode_questions(self, questions: Sequence[str], *check: Any) -> Float32:
        return super().encode_questions(questions)

    def generate(self, questions: Sequence[str], retrieved: Any, settings: GenerationSettings, check: Any) -> Any:
        if questions[0] == QUESTION:
            raise self._error(f"cannot answer {questions[0]!r}")

    def stream(self, question: str, *asked: Any) -> Iterator[Any]:
        raise self._error(f"cannot answer {question!r}")
        yield


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """All that any logger says, at every level, as JSON with tracebacks."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("test"))
    former = {}
    for logger in (logging.getLogger("openbook"), logging.getLogger()):
        former[logger] = logger.handlers[:], logger.level, logger.propagate
        logger.handlers[:] = [handler]
        logger.setLevel("DEBUG")
    logging.getLogger("openbook").propagate = False
    yield stream
    for logger, (handlers, level, propagate) in former.items():
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def service(encoder: HashEncoder | None = None) -> AnswerService:
    encoder, vectors = encoder or HashEncoder(), HashEncoder().encode_passages(PASSAGES)
    index = ExactIndex(PASSAGES, vectors)
    return AnswerService(
        Pipeline(encoder, index, index, EchoGenerator(), MemoryCache(10), SETTINGS.answer), SETTINGS, nothing
    )


async def nothing() -> None: ...


class GrpcContext:
    """Hears whatever Serve would be told."""

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []

    def trailing_metadata(self) -> list[tuple[str, str]]:
        return []

    def __getattr__(self, name: str) -> Any:
        return lambda *told: None


async def ask(asked: AnswerService, **fields: Any) -> None:
    """In every way there is."""
    body = {"question": QUESTION, **fields}
    ingress, message = AnswerIngress(asked), answer_pb2.AnswerRequest(**body).SerializeToString()
    context: Any = GrpcContext()
    with suppress(OpenbookError):
        await ingress.Answer(message, context)
    with suppress(OpenbookError):
        [event async for event in ingress.AnswerStream(message, context)]
    transport = httpx.ASGITransport(build_app(asked))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path in ("answer", "answer/stream", "retrieve"):
            await client.post(f"/v1/{path}", json=body)
            await client.post(f"/v1/{path}", content=json.dumps(body)[:-3])
            await client.post(f"/v1/{path}", json=[QUESTION])
        await client.post("/v1/answer/batch", json={"requests": [body, {"question": [QUESTION]}]})
        messages = [{"role": "user", "content": body["question"]}]
        for more in ({}, {"stream": True}, {"tools": [QUESTION]}, {"question": QUESTION}, {"labels": QUESTION}):
            await client.post("/v1/chat/completions", json={"model": "openbook", "messages": messages, **more})
        await client.post("/v1/embeddings", json={"model": "openbook", "input": [body["question"]]})
        await client.post("/v1/embeddings", json={"model": QUESTION, "input": [[QUESTION]]})
        for name, arguments in (("search", {"query": body["question"]}), ("answer", body), ("fetch", {"id": QUESTION})):
            call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
            for sent in (call, {**call, "method": QUESTION}, {**call, "params": QUESTION}, {**call, "id": [QUESTION]}):
                await client.post("/mcp", json=sent, headers={"accept": "application/json, text/event-stream"})


@pytest.mark.parametrize("error", [ValueError, InvalidRequest, OpenbookError])
def test_nothing_that_goes_wrong_brings_it_into_the_log(error: type[Exception], logged: io.StringIO) -> None:
    async def main() -> None:
        await ask(service(Quoting(error)) if error is not OpenbookError else service())
        await ask(service(), labels=[f"{SECRET} has", f"{SECRET} has"])
        await ask(service(), question=QUESTION * 3)
        await ask(service(), question=QUESTION, request_id="x" * 200)
        if error is OpenbookError:
            return
        retrieved = Retrieved(tuple(PASSAGES), HashEncoder().encode_passages(PASSAGES)[:, 0], "s")
        model: Any = Model(error)
        encoder = EncoderDeployment(EncoderSettings(), lambda _: model, SERVING)
        generator = GeneratorDeployment(GeneratorSettings(), lambda _: model, SERVING)
        asked = QUESTION, retrieved, GenerationSettings(), Context(request_id="mine")
        results = [await encoder.encode([QUESTION], asked[-1]), await generator.generate(*asked)]
        results += [part async for part in generator.stream(*asked)]
        assert [isinstance(each, OpenbookError) for each in results] == [True] * 3
        assert error is InvalidRequest or {str(each) for each in results} == {"internal error, request id mine"}
        await encoder._encoder.aclose()
        await generator._generator.aclose()

    # The replicas take the log for themselves.
    handlers = logging.getLogger("openbook").handlers[:]
    monkey = pytest.MonkeyPatch()
    for module in ("encoder", "generator"):
        monkey.setattr(f"openbook.serving.workers.{module}.setup_logging", lambda role: None)
    asyncio.run(main())
    monkey.undo()
    assert logging.getLogger("openbook").handlers == handlers
    said = logged.getvalue()
    assert len(said.splitlines()) >= 10
    assert SECRET not in said
    assert "the flu" not in said


def test_it_stands_in_the_line_of_its_request_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, logged: io.StringIO
) -> None:
    monkeypatch.setenv("OPENBOOK_LOG_QUESTIONS", "1")
    asyncio.run(ask(service()))
    lines = [json.loads(line) for line in logged.getvalue().splitlines()]
    served = [line for line in lines if line.get("method")]
    assert {line["method"] for line in served} == {"Answer", "AnswerStream", "Retrieve", "Embed"}
    assert {line["question"] for line in served} == {QUESTION}
    assert all(line["code"] == "OK" and line["seconds"] >= 0 and line["request_id"] for line in served)
    assert all(SECRET in line["message"] for line in served)


def test_the_line_of_a_request_says_what_went_wrong_with_others(logged: io.StringIO) -> None:
    encoder: Any = HashEncoder()

    async def gone(*asked: Any) -> Any:
        raise OpenbookError("the encoder is gone")

    encoder.encode = gone
    asyncio.run(ask(service(encoder)))
    (first, *_) = [json.loads(line) for line in logged.getvalue().splitlines() if "the encoder is gone" in line]
    assert first["code"] == "INTERNAL"
