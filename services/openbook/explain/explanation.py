"""An answer taken apart: the answer with its tokens, and the answer of every passage by itself."""

from collections.abc import Callable
from typing import Any, Protocol

from openbook.core.types import OwnPassage, Passage, RetrieverKind
from openbook.errors import InvalidRequest
from openbook.explain.html import page, part
from openbook.explain.parts import Alone, Parts
from openbook.rag.answer import Answer

Ask = Callable[..., Answer]
"""Answers a question under the options of `Client.answer`."""


class Answering(Protocol):
    """Such as `openbook.Client`."""

    @property
    def answer(self) -> Ask:
        """The answer to a question."""
        ...


class Explanation(Parts):
    """An answer with its parts; in a notebook it shows itself."""

    def page(self) -> str:
        """One HTML page that needs nothing else."""
        return page(self)

    def _repr_html_(self) -> str:
        return part(self)


def explain(client: Answering, question: str, **options: Any) -> Explanation:
    """Ask, and ask again of every passage that was found by itself; k + 1 questions in all.

    `options` are those of `Client.answer`. Raises as it does: InvalidRequest also for more than one answer. A passage
    that cannot be one of the caller's own, as which it is read alone, has that error in place of what it would say:
    it is too long, or no encoder is there for passages.
    """
    if (options.get("n_answers") or 1) > 1:
        raise InvalidRequest(f"n_answers must be 1 for an explanation, got {options['n_answers']}")
    answer = client.answer(question, **{**options, "tokens": True})
    # Read alone a passage's prior is 1, whoever found it: so it can be handed over, and nothing is searched for.
    bare = {
        "k": 0,
        "without": None,
        "retriever": RetrieverKind.DENSE,
        "bm25_weight": None,
        "min_probability": 0.0,
        "min_confidence": 0.0,
        "follow": 0,
    }

    def alone(passage: Passage) -> Alone | InvalidRequest:
        own = OwnPassage(passage.text, passage.title)
        try:
            found = client.answer(question, **{**options, **bare, "passages": [own]})
        except InvalidRequest as error:
            return InvalidRequest(str(error).replace("passages[0].", "its "))  # the request that says so is ours
        return Alone(found.text, found.log_likelihood)

    return Explanation(question, answer, tuple(alone(each.passage) for each in answer.evidence))
