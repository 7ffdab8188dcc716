"""One question as both protocols serve it: admission, request id, deadline, errors. HTTP and gRPC only translate."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import fields, replace
from time import monotonic
from typing import TypeVar

from openbook.config import Settings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import GenerationSettings, RetrievalSettings
from openbook.errors import InvalidRequest, OpenbookError, Overloaded
from openbook.rag.pipeline import Answer, Pipeline, Retrieval
from openbook.serving.endpoint.schemas import AnswerRequest, Event, RetrieveRequest
from openbook.telemetry import new_request_id, requests

log = logging.getLogger(__name__)

Chosen = TypeVar("Chosen", RetrievalSettings, GenerationSettings)


class AnswerService:
    """Answers through a pipeline; takes no more at once than `serving.max_in_flight` questions, and than
    `serving.max_work_in_flight` of their work."""

    def __init__(self, pipeline: Pipeline, settings: Settings, check_ready: Callable[[], Awaitable[None]]) -> None:
        self._pipeline = pipeline
        self._defaults = settings.answer
        self._max_in_flight = settings.serving.max_in_flight
        self._max_work_in_flight = settings.serving.max_work_in_flight
        self._n_in_flight = self._work_in_flight = 0
        self._check_ready = check_ready
        names = ((address, f"index server {n}") for n, address in enumerate(settings.index.addresses))
        self._index_servers = sorted(names, key=lambda named: -len(named[0]))  # one may be the beginning of another

    async def check_ready(self) -> None:
        """Raises the OpenbookError that keeps us from answering, if one does."""
        try:
            await self._check_ready()
        except OpenbookError as error:
            raise self._told(error) from None

    async def answer(self, request: AnswerRequest, context: Context) -> Answer:
        """Raises as `Pipeline.answer`, and Overloaded. The context's deadline is the request's, from now on."""
        with self._admitted("Answer", context), self._working(request) as asked:
            return await self._pipeline.answer(request.question, *asked, self._in_time(request, context))

    async def stream(self, request: AnswerRequest, context: Context) -> AsyncGenerator[Event]:
        """As `answer`, and raises as `Pipeline.stream`."""
        with self._admitted("AnswerStream", context), self._working(request) as asked:
            events = self._pipeline.stream(request.question, *asked, self._in_time(request, context))
            async with aclosing(events):  # type: ignore[type-var]  # an async generator
                async for event in events:
                    yield event

    async def retrieve(self, request: RetrieveRequest, context: Context) -> Retrieval:
        """As `answer`, and raises as `Pipeline.retrieve`."""
        with self._admitted("Retrieve", context):
            retrieval = _overridden(self._defaults.retrieval(), request)
            return await self._pipeline.retrieve(request.question, retrieval, self._in_time(request, context))

    @contextmanager
    def _admitted(self, method: str, context: Context) -> Iterator[None]:
        """A place among those in flight, for as long as the body runs. Leaves one line in the log, refusals apart."""
        begun = monotonic()
        why, code = "", "CANCELLED"  # what is left when neither a result nor an error of ours ends the body
        try:
            if self._n_in_flight >= self._max_in_flight:
                raise Overloaded(f"{self._max_in_flight} questions are in flight, and no more are admitted")
            self._n_in_flight += 1
            try:
                yield
            finally:
                self._n_in_flight -= 1
            code = "OK"
        except OpenbookError as error:
            code, why = error.grpc_code, f": {error}"
            raise self._told(error) from None
        except Exception:
            code = "INTERNAL"
            raise
        finally:
            requests(method, code).inc()
            level = logging.DEBUG if code == Overloaded.grpc_code else logging.INFO
            log.log(level, "%s %s %.3f s, request id %s%s", method, code, monotonic() - begun, context.request_id, why)

    def _told(self, error: OpenbookError) -> OpenbookError:
        """The error as a caller may hear it: where index servers listen is for the log alone."""
        message = str(error)
        for address, name in self._index_servers:
            message = message.replace(address, name)
        return type(error)(message)

    @contextmanager
    def _working(self, request: AnswerRequest) -> Iterator[tuple[RetrievalSettings, GenerationSettings]]:
        """What is asked for. Its work counts as in flight for as long as the body runs."""
        retrieval = _overridden(self._defaults.retrieval(), request)
        generation = _overridden(self._defaults.generation(), request)
        work = self._pipeline.work(retrieval, generation)
        if self._work_in_flight + work > self._max_work_in_flight:
            limit = f"max_work_in_flight = {self._max_work_in_flight}"
            raise Overloaded(f"work of {self._work_in_flight} is in flight, and {work} more would exceed {limit}")
        self._work_in_flight += work
        try:
            yield retrieval, generation
        finally:
            self._work_in_flight -= work

    def _in_time(self, request: RetrieveRequest, context: Context) -> Context:
        limit_s = self._defaults.max_timeout_s
        timeout_s = self._defaults.timeout_s if request.timeout_s is None else request.timeout_s
        if not timeout_s > 0:  # also refuses NaN
            raise InvalidRequest(f"timeout_s must be above 0 (at most {limit_s} are granted), got {timeout_s}")
        return replace(context, deadline=Deadline.after(min(timeout_s, limit_s)))


def _overridden(defaults: Chosen, request: RetrieveRequest) -> Chosen:
    """The settings with what the request says, which has a field of the same name for each of them."""
    asked = {each.name: getattr(request, each.name) for each in fields(defaults)}
    return replace(defaults, **{name: value for name, value in asked.items() if value is not None})


def with_request_id(context: Context, request_id: str) -> Context:
    """The context under the id that the body of a request gives, else its own, else a new one.

    Raises:
        InvalidRequest: the id is too long, or not of printable ASCII.
    """
    return replace(context, request_id=request_id or context.request_id or new_request_id())


def to_openbook_error(error: Exception, request_id: str) -> OpenbookError:
    """The error as the caller may see it: ours as they are, of others no more than the id to look for in the log."""
    if isinstance(error, OpenbookError):
        return error
    log.error("internal error, request id %s", request_id, exc_info=error)
    return OpenbookError(f"internal error, request id {request_id}")
