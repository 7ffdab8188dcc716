"""A gRPC client of the endpoint, for Python. Needs neither torch nor Ray; other languages start from protos/."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import grpc

from openbook.core.types import Decoding, Formulation, OwnPassage
from openbook.errors import InvalidConfig, InvalidRequest, from_grpc_code
from openbook.v1 import answer_pb2
from openbook.v1.answer_pb2 import AnswerEvent, AnswerRequest, AnswerResponse, RetrieveRequest, RetrieveResponse
from openbook.v1.answer_pb2_grpc import AnswerServiceStub

GRACE_S = 1.0
"""How much longer than the server we wait, so that its own, better explained refusal comes first."""


_ENUMS = {"formulation": answer_pb2.Formulation, "decoding": answer_pb2.Decoding}
R = TypeVar("R", AnswerRequest, RetrieveRequest)


class RetrieveOptions(TypedDict, total=False):
    """What a request may ask for; what is left out, or None, takes the server's default."""

    k: int | None
    min_coverage: float | None
    nprobe: int | None
    ef_search: int | None
    rerank_factor: int | None
    without: Sequence[int] | None
    passages: Sequence[OwnPassage] | None
    request_id: str | None


class AnswerOptions(RetrieveOptions, total=False):
    """The fields of AnswerRequest in answer.proto, which says what they mean."""

    formulation: Formulation | None
    decoding: Decoding | None
    n_beams: int | None
    max_new_tokens: int | None
    min_new_tokens: int | None
    length_penalty: float | None
    early_stopping: bool | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    labels: Sequence[str] | None
    n_answers: int | None
    tokens: bool | None
    min_probability: float | None


class Client:
    """A connection to one endpoint, safe to share between threads. Options left out take the server's defaults.

    Args:
        address: host:port.
        timeout_s: within which answers are worth having.
        api_key: who asks, where one is needed.
        tls_ca: who signs the endpoint's certificate, a file in PEM; with none, the connection is plain.
        tls_cert: our own certificate, for an endpoint that asks for one.
        tls_key: of that certificate.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float = 30.0,
        api_key: str | None = None,
        tls_ca: Path | str | None = None,
        tls_cert: Path | str | None = None,
        tls_key: Path | str | None = None,
    ) -> None:
        self._channel = _channel(address, tls_ca, tls_cert, tls_key)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._stub = AnswerServiceStub(self._channel)
        self._timeout_s = timeout_s

    def answer(self, question: str, **options: Unpack[AnswerOptions]) -> AnswerResponse:
        """The answer with its evidence.

        Raises:
            OpenbookError: the one that the server raised.
        """
        with _from_grpc():
            return self._stub.Answer(self._request(question, options), **self._call())

    def stream(self, question: str, **options: Unpack[AnswerOptions]) -> Iterator[AnswerEvent]:
        """The passages, each token as it is decided, the answer: RAG-Token, greedy or sampled. Raises as `answer`."""
        one_by_one: AnswerOptions = {"formulation": Formulation.TOKEN, "n_beams": 1}
        with _from_grpc():
            request = self._request(question, {**options, **one_by_one})
            yield from self._stub.AnswerStream(request, **self._call())

    def retrieve(self, question: str, **options: Unpack[RetrieveOptions]) -> RetrieveResponse:
        """The passages and their prior alone. Raises as `answer`."""
        with _from_grpc():
            request = _filled(RetrieveRequest(question=question, timeout_s=self._timeout_s), options)
            return self._stub.Retrieve(request, **self._call())

    def close(self) -> None:
        """Close the connection; calls under way are cancelled."""
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self) -> dict[str, Any]:
        return {"timeout": self._timeout_s + GRACE_S, "metadata": self._metadata}

    def _request(self, question: str, options: AnswerOptions) -> AnswerRequest:
        return _filled(AnswerRequest(question=question, timeout_s=self._timeout_s), options)


def _channel(
    address: str, ca: Path | str | None, certificate: Path | str | None, key: Path | str | None
) -> grpc.Channel:
    """Raises InvalidConfig: a file cannot be read, or one is missing."""
    if ca is None and certificate is None and key is None:
        return grpc.insecure_channel(address)
    if ca is None or (certificate is None) != (key is None):
        raise InvalidConfig("tls_ca must be given, and tls_cert and tls_key together")
    try:
        files = [None if path is None else Path(path).read_bytes() for path in (ca, key, certificate)]
    except OSError as error:
        raise InvalidConfig(f"{error.filename}: cannot be read: {error.strerror}") from None
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*files))


def _filled(request: R, options: Mapping[str, Any]) -> R:
    """The request with the options that have a value.

    Raises:
        InvalidRequest: a number does not fit in its field.
    """
    for name, value in options.items():
        if isinstance(value, Formulation | Decoding):
            value = _ENUMS[name].Value(f"{name.upper()}_{value.name}")
        if name == "passages" and value is not None:
            value = [answer_pb2.OwnPassage(**asdict(each)) for each in value]
        if value is not None:
            try:
                request.MergeFrom(type(request)(**{name: value}))  # unlike setattr it fills repeated fields too
            except ValueError as error:
                raise InvalidRequest(f"{name} does not fit in its field: {error}, got {value}") from None
    return request


@contextmanager
def _from_grpc() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_grpc_code(error.code().name, error.details() or "") from None
