"""One question as both protocols serve it: admission, request id, deadline, errors. HTTP and gRPC only translate."""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import fields, replace

from openbook.config import Settings
from openbook.core.deadline import Deadline
from openbook.core.types import GenerationSettings
from openbook.errors import InvalidRequest, OpenbookError, Overloaded
from openbook.rag.pipeline import Answer, Pipeline, Retrieval
from openbook.serving.schemas import AnswerRequest, Event, RetrieveRequest
from openbook.telemetry import new_request_id, requests

log = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 128


class AnswerService:
    """Answers through a pipeline, and takes no more than `serving.max_in_flight` questions at once."""

    def __init__(self, pipeline: Pipeline, settings: Settings, check_ready: Callable[[], Awaitable[None]]) -> None:
        self._pipeline = pipeline
        self._defaults = settings.answer
        self._max_in_flight = settings.serving.max_in_flight
        self._n_in_flight = 0
        self.check_ready = check_ready
        """Raises the OpenbookError that keeps us from answering, if one does."""

    async def answer(self, request: AnswerRequest, request_id: str) -> Answer:
        """Raises as `Pipeline.answer`, and Overloaded."""
        with self._admitted("Answer"):
            settings, deadline = self._generation_settings(request), self._deadline(request)
            return await self._pipeline.answer(
                request.question, request.k, settings, deadline, request_id, request.min_coverage
            )

    async def stream(self, request: AnswerRequest, request_id: str) -> AsyncGenerator[Event]:
        """Raises as `Pipeline.stream`, and Overloaded."""
        with self._admitted("AnswerStream"):
            settings, deadline = self._generation_settings(request), self._deadline(request)
            events = self._pipeline.stream(
                request.question, request.k, settings, deadline, request_id, request.min_coverage
            )
            async with aclosing(events):  # type: ignore[type-var]  # an async generator
                async for event in events:
                    yield event

    async def retrieve(self, request: RetrieveRequest, request_id: str) -> Retrieval:
        """Raises as `Pipeline.retrieve`, and Overloaded."""
        with self._admitted("Retrieve"):
            deadline = self._deadline(request)
            return await self._pipeline.retrieve(
                request.question, request.k, deadline, request_id, request.min_coverage
            )

    @contextmanager
    def _admitted(self, method: str) -> Iterator[None]:
        """A place among those in flight, for as long as the body runs."""
        code = "CANCELLED"  # what is left when neither a result nor an error of ours ends the body
        try:
            if self._n_in_flight >= self._max_in_flight:
                raise Overloaded(f"{self._max_in_flight} questions are in flight, and no more are admitted")
            self._n_in_flight += 1
            try:
                yield
            finally:
                self._n_in_flight -= 1
            code = "OK"
        except Exception as error:
            code = error.grpc_code if isinstance(error, OpenbookError) else "INTERNAL"
            raise
        finally:
            requests(method, code).inc()

    def _deadline(self, request: RetrieveRequest) -> Deadline:
        limit_s = self._defaults.max_timeout_s
        timeout_s = self._defaults.timeout_s if request.timeout_s is None else request.timeout_s
        if not timeout_s > 0:  # also refuses NaN
            raise InvalidRequest(f"timeout_s must be above 0 (at most {limit_s} are granted), got {timeout_s}")
        return Deadline.after(min(timeout_s, limit_s))

    def _generation_settings(self, request: AnswerRequest) -> GenerationSettings:
        names = (field.name for field in fields(GenerationSettings))
        asked = {name: value for name in names if (value := getattr(request, name)) is not None}
        return replace(self._defaults.generation(), **asked)


def check_request_id(request_id: str) -> str:
    """The id, or a new one for an empty one. It goes into logs and headers, so it must be harmless there.

    Raises:
        InvalidRequest: it is too long, or not of printable ASCII.
    """
    if len(request_id) > MAX_REQUEST_ID_CHARS or not (request_id.isascii() and request_id.isprintable()):
        raise InvalidRequest(f"request_id must have 1..{MAX_REQUEST_ID_CHARS} printable ASCII characters")
    return request_id or new_request_id()


def to_openbook_error(error: Exception, request_id: str) -> OpenbookError:
    """The error as the caller may see it: ours as they are, of others no more than the id to look for in the log."""
    if isinstance(error, OpenbookError):
        return error
    log.error("internal error, request id %s", request_id, exc_info=error)
    return OpenbookError(f"internal error, request id {request_id}")
