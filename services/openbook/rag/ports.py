"""What the pipeline needs of the tiers around it. The contract stands here; implementations stay bare."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, Self

from openbook.core.confidence import Calibration
from openbook.core.context import Context
from openbook.core.origin import Located
from openbook.core.types import (
    Candidates,
    Float32,
    Generation,
    GenerationSettings,
    Hits,
    Passage,
    RetrievalSettings,
    Retrieved,
    Token,
)
from openbook.errors import ModelUnavailable


class Encoder(Protocol):
    """Turns questions into queries in the space of the passage embeddings."""

    @property
    def fingerprint(self) -> str:
        """Digest of weights, tokenizer and pooling: equal fingerprints give equal embeddings.

        May change while the system runs, before a call returns what the new one made: what is kept of a call is kept
        by this only where it is the same before and after it.
        """
        ...

    @property
    def dimension(self) -> int:
        """d"""
        ...

    async def encode_own(self, passages: Sequence[Passage], context: Context) -> Float32:
        """(n, d) embeddings in the space of the index's passages, of the caller's own, whatever else is asked.

        Raises:
            InvalidRequest: there is no encoder for passages of this space.
            DeadlineExceeded, Overloaded: as in `encode`.
        """
        ...

    async def encode(self, questions: Sequence[str], context: Context) -> Float32:
        """(n, d) embeddings, one row per question, the same bits whatever else is in the batch.

        Raises:
            InvalidRequest: a question has more tokens than the encoder can read.
            DeadlineExceeded: they could not be ready in time.
            Overloaded: the queue in front of the model is full.
        """
        ...


class EmbeddingCache(Protocol):
    """Embeddings by key. Never raises: whatever goes wrong behind it is a miss and a metric."""

    async def get_many(self, keys: Sequence[str]) -> list[Float32 | None]:
        """One (d,) array or None per key, in order."""
        ...

    async def put_many(self, entries: Sequence[tuple[str, Float32]]) -> None:
        """Keep what fits. Losing an entry is allowed; altering one is not."""
        ...


class AnswerCache(Protocol):
    """Generations by key. Never raises, as `EmbeddingCache`."""

    async def get_many(self, keys: Sequence[str]) -> list[Generation | None]:
        """One generation or None per key, in order."""
        ...

    async def put_many(self, entries: Sequence[tuple[str, Generation]]) -> None:
        """Keep what fits."""
        ...


class Retriever(Protocol):
    """The index tier: all shards as one."""

    async def search(self, queries: Float32, settings: RetrievalSettings, context: Context) -> Hits:
        """The top k of each of the (n, d) queries over all shards, from one snapshot, by query alone.

        Where shards are gone and at least `min_coverage` of all passages can be searched, the top k of those, and
        within the deadline. The hits' coverage says what was searched.

        Raises:
            InvalidRequest: k, the dimension or a value (NaN, infinity) is out of range, or the index knows no such
                search parameter.
            ShardUnavailable: a shard has no replica that answers, and the others cover too little.
            SnapshotMismatch: the shards serve different snapshots.
            DeadlineExceeded: not in time.
        """
        ...

    async def candidates(
        self, questions: Sequence[str], queries: Float32 | None, settings: RetrievalSettings, context: Context
    ) -> Candidates:
        """What `openbook.core.fusion.fuse` ranks: of each question the best by BM25, whose statistics are those of the
        whole snapshot, and with queries also the best by query; as many as `fusion.depth` says, with both scores of
        each. All from one snapshot, also when another one is published meanwhile.

        Raises:
            InvalidRequest: as `search`; the snapshot has no words to search for.
            ShardUnavailable, SnapshotMismatch, DeadlineExceeded: as `search`.
        """
        ...


class PassageStore(Protocol):
    """The passages behind the ids of one snapshot."""

    async def fetch(self, ids: Sequence[int], snapshot_id: str, context: Context) -> list[Passage]:
        """The passages in the order of their ids.

        Raises:
            UnknownPassage: no shard holds an id.
            ShardUnavailable, SnapshotMismatch, DeadlineExceeded: as in `Retriever.search`.
        """
        ...

    async def fetch_with_vectors(
        self, ids: Sequence[int], snapshot_id: str, context: Context
    ) -> tuple[list[Passage], Float32]:
        """The passages in the order of their ids, and their exact (n, d) vectors. Raises as `fetch`."""
        ...

    async def locate(self, passage_id: str, snapshot_id: str, context: Context) -> Located:
        """Where the passage of a lasting id, or of a number, stands in a snapshot; in the current one if none is named.

        A number is not looked for: `fetch` will say if there is no such passage.

        Raises:
            UnknownPassage: it is neither, or no passage has this lasting id.
            ShardUnavailable, SnapshotMismatch, DeadlineExceeded: as `fetch`.
        """
        ...


class BegunByAnother(ModelUnavailable):
    """The generator that began an answer is gone, and no other can go on with its tokens."""


@dataclass(frozen=True, slots=True)
class Maker:
    """Who made a generation: what its generator said of itself when it did."""

    fingerprint: str
    generates_by: str
    calibration: Calibration

    @classmethod
    def of(cls, generator: "Generator") -> Self:
        """Of all that its last call returned, as long as nothing was awaited since."""
        return cls(generator.fingerprint, generator.generates_by, generator.calibration)


class Generator(Protocol):
    """Reads a question with each of its passages and marginalises them out."""

    @property
    def fingerprint(self) -> str:
        """Digest of weights, tokenizer and input format."""
        ...

    @property
    def generates_by(self) -> str:
        """The fingerprint, and what else answers depend on: where it is equal, so are they.

        May change while the system runs, and the others with it: as `Encoder.fingerprint`.
        """
        ...

    @property
    def calibration(self) -> Calibration:
        """How its answers are judged; empty where nothing was fitted to them."""
        ...

    def place(
        self, settings: GenerationSettings, n_passages: int, context: Context, is_stream: bool = False
    ) -> AbstractContextManager["Generator"]:
        """Itself, with a place kept in its queue, as far as that is here, for an answer from so many passages: who
        would be refused is before he is encoded, and who is encoded is not for those who came meanwhile.

        Raises:
            DeadlineExceeded, Overloaded: as `generate`.
        """
        ...

    async def generate(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> Generation:
        """The best answer under the model; with labels the most probable of them, and what it thinks of each.

        Raises:
            InvalidRequest: the question alone fills the generator's input, or a label cannot be its answer.
            BegunByAnother: of a part, whose `begun_by` is no longer this generator's `generates_by`.
            DeadlineExceeded, Overloaded: as in `Encoder.encode`.
        """
        ...

    def stream(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> AsyncIterator[Maker | Token | Generation]:
        """Tokens as they are decided, the whole generation last; before them, where it may change, who makes them.

        Only RAG-Token, greedy or sampled, decides token by token; anything else yields the generation alone. Closing
        the iterator stops the work behind it.
        """
        ...
