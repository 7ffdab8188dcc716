"""A query encoder, and beside it the passage encoder of its space, loaded when the first passage comes."""

from collections.abc import Sequence
from math import inf
from time import monotonic
from typing import Self

from openbook.config import EncoderSettings, ServedEncoderSettings
from openbook.core.deadline import Check, go_on
from openbook.core.types import Float32, Passage
from openbook.errors import InvalidModel, InvalidRequest
from openbook.models.embedded import EMBEDDED
from openbook.models.encoder import TextEncoder
from openbook.models.published import passage_model_of

TRY_AGAIN_S = 60.0
"""After the passage encoder could not be loaded: the hub was away, or the GPU was full."""


class EncoderPair:
    """Questions, and passages that are not in the index, into its space. Not for several threads at once."""

    def __init__(self, questions: TextEncoder, settings: ServedEncoderSettings) -> None:
        self.fingerprint = questions.fingerprint
        self.space = questions.space
        self.dimension = questions.dimension
        self._questions = questions
        # What the snapshot's builder has: its embeddings are float32.
        known = settings.passage_model or passage_model_of(settings.model)
        self._name = known or (EMBEDDED if questions.base else settings.model)
        self._settings = EncoderSettings(model=self._name, device=settings.device, n_threads=settings.n_threads)
        self._passages: TextEncoder | None = None
        self._missing = ""
        self._try_at = 0.0  # on time's own clock; what was missing then may be there now

    @classmethod
    def load(cls, settings: ServedEncoderSettings) -> Self:
        """The query encoder that the settings name. Raises InvalidModel as `TextEncoder.load`."""
        return cls(TextEncoder.load(settings), settings)

    def padded_length(self, question: str) -> int:
        """As `TextEncoder.padded_length`."""
        return self._questions.padded_length(question)

    def encode_questions(self, questions: Sequence[str], check: Check = go_on) -> Float32:
        """As `TextEncoder.encode_questions`."""
        return self._questions.encode_questions(questions, check)

    def encode_passages(self, passages: Sequence[Passage]) -> Float32:
        """As `TextEncoder.encode_passages`.

        Raises:
            InvalidRequest: `encoder.passage_model` is not the encoder of the index's passages.
        """
        if self._passages is None and monotonic() >= self._try_at:
            self._load_passages()
        if self._passages is None:
            raise InvalidRequest(f"passages of your own cannot be read here: {self._missing}")
        return self._passages.encode_passages(passages)

    def _load_passages(self) -> None:
        try:
            found = TextEncoder.load(self._settings, role="passage")
        except InvalidModel as error:
            self._missing, self._try_at = f"encoder.passage_model: {error}", monotonic() + TRY_AGAIN_S
            return
        if found.space == self.space:
            self._passages = found
        else:
            self._try_at = inf
            self._missing = (
                f"encoder.passage_model must name the encoder of the index's passages, which is {self.space}, "
                f"got {self._name!r}, which is {found.space}"
            )
