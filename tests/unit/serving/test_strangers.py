"""What strangers send that is no question: wide bodies, large messages, requests by pages of others."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import BaseModel, ValidationError
from ray.serve._private import grpc_util
from small_endpoint import QUESTION, service

from openbook.client.messages import error
from openbook.config import parse
from openbook.errors import KeysUnavailable, Overloaded, QuotaExceeded, ShardUnavailable, SnapshotMismatch
from openbook.serving.endpoint import ingress
from openbook.serving.endpoint.batch import BatchRequest
from openbook.serving.endpoint.http import build_app
from openbook.serving.endpoint.ingress import AnswerIngress
from openbook.serving.endpoint.mcp import Search
from openbook.serving.endpoint.openai.requests import EmbeddingsRequest
from openbook.serving.endpoint.schemas import AnswerRequest, OwnPassageIn
from openbook.serving.endpoint.sent import MAX_TOLD, describe

WIDE = 500_000


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(build_app(service()))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/answer", {"question": "q", "labels": [0] * WIDE}),
        ("/v1/answer", {"question": "q", "without": [""] * (WIDE // 2)}),
        ("/v1/retrieve", {"question": "q", "passages": [0] * WIDE}),
        ("/v1/retrieve", {"question": "q", **{f"{i}": 0 for i in range(WIDE // 8)}}),
        ("/v1/chat/completions", {"model": "openbook", "messages": [0] * (WIDE - 99)}),
        ("/v1/chat/completions", {"model": "openbook", "messages": [{"role": "user", "content": [0] * (WIDE - 99)}]}),
        ("/v1/embeddings", {"model": "openbook", "input": [0] * (WIDE - 99)}),
    ],
)
def test_a_request_with_half_a_million_mistakes_hears_of_the_first(client: TestClient, path: str, body: Any) -> None:
    sent = json.dumps(body, separators=(",", ":")).encode()
    assert len(sent) <= 1 << 20
    reply = client.post(path, content=sent, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert len(reply.content) < 3000


@pytest.mark.parametrize("kind", [AnswerRequest, BatchRequest, EmbeddingsRequest, OwnPassageIn, Search])
def test_of_unknown_fields_no_more_errors_are_made_than_are_told(kind: type[BaseModel]) -> None:
    for n, n_errors in ((MAX_TOLD, MAX_TOLD), (100_000, 1)):
        known = dict.fromkeys(kind.model_fields)
        with pytest.raises(ValidationError) as refused:
            kind.model_validate(known | {f"{i}": 0 for i in range(n)})
        unknown = [each for each in refused.value.errors() if each["type"] in ("extra_forbidden", "too_many_fields")]
        assert len(unknown) == n_errors
    assert describe(unknown).startswith(f"body: there are {len(known)} fields, and not {len(known) + n}, got ")


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "127.0.0.1:8000",
        "[::1]:8000",
        "[::1]",
        "10.1.2.3",
        "laptop:80",
        "demo.localhost",
        "",
    ],
)
def test_who_asks_by_an_address_or_the_name_of_a_machine_is_answered(client: TestClient, host: str) -> None:
    assert client.post("/v1/retrieve", json={"question": QUESTION}, headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "EVIL.example.", "127.0.0.1.evil.example:80"])
@pytest.mark.parametrize("path", ["/v1/retrieve", "/v1/passages/0", "/mcp", "/", "/docs"])
def test_pages_of_others_get_nothing_from_an_endpoint_on_loopback_that_asks_for_no_keys(
    client: TestClient, host: str, path: str
) -> None:
    """By DNS rebinding: the browser takes 127.0.0.1 for their own host."""
    for reply in (client.get(path, headers={"host": host}), client.post(path, json={}, headers={"host": host})):
        assert reply.status_code == 403
        assert host[:12].lower() in reply.text.lower()


def test_the_domains_of_a_proxy_in_front_are_let_in_and_off_loopback_nobody_asks() -> None:
    here: dict[str, Any] = {"serving": {"domains": ["ask.example.org"]}}
    there = {"serving": {"host": "0.0.0.0"}, "access": {"allow_anonymous": True}}
    for values, host, status in (
        (here, "ask.example.org", 200),
        (here, "evil.example", 403),
        (there, "any.example", 200),
    ):
        client = TestClient(build_app(service(parse(values))))
        assert client.get("/healthz", headers={"host": host}).status_code == status


def test_a_message_over_grpc_has_a_size_that_is_read_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [*grpc_util.DEFAULT_GRPC_SERVER_OPTIONS]
    monkeypatch.setattr(grpc_util, "DEFAULT_GRPC_SERVER_OPTIONS", options)
    for _ in range(2):
        AnswerIngress(service())
    assert dict(options)["grpc.max_receive_message_length"] == ingress.MAX_MESSAGE_BYTES == 4 << 20
    assert len(dict(options)) == len(options)


def test_errors_over_grpc_come_back_under_their_names() -> None:
    quota = error("RESOURCE_EXHAUSTED", "used up", 60.0, "QuotaExceeded")
    assert isinstance(quota, QuotaExceeded)
    assert quota.retry_after_s == 60
    assert type(error("UNAVAILABLE", "away", None, "KeysUnavailable")) is KeysUnavailable
    assert type(error("RESOURCE_EXHAUSTED", "full", 1.0)) is Overloaded
    assert type(error("UNAVAILABLE", "away", None, "of another version")) is ShardUnavailable
    assert type(error("FAILED_PRECONDITION", "other", None, "InvalidConfig")).__name__ == "InvalidConfig"
    assert type(error("FAILED_PRECONDITION", "other", None)) is SnapshotMismatch
