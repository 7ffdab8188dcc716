"""The nouns of the system. Arrays state their shape with the letters n queries, k hits, d dimensions, t tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from openbook.core.origin import Origin, lasting_id
from openbook.errors import InvalidRequest

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

NO_HIT = -1
"""The id of an empty slot; its score is -inf."""
MAX_SEARCH_PARAMETER = 1 << 20
"""Beyond any index's cells; keeps numbers from the wire far from what overflows in FAISS."""
MAX_BM25_WEIGHT = 1000.0
"""BM25's scores are several times larger than inner products of unit vectors: useful weights are below 1."""
MAX_WITHOUT = 100
"""Passages that can be left out of an answer."""
MAX_LABELS = 256
"""That an answer can be chosen from: each of them is read by every passage."""
MAX_LABEL_CHARS = 1000
"""Of a label: longer ones have more tokens than an answer may have, and take time that nothing stops."""
MAX_SAMPLES = 32
"""That can be drawn for one question."""
CONTEXT_TOKENS = 300
"""What a passage and the question count as: the most that RAG reads of both. 100 words are about 150 tokens."""


class Formulation(StrEnum):
    """How the passages are marginalised out (paper section 2.1)."""

    SEQUENCE = "sequence"
    TOKEN = "token"


class Decoding(StrEnum):
    """How RAG-Sequence scores its candidates (paper section 2.5). RAG-Token has one way only and ignores it."""

    THOROUGH = "thorough"
    FAST = "fast"


class RetrieverKind(StrEnum):
    """Who finds the passages, and by what the prior judges them: see `openbook.core.fusion`."""

    DENSE = "dense"
    BM25 = "bm25"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class Passage:
    """The unit embedded, stored and retrieved: about 100 words of one document."""

    id: int
    document_id: str
    title: str
    text: str
    origin: Origin | None = None

    @property
    def lasting_id(self) -> str:
        """The same in every snapshot that holds it, unlike `id`; empty where its origin is not known."""
        return lasting_id(self.document_id, self.origin, self.text) if self.origin else ""


@dataclass(frozen=True, slots=True)
class OwnPassage:
    """A text of the caller's, to be read beside the passages that are found."""

    text: str
    title: str = ""
    document_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchParameters:
    """How widely an index is searched. None takes what was chosen when it was built.

    Raises:
        InvalidRequest: a value is out of its range; the message names field, value and limits.
    """

    nprobe: int | None = None  # IVF: cells looked at
    ef_search: int | None = None  # HNSW: candidates kept
    rerank_factor: int | None = None  # candidates per hit whose exact scores are computed

    def __post_init__(self) -> None:
        for name in ("nprobe", "ef_search", "rerank_factor"):
            value = getattr(self, name)
            if value is not None:
                _check_range(name, value, 1, MAX_SEARCH_PARAMETER)


AS_BUILT = SearchParameters()
"""Search as widely as was chosen when the index was built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalSettings(SearchParameters):
    """What is retrieved for a question: how many passages, from how much of the index, searched how widely.

    Raises:
        InvalidRequest: a value is out of its range; the message names field, value and limits. The limits of k are the
            server's, who checks it.
    """

    k: int = 5  # 0: none but the caller's own
    min_coverage: float = 1.0  # answer if this share of all passages can be searched; 1: of all or not at all
    without: tuple[int, ...] = ()  # ids of passages to be left out, as if the index had none such
    retriever: RetrieverKind = RetrieverKind.DENSE
    bm25_weight: float | None = None  # hybrid: the score is dense + so much of BM25's; None fuses by rank

    def __post_init__(self) -> None:
        SearchParameters.__post_init__(self)  # `super()` would look for the class as it was before it got slots
        if not 0.0 < self.min_coverage <= 1.0:  # also refuses NaN
            raise InvalidRequest(f"min_coverage must be above 0, at most 1, got {self.min_coverage}")
        _check_range("passages of without", len(self.without), 0, MAX_WITHOUT)
        for passage_id in self.without:
            _check_range("without", passage_id, 0, 2**63 - 1)
        if self.bm25_weight is not None:
            _check_range("bm25_weight", self.bm25_weight, 0.0, MAX_BM25_WEIGHT)


def check_weight(asked: float | None, retriever: RetrieverKind) -> None:
    """Raises InvalidRequest for a weight of BM25 that was asked for where nothing is weighed."""
    if asked is not None and retriever is not RetrieverKind.HYBRID:
        raise InvalidRequest(f"bm25_weight is for the retriever hybrid alone, got {asked} with {retriever}")


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of the index a search looked at."""

    n_searched: int  # passages
    n_total: int  # passages of the snapshot
    missing_shards: tuple[int, ...] = ()

    @property
    def share(self) -> float:
        """Of all passages, those searched: 0..1."""
        return self.n_searched / self.n_total if self.n_total else 0.0


UNKNOWN_COVERAGE = Coverage(0, 0)
"""Of what one shard found: it knows of no others."""


@dataclass(frozen=True, slots=True)
class Hits:
    """The best k passages of each query, by (score descending, id ascending).

    A row with fewer than k hits ends in empty slots: id NO_HIT, score -inf.
    """

    ids: Int64  # (n, k)
    scores: Float32  # (n, k)
    snapshot_id: str
    coverage: Coverage = UNKNOWN_COVERAGE


@dataclass(frozen=True, slots=True)
class Candidates:
    """For each question the passages that are among the best by its query or by its words, with both scores of each.

    In no order; empty slots, id NO_HIT, may be anywhere.
    """

    ids: Int64  # (n, m)
    dense: Float32  # (n, m) inner products; 0 where nobody asked for them
    bm25: Float32  # (n, m) 0 where a passage has no word of the question
    snapshot_id: str
    coverage: Coverage = UNKNOWN_COVERAGE
    n_named: int | None = None  # of each ranking at least so many are among them; all that count, if none is said


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The passages of one question, best first: never an empty slot among them, so k may be less than asked for."""

    passages: tuple[Passage, ...]  # k
    scores: Float32  # (k,)
    snapshot_id: str
    coverage: Coverage = UNKNOWN_COVERAGE
    encoder_fingerprint: str = ""  # of the encoder whose query found or scored them

    @property
    def complete(self) -> bool:
        """Whether all shards took part."""
        return not self.coverage.missing_shards


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """How an answer is decoded.

    Raises:
        InvalidRequest: a value is out of its range; the message names field, value and limits.
    """

    formulation: Formulation = Formulation.SEQUENCE
    decoding: Decoding = Decoding.THOROUGH
    n_beams: int = 4
    max_new_tokens: int = 32
    min_new_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False
    temperature: float = 0.0  # 0 searches; above, tokens are sampled, and beams and their settings do not count
    top_p: float = 1.0  # sampled are the most probable tokens that hold so much probability together
    seed: int = 0
    labels: tuple[str, ...] = ()  # if any, the answer is the most probable of them, and nothing is searched or sampled
    n_answers: int = 1  # at most n_beams, or so many samples
    follow: int = 0  # RAG-Token, one by one: passages are looked for again after so many tokens; 0: never

    def __post_init__(self) -> None:
        _check_range("n_beams", self.n_beams, 1, 32)
        _check_range("max_new_tokens", self.max_new_tokens, 1, 512)
        _check_range("min_new_tokens", self.min_new_tokens, 0, self.max_new_tokens)
        _check_range("length_penalty", self.length_penalty, -10.0, 10.0)
        _check_range("temperature", self.temperature, 0.0, 10.0)
        _check_range("top_p", self.top_p, 1e-6, 1.0)
        _check_range("seed", self.seed, 0, 2**63 - 1)
        _check_range("n_answers", self.n_answers, 1, self._most_answers)
        if self.labels:
            check_labels(self.labels)
        _check_range("follow", self.follow, 0, 512)
        if self.follow and (not self.one_by_one or self.n_answers > 1):
            raise InvalidRequest(
                "follow must be 0 but for one answer of RAG-Token, greedy or sampled, without labels, got "
                f"{self.follow} with formulation {self.formulation}, n_beams {self.n_beams}, n_answers {self.n_answers}"
            )

    @property
    def one_by_one(self) -> bool:
        """Whether tokens are decided one by one, never to be taken back."""
        searched = self.n_beams > 1 and not self.temperature
        return self.formulation is Formulation.TOKEN and not searched and not self.labels

    @property
    def n_looks(self) -> int:
        """How often passages are looked for at most."""
        return -(-self.max_new_tokens // self.follow) if self.follow else 1

    @property
    def width(self) -> int:
        """How many answers are read side by side: the labels, one sample, or the beams."""
        return len(self.labels) or (self.n_answers if self.temperature else self.n_beams)

    @property
    def _most_answers(self) -> int:
        """A search ends with as many as it has beams; of labels one is the answer, and all are told."""
        return 1 if self.labels else MAX_SAMPLES if self.temperature else self.n_beams

    def work(self, k: int, at_most: float = math.inf) -> int:
        """What answering from k passages is predicted to take: k * (CONTEXT_TOKENS + width * max_new_tokens) positions.

        So many keys and values does each layer of the decoder hold at once, in the longest search there may be. Time
        grows faster, by what scores candidates; it has its limit in the deadline.

        Raises:
            InvalidRequest: they are more than `at_most`.
        """
        work = k * (CONTEXT_TOKENS + self.width * self.max_new_tokens)
        if work > at_most:
            name = "labels" if self.labels else "samples" if self.temperature else "n_beams"
            made_of = f"k x (context tokens + {name} x max_new_tokens)"
            got = f"{k} x ({CONTEXT_TOKENS} + {self.width} x {self.max_new_tokens}) = {work}"
            raise InvalidRequest(f"{made_of} must be at most max_work = {at_most}, got {got}")
        return work


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSettings(GenerationSettings):
    """How an answer goes on that was begun with other passages: one by one, for some tokens."""

    begun: tuple[int, ...]  # its tokens so far
    n_more: int  # at the most
    begun_by: str = ""  # `Generator.generates_by` of who gave these tokens, which mean nothing to another; empty: any


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also refuses NaN
        raise InvalidRequest(f"{name} must be {low}..{high}, got {value}")


def shown(labels: Sequence[str]) -> str:
    """Some of them, for a message."""
    return f"{len(labels)}: {[label[:50] for label in labels[:5]]}{' ...' if len(labels) > 5 else ''}"


def check_labels(labels: Sequence[str]) -> None:
    """Raises InvalidRequest for texts among which no answer could be chosen."""
    if not 1 <= len(labels) <= MAX_LABELS or len(set(labels)) < len(labels) or not all(map(str.strip, labels)):
        raise InvalidRequest(f"labels must be 1..{MAX_LABELS} different texts, none empty, got {shown(labels)}")
    if len(longest := max(labels, key=len)) > MAX_LABEL_CHARS:
        limit = f"at most {MAX_LABEL_CHARS} characters"
        raise InvalidRequest(f"labels must have {limit} each, got {len(longest)} in {longest[:50]!r} ...")
    try:
        "".join(labels).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"labels must be UTF-8 text, got {error.object[error.start]!a}") from None


@dataclass(frozen=True, slots=True)
class Classification:
    """What the model thinks of each of c labels as the answer. All logs are natural."""

    labels: tuple[str, ...]  # c
    log_likelihood: Float64  # (c,) log p(label|x) among all answers there are
    log_probability: Float64  # (c,) the same among these labels: sums to 1
    log_prior: Float64  # (k,) log p(z|x)
    log_posterior: Float64  # (c, k) log p(z|x,label)

    @property
    def label(self) -> str:
        """The most probable one."""
        return self.labels[int(self.log_probability.argmax())]


@dataclass(frozen=True, slots=True)
class ReplySettings:
    """What is told of an answer.

    Raises:
        InvalidRequest: a value is out of its range; the message names field, value and limits.
    """

    tokens: bool = False  # each token with its passages, and citations
    min_probability: float = 0.0  # an answer whose p(y|x) is below is held back
    min_confidence: float = 0.0  # or which is right with less probability

    def __post_init__(self) -> None:
        _check_range("min_probability", self.min_probability, 0.0, 1.0)
        _check_range("min_confidence", self.min_confidence, 0.0, 1.0)

    @property
    def may_hold_back(self) -> bool:
        """Whether it takes the whole answer to know whether any of it is told."""
        return self.min_probability > 0 or self.min_confidence > 0


@dataclass(frozen=True, slots=True)
class Token:
    """One token of an answer. All logs are natural."""

    text: str  # what it adds to the text so far, as generated
    log_likelihood: float  # log p(y_t|x,y_<t)
    log_posterior: tuple[float, ...]  # (k,) log p(z|x,y_<=t)
    start: int | None = None  # its first character in the answer as spelled, once that stands
    end: int | None = None  # behind its last one; equal to start where it has none


@dataclass(frozen=True, slots=True)
class Citation:
    """A part of an answer, and the passage that it rests on."""

    start: int  # its first character
    end: int  # behind its last one
    evidence: int  # which of the passages, from 0
    probability: float  # of its tokens, the share that this passage is expected to have given


@dataclass(frozen=True, slots=True)
class Generation:
    """Generated text and what the model thinks of it. All logs are natural."""

    text: str
    token_ids: tuple[int, ...]  # t, end-of-sequence included where it was generated, decoder start not
    log_likelihood: float  # log p(y|x)
    log_prior: Float64  # (k,) log p(z|x)
    log_posterior: Float64  # (k,) log p(z|x,y)
    tokens: tuple[Token, ...] = ()  # t
    classification: Classification | None = None  # of the labels, where it is one of them
    others: tuple["Generation", ...] = ()  # further answers, if several were asked for, the best first
    ended: bool = False  # no token can follow: after an end of sequence, or at the decoder's last position
    cut: bool = False  # as long as it might be, and not ended by itself: an end that had to come there does not count

    @property
    def several(self) -> tuple["Generation", ...]:
        """All answers, this one first."""
        return (self, *self.others)
