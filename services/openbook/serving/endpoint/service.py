"""One question as both protocols serve it: admission, request id, deadline, errors. HTTP and gRPC only translate."""

import logging
import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from copy import copy
from dataclasses import fields, replace
from functools import lru_cache, partial
from time import monotonic
from typing import TypeVar

from openbook.config import Settings
from openbook.core.context import NEVER, Context
from openbook.core.deadline import Deadline
from openbook.core.types import Float32, GenerationSettings, OwnPassage, ReplySettings, RetrievalSettings, check_weight
from openbook.errors import InvalidRequest, OpenbookError, Overloaded
from openbook.logs import about, shows_questions
from openbook.rag.answer import Answer, Event, Excerpt, Retrieval
from openbook.rag.pipeline import BARE, Pipeline
from openbook.serving.access.quotas import Quotas
from openbook.serving.endpoint.admission import Admission
from openbook.serving.endpoint.schemas import AnswerRequest, PassageRequest, RetrieveRequest
from openbook.telemetry import IN_FLIGHT, REQUEST_SECONDS, WORK_IN_FLIGHT, WORK_PER_SECOND, new_request_id, requests
from openbook.tracing.spans import span

log = logging.getLogger(__name__)

Chosen = TypeVar("Chosen", RetrievalSettings, GenerationSettings, ReplySettings)

FAILURES = ("INTERNAL", "UNAVAILABLE")
"""Codes that say more of who answers than of who asks."""
FAILING_S = 1.0
"""After one of them."""

RESOLVED = r"\bipv4:[\d.]+:\d+|\bipv6:(?:\[|%5B)[^\s\]]*?(?:\]|%5D):\d+"
"""Addresses as gRPC's errors name them, whatever host name the server was asked by."""


class AnswerService:
    """Answers through a pipeline, whatever `Admission` lets in and `Quotas` grant.

    `load` gives the seconds that a generator in this process needs for all that it has, and for one question more.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        settings: Settings,
        check_ready: Callable[[], Awaitable[None]],
        quotas: Quotas | None = None,
        index_servers: Callable[[], Sequence[str]] | None = None,
        load: Callable[[], tuple[float, float]] | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._quotas = quotas or Quotas(None)
        self.settings = settings
        self._defaults = settings.answer
        self._admission = Admission(settings.serving.max_in_flight, settings.serving.max_work_in_flight, monotonic)
        for gauge, name in (
            (IN_FLIGHT, "n_in_flight"),
            (WORK_IN_FLIGHT, "work_in_flight"),
            (WORK_PER_SECOND, "work_per_second"),
        ):
            gauge.set_function(partial(getattr, self._admission, name))
        self._load = load
        self._failed_at = -math.inf
        self._check_ready = check_ready
        self._index_servers = index_servers or (lambda: settings.index.addresses)

    async def check_ready(self) -> None:
        """Raises the OpenbookError that keeps us from answering, if one does."""
        try:
            await self._check_ready()
        except OpenbookError as error:
            raise self._told(error) from None

    def load(self) -> tuple[float, float] | None:
        """As given. None without such a generator, and where a question has just failed: who fails at once has nothing
        to do, and would be asked all.
        """
        is_well = monotonic() > self._failed_at + FAILING_S
        return self._load() if self._load and is_well else None

    async def answer(self, request: AnswerRequest, context: Context) -> Answer:
        """Raises as `Pipeline.answer`, Overloaded, QuotaExceeded. The context's deadline is the request's, from now on.

        Who gets no place is charged nothing, nor is who hears that a model or a shard has none.
        """
        with self._served("Answer", request.question, request.timeout_s, context) as context:
            retrieval, generation, reply, own = self._asked_for(request)
            with self._admission.admitted(context, self._pipeline.work(retrieval, generation, len(own))):
                async with self._quotas.charged(context.caller, n_tokens=tokens_of(generation)):
                    return await self._pipeline.answer(request.question, retrieval, generation, context, reply, own)

    async def stream(self, request: AnswerRequest, context: Context) -> AsyncGenerator[Event]:
        """As `answer`, and raises as `Pipeline.stream`."""
        with self._served("AnswerStream", request.question, request.timeout_s, context) as context:
            retrieval, generation, reply, own = self._asked_for(request)
            with self._admission.admitted(context, self._pipeline.work(retrieval, generation, len(own))):
                async with self._quotas.charged(context.caller, n_tokens=tokens_of(generation)):
                    events = self._pipeline.stream(request.question, retrieval, generation, context, reply, own)
                    async with aclosing(events):  # type: ignore[type-var]  # an async generator
                        async for event in events:
                            yield event

    async def retrieve(self, request: RetrieveRequest, context: Context) -> Retrieval:
        """As `answer`, and raises as `Pipeline.retrieve`."""
        with self._served("Retrieve", request.question, request.timeout_s, context) as context:
            retrieval = self._retrieval(request)
            with self._admission.admitted(context):
                async with self._quotas.charged(context.caller):
                    return await self._pipeline.retrieve(request.question, retrieval, context, _own(request))

    @property
    def dimension(self) -> int:
        """Of the queries that `embed` gives."""
        return self._pipeline.dimension

    async def embed(self, texts: Sequence[str], timeout_s: float | None, context: Context) -> Float32:
        """(n, d) queries of as many texts as there may be. As `answer`, and raises as `Pipeline.embed`."""
        with self._served("Embed", "; ".join(texts), timeout_s, context) as context:
            self.check_entries("input", len(texts))
            with self._admission.admitted(context):
                async with self._quotas.charged(context.caller, len(texts)):
                    return await self._pipeline.embed(texts, context)

    async def excerpt(self, request: PassageRequest, context: Context) -> Excerpt:
        """A passage in its document. As `answer`, and raises as `Pipeline.excerpt`."""
        with self._served("GetPassage", "", request.timeout_s, context) as context, self._admission.admitted(context):
            async with self._quotas.charged(context.caller):
                return await self._pipeline.excerpt(request.id, request.around or 0, request.snapshot_id, context)

    def check_entries(self, name: str, n: int) -> None:
        """Raises InvalidRequest: `name` has none, or more than one call may have."""
        at_most = self.settings.serving.max_entries
        if not 1 <= n <= at_most:
            raise InvalidRequest(f"{name} must be 1..{at_most} (serving.max_entries), got {n}")

    def due(self, timeout_s: float | None, context: Context) -> Context:
        """The context with a deadline: so much time from now, cut to the limit, and not after the one that it has.

        Raises:
            InvalidRequest: it is no time.
        """
        limit_s = self._defaults.max_timeout_s
        if timeout_s is None:
            timeout_s = self._defaults.timeout_s if context.deadline == NEVER else limit_s
        if not timeout_s > 0:  # also refuses NaN
            raise InvalidRequest(f"timeout_s must be above 0 (at most {limit_s} are granted), got {timeout_s}")
        return replace(context, deadline=Deadline.after(min(timeout_s, limit_s, context.deadline.remaining_s())))

    @contextmanager
    def _served(self, method: str, question: str, timeout_s: float | None, context: Context) -> Iterator[Context]:
        """Errors as callers may hear them, counted. One line in the log, refusals apart; of the question, and of errors
        that may quote what was asked, only with OPENBOOK_LOG_QUESTIONS=1. The context is for what serves it.
        """
        begun = monotonic()
        why, code = "", "CANCELLED"  # what is left when neither a result nor an error of ours ends the body
        recorded = span(method, context, "server")
        try:
            with recorded as inner:
                yield self.due(timeout_s, inner)
            code = "OK"
        except OpenbookError as error:
            code = error.grpc_code
            if shows_questions() or not isinstance(error, InvalidRequest):
                why = f": {error}"
            raise self._told(error) from None
        except Exception:
            code = "INTERNAL"
            raise
        finally:
            if code in FAILURES:
                self._failed_at = monotonic()
            requests(method, code).inc()
            level, seconds = logging.DEBUG if code == Overloaded.grpc_code else logging.INFO, monotonic() - begun
            if code == "OK":
                REQUEST_SECONDS.labels(method).observe(seconds)
            found = {"method": method, "code": code, "seconds": round(seconds, 6)}
            if shows_questions():
                found["question"] = question
                why += f"; asked {question!r}"
            asked_by = f", caller {context.caller}" if context.caller else ""
            text = f"{method} {code} {seconds:.3f} s, request id {context.request_id}{asked_by}{why}"
            log.log(level, "%s", text, extra=about(recorded.context, **found))

    def _told(self, error: OpenbookError) -> OpenbookError:
        """The error as a caller may hear it: where index servers listen is for the log alone."""
        known, names = _known(tuple(self._index_servers()))
        told = copy(error)  # with all that it carries
        told.args = (known.sub(lambda at: names.get(at[0], "its address"), str(error)),)
        return told

    def _retrieval(self, request: RetrieveRequest) -> RetrievalSettings:
        retrieval = _overridden(self._defaults.retrieval(), request)
        check_weight(request.bm25_weight, retrieval.retriever)  # a weight by default waits for who fuses
        return retrieval

    def _asked_for(
        self, request: AnswerRequest
    ) -> tuple[RetrievalSettings, GenerationSettings, ReplySettings, list[OwnPassage]]:
        retrieval = self._retrieval(request)
        generation = _overridden(self._defaults.generation(), request)
        return retrieval, generation, _overridden(BARE, request), _own(request)


@lru_cache(maxsize=1)  # with many servers it takes a millisecond, and every error asks
def _known(named: tuple[str, ...]) -> tuple[re.Pattern[str], dict[str, str]]:
    """Where index servers listen, as it may stand in an error, and what each address is called in its place."""
    names = {address: f"index server {n}" for n, address in enumerate(named) if ":" in address}
    hosts = {address.rpartition(":")[0].strip("[]") or address for address in named}  # gRPC tells of them alone too
    told_apart = {host for host in hosts if not host.isdecimal() and not host.isalpha()}  # others may be any word
    words = "|".join(map(re.escape, sorted({*names, *told_apart}, key=len, reverse=True))) or "(?!)"  # none
    return re.compile(rf"{RESOLVED}|(?<![\w.-])(?:{words})(?!\.?[\w-])", re.IGNORECASE), names


def _overridden(defaults: Chosen, request: RetrieveRequest) -> Chosen:
    """The settings with what the request says, which has a field of the same name for each of them."""
    asked = {each.name: getattr(request, each.name) for each in fields(defaults)}
    return replace(defaults, **{name: value for name, value in asked.items() if value is not None})


def _own(request: RetrieveRequest) -> list[OwnPassage]:
    return [OwnPassage(**dict(each)) for each in request.passages or ()]


def tokens_of(generation: GenerationSettings) -> int:
    """As quotas count them: as many as may be asked for, of all answers together."""
    return generation.max_new_tokens * generation.n_answers


def with_request_id(context: Context, request_id: str) -> Context:
    """The context under the id that the body of a request gives, else its own, else a new one.

    Raises:
        InvalidRequest: the id is too long, or not of printable ASCII.
    """
    return replace(context, request_id=request_id or context.request_id or new_request_id())
