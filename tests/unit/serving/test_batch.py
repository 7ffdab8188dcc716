"""Many questions in one call: each gets its own answer or its own error, over both protocols alike."""

import asyncio
import math
import tracemalloc
from typing import Any

import pytest
from small_endpoint import QUESTION, SETTINGS, request, service
from test_service import GrpcContext

from openbook.core.context import MAX_CHARS, Context
from openbook.core.types import Generation, GenerationSettings, Retrieved
from openbook.errors import InvalidRequest
from openbook.serving.endpoint.ingress import AnswerIngress
from openbook.serving.endpoint.service import AnswerService
from openbook.telemetry import requests
from openbook.testing import EchoGenerator
from openbook.v1 import answer_pb2

ANSWER = "Bell patented the telephone in 1876"


def post(under_test: AnswerService | None = None, **body: Any) -> Any:
    return request("POST", "/v1/answer/batch", under_test, json=body)


def call(batch: answer_pb2.AnswerBatchRequest, under_test: AnswerService | None = None) -> Any:
    """The response, or the details of what went wrong."""
    context = GrpcContext()
    ingress = AnswerIngress(under_test or service())
    response = asyncio.run(ingress.AnswerBatch(batch.SerializeToString(), context))
    return context.details if context.code else response


def test_each_entry_has_its_answer_or_its_own_error_in_order() -> None:
    entries: list[Any] = [
        {"question": QUESTION, "request_id": "first"},
        {"question": "who?", "k": 0},
        {"question": "where was Curie born?", "k": 1, "max_new_tokens": 2},
        {"question": 5},
    ]
    body = post(requests=entries, request_id="mine").json()
    first, second, third, fourth = body["results"]
    assert body["request_id"] == "mine"
    assert (first["answer"]["answer"], first["answer"]["request_id"], first["error"]) == (ANSWER, "first", None)
    assert (third["answer"]["answer"], third["answer"]["request_id"]) == ("Curie was", "mine.2")
    assert (second["answer"], second["error"]["status"], second["error"]["request_id"]) == (None, 400, "mine.1")
    assert second["error"]["detail"].startswith("k must be")
    assert fourth["error"]["detail"] == "question: Input should be a valid string, got 5"

    wire = [answer_pb2.AnswerRequest(**entry) for entry in entries[:3]]
    wire.append(answer_pb2.AnswerRequest(question="who?", formulation=99))  # type: ignore[arg-type]
    response = call(answer_pb2.AnswerBatchRequest(requests=wire, request_id="mine"))
    assert [each.WhichOneof("result") for each in response.results] == ["answer", "error", "answer", "error"]
    assert [each.answer.request_id for each in response.results] == ["first", "", "mine.2", ""]
    error = response.results[1].error
    assert (error.code, error.request_id, error.message) == (3, "mine.1", second["error"]["detail"])
    assert error.name == "InvalidRequest"
    assert "formulation must be one of" in response.results[3].error.message


def test_entries_of_a_batch_whose_id_is_as_long_as_may_be_have_theirs() -> None:
    results = post(requests=[{"question": QUESTION}] * 2, request_id="x" * MAX_CHARS).json()["results"]
    ids = [each["answer"]["request_id"] for each in results]
    assert [each[-9:] for each in ids] == ["xxxxxxx.0", "xxxxxxx.1"]
    assert max(map(len, ids)) <= MAX_CHARS


@pytest.mark.parametrize("n", [0, 5])
def test_a_batch_of_another_size_than_there_may_be_is_refused_by_name(n: int) -> None:
    message = f"requests must be 1..4 (serving.max_entries), got {n}"
    refused = post(requests=[{"question": QUESTION}] * n)
    assert (refused.status_code, refused.json()["detail"]) == (400, message)
    assert call(answer_pb2.AnswerBatchRequest(requests=[answer_pb2.AnswerRequest(question=QUESTION)] * n)) == message


# Fields of messages: of a batch a request without any, and one that is unknown; of a request.
REQUEST, NUMBER, PASSAGE, LABEL = b"\x0a\x00", b"\x78\x00", b"\xda\x02\x03\x0a\x01x", b"\x9a\x02\x01x"


LABELS = "labels must be 1..256 different texts, none empty, got 10000: ['x', 'x', 'x', 'x', 'x'] ..."


def packed_without(n: int) -> bytes:
    return answer_pb2.AnswerRequest(without=[0] * n).SerializeToString()


@pytest.mark.parametrize(
    ("method", "each", "n", "message"),
    [
        ("AnswerBatch", REQUEST, 10_000, "requests must be 1..4 (serving.max_entries), got 10000"),
        ("AnswerBatch", REQUEST, 2_000_000, "body must have at most 16384 fields, got more"),
        ("AnswerBatch", NUMBER, 2_000_000, "body must have at most 16384 fields, got more"),
        ("Answer", PASSAGE, 10_000, "passages must be at most 20, got 10000"),
        ("Retrieve", PASSAGE, 10_000, "passages must be at most 20, got 10000"),
        ("Answer", LABEL, 10_000, LABELS),
        ("Answer", packed_without(2_000_000), 1, "without must be at most 100, got 2000000"),
        ("Answer", PASSAGE, 600_000, "body must have at most 16384 fields, got more"),
    ],
)
def test_how_many_there_are_is_looked_at_before_any_is_made(method: str, each: bytes, n: int, message: str) -> None:
    ingress, context, data = AnswerIngress(service()), GrpcContext(), each * n
    tracemalloc.start()
    try:
        asyncio.run(getattr(ingress, method)(data, context))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert context.details == message
    assert peak < 1_000_000


def test_of_too_many_passages_in_an_entry_none_is_looked_at() -> None:
    entry = answer_pb2.AnswerRequest(question=QUESTION, passages=[answer_pb2.OwnPassage()] * 21)
    error = call(answer_pb2.AnswerBatchRequest(requests=[entry])).results[0].error
    assert error.message == "passages must be at most 20, got 21"


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.nan])
def test_a_batch_needs_time(timeout_s: float) -> None:
    if not math.isnan(timeout_s):  # which JSON has not
        assert post(requests=[{"question": QUESTION}], timeout_s=timeout_s).status_code == 400
    batch = answer_pb2.AnswerBatchRequest(requests=[answer_pb2.AnswerRequest(question=QUESTION)], timeout_s=timeout_s)
    assert call(batch).startswith("timeout_s must be above 0")


def test_all_are_answered_at_once_by_one_deadline_or_their_own_if_that_is_sooner() -> None:
    together = asyncio.Barrier(3)
    left: dict[str, float] = {}

    class Meeting(EchoGenerator):
        async def generate(
            self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
        ) -> Generation:
            left[question] = context.deadline.remaining_s()
            await together.wait()  # for ever, if they came one by one
            return await super().generate(question, retrieved, settings, context)

    entries = [{"question": "a"}, {"question": "b", "timeout_s": 20}, {"question": "c", "timeout_s": 250}]
    results = post(service(generator=Meeting()), requests=entries, timeout_s=100).json()["results"]
    assert all(each["answer"] for each in results)
    assert {question: round(seconds, -1) for question, seconds in left.items()} == {"a": 100, "b": 20, "c": 100}


def test_who_finds_no_place_is_refused_alone() -> None:
    one = SETTINGS.model_copy(update={"serving": SETTINGS.serving.model_copy(update={"max_in_flight": 1})})
    results = post(service(one), requests=[{"question": QUESTION}] * 2).json()["results"]
    assert results[0]["answer"]
    assert results[1]["error"]["code"] == "RESOURCE_EXHAUSTED"
    wire = answer_pb2.AnswerBatchRequest(requests=[answer_pb2.AnswerRequest(question=QUESTION)] * 2)
    assert call(wire, service(one)).results[1].error.retry_after_s == 1


def test_what_breaks_for_one_is_an_error_of_his_alone_and_counted_as_ours() -> None:
    class Broken(EchoGenerator):
        async def generate(
            self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
        ) -> Generation:
            if question == "breaks":
                raise RuntimeError
            return await super().generate(question, retrieved, settings, context)

    before = requests("Answer", "INTERNAL")._value.get()
    asked = [{"question": "breaks"}, {"question": QUESTION}]
    results = post(service(generator=Broken()), requests=asked).json()["results"]
    assert results[0]["error"]["code"] == "INTERNAL"
    assert results[1]["answer"]["answer"] == ANSWER
    assert requests("Answer", "INTERNAL")._value.get() == before + 1


def test_what_is_no_batch_is_refused() -> None:
    for body in ({}, {"requests": 5}, {"requests": [{"question": "x"}], "n": 1}):
        assert post(**body).status_code == 400
    assert post(requests=[5, None, [], {}]).json()["results"][0]["error"]["status"] == 400


def test_the_limit_is_told_whatever_is_counted() -> None:
    with pytest.raises(InvalidRequest, match=r"texts must be 1\.\.4 \(serving.max_entries\), got 9"):
        service().check_entries("texts", 9)
