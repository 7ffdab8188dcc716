"""Whatever is sent, over HTTP as OpenAPI describes it and over gRPC at random: every reply is a documented one, none an
internal error.

OPENBOOK_HOSTILE=N sends N cases to each operation, and 50 N messages to each method; by default what takes seconds.
"""

import asyncio
import os
import random
from typing import Any

import grpc
import pytest
import schemathesis
from described import DESCRIBED
from google.protobuf.message import Message
from hypothesis import HealthCheck, settings
from small_endpoint import QUESTION, FastGenerator, service

from openbook.serving.endpoint.http import build_app
from openbook.serving.endpoint.ingress import AnswerIngress
from openbook.v1 import answer_pb2

N = int(os.environ.get("OPENBOOK_HOSTILE", "12"))
api = schemathesis.openapi.from_asgi("/openapi.json", build_app(service(generator=FastGenerator())))


# MCP's own library refuses what is no JSON-RPC, in plain text: tests/unit/serving/test_any_json.py has it.
@api.exclude(path="/mcp").parametrize()
@settings(max_examples=N, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_reply_over_http_is_a_described_one(case: Any) -> None:
    case.call_and_validate(checks=DESCRIBED)


# --- random messages over gRPC

REFUSALS = {"OK", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "NOT_FOUND", "FAILED_PRECONDITION"}
METHODS = {
    "Answer": answer_pb2.AnswerRequest,
    "AnswerStream": answer_pb2.AnswerRequest,
    "Retrieve": answer_pb2.RetrieveRequest,
    "AnswerBatch": answer_pb2.AnswerBatchRequest,
    "GetPassage": answer_pb2.PassageRequest,
}
NUMBERS = (0, 1, 2, 3, 7, 100, 2**31 - 1, 2**32 - 1, 2**63 - 1)
FLOATS = (0.0, 0.5, 1.0, -1.0, 30.0, 1e-300, 1e300, float("inf"), float("nan"))
TEXTS = ("", QUESTION, "\0", "\u202e", "x" * 3000, "Zürich 苏黎世", "<script>", "0", "\N{COMBINING ACUTE ACCENT}" * 9)


class Call:
    """What Serve hands to a method."""

    def __init__(self) -> None:
        self.code = "OK"

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code.name

    def trailing_metadata(self) -> list[tuple[str, str]]:
        return []

    def __getattr__(self, name: str) -> Any:
        return lambda *told: None


def fill(message: Message, chance: random.Random, depth: int = 0) -> None:
    for each in message.DESCRIPTOR.fields:
        if chance.random() < 0.7:
            continue
        for _ in range(chance.randrange(4) if each.is_repeated else 1):
            if each.message_type:
                inner = getattr(message, each.name)
                fill(inner.add() if each.is_repeated else inner, chance, depth + 1)
                continue
            if each.cpp_type == each.CPPTYPE_STRING:
                value: Any = chance.choice(TEXTS)
            elif each.cpp_type in (each.CPPTYPE_DOUBLE, each.CPPTYPE_FLOAT):
                value = chance.choice(FLOATS)
            elif each.cpp_type == each.CPPTYPE_BOOL:
                value = chance.random() < 0.5
            elif each.cpp_type == each.CPPTYPE_ENUM:
                value = chance.randrange(5)
            else:
                largest = {each.CPPTYPE_UINT32: 2**32, each.CPPTYPE_INT32: 2**31}.get(each.cpp_type, 2**63)
                value = min(chance.choice(NUMBERS), largest - 1)
            if each.is_repeated:
                getattr(message, each.name).append(value)
            else:
                setattr(message, each.name, value)


def message(kind: type[Message], chance: random.Random) -> bytes:
    """One with random fields; every tenth damaged, or no message at all."""
    made = kind()
    fill(made, chance)
    if made.DESCRIPTOR.fields_by_name.get("question") and chance.random() < 0.6:
        made.question = QUESTION  # type: ignore[attr-defined]
    data = bytearray(made.SerializeToString())
    if chance.random() < 0.1:
        data[chance.randrange(len(data) + 1) :] = chance.randbytes(chance.randrange(20))
    return bytes(data)


@pytest.mark.parametrize("method", METHODS)
def test_every_message_over_grpc_ends_with_a_documented_code(method: str) -> None:
    chance, codes = random.Random(method), dict[str, int]()

    async def ask(ingress: AnswerIngress, data: bytes) -> str:
        call: Any = Call()
        if method == "AnswerStream":
            try:
                async for _ in ingress.AnswerStream(data, call):
                    pass
            except Exception:
                assert call.code != "OK"
        else:
            await getattr(ingress, method)(data, call)
        found: str = call.code
        return found

    async def main() -> None:
        ingress = AnswerIngress(service())
        for _ in range(50 * N):
            data = message(METHODS[method], chance)
            code = await ask(ingress, data)
            assert code in REFUSALS, data.hex()
            codes[code] = codes.get(code, 0) + 1

    asyncio.run(main())
    assert {"OK", "INVALID_ARGUMENT"} <= set(codes), codes
