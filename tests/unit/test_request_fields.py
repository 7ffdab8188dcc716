"""What can be asked for is one list, in whatever language: settings, protobuf, JSON, Python client, command line. What
is told is another.
"""

import inspect
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import pytest

from openbook import wire
from openbook.cli import ask
from openbook.client import AnswerOptions, RetrieveOptions
from openbook.core.origin import Origin
from openbook.core.types import (
    Citation,
    Coverage,
    GenerationSettings,
    Passage,
    ReplySettings,
    RetrievalSettings,
    Token,
)
from openbook.rag.answer import Alternative, Answer, Evidence, Excerpt, Label, Retrieval
from openbook.reaching import TLS
from openbook.serving.endpoint.schemas import (
    AlternativeOut,
    AnswerRequest,
    AnswerResponse,
    CitationOut,
    CoverageOut,
    EvidenceOut,
    ExcerptOut,
    LabelOut,
    OriginOut,
    PassageOut,
    PassageRequest,
    RetrieveRequest,
    RetrieveResponse,
    TokenOut,
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
        (inspect.signature(ask).parameters, ANSWER | {"context", "server", *TLS}),
    ],
    ids=["RetrieveRequest proto", "AnswerRequest proto", "retrieve JSON", "answer JSON", "retrieve", "answer", "ask"],
)
def test_what_can_be_asked_for_is_the_same_everywhere(found: dict[str, object], expected: set[str]) -> None:
    assert set(found) == expected


@pytest.mark.parametrize("option", wire.ENUMS)
def test_an_option_with_names_for_values_has_the_same_everywhere(option: str) -> None:
    of_python, of_protobuf = wire.ENUMS[option]
    of_client = [name for kind in get_args(get_type_hints(AnswerOptions)[option]) for name in get_args(kind)]
    assert of_client == list(of_python)
    assert of_protobuf.keys() == [f"{option}_{name}".upper() for name in ("unspecified", *of_python)]


def names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of_python", "of_protobuf", "of_json"),
    [
        (names(Origin), common_pb2.Origin, OriginOut),
        (names(Passage) | {"lasting_id"}, common_pb2.Passage, PassageOut),
        (names(Excerpt), answer_pb2.Excerpt, ExcerptOut),
        ({"id", "around", "snapshot_id", "timeout_s", "request_id"}, answer_pb2.PassageRequest, PassageRequest),
        (names(Answer) ^ {"text", "answer"}, answer_pb2.AnswerResponse, AnswerResponse),
        (names(Alternative) ^ {"text", "answer"}, answer_pb2.Alternative, AlternativeOut),
        (names(Retrieval), answer_pb2.RetrieveResponse, RetrieveResponse),
        (names(Evidence), answer_pb2.Evidence, EvidenceOut),
        (names(Coverage), answer_pb2.Coverage, CoverageOut),
        (names(Label), answer_pb2.Label, LabelOut),
        (names(Token), answer_pb2.Token, TokenOut),
        (names(Citation), answer_pb2.Citation, CitationOut),
    ],
    ids=lambda kind: kind.__name__ if isinstance(kind, type) else "",
)
def test_what_is_told_is_the_same_everywhere(of_python: set[str], of_protobuf: Any, of_json: Any) -> None:
    assert set(of_protobuf.DESCRIPTOR.fields_by_name) == set(of_json.model_fields) == of_python
