"""BM25 in the dense retriever's place (section 4.5): its scores are the logits of the prior."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import bm25s
import numpy as np

from openbook.core.topk import top_k
from openbook.core.types import Float32, Int64
from openbook.training.data import Example
from openbook.training.retrieval import Found, SnapshotTexts


class Bm25:
    """The passages of a snapshot, found by their words. A word that no passage has finds nothing."""

    def __init__(self, snapshot: Path) -> None:
        self._texts = SnapshotTexts(snapshot)
        self.identity = {"snapshot": self._texts.snapshot.manifest.snapshot_id, "bm25": bm25s.__version__}
        passages = (self._texts[i] for i in range(len(self._texts)))
        self._index = bm25s.BM25()
        self._index.index(_words(f"{p.title}. {p.text}" for p in passages), show_progress=False)

    def find(self, examples: Sequence[Example], queries: Float32 | None, k: int) -> Found:
        """Bare. A passage without a word of the question is none; without any, the question is read with the first."""
        best = [self._best(words, k) for words in _words(example.text for example in examples)]
        ids, scores = (np.concatenate(parts) for parts in zip(*best, strict=True))
        return Found(ids, scores, [[self._texts[i] for i in row] for row in ids.tolist()])

    def close(self) -> None:
        """Nothing to close."""

    def _best(self, words: list[str], k: int) -> tuple[Int64, Float32]:
        """(1, k) ids and scores, ties by id."""
        scores: Float32 = self._index.get_scores_from_ids(self._index.get_tokens_ids(words))  # (n_passages,)
        kth = np.partition(scores, -k)[-k] if k < len(scores) else 0.0
        candidates = np.flatnonzero(scores >= kth if kth > 0 else scores > 0)
        if not len(candidates):  # the generator has to read something
            candidates = np.zeros(1, np.int64)
        return top_k(candidates[None], scores[None, candidates], k)


def _words(texts: Iterable[str]) -> list[list[str]]:
    words: list[list[str]] = bm25s.tokenize(list(texts), stopwords="en", return_ids=False, show_progress=False)
    return words
