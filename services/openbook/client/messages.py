"""What is asked and what is answered, between Python and protobuf."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypedDict, TypeVar

import grpc
from google.protobuf.descriptor import FieldDescriptor

from openbook import wire
from openbook.core.types import Citation, Coverage, Decoding, Formulation, OwnPassage, RetrieverKind, Token
from openbook.errors import InvalidRequest, OpenbookError, Overloaded, from_grpc_code
from openbook.rag.answer import Alternative, Answer, Event, Evidence, Excerpt, Label, Retrieval
from openbook.v1 import answer_pb2
from openbook.v1.answer_pb2 import AnswerRequest, PassageRequest, RetrieveRequest

R = TypeVar("R", AnswerRequest, RetrieveRequest)
LISTS = ("without", "labels", "passages")
HOLDS = {
    FieldDescriptor.CPPTYPE_INT64: f"an int of {-(1 << 63)}..{(1 << 63) - 1}",
    FieldDescriptor.CPPTYPE_UINT32: f"an int of 0..{(1 << 32) - 1}",
    FieldDescriptor.CPPTYPE_UINT64: f"an int of 0..{(1 << 64) - 1}",
    FieldDescriptor.CPPTYPE_DOUBLE: f"a float of {-sys.float_info.max}..{sys.float_info.max}",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "text in UTF-8, not bytes of another encoding or half a character",
}
"""What a field is for, in Python's words."""
CODES = {code.value[0]: code.name for code in grpc.StatusCode}


class RetrieveOptions(TypedDict, total=False):
    """What a request may ask for; what is left out, or None, takes the server's default."""

    k: int | None
    min_coverage: float | None
    nprobe: int | None
    ef_search: int | None
    rerank_factor: int | None
    without: Sequence[int] | None
    retriever: RetrieverKind | Literal["dense", "bm25", "hybrid"] | None
    bm25_weight: float | None
    passages: Sequence[OwnPassage | str | Mapping[str, str]] | None
    request_id: str | None


class AnswerOptions(RetrieveOptions, total=False):
    """The fields of AnswerRequest in answer.proto, which says what they mean."""

    formulation: Formulation | Literal["sequence", "token"] | None
    decoding: Decoding | Literal["thorough", "fast"] | None
    n_beams: int | None
    max_new_tokens: int | None
    min_new_tokens: int | None
    length_penalty: float | None
    early_stopping: bool | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    labels: Sequence[str] | None
    n_answers: int | None
    follow: int | None
    tokens: bool | None
    min_probability: float | None
    min_confidence: float | None


def request(kind: type[R], question: str, timeout_s: float, options: Mapping[str, Any]) -> R:
    """The request with the options that have a value.

    Raises:
        InvalidRequest: there is no such option, a value does not fit in its field, a text is none in UTF-8, a name is
            none of its option's, a list is none, or passages are none.
    """
    message = kind()
    for name, value in {"question": question, "timeout_s": timeout_s, **options}.items():
        if name in LISTS and value is not None:
            _check_list(name, value)
        if name in wire.ENUMS and value is not None:
            value = _number(name, value)
        if name == "passages" and value is not None:
            value = _own_passages(value)
        if value is not None:
            _set(message, name, value)
    return message


def _set(message: Any, name: str, value: Any) -> None:
    if (field := message.DESCRIPTOR.fields_by_name.get(name)) is None:
        raise InvalidRequest(f"there is no option {name!r} here")
    try:
        if isinstance(value, bool) and field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
            raise TypeError("protobuf takes it for a number")
        if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL and value not in (True, False):
            raise TypeError("protobuf takes any whole number for one")
        message.MergeFrom(type(message)(**{name: value}))  # unlike setattr it fills repeated fields too
    except (TypeError, ValueError, OverflowError):
        which = f"each of {name}" if name in LISTS else name
        raise InvalidRequest(f"{which} must be {HOLDS[field.cpp_type]}, got {value!r:.100}") from None


def _number(name: str, value: str) -> int:
    """Of an option's value, in protobuf."""
    names, enum = wire.ENUMS[name]
    try:
        number: int = enum.Value(f"{name.upper()}_{names(value).name}")
    except ValueError:
        raise InvalidRequest(f"{name} must be one of {', '.join(names)}, got {value!r}") from None
    return number


def _check_list(name: str, given: object) -> None:
    # Letters and keys are none's meaning, and of a batch only the first question would get what can be read once.
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping | Iterator):
        raise InvalidRequest(f"{name} must be a list, got {given!r:.80}")


def _own_passages(given: Iterable[Any]) -> list[answer_pb2.OwnPassage]:
    """The caller's own, each a value, its fields by name, or a text alone."""
    found = []
    for number, each in enumerate(given):
        fields = asdict(each) if isinstance(each, OwnPassage) else {"text": each} if isinstance(each, str) else each
        try:
            found.append(answer_pb2.OwnPassage(**fields))
        except (TypeError, ValueError):  # other fields, values that are no text, or half a character
            what = "a text, or have the fields text, title and document_id"
            raise InvalidRequest(f"passages[{number}] must be {what}, got {each!r:.80}") from None
    return found


def batch(questions: Sequence[str], timeout_s: float, options: Mapping[str, Any]) -> answer_pb2.AnswerBatchRequest:
    """Of all the questions, under the same options. Raises as `request`."""
    _check_list("questions", questions)
    request_id = options.get("request_id") or ""
    of_each = {**options, "request_id": None}
    requests = [request(AnswerRequest, question, timeout_s, of_each) for question in questions]
    message = answer_pb2.AnswerBatchRequest(requests=requests, timeout_s=timeout_s)
    _set(message, "request_id", request_id)
    return message


def passage_request(passage_id: str | int, around: int, snapshot_id: str, timeout_s: float) -> PassageRequest:
    """Raises InvalidRequest: one of them does not fit in its field."""
    message = PassageRequest(timeout_s=timeout_s)
    for name, value in {"id": str(passage_id), "around": around, "snapshot_id": snapshot_id}.items():
        _set(message, name, value)
    return message


def one_by_one(options: AnswerOptions) -> AnswerOptions:
    """RAG-Token with one beam, whose tokens come as they are decided, unless something else was asked for."""
    return {"formulation": Formulation.TOKEN, "n_beams": 1, **options}


def error(code: str, message: str, retry_after_s: float | None, name: str = "") -> OpenbookError:
    """The one that the server raised."""
    found = from_grpc_code(code, message, name)
    if isinstance(found, Overloaded) and retry_after_s is not None:
        found.retry_after_s = retry_after_s
    return found


def answer(message: answer_pb2.AnswerResponse) -> Answer:
    """As the pipeline gave it."""
    return Answer(
        text=message.answer,
        log_likelihood=message.log_likelihood,
        formulation=Formulation(_name(answer_pb2.Formulation, message.formulation)),
        decoding=Decoding(_name(answer_pb2.Decoding, message.decoding)),
        generator_fingerprint=message.generator_fingerprint,
        labels=tuple(Label(each.text, each.log_likelihood, each.log_probability) for each in message.labels),
        tokens=_tokens(message.tokens),
        citations=_citations(message.citations),
        answers=tuple(
            Alternative(
                each.answer,
                each.log_likelihood,
                tuple(each.log_posterior),
                _tokens(each.tokens),
                _citations(each.citations),
                each.cut,
            )
            for each in message.answers
        ),
        abstained=message.abstained,
        confidence=message.confidence if message.HasField("confidence") else None,
        cut=message.cut,
        **_found(message),
    )


def retrieval(message: answer_pb2.RetrieveResponse) -> Retrieval:
    """As the pipeline gave it."""
    return Retrieval(**_found(message))


def excerpt(message: answer_pb2.Excerpt) -> Excerpt:
    """As the pipeline gave it."""
    passage, before, after = (
        tuple(map(wire.passage_from_wire, each)) for each in ([message.passage], message.before, message.after)
    )
    return Excerpt(passage[0], before, after, message.snapshot_id, message.request_id)


def event(message: answer_pb2.AnswerEvent) -> Event:
    """The part of a stream."""
    match message.WhichOneof("event"):
        case "retrieved":
            return retrieval(message.retrieved)
        case "token":
            return _token(message.token)
        case _:
            return answer(message.answer)


def outcomes(message: answer_pb2.AnswerBatchResponse) -> list[Answer | OpenbookError]:
    """Of a batch, in its order."""
    return [
        answer(each.answer) if each.WhichOneof("result") == "answer" else _batch_error(each.error)
        for each in message.results
    ]


def _batch_error(message: answer_pb2.BatchError) -> OpenbookError:
    code = CODES.get(message.code, "UNKNOWN")
    retry_after_s = message.retry_after_s if message.HasField("retry_after_s") else None
    return error(code, message.message, retry_after_s, message.name)


def _found(message: answer_pb2.AnswerResponse | answer_pb2.RetrieveResponse) -> dict[str, Any]:
    """What an answer and a retrieval have in common."""
    return {
        "evidence": _evidence(message.evidence),
        "snapshot_id": message.snapshot_id,
        "encoder_fingerprint": message.encoder_fingerprint,
        "complete": message.complete,
        "coverage": _coverage(message.coverage),
        "cached": message.cached,
        "request_id": message.request_id,
        "timings": _timings(message.timings),
    }


def _evidence(rows: Iterable[answer_pb2.Evidence]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(wire.passage_from_wire(each.passage), each.score, each.log_prior, each.log_posterior) for each in rows
    )


def _tokens(rows: Iterable[answer_pb2.Token]) -> tuple[Token, ...]:
    return tuple(map(_token, rows))


def _token(message: answer_pb2.Token) -> Token:
    place = (message.start, message.end) if message.HasField("start") else (None, None)
    return Token(message.text, message.log_likelihood, tuple(message.log_posterior), *place)


def _citations(rows: Iterable[answer_pb2.Citation]) -> tuple[Citation, ...]:
    return tuple(Citation(each.start, each.end, each.evidence, each.probability) for each in rows)


def _coverage(message: answer_pb2.Coverage) -> Coverage:
    return Coverage(message.n_searched, message.n_total, tuple(message.missing_shards))


def _timings(rows: Iterable[answer_pb2.Timing]) -> dict[str, float]:
    return {each.stage: each.duration_s for each in rows}


def _name(enum: Any, number: int) -> str:
    name: str = enum.Name(number)
    return name.split("_", 1)[1].lower()
