"""Searches by words, in the threads that fetch: they read postings and some vectors, and nothing of FAISS."""

import math
from collections.abc import Callable, Iterator

import numpy as np

from openbook import wire
from openbook.config import MAX_WORDS_CHARS
from openbook.core.context import Context
from openbook.core.topk import check_questions
from openbook.core.types import AS_BUILT, Candidates, Float32, Int64
from openbook.errors import InvalidRequest, InvalidSnapshot, OpenbookError, Overloaded
from openbook.index.server.coalesce import finish
from openbook.index.server.failed import CANCELLED, explain
from openbook.index.server.held import HeldSnapshots
from openbook.index.server.pending import Later, Outcome, Ticket
from openbook.index.server.threads import PART_IDS, Fetches
from openbook.index.shard.shard import Shard
from openbook.v1 import index_pb2

PART_CHARS = 128
"""The words of so many characters take about as long as a part of a fetch."""
PART_WORDS = math.ceil(PART_CHARS / 3)
"""That these may be: one has at least two letters, and something after it."""

MOST_BEGUN = 2
"""Questions that wait in their middle: each keeps a number for every passage of the shard meanwhile."""


class WordSearches:
    """What the snapshots held find by the words of questions: a part of a question after the other, by turns with
    fetches.
    """

    def __init__(self, held: HeldSnapshots[Shard], fetches: Fetches) -> None:
        self._held = held
        self._fetches = fetches
        self._n_begun = 0

    def begin(
        self,
        request: index_pb2.SearchRequest,
        data: bytes | memoryview,
        context: Context,
        ticket: Ticket,
        done: Callable[[Outcome], Later],
    ) -> None:
        """Have one call done. Raises InvalidRequest, Overloaded, SnapshotMismatch."""
        context.deadline.check("the search began")
        snapshot_id, shard = self._held.acquire(request.snapshot_id)
        over = False

        def end(outcome: Outcome) -> None:
            nonlocal over
            if not over:
                over = True
                self._held.release(snapshot_id)
                finish(done(outcome))

        def parts() -> Iterator[None]:
            try:
                rows = []
                for question, query, also in asked:
                    for n_words, scores in enumerate(shard.words.adding_up(question)):  # noqa: B007
                        context.deadline.check("the search was done")
                        if ticket.cancelled:
                            end(CANCELLED)
                            return
                        if n_words and n_words % PART_WORDS == 0 and self._n_begun < MOST_BEGUN:
                            self._n_begun += 1
                            try:
                                yield
                            finally:
                                self._n_begun -= 1
                    rows.append(shard.words.candidates(scores, query, request.k, also))
                    yield
                end(_stacked(rows))
            except InvalidSnapshot as error:  # an error of this server: another one's copy may be whole
                end(explain("Search", context.request_id, OpenbookError(str(error))))
            except Exception as error:
                end(explain("Search", context.request_id, error))

        def refuse(error: Overloaded) -> None:
            end(explain("Search", context.request_id, error))

        try:
            asked = _checked(request, data, shard)
            n_parts = sum(1 + len(question) // PART_CHARS for question in request.questions)
            self._fetches.submit(ticket.caller, PART_IDS * n_parts, parts(), refuse)
        except BaseException:
            if not over:
                self._held.release(snapshot_id)
            raise


def _checked(
    request: index_pb2.SearchRequest, data: bytes | memoryview, shard: Shard
) -> list[tuple[str, Float32 | None, Int64]]:
    """Of each question its text, its (d,) query if it has one, and the ids that are wanted too.

    Raises:
        InvalidRequest: names what is out of range, its value and its limits.
    """
    n = len(request.questions)
    check_questions(request.questions, request.k, shard.max_k, shard.max_rows)
    n_chars = sum(map(len, request.questions))
    if n_chars > MAX_WORDS_CHARS:
        raise InvalidRequest(f"questions must have at most {MAX_WORDS_CHARS} characters together, got {n_chars}")
    if len(request.also) % n or len(request.also) > n * shard.max_k:
        raise InvalidRequest(f"also must have 0..{shard.max_k} ids for each of {n} questions, got {len(request.also)}")
    also = np.array(request.also, np.int64).reshape(n, -1)
    queries: list[Float32 | None] = [None] * n
    if request.queries.rows:
        matrix = wire.matrix_from_wire(request.queries, data)
        if len(matrix) != n:
            raise InvalidRequest(f"queries must be as many as questions, {n}, got {len(matrix)}")
        queries = list(shard.check(matrix, request.k, AS_BUILT))
    return list(zip(request.questions, queries, also, strict=True))


def _stacked(rows: list[Candidates]) -> Candidates:
    ids, dense, bm25 = (np.concatenate([getattr(row, name) for row in rows]) for name in ("ids", "dense", "bm25"))
    return Candidates(ids, dense, bm25, rows[0].snapshot_id)
