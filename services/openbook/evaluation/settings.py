"""What `openbook evaluate` is told."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from openbook.config import EncoderSettings, GeneratorSettings, IndexClientSettings, Positive, Section
from openbook.core.types import Decoding, Formulation, GenerationSettings
from openbook.errors import InvalidRequest

N_SEARCHED = 20
"""Passages searched for whatever k is, to see how far down the first one with an answer is."""


class EvaluationSettings(Section):
    """One evaluation: which questions, asked of what, and how answers are decoded."""

    questions: Annotated[tuple[Path, ...], Field(min_length=1)]  # see `openbook.corpus.questions`
    out: Path
    # retrieved: from the index. gold: the question's own title and context as the only passage.
    context: Literal["retrieved", "gold"] = "retrieved"
    snapshot: Path | None = None  # served in this process for as long as it takes
    index: IndexClientSettings = IndexClientSettings()  # or servers that run
    encoder: EncoderSettings = EncoderSettings()
    generator: GeneratorSettings = GeneratorSettings()
    k: Annotated[int, Field(ge=1, le=100)] = 5  # passages read
    formulations: Annotated[tuple[Formulation, ...], Field(min_length=1)] = (Formulation.SEQUENCE,)
    decoding: Decoding = Decoding.THOROUGH
    n_beams: Positive = 1
    max_new_tokens: Positive = 32
    labels: tuple[str, ...] = ()  # if any, the answer is the most probable of them
    limit: Positive | None = None  # only so many questions of each file, drawn with the seed
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _can_be_run(self) -> "EvaluationSettings":
        sources = [self.snapshot is not None, bool(self.index.addresses)]
        if self.context == "gold" and any(sources):
            raise ValueError("gold context needs neither a snapshot nor index servers")
        if self.context == "retrieved" and sum(sources) != 1:
            raise ValueError("name a snapshot or index servers, one of them, or ask for gold context")
        for name, values in (("names of files", self.names), ("formulations", self.formulations)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must differ, got {', '.join(values)}")
        try:
            self.generation(self.formulations[0])
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Of the files of questions, as results call them."""
        return tuple(path.name.partition(".")[0] for path in self.questions)

    def generation(self, formulation: Formulation) -> GenerationSettings:
        """How the answers of one formulation are decoded."""
        return GenerationSettings(
            formulation=formulation,
            decoding=self.decoding,
            n_beams=self.n_beams,
            max_new_tokens=self.max_new_tokens,
            labels=self.labels,
        )
