"""From a question to its passages, steps 2 to 8 (ARCHITECTURE.md): cached or fresh query, top k, texts."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from openbook.config import AnswerDefaults
from openbook.core.context import Context
from openbook.core.deadline import Clock
from openbook.core.together import all_of
from openbook.core.topk import canonical_scores
from openbook.core.types import (
    NO_HIT,
    Float32,
    Hits,
    OwnPassage,
    Passage,
    RetrievalSettings,
    Retrieved,
    RetrieverKind,
)
from openbook.errors import ShardUnavailable
from openbook.rag.cached import Queries, Query
from openbook.rag.following import Found, no_passage
from openbook.rag.own import as_passage, check_retriever, check_text, joined
from openbook.rag.ports import EmbeddingCache, Encoder, PassageStore, Retriever
from openbook.rag.retrieving import find, needs_queries
from openbook.rag.stopwatch import Stopwatch

NOTHING = Retrieved((), np.empty(0, np.float32), snapshot_id="")
"""Of a question whose passages are all the caller's own."""

Fetched = TypeVar("Fetched")
Fetch = Callable[[Sequence[int], str, Context], Awaitable[Fetched]]


class Finder:
    """Encoder, cache and index tier as one."""

    def __init__(
        self,
        encoder: Encoder,
        retriever: Retriever,
        passages: PassageStore,
        cache: EmbeddingCache,
        limits: AnswerDefaults,
        clock: Clock,
    ) -> None:
        self._encoder = encoder
        self._retriever = retriever
        self._passages = passages
        self._limits = limits
        self._queries = Queries(encoder, cache, clock)
        self._found_in, self._most_found = "", 0  # a snapshot, and how many passages a question found in it at most

    def checked(self, question: str, own: Sequence[OwnPassage]) -> tuple[str, list[Passage]]:
        """Raises InvalidRequest as `openbook.rag.own.check_text`."""
        limit = self._limits.max_passage_chars
        passages = [as_passage(number, each, limit) for number, each in enumerate(own)]
        return check_text("question", question, self._limits.max_question_chars), passages

    @property
    def dimension(self) -> int:
        """d of the queries."""
        return self._encoder.dimension

    async def embed(self, texts: Sequence[str], context: Context) -> Float32:
        """(n, d) queries, as questions become them. Raises as `checked`, and as `Encoder.encode`."""
        limit = self._limits.max_question_chars
        checked = [check_text(f"input[{number}]", text, limit) for number, text in enumerate(texts)]
        queries = await all_of(self._queries.find(text, context) for text in checked)
        return np.stack([query.embedding for query in queries])

    async def find(
        self, question: str, settings: RetrievalSettings, own: Sequence[Passage], watch: Stopwatch
    ) -> Retrieved:
        """The passages to answer from. Raises as the ports say; InvalidRequest: there is none."""
        if own:
            check_retriever(settings, "passages of the caller's own")
        query = await self._query(question, watch) if needs_queries(settings) else None
        made_by = query.made_by if query else self._encoder.fingerprint
        retrieved = replace(NOTHING, encoder_fingerprint=made_by)
        if settings.k:
            hits, found = await self._retrieve(question, query, settings, self._passages.fetch, watch)
            retrieved = Retrieved(tuple(found), hits.scores[0], hits.snapshot_id, hits.coverage, made_by)
            former = self._most_found if hits.snapshot_id == self._found_in else 0
            self._found_in, self._most_found = hits.snapshot_id, max(former, len(found))
        if query and own:
            vectors = await self.encode_own(own, watch)
            retrieved = joined(retrieved, own, canonical_scores(query.embedding, vectors))
        if not retrieved.passages:
            raise no_passage(_why_none(settings))
        return retrieved

    def n_expected(self, settings: RetrievalSettings, n_own: int) -> int:
        """About how many passages there will be to answer from: a small index may have less than k, and few may have a
        word of the question.
        """
        n_found = 0 if settings.retriever is RetrieverKind.BM25 else min(settings.k, self._most_found)
        return max(1, n_own + max(0, n_found - len(set(settings.without))))

    async def look(self, text: str, settings: RetrievalSettings, watch: Stopwatch) -> Found:
        """The passages with their vectors, for who looks more than once. Raises as `find`."""
        check_retriever(settings, "passages that are looked for again")
        query = await self._query(text, watch)
        fetch = self._passages.fetch_with_vectors
        hits, (found, vectors) = await self._retrieve(text, query, settings, fetch, watch)
        return Found(query.embedding, tuple(found), vectors, hits.snapshot_id, hits.coverage, query.made_by)

    async def encode_own(self, own: Sequence[Passage], watch: Stopwatch) -> Float32:
        """(n, d) embeddings of the caller's own passages. Raises as `Encoder.encode_own`."""
        with watch.stage("encode passages") as inner:
            return await self._encoder.encode_own(own, inner)

    async def aclose(self) -> None:
        """Wait for what is still on its way into the cache."""
        await self._queries.aclose()

    async def _retrieve(
        self, text: str, query: Query | None, settings: RetrievalSettings, fetch: Fetch[Fetched], watch: Stopwatch
    ) -> tuple[Hits, Fetched]:
        """The hits, without empty slots, and what is fetched of them."""

        async def once() -> tuple[Hits, Fetched]:
            queries = None if query is None else query.embedding[None, :]
            with watch.stage("search", k=settings.k, retriever=settings.retriever) as inner:
                hits = await find(self._retriever, [text], queries, settings, inner)
            held = hits.ids[0] != NO_HIT
            hits = replace(hits, ids=hits.ids[:, held], scores=hits.scores[:, held])
            with watch.stage("fetch", snapshot=hits.snapshot_id) as inner:
                return hits, await fetch(hits.ids[0].tolist(), hits.snapshot_id, inner)

        try:
            return await once()
        except ShardUnavailable:
            if settings.min_coverage == 1.0:
                raise
            return await once()  # a shard that took part in the search is gone by now: do without it

    async def _query(self, text: str, watch: Stopwatch) -> Query:
        query = await self._queries.find(text, watch.context)
        watch.add(query.stages)
        return query


def _why_none(settings: RetrievalSettings) -> str:
    if settings.without:
        return f"without leaves out {len(set(settings.without))}, all of them"
    return "none has a word of the question, and retriever bm25 looks for nothing else"
