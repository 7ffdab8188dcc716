"""What stands in the endpoint's OpenAPI beside its types: examples, errors, streams."""

from copy import copy
from typing import Any

from fastapi import Body, FastAPI
from fastapi.openapi.utils import get_openapi

from openbook.serving.endpoint.problems import MEDIA_TYPE, Problem

OURS, HEALTH = "openbook", "Health"
"""What belongs together."""
QUESTION = "who invented the telephone?"
PROBLEM: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "Any error, as RFC 9457 has it. 429 and 503 may pass: 429 says when in `Retry-After`.",
        "content": {MEDIA_TYPE: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}},
    }
}
"""The responses of every path, but for OpenAI's."""

ASKED = Body(
    openapi_examples={
        "a question": {"value": {"question": QUESTION}},
        "token by token": {"value": {"question": QUESTION, "k": 10, "formulation": "token", "n_beams": 1}},
        "a choice": {"value": {"question": "was Marie Curie born in Warsaw?", "labels": ["yes", "no"]}},
    }
)
RETRIEVED = Body(openapi_examples={"a question": {"value": {"question": QUESTION, "k": 20}}})
BATCH = Body(
    openapi_examples={
        "two questions": {
            "value": {
                "requests": [{"question": QUESTION}, {"question": "where was Marie Curie born?", "k": 3}],
                "timeout_s": 30,
            }
        }
    }
)

CALL_OF_A_TOOL: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"type": "object"},
                "examples": {
                    "a tool's call": {
                        "value": {
                            "jsonrpc": "2.0",
                            "id": 1,
                            "method": "tools/call",
                            "params": {"name": "answer", "arguments": {"question": QUESTION}},
                        }
                    }
                },
            }
        },
    }
}


def take_keys(app: FastAPI) -> None:
    """Describe the routes there are by now, and how a key is sent, should one be needed: the page can ask for it."""
    routes = [copy(route) for route in app.routes]

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = get_openapi(title=app.title, version=app.version, description=app.description, routes=routes)
            scheme = {"type": "http", "scheme": "bearer", "description": "A key, where the endpoint wants one."}
            described["components"]["securitySchemes"] = {"key": scheme}
            described["security"] = [{}, {"key": []}]
            app.openapi_schema = described
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def streamed(example: str, description: str = "Server-sent events.") -> dict[int | str, dict[str, Any]]:
    """The response that is a stream of server-sent events, or may be one."""
    content = {"text/event-stream": {"example": example}}  # JSON schema has no words for them
    return {200: {"description": description, "content": content}}
