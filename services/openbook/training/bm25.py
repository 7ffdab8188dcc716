"""BM25 in the dense retriever's place (section 4.5): its scores are the logits of the prior."""

from collections.abc import Sequence
from pathlib import Path

import bm25s
import numpy as np

from openbook.core.types import NO_HIT, Float32
from openbook.training.data import Example
from openbook.training.retrieval import Found, SnapshotTexts


class Bm25:
    """The passages of a snapshot, found by their words. A word that no passage has finds nothing."""

    def __init__(self, snapshot: Path) -> None:
        self._texts = SnapshotTexts(snapshot)
        self.identity = {"snapshot": self._texts.snapshot.manifest.snapshot_id, "bm25": bm25s.__version__}
        passages = (self._texts[i] for i in range(len(self._texts)))
        tokens = bm25s.tokenize([f"{p.title}. {p.text}" for p in passages], stopwords="en", show_progress=False)
        self._index = bm25s.BM25()
        self._index.index(tokens, show_progress=False)

    def find(self, examples: Sequence[Example], queries: Float32 | None, k: int) -> Found:
        """Bare. A passage without a word of the question is none."""
        tokens = bm25s.tokenize([example.text for example in examples], stopwords="en", show_progress=False)
        n_found = min(k, len(self._texts))
        ids = np.full((len(examples), k), NO_HIT, np.int64)
        scores = np.full((len(examples), k), -np.inf, np.float32)
        ids[:, :n_found], scores[:, :n_found] = self._index.retrieve(tokens, k=n_found, show_progress=False)
        nothing = scores <= 0
        nothing[:, 0] = False  # the first slot is never empty: the generator has to read something
        ids[nothing], scores[nothing] = NO_HIT, -np.inf
        return Found(ids, scores, [[self._texts[i] for i in row] for row in ids.tolist()])

    def close(self) -> None:
        """Nothing to close."""
