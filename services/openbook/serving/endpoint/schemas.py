"""What goes in and out over HTTP, under the names of answer.proto; `messages` has the same as protobuf.

A request of either protocol becomes one of the models here, so both are checked by the same code. Limits are not
repeated here: the pipeline and `GenerationSettings` know them.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from openbook.core.passages import MAX_AROUND
from openbook.core.types import Decoding, Formulation, RetrieverKind, Token
from openbook.rag.answer import Answer, Event, Retrieval
from openbook.serving.endpoint.sent import Flag, Real, Sent, Text, Whole32, Whole64


class OwnPassageIn(Sent):
    """A text of the caller's, encoded as the index's passages were."""

    text: str
    title: Text = ""
    document_id: Annotated[Text, Field(description="Comes back in the evidence.")] = ""


class RetrieveRequest(Sent):
    """Fields left out, or null, take the server's defaults."""

    question: str
    k: Annotated[Whole32 | None, Field(description="Passages to retrieve.")] = None
    timeout_s: Annotated[Real | None, Field(description="Time within which the answer is worth having.")] = None
    request_id: Annotated[Text, Field(description="Returned, and written in the logs; made up if empty.")] = ""
    min_coverage: Annotated[
        Real | None, Field(description="Answer if this share of the passages can be searched; 1 is all or nothing.")
    ] = None
    nprobe: Annotated[Whole32 | None, Field(description="IVF: cells looked at.")] = None
    ef_search: Annotated[Whole32 | None, Field(description="HNSW: candidates kept.")] = None
    rerank_factor: Annotated[Whole32 | None, Field(description="Candidates per hit scored exactly.")] = None
    retriever: Annotated[
        RetrieverKind | None, Field(description="Who finds the passages: the query, the question's words, or both.")
    ] = None
    bm25_weight: Annotated[
        Real | None,
        Field(description="Hybrid alone: the score is dense + so much of BM25's; left out, the ranks of both decide."),
    ] = None
    without: Annotated[
        Annotated[tuple[Whole64, ...], Field(fail_fast=True)] | None,
        Field(description="Ids of passages that are no evidence, as if there were none such."),
    ] = None
    passages: Annotated[
        Annotated[tuple[OwnPassageIn, ...], Field(fail_fast=True)] | None,
        Field(description="Your own, read together with the k that are found; alone where k is 0."),
    ] = None


class AnswerRequest(RetrieveRequest):
    """Fields left out, or null, take the server's defaults."""

    formulation: Annotated[Formulation | None, Field(description="How passages are marginalised out.")] = None
    decoding: Annotated[Decoding | None, Field(description="How RAG-Sequence scores its candidates.")] = None
    n_beams: Annotated[Whole32 | None, Field(description="1 is greedy.")] = None
    max_new_tokens: Whole32 | None = None
    min_new_tokens: Whole32 | None = None
    length_penalty: Real | None = None
    early_stopping: Flag | None = None
    temperature: Annotated[Real | None, Field(description="Above 0 tokens are sampled, without beams.")] = None
    top_p: Annotated[Real | None, Field(description="Sample from the tokens that hold so much together.")] = None
    seed: Annotated[Whole64 | None, Field(description="Equal seeds give equal answers.")] = None
    labels: Annotated[
        Annotated[tuple[str, ...], Field(fail_fast=True)] | None,
        Field(description="The answer is the most probable of these."),
    ] = None
    n_answers: Annotated[Whole32 | None, Field(description="At most n_beams, or so many samples.")] = None
    follow: Annotated[
        Whole32 | None, Field(description="RAG-Token, one by one: look for passages again after so many tokens.")
    ] = None
    tokens: Annotated[Flag | None, Field(description="Report each token with its passages, and citations.")] = None
    min_probability: Annotated[Real | None, Field(description="Hold answers below it back.")] = None
    min_confidence: Annotated[Real | None, Field(description="Hold answers of less confidence back.")] = None


class PassageRequest(Sent):
    """Fields left out take the server's defaults."""

    id: Annotated[str, Field(description="A lasting id, or the number that an answer gives.")]
    around: Annotated[Whole32 | None, Field(description="So many before it, and behind, in its document.")] = None
    snapshot_id: Annotated[str, Field(description="Of the number; the current one if empty.")] = ""
    timeout_s: Real | None = None
    request_id: str = ""


class PassageQuery(Sent):
    """What is asked behind `?` of a passage."""

    around: Annotated[
        int, Field(ge=0, le=MAX_AROUND, description="So many before it, and behind, in its document.")
    ] = 0
    snapshot_id: Annotated[str, Field(description="That the number is of; the current one if empty.")] = ""
    timeout_s: Annotated[float | None, Field(description="Time within which it is worth having.")] = None


Log = Annotated[float, WithJsonSchema({"type": ["number", "null"]})]
"""A natural logarithm. In JSON, null stands for that of zero."""
Cut = Annotated[bool, Field(description="As long as max_new_tokens lets it be, and not ended by itself.")]


class _Response(BaseModel):
    """Made from the pipeline's dataclasses by attribute."""

    model_config = ConfigDict(from_attributes=True)


class OriginOut(_Response):
    """The place of a passage in its document. What is not known is empty."""

    document_digest: Annotated[str, Field(description="SHA-256 of its text: words joined by single spaces, in UTF-8.")]
    start: Annotated[int, Field(description="Its first character in that text.")]
    end: Annotated[int, Field(description="Behind its last one.")]
    path: Annotated[str, Field(description="Of the file within the corpus.")]
    url: str
    section: Annotated[str, Field(description="The headings above it.")]
    page: int | None
    language: str
    date: Annotated[str, Field(description="ISO 8601.")]
    fields: Annotated[dict[str, str | int | float | bool], Field(description="As declared for the snapshot.")]


class PassageOut(_Response):
    """A passage of about 100 words."""

    id: int
    document_id: str
    title: str
    text: str
    lasting_id: Annotated[str, Field(description="The same in every snapshot; empty where the origin is not known.")]
    origin: Annotated[OriginOut | None, Field(description="null where it is not known.")]


class ExcerptOut(_Response):
    """A passage in its document."""

    passage: PassageOut
    before: Annotated[list[PassageOut], Field(description="In the order of the document, the nearest last.")]
    after: Annotated[list[PassageOut], Field(description="The nearest first.")]
    snapshot_id: str
    request_id: str


class EvidenceOut(_Response):
    """A passage with what it contributed. Logs are natural."""

    passage: PassageOut
    score: float
    log_prior: Log
    log_posterior: Log


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
    log_likelihood: Annotated[Log, Field(description="Among all answers there are.")]
    log_probability: Annotated[Log, Field(description="Among the labels.")]


class CitationOut(_Response):
    """A part of an answer whose words have the same likeliest passage."""

    start: Annotated[int, Field(description="Its first character.")]
    end: Annotated[int, Field(description="Behind its last one.")]
    evidence: Annotated[int, Field(description="Which of the evidence, from 0.")]
    probability: Annotated[float, Field(description="The mean over its tokens of that passage's posterior.")]


class TokenOut(_Response):
    """One token of an answer. Its place in the answer is known once that stands."""

    text: str
    log_likelihood: Log
    log_posterior: list[Log]
    start: int | None = None
    end: int | None = None


class AlternativeOut(_Response):
    """One of several answers."""

    answer: Annotated[str, Field(validation_alias="text")]
    log_likelihood: Log
    log_posterior: Annotated[list[Log], Field(description="Of each passage of the evidence.")]
    tokens: list[TokenOut]
    citations: list[CitationOut]
    cut: Cut


class AnswerResponse(_Response):
    """The answer, what it rests on, and what made it."""

    answer: Annotated[str, Field(validation_alias="text")]
    log_likelihood: Log
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
    abstained: Annotated[
        bool, Field(description="Held back: less probable than min_probability, or confident than min_confidence.")
    ]
    confidence: Annotated[float | None, Field(description="p(right), where something was fitted to tell it.")]
    cut: Cut


def event_to_json(event: Event) -> tuple[str, str]:
    """The event's name, as in answer.proto, and its JSON."""
    match event:
        case Retrieval():
            return "retrieved", RetrieveResponse.model_validate(event).model_dump_json()
        case Token():
            return "token", TokenOut.model_validate(event).model_dump_json()
        case Answer():
            return "answer", AnswerResponse.model_validate(event).model_dump_json()
