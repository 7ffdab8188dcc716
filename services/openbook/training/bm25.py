"""BM25 in the dense retriever's place (section 4.5): its scores are the logits of the prior."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from openbook.core.types import NO_HIT, Float32, Int64
from openbook.index.building.words import write_bm25
from openbook.index.disk.bm25 import Bm25Index, has_bm25
from openbook.training.data import Example
from openbook.training.retrieval import Found, SnapshotTexts


class Bm25:
    """The passages of a snapshot, found by their words. A word that no passage has finds nothing."""

    def __init__(self, snapshot: Path) -> None:
        self._texts = SnapshotTexts(snapshot)
        snapshot_id, n = self._texts.snapshot.manifest.snapshot_id, len(self._texts)
        if has_bm25(snapshot):
            self._index = Bm25Index(snapshot, snapshot_id, 0, n)
        else:
            with tempfile.TemporaryDirectory() as folder:  # what is mapped stays until it is let go of
                write_bm25(Path(folder), (self._texts[i] for i in range(n)), snapshot_id)
                self._index = Bm25Index(Path(folder), snapshot_id, 0, n)
        self.identity = {"snapshot": snapshot_id, "bm25": self._index.version}

    def find(self, examples: Sequence[Example], queries: Float32 | None, k: int) -> Found:
        """Bare. A passage without a word of the question is none; without any, the question is read with the first."""
        best = [self._best(example.text, k) for example in examples]
        ids, scores = (np.stack(parts) for parts in zip(*best, strict=True))
        return Found(ids, scores, [[self._texts[i] for i in row] for row in ids.tolist()])

    def close(self) -> None:
        """Nothing to close."""

    def _best(self, question: str, k: int) -> tuple[Int64, Float32]:
        """(k,) ids and scores, ties by id."""
        ids, scores = self._index.best(self._index.scores(question), k)
        if ids[0] == NO_HIT:  # the generator has to read something
            ids[0], scores[0] = 0, 0
        return ids, scores
