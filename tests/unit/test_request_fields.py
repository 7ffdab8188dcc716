"""What can be asked for is one list, in whatever language: settings, protobuf, JSON, Python client, command line."""

import inspect
from dataclasses import fields
from typing import Any

import pytest

from openbook.cli import ask
from openbook.client import AnswerOptions, RetrieveOptions
from openbook.core.origin import Origin
from openbook.core.types import GenerationSettings, Passage, ReplySettings, RetrievalSettings
from openbook.rag.answer import Excerpt
from openbook.serving.endpoint.schemas import (
    AnswerRequest,
    ExcerptOut,
    OriginOut,
    PassageOut,
    PassageRequest,
    RetrieveRequest,
)
from openbook.v1 import answer_pb2, common_pb2

HOW = {"question", "passages", "timeout_s", "request_id"}  # besides settings: what is read, and its context
RETRIEVE = {field.name for field in fields(RetrievalSettings)} | HOW
ANSWER = RETRIEVE | {field.name for kind in (GenerationSettings, ReplySettings) for field in fields(kind)}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (answer_pb2.RetrieveRequest.DESCRIPTOR.fields_by_name, RETRIEVE),
        (answer_pb2.AnswerRequest.DESCRIPTOR.fields_by_name, ANSWER),
        (RetrieveRequest.model_fields, RETRIEVE),
        (AnswerRequest.model_fields, ANSWER),
        (RetrieveOptions.__annotations__, RETRIEVE - {"question", "timeout_s"}),  # the client's own
        (AnswerOptions.__annotations__, ANSWER - {"question", "timeout_s"}),
        (inspect.signature(ask).parameters, ANSWER | {"context", "server", "tls_ca", "tls_cert", "tls_key"}),
    ],
    ids=["RetrieveRequest proto", "AnswerRequest proto", "retrieve JSON", "answer JSON", "retrieve", "answer", "ask"],
)
def test_what_can_be_asked_for_is_the_same_everywhere(found: dict[str, object], expected: set[str]) -> None:
    assert set(found) == expected


def names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of_python", "of_protobuf", "of_json"),
    [
        (names(Origin), common_pb2.Origin, OriginOut),
        (names(Passage) | {"lasting_id"}, common_pb2.Passage, PassageOut),
        (names(Excerpt), answer_pb2.Excerpt, ExcerptOut),
        ({"id", "around", "snapshot_id", "timeout_s", "request_id"}, answer_pb2.PassageRequest, PassageRequest),
    ],
    ids=["Origin", "Passage", "Excerpt", "PassageRequest"],
)
def test_what_is_told_of_a_passage_is_the_same_everywhere(of_python: set[str], of_protobuf: Any, of_json: Any) -> None:
    assert set(of_protobuf.DESCRIPTOR.fields_by_name) == set(of_json.model_fields) == of_python
