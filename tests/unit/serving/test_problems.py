"""Errors as problem details over HTTP, and as google.rpc's details over gRPC."""

import asyncio
import re
import traceback
from typing import Any

import pytest
from google.rpc import error_details_pb2
from small_endpoint import request
from starlette.types import Message, Receive, Scope, Send

from openbook import errors
from openbook.errors import InvalidRequest, OpenbookError, Overloaded, ShardUnavailable
from openbook.serving.endpoint.openai_errors import Refused
from openbook.serving.endpoint.problems import problem_of
from openbook.serving.endpoint.replies import Named
from openbook.serving.endpoint.status import MAX_BYTES, cut, field_of, status_of

ALL = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, OpenbookError)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_is_a_problem_under_its_name(kind: type[OpenbookError]) -> None:
    problem = problem_of(kind("it broke"), "a b/ü")
    assert problem.type == f"urn:openbook:error:{kind.__name__}"
    assert (problem.status, problem.code, problem.detail) == (kind.http_status, kind.grpc_code, "it broke")
    assert problem.instance == "urn:openbook:request:a%20b/%C3%BC"
    assert re.fullmatch("[A-Z][a-z ]+", problem.title)


def test_an_error_that_only_a_part_of_openbook_knows_goes_under_its_kins_name() -> None:
    assert problem_of(Refused("no"), "").type == "urn:openbook:error:InvalidRequest"


def test_a_number_of_too_many_digits_is_told_by_its_field_and_limit() -> None:
    headers = {"content-type": "application/json"}
    for path, field in (("/v1/answer", "seed"), ("/v1/retrieve", "without"), ("/v1/chat/completions", "seed")):
        said = request("POST", path, content=f'{{"{field}": [{"9" * 5000}]}}', headers=headers)
        told = said.json().get("detail") or said.json()["error"]["message"]
        assert (said.status_code, told) == (400, f"{field} must have at most 4300 digits, got 5000")
    unread = request("POST", "/v1/answer", content=f"[{'9' * 5000}, {'[' * 100_000}", headers=headers).json()
    assert unread["detail"] == "body must be JSON of fewer brackets within each other"


def test_texts_that_may_be_left_out_may_be_null() -> None:
    asked = {"question": "who", "request_id": None, "passages": [{"text": "a", "title": None, "document_id": None}]}
    for path, body in (("/v1/answer", asked), ("/v1/answer/batch", {"requests": [asked], "request_id": None})):
        said = request("POST", path, json=body).json()
        answer = said["results"][0]["answer"] if "results" in said else said
        (own,) = (each["passage"] for each in answer["evidence"] if each["passage"]["id"] == -1)
        assert (own["title"], own["document_id"]) == ("", "")
        assert said["request_id"]


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/answer", {"passages": ["a"]}, "passages.0 must be a JSON object, got 'a'"),
        ("/v1/answer", {"passages": [{"text": ""}]}, "passages[0].text must have 1..10000 characters, got none"),
        ("/v1/answer", {"passages": [{"text": "a", "body": "b"}]}, "unknown key 'passages.0.body'"),
        ("/v1/answer", {"": 1}, "unknown key ''"),
        ("/v1/answer", {"body": 1}, "unknown key 'body'"),
        ("/v1/answer", {"labels": "yes"}, "labels must be a list, got 'yes'"),
        ("/v1/answer", {"temperature": "1"}, "temperature: Input should be a valid number, got '1'"),
        ("/v1/retrieve", {"timeout_s": True}, "timeout_s: Input should be a valid number, got True"),
        ("/v1/chat/completions", {"stream": "yes"}, "stream: Input should be a valid boolean, got 'yes'"),
        ("/v1/chat/completions", {"top_p": "1"}, "top_p: Input should be a valid number, got '1'"),
        ("/v1/chat/completions", {"messages": ["a"]}, "messages.0 must be a JSON object, got 'a'"),
        ("/v1/chat/completions", {"passages": ["a"]}, "passages.0 must be a JSON object, got 'a'"),
        ("/v1/answer/batch", {"requests": ["a"]}, "body must be a JSON object, sent as application/json, got 'a'"),
    ],
    ids=str,
)
def test_what_is_of_another_kind_is_told_by_its_place(path: str, body: Any, told: str) -> None:
    if path.endswith("completions"):
        body = {"model": "openbook", "messages": [{"role": "user", "content": "who"}], **body}
    elif "requests" not in body:
        body = {"question": "who", **body}
    said = request("POST", path, json=body).json()
    if "results" in said:
        said = said["results"][0]["error"]
    assert (said.get("detail") or said["error"]["message"]) == told


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "kind"),
    [
        ("POST", "/v1/answer", {"question": ""}, 400, "INVALID_ARGUMENT", "urn:openbook:error:InvalidRequest"),
        ("GET", "/v2/answer", None, 404, "NOT_FOUND", "about:blank"),
        ("GET", "/docs/", None, 404, "NOT_FOUND", "about:blank"),
        ("PUT", "/v1/answer", {}, 405, "UNIMPLEMENTED", "about:blank"),
        (
            "POST",
            "/v1/answer",
            {"question": "x" * (1 << 20)},
            413,
            "INVALID_ARGUMENT",
            "urn:openbook:error:BodyTooLarge",
        ),
    ],
    ids=str,
)
def test_a_refusal_is_a_problem_and_says_so(
    method: str, path: str, body: Any, status: int, code: str, kind: str
) -> None:
    response = request(method, path, json=body, headers={"x-request-id": "mine"})
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert (response.status_code, problem["status"], problem["code"], problem["type"]) == (status, status, code, kind)
    assert problem["request_id"] == "mine"


@pytest.mark.parametrize("path", ["/metrics", "/v1/models/openbook"])
def test_what_breaks_anywhere_is_a_problem_with_the_requests_id(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    question = "who was bell"

    def breaks(*_: Any) -> None:
        raise RuntimeError(question)

    monkeypatch.setattr("openbook.serving.endpoint.http.generate_latest", breaks)
    monkeypatch.setattr("openbook.serving.endpoint.openai.routes.check_model", breaks)
    response = request("GET", path, headers={"x-request-id": "mine"})
    assert (response.status_code, response.headers["x-request-id"]) == (500, "mine")
    assert "internal error, request id mine" in response.text
    assert question not in response.text + caplog.text


def test_a_reply_that_has_begun_ends_with_what_broke_and_without_the_question(caplog: pytest.LogCaptureFixture) -> None:
    """Its connection then ends before the reply does: nobody takes it for whole. Who serves us logs what is raised."""
    sent, question = [], "who was bell"

    async def begins(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError(question)

    async def send(message: Message) -> None:
        sent.append(message["type"])

    with pytest.raises(OpenbookError, match="internal error, request id mine") as raised:
        asyncio.run(Named(begins)({"type": "http", "headers": [(b"x-request-id", b"mine")]}, None, send))
    assert sent == ["http.response.start"]
    assert "internal error, request id mine" in caplog.text
    assert question not in "".join([caplog.text, *traceback.format_exception(raised.value)])


def details(error: OpenbookError) -> dict[str, Any]:
    status = status_of(error, "mine")
    found = {}
    for packed in status.details:
        kind = getattr(error_details_pb2, packed.type_url.rpartition(".")[2])
        found[kind.__name__] = kind.FromString(packed.value)
    assert found["RequestInfo"].request_id == "mine"
    return found


def test_over_grpc_errors_have_their_name_and_what_is_theirs() -> None:
    wrong = details(InvalidRequest("k must be 1..100, got 0"))
    assert (wrong["ErrorInfo"].reason, wrong["ErrorInfo"].domain) == ("INVALID_REQUEST", "openbook")
    (violation,) = wrong["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("k", "k must be 1..100, got 0")
    assert details(Overloaded("later", 2.2))["RetryInfo"].retry_delay.seconds == 3
    assert details(ShardUnavailable("gone")).keys() == {"ErrorInfo", "RequestInfo"}
    assert len(status_of(InvalidRequest("x" * 10_000), "mine").SerializeToString()) < 3 * MAX_BYTES
    for letter in "x", "é", "苏", "\ud800":
        told = cut(letter * 10_000)
        assert MAX_BYTES - 8 < len(told.encode()) <= MAX_BYTES
        assert told.endswith(" ...")
    assert cut("k must be 1") == "k must be 1"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("k must be 1..100, got 0", "k"),
        ("question is missing", "question"),
        ("question has 9999 tokens, the generator reads 300", "question"),
        ("formulation: Input should be 'sequence' or 'token', got 'x'", "formulation"),
        ("passages.0.text: Input should be a valid string, got 5", "passages.0.text"),
        ("k x (context tokens + n_beams x max_new_tokens) must be at most max_work = 1, got 2", ""),
        ("unknown key 'n_beans'", ""),
    ],
)
def test_the_field_is_the_one_that_the_message_names_first(message: str, field: str) -> None:
    assert field_of(message) == field
