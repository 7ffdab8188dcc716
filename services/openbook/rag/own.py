"""The caller's own passages, and his texts: checked, and put among what was found."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from openbook.core.types import Float32, OwnPassage, Passage, RetrievalSettings, Retrieved, RetrieverKind
from openbook.errors import InvalidRequest


def as_passage(number: int, own: OwnPassage, max_chars: int) -> Passage:
    """One of the caller's own, under an id that no passage of an index has. Raises InvalidRequest as `check_text`."""
    text = check_text(f"passages[{number}].text", own.text, max_chars)
    title, document_id = (
        own_text.strip() and check_text(f"passages[{number}].{name}", own_text, max_chars)
        for name, own_text in (("title", own.title), ("document_id", own.document_id))
    )
    return Passage(-1 - number, document_id, title, text)


def check_retriever(settings: RetrievalSettings, what: str) -> None:
    """Raises InvalidRequest where the prior is not over dense scores: what is named here has no others."""
    asked = settings.retriever
    if asked is RetrieverKind.BM25 or (asked is RetrieverKind.HYBRID and settings.bm25_weight is not None):
        weight = "" if asked is RetrieverKind.BM25 else f" with bm25_weight {settings.bm25_weight}"
        raise InvalidRequest(
            f"{what} are scored by query alone: retriever must be dense, or hybrid without bm25_weight, got "
            f"{asked}{weight}"
        )


def check_text(name: str, text: str, max_chars: int) -> str:
    """The text without surrounding white space.

    Raises:
        InvalidRequest: it is empty, longer than `max_chars` or not encodable as UTF-8.
    """
    text = text.strip()
    if not text:
        raise InvalidRequest(f"{name} must have 1..{max_chars} characters, got none")
    if len(text) > max_chars:
        raise InvalidRequest(f"{name} must have 1..{max_chars} characters, got {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} must be UTF-8 text, got {error.object[error.start]!a} at {error.start}") from None
    return text


def joined(retrieved: Retrieved, passages: Sequence[Passage], scores: Float32) -> Retrieved:
    """What was found and these, by (score descending, id ascending) as an index that held them all would give them."""
    of_all = (*retrieved.passages, *passages)
    all_scores = np.concatenate([retrieved.scores, scores])
    order = np.lexsort((np.array([passage.id for passage in of_all]), -all_scores))
    return replace(retrieved, passages=tuple(of_all[i] for i in order), scores=all_scores[order])
