"""One shard's passages found by the words of a question, with both scores of each."""

import threading
from collections.abc import Iterator

import numpy as np

from openbook.core.topk import canonical_scores
from openbook.core.types import NO_HIT, Candidates, Float32, Int64
from openbook.errors import InvalidRequest
from openbook.index.disk.bm25 import Bm25Index, has_bm25
from openbook.index.disk.snapshot import Snapshot
from openbook.index.shard.memory import SingleRows


class ShardWords:
    """The words of one shard, opened when they are first asked for: until then nobody needs memory for a vocabulary.

    May be used from several threads. `vectors` are the shard's (n_passages, d).
    """

    def __init__(self, snapshot: Snapshot, shard: int, vectors: SingleRows) -> None:
        self._snapshot = snapshot
        entry = snapshot.shard(shard)
        self._first_id, self._n_passages = entry.first_id, entry.n_passages
        self._vectors = vectors
        self._words: Bm25Index | None = None
        self._opening = threading.Lock()

    @property
    def are_open(self) -> bool:
        """Whether somebody asked for them."""
        return self._words is not None

    def open(self) -> None:
        """Read the vocabulary now, if there is one. Raises InvalidSnapshot."""
        if has_bm25(self._snapshot.folder):
            self._opened()

    def adding_up(self, question: str) -> Iterator[Float32]:
        """See `Bm25Index.adding_up`.

        Raises:
            InvalidRequest: the snapshot has no words to search for.
            InvalidSnapshot: they cannot be read.
        """
        return self._opened().adding_up(question)

    def candidates(self, scores: Float32, query: Float32 | None, k: int, also: Int64) -> Candidates:
        """Of one question, by the scores that `adding_up` ends with, the best k by BM25, and those of the ids `also`
        that are of this shard, with both scores of each: (1, k + len(also)). Without a (d,) query all dense scores
        are 0.
        """
        best, _ = self._opened().best(scores, k)
        named = np.concatenate([best, also])
        ours = np.unique(named[(named >= self._first_id) & (named < self._first_id + self._n_passages)])
        positions = ours - self._first_id
        ids, dense, bm25 = np.full(len(named), NO_HIT), *np.zeros((2, len(named)), np.float32)
        ids[: len(ours)], bm25[: len(ours)] = ours, scores[positions]
        if query is not None:
            dense[: len(ours)] = canonical_scores(query, self._vectors.at(positions))
        return Candidates(ids[None], dense[None], bm25[None], self._snapshot.manifest.snapshot_id)

    def _opened(self) -> Bm25Index:
        with self._opening:
            if self._words is None:
                folder, snapshot_id = self._snapshot.folder, self._snapshot.manifest.snapshot_id
                if not has_bm25(folder):
                    raise InvalidRequest(
                        f"retriever must be dense for snapshot {snapshot_id}, which has no BM25 index: "
                        f"`openbook index bm25` makes one"
                    )
                self._words = Bm25Index(folder, snapshot_id, self._first_id, self._n_passages)
        return self._words
