"""The best passages of questions by the retriever that their settings name, without those to be left out."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from openbook.core.context import Context
from openbook.core.fusion import fuse
from openbook.core.topk import told_why
from openbook.core.types import Float32, Hits, RetrievalSettings, RetrieverKind
from openbook.rag.ports import Retriever


def needs_queries(settings: RetrievalSettings) -> bool:
    """Whether the questions have to be encoded."""
    return settings.retriever is not RetrieverKind.BM25


def needs_words(settings: RetrievalSettings) -> bool:
    """Whether their texts go to the index tier."""
    return settings.retriever is not RetrieverKind.DENSE


async def find(
    index: Retriever, questions: Sequence[str], queries: Float32 | None, settings: RetrievalSettings, context: Context
) -> Hits:
    """The best k of each of n questions, whose (n, d) queries may be None where they are not needed; best first.

    Scores are what the prior is the softmax of: see `openbook.core.fusion`. What is to be left out is, before passages
    are ranked. Raises as `Retriever.search` and `Retriever.candidates`.
    """
    if not needs_words(settings):
        assert queries is not None
        return await _dense(index, queries, settings, context)
    asked_with = queries if needs_queries(settings) else None
    return fuse(await index.candidates(questions, asked_with, settings, context), settings)


async def _dense(index: Retriever, queries: Float32, settings: RetrievalSettings, context: Context) -> Hits:
    n_without = len(set(settings.without))
    wider = replace(settings, k=settings.k + n_without, without=())
    with told_why(wider.k, settings.k, f"k and the passages of without are {settings.k} and {n_without}"):
        hits = await index.search(queries, wider, context)
    if not settings.without:
        return hits
    left_out = np.isin(hits.ids, settings.without)
    best = np.argsort(left_out, axis=1, kind="stable")[:, : settings.k]
    rows = np.arange(len(best))[:, None]
    ids = np.where(left_out, -1, hits.ids)[rows, best]
    return replace(hits, ids=ids, scores=np.where(ids < 0, -np.inf, hits.scores[rows, best]).astype(np.float32))
