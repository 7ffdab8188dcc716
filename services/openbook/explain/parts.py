"""What an explanation shows."""

from dataclasses import dataclass

from openbook.core.types import Formulation, Token
from openbook.errors import InvalidRequest
from openbook.rag.answer import Alternative, Answer, Evidence


@dataclass(frozen=True, slots=True)
class Alone:
    """What a passage would answer if there were no others."""

    text: str
    log_likelihood: float  # log p(y|x,z), of this text


@dataclass(frozen=True, slots=True)
class Parts:
    """A question, its answer, and what each piece of evidence would answer alone. All logs are natural."""

    question: str
    answer: Answer
    alone: tuple[Alone | InvalidRequest, ...]  # in the order of the evidence; or why not

    @property
    def words(self) -> tuple[Token, ...]:
        """The tokens that have characters in the answer; of an answer held back, those that would have been said."""
        return tuple(token for token in self.said.tokens if token.start is None or token.start != token.end)

    @property
    def said(self) -> Answer | Alternative:
        """The answer; of one held back, what would have been said."""
        answer = self.answer
        return answer.answers[0] if answer.abstained and answer.answers else answer

    @property
    def text(self) -> str:
        """Its text."""
        return self.said.text

    def of_answer(self, evidence: Evidence) -> float | None:
        """log p(y|x,z) of the whole answer under one passage: Bayes' rule, so for RAG-Sequence alone."""
        if self.answer.formulation is not Formulation.SEQUENCE or self.answer.labels:
            return None
        return evidence.log_posterior + self.answer.log_likelihood - evidence.log_prior
