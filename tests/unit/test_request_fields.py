"""What can be asked for is one list, in whatever language: settings, protobuf, JSON, Python client, command line."""

import inspect
from dataclasses import fields

import pytest

from openbook.cli import ask
from openbook.client import AnswerOptions, RetrieveOptions
from openbook.core.types import GenerationSettings, ReplySettings, RetrievalSettings
from openbook.serving.endpoint.schemas import AnswerRequest, RetrieveRequest
from openbook.v1 import answer_pb2

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
