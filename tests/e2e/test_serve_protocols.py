"""The endpoint as its callers see it, over both protocols, behind both proxies and in both topologies."""

import asyncio
import json
import math
import re
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from time import monotonic, sleep, time
from typing import Any

import grpc
import httpx
import psutil
import pytest
from connections import OF_OPERATOR, PORTS, allowed, connections, scraped
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.json_format import MessageToDict
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status
from prometheus_client.parser import text_string_to_metric_families
from redis import Redis
from small_system import (
    DIMENSION,
    PASSAGES,
    QUESTION,
    EchoModel,
    System,
    begun,
    index_tier,
    load_echo,
    load_hash,
    serving_tier,
    write_snapshot,
)

from openbook.cache.server import RedisServer
from openbook.client import Answer, Client, Retrieval, Token, messages
from openbook.config import AccessSettings, EncoderSettings, GeneratorSettings, IndexClientSettings, Limits, Settings
from openbook.core.context import Context
from openbook.core.types import Formulation, OwnPassage, RetrievalSettings, RetrieverKind
from openbook.errors import (
    DeadlineExceeded,
    InvalidModel,
    InvalidRequest,
    OpenbookError,
    Overloaded,
    PermissionDenied,
    ShardUnavailable,
    SnapshotMismatch,
    StartupError,
    Unauthenticated,
    UnknownPassage,
)
from openbook.processes import free_ports, is_loopback
from openbook.serving.access.key_file import KeyFileBook
from openbook.serving.access.key_redis import KeyRedisBook
from openbook.serving.access.keys import KeyRecord, mint, revoked
from openbook.serving.access.ports import KeyBook
from openbook.serving.access.scopes import Scope
from openbook.serving.app import assemble
from openbook.serving.endpoint.page import FOLDER
from openbook.serving.launch import run
from openbook.serving.workers.encoder import EncoderLoader
from openbook.serving.workers.generator import GeneratorLoader
from openbook.telemetry import N_METRICS_PORTS
from openbook.testing import ExactIndex, HashEncoder
from openbook.v1 import answer_pb2, answer_pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MAX_IN_FLIGHT = 4
PATIENCE_S = 120.0
N_SLOW = 300
FROZEN_TIMEOUT_S = 8.0
N_PAY = 72
"""Calls, to both of two ingresses, that pay for one hedge in each."""
A_DAY_S, MIDNIGHT_S = 86_400, 60
SSE = {"formulation": "token", "n_beams": 1}


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[Settings]:
    """The index servers of both deployments."""
    snapshot = write_snapshot(tmp_path_factory.mktemp("serve") / "snapshot")
    serving = {"max_in_flight": MAX_IN_FLIGHT, "metrics_port": free_ports(N_METRICS_PORTS)}
    with index_tier(snapshot, redis_server.url, **serving) as settings:
        yield settings


@pytest.fixture(scope="module", params=[("haproxy", "fused"), ("python", "split")], ids="-".join)
def system(request: pytest.FixtureRequest, searched: Settings) -> Iterator[System]:
    proxy, topology = request.param
    with serving_tier(searched, modules=[__name__], proxy=proxy, topology=topology) as found:
        yield found


@pytest.fixture(scope="module")
def client(system: System) -> Iterator[Client]:
    with Client(system.grpc, timeout_s=PATIENCE_S, retries=False) as connected:
        yield connected


@pytest.fixture
def held_up(tmp_path: Path) -> Iterator[Path]:
    """A file to name at the end of a question: it is not answered before the test ends, or removes the file."""
    path = tmp_path / "flag"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def channel(system: System) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(system.grpc) as connected:
        yield connected


@pytest.fixture(scope="module")
def http(system: System) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=system.http, timeout=PATIENCE_S) as connected:
        yield connected


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    """Of a stream of server-sent events: names and data."""
    blocks = (block.split("\n") for block in response.text.removesuffix("\n\n").split("\n\n"))
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_the_answer_is_that_of_the_pipeline_over_the_exact_index(client: Client) -> None:
    encoder = HashEncoder(DIMENSION)
    index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
    hits = asyncio.run(index.search(encoder.encode_questions([QUESTION]), RetrievalSettings(k=3), Context()))
    response = client.answer(QUESTION, k=3, request_id="mine")
    assert response.text == "Bell patented the telephone in 1876"
    assert [e.passage.id for e in response.evidence] == hits.ids[0].tolist()
    assert [e.score for e in response.evidence] == hits.scores[0].tolist()
    assert math.isclose(sum(math.exp(e.log_prior) for e in response.evidence), 1)
    assert (response.request_id, response.generator_fingerprint) == ("mine", "echo")
    assert response.complete


@pytest.mark.parametrize(
    "options",
    [
        {"k": 2},
        {"tokens": True, "n_answers": 2, "min_probability": 0.9},
        {
            "tokens": True,
            "without": [0],
            "passages": [OwnPassage("Meucci who patented the telephone", "Meucci", "mine")],
        },
        {"retriever": RetrieverKind.BM25},
        {"retriever": RetrieverKind.HYBRID, "bm25_weight": 0.5},
        {"formulation": Formulation.TOKEN, "n_beams": 1, "follow": 2, "k": 1},
    ],
)
def test_both_protocols_give_the_same(channel: grpc.Channel, http: httpx.Client, options: dict[str, Any]) -> None:
    stub = answer_pb2_grpc.AnswerServiceStub(channel)

    def comparable(body: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in body.items() if name not in ("timings", "cached", "request_id")}

    asked = {name: [asdict(each) for each in v] if name == "passages" else v for name, v in options.items()}
    over_http = http.post("/v1/answer", json={"question": QUESTION, **asked}).json()
    over_grpc = MessageToDict(
        stub.Answer(messages.request(answer_pb2.AnswerRequest, QUESTION, PATIENCE_S, options)),
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
    )
    for evidence in over_grpc["evidence"]:
        evidence["passage"]["id"] = int(evidence["passage"]["id"])  # protobuf writes 64 bits as text
        origin = evidence["passage"].setdefault("origin", None)
        assert bool(origin) == (evidence["passage"]["id"] >= 0)
        if origin:
            origin.setdefault("page", None)
    over_grpc.setdefault("confidence", None)  # of no answer with follow
    for name in ("n_searched", "n_total"):
        over_grpc["coverage"][name] = int(over_grpc["coverage"][name])
    for name in ("formulation", "decoding"):
        over_grpc[name] = over_grpc[name].split("_")[-1].lower()
    assert set(over_http) == set(over_grpc)
    assert comparable(over_http) == comparable(over_grpc)
    assert bool(over_http["tokens"] or over_http["answers"]) == ("tokens" in options)
    assert ("Meucci" in over_http["answer"]) == ("passages" in options)


def test_a_passage_is_found_by_its_lasting_id_over_both_protocols(client: Client, http: httpx.Client) -> None:
    wanted = PASSAGES[3]
    assert client.passage(wanted.lasting_id, around=2).passage == wanted
    found = http.get(f"/v1/passages/{wanted.lasting_id}", params={"around": 2}).json()
    assert (found["passage"]["id"], found["passage"]["origin"]["path"], found["before"]) == (3, "zurich.md", [])
    with pytest.raises(UnknownPassage, match="has the lasting id"):
        client.passage("0" * 32)
    assert http.get("/v1/passages/4").status_code == 404


def test_a_question_in_any_language_finds_its_passage(client: Client, http: httpx.Client) -> None:
    best = client.retrieve("Zürich 苏黎世", k=1).evidence[0]
    assert best.passage.text == PASSAGES[3].text
    found = http.post("/v1/retrieve", json={"question": "Zürich 苏黎世", "k": 1}).json()
    assert found["evidence"][0]["passage"]["text"] == PASSAGES[3].text


def test_the_second_time_the_embedding_comes_from_the_cache(http: httpx.Client) -> None:
    question = {"question": f"asked twice at {http.base_url}"}  # the Redis is that of all tests
    assert [http.post("/v1/retrieve", json=question).json()["cached"] for _ in range(2)] == [False, True]


def test_streams_give_passages_then_tokens_then_the_answer(client: Client, http: httpx.Client) -> None:
    seen = list(client.stream(QUESTION, k=2))
    first, *tokens, last = seen
    assert isinstance(first, Retrieval)
    assert isinstance(last, Answer)
    assert [type(token) for token in tokens] == [Token] * 6
    assert "".join(token.text for token in tokens if isinstance(token, Token)) == last.text
    assert isinstance(tokens[0], Token)
    assert len(tokens[0].log_posterior) == 2

    response = http.post("/v1/answer/stream", json={"question": QUESTION, "k": 2, **SSE})
    assert response.headers["content-type"].startswith("text/event-stream")
    names, data = zip(*events(response), strict=True)
    assert list(names) == ["retrieved", *["token"] * 6, "answer"]
    assert "".join(token["text"] for token in data[1:-1]) == data[-1]["answer"] == last.text
    assert data[0]["evidence"][0]["score"] == first.evidence[0].score


def test_a_request_keeps_its_id_whatever_serve_calls_it(channel: grpc.Channel, http: httpx.Client) -> None:
    body = {"question": QUESTION, "request_id": "mine"}
    for path in ("/v1/answer", "/v1/answer/stream"):
        assert http.post(path, json=body).headers.get_list("x-request-id") == ["mine"]
    stub, asked = answer_pb2_grpc.AnswerServiceStub(channel), answer_pb2.AnswerRequest(**body)
    _, call = stub.Answer.with_call(asked)
    stream = stub.AnswerStream(asked)
    assert list(stream)
    for ended in (call, stream):
        assert [value for key, value in ended.trailing_metadata() if key == "request_id"] == ["mine"]


GRPC_REFUSALS = [
    ({"question": ""}, r"question must have 1\.\.2000 characters, got none"),
    ({"question": "x" * 2001}, r"question must have 1\.\.2000 characters, got 2001"),
    ({"question": "x", "k": 0}, r"k must be 1\.\.100, got 0"),
    ({"question": "x", "k": 10_000_000}, r"k must be 1\.\.100, got 10000000"),
    ({"question": "x", "n_beams": 1000}, r"n_beams must be 1\.\.32, got 1000"),
    ({"question": "x", "max_new_tokens": 0}, r"max_new_tokens must be 1\.\.512, got 0"),
    ({"question": "x", "length_penalty": math.nan}, r"length_penalty must be -10\.0\.\.10\.0, got nan"),
    ({"question": "x", "temperature": -1}, r"temperature must be 0\.0\.\.10\.0, got -1"),
    ({"question": "x", "top_p": 0}, r"top_p must be 1e-06\.\.1\.0, got 0"),
    ({"question": "x", "min_new_tokens": 33}, r"min_new_tokens must be 0\.\.32, got 33"),
    ({"question": "x", "timeout_s": -1}, r"timeout_s must be above 0 .*300.*, got -1"),
    ({"question": "x", "timeout_s": math.nan}, r"timeout_s must be above 0 .*, got nan"),
    ({"question": "x", "request_id": "a\nb"}, r"request_id must have at most 128 printable ASCII"),
]


@pytest.mark.parametrize(("fields", "message"), GRPC_REFUSALS, ids=lambda value: str(value)[:40])
def test_bad_fields_are_refused_with_their_limits(
    fields: dict[str, Any], message: str, channel: grpc.Channel, http: httpx.Client
) -> None:
    stub = answer_pb2_grpc.AnswerServiceStub(channel)
    request = answer_pb2.AnswerRequest(**fields)
    for call in (stub.Answer, lambda request: list(stub.AnswerStream(request))):
        with pytest.raises(grpc.RpcError, match=message) as refused:
            call(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.RpcError) as refused:
        stub.Answer(request)
    status = rpc_status.from_call(refused.value)
    assert status.message == refused.value.details()
    kinds = {each.type_url.rpartition(".")[2] for each in status.details}
    assert kinds == {"ErrorInfo", "RequestInfo", "BadRequest"}
    for path in ("/v1/answer", "/v1/answer/stream"):
        refuse_http(http, path, json.dumps(fields).encode(), message)  # json writes NaN as NaN
    assert stub.Answer(answer_pb2.AnswerRequest(question=QUESTION)).answer


def refuse_http(http: httpx.Client, path: str, body: bytes, message: str) -> None:
    response = http.post(path, content=body, headers={"content-type": "application/json", "x-request-id": "id-1"})
    assert response.status_code == 400, response.text
    problem = response.json()
    assert problem["type"] == "urn:openbook:error:InvalidRequest"
    assert (problem["code"], problem["status"]) == ("INVALID_ARGUMENT", 400)
    assert problem["request_id"]
    with pytest.raises(InvalidRequest, match=message):
        raise InvalidRequest(problem["detail"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"question": "\xff\xfe"}', r"body must be JSON in UTF-8: .*0xff"),
        (rb'{"question": "\ud800"}', r"question must be UTF-8 text, got '\\ud800'"),
        (rb'{"question": "x", "\ud800": 1}', r"body must be UTF-8 text, got '\\ud800'"),
        (b'{"question": "x"', r"body must be JSON: Expecting ',' delimiter"),
        (b"", r"body"),
        (b"[]", r"body.*object"),
        (b"[" * 100_000, r"body"),
        (b'{"question": "x", "k": ' + b"9" * 5000 + b"}", r"^k must have at most 4300 digits, got 5000$"),
        (b"{}", r"question is missing"),
        (b'{"question": 5}', r"question: .*valid string, got 5"),
        (b'{"question": "x", "k": -3}', r"k must be 1\.\.100, got -3"),
        (b'{"question": "x", "k": "3"}', r"k: .*valid integer, got '3'"),
        (b'{"question": "x", "k": 1.5}', r"k: .*valid integer, got 1.5"),
        (b'{"question": "x", "k": true}', r"k: .*valid integer, got True"),
        (b'{"question": "x", "n_beans": 3}', r"unknown key 'n_beans'"),
        (b'{"question": "x", "formulation": "sentence"}', r"formulation: .*'sequence' or 'token', got 'sentence'"),
        (b'{"question": "x", "length_penalty": -Infinity}', r"length_penalty must be .*, got -inf"),
        (b'{"question": "x", "k": ' + b"9" * 4000 + b"}", r"k: .*less than 4294967296, got 9{100}$"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_json_is_refused_in_one_shape(body: bytes, message: str, http: httpx.Client) -> None:
    refuse_http(http, "/v1/answer", body, message)
    assert http.post("/v1/answer", json={"question": QUESTION}).status_code == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\x0a\x02\xff\xfe", "UTF-8"),  # question: two bytes that are no text
        (b"\x0a\x03\xed\xa0\x80", "UTF-8"),  # question: a lone surrogate
        (b"\xff\xff\xff", "openbook.v1.AnswerRequest"),
        (b"\x0a\x01x\x18\x63", r"formulation must be one of FORMULATION_UNSPECIFIED, .*, got 99"),
        (b"\x0a\x01x\x20\x63", r"decoding must be one of .*, got 99"),
    ],
)
@pytest.mark.parametrize("method", ["Answer", "AnswerStream"])
def test_bytes_that_are_no_request_are_refused(method: str, body: bytes, message: str, channel: grpc.Channel) -> None:
    path = f"/openbook.v1.AnswerService/{method}"
    call = channel.unary_unary(path) if method == "Answer" else lambda body: list(channel.unary_stream(path)(body))
    with pytest.raises(grpc.RpcError, match=message) as refused:
        call(body)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    good = answer_pb2.AnswerRequest(question=QUESTION).SerializeToString()
    assert answer_pb2.AnswerResponse.FromString(channel.unary_unary("/openbook.v1.AnswerService/Answer")(good)).answer


def test_an_unexpected_error_tells_its_id_and_no_more(client: Client, http: httpx.Client) -> None:
    with pytest.raises(OpenbookError, match=r"internal error, request id boom$"):
        client.answer("explode telephone", request_id="boom")
    with pytest.raises(OpenbookError, match=r"internal error, request id boom$"):
        list(client.stream("explode telephone", request_id="boom"))
    response = http.post("/v1/answer", json={"question": "explode telephone"}, headers={"x-request-id": "boom"})
    assert response.status_code == 500
    assert response.json() == {
        "type": "urn:openbook:error:OpenbookError",
        "title": "Internal error",
        "status": 500,
        "detail": "internal error, request id boom",
        "instance": "urn:openbook:request:boom",
        "code": "INTERNAL",
        "request_id": "boom",
    }
    streamed = events(http.post("/v1/answer/stream", json={"question": "explode telephone", **SSE}))
    assert [name for name, _ in streamed] == ["retrieved", "token", "token", "error"]
    assert streamed[-1][1]["code"] == "INTERNAL"
    assert "secret" not in json.dumps(streamed)


def test_what_the_model_refuses_is_the_callers_fault(client: Client, http: httpx.Client) -> None:
    with pytest.raises(InvalidRequest, match=r"^question has 9999 tokens, the generator reads 300$"):
        client.answer("unreadable telephone")
    refuse_http(http, "/v1/answer", b'{"question": "unreadable telephone"}', "^question has 9999 tokens")


def test_the_deadline_holds_although_the_model_dawdles(
    channel: grpc.Channel, http: httpx.Client, held_up: Path
) -> None:
    asked: dict[str, Any] = {"question": f"dawdle telephone {held_up}", "timeout_s": 3.0}  # enough to retrieve
    with pytest.raises(grpc.RpcError, match="generator") as refused:
        answer_pb2_grpc.AnswerServiceStub(channel).Answer(answer_pb2.AnswerRequest(**asked))
    assert refused.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    response = http.post("/v1/answer", json=asked)
    assert (response.status_code, response.json()["code"]) == (504, "DEADLINE_EXCEEDED")


async def too_late(system: System, question: str) -> None:
    with (
        pytest.raises(DeadlineExceeded, match="generator"),
        Client(system.grpc, timeout_s=3.0, retries=False) as client,
    ):
        await asyncio.to_thread(client.answer, question)


async def by_grpc(system: System, question: str) -> None:
    async with grpc.aio.insecure_channel(system.grpc) as channel:
        call = answer_pb2_grpc.AnswerServiceStub(channel).Answer(answer_pb2.AnswerRequest(question=question))
        await is_pondered(question)
        call.cancel()


async def by_grpc_stream(system: System, question: str) -> None:
    async with grpc.aio.insecure_channel(system.grpc) as channel:
        call = answer_pb2_grpc.AnswerServiceStub(channel).AnswerStream(answer_pb2.AnswerRequest(question=question))
        await is_pondered(question)
        call.cancel()


async def is_pondered(question: str) -> None:
    while not begun(question).exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("leave", [too_late, by_grpc, by_grpc_stream])
def test_the_model_stops_when_its_caller_leaves(
    leave: Callable[[System, str], Awaitable[None]], system: System, client: Client, held_up: Path
) -> None:
    asyncio.run(leave(system, f"ponder telephone {held_up}"))
    assert client.answer(QUESTION).text  # although the model would ponder until the test ends


def test_health_and_reflection(channel: grpc.Channel, http: httpx.Client) -> None:
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert health.status is health_pb2.HealthCheckResponse.SERVING
    assert http.get("/healthz").json() == http.get("/readyz").json() == {"status": "ok"}
    names = {"openbook.v1.AnswerService", "grpc.health.v1.Health"}
    assert names <= set(ProtoReflectionDescriptorDatabase(channel).get_services())
    newer = ask_reflection(channel, reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = {each.name for each in newer.list_services_response.service}
    assert listed == names | {"grpc.reflection.v1.ServerReflection"}
    for name in listed:
        found = ask_reflection(channel, reflection_pb2.ServerReflectionRequest(file_containing_symbol=name))
        file = FileDescriptorProto.FromString(found.file_descriptor_response.file_descriptor_proto[0])
        assert f"{file.package}.{file.service[0].name}" == name


def ask_reflection(
    channel: grpc.Channel, request: reflection_pb2.ServerReflectionRequest
) -> reflection_pb2.ServerReflectionResponse:
    """As newer tools do: version 1, whose messages are those of v1alpha under another name."""
    method = channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    (response,) = method(iter([request]))
    return response


def test_a_batch_has_the_answers_of_its_questions_over_both_protocols(
    client: Client, channel: grpc.Channel, http: httpx.Client
) -> None:
    asked: list[dict[str, Any]] = [{"question": QUESTION, "k": 1}, {"question": "", "k": 1}]
    over_http = http.post("/v1/answer/batch", json={"requests": asked, "request_id": "mine"}).json()["results"]
    batch = answer_pb2.AnswerBatchRequest(requests=[answer_pb2.AnswerRequest(**each) for each in asked])
    over_grpc = answer_pb2_grpc.AnswerServiceStub(channel).AnswerBatch(batch).results
    alone = client.answer(QUESTION, k=1)
    assert over_http[0]["answer"]["answer"] == over_grpc[0].answer.answer == alone.text
    assert over_http[1]["error"]["detail"] == over_grpc[1].error.message
    assert over_http[1]["error"]["request_id"] == "mine.1"
    too_many = answer_pb2.AnswerBatchRequest(requests=[answer_pb2.AnswerRequest(**asked[0])] * 65)
    with pytest.raises(grpc.RpcError, match=r"requests must be 1\.\.64 \(serving.max_entries\), got 65"):
        answer_pb2_grpc.AnswerServiceStub(channel).AnswerBatch(too_many)


def test_every_process_shows_its_own_metrics(system: System, client: Client) -> None:
    assert client.answer(QUESTION).text
    serving, found, names = system.settings.serving, {}, set[str]()
    assert serving.metrics_port
    for port in range(serving.metrics_port, serving.metrics_port + N_METRICS_PORTS):
        with suppress(httpx.ConnectError):
            families = list(text_string_to_metric_families(httpx.get(f"http://127.0.0.1:{port}/metrics").text))
            names |= {family.name for family in families}
            samples = [sample for family in families for sample in family.samples]
            (role,) = (sample.labels["role"] for sample in samples if sample.name == "openbook_process")
            found[role] = {sample.name: sample.value for sample in samples}
    assert set(found) == {"index-0", "index-1", "ingress"} | ({"encoder", "generator"} if is_split(system) else set())
    assert found["index-0"]["openbook_index_passages"] == found["index-1"]["openbook_index_passages"] == 2
    assert found["index-0"]["openbook_search_rows_count"] > 0
    assert found["ingress"]["openbook_searched_sequence"] == found["ingress"]["openbook_cache_up"] == 1
    assert found["generator" if is_split(system) else "ingress"]["openbook_queue_seconds_count"] > 0
    deploy = Path(__file__).parents[2] / "deploy"
    readers = [deploy / "prometheus" / "rules.yaml", *(deploy / "grafana" / "dashboards").glob("*.json")]
    read = {name for path in readers for name in re.findall(r"\b(?:openbook|process)_\w+", path.read_text())}
    assert len(read) > 30
    assert {name for name in read if re.sub("_(total|bucket|sum|count)$", "", name) not in names} == set()


def is_split(system: System) -> bool:
    return system.settings.serving.topology == "split"


def test_the_documentation_names_every_path(http: httpx.Client) -> None:
    assert http.get("/docs").status_code == 200
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/answer", "/v1/answer/stream", "/v1/retrieve", "/healthz", "/readyz", "/metrics"} <= set(paths)
    assert set(paths["/v1/answer"]["post"]["responses"]) == {"200", "default"}


def test_the_page_comes_through_the_proxy_as_it_is(http: httpx.Client) -> None:
    page = http.get("/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert http.get("/", headers={"If-None-Match": page.headers["etag"]}).status_code == 304
    names = re.findall(r'(?:href|src)="(page/[^"]+)"', page.text)
    assert len(names) > 1
    for name in names:
        assert http.get(f"/{name}").text == (FOLDER.parent / name).read_text(encoding="utf-8")


def test_unknown_paths_and_methods_have_the_same_shape(http: httpx.Client) -> None:
    assert http.get("/v2/answer").json()["code"] == "NOT_FOUND"
    response = http.get("/v1/answer")
    assert (response.status_code, response.json()["code"]) == (405, "UNIMPLEMENTED")


def test_the_formulation_asked_for_is_the_one_used(client: Client) -> None:
    assert client.answer(QUESTION).formulation is Formulation.SEQUENCE
    assert client.answer(QUESTION, formulation=Formulation.TOKEN).formulation is Formulation.TOKEN


def test_tokens_arrive_while_the_answer_is_in_the_making(client: Client, http: httpx.Client, held_up: Path) -> None:
    question = f"endless telephone {held_up}"
    stream = client.stream(question)
    assert [type(next(stream)) for _ in range(10)] == [Retrieval] + [Token] * 9
    stream.close()  # type: ignore[attr-defined]
    with http.stream("POST", "/v1/answer/stream", json={"question": question, **SSE}) as response:
        lines = response.iter_lines()
        assert [next(lines) for _ in range(6) if next(lines)]


def test_one_more_than_the_places_is_refused_at_once(
    client: Client, channel: grpc.Channel, http: httpx.Client, held_up: Path
) -> None:
    question = f"endless telephone {held_up}"
    with ThreadPoolExecutor(MAX_IN_FLIGHT) as pool:
        streams = list(pool.map(lambda _: admitted(client, question), range(MAX_IN_FLIGHT)))
        with pytest.raises(Overloaded, match=f"{MAX_IN_FLIGHT} questions are in flight"):
            client.answer(QUESTION)
        with pytest.raises(grpc.RpcError) as refused:
            answer_pb2_grpc.AnswerServiceStub(channel).Answer(answer_pb2.AnswerRequest(question=QUESTION))
        assert any(each.Is(RetryInfo.DESCRIPTOR) for each in rpc_status.from_call(refused.value).details)
        response = http.post("/v1/answer", json={"question": QUESTION})
        assert (response.status_code, response.json()["code"]) == (429, "RESOURCE_EXHAUSTED")
        assert http.get("/readyz").status_code == 200
        list(pool.map(lambda stream: stream.close(), streams))  # type: ignore[attr-defined]
    held_up.unlink()  # behind the Python proxy a stream that was closed mostly goes on to its end
    admitted(client, question).close()  # type: ignore[attr-defined]  # the places of those who went away become free


def admitted(client: Client, question: str) -> Iterator[Any]:
    """A stream that has begun, as soon as there is a place for it."""
    while True:
        stream = client.stream(question)
        try:
            next(stream)
            return stream
        except Overloaded:
            pass


def test_who_never_ends_his_request_keeps_nobody_waiting(system: System, client: Client, http: httpx.Client) -> None:
    """Several times as many as there are places, over both protocols."""
    host, port = "127.0.0.1", system.settings.serving.http_port
    unfinished = (
        b"POST /v1/answer HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    )
    never = Event()
    with ExitStack() as stack:
        for _ in range(N_SLOW):
            stack.enter_context(socket.create_connection((host, port))).sendall(unfinished)
        for _ in range(N_SLOW // 100):
            alone = [("grpc.use_local_subchannel_pool", 1)]
            channel = stack.enter_context(grpc.insecure_channel(system.grpc, alone))
            ask = channel.stream_unary("/openbook.v1.AnswerService/Answer")
            for _ in range(100):
                stack.callback(ask.future(iter(lambda: never.wait() and None, None)).cancel)
        stack.callback(never.set)
        for _ in range(10):
            assert http.post("/v1/answer", json={"question": QUESTION}).status_code == 200
            assert client.answer(QUESTION).text


def test_only_what_the_docs_name_listens_beyond_this_machine(system: System) -> None:
    """docs/security.md"""
    listening = {
        (process.cmdline()[0].removeprefix("ray::").split(":")[0], each.laddr.port)
        for process in psutil.Process().children(recursive=True)
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN and not is_loopback(each.laddr.ip)
    }
    assert {name for name, _ in listening} <= {"ServeReplica", "ProxyActor"}
    assert {system.settings.serving.http_port, 8404, 9101}.isdisjoint(port for _, port in listening)


def test_heads_are_given_where_gets_are_and_a_405_says_what_is(http: httpx.Client) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/v1/models", "/docs"):
        response = http.head(path)
        assert (response.status_code, response.content) == (200, b"")
    assert http.put("/v1/answer").headers["allow"] == "POST"


def test_a_large_body_is_refused_as_such(http: httpx.Client) -> None:
    response = http.post("/v1/answer", content=b'{"question": "' + b"x" * (1 << 20) + b'"}')
    assert response.status_code == 413
    assert "body must have at most 1048576 bytes" in response.json()["detail"]


def running(deployment: str) -> list[psutil.Process]:
    """Its replicas. While Ray has one do something, that stands behind its name."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            if "".join(process.cmdline()).startswith(f"ray::ServeReplica:openbook:{deployment}"):
                found.append(process)
    return found


def load_other_space(settings: EncoderSettings) -> HashEncoder:
    return HashEncoder(2 * DIMENSION)


def load_nothing(settings: GeneratorSettings) -> EchoModel:
    raise InvalidModel("generator 'nowhere': no such folder")


def test_an_update_for_which_there_is_no_room_is_given_up_and_undone(system: System, client: Client) -> None:
    if is_split(system):
        pytest.skip("whichever replica has no room, its update is waited for and given up in one way: once")
    generator = system.settings.generator.model_copy(update={"num_gpus": 1})
    settings = system.settings.model_copy(update={"generator": generator})
    with pytest.raises(StartupError, match=r"the application does not run after \d+ s: .*UPDATING"):
        run.deploy(assemble(settings, load_hash, load_echo), settings.serving, timeout_s=1.0)
    assert client.answer(f"{QUESTION} meanwhile").text
    run.deploy(assemble(system.settings, load_hash, load_echo), system.settings.serving, PATIENCE_S)
    assert client.answer(f"{QUESTION} afterwards").text


def test_a_replica_that_dies_is_replaced_and_callers_hear_why(system: System, http: httpx.Client) -> None:
    """The only one there is. Serve's own proxy has other words for what was under way, and lets the others wait."""
    [replica] = running("ingress")
    heard: list[tuple[str, str]] = []

    def ask_over_grpc() -> None:
        try:
            stub.Answer(answer_pb2.AnswerRequest(question=QUESTION), timeout=PATIENCE_S)
        except grpc.RpcError as error:
            heard.append((error.code().name, error.details() or ""))
        else:
            answered.add("gRPC")

    def ask_over_http() -> None:
        with suppress(httpx.RemoteProtocolError):  # a connection that was kept may be closed instead
            response = http.post("/v1/answer", json={"question": QUESTION})
            if response.status_code == 200:
                answered.add("HTTP")
            elif system.settings.serving.proxy == "haproxy":
                heard.append((response.json()["code"], response.json()["detail"]))

    replica.kill()
    answered, give_up = set[str](), monotonic() + PATIENCE_S
    with grpc.insecure_channel(system.grpc) as channel:
        stub = answer_pb2_grpc.AnswerServiceStub(channel)
        while answered < {"gRPC", "HTTP"}:
            ask_over_grpc()
            ask_over_http()
            assert monotonic() < give_up, heard[-1:]
            sleep(0.05)
    if system.settings.serving.proxy == "haproxy":
        assert {code for code, _ in heard} <= {"UNAVAILABLE"}
        reasons = "no replica of the endpoint answers|the replica broke off its answer"
        assert any(re.search(reasons, message) for _, message in heard)  # or that the stream was reset


@pytest.mark.parametrize(
    ("topology", "address", "encoder", "generator", "error", "message"),
    [
        (
            *("fused", None, load_other_space, load_echo),
            *(SnapshotMismatch, "dimension 128 .*hash-128.* dimension 64 .*hash-64"),
        ),
        ("fused", "127.0.0.1:1", load_hash, load_echo, ShardUnavailable, "127.0.0.1:1"),
        ("split", None, load_hash, load_nothing, InvalidModel, "generator 'nowhere': no such folder$"),
    ],
)
def test_a_replica_that_cannot_start_says_why(
    topology: str,
    address: str | None,
    encoder: EncoderLoader,
    generator: GeneratorLoader,
    error: type[OpenbookError],
    message: str,
    system: System,
) -> None:
    """The endpoint's or a model's. From here on nothing is served."""
    settings = system.settings
    if settings.serving.topology != topology:
        pytest.skip("whatever keeps a replica from starting comes out one way: each once")
    index = IndexClientSettings(addresses=(address,), timeout_s=1) if address else settings.index
    with pytest.raises(error, match=message):
        run.deploy(assemble(settings.model_copy(update={"index": index}), encoder, generator), settings.serving)


@dataclass(frozen=True)
class Guarded:
    """A deployment with keys."""

    settings: Settings
    book: KeyBook
    records: dict[str, KeyRecord]
    keys: dict[str, str]
    keeper: RedisServer
    """Which has them, where they are in a Redis."""

    def client(self, timeout_s: float = PATIENCE_S, name: str = "any") -> Client:
        return Client(self.settings.serving.grpc_address, timeout_s, self.keys[name], retries=False)


@pytest.fixture(scope="module")
def guarded(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """What is there from its first test on. Two replicas of the endpoint; behind HAProxy the models in processes of
    their own and keys in a Redis, as on a cluster, else two of the generator and keys in a file.
    """
    folder, by_haproxy = tmp_path_factory.mktemp("keys"), system.settings.serving.proxy == "haproxy"
    with RedisServer(keeps_in=folder / "redis") as keeper:
        named: dict[str, Any] = {"keys": "redis", "url": keeper.url}
        if not by_haproxy:
            named = {"keys": "file", "path": folder / "keys.jsonl"}
        access = AccessSettings.model_validate(named)
        book: KeyBook = KeyRedisBook(access) if by_haproxy else KeyFileBook(folder / "keys.jsonl")
        limits = {"any": Limits(), "web": Limits(questions_per_day=1000), "once": Limits(questions_per_day=1)}
        made = {name: mint(name, 0.0, [Scope.ASK], limits=each) for name, each in limits.items()}
        for _, record in made.values():
            book.put(lambda _, record=record: record)  # type: ignore[misc]
        serving = system.settings.serving.model_copy(update={"topology": "split", "n_replicas": 2})
        generator = system.settings.generator.model_copy(update={"n_replicas": 1 if by_haproxy else 2})
        changed = {"access": access, "serving": serving, "generator": generator}
        settings = system.settings.model_copy(update=changed)
        run.deploy(assemble(settings, load_hash, load_echo), serving)
        records = {name: record for name, (_, record) in made.items()}
        yield Guarded(settings, book, records, {name: key for name, (key, _) in made.items()}, keeper)


def test_the_next_one_put_right_starts(guarded: Guarded) -> None:
    with guarded.client() as client:
        assert client.answer(QUESTION).text


def test_what_a_frozen_replica_holds_is_asked_of_the_other_one(guarded: Guarded) -> None:
    if guarded.settings.serving.proxy == "haproxy":
        pytest.skip("which proxy there is makes no difference behind the endpoint")
    replicas = running("generator")
    assert len(replicas) == 2
    with guarded.client(FROZEN_TIMEOUT_S) as client:
        for n in range(N_PAY):
            client.answer(f"{QUESTION} {n}")
        replicas[0].suspend()
        try:
            for n in range(N_PAY):  # whose turn is at random at first
                assert client.answer(f"{QUESTION} then {n}").text
        finally:
            replicas[0].resume()


def test_a_frozen_ingress_keeps_none_waiting_but_its_own(guarded: Guarded, held_up: Path) -> None:
    """The models have something for it that it does not take."""
    if guarded.settings.serving.proxy == "haproxy":
        pytest.skip("which proxy there is makes no difference behind the endpoint")
    question = f"ponder {held_up}"
    frozen, _ = running("ingress")
    with guarded.client(FROZEN_TIMEOUT_S) as client, ThreadPoolExecutor(2 * MAX_IN_FLIGHT) as pool:

        def is_answered(question: str) -> bool:
            with suppress(OpenbookError):
                return bool(client.answer(question).text)
            return False

        pondered = [pool.submit(is_answered, question) for _ in range(MAX_IN_FLIGHT)]
        while not begun(question).exists():
            assert not all(each.done() for each in pondered)
        frozen.suspend()
        try:
            held_up.unlink()
            assert any(each.result() for each in pondered)
            assert any(pool.map(is_answered, [f"{QUESTION} at last {n}" for n in range(MAX_IN_FLIGHT)]))
        finally:
            frozen.resume()


def test_who_connects_to_whom_is_who_may(system: System, guarded: Guarded, redis_server: RedisServer) -> None:
    serving = guarded.settings.serving
    if serving.proxy == "python":
        pytest.skip("which proxy there is makes no difference to who connects, and HAProxy is the usual one")
    with ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=system.http, timeout=PATIENCE_S, trust_env=False))
        client = stack.enter_context(guarded.client())
        assert client.answer(QUESTION).text
        key = guarded.keys["any"]
        http.post("/v1/answer", json={"question": QUESTION}, headers={"x-api-key": key}).raise_for_status()
        assert serving.metrics_port
        readers = list(scraped(serving.metrics_port, stack))
        named = {
            **{int(each.rpartition(":")[2]): ("index", PORTS.index) for each in guarded.settings.index.addresses},
            redis_server.port: ("cache", PORTS.redis),
            guarded.keeper.port: ("keys", PORTS.keys),
            serving.http_port: ("endpoint", PORTS.http),
            serving.grpc_port: ("endpoint", PORTS.grpc),
        }
        assert connections(named, {each.getsockname()[1] for each in readers}) == allowed() - OF_OPERATOR


def test_with_keys_only_who_has_one_is_let_in(system: System, guarded: Guarded, http: httpx.Client) -> None:
    """At both of two replicas."""
    key, once = guarded.keys["web"], guarded.keys["once"]
    with Redis.from_url(str(system.settings.cache.url)) as redis:
        redis.delete("openbook:quota:web", "openbook:quota:once")  # the Redis is that of all tests
    if time() % A_DAY_S > A_DAY_S - MIDNIGHT_S:
        pytest.skip("at midnight, UTC, questions of a day are counted from none again")
    with Client(system.grpc, PATIENCE_S) as nobody, Client(system.grpc, PATIENCE_S, key) as holder:

        def refuses(error: type[OpenbookError], ask: Callable[[], object], response: httpx.Response) -> None:
            with pytest.raises(error):
                ask()
            assert (response.status_code, response.json()["code"]) == (error.http_status, error.grpc_code)

        def post(path: str, **headers: str) -> httpx.Response:
            return http.post(path, json={"question": QUESTION}, headers=headers)

        refuses(Unauthenticated, lambda: nobody.answer(QUESTION), post("/v1/answer"))
        refuses(Unauthenticated, lambda: list(nobody.stream(QUESTION)), post("/v1/answer/stream"))
        refuses(PermissionDenied, lambda: holder.retrieve(QUESTION), post("/v1/retrieve", **{"x-api-key": key}))
        assert http.get("/metrics").headers["www-authenticate"].startswith("Bearer")
        assert http.get("/readyz").status_code == 200
        assert holder.answer(QUESTION).text == post("/v1/answer", **{"x-api-key": key}).json()["answer"]
        assert [type(event) for event in holder.stream(QUESTION)][-1] is Answer
        left = post("/v1/answer", **{"x-api-key": key}).headers["ratelimit"]
        assert re.fullmatch(r'"questions-day";r=996;t=\d+', left)
        with grpc.insecure_channel(system.grpc) as channel:
            asked = answer_pb2.AnswerRequest(question=QUESTION)
            stub = answer_pb2_grpc.AnswerServiceStub(channel)
            _, call = stub.Answer.with_call(asked, metadata=[("x-api-key", key)])
            assert '"questions-day";r=995;t=' in dict(call.trailing_metadata())["ratelimit"]
            assert list(stub.AnswerStream(asked, metadata=[("x-api-key", once)]))
            refused = stub.AnswerStream(asked, metadata=[("x-api-key", once)])
            with pytest.raises(grpc.RpcError, match="1 of 1 questions a day are used"):
                list(refused)
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            if system.settings.serving.proxy == "haproxy":  # the other one drops what a stream says beside
                assert dict(refused.trailing_metadata())["grpc-retry-pushback-ms"] == "-1"
                assert rpc_status.from_call(refused).message == refused.details()

        guarded.book.put(lambda records: revoked(records, guarded.records["web"].prefix, 1.0))
        begun, n_refused = monotonic(), 0
        while n_refused < 24:  # in a row: by both replicas, of which one is drawn each time
            n_refused = n_refused + 1 if post("/v1/answer", **{"x-api-key": key}).status_code == 401 else 0
        assert monotonic() - begun < 5  # half a second, on a machine that has nothing else to do
        refuses(Unauthenticated, lambda: holder.answer(QUESTION), post("/v1/answer", **{"x-api-key": key}))
