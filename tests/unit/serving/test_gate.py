"""Nobody gets past the gate: every path and method there is, by every key that will not do."""

import asyncio
import inspect
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.routing import Route
from test_service import PASSAGES, GrpcContext, service

from openbook.config import Limits, parse
from openbook.core.context import NEVER, Context
from openbook.core.types import Float32, Hits, RetrievalSettings
from openbook.errors import InvalidConfig, KeysUnavailable, OpenbookError, Unauthenticated
from openbook.serving.access.exposure import check_host
from openbook.serving.access.gate import Gate, credential
from openbook.serving.access.key_file import KeyFile, KeyFileBook
from openbook.serving.access.keys import KEY, KeyRecord, mint, revoked
from openbook.serving.access.needs import NEEDS, PUBLIC, need_of
from openbook.serving.access.scopes import Scope
from openbook.serving.app import build
from openbook.serving.endpoint.http import build_app
from openbook.serving.endpoint.ingress import ANSWER_SERVICE, AnswerIngress, add_services
from openbook.serving.endpoint.openai_errors import speaks_openai
from openbook.serving.endpoint.page import FOLDER
from openbook.serving.endpoint.service import AnswerService
from openbook.telemetry import refused
from openbook.testing import ExactIndex, HashEncoder
from openbook.v1 import answer_pb2

OPEN = {"/healthz", "/readyz", "/docs", "/openapi.json"}
OPEN |= {"/docs/start.js", "/docs/swagger-ui.css", "/docs/swagger-ui-bundle.js"}
OPEN |= {"/", *(f"/page/{file.name}" for file in FOLDER.iterdir() if file.name != "index.html")}
"""Of what there is now, all that a stranger may see."""


@dataclass(frozen=True)
class House:
    """A gate with a key of every kind."""

    gate: Gate
    keys: dict[str, str]  # by what they are

    def of_scope(self, scope: Scope) -> str:
        return self.keys[f"only {scope}"]

    def bad(self, need: Scope) -> dict[str, str]:
        """By what is wrong with them, the keys that must not do."""
        wrong = {name: key for name, key in self.keys.items() if not name.startswith(("only", "all but"))}
        return {**wrong, "scope too small": self.keys[f"all but {need}"], "none": ""} | {
            "ours, in part": "ob_00000000_0"
        }


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    path = tmp_path_factory.mktemp("keys") / "keys.jsonl"
    book = KeyFileBook(path)
    keys = {}

    def add(name: str, *scopes: Scope, **options: Any) -> KeyRecord:
        keys[name], record = mint(name.replace(" ", "-"), 0.0, scopes, **options)
        return book.put(lambda _: record)

    for scope in Scope:
        add(f"only {scope}", scope)
        add(f"all but {scope}", *(set(Scope) - {scope}))
    add("expired", *Scope, expires=time.time() - 1)
    gone = add("revoked", *Scope)
    book.put(lambda records: revoked(records, gone.prefix, 1.0))
    keys["never made"] = mint("x", 0.0, Scope)[0]
    return House(Gate(KeyFile(path, 60.0), Limits()), keys)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


Call = tuple[str, str, dict[str, str]]


def responses(app: FastAPI, calls: list[Call], **options: Any) -> list[httpx.Response]:
    async def send() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return [await client.request(method, path, headers=headers, **options) for method, path, headers in calls]

    return asyncio.run(send())


def ask(
    gate: Gate,
    method: str,
    path: str,
    headers: dict[str, str],
    under_test: AnswerService | None = None,
    **options: Any,
) -> httpx.Response:
    (response,) = responses(build_app(under_test or service(), gate), [(method, path, headers)], **options)
    return response


class Untouched:
    """A service that must not be asked for anything, but what it was set to."""

    settings = parse({})

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"somebody got in, as far as {name}")


def http_calls() -> Iterator[tuple[str, str]]:
    """Every path with every method, of the routes and of OpenAPI, and some paths that are none."""
    application = build_app(service())
    for route in application.routes:
        assert isinstance(route, Route), f"{route}: what is mounted needs its own cases here"
        yield from ((method, route.path) for method in route.methods or ())
    for path, operations in application.openapi()["paths"].items():
        yield from ((method.upper(), path) for method in operations)
    none = (
        "/v1/answer/",
        "//v1/answer",
        "/V1/ANSWER",
        "/v1/answer/stream/",
        "/v2/any",
        "/metrics/",
        "/docs/../metrics",
    )
    yield from ((method, path) for path in none for method in ("GET", "POST"))


def assert_refused(response: httpx.Response, wrong: str) -> None:
    error = response.json() if response.request.method != "HEAD" else None
    if error and speaks_openai(response.request.url.path):
        theirs = error["error"]
        assert theirs["type"] == ("permission_error" if "scope" in wrong else "authentication_error")
        error = {"detail": theirs["message"], "code": "PERMISSION_DENIED" if "scope" in wrong else "UNAUTHENTICATED"}
    if "scope" in wrong:
        assert response.status_code == 403
        assert error is None or (error["code"] == "PERMISSION_DENIED" and "needs the scope" in error["detail"])
    else:
        assert response.status_code == 401
        assert response.headers["www-authenticate"].startswith("Bearer")
        assert error is None or error["code"] == "UNAUTHENTICATED"
    assert not any(passage.text in response.text for passage in PASSAGES)


CALLS = sorted({call for call in http_calls() if call[1] not in OPEN})


@pytest.mark.parametrize("path", sorted({path for _, path in CALLS}))
def test_nobody_gets_in_over_http_by_a_key_that_will_not_do(path: str, house: House) -> None:
    need = need_of(path)
    assert need is not None, f"{path} is open to strangers: name it in OPEN if that is meant"
    cases = [
        (wrong, key, (method, path, headers))
        for wrong, key in house.bad(need).items()
        for headers in (bearer(key), {"x-api-key": key} if key else {"authorization": "Basic b3BlbjpzZXNhbWU="})
        for method in (method for method, its_path in CALLS if its_path == path)
    ]
    app = build_app(Untouched(), house.gate)  # type: ignore[arg-type]
    replies = responses(app, [call for _, _, call in cases], json={"question": "who"})
    for (wrong, key, _), response in zip(cases, replies, strict=True):
        assert_refused(response, wrong)
        assert not key or key not in response.text


def test_the_calls_above_are_all_of_them() -> None:
    assert {("POST", "/v1/answer"), ("POST", "/v1/answer/stream"), ("POST", "/v1/retrieve"), ("GET", "/metrics")} < set(
        CALLS
    )
    assert OPEN <= PUBLIC
    assert {path for _, path in http_calls()} >= OPEN


@pytest.mark.parametrize("path", sorted(OPEN))
def test_what_strangers_may_see_they_see(path: str, house: House) -> None:
    for key in ("", house.keys["revoked"]):
        assert ask(house.gate, "GET", path, bearer(key)).status_code == 200


def test_a_key_that_will_do_does(house: House) -> None:
    body = {"question": "who patented the telephone"}
    both_ways = bearer(house.of_scope(Scope.ASK)), {"x-api-key": house.of_scope(Scope.ASK)}
    asked: list[Call] = [
        ("POST", path, headers) for path in ("/v1/answer", "/v1/answer/stream") for headers in both_ways
    ]
    assert {each.status_code for each in responses(build_app(service(), house.gate), asked, json=body)} == {200}
    assert ask(house.gate, "POST", "/v1/retrieve", bearer(house.of_scope(Scope.RETRIEVE)), json=body).status_code == 200
    assert ask(house.gate, "GET", "/metrics", bearer(house.of_scope(Scope.ADMIN))).status_code == 200
    assert ask(house.gate, "GET", "/v1/models/openbook", bearer(house.of_scope(Scope.ASK))).status_code == 200
    listed = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    for key, tools in (("only ask", ["answer"]), ("all but publish", ["search", "fetch", "answer"])):
        headers = {**bearer(house.keys[key]), "accept": "application/json, text/event-stream"}
        found = ask(house.gate, "POST", "/mcp", headers, json=listed).json()["result"]["tools"]
        assert [tool["name"] for tool in found] == tools
    assert ask(house.gate, "GET", "/v2/any", bearer(house.of_scope(Scope.ADMIN))).status_code == 404


def test_a_web_socket_is_closed(house: House) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/healthz", "headers": []}
    asyncio.run(build_app(service(), house.gate)(scope, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


# --- gRPC


class Registered:
    """What `add_services` tells a server."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        add_services(self, self)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return None

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        for handler in handlers:
            self.methods += handler._method_handlers


OF_THE_PROTO = answer_pb2.DESCRIPTOR.services_by_name["AnswerService"].methods
METHODS = sorted({*Registered().methods, *(f"/{ANSWER_SERVICE}/{each.name}" for each in OF_THE_PROTO)})


async def called(ingress: AnswerIngress, method: str, data: bytes, context: GrpcContext) -> Any:
    answer = getattr(ingress, method.rpartition("/")[2])(data, context)
    return await answer if inspect.isawaitable(answer) else [each async for each in answer]


@pytest.mark.parametrize("method", sorted(set(METHODS) - PUBLIC))
def test_nobody_gets_in_over_grpc_by_a_key_that_will_not_do(method: str, house: House) -> None:
    need = need_of(method)
    assert need is not None
    ingress = AnswerIngress(Untouched(), house.gate)  # type: ignore[arg-type]
    for wrong, key in house.bad(need).items():
        for metadata in (bearer(key), {"x_api_key": key} if key else {}):
            context = GrpcContext(**metadata)
            with suppress(OpenbookError):  # and not for what stands in the message, which is none
                asyncio.run(called(ingress, method, b"\xff", context))
            expected = grpc.StatusCode.PERMISSION_DENIED if "scope" in wrong else grpc.StatusCode.UNAUTHENTICATED
            assert context.code is expected, (wrong, context.details)
            assert not key or key not in context.details


def test_the_methods_above_are_all_of_them_and_each_is_in_the_table() -> None:
    assert set(METHODS) - PUBLIC >= {f"/{ANSWER_SERVICE}/{name}" for name in ("Answer", "AnswerStream", "Retrieve")}
    assert set(METHODS) - PUBLIC <= set(NEEDS)
    assert set(METHODS) & PUBLIC == {"/grpc.health.v1.Health/Check"}


def test_over_grpc_too_a_key_that_will_do_does(house: House) -> None:
    one = answer_pb2.AnswerRequest(question="who patented the telephone")
    ingress = AnswerIngress(service(), house.gate)
    for method in sorted(set(METHODS) - PUBLIC):
        need = need_of(method)
        assert need is not None
        other = {
            "AnswerBatch": answer_pb2.AnswerBatchRequest(requests=[one]),
            "GetPassage": answer_pb2.PassageRequest(id="0"),
        }
        message = other.get(method.rpartition("/")[2], one)
        context = GrpcContext(**bearer(house.of_scope(need)))
        assert asyncio.run(called(ingress, method, message.SerializeToString(), context))
        assert context.code is None
    assert asyncio.run(called(ingress, "/grpc.health.v1.Health/Check", b"", GrpcContext())).status == 1


def test_the_docs_say_what_each_scope_lets() -> None:
    page = (Path(__file__).parents[3] / "docs/keys.md").read_text(encoding="utf-8")
    for path, scope in NEEDS.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{scope}` |"))
        name = path.rpartition("/")[2] if ANSWER_SERVICE in path else path
        assert f"`{name}`" in row, (path, scope)


# --- who it is


def test_a_caller_is_who_his_key_says_and_brings_his_tenant(tmp_path: Path) -> None:
    key, record = mint("web", 0.0, [Scope.ASK, Scope.RETRIEVE], "acme")
    KeyFileBook(tmp_path / "keys").put(lambda _: record)
    gate = Gate(KeyFile(tmp_path / "keys", 60.0), Limits())
    seen: list[Context] = []

    class Watching(ExactIndex):
        async def search(self, queries: Float32, settings: RetrievalSettings, context: Context) -> Hits:
            seen.append(replace(context, deadline=NEVER))
            return await super().search(queries, settings, context)

    under_test = service()
    under_test._pipeline._finder._retriever = Watching(PASSAGES, HashEncoder().encode_passages(PASSAGES))
    body = {"question": "who", "request_id": "mine"}
    assert ask(gate, "POST", "/v1/retrieve", {**bearer(key), "x-caller": "somebody"}, under_test, json=body).is_success
    data = answer_pb2.AnswerRequest(**body).SerializeToString()
    context = GrpcContext(**bearer(key), x_caller="somebody")
    assert asyncio.run(AnswerIngress(under_test, gate).Answer(data, context)).request_id == "mine"
    assert seen == [Context(request_id="mine", caller="acme/web", tenant="acme")] * 2


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({}, "a key is needed: .*; openbook's own commands take it from OPENBOOK_API_KEY$"),
        ({"authorization": "Basic abc"}, "of the kind Bearer"),
        ({"authorization": "Bearer"}, "of the kind Bearer"),
        ({"authorization": "Bearer a", "x-api-key": "b"}, "must not differ"),
    ],
)
def test_what_is_no_key_is_told_from_what_is(headers: dict[str, str], message: str) -> None:
    with pytest.raises(Unauthenticated, match=message):
        credential(headers)
    assert credential({"authorization": "bearer  a "}) == credential({"x-api-key": "a"}) == "a"


@settings(max_examples=300)
@given(st.text(max_size=90) | st.from_regex(KEY, fullmatch=True), st.sampled_from(["authorization", "x-api-key"]))
def test_whatever_is_sent_in_place_of_a_key_is_refused_as_such(text: str, name: str) -> None:
    class Empty:
        async def find(self, digest: str) -> KeyRecord | None:
            return None

        async def aclose(self) -> None: ...

    headers = {name: f"Bearer {text}" if name == "authorization" else text}
    with pytest.raises(Unauthenticated):
        asyncio.run(Gate(Empty(), Limits()).admit("/v1/answer", headers))


def test_where_keys_cannot_be_looked_up_nobody_is_let_in() -> None:
    class Gone:
        async def find(self, digest: str) -> KeyRecord | None:
            raise KeysUnavailable("keys cannot be looked up now: try again later")

        async def aclose(self) -> None: ...

    key, _ = mint("web", 0.0, [Scope.ASK])
    want_of_keys = refused("endpoint", "keys")
    before = want_of_keys._value.get()
    response = ask(Gate(Gone(), Limits()), "POST", "/v1/answer", bearer(key), Untouched(), json={})  # type: ignore[arg-type]
    assert (response.status_code, response.json()["code"]) == (503, "UNAVAILABLE")
    assert want_of_keys._value.get() == before + 1


# --- where it may listen


def test_beyond_loopback_it_needs_keys_or_a_waiver_by_name() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(
            InvalidConfig, match=rf"serving.host = {host}: .* access.keys .* access.allow_anonymous: true"
        ):
            check_host(parse({"serving": {"host": host}}))
        check_host(parse({"serving": {"host": host}, "access": {"keys": "file", "path": "keys.jsonl"}}))
        check_host(parse({"serving": {"host": host}, "access": {"allow_anonymous": True}}))
    for host in ("127.0.0.1", "::1", "localhost"):
        check_host(parse({"serving": {"host": host}}))


def test_a_cluster_needs_them_wherever_it_listens() -> None:
    with pytest.raises(InvalidConfig, match=r"on a cluster: .* access.keys .* access.allow_anonymous: true"):
        build({"index": {"addresses": ["i:1"]}, "cache": {"url": "redis://r:1/0"}})
    with pytest.raises(InvalidConfig, match=r"access.url must name the Redis"):
        build({"index": {"addresses": ["i:1"]}, "cache": {"url": "redis://r:1/0"}, "access": {"keys": "redis"}})


def test_what_tells_of_all_tenants_is_for_admins_of_none(tmp_path: Path) -> None:
    """A provider of tokens may say otherwise; the store, too, for whoever writes it himself."""
    key, record = mint("web", 0.0, Scope)
    KeyFileBook(tmp_path / "keys").put(lambda _: record.model_copy(update={"tenant": "acme"}))
    gate, want_of_scope = Gate(KeyFile(tmp_path / "keys", 60.0), Limits()), refused("endpoint", "scope")
    before = want_of_scope._value.get()
    response = ask(gate, "GET", "/metrics", bearer(key))
    assert (response.status_code, "needs the scope admin, of no tenant" in response.text) == (403, True)
    assert want_of_scope._value.get() == before + 1
    assert ask(gate, "POST", "/v1/answer", bearer(key), json={"question": "who"}).status_code == 200


# --- from a browser


def test_pages_of_the_origins_that_are_named_may_ask_and_others_not(house: House) -> None:
    app = build_app(service(parse({"serving": {"cors_origins": ["https://example.org"]}})), house.gate)
    of_clients = "authorization,content-type,x-stainless-lang,mcp-method,mcp-name"
    asks = {"access-control-request-method": "POST", "access-control-request-headers": of_clients}
    ours, others = {"origin": "https://example.org"}, {"origin": "https://example.com"}
    key = bearer(house.of_scope(Scope.ASK))
    before, refused = responses(app, [("OPTIONS", "/v1/answer", {**each, **asks}) for each in (ours, others)])
    assert (before.status_code, refused.status_code) == (200, 400)
    assert before.headers["access-control-allow-origin"] == "https://example.org"
    calls = [("POST", "/v1/answer", {**origin, **holder}) for origin in (ours, others) for holder in (key, {})]
    allowed = [
        each.headers.get("access-control-allow-origin") for each in responses(app, calls, json={"question": "who"})
    ]
    assert allowed == ["https://example.org", "https://example.org", None, None]


def test_without_origins_no_page_of_another_may_ask(house: House) -> None:
    response = ask(house.gate, "POST", "/v1/answer", {"origin": "https://example.org"}, json={"question": "who"})
    assert not [name for name in response.headers if name.startswith("access-control")]
    for wrong in ("example.org", "https://example.org/page", "null"):
        with pytest.raises(InvalidConfig, match="cors_origins"):
            parse({"serving": {"cors_origins": [wrong]}})
