"""An answer taken apart: the answer with its tokens, and the answer of every passage by itself."""

from collections.abc import Callable
from typing import Any, Protocol

from openbook.core.types import OwnPassage, RetrieverKind
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

    `options` are those of `Client.answer`. Raises as it does: InvalidRequest also where no encoder is there for
    passages of the caller's own, as which each is read alone; and for more than one answer.
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
    found = (
        client.answer(question, **{**options, **bare, "passages": [OwnPassage(each.text, each.title)]})
        for each in (evidence.passage for evidence in answer.evidence)
    )
    return Explanation(question, answer, tuple(Alone(each.text, each.log_likelihood) for each in found))
