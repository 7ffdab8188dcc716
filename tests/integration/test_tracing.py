"""One question, one trace: over real index servers, with models that need no time, every hop under who called it."""

import asyncio
import json
import pickle
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from openbook import cli
from openbook.cache.memory import MemoryCache
from openbook.config import EncoderSettings, GeneratorSettings, IndexServerSettings, ServingSettings, parse
from openbook.core.confidence import UNFITTED
from openbook.core.context import Context
from openbook.core.types import Float32, Generation, GenerationSettings, Passage, Retrieved, Token
from openbook.errors import InvalidConfig, InvalidRequest
from openbook.index.building.build import build_snapshot
from openbook.index.client.sharded import ShardedIndex
from openbook.index.disk.snapshot import Snapshot
from openbook.index.server.server import IndexServer
from openbook.rag.pipeline import Pipeline
from openbook.serving.app import Ingress
from openbook.serving.endpoint.schemas import AnswerRequest
from openbook.serving.endpoint.service import AnswerService
from openbook.serving.workers.batching import Batcher
from openbook.serving.workers.encoder import EncoderDeployment, LocalEncoder
from openbook.serving.workers.generator import GeneratorDeployment, LocalGenerator
from openbook.testing import EchoGenerator, HashEncoder
from openbook.tracing import otel
from openbook.tracing.otel import OtelTracer
from openbook.tracing.picture import choose, draw, in_rows, read
from openbook.tracing.spans import setup_tracing, span

QUESTION = "does Quetzalcoatl have the flu?"
PASSAGES = [Passage(i, f"d{i}", f"title {i}", f"some words of passage {i}") for i in range(8)]
SETTINGS = parse({"answer": {"k": 4, "n_beams": 1, "formulation": "token"}})
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLERS = "b7ad6b7169203331"
ASKED = Context(request_id="mine", trace=f"00-{TRACE_ID}-{CALLERS}-01")


class Encoder(HashEncoder):
    """As a model."""

    def padded_length(self, question: str) -> int:
        return 1

    def encode_questions(self, questions: Sequence[str], *check: Any) -> Float32:
        return super().encode_questions(questions)


class Generator:
    """As a model."""

    fingerprint = generates_by = "echo"
    calibration = UNFITTED

    def generate(
        self, questions: Sequence[str], retrieved: Sequence[Retrieved], settings: GenerationSettings, check: Any
    ) -> list[Generation]:
        return [asyncio.run(EchoGenerator().generate("", each, settings, Context())) for each in retrieved]

    def stream(self, question: str, retrieved: Retrieved, settings: GenerationSettings, check: Any) -> Iterator[Any]:
        (generation,) = self.generate([question], [retrieved], settings, check)
        yield Token("some", 0.0, tuple(generation.log_prior.tolist()))
        yield generation


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this process's spans go."""
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_SAMPLER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENBOOK_TRACE_FILE", str(tmp_path / "spans.jsonl"))
    setup_tracing("test")
    yield tmp_path / "spans.jsonl"
    monkeypatch.undo()
    setup_tracing("test")


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tracing") / "snapshot"
    build_snapshot(PASSAGES, Encoder().encode_passages(PASSAGES), folder, 2, "Flat", "hash", Encoder().fingerprint)
    return folder


def answer(snapshot: Path, context: Context, frames: bool, **fields: Any) -> None:
    """One question to the whole of it, in one process; streamed too where it says so."""
    streamed = fields.pop("streamed", False)

    async def main(addresses: Sequence[str]) -> None:
        index, encoder = ShardedIndex(addresses, 20.0), LocalEncoder(Encoder(), EncoderSettings())
        generator = LocalGenerator(Generator(), GeneratorSettings())
        await index.connect()
        if frames:
            for client in index._connected()._clients.values():
                client._usable()
                assert client._hurrying is not None
                await client._hurrying
        pipeline = Pipeline(encoder, index, index, generator, MemoryCache(9), SETTINGS.answer)
        service = AnswerService(pipeline, SETTINGS, index.connect)
        request = AnswerRequest(question=QUESTION, **fields)
        try:
            if streamed:
                assert [event async for event in service.stream(request, context)]
            else:
                assert (await service.answer(request, context)).text
        finally:
            for each in (pipeline, encoder, generator):
                await each.aclose()
            await index.close()

    port = 0 if frames else None
    settings = [IndexServerSettings(snapshot=snapshot, shard=shard, frame_port=port) for shard in range(2)]
    with IndexServer(settings[0]) as one, IndexServer(settings[1]) as other:
        asyncio.run(main([one.address, other.address]))


def tree(file: Path) -> list[str]:
    """The names of a trace's spans, indented by depth, siblings by name."""
    rows = list(in_rows(read(file)))
    paths: list[str] = []
    found = []
    for depth, each in rows:
        paths[depth:] = [each.name]
        found.append("/".join(paths))
    return sorted(found)


SHARDS = [
    f"{stage}/{method} shard {shard}{below}"
    for stage, method, belows in (
        ("search", "Search", ("", "/Search", "/Search/FAISS")),
        ("fetch", "Fetch", ("", "/Fetch")),
    )
    for shard in range(2)
    for below in belows
]
STAGES = [
    "cache",
    "encode",
    "encode/wait for encoder",
    "encode/encoder computes",
    "search",
    "fetch",
    *SHARDS,
    "generate",
]


@pytest.mark.parametrize("frames", [True, False], ids=["frames", "gRPC"])
def test_one_question_is_one_trace(snapshot: Path, file: Path, frames: bool) -> None:
    answer(snapshot, ASKED, frames)
    spans = read(file)
    assert {each.trace_id for each in spans} == {TRACE_ID}
    (root,) = [each for each in spans if each.name == "Answer"]
    assert (root.parent_id, root.kind) == (CALLERS, "server")
    below = [*STAGES, "generate/wait for generator", "generate/generator computes"]
    assert tree(file) == sorted(["Answer", *(f"Answer/{each}" for each in below)])
    by_id = {each.span_id: each for each in spans}
    for each in spans:
        parent = by_id.get(each.parent_id, each)
        assert parent.start_ns <= each.start_ns <= each.end_ns <= parent.end_ns or each.kind == "server", each
        assert each.attributes["code"] == "OK"
        assert each.attributes["request_id"] == "mine"
    searches = [each for each in spans if each.kind == "server" and each.name == "Search"]
    assert [each.attributes["rows"] for each in searches] == [1, 1]
    assert {each.attributes["k"] for each in searches} == {4}
    assert {each.attributes["snapshot"] for each in searches} == {Snapshot.open(snapshot).manifest.snapshot_id}


def test_a_stream_is_traced_to_its_end(snapshot: Path, file: Path) -> None:
    answer(snapshot, ASKED, True, streamed=True)
    below = [*STAGES, "generate/wait for generator", "generate/generator streams"]
    assert tree(file) == sorted(["AnswerStream", *(f"AnswerStream/{each}" for each in below)])


def test_what_a_caller_does_not_sample_is_not_recorded(
    snapshot: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(snapshot, Context(trace=f"00-{TRACE_ID}-{CALLERS}-00"), True)
    assert read(file) == []
    answer(snapshot, Context(), True)
    assert {each.name for each in read(file) if not each.parent_id} == {"Answer"}
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    setup_tracing("test")
    n = len(read(file))
    answer(snapshot, Context(), True)
    assert len(read(file)) == n
    answer(snapshot, ASKED, True)
    assert len(read(file)) > n


@pytest.mark.parametrize("trace", ["nonsense", f"00-{'0' * 32}-{CALLERS}-01", "00-1-2"])
def test_a_trace_that_is_none_begins_a_new_one(file: Path, trace: str) -> None:
    with span("here", Context(trace=trace)) as inner:
        assert inner.trace[-1] in "13"  # with or without the flag that its id is random
    (only,) = read(file)
    assert only.parent_id == ""


def test_what_went_wrong_stands_there_by_its_code_alone(snapshot: Path, file: Path) -> None:
    with pytest.raises(InvalidRequest):
        answer(snapshot, ASKED, True, k=101, labels=["Quetzalcoatl"])
    for error in (InvalidRequest(QUESTION), ValueError(QUESTION), asyncio.CancelledError()):
        with pytest.raises(type(error)), span("here", ASKED):
            raise error
    spans = read(file)
    codes = [each.attributes["code"] for each in spans if each.name == "here"]
    assert codes == ["INVALID_ARGUMENT", "INTERNAL", "CANCELLED"]
    assert "Quetzalcoatl" not in file.read_text()


def test_a_batch_of_several_has_links_to_all_of_them(file: Path) -> None:
    begun, enough = threading.Event(), threading.Event()

    def model(items: Sequence[int], check: Any) -> Sequence[int]:
        begun.set()
        enough.wait()
        return items

    async def main() -> None:
        batcher: Batcher[int, int] = Batcher(model, name="model", max_batch=8, max_queue=8)
        contexts = [Context(request_id=str(i)) for i in range(3)]
        recorded = [span("asked", context) for context in contexts]
        first = asyncio.create_task(batcher.submit(0, recorded[0].context))
        await asyncio.to_thread(begun.wait)
        others = [asyncio.create_task(batcher.submit(i, recorded[i].context)) for i in (1, 2)]
        await asyncio.sleep(0)
        enough.set()
        assert await asyncio.gather(first, *others) == [0, 1, 2]
        for each in recorded:
            each.end()
        await batcher.aclose()

    asyncio.run(main())
    spans = read(file)
    (whole,) = [each for each in spans if each.name == "model computes batch"]
    asked = {each.attributes["request_id"]: each for each in spans if each.name == "asked"}
    assert {link["span_id"] for link in whole.links} == {asked["1"].span_id, asked["2"].span_id}
    assert whole.attributes["n"] == 2
    computed = {each.attributes["request_id"]: each for each in spans if each.name == "model computes"}
    assert [computed[i].parent_id == asked[i].span_id for i in "012"] == [True] * 3
    assert [[link["span_id"] for link in computed[i].links] for i in "012"] == [[], [whole.span_id], [whole.span_id]]


def test_a_trace_goes_on_in_another_process(file: Path) -> None:
    """As far as that shows in this one: a context is pickled on its way to a replica."""

    async def main(context: Context) -> None:
        monkey = pytest.MonkeyPatch()
        for name in ("setup_logging", "setup_tracing"):
            monkey.setattr(f"openbook.serving.workers.encoder.{name}", lambda role: None)
        replica = EncoderDeployment(EncoderSettings(), lambda _: Encoder(), ServingSettings())
        monkey.undo()
        assert isinstance(await replica.encode([QUESTION], context), np.ndarray)
        await replica._encoder.aclose()

    with span("encode", ASKED) as inner:
        asyncio.run(main(pickle.loads(pickle.dumps(inner))))  # noqa: S301
    assert tree(file) == [
        "encode",
        "encode/encoder replica",
        "encode/encoder replica/encoder computes",
        "encode/encoder replica/wait for encoder",
    ]


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bytes]]]:
    """What a collector hears of this process's spans."""
    heard: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *said: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # by itself nothing is sent
        monkeypatch.setenv("no_proxy", "*")
        setup_tracing("index-3")
        yield heard
        monkeypatch.undo()
        setup_tracing("test")
        server.shutdown()


def test_spans_go_to_a_collector(received: list[tuple[str, bytes]]) -> None:
    with span("Search", ASKED, "server", k=5):
        pass
    setup_tracing("another")  # what was not sent yet is
    ((path, body),) = received
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    names = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert (names["service.name"], names["openbook.role"]) == ("openbook-index", "index-3")
    (sent,) = resource.scope_spans[0].spans
    assert (sent.name, sent.trace_id.hex(), sent.parent_span_id.hex()) == ("Search", TRACE_ID, CALLERS)


@pytest.mark.parametrize("replica", [Ingress, EncoderDeployment, GeneratorDeployment])
def test_a_replica_that_serve_ends_sends_its_last_spans(replica: Any, received: list[tuple[str, bytes]]) -> None:
    with span("last", ASKED):
        pass
    assert not received
    replica.__new__(replica).__del__()  # as Serve calls it
    assert len(received) == 1


def test_a_collector_that_says_nothing_holds_up_nobody_who_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "FLUSH_S", 0.01)
    tracer, over, sent = OtelTracer("ingress", None, sends=False), threading.Event(), []
    monkeypatch.setattr(tracer._provider, "force_flush", lambda: sent.append(over.wait(5)))
    tracer.flush()
    assert sent == []
    over.set()
    tracer.close()


@pytest.mark.parametrize("variable", ["OTEL_SERVICE_NAME=search", "OTEL_RESOURCE_ATTRIBUTES=a=b,service.name=search"])
def test_the_environment_may_name_the_service(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*variable.split("=", 1))
    tracer = OtelTracer("index-3", None, sends=False)
    named = tracer._provider.resource.attributes
    tracer.close()
    assert (named["service.name"], named["openbook.role"]) == ("search", "index-3")


def test_what_cannot_be_traced_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBOOK_TRACE_FILE", str(tmp_path))
    with pytest.raises(InvalidConfig, match=r"OPENBOOK_TRACE_FILE = .*cannot be written"):
        setup_tracing("test")
    monkeypatch.delenv("OPENBOOK_TRACE_FILE")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    for variable, value, told in (
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "pip install opentelemetry-exporter-otlp-proto-grpc"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "PROTOCOL must be http/protobuf or grpc, got 'http/json'"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "pigeon", "TRACES_PROTOCOL must be http/protobuf or grpc, got 'pigeon'"),
        ("OTEL_TRACES_EXPORTER", "console", "OTEL_TRACES_EXPORTER must be otlp or none, got 'console'"),
    ):
        monkeypatch.setenv(variable, value)
        with pytest.raises(InvalidConfig, match=told):
            setup_tracing("test")
    assert span("one", ASKED).context is ASKED


def test_no_exporter_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    setup_tracing("test")
    assert span("one", ASKED).context is ASKED


def test_a_picture_that_cannot_be_written_is_one_line(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And is told before the trace is read, which may be long."""
    for out, why in (
        (tmp_path / "none" / "trace.svg", "must be a file in a folder that exists"),
        (tmp_path / f"{'t' * 245}.svg", "cannot be written: File name too long"),
    ):
        monkeypatch.setattr(sys, "argv", ["openbook", "trace", str(file.with_name("unread")), "--out", str(out)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code, capsys.readouterr().err) == (1, f"openbook: {out}: {why}\n")


def test_a_trace_can_be_drawn(snapshot: Path, file: Path) -> None:
    answer(snapshot, ASKED, True)
    with span("another", Context(request_id="<other>")):
        pass
    spans = read(file)
    picture = draw(choose(spans, "mine"))
    assert picture.count("<rect") == len(spans) - 1 + 2  # the page, and the process's colour
    assert "Search shard 1" in picture
    assert [each.name for each in choose(spans, None)] == ["another"]
    with pytest.raises(InvalidRequest, match="no span has request id 'nobody'"):
        choose(spans, "nobody")
    file.write_text(json.dumps({"name": "x"}))
    with pytest.raises(InvalidRequest, match="line 1 is no span"):
        read(file)
    with pytest.raises(InvalidRequest, match=r"none\.jsonl: cannot be read: No such file or directory$"):
        read(file.with_name("none.jsonl"))
