"""The client for threads."""

from collections.abc import Iterator, Sequence
from typing import Self, Unpack

import grpc

from openbook.client import messages
from openbook.client.connection import Connection, ConnectionOptions, errors
from openbook.client.messages import AnswerOptions, RetrieveOptions
from openbook.errors import OpenbookError
from openbook.rag.answer import Answer, Event, Excerpt, Retrieval
from openbook.v1.answer_pb2 import AnswerRequest, RetrieveRequest
from openbook.v1.answer_pb2_grpc import AnswerServiceStub


class Client:
    """A connection to one endpoint, safe to share between threads. Options left out take the server's defaults.

    What fails because nobody answers, or there is no place, is tried again within `timeout_s` and a budget of retries.

    Raises:
        InvalidConfig: the address is not host:port, `timeout_s` is none, no header holds the key, or a file of TLS
            cannot be read.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = 30.0,
        api_key: str | None = None,
        **options: Unpack[ConnectionOptions],
    ) -> None:
        self._connection = Connection(address, timeout_s, api_key, **options)
        self._channel = self._connection.channel(grpc)
        self._stub = AnswerServiceStub(self._channel)

    def answer(self, question: str, **options: Unpack[AnswerOptions]) -> Answer:
        """The answer with its evidence.

        Raises:
            OpenbookError: the one that the server raised.
        """
        request = messages.request(AnswerRequest, question, self._connection.timeout_s, options)
        with errors():
            return messages.answer(self._stub.Answer(request, **self._connection.call()))

    def answer_batch(self, questions: Sequence[str], **options: Unpack[AnswerOptions]) -> list[Answer | OpenbookError]:
        """Of each question its answer, or why it has none; in their order, within `timeout_s` for all. Raises as
        `answer`."""
        request = messages.batch(questions, self._connection.timeout_s, options)
        with errors():
            return messages.outcomes(self._stub.AnswerBatch(request, **self._connection.call()))

    def stream(self, question: str, **options: Unpack[AnswerOptions]) -> Iterator[Event]:
        """The passages, the answer's tokens, the answer. Raises as `answer`.

        Without other options it is RAG-Token with one beam, whose tokens come as they are decided.
        """
        request = messages.request(AnswerRequest, question, self._connection.timeout_s, messages.one_by_one(options))
        with errors():
            yield from map(messages.event, self._stub.AnswerStream(request, **self._connection.call()))

    def retrieve(self, question: str, **options: Unpack[RetrieveOptions]) -> Retrieval:
        """The passages and their prior alone. Raises as `answer`."""
        request = messages.request(RetrieveRequest, question, self._connection.timeout_s, options)
        with errors():
            return messages.retrieval(self._stub.Retrieve(request, **self._connection.call()))

    def passage(self, passage_id: str | int, around: int = 0, snapshot_id: str = "") -> Excerpt:
        """A passage by its lasting id or its number, and at most `around` before it and behind it in its document.

        A number is of `snapshot_id`; of the one that is searched now if none is named. Raises as `answer`.
        """
        request = messages.passage_request(passage_id, around, snapshot_id, self._connection.timeout_s)
        with errors():
            return messages.excerpt(self._stub.GetPassage(request, **self._connection.call()))

    def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
