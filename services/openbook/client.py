"""A gRPC client of the endpoint, for Python. Needs neither torch nor Ray; other languages start from protos/."""

from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from openbook.core.types import Decoding, Formulation
from openbook.errors import InvalidRequest, from_grpc_code
from openbook.v1.answer_pb2 import AnswerEvent, AnswerRequest, AnswerResponse, RetrieveRequest, RetrieveResponse
from openbook.v1.answer_pb2 import Decoding as WireDecoding
from openbook.v1.answer_pb2 import Formulation as WireFormulation
from openbook.v1.answer_pb2_grpc import AnswerServiceStub

GRACE_S = 1.0
"""How much longer than the server we wait, so that its own, better explained refusal comes first."""


class Client:
    """A connection to one endpoint, safe to share between threads. Options left out take the server's defaults."""

    def __init__(self, address: str, timeout_s: float = 30.0) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = AnswerServiceStub(self._channel)
        self._timeout_s = timeout_s

    def answer(
        self,
        question: str,
        *,
        k: int | None = None,
        formulation: Formulation | None = None,
        decoding: Decoding | None = None,
        n_beams: int | None = None,
        max_new_tokens: int | None = None,
        length_penalty: float | None = None,
        min_coverage: float | None = None,
        request_id: str = "",
    ) -> AnswerResponse:
        """The answer with its evidence.

        Raises:
            OpenbookError: the one that the server raised.
        """
        request = self._request(
            question, k, formulation, decoding, n_beams, max_new_tokens, length_penalty, min_coverage, request_id
        )
        with _our_errors():
            return self._stub.Answer(request, timeout=self._timeout_s + GRACE_S)

    def stream(
        self,
        question: str,
        *,
        k: int | None = None,
        max_new_tokens: int | None = None,
        min_coverage: float | None = None,
        request_id: str = "",
    ) -> Iterator[AnswerEvent]:
        """Greedy RAG-Token: the passages, each token as it is decided, the answer. Raises as `answer`."""
        request = self._request(question, k, Formulation.TOKEN, None, 1, max_new_tokens, None, min_coverage, request_id)
        with _our_errors():
            yield from self._stub.AnswerStream(request, timeout=self._timeout_s + GRACE_S)

    def retrieve(
        self, question: str, *, k: int | None = None, min_coverage: float | None = None, request_id: str = ""
    ) -> RetrieveResponse:
        """The passages and their prior alone. Raises as `answer`."""
        with _our_errors():
            request = RetrieveRequest(
                question=question,
                k=_unsigned("k", k),
                timeout_s=self._timeout_s,
                min_coverage=min_coverage,
                request_id=request_id,
            )
            return self._stub.Retrieve(request, timeout=self._timeout_s + GRACE_S)

    def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _request(
        self,
        question: str,
        k: int | None,
        formulation: Formulation | None,
        decoding: Decoding | None,
        n_beams: int | None,
        max_new_tokens: int | None,
        length_penalty: float | None,
        min_coverage: float | None,
        request_id: str,
    ) -> AnswerRequest:
        return AnswerRequest(
            question=question,
            k=_unsigned("k", k),
            formulation=WireFormulation.Value(f"FORMULATION_{formulation.name if formulation else 'UNSPECIFIED'}"),
            decoding=WireDecoding.Value(f"DECODING_{decoding.name if decoding else 'UNSPECIFIED'}"),
            n_beams=_unsigned("n_beams", n_beams),
            max_new_tokens=_unsigned("max_new_tokens", max_new_tokens),
            length_penalty=length_penalty,
            min_coverage=min_coverage,
            timeout_s=self._timeout_s,
            request_id=request_id,
        )


def _unsigned(name: str, value: int | None) -> int | None:
    if value is not None and not 0 <= value < 2**32:
        raise InvalidRequest(f"{name} must be 0..{2**32 - 1}, got {value}")
    return value


@contextmanager
def _our_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_grpc_code(error.code().name, error.details() or "") from None
