"""Many questions in one call: each is admitted and answered as if it came alone, and all by one deadline."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar

from grpc import StatusCode
from pydantic import BaseModel, Field, SkipValidation

from openbook.core.context import MAX_CHARS, Context
from openbook.errors import InvalidRequest, OpenbookError, Overloaded
from openbook.logs import as_ours
from openbook.rag.answer import Answer
from openbook.serving.endpoint.messages import answer_to_proto
from openbook.serving.endpoint.problems import Problem, name_of, problem_of
from openbook.serving.endpoint.schemas import AnswerRequest, AnswerResponse
from openbook.serving.endpoint.sent import Real, Sent, Text
from openbook.serving.endpoint.service import AnswerService, with_request_id
from openbook.telemetry import requests
from openbook.v1 import answer_pb2

E = TypeVar("E")


class BatchRequest(Sent):
    """Questions, each with fields of its own."""

    # Each is looked at by itself.
    requests: Annotated[list[Annotated[AnswerRequest, SkipValidation]], Field(description="In any order.")]
    timeout_s: Annotated[Real | None, Field(description="Time for all; an entry's own may be shorter.")] = None
    request_id: Annotated[Text, Field(description="Entries without one have this and their number.")] = ""


class BatchResult(BaseModel):
    """Either an answer or an error."""

    answer: AnswerResponse | None = None
    error: Problem | None = None


class BatchResponse(BaseModel):
    """One result a request, in order."""

    results: list[BatchResult]
    request_id: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one of them."""

    request_id: str
    result: Answer | OpenbookError


async def answer_batch(
    service: AnswerService,
    entries: Sequence[E],
    parse: Callable[[E], AnswerRequest],
    timeout_s: float | None,
    context: Context,
) -> list[Outcome]:
    """One outcome an entry, in order. Where `parse` raises InvalidRequest, this entry fails, and no other.

    Raises:
        InvalidRequest: there are none, or more than `serving.max_entries`, or the timeout is none.
    """
    code = InvalidRequest.grpc_code
    try:
        service.check_entries("requests", len(entries))
        context = service.due(timeout_s, context)
        code = "CANCELLED"
        outcomes = await asyncio.gather(*(_one(service, each, parse, n, context) for n, each in enumerate(entries)))
        code = "OK"
        return outcomes
    finally:
        requests("AnswerBatch", code).inc()


def batch_to_json(outcomes: Iterable[Outcome], request_id: str) -> BatchResponse:
    """As HTTP has it."""
    results = [
        BatchResult(error=problem_of(each.result, each.request_id))
        if isinstance(each.result, OpenbookError)
        else BatchResult(answer=AnswerResponse.model_validate(each.result))
        for each in outcomes
    ]
    return BatchResponse(results=results, request_id=request_id)


def batch_to_proto(outcomes: Iterable[Outcome], request_id: str) -> answer_pb2.AnswerBatchResponse:
    """As gRPC has it."""
    results = [
        answer_pb2.BatchResult(error=_error_to_proto(each.result, each.request_id))
        if isinstance(each.result, OpenbookError)
        else answer_pb2.BatchResult(answer=answer_to_proto(each.result))
        for each in outcomes
    ]
    return answer_pb2.AnswerBatchResponse(results=results, request_id=request_id)


async def _one(
    service: AnswerService, entry: E, parse: Callable[[E], AnswerRequest], number: int, context: Context
) -> Outcome:
    request_id = f"{context.request_id[: MAX_CHARS - 8]}.{number}"
    try:
        request = parse(entry)
        context = with_request_id(context, request.request_id or request_id)
        request_id = context.request_id
        return Outcome(request_id, await service.answer(request, context))
    except Exception as error:
        return Outcome(request_id, as_ours(error, request_id))


def _error_to_proto(error: OpenbookError, request_id: str) -> answer_pb2.BatchError:
    return answer_pb2.BatchError(
        code=StatusCode[error.grpc_code].value[0],
        message=str(error),
        request_id=request_id,
        retry_after_s=error.retry_after_whole_s if isinstance(error, Overloaded) else None,
        name=name_of(error),
    )
