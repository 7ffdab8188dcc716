"""What goes in and out over HTTP, under the names of answer.proto; and the same requests and answers as protobuf.

A request of either protocol becomes one of the models here, so both are checked by the same code. Limits are not
repeated here: the pipeline and `GenerationSettings` know them.
"""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from google.protobuf.message import DecodeError, Message
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from openbook import wire
from openbook.core.types import Citation, Coverage, Decoding, Formulation, Token
from openbook.errors import InvalidRequest
from openbook.rag.answer import Answer, Evidence, Retrieval
from openbook.v1 import answer_pb2

# What protobuf holds. Without limits of their own, numbers of any length would be read, and told back in messages.
Whole32 = Annotated[int, Field(strict=True, ge=-(1 << 32), lt=1 << 32)]
Whole64 = Annotated[int, Field(strict=True, ge=-(1 << 64), lt=1 << 64)]


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class OwnPassageIn(_Request):
    """A text of the caller's, encoded as the index's passages were."""

    text: str
    title: str = ""
    document_id: Annotated[str, Field(description="Comes back in the evidence.")] = ""


class RetrieveRequest(_Request):
    """Fields left out, or null, take the server's defaults."""

    question: str
    k: Annotated[Whole32 | None, Field(description="Passages to retrieve.")] = None
    timeout_s: Annotated[float | None, Field(description="Time within which the answer is worth having.")] = None
    request_id: Annotated[str, Field(description="Returned, and written in the logs; made up if empty.")] = ""
    min_coverage: Annotated[
        float | None, Field(description="Answer if this share of the passages can be searched; 1 is all or nothing.")
    ] = None
    nprobe: Annotated[Whole32 | None, Field(description="IVF: cells looked at.")] = None
    ef_search: Annotated[Whole32 | None, Field(description="HNSW: candidates kept.")] = None
    rerank_factor: Annotated[Whole32 | None, Field(description="Candidates per hit scored exactly.")] = None
    without: Annotated[
        tuple[Whole64, ...] | None,
        Field(description="Ids of passages that are no evidence, as if there were none such."),
    ] = None
    passages: Annotated[
        tuple[OwnPassageIn, ...] | None,
        Field(description="Your own, read together with the k that are found; alone where k is 0."),
    ] = None


class AnswerRequest(RetrieveRequest):
    """Fields left out, or null, take the server's defaults."""

    formulation: Annotated[Formulation | None, Field(description="How passages are marginalised out.")] = None
    decoding: Annotated[Decoding | None, Field(description="How RAG-Sequence scores its candidates.")] = None
    n_beams: Annotated[Whole32 | None, Field(description="1 is greedy.")] = None
    max_new_tokens: Whole32 | None = None
    min_new_tokens: Whole32 | None = None
    length_penalty: float | None = None
    early_stopping: Annotated[bool | None, Field(strict=True)] = None
    temperature: Annotated[float | None, Field(description="Above 0 tokens are sampled, without beams.")] = None
    top_p: Annotated[float | None, Field(description="Sample from the tokens that hold so much together.")] = None
    seed: Annotated[Whole64 | None, Field(description="Equal seeds give equal answers.")] = None
    labels: Annotated[tuple[str, ...] | None, Field(description="The answer is the most probable of these.")] = None
    n_answers: Annotated[Whole32 | None, Field(description="At most n_beams, or so many samples.")] = None
    tokens: Annotated[
        bool | None, Field(strict=True, description="Report each token with its passages, and citations.")
    ] = None
    min_probability: Annotated[float | None, Field(description="Hold answers below it back.")] = None


class _Response(BaseModel):
    """Made from the pipeline's dataclasses by attribute. In JSON, null stands for the logarithm of zero."""

    model_config = ConfigDict(from_attributes=True)


class PassageOut(_Response):
    """A passage of about 100 words."""

    id: int
    document_id: str
    title: str
    text: str


class EvidenceOut(_Response):
    """A passage with what it contributed. Logs are natural."""

    passage: PassageOut
    score: float
    log_prior: float
    log_posterior: float


class CoverageOut(_Response):
    """How much of the index was searched."""

    n_searched: Annotated[int, Field(description="Passages searched.")]
    n_total: Annotated[int, Field(description="Passages there are in the snapshot.")]
    missing_shards: list[int]


class RetrieveResponse(_Response):
    """The passages by score, highest first. The posterior equals the prior: nothing was generated yet."""

    evidence: list[EvidenceOut]
    snapshot_id: str
    encoder_fingerprint: str
    complete: bool
    coverage: CoverageOut
    cached: bool
    request_id: str
    timings: Annotated[dict[str, float], Field(description="Seconds by stage.")]


class LabelOut(_Response):
    """One of the labels that the answer was chosen from. Logs are natural."""

    text: str
    log_likelihood: Annotated[float, Field(description="Among all answers there are.")]
    log_probability: Annotated[float, Field(description="Among the labels.")]


class CitationOut(_Response):
    """A part of an answer whose words have the same likeliest passage."""

    start: Annotated[int, Field(description="Its first character.")]
    end: Annotated[int, Field(description="Behind its last one.")]
    evidence: Annotated[int, Field(description="Which of the evidence, from 0.")]
    probability: Annotated[float, Field(description="The mean over its tokens of that passage's posterior.")]


class TokenOut(_Response):
    """One token of an answer. Its place in the answer is known once that stands."""

    text: str
    log_likelihood: float
    log_posterior: list[float]
    start: int | None = None
    end: int | None = None


class AlternativeOut(_Response):
    """One of several answers."""

    answer: Annotated[str, Field(validation_alias="text")]
    log_likelihood: float
    log_posterior: Annotated[list[float], Field(description="Of each passage of the evidence.")]
    tokens: list[TokenOut]
    citations: list[CitationOut]


class AnswerResponse(_Response):
    """The answer, what it rests on, and what made it."""

    answer: Annotated[str, Field(validation_alias="text")]
    log_likelihood: float
    evidence: list[EvidenceOut]
    formulation: Formulation
    decoding: Decoding
    snapshot_id: str
    encoder_fingerprint: str
    generator_fingerprint: str
    complete: bool
    coverage: CoverageOut
    cached: bool
    request_id: str
    timings: Annotated[dict[str, float], Field(description="Seconds by stage.")]
    labels: list[LabelOut]
    tokens: Annotated[list[TokenOut], Field(description="If asked for.")]
    citations: Annotated[list[CitationOut], Field(description="If tokens were asked for.")]
    answers: Annotated[
        list[AlternativeOut], Field(description="If several were asked for, or it is held back: all, best first.")
    ]
    abstained: Annotated[bool, Field(description="Held back: less probable than min_probability.")]


Event = Retrieval | Token | Answer
R = TypeVar("R", bound=_Request)
P = TypeVar("P", bound=Message)


def parse_proto(kind: type[P], data: bytes) -> P:
    """A message from its bytes.

    Raises:
        InvalidRequest: they are no such message, or a text in it is not UTF-8.
    """
    try:
        return kind.FromString(data)
    except DecodeError:
        raise InvalidRequest(f"body must be a {kind.DESCRIPTOR.full_name} with UTF-8 texts, and is not") from None


def request_from_proto(kind: type[R], message: Message) -> R:
    """Fields that the message leaves out stay open.

    Raises:
        InvalidRequest: an enum has a value of no name here.
    """
    values: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    for name, enum in (("formulation", answer_pb2.Formulation), ("decoding", answer_pb2.Decoding)):
        if (number := values.get(name)) is not None:
            known = enum.values()
            if number not in known:
                raise InvalidRequest(f"{name} must be one of {', '.join(enum.keys())}, got {number}")
            values[name] = enum.Name(number).removeprefix(f"{name.upper()}_").lower()
    if passages := values.get("passages"):
        values["passages"] = [{field.name: value for field, value in each.ListFields()} for each in passages]
    try:
        return kind.model_validate({"question": "", **values})
    except ValidationError as error:
        raise InvalidRequest(describe(error.errors())) from None


def describe(problems: Any) -> str:
    """Pydantic's problems as one line that names field, value and what was expected."""
    return "; ".join(map(_describe_one, problems))


def _describe_one(problem: Mapping[str, Any]) -> str:
    # FastAPI puts "body" in front, then the field's name or, for text that is no JSON, a position.
    path = [part for part in problem["loc"] if part != "body"]
    name, value = ".".join(map(str, path)) or "body", repr(problem.get("input"))[:100]
    match problem["type"]:
        case "extra_forbidden":
            message = f"unknown key {name!r}"
        case "missing":
            message = f"{name} is missing"
        case "json_invalid":
            message = f"body must be JSON: {problem.get('ctx', {}).get('error', 'it is not')} at character {name}"
        case "model_attributes_type":
            message = f"body must be a JSON object, sent as application/json, got {value}"
        case "string_unicode":
            message = f"{name} must be UTF-8 text, got {value}"
        case _:
            message = f"{name}: {problem['msg']}, got {value}"
    return message.encode(errors="backslashreplace").decode()


def retrieval_to_proto(retrieval: Retrieval) -> answer_pb2.RetrieveResponse:
    return answer_pb2.RetrieveResponse(
        evidence=map(_evidence_to_proto, retrieval.evidence),
        snapshot_id=retrieval.snapshot_id,
        encoder_fingerprint=retrieval.encoder_fingerprint,
        complete=retrieval.complete,
        coverage=_coverage_to_proto(retrieval.coverage),
        cached=retrieval.cached,
        request_id=retrieval.request_id,
        timings=_timings_to_proto(retrieval.timings),
    )


def answer_to_proto(answer: Answer) -> answer_pb2.AnswerResponse:
    return answer_pb2.AnswerResponse(
        answer=answer.text,
        log_likelihood=answer.log_likelihood,
        evidence=map(_evidence_to_proto, answer.evidence),
        formulation=answer_pb2.Formulation.Value(f"FORMULATION_{answer.formulation.name}"),
        decoding=answer_pb2.Decoding.Value(f"DECODING_{answer.decoding.name}"),
        snapshot_id=answer.snapshot_id,
        encoder_fingerprint=answer.encoder_fingerprint,
        generator_fingerprint=answer.generator_fingerprint,
        complete=answer.complete,
        coverage=_coverage_to_proto(answer.coverage),
        cached=answer.cached,
        request_id=answer.request_id,
        timings=_timings_to_proto(answer.timings),
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
            )
            for each in answer.answers
        ],
        abstained=answer.abstained,
    )


def event_to_proto(event: Event) -> answer_pb2.AnswerEvent:
    match event:
        case Retrieval():
            return answer_pb2.AnswerEvent(retrieved=retrieval_to_proto(event))
        case Token():
            return answer_pb2.AnswerEvent(token=_token_to_proto(event))
        case Answer():
            return answer_pb2.AnswerEvent(answer=answer_to_proto(event))


def event_to_json(event: Event) -> tuple[str, str]:
    """The event's name, as in answer.proto, and its JSON."""
    match event:
        case Retrieval():
            return "retrieved", RetrieveResponse.model_validate(event).model_dump_json()
        case Token():
            return "token", TokenOut.model_validate(event).model_dump_json()
        case Answer():
            return "answer", AnswerResponse.model_validate(event).model_dump_json()


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
