"""By whatever door a question comes, it is its key's holder who asks: his tenant's caches, his share, his quotas."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_gate import bearer, called
from test_service import PASSAGES, GrpcContext

from openbook.cache.memory import MemoryCache
from openbook.config import Limits, parse
from openbook.core.context import Context
from openbook.core.origin import Located
from openbook.core.types import Float32, Generation, Hits, RetrievalSettings
from openbook.rag.pipeline import Pipeline
from openbook.serving.access.gate import Gate
from openbook.serving.access.key_file import KeyFile, KeyFileBook
from openbook.serving.access.keys import mint
from openbook.serving.access.needs import NEEDS
from openbook.serving.access.scopes import Scope
from openbook.serving.endpoint.http import build_app
from openbook.serving.endpoint.ingress import AnswerIngress
from openbook.serving.endpoint.service import AnswerService
from openbook.testing import EchoGenerator, ExactIndex, HashEncoder
from openbook.v1 import answer_pb2

QUESTION = "who patented the telephone"
ASKED = {"question": QUESTION}
TOOL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
LIMIT = 1000

Sent = tuple[str, Any, int]  # method of HTTP, or none for gRPC; what is sent; how many questions that is
DOORS: dict[str, Sent] = {
    "/v1/answer": ("POST", ASKED, 1),
    "/v1/answer/batch": ("POST", {"requests": [ASKED, ASKED]}, 2),
    "/v1/answer/stream": ("POST", ASKED, 1),
    "/v1/retrieve": ("POST", ASKED, 1),
    "/v1/chat/completions": ("POST", {"model": "openbook", "messages": [{"role": "user", "content": QUESTION}]}, 1),
    "/v1/embeddings": ("POST", {"model": "openbook", "input": [QUESTION, QUESTION]}, 2),
    "/v1/passages": ("GET", None, 1),
    "/mcp": ("POST", {**TOOL, "params": {"name": "answer", "arguments": ASKED}}, 1),
    "/openbook.v1.AnswerService/Answer": ("", answer_pb2.AnswerRequest(**ASKED), 1),
    "/openbook.v1.AnswerService/AnswerBatch": (
        "",
        answer_pb2.AnswerBatchRequest(requests=[answer_pb2.AnswerRequest(**ASKED)] * 2),
        2,
    ),
    "/openbook.v1.AnswerService/AnswerStream": ("", answer_pb2.AnswerRequest(**ASKED), 1),
    "/openbook.v1.AnswerService/GetPassage": ("", answer_pb2.PassageRequest(id="0"), 1),
    "/openbook.v1.AnswerService/Retrieve": ("", answer_pb2.RetrieveRequest(**ASKED), 1),
}
UNCACHED = {"/v1/passages", "/openbook.v1.AnswerService/GetPassage"}


class Seeing(MemoryCache[Any]):
    """Keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__(100)
        self.keys: list[str] = []

    async def get_many(self, keys: Sequence[str]) -> list[Any]:
        self.keys += keys
        return await super().get_many(keys)


class House:
    """An endpoint that notes on whose behalf everything was done, with a key of each of two tenants."""

    def __init__(self, folder: Path) -> None:
        book, self.keys = KeyFileBook(folder / "keys"), {}
        limits = Limits(questions_per_day=LIMIT)
        for tenant in ("acme", "other"):
            self.keys[tenant], record = mint("web", 0.0, [Scope.ASK, Scope.RETRIEVE], tenant, limits=limits)
            book.put(lambda _, record=record: record)  # type: ignore[misc]
        self.gate = Gate(KeyFile(folder / "keys", 60.0), Limits())
        self.seen: list[Context] = []
        house = self

        class Index(ExactIndex):
            async def search(self, queries: Float32, settings: RetrievalSettings, context: Context) -> Hits:
                house.seen.append(context)
                return await super().search(queries, settings, context)

            async def locate(self, passage_id: str, snapshot_id: str, context: Context) -> Located:
                house.seen.append(context)
                return await super().locate(passage_id, snapshot_id, context)

        class Encoder(HashEncoder):
            async def encode(self, questions: Sequence[str], context: Context) -> Float32:
                house.seen.append(context)
                return await super().encode(questions, context)

        class Generator(EchoGenerator):
            async def generate(self, *asked: Any) -> Generation:
                house.seen.append(asked[-1])
                return await super().generate(*asked)

        settings, encoder = parse({"answer": {"k": 2}}), Encoder()
        index = Index(PASSAGES, encoder.encode_passages(PASSAGES))
        self.embeddings, self.answers = Seeing(), Seeing()
        pipeline = Pipeline(encoder, index, index, Generator(), self.embeddings, settings.answer, answers=self.answers)
        self.service = AnswerService(pipeline, settings, self._ready, self.gate.quotas)

    async def _ready(self) -> None:
        """Nothing is wrong."""

    def asks(self, tenant: str, door: str) -> None:
        """This tenant's holder asks by this door, and says that he is somebody else."""
        method, sent, _ = DOORS[door]
        asyncio.run(self._asks(door, method, sent, {**bearer(self.keys[tenant]), "x-caller": "somebody"}))

    async def _asks(self, door: str, method: str, sent: Any, headers: dict[str, str]) -> None:
        if not method:
            context = GrpcContext(**{name.replace("-", "_"): value for name, value in headers.items()})
            assert await called(AnswerIngress(self.service, self.gate), door, sent.SerializeToString(), context)
            assert context.code is None, context.details
            return
        headers["accept"] = "application/json, text/event-stream"
        transport = httpx.ASGITransport(build_app(self.service, self.gate))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            path = f"{door}/0" if method == "GET" else door
            response = await client.request(method, path, json=sent, headers=headers)
        assert response.status_code == 200, response.text
        assert '"isError":true' not in response.text

    @property
    def cache_keys(self) -> list[str]:
        return self.embeddings.keys + self.answers.keys

    def forget(self) -> None:
        for seen in (self.seen, self.embeddings.keys, self.answers.keys):
            seen.clear()

    def used(self, tenant: str) -> int:
        return self.gate.quotas._accounts[f"{tenant}/web"].counts["questions-day"][1]


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


@pytest.mark.parametrize("door", DOORS)
def test_whoever_asks_is_the_holder_in_his_tenant_and_pays(door: str, house: House) -> None:
    house.asks("acme", door)
    assert {(each.tenant, each.caller) for each in house.seen} == {("acme", "acme/web")}
    assert bool(house.cache_keys) == (door not in UNCACHED)
    assert all(key.startswith("acme:") for key in house.cache_keys)
    assert house.used("acme") == DOORS[door][2]


@pytest.mark.parametrize("door", sorted(set(DOORS) - UNCACHED))
def test_what_one_tenant_asked_by_any_door_another_has_to_compute_himself(door: str, house: House) -> None:
    for each in DOORS:
        house.asks("acme", each)
    house.forget()
    house.asks("acme", door)
    by_acme = len(house.seen)
    house.forget()
    house.asks("other", door)
    assert len(house.seen) > by_acme  # for acme the caches have it
    assert all(key.startswith("other:") for key in house.cache_keys)


def test_these_are_all_the_doors_there_are() -> None:
    """Whoever adds one writes here how it is asked."""
    assert set(DOORS) == set(NEEDS) - {"/metrics", "/v1/models"}


def test_tools_are_those_that_the_key_has_the_scope_for(tmp_path: Path) -> None:
    house = House(tmp_path)
    key, record = mint("narrow", 0.0, [Scope.ASK])
    KeyFileBook(tmp_path / "keys").put(lambda _: record)
    gate = Gate(KeyFile(tmp_path / "keys", 60.0), Limits())

    async def replies(key: str, *sent: dict[str, Any]) -> list[dict[str, Any]]:
        headers = {**bearer(key), "accept": "application/json, text/event-stream"}
        transport = httpx.ASGITransport(build_app(house.service, gate))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as client:
            return [(await client.post("/mcp", json=each)).json() for each in sent]

    listing = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    search = {**TOOL, "params": {"name": "search", "arguments": {"query": QUESTION}}}
    listed, searched = asyncio.run(replies(key, listing, search))
    assert [tool["name"] for tool in listed["result"]["tools"]] == ["answer"]
    assert "tool must be one of answer" in searched["error"]["message"]
    (listed,) = asyncio.run(replies(house.keys["acme"], listing))
    assert {tool["name"] for tool in listed["result"]["tools"]} == {"answer", "search", "fetch"}
