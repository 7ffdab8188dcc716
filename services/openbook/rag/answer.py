"""What the pipeline gives: answers and passages with what they rest on, and what made them."""

from dataclasses import dataclass

import numpy as np

from openbook.core.citations import cite
from openbook.core.types import (
    Citation,
    Coverage,
    Decoding,
    Float64,
    Formulation,
    Generation,
    Passage,
    ReplySettings,
    Retrieved,
    Token,
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """A passage shown with what it contributed."""

    passage: Passage
    score: float
    log_prior: float
    log_posterior: float


@dataclass(frozen=True, slots=True)
class Retrieval:
    """What was found for a question. The posterior equals the prior: nothing was generated yet."""

    evidence: tuple[Evidence, ...]  # by score, highest first
    snapshot_id: str
    encoder_fingerprint: str
    complete: bool
    coverage: Coverage
    cached: bool
    request_id: str
    timings: dict[str, float]  # seconds by stage


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A passage in its document."""

    passage: Passage
    before: tuple[Passage, ...]  # in the order of the document
    after: tuple[Passage, ...]
    snapshot_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Label:
    """One of the labels that an answer was chosen from."""

    text: str
    log_likelihood: float  # log p(label|x) among all answers there are
    log_probability: float  # among the labels


@dataclass(frozen=True, slots=True)
class Alternative:
    """One of several answers."""

    text: str
    log_likelihood: float  # log p(y|x)
    log_posterior: tuple[float, ...]  # (k,) log p(z|x,y) of the evidence
    tokens: tuple[Token, ...]  # if asked for
    citations: tuple[Citation, ...]
    cut: bool = False  # as long as it might be, and not ended by itself


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, what it rests on, and what made it."""

    text: str
    log_likelihood: float  # log p(y|x)
    evidence: tuple[Evidence, ...]
    formulation: Formulation
    decoding: Decoding
    snapshot_id: str
    encoder_fingerprint: str
    generator_fingerprint: str
    complete: bool
    coverage: Coverage
    cached: bool
    request_id: str
    timings: dict[str, float]
    labels: tuple[Label, ...] = ()  # in the order of the request
    tokens: tuple[Token, ...] = ()  # if asked for
    citations: tuple[Citation, ...] = ()  # if tokens were asked for
    answers: tuple[Alternative, ...] = ()  # if several were asked for, or it is held back: all, the best first
    abstained: bool = False  # held back, being less probable or less surely right than asked for; the text is empty
    confidence: float | None = None  # p(right), where something was fitted to tell it
    cut: bool = False  # as long as it might be, and not ended by itself


Event = Retrieval | Token | Answer
"""What a stream is made of: first what was retrieved, then tokens, last the answer."""


def alternative(generation: Generation, reply: ReplySettings) -> Alternative:
    """As much of it as is to be told."""
    tokens = generation.tokens if reply.tokens else ()
    log_posterior = tuple(generation.log_posterior.tolist())
    citations = cite(generation.text, tokens)
    return Alternative(generation.text, generation.log_likelihood, log_posterior, tokens, citations, generation.cut)


def labels_of(generation: Generation) -> tuple[Label, ...]:
    """Those that it was chosen from."""
    if (found := generation.classification) is None:
        return ()
    rows = zip(found.labels, found.log_likelihood.tolist(), found.log_probability.tolist(), strict=True)
    return tuple(Label(*row) for row in rows)


def evidence_of(retrieved: Retrieved, prior: Float64, posterior: Float64) -> tuple[Evidence, ...]:
    """The passages with their (k,) log prior and posterior."""
    rows = zip(retrieved.passages, *(np.asarray(a).tolist() for a in (retrieved.scores, prior, posterior)), strict=True)
    return tuple(Evidence(*row) for row in rows)
