"""Requests and answers as protobuf. Requests become the models of `schemas`, which check them as they check JSON."""

from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from openbook import wire
from openbook.core.types import MAX_LABELS, MAX_WITHOUT, Citation, Coverage, Token, check_labels
from openbook.errors import InvalidRequest
from openbook.rag.answer import Answer, Event, Evidence, Excerpt, Retrieval
from openbook.serving.endpoint.schemas import PassageRequest, RetrieveRequest
from openbook.serving.endpoint.sent import parsed
from openbook.v1 import answer_pb2

MAX_FIELDS = 1 << 14
"""Of a message, those inside its fields apart: two bytes of a batch are a request, which once read takes 200."""
R = TypeVar("R", bound=RetrieveRequest)
P = TypeVar("P", bound=Message)


def parse_proto(kind: type[P], data: bytes) -> P:
    """A message from its bytes.

    Raises:
        InvalidRequest: they are no such message, it has more than MAX_FIELDS, or a text in it is not UTF-8.
    """
    if _has_many_fields(data):
        raise InvalidRequest(f"body must have at most {MAX_FIELDS} fields, got more")
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidRequest(f"body must be a {kind.DESCRIPTOR.full_name} with UTF-8 texts, and is not") from None


def request_from_proto(kind: type[R], message: Message, max_passages: int) -> R:
    """Fields that the message leaves out stay open.

    Raises:
        InvalidRequest: an enum has a value of no name here, or there are more passages than so many, or more labels or
            passages to leave out than there may be.
    """
    values = _given(message, question="")
    for name, (_, enum) in wire.ENUMS.items():
        if (number := values.get(name)) is not None:
            known = enum.values()
            if number not in known:
                raise InvalidRequest(f"{name} must be one of {', '.join(enum.keys())}, got {number}")
            values[name] = enum.Name(number).removeprefix(f"{name.upper()}_").lower()
    for name, most in (("passages", max_passages), ("without", MAX_WITHOUT)):
        if len(values.get(name, ())) > most:  # said before any of a million becomes an object
            raise InvalidRequest(f"{name} must be at most {most}, got {len(values[name])}")
    if len(labels := values.get("labels", ())) > MAX_LABELS:
        check_labels(labels)
    if passages := values.get("passages"):
        values["passages"] = [_given(each, text="") for each in passages]
    return parsed(kind, values)


def passage_request_from_proto(message: answer_pb2.PassageRequest) -> PassageRequest:
    """Fields that the message leaves out stay open. Raises InvalidRequest."""
    return parsed(PassageRequest, _given(message, id=""))


def _given(message: Message, **needed: str) -> dict[str, Any]:
    """What it holds. An empty text is not on the wire, but what is needed is there, empty."""
    return {**needed, **{field.name: value for field, value in message.ListFields()}}


def excerpt_to_proto(excerpt: Excerpt) -> answer_pb2.Excerpt:
    return answer_pb2.Excerpt(
        passage=wire.passage_to_wire(excerpt.passage),
        before=map(wire.passage_to_wire, excerpt.before),
        after=map(wire.passage_to_wire, excerpt.after),
        snapshot_id=excerpt.snapshot_id,
        request_id=excerpt.request_id,
    )


def retrieval_to_proto(retrieval: Retrieval) -> answer_pb2.RetrieveResponse:
    return answer_pb2.RetrieveResponse(**_found(retrieval))


def answer_to_proto(answer: Answer) -> answer_pb2.AnswerResponse:
    return answer_pb2.AnswerResponse(
        answer=answer.text,
        log_likelihood=answer.log_likelihood,
        formulation=answer_pb2.Formulation.Value(f"FORMULATION_{answer.formulation.name}"),
        decoding=answer_pb2.Decoding.Value(f"DECODING_{answer.decoding.name}"),
        generator_fingerprint=answer.generator_fingerprint,
        labels=[
            answer_pb2.Label(text=each.text, log_likelihood=each.log_likelihood, log_probability=each.log_probability)
            for each in answer.labels
        ],
        tokens=map(_token_to_proto, answer.tokens),
        citations=map(_citation_to_proto, answer.citations),
        answers=[
            answer_pb2.Alternative(
                answer=each.text,
                log_likelihood=each.log_likelihood,
                log_posterior=each.log_posterior,
                tokens=map(_token_to_proto, each.tokens),
                citations=map(_citation_to_proto, each.citations),
                cut=each.cut,
            )
            for each in answer.answers
        ],
        abstained=answer.abstained,
        confidence=answer.confidence,
        cut=answer.cut,
        **_found(answer),
    )


def event_to_proto(event: Event) -> answer_pb2.AnswerEvent:
    match event:
        case Retrieval():
            return answer_pb2.AnswerEvent(retrieved=retrieval_to_proto(event))
        case Token():
            return answer_pb2.AnswerEvent(token=_token_to_proto(event))
        case Answer():
            return answer_pb2.AnswerEvent(answer=answer_to_proto(event))


def _has_many_fields(data: bytes) -> bool:
    """Whether a message has more than MAX_FIELDS. Of bytes that are none, the parser says so."""
    at = 0
    for _ in range(MAX_FIELDS):
        if at >= len(data):
            return False
        tag, at = _varint(data, at)
        match tag & 7:
            case wire.LENGTH_DELIMITED:
                size, at = _varint(data, at)
                at += size
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 5:
                at += 4
    return at < len(data)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends; of one without an end, where the data does."""
    number = 0
    for n, byte in enumerate(data[at : at + 10]):
        number |= (byte & 0x7F) << 7 * n
        if byte < 0x80:
            return number, at + n + 1
    return number, len(data)


def _found(found: Answer | Retrieval) -> dict[str, Any]:
    """What an answer and a retrieval have in common."""
    return {
        "evidence": map(_evidence_to_proto, found.evidence),
        "snapshot_id": found.snapshot_id,
        "encoder_fingerprint": found.encoder_fingerprint,
        "complete": found.complete,
        "coverage": _coverage_to_proto(found.coverage),
        "cached": found.cached,
        "request_id": found.request_id,
        "timings": _timings_to_proto(found.timings),
    }


def _evidence_to_proto(evidence: Evidence) -> answer_pb2.Evidence:
    return answer_pb2.Evidence(
        passage=wire.passage_to_wire(evidence.passage),
        score=evidence.score,
        log_prior=evidence.log_prior,
        log_posterior=evidence.log_posterior,
    )


def _token_to_proto(token: Token) -> answer_pb2.Token:
    return answer_pb2.Token(
        text=token.text,
        log_likelihood=token.log_likelihood,
        log_posterior=token.log_posterior,
        start=token.start,
        end=token.end,
    )


def _citation_to_proto(citation: Citation) -> answer_pb2.Citation:
    return answer_pb2.Citation(
        start=citation.start, end=citation.end, evidence=citation.evidence, probability=citation.probability
    )


def _coverage_to_proto(coverage: Coverage) -> answer_pb2.Coverage:
    return answer_pb2.Coverage(
        n_searched=coverage.n_searched, n_total=coverage.n_total, missing_shards=coverage.missing_shards
    )


def _timings_to_proto(timings: Mapping[str, float]) -> list[answer_pb2.Timing]:
    return [answer_pb2.Timing(stage=stage, duration_s=duration_s) for stage, duration_s in timings.items()]
