"""A passage in its document, by whatever way it is asked for: HTTP, gRPC, Python, the command line, on disk."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unicodedata import normalize

import httpx
import numpy as np
import pytest
from google.protobuf.json_format import MessageToDict
from test_service import GrpcContext, ready
from typer.testing import CliRunner

from openbook.cache.memory import MemoryCache
from openbook.cli import app
from openbook.client import messages
from openbook.config import parse
from openbook.core.context import Context
from openbook.core.fingerprint import text_digest
from openbook.core.origin import Field, FieldType, Origin
from openbook.core.passages import in_document
from openbook.core.types import Passage
from openbook.errors import InvalidRequest, SnapshotMismatch, UnknownPassage
from openbook.index.building.build import build_snapshot
from openbook.index.disk.passages import SnapshotPassages
from openbook.rag.excerpt import excerpt
from openbook.rag.pipeline import Pipeline
from openbook.serving.endpoint.http import build_app
from openbook.serving.endpoint.ingress import AnswerIngress
from openbook.serving.endpoint.service import AnswerService
from openbook.serving.endpoint.urls import url_of
from openbook.testing import EchoGenerator, ExactIndex, HashEncoder
from openbook.v1 import answer_pb2

FIELDS = (Field("year", FieldType.INT), Field("open", FieldType.BOOL))


def passage(id: int, document: str, start: int, text: str) -> Passage:
    origin = Origin(
        document_digest=text_digest(document),
        start=start,
        end=start + len(text),
        path=f"{document}.md",
        url="https://example.org/bell" if document == "bell" else "",
        section="Life",
        page=2,
        fields={"year": 1876, "open": True},
    )
    return Passage(id, document, document.title(), text, origin)


PASSAGES = [
    passage(0, "bell", 0, "Bell patented the telephone"),
    passage(1, "bell", 28, "He was born in Edinburgh"),
    passage(2, "bell", 53, "and died in Canada"),
    passage(3, "curie", 0, "Curie was born in Warsaw"),
    Passage(4, "old", "Old", "of a former snapshot"),
]
LASTING = PASSAGES[1].lasting_id


def service() -> AnswerService:
    settings, encoder = parse({"answer": {"k": 2}}), HashEncoder()
    index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES), "s1")
    pipeline = Pipeline(encoder, index, index, EchoGenerator(), MemoryCache(10), settings.answer)
    return AnswerService(pipeline, settings, ready)


def get(path: str, **query: Any) -> tuple[int, Any]:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(service()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path, params=query)

    response = asyncio.run(ask())
    return response.status_code, response.json()


def over_grpc(**asked: Any) -> tuple[Any, GrpcContext]:
    context = GrpcContext()
    request = answer_pb2.PassageRequest(**asked).SerializeToString()
    return asyncio.run(AnswerIngress(service()).GetPassage(request, context)), context  # type: ignore[arg-type]


def ids(told: Any) -> list[int]:
    return [int(each["id"]) for each in (*told["before"], told["passage"], *told["after"])]


@pytest.mark.parametrize("id", ["1", LASTING])
def test_a_passage_comes_with_its_neighbours_in_its_document(id: str) -> None:
    status, told = get(f"/v1/passages/{id}", around=2)
    assert status == 200
    assert ids(told) == [0, 1, 2]
    assert (told["snapshot_id"], told["passage"]["lasting_id"]) == ("s1", LASTING)
    assert told["passage"]["origin"] == {
        "document_digest": text_digest("bell"),
        "start": 28,
        "end": 52,
        "path": "bell.md",
        "url": "https://example.org/bell",
        "section": "Life",
        "page": 2,
        "language": "",
        "date": "",
        "fields": {"year": 1876, "open": True},
    }
    reply, _ = over_grpc(id=id, around=2, request_id="mine")
    found = messages.excerpt(reply)
    assert [*found.before, found.passage, *found.after] == PASSAGES[:3]
    assert found.request_id == "mine"


def test_alone_if_no_neighbours_are_asked_for() -> None:
    assert ids(get("/v1/passages/2")[1]) == [2]
    assert ids(get("/v1/passages/0", around=1)[1]) == [0, 1]
    assert ids(get("/v1/passages/3", around=50)[1]) == [3]


def test_of_a_snapshot_without_origins_a_passage_is_told_without() -> None:
    _, told = get("/v1/passages/4", around=1)
    assert (told["before"], told["passage"]["origin"], told["passage"]["lasting_id"]) == ([], None, "")
    old = [Passage(i, "d", "t", str(i)) for i in range(3)]
    assert in_document(old, 1) == (old[:1], old[2:])


@pytest.mark.parametrize(
    ("path", "query", "status", "detail"),
    [
        ("5", {}, 404, "passage id must be 0..4"),
        ("f" * 32, {}, 404, f"no passage of snapshot s1 has the lasting id {'f' * 32}"),
        ("bell", {}, 404, "id must be a passage's number or its lasting id of 32 digits, got 'bell'"),
        ("-1", {}, 404, "got '-1'"),
        ("1", {"around": 51}, 400, "around: Input should be less than or equal to 50, got '51'"),
        ("1", {"around": "x"}, 400, "around: "),
        ("1", {"snapshot_id": "s0"}, 404, "the index holds snapshot s1, asked for s0"),
        ("1", {"arround": 2}, 400, "unknown key 'arround'"),
        ("1", {f"x{i}": 0 for i in range(14)}, 400, "query: there are 3 fields, and not 14"),
        ("1", {"timeout_s": 0}, 400, "timeout_s must be above 0"),
        ("1", {"snapshot_id": "x\nforged"}, 400, "snapshot_id must have at most 128 printable ASCII characters"),
    ],
)
def test_what_cannot_be_told_is_said(path: str, query: dict[str, Any], status: int, detail: str) -> None:
    found, told = get(f"/v1/passages/{path}", **query)
    assert (found, detail in told["detail"]) == (status, True), told


def test_a_publication_in_between_makes_a_passage_unknown_only_where_its_snapshot_was_named() -> None:
    class Published(ExactIndex):
        async def fetch(self, ids: Sequence[int], snapshot_id: str, context: Context) -> list[Passage]:
            raise SnapshotMismatch(f"the index holds snapshot s2, asked for {snapshot_id}")

    index = Published(PASSAGES, HashEncoder().encode_passages(PASSAGES), "s1")
    for named, error in (("", SnapshotMismatch), ("s1", UnknownPassage)):
        with pytest.raises(error, match="asked for s1"):
            asyncio.run(excerpt(index, "1", 0, named, Context()))


def test_over_grpc_errors_are_the_same() -> None:
    for asked, code, detail in [
        ({"id": "f" * 32}, "NOT_FOUND", "has the lasting id"),
        ({}, "NOT_FOUND", "id must be a passage's number"),
        ({"id": "1", "around": 51}, "INVALID_ARGUMENT", "around must be 0..50, got 51"),
    ]:
        _, context = over_grpc(**asked)
        assert context.code is not None
        assert (context.code.name, detail in context.details) == (code, True)


def test_evidence_carries_its_origin_over_both_protocols() -> None:
    (evidence,) = post("/v1/answer", {"question": "who patented the telephone", "k": 1})["evidence"]
    context = GrpcContext()
    request = answer_pb2.AnswerRequest(question="who patented the telephone", k=1)
    reply = asyncio.run(AnswerIngress(service()).Answer(request.SerializeToString(), context))  # type: ignore[arg-type]
    found = messages.answer(reply).evidence[0].passage
    assert found == PASSAGES[0]
    assert evidence["passage"]["origin"]["path"] == "bell.md"
    told = MessageToDict(reply.evidence[0].passage, preserving_proto_field_name=True)
    assert told["lasting_id"] == evidence["passage"]["lasting_id"] == PASSAGES[0].lasting_id
    assert told["origin"]["fields"] == {"year": {"whole": "1876"}, "open": {"truth": True}}
    assert url_of(found) == "https://example.org/bell"


def post(path: str, body: dict[str, Any]) -> Any:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(service()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json=body, headers={"accept": "application/json, text/event-stream"})

    return asyncio.run(ask()).json()


def test_protocols_that_people_speak_carry_it_too() -> None:
    asked = {"model": "openbook", "messages": [{"role": "user", "content": "who patented the telephone"}]}
    (cited, *_) = post("/v1/chat/completions", asked)["citations"]
    assert (cited["url"], cited["origin"]["path"]) == ("https://example.org/bell", "bell.md")
    assert cited["lasting_id"] == PASSAGES[0].lasting_id
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    told = post("/mcp", {**call, "params": {"name": "fetch", "arguments": {"id": "s1:1"}}})["result"][
        "structuredContent"
    ]
    metadata = {name: told["metadata"][name] for name in ("lasting_id", "path", "section", "page", "fields")}
    expected = (LASTING, "bell.md", "Life", 2, {"year": 1876, "open": True})
    assert tuple(metadata.values()) == expected
    assert "language" not in told["metadata"]


# --- on disk, and from the command line


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    vectors = np.eye(4, dtype=np.float32)
    build_snapshot(PASSAGES[:4], vectors, tmp_path / "s", 3, "Flat", "e", "f", fields=FIELDS)
    return tmp_path / "s"


def run(*words: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["passages", *words, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_snapshot_on_disk_is_one_sequence(snapshot: Path) -> None:
    passages = SnapshotPassages(snapshot)
    assert list(passages) == passages[:] == PASSAGES[:4]
    assert [passages.locate(each.lasting_id) for each in PASSAGES[:4]] == [0, 1, 2, 3]
    for unknown, message in (("4", r"0\.\.3 in .* got 4"), ("f" * 32, "has the lasting id"), ("x", "got 'x'")):
        with pytest.raises(UnknownPassage, match=message):
            passages.locate(unknown)


def test_passages_are_got_and_found_from_the_command_line(snapshot: Path) -> None:
    where = str(snapshot)
    assert [each["id"] for each in run("get", where, LASTING)] == [1]
    assert run("get", where, "1")[0]["origin"]["fields"] == {"year": 1876, "open": True}
    assert [each["id"] for each in run("around", where, "1", "-n", "1")] == [0, 1, 2]
    assert [each["id"] for each in run("find", where, "--text", "BORN")] == [1, 3]
    assert [each["id"] for each in run("find", where, "--text", "born", "--title", "cur")] == [3]
    assert [each["id"] for each in run("find", where, "--path", "example.org", "--limit", "2")] == [0, 1]
    assert [each["id"] for each in run("find", where, "--document", "curie")] == [3]
    with pytest.raises(InvalidRequest, match="one of --document, --title, --path, --text"):
        run("find", where)
    nothing = CliRunner().invoke(app, ["passages", "find", where, "--text", "nosuch", "--json"])
    assert (nothing.exit_code, nothing.stdout, nothing.stderr) == (0, "", f"{where}: no passage found\n")
    refused = CliRunner().invoke(app, ["passages", "find", where, "--text", "born", "--limit", "-1"])
    assert (refused.exit_code, "--limit" in refused.stderr) == (2, True)


def test_accents_are_found_however_they_are_written(tmp_path: Path) -> None:
    written = passage(0, normalize("NFD", "café"), 0, normalize("NFC", "Un café"))
    build_snapshot([written], np.ones((1, 2), np.float32), tmp_path / "s", 1, "Flat", "e", "f", fields=FIELDS)
    for wanted in (normalize("NFC", "Café"), normalize("NFD", "Café")):
        assert len(run("find", str(tmp_path / "s"), "--path", wanted, "--text", wanted)) == 1


def test_what_a_person_sees_of_a_passage(snapshot: Path) -> None:
    done = CliRunner().invoke(app, ["passages", "get", str(snapshot), "1"])
    assert LASTING in done.stdout
    shown = " ".join(done.stdout.split())
    assert "bell.md · https://example.org/bell · Life · page 2 · characters 28 to 52" in shown
    assert "He was born in Edinburgh" in shown
