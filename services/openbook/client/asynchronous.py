"""The client for an event loop."""

from collections.abc import AsyncIterator, Sequence
from typing import Self, Unpack

from grpc import aio

from openbook.client import messages
from openbook.client.connection import Connection, ConnectionOptions, errors
from openbook.client.messages import AnswerOptions, RetrieveOptions
from openbook.errors import OpenbookError
from openbook.rag.answer import Answer, Event, Excerpt, Retrieval
from openbook.v1.answer_pb2 import AnswerRequest, RetrieveRequest
from openbook.v1.answer_pb2_grpc import AnswerServiceStub


class AsyncClient:
    """As `Client`, for one event loop and any number of its tasks. A task that is cancelled cancels its call."""

    def __init__(
        self,
        address: str,
        timeout_s: float = 30.0,
        api_key: str | None = None,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        self._connection = Connection(address, timeout_s, api_key, **options)
        self._channel = self._connection.channel(aio)
        self._stub = AnswerServiceStub(self._channel)

    async def answer(self, question: str, **options: Unpack[AnswerOptions]) -> Answer:
        """As `Client.answer`."""
        request = messages.request(AnswerRequest, question, self._connection.timeout_s, options)
        with errors():
            return messages.answer(await self._stub.Answer(request, **self._connection.call()))

    async def answer_batch(
        self, questions: Sequence[str], **options: Unpack[AnswerOptions]
    ) -> list[Answer | OpenbookError]:
        """As `Client.answer_batch`."""
        request = messages.batch(questions, self._connection.timeout_s, options)
        with errors():
            return messages.outcomes(await self._stub.AnswerBatch(request, **self._connection.call()))

    async def stream(self, question: str, **options: Unpack[AnswerOptions]) -> AsyncIterator[Event]:
        """As `Client.stream`. Closed early (`contextlib.aclosing`), it ends the call."""
        request = messages.request(AnswerRequest, question, self._connection.timeout_s, messages.one_by_one(options))
        with errors():
            call = self._stub.AnswerStream(request, **self._connection.call())
            try:
                async for part in call:
                    yield messages.event(part)
            finally:
                call.cancel()  # gRPC goes on for who only stops to read; of a call that has ended nothing is left to do

    async def retrieve(self, question: str, **options: Unpack[RetrieveOptions]) -> Retrieval:
        """As `Client.retrieve`."""
        request = messages.request(RetrieveRequest, question, self._connection.timeout_s, options)
        with errors():
            return messages.retrieval(await self._stub.Retrieve(request, **self._connection.call()))

    async def passage(self, passage_id: str | int, around: int = 0, snapshot_id: str = "") -> Excerpt:
        """As `Client.passage`."""
        request = messages.passage_request(passage_id, around, snapshot_id, self._connection.timeout_s)
        with errors():
            return messages.excerpt(await self._stub.GetPassage(request, **self._connection.call()))

    async def aclose(self) -> None:
        """Close the connection; calls under way are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()
