"""What `openbook evaluate` is told."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, model_validator

from openbook.config import EncoderSettings, GeneratorSettings, IndexClientSettings, Positive, Section
from openbook.core.types import (
    MAX_BM25_WEIGHT,
    Decoding,
    Formulation,
    GenerationSettings,
    RetrievalSettings,
    RetrieverKind,
    check_weight,
)
from openbook.corpus.questions import drawn
from openbook.errors import InvalidRequest
from openbook.evaluation.kilt import Pages

T = TypeVar("T")

N_SEARCHED = 20
N_RANKED = 100
"""Passages searched, and documents ranked at most, where retrieval is evaluated alone."""


class SearchSettings(Section):
    """Which questions are asked of what index."""

    questions: Annotated[tuple[Path, ...], Field(min_length=1)]  # see `openbook.corpus.questions`
    out: Path
    snapshot: Path | None = None  # served in this process for as long as it takes
    index: IndexClientSettings = IndexClientSettings()  # or servers that run
    encoder: EncoderSettings = EncoderSettings()
    retriever: RetrieverKind = RetrieverKind.DENSE
    bm25_weight: Annotated[float, Field(ge=0, le=MAX_BM25_WEIGHT)] | None = None  # see `RetrievalSettings`
    pages: Pages = "id"  # KILT's pages are a snapshot's documents of this id, or of this title
    limit: Positive | None = None  # only so many questions of each file, drawn with the seed
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _named_apart(self) -> "SearchSettings":
        _all_different("names of files", self.names)
        return self

    @model_validator(mode="after")
    def _weighs_what_is_fused(self) -> "SearchSettings":
        try:
            check_weight(self.bm25_weight, self.retriever)
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Of the files of questions, as results call them."""
        names = (Path(os.path.abspath(path)).name for path in self.questions)  # also of ".."
        return tuple(name[:1] + name[1:].partition(".")[0] for name in names)  # `.hidden.jsonl` has one too

    @property
    def n_sources(self) -> int:
        """Of what is searched: a snapshot, servers, or one too many, or none."""
        return (self.snapshot is not None) + self.index.names_servers

    def draw(self, items: Sequence[T]) -> list[T]:
        """Those of a file that are asked, in its order."""
        return drawn(items, self.limit, self.seed)

    def retrieval(self, k: int) -> RetrievalSettings:
        """How k passages are searched for."""
        return RetrievalSettings(k=k, retriever=self.retriever, bm25_weight=self.bm25_weight)


class RankingSettings(SearchSettings):
    """One evaluation of retrieval alone."""

    questions: Annotated[tuple[Path, ...], Field(min_length=1)]  # see `openbook.evaluation.judged`
    split: str = "test"  # of a folder in BEIR's layout: which file of qrels
    n_passages: Annotated[int, Field(ge=N_RANKED, le=1000)] = N_RANKED  # searched; documents have several of them
    batch: Annotated[int, Field(ge=1, le=1024)] = 64  # questions encoded and searched together

    @model_validator(mode="after")
    def _can_be_run(self) -> "RankingSettings":
        if self.n_sources != 1:
            raise ValueError("name a snapshot or index servers, one of them")
        return self


class EvaluationSettings(SearchSettings):
    """One evaluation: which questions, asked of what, and how answers are decoded."""

    # retrieved: from the index. gold: the question's own title and context as the only passage. none: the closed book,
    # a passage without words.
    context: Literal["retrieved", "gold", "none"] = "retrieved"
    generator: GeneratorSettings = GeneratorSettings()
    k: Annotated[int, Field(ge=1, le=100)] = 5  # passages read
    # Searched for whatever k is, to see how far down the first passage with an answer is.
    n_searched: Annotated[int, Field(ge=1, le=1000)] = N_SEARCHED
    formulations: Annotated[tuple[Formulation, ...], Field(min_length=1)] = (Formulation.SEQUENCE,)
    decoding: Decoding = Decoding.THOROUGH
    n_beams: Positive = 1
    max_new_tokens: Positive = 32
    # If any, the answer is the most probable of them. "SUPPORTS=true": SUPPORTS in the files, "true" to the generator.
    labels: tuple[str, ...] = ()
    follow: Annotated[int, Field(ge=0)] = 0  # RAG-Token: look for passages again after so many tokens

    @model_validator(mode="after")
    def _can_be_run(self) -> "EvaluationSettings":
        if self.context != "retrieved" and self.n_sources:
            context = {"gold": "gold context", "none": "the closed book"}[self.context]
            raise ValueError(f"{context} needs neither a snapshot nor index servers")
        if self.context == "retrieved" and self.n_sources != 1:
            raise ValueError("name a snapshot or index servers, one of them")
        if self.follow and (self.context, self.retriever) != ("retrieved", RetrieverKind.DENSE):
            given = f"{self.context} context" if self.context != "retrieved" else f"the retriever {self.retriever}"
            raise ValueError(f"follow must be 0 with {given}, got {self.follow}")
        _all_different("formulations", self.formulations)
        try:
            for formulation in self.formulations:
                self.generation(formulation)
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def words(self) -> tuple[tuple[str, str], ...]:
        """What the generator chooses from: each word, and the label that it stands for."""
        parted = (each.partition("=") for each in self.labels)
        return tuple((word if equals else label, label) for label, equals, word in parted)

    def generation(self, formulation: Formulation) -> GenerationSettings:
        """How the answers of one formulation are decoded."""
        return GenerationSettings(
            formulation=formulation,
            decoding=self.decoding,
            n_beams=self.n_beams,
            max_new_tokens=self.max_new_tokens,
            labels=tuple(word for word, _ in self.words),
            follow=self.follow,
        )


def _all_different(name: str, values: Sequence[str]) -> None:
    if len(set(values)) < len(values):
        raise ValueError(f"{name} must differ, got {', '.join(values)}")
