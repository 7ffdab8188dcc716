"""Both faces of the endpoint without Ray: whatever comes in, what goes out is an answer or an error of ours."""

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from ray.serve._private.grpc_util import DEFAULT_GRPC_SERVER_OPTIONS, start_grpc_server
from ray.serve.config import gRPCOptions
from ray.serve.grpc_util import RayServegRPCContext
from small_endpoint import FastGenerator

from openbook import wire
from openbook.cache.memory import MemoryCache
from openbook.config import Limits, Settings, parse
from openbook.core.context import NEVER, Context
from openbook.core.types import Float32, Generation, GenerationSettings, Hits, Passage, RetrievalSettings, Retrieved
from openbook.errors import OpenbookError, Overloaded, ShardUnavailable
from openbook.index.client.client import from_grpc
from openbook.index.client.sharded import ShardedIndex
from openbook.processes import free_port
from openbook.rag.pipeline import Pipeline
from openbook.serving.access.gate import Gate
from openbook.serving.endpoint.http import build_app
from openbook.serving.endpoint.ingress import AnswerIngress
from openbook.serving.endpoint.schemas import AnswerRequest, PassageRequest, RetrieveRequest
from openbook.serving.endpoint.service import AnswerService
from openbook.serving.endpoint.status import MAX_BYTES
from openbook.testing import EchoGenerator, ExactIndex, HashEncoder, ManualClock
from openbook.v1 import answer_pb2

PASSAGES = [Passage(0, "a", "A", "Bell patented the telephone"), Passage(1, "b", "B", "Curie was born in Warsaw")]
SETTINGS = parse({"answer": {"k": 2}})


class GrpcContext(RayServegRPCContext):
    """What Serve hands to a gRPC method."""

    def __init__(self, **metadata: str) -> None:
        self._invocation_metadata = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        self._trailing_metadata = [("request_id", "serves")]
        self.code: grpc.StatusCode | None = None
        self.details = ""

    @property
    def trailing(self) -> dict[str, str]:
        found = dict(self.trailing_metadata())
        assert len(found) == len(self.trailing_metadata())
        return found

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


async def ready() -> None:
    """Nothing is wrong."""


def service(
    settings: Settings = SETTINGS,
    check_ready: Callable[[], Any] = ready,
    missing_shards: tuple[int, ...] = (),
    index_servers: Callable[[], Sequence[str]] | None = None,
    load: Callable[[], tuple[float, float]] | None = None,
) -> AnswerService:
    encoder = HashEncoder()
    index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES), n_shards=2)
    index.missing_shards.update(missing_shards)
    pipeline = Pipeline(encoder, index, index, FastGenerator(), MemoryCache(10), settings.answer)
    return AnswerService(pipeline, settings, check_ready, index_servers=index_servers, load=load)


def request(method: str, path: str, under_test: AnswerService | None = None, **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(under_test or service()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def post(body: bytes) -> httpx.Response:
    return request("POST", "/v1/answer", content=body, headers={"content-type": "application/json"})


def answer(data: bytes) -> tuple[answer_pb2.AnswerResponse | None, GrpcContext]:
    context = GrpcContext()
    response = asyncio.run(AnswerIngress(service()).Answer(data, context))
    return None if context.code else response, context  # Serve takes the code from the context


def refused(response: httpx.Response) -> bool:
    """Whether it is an error; then one of ours."""
    if response.status_code == 200:
        return False
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    # 504 for a timeout too short for anything
    assert (problem["status"], problem["code"]) in [(400, "INVALID_ARGUMENT"), (504, "DEADLINE_EXCEEDED")]
    assert problem["status"] == response.status_code
    assert problem["detail"]
    assert problem["request_id"]
    return True


def check(answer: dict[str, Any], asked: dict[str, Any]) -> None:
    """That an answer is one to what was asked, as JSON says either."""
    given = {name: value for name, value in asked.items() if value is not None}
    evidence = answer["evidence"]
    assert len(evidence) == min(given.get("k", 2), len(PASSAGES))
    assert sorted((each["score"] for each in evidence), reverse=True) == [each["score"] for each in evidence]
    assert sum(math.exp(each["log_prior"]) for each in evidence) == pytest.approx(1)
    assert {each["passage"]["text"] for each in evidence} <= {passage.text for passage in PASSAGES}
    assert answer["formulation"] == given.get("formulation", "sequence")
    assert answer["decoding"] == given.get("decoding", "thorough")
    assert answer["request_id"] == given.get("request_id") or len(answer["request_id"]) == 16
    assert [label["text"] for label in answer["labels"]] == list(given.get("labels", ()))
    words = evidence[0]["passage"]["text"].split()[: given.get("max_new_tokens")]
    assert answer["answer"] in (given.get("labels") or [" ".join(words)])
    assert answer["complete"]


@settings(max_examples=60)
@given(st.binary(max_size=60))
def test_no_bytes_break_http(body: bytes) -> None:
    assert refused(post(body))


NAMES = tuple(AnswerRequest.model_fields)
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=5)
    | st.sampled_from(["sequence", "token", "fast", "thorough"])
    | st.lists(st.integers(), max_size=2)
    | st.lists(st.text(st.characters(codec=None), max_size=2), max_size=3)
)


PLAUSIBLE = st.fixed_dictionaries(
    {"question": st.sampled_from(["who", "who patented the telephone?"])},
    optional={
        "k": st.integers(1, 3),
        "formulation": st.sampled_from(["sequence", "token"]),
        "decoding": st.sampled_from(["fast", "thorough"]),
        "max_new_tokens": st.integers(1, 3),
        "labels": st.lists(st.sampled_from("abc"), min_size=1, unique=True),
        "request_id": st.just("mine"),
        "min_coverage": st.floats(0.1, 1),
    },
)


def test_no_json_breaks_http() -> None:
    answered = 0  # a service that refuses all of it would not break either

    @settings(max_examples=150)
    @given(
        PLAUSIBLE,
        st.dictionaries(st.sampled_from(NAMES) | st.text(st.characters(codec=None), max_size=3), VALUES, max_size=3),
    )
    def ask(plausible: dict[str, Any], fields: dict[str, Any]) -> None:
        nonlocal answered
        asked = {**plausible, **fields}
        response = post(json.dumps(asked).encode())
        if not refused(response):
            check(response.json(), asked)
            answered += 1

    ask()
    assert answered >= 10, answered


def plain(message: Message) -> dict[str, Any]:
    """A request or an answer of gRPC's as HTTP would have it."""
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    for name in ("formulation", "decoding"):
        kind, _, value = fields[name].lower().partition("_")
        fields[name] = None if value == "unspecified" else value
        assert kind == name
    return fields


def test_no_bytes_break_grpc() -> None:
    answered = 0

    @settings(max_examples=150)
    @given(PLAUSIBLE, st.binary(max_size=40))
    def ask(plausible: dict[str, Any], end: bytes) -> None:
        nonlocal answered
        enums = {name: f"{name}_{plausible[name]}".upper() for name in ("formulation", "decoding") if name in plausible}
        begin = answer_pb2.AnswerRequest(**{**plausible, **enums}).SerializeToString()
        response, context = answer(begin + end)
        if response is None:
            assert context.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DEADLINE_EXCEEDED)
            assert context.details
        else:
            check(plain(response), plain(answer_pb2.AnswerRequest.FromString(begin + end)))
            answered += 1

    ask()
    assert answered >= 10, answered


def test_who_is_refused_for_want_of_time_hears_when_to_come_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "openbook")
    under_test = service()

    async def overloaded(*anything: object) -> None:
        raise Overloaded("generator: would be done in 7.2 s", retry_after_s=2.2)

    under_test._pipeline.answer = overloaded  # type: ignore[method-assign,assignment]
    reply = request("POST", "/v1/answer", under_test, json={"question": "who"})
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "3")
    context = GrpcContext()
    for timeout_s, pushback_ms in ((None, 2200), (12, 2200), (10, -1)):  # by itself, where that is not too late
        asked = answer_pb2.AnswerRequest(question="who", timeout_s=timeout_s)
        asyncio.run(AnswerIngress(under_test).Answer(asked.SerializeToString(), context))
        assert (context.code, context.trailing["retry-after"]) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "3")
        assert context.trailing["grpc-retry-pushback-ms"] == str(pushback_ms)
    assert caplog.messages == []  # a flood would fill the log


def test_over_grpc_an_error_has_its_name_and_is_no_longer_than_callers_take() -> None:
    under_test = service()

    async def gone(*anything: object) -> None:
        raise ShardUnavailable("x" * 20_000)

    under_test._pipeline.answer = gone  # type: ignore[method-assign,assignment]
    context = GrpcContext()
    asyncio.run(AnswerIngress(under_test).Answer(b"", context))
    assert context.trailing[wire.ERROR_HEADER] == "ShardUnavailable"
    assert len(context.details) == MAX_BYTES


def test_a_probability_of_zero_is_null_in_json_and_minus_infinity_in_protobuf() -> None:
    evidence = post(b'{"question": "who patented the telephone"}').json()["evidence"]
    assert evidence[1]["log_posterior"] is None
    assert evidence[0]["log_posterior"] == evidence[0]["log_prior"]
    response, _ = answer(answer_pb2.AnswerRequest(question="who patented the telephone").SerializeToString())
    assert response is not None
    assert response.evidence[1].log_posterior == -math.inf


def test_an_answer_says_how_much_was_searched() -> None:
    body = {"question": "who patented the telephone"}
    whole = request("POST", "/v1/answer", json=body).json()
    assert (whole["complete"], whole["coverage"]) == (
        True,
        {"n_searched": 2, "n_total": 2, "missing_shards": []},
    )
    refused = request("POST", "/v1/answer", service(missing_shards=(1,)), json=body)
    assert (refused.status_code, refused.json()["code"]) == (503, "UNAVAILABLE")
    for path in ("answer", "retrieve", "answer/stream"):
        partial = request("POST", f"/v1/{path}", service(missing_shards=(1,)), json={**body, "min_coverage": 0.5})
        assert '"coverage":{"n_searched":1,"n_total":2,"missing_shards":[1]}' in partial.text
        assert '"complete":false' in partial.text
    wire = answer_pb2.AnswerRequest(**body, min_coverage=0.5).SerializeToString()
    context = GrpcContext()
    response = asyncio.run(AnswerIngress(service(missing_shards=(0,))).Answer(wire, context))
    assert response.coverage == answer_pb2.Coverage(n_searched=1, n_total=2, missing_shards=[0])
    assert not response.complete


def test_an_answer_tells_whether_it_was_cut() -> None:
    for n_tokens, was_cut in ((3, True), (6, False)):
        body = {"question": "who patented the telephone", "max_new_tokens": n_tokens, "n_answers": 2}
        whole = request("POST", "/v1/answer", json=body).json()
        assert [each["cut"] for each in (whole, *whole["answers"])] == [was_cut] * 3
        *_, last = request("POST", "/v1/answer/stream", json=body).text.strip().split("\n\n")
        assert last.count(f'"cut":{str(was_cut).lower()}') == 3
        response, _ = answer(answer_pb2.AnswerRequest(**body).SerializeToString())
        assert response is not None
        assert [each.cut for each in (response, *response.answers)] == [was_cut] * 3


def test_an_answer_out_of_labels_comes_with_the_probability_of_each() -> None:
    body = {"question": "who patented the telephone", "labels": ["Curie", "Bell"]}
    response = request("POST", "/v1/answer", json=body).json()
    assert response["answer"] == "Bell"
    assert [label["text"] for label in response["labels"]] == ["Curie", "Bell"]
    assert sum(math.exp(label["log_probability"]) for label in response["labels"]) == pytest.approx(1)
    assert response["log_likelihood"] == response["labels"][1]["log_likelihood"]
    over_grpc, _ = answer(answer_pb2.AnswerRequest(**body).SerializeToString())
    assert over_grpc is not None
    assert over_grpc.answer == "Bell"
    assert [MessageToDict(label, preserving_proto_field_name=True) for label in over_grpc.labels] == response["labels"]
    streamed = request("POST", "/v1/answer/stream", json={**body, "formulation": "token", "n_beams": 1}).text
    assert [line for line in streamed.splitlines() if line.startswith("event")] == [
        "event: retrieved",
        "event: token",
        "event: answer",
    ]
    assert request("POST", "/v1/answer", json={"question": "who"}).json()["labels"] == []


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", "a"], "labels must be 1..256 different texts, none empty, got 2: ['a', 'a']"),
        (["a", " "], "labels must be 1..256 different texts, none empty, got 2: ['a', ' ']"),
        (list(map(str, range(257))), "labels must be 1..256 different texts, none empty, got 257: ['0', "),
    ],
)
def test_labels_that_leave_no_choice_are_refused(labels: list[str], message: str) -> None:
    body = {"question": "who", "labels": labels}
    response = request("POST", "/v1/answer", json=body)
    assert (response.status_code, message in response.json()["detail"]) == (400, True)
    refused, context = answer(answer_pb2.AnswerRequest(**body).SerializeToString())
    assert (refused, context.code) == (None, grpc.StatusCode.INVALID_ARGUMENT)
    assert message in context.details


def test_the_requests_id_is_the_bodys_then_the_headers_then_a_new_one() -> None:
    def id_of(body: dict[str, str], headers: dict[str, str]) -> str:
        return str(
            request("POST", "/v1/answer", json={"question": "who", **body}, headers=headers).json()["request_id"]
        )

    assert id_of({"request_id": "body"}, {"x-request-id": "header"}) == "body"
    assert id_of({}, {"x-request-id": "header"}) == "header"
    assert len(id_of({}, {})) == 16
    assert len(id_of({}, {"x-request-id": "x" * 200})) == 16  # not ours to complain about, nor to put in a log


def test_over_grpc_every_reply_names_its_request_in_the_trailing_metadata() -> None:
    ask = answer_pb2.AnswerRequest(question="who")
    named = answer_pb2.AnswerRequest(question="who", request_id="body")

    def id_of(data: bytes, gate: Gate | None = None, method: str = "Answer") -> str:
        context = GrpcContext(x_request_id="header")

        async def call() -> None:
            reply = getattr(AnswerIngress(service(), gate), method)(data, context)
            with suppress(OpenbookError):  # as streams end for Serve's Python proxy
                if method == "AnswerStream":
                    async for _ in reply:
                        assert context.trailing["request_id"] != "serves", "it comes with each message"
                else:
                    await reply

        asyncio.run(call())
        return context.trailing["request_id"]

    for method in ("Answer", "AnswerStream"):
        assert id_of(ask.SerializeToString(), method=method) == "header"
        assert id_of(named.SerializeToString(), method=method) == "body"
        assert id_of(named.SerializeToString(), Gate(None, Limits()), method) == "header", "a key is needed"
        assert id_of(b"\xff", method=method) == "header"


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ASKED: dict[str, Any] = {
    "question": "who",
    "k": 1,
    "nprobe": 7,
    "ef_search": 8,
    "rerank_factor": 9,
    "min_coverage": 0.5,
}


def test_what_is_asked_and_on_whose_behalf_reaches_the_index_tier(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[RetrievalSettings, Context]] = []

    class Watching(ExactIndex):
        async def search(self, queries: Float32, settings: RetrievalSettings, context: Context) -> Hits:
            seen.append((settings, replace(context, deadline=NEVER)))
            return await super().search(queries, settings, context)

    under_test = service()
    encoder = HashEncoder()
    under_test._pipeline._finder._retriever = Watching(PASSAGES, encoder.encode_passages(PASSAGES))
    headers = {"x-request-id": "mine", "x-caller": "me", "traceparent": TRACE}
    with caplog.at_level("INFO", "openbook"):
        assert request("POST", "/v1/retrieve", under_test, json=ASKED, headers=headers).is_success
    over_grpc = GrpcContext(x_request_id="mine", x_caller="me", traceparent=TRACE)
    wire = answer_pb2.AnswerRequest(**ASKED).SerializeToString()
    assert asyncio.run(AnswerIngress(under_test).Answer(wire, over_grpc)).request_id == "mine"
    assert request("POST", "/v1/answer", under_test, json={"question": "who"}, headers=headers).is_success
    settings = RetrievalSettings(k=1, nprobe=7, ef_search=8, rerank_factor=9, min_coverage=0.5)
    context = Context(request_id="mine", caller="me", trace=TRACE)
    assert seen == [(settings, context), (settings, context), (RetrievalSettings(k=2), context)]
    assert [line.partition(" s, ")[2] for line in caplog.messages] == ["request id mine, caller me"]


def test_a_service_says_how_long_its_generator_is_busy_unless_a_question_has_just_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who fails at once has nothing to do, and would be asked everything."""

    under_test = service(missing_shards=(1,), load=lambda: (2.5, 0.25))
    refused = request("POST", "/v1/answer", under_test, json={"question": "who", "k": 0})
    assert (refused.status_code, under_test.load(), service().load()) == (400, (2.5, 0.25), None)
    assert request("POST", "/v1/answer", under_test, json={"question": "who"}).status_code == 503
    assert under_test.load() is None
    monkeypatch.setattr("openbook.serving.endpoint.service.FAILING_S", 0.0)
    assert under_test.load() == (2.5, 0.25)


def test_without_its_index_tier_the_endpoint_is_not_ready() -> None:
    async def gone() -> None:
        raise ShardUnavailable("shard 1 does not answer")

    response = request("GET", "/readyz", service(check_ready=gone))
    assert response.status_code == 503
    assert response.json()["code"] == "UNAVAILABLE"
    assert response.json()["detail"] == "shard 1 does not answer"


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("", None),
        ("openbook.v1.AnswerService", None),
        ("grpc.health.v1.Health", None),
        ("openbook.v1.IndexService", grpc.StatusCode.NOT_FOUND),
    ],
)
def test_of_what_is_not_served_there_is_no_health(name: str, code: grpc.StatusCode | None) -> None:
    context, data = GrpcContext(), health_pb2.HealthCheckRequest(service=name).SerializeToString()
    reply = asyncio.run(AnswerIngress(service()).Check(data, context))
    assert (context.code, reply.status) == (code, reply.UNKNOWN if code else reply.SERVING)


def test_callers_do_not_hear_where_index_servers_listen_and_the_log_does(caplog: pytest.LogCaptureFixture) -> None:
    settings = parse({"index": {"addresses": ["10.0.0.1:700", "10.0.0.1:7001"]}})

    async def gone() -> None:
        raise ShardUnavailable("10.0.0.1:7001: nobody answers; 10.0.0.1:700: neither")

    under_test = service(settings, check_ready=gone)
    said = request("GET", "/readyz", under_test).json()["detail"]
    assert said == "index server 1: nobody answers; index server 0: neither"

    async def search(*asked: Any) -> Any:
        await gone()

    under_test._pipeline._finder._retriever.search = search  # type: ignore[method-assign]
    with caplog.at_level("INFO"):
        response = request("POST", "/v1/retrieve", under_test, json={"question": "who"})
    assert response.json()["detail"] == said
    assert "10.0.0.1:7001: nobody answers" in caplog.text


@pytest.mark.parametrize(
    "told", ["ipv4:127.0.0.1:1", "ipv6:[::1]:1", "ipv6:%5B::1%5D:7000", "ipv6:%5Bfe80::1%25eth0%5D:7"]
)
def test_callers_do_not_hear_which_address_a_host_name_stands_for(told: str) -> None:
    async def gone() -> None:
        raise ShardUnavailable(f"index-0:7000: last error: UNKNOWN: {told}: Failed to connect; index-1:7000: as well")

    under_test = service(parse({"index": {"addresses": ["index-0:7000", "index-1:7000"]}}), check_ready=gone)
    assert request("GET", "/readyz", under_test).json()["detail"] == (
        "index server 0: last error: UNKNOWN: its address: Failed to connect; index server 1: as well"
    )


@pytest.mark.parametrize(
    ("told", "heard"),
    [
        ("address lookup failed for index-0: not found", "address lookup failed for its address: not found"),
        ("Peer name INDEX.test is not in it.", "Peer name its address is not in it."),
        ("Peer name 10.0.0.1 is not", "Peer name its address is not"),
        ("index-0.x, my-index-0, index-01 and 0 are others", "index-0.x, my-index-0, index-01 and 0 are others"),
        ("index-0:7001 is no server of ours", "its address:7001 is no server of ours"),
        ("of two at index-0:7000, index-0:70", "of two at index server 0, index server 1"),
        ("no index server of shard 0 at index:1", "no index server of shard 0 at index server 4"),
        ("shard:1 has no shard", "index server 5 has no shard"),
    ],
)
def test_nor_by_what_name(told: str, heard: str) -> None:
    async def gone() -> None:
        raise ShardUnavailable(told)

    addresses = ["index-0:7000", "index-0:70", "10.0.0.1:1", "0:7", "index:1", "shard:1"]
    index = ShardedIndex(addresses, 1.0, server_name="index.test")
    under_test = service(check_ready=gone, index_servers=lambda: index.named)
    assert request("GET", "/readyz", under_test).json()["detail"] == heard


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_nor_do_they_when_grpc_itself_says_so(host: str) -> None:
    address = f"{host}:{free_port()}"

    async def gone() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            with from_grpc(address):
                await channel.unary_unary("/Index/Info")(b"", timeout=10)

    detail = request("GET", "/readyz", service(parse({"index": {"addresses": [address]}}), gone)).json()["detail"]
    assert "index server 0: failed to connect" in detail
    assert not re.search(r"127\.0\.0\.1|::1|:\d+", detail)


def test_the_requests_timeout_is_cut_to_the_limit() -> None:
    seen: list[float] = []

    class Watching(HashEncoder):
        async def encode(self, questions: Any, context: Context) -> Any:
            seen.append(context.deadline.remaining_s())
            return await super().encode(questions, context)

    settings = parse({"answer": {"max_timeout_s": 7000, "timeout_s": 3000}})
    under_test = service(settings)
    under_test._pipeline._finder._queries._encoder = Watching()
    for timeout in ({"timeout_s": 1e300}, {"timeout_s": 2000}, {}):
        request("POST", "/v1/answer", under_test, json={"question": f"who {timeout}", **timeout})
    assert [math.ceil(left / 1000) for left in seen] == [7, 2, 3]


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded"])
def test_a_body_of_another_media_type_is_refused_with_the_right_one(media_type: str) -> None:
    response = request("POST", "/v1/answer", content=b'{"question": "who"}', headers={"content-type": media_type})
    assert refused(response)
    assert "application/json" in response.json()["detail"]


def test_a_body_in_pieces_is_one_body() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"question": '
        yield b'"who"}'

    assert request("POST", "/v1/answer", content=pieces(), headers={"content-type": "application/json"}).is_success


def test_metrics_count_what_was_asked() -> None:
    under_test = service()

    def refused() -> float:
        name = 'openbook_requests_total{code="INVALID_ARGUMENT",method="Answer"}'
        lines = request("GET", "/metrics", under_test).text.splitlines()
        return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)

    before = refused()
    assert request("POST", "/v1/answer", under_test, json={"question": ""}).status_code == 400
    assert refused() == before + 1


def test_metrics_tell_what_is_in_flight_and_how_fast_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    monkeypatch.setattr("openbook.serving.endpoint.service.monotonic", clock)
    admission = service()._admission
    for _ in range(8):
        with admission.admitted(Context(), work=10):
            clock.advance(0.5)
    with admission.admitted(Context(), work=10):
        told = [REGISTRY.get_sample_value(f"openbook_{name}") for name in ("in_flight", "work_in_flight")]
        per_second = REGISTRY.get_sample_value("openbook_work_per_second")
    assert told == [1, 10]
    assert per_second == pytest.approx(20, rel=0.1)


def test_who_embeds_or_reads_a_passage_needs_a_place() -> None:
    under_test = service(parse({"serving": {"max_in_flight": 1}}))
    with under_test._admission.admitted(Context()):
        for asked in (
            under_test.embed(["who"], None, Context()),
            under_test.excerpt(PassageRequest(id="0"), Context()),
        ):
            with pytest.raises(Overloaded, match="1 questions are in flight"):
                asyncio.run(asked)


def test_a_streams_own_passages_are_work_too() -> None:
    under_test = service()

    async def held(**asked: Any) -> int:
        async with aclosing(under_test.stream(AnswerRequest(question="who", k=1, **asked), Context())) as events:
            await anext(events)
            return under_test._admission.work_in_flight

    assert asyncio.run(held(passages=[{"text": "Bell"}])) == 2 * asyncio.run(held())


def test_an_answer_that_takes_too_much_work_is_refused_by_name() -> None:
    body = {"question": "who", "k": 100, "n_beams": 32, "max_new_tokens": 512}
    message = "must be at most max_work = 100000, got 100 x (300 + 32 x 512) = 1668400"
    for path in ("answer", "answer/stream"):
        response = request("POST", f"/v1/{path}", json=body)
        assert (response.status_code, message in response.json()["detail"]) == (400, True)
    refused, context = answer(answer_pb2.AnswerRequest(**body).SerializeToString())
    assert (refused, context.code) == (None, grpc.StatusCode.INVALID_ARGUMENT)
    assert message in context.details
    assert request("POST", "/v1/retrieve", json={"question": "who", "k": 100}).is_success


def test_no_more_work_is_admitted_than_the_limit() -> None:
    under_test = service(parse({"answer": {"k": 2, "max_work": 1500}, "serving": {"max_work_in_flight": 1500}}))

    class Slow(EchoGenerator):
        async def generate(
            self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
        ) -> Generation:
            begun.set()
            await go.wait()
            return await super().generate(question, retrieved, settings, context)

    async def ask(k: int) -> str:
        return (await under_test.answer(AnswerRequest(question="Warsaw", k=k), Context())).text

    async def main() -> None:
        first = asyncio.create_task(ask(2))  # 2 x (300 + 4 x 32) = 856
        await begun.wait()
        with pytest.raises(Overloaded, match=r"work of 856 is in flight, and 856 more would exceed .* = 1500"):
            await ask(2)
        assert len((await under_test.retrieve(RetrieveRequest(question="Warsaw", k=2), Context())).evidence) == 2
        begun.clear()
        second = asyncio.create_task(ask(1))  # 428 more
        await begun.wait()
        go.set()
        assert await first == await second == await ask(2) == "Curie was born in Warsaw"

    begun, go = asyncio.Event(), asyncio.Event()
    under_test._pipeline._generations._generator = Slow()
    asyncio.run(asyncio.wait_for(main(), 60))  # else for ever, where one does not begin


@pytest.mark.parametrize("held", ["http.response.start", "http.response.body"])
@pytest.mark.parametrize("path", ["/v1/answer/stream", "/v1/chat/completions"])
def test_a_stream_whose_caller_goes_while_a_part_of_it_is_sent_has_no_place(path: str, held: str) -> None:
    under_test = service()
    chat = {"model": "openbook", "stream": True, "messages": [{"role": "user", "content": "who"}]}
    body = json.dumps({"question": "who"} if path.endswith("stream") else chat).encode()

    async def main() -> None:
        sends = asyncio.Event()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == held:
                sends.set()
                await asyncio.Event().wait()

        received = asyncio.Queue[dict[str, Any]]()
        received.put_nowait({"type": "http.request", "body": body})
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b""}
        headers = [(b"content-type", b"application/json")]
        call = asyncio.create_task(build_app(under_test)({**scope, "headers": headers}, received.get, send))
        await sends.wait()
        assert under_test._admission.n_in_flight == 1
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert under_test._admission.n_in_flight == 0

    asyncio.run(main())


def test_a_request_is_no_larger_than_grpc_itself_takes() -> None:
    AnswerIngress(service())
    assert dict(DEFAULT_GRPC_SERVER_OPTIONS)["grpc.max_receive_message_length"] == 4 << 20


def test_two_replicas_never_have_one_port() -> None:
    AnswerIngress(service())
    port, any_method = free_port(), lambda **named: None

    async def start_two() -> None:
        options, loop = gRPCOptions(port=port), asyncio.get_running_loop()
        _, server = await start_grpc_server(any_method, options, event_loop=loop)
        try:
            with pytest.raises(RuntimeError, match=str(port)):
                await start_grpc_server(any_method, options, event_loop=loop)
        finally:
            await server.stop(None)

    asyncio.run(start_two())


@pytest.mark.parametrize("path", ["/v1/answer", "/v1/retrieve"])
@pytest.mark.parametrize(
    ("defaults", "asked", "problem"),
    [
        ({}, {"bm25_weight": 0.3}, "got 0.3 with dense"),
        ({}, {"bm25_weight": 0.3, "retriever": "bm25"}, "got 0.3 with bm25"),
        ({"retriever": "hybrid"}, {"bm25_weight": 0.3, "retriever": "dense"}, "got 0.3 with dense"),
        ({}, {"bm25_weight": 0.3, "retriever": "hybrid"}, None),
        ({"retriever": "hybrid"}, {"bm25_weight": 0.3}, None),
        ({"retriever": "hybrid", "bm25_weight": 0.3}, {"retriever": "dense"}, None),
        ({"bm25_weight": 0.3}, {}, None),
    ],
)
def test_a_weight_that_would_weigh_nothing_is_refused(
    path: str, defaults: dict[str, Any], asked: dict[str, Any], problem: str | None
) -> None:
    under_test = service(parse({"answer": {"k": 2, **defaults}}))
    found = request("POST", path, under_test, json={"question": "who?", **asked})
    assert refused(found) == (problem is not None), found.text
    if problem:
        assert found.json()["detail"] == f"bm25_weight is for the retriever hybrid alone, {problem}"
