"""Questions over gRPC."""

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import cycle
from math import isnan
from time import monotonic
from typing import TYPE_CHECKING, Any

import grpc.aio

from openbook import certificates, wire
from openbook.loadtest.kinds import What
from openbook.loadtest.outcomes import BROKEN, NAN, OK, Reply
from openbook.loadtest.senders import CONNECT_TIMEOUT_S, Unreachable, about, digest, options, who_asks
from openbook.loadtest.settings import GRACE_S, LoadSettings
from openbook.processes import is_here
from openbook.v1 import answer_pb2
from openbook.v1.answer_pb2 import AnswerEvent, AnswerRequest, AnswerResponse, RetrieveRequest, RetrieveResponse
from openbook.v1.answer_pb2_grpc import AnswerServiceStub

if TYPE_CHECKING:
    from openbook.v1.answer_pb2_grpc import AnswerServiceAsyncStub

SERVICE = answer_pb2.DESCRIPTOR.services_by_name["AnswerService"].full_name
METHODS = {What.ANSWER: "Answer", What.STREAM: "AnswerStream", What.RETRIEVE: "Retrieve"}

# Channels to one address would share one connection, on which a proxy lets no more than 100 calls be in flight. And
# they would wait for up to two minutes before they try an endpoint again that was gone, which it would be blamed for.
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),  # what one attempt may take
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.max_receive_message_length", -1),  # a reply of many passages is no fault of the endpoint's
)


@asynccontextmanager
async def opened(settings: LoadSettings, questions: Sequence[str]) -> AsyncIterator["GrpcSender"]:
    """Connected, on all connections. Raises InvalidConfig, Unreachable."""
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(_channel(settings)) for _ in range(settings.connections)]
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.gather(*(channel.channel_ready() for channel in channels))
        except TimeoutError:
            nobody = f"{settings.address}: no gRPC server answers within {CONNECT_TIMEOUT_S:g} s"
            raise Unreachable(f"{nobody}: {await _why(channels[0])}") from None
        await _greet(channels[0], settings)
        yield GrpcSender(channels, settings, questions)


def _channel(settings: LoadSettings) -> grpc.aio.Channel:
    address = settings.address.removeprefix("grpcs://")
    how = (*OPTIONS, ("grpc.enable_http_proxy", int(not is_here(address))))
    if not settings.is_tls:
        return grpc.aio.insecure_channel(address, how)
    trusted = certificates.load("tls_ca", authorities=settings.tls_ca).authorities or certificates.trusted()
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(trusted), how)


async def _why(channel: grpc.aio.Channel) -> str:
    """What gRPC says of its last attempt to connect, which it says of calls alone."""
    call: Any = channel.unary_unary("/")
    try:
        await call(b"", timeout=2.0)  # longer than an attempt
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
            return error.details() or error.code().name
    return "it answers now"


async def _greet(channel: grpc.aio.Channel, settings: LoadSettings) -> None:
    """Pass where questions would find who knows them, whatever is said of an empty one. As over HTTP, one that says
    nothing is reached. Raises Unreachable.
    """
    ask: Any = channel.unary_unary(f"/{SERVICE}/{METHODS[settings.what]}")
    try:
        await ask(b"", metadata=tuple(who_asks(settings).items()), timeout=CONNECT_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        details = error.details() or ""
        if wire.OTHERS.search(details):
            port = "is that an endpoint's gRPC port (HTTP needs http:// in front), or one of another version"
            raise Unreachable(f"{settings.address}: {details}; {port}, or does a proxy refuse?") from None


class GrpcSender:
    """Without a timeout of gRPC's: what the endpoint makes of the deadline that the request states is measured."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], settings: LoadSettings, questions: Sequence[str]) -> None:
        self._stubs = cycle([AnswerServiceStub(channel) for channel in channels])
        self._questions = questions
        self._metadata = tuple(who_asks(settings).items())
        self._check = settings.check
        self._read_on_s = settings.timeout_s + GRACE_S / 2  # sooner than the question is taken for a hang
        asked = options(settings)
        for name, enum in (("formulation", answer_pb2.Formulation), ("decoding", answer_pb2.Decoding)):
            if name in asked:
                asked[name] = enum.Value(f"{name.upper()}_{asked[name].upper()}")
        is_retrieve = settings.what is What.RETRIEVE
        self._answers = [] if is_retrieve else [AnswerRequest(question=each, **asked) for each in questions]
        self._retrieves = [RetrieveRequest(question=each, **asked) for each in questions] if is_retrieve else []
        self._ask = {What.ANSWER: self._answer, What.RETRIEVE: self._retrieve, What.STREAM: self._stream}[settings.what]

    async def send(self, number: int) -> Reply:
        try:
            return await self._ask(number, next(self._stubs))
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            return Reply(code, code, error.details() or "")

    async def _answer(self, number: int, stub: "AnswerServiceAsyncStub") -> Reply:
        return self._reply(number, await stub.Answer(self._answers[number], metadata=self._metadata))

    async def _retrieve(self, number: int, stub: "AnswerServiceAsyncStub") -> Reply:
        return self._reply(number, await stub.Retrieve(self._retrieves[number], metadata=self._metadata))

    async def _stream(self, number: int, stub: "AnswerServiceAsyncStub") -> Reply:
        read_on_until = asyncio.get_running_loop().time() + self._read_on_s
        first = NAN
        call = stub.AnswerStream(self._answers[number], metadata=self._metadata)
        async for event in call:
            kind = event.WhichOneof("event")
            if isnan(first) and kind != "retrieved":
                first = monotonic()
            if kind == "answer":
                reply = self._reply(number, event.answer, first)._replace(done=monotonic())
                await _read_on(call, read_on_until)
                return reply
        return Reply(BROKEN, OK, "the stream ended without an answer")

    def _reply(self, number: int, response: AnswerResponse | RetrieveResponse, first: float = NAN) -> Reply:
        if not self._check:
            return Reply(OK, OK, "", first)
        ids = [each.passage.id for each in response.evidence]
        numbers = [value for each in response.evidence for value in (each.score, each.log_prior)]
        text = response.answer if isinstance(response, AnswerResponse) else ""
        key = about(self._questions[number], response.snapshot_id, response.coverage.missing_shards)
        return Reply(OK, OK, "", first, key, digest(self._check, text, ids, numbers))


async def _read_on(call: AsyncIterable[AnswerEvent], until: float) -> None:
    """To the end of a stream of which all is known: left before, it is one that its caller cancelled."""
    with suppress(grpc.aio.AioRpcError, TimeoutError):
        async with asyncio.timeout_at(until):
            async for _ in call:
                pass
