"""`/docs`, and what it shows: every path, with examples that can be sent and errors as they come."""

import re
from typing import Any

import httpx
import jsonschema
import pytest
from small_endpoint import in_process, request, service
from starlette.routing import Route

from openbook.serving.endpoint.http import build_app

ACCEPT = {"accept": "application/json, text/event-stream"}  # as MCP demands
PATHS = {
    *("/v1/answer", "/v1/answer/batch", "/v1/answer/stream", "/v1/retrieve", "/healthz", "/readyz", "/metrics"),
    *("/v1/chat/completions", "/v1/embeddings", "/v1/models", "/v1/models/{name}", "/mcp", "/v1/passages/{id}"),
}


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    found: dict[str, Any] = request("GET", "/openapi.json").json()
    return found


def operations(described: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, each) for path, methods in described["paths"].items() for method, each in methods.items()]


def test_every_path_is_described_with_its_errors(described: dict[str, Any]) -> None:
    assert set(described["paths"]) == PATHS
    for path, method, operation in operations(described):
        assert operation["summary"], path
        assert operation["description"], path
        assert set(operation["responses"]) == {"200", "default"}, (method, path)
        ((media_type, content),) = operation["responses"]["default"]["content"].items()
        is_openai = "OpenAI" in operation.get("tags", ())
        shape = ("application/json", "OpenAIError") if is_openai else ("application/problem+json", "Problem")
        assert (media_type, content["schema"]["$ref"].rpartition("/")[2]) == shape


def test_it_says_how_a_key_is_sent(described: dict[str, Any]) -> None:
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    assert {"key": []} in described["security"]


def test_every_reference_leads_somewhere(described: dict[str, Any]) -> None:
    named = set(re.findall(r"'#/components/schemas/(\w+)'", str(described)))
    assert len(named) > 10
    assert named <= set(described["components"]["schemas"])


def test_logarithms_are_described_as_null_where_they_are_of_zero(described: dict[str, Any]) -> None:
    schemas = described["components"]["schemas"].values()
    fields = [each for schema in schemas for each in schema.get("properties", {}).items()]
    logs = {name: each for name, each in fields if name.startswith("log_")}
    assert set(logs) == {"log_prior", "log_posterior", "log_likelihood", "log_probability"}
    for name, each in fields:
        if name in logs:
            assert each.get("items", each)["type"] == ["number", "null"], each


def test_every_body_has_examples_that_fit_and_are_answered(described: dict[str, Any]) -> None:
    n_examples, streams = 0, set[str]()
    for path, method, operation in operations(described):
        if method == "post":
            ((_, content),) = operation["requestBody"]["content"].items()
            assert content["examples"], path
            for example in content["examples"].values():
                schema = {**content["schema"], "components": described["components"]}
                jsonschema.validate(example["value"], schema)
                reply = request("POST", path, json=example["value"], headers=ACCEPT)
                assert reply.status_code == 200, path
                media_type = reply.headers["content-type"].partition(";")[0]
                assert media_type in operation["responses"]["200"]["content"], path
                streams |= {path} if media_type == "text/event-stream" else set()
                n_examples += 1
    assert n_examples > 4
    assert streams == {"/v1/answer/stream", "/v1/chat/completions"}


def test_what_is_there_to_get_has_a_head() -> None:
    app = build_app(service())
    gets = [each for each in app.routes if isinstance(each, Route) and each.methods and "GET" in each.methods]
    paths = [each.path.replace("{id}", "0").replace("{name:path}", "openbook") for each in gets]
    assert len(set(paths)) == len(paths) > 15

    async def ask(client: httpx.AsyncClient) -> None:
        for path in paths:
            got, head, refused = [await client.request(method, path) for method in ("GET", "HEAD", "PUT")]
            assert (got.status_code, head.status_code, refused.status_code) == (200, 200, 405), path
            assert head.headers["content-type"] == got.headers["content-type"]
            assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD"}

    in_process(ask)


def test_the_page_is_whole_without_another_host() -> None:
    page = request("GET", "/docs")
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(named) == 5
    for name in named:
        assert "//" not in name
        if not name.startswith("data:"):
            response = request("GET", f"/{name}")
            assert response.is_success
            assert response.headers["content-type"].startswith(("text/javascript", "text/css", "application/json"))
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert "<script>" not in page.text
    assert 'SwaggerUIBundle({\n  url: "openapi.json"' in request("GET", "/docs/start.js").text
    assert request("GET", "/docs/other.js").status_code == 404
