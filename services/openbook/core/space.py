"""The space of embeddings: scores mean something between queries and passages of one space, and only there."""

from dataclasses import dataclass

from openbook.errors import SnapshotMismatch


@dataclass(frozen=True, slots=True)
class Space:
    """What queries ask for, or what passages there are."""

    of: str  # whose it is, for people: query encoder 'embedded', snapshot 1f2e
    encoder: str  # fingerprint of the encoder that embeds the passages
    dimension: int  # d


def check_same_space(queries: Space, passages: Space) -> None:
    """Queries are compared with passages of their own space only.

    Raises:
        SnapshotMismatch: it is another; names both.
    """
    if (queries.encoder, queries.dimension) != (passages.encoder, passages.dimension):
        raise SnapshotMismatch(
            f"{queries.of} asks for passages of dimension {queries.dimension} by encoder {queries.encoder}, but "
            f"{passages.of} has those of dimension {passages.dimension} by encoder {passages.encoder}; if they are a "
            "pair, passage_model must name the encoder of the passages"
        )
