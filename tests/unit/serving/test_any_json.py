"""Whatever JSON comes in by whichever door, what goes out is a reply of that door's protocol."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_endpoint import QUESTION, app

from openbook.serving.endpoint.openai.requests import IGNORED, WITHOUT_EFFECT, ChatRequest, EmbeddingsRequest
from openbook.serving.endpoint.schemas import AnswerRequest

HEADERS = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
TEXTS = st.text(st.characters(codec=None), max_size=4)
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | TEXTS
    | st.sampled_from(["text", "user", "float", "auto"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS | st.sampled_from(["role", "text"]), inner),
    max_leaves=4,
)
CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}


def send(path: str, body: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app()), base_url="http://test") as client:
            return await client.post(path, content=json.dumps(body), headers=HEADERS)

    return asyncio.run(main())


def fields(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    """Something else in place of some of these, or beside them."""
    return st.dictionaries(st.sampled_from(names) | TEXTS, ANY, max_size=2)


CHAT = {"model": "openbook", "messages": [{"role": "user", "content": QUESTION}]}
DOORS = {
    "/v1/chat/completions": fields(
        *ChatRequest.model_fields, *AnswerRequest.model_fields, *IGNORED, *WITHOUT_EFFECT
    ).map(lambda changed: CHAT | changed),
    "/v1/embeddings": fields(*EmbeddingsRequest.model_fields).map(
        lambda changed: {"model": "openbook", "input": QUESTION, **changed}
    ),
    "/v1/answer/batch": st.lists(
        fields(*AnswerRequest.model_fields).map(lambda changed: {"question": QUESTION, **changed}) | ANY, max_size=5
    ).map(lambda requests: {"requests": requests}),
    "/mcp": st.builds(
        lambda name, changed: {**CALL, "params": {"name": name, "arguments": {"question": QUESTION, **changed}}},
        st.sampled_from(["answer", "search", "fetch"]) | TEXTS,
        fields("question", "query", "id", "k", "labels", "min_probability"),
    )
    | fields(*CALL, "params").map(lambda changed: CALL | changed),
}


@pytest.mark.parametrize("path", DOORS)
def test_no_json_breaks_a_door(path: str) -> None:
    answered = 0

    @settings(max_examples=80, deadline=None)
    @given(DOORS[path])
    def ask(body: Any) -> None:
        nonlocal answered
        response = send(path, body)
        answered += response.status_code == 200
        # 404: another model; 504: a time too short for anything; 202: MCP's for what needs no reply
        assert response.status_code in (200, 202, 400, 404, 504), response.text
        assert "internal error" not in response.text
        if response.status_code >= 400:
            said = response.json()
            assert said.get("detail") or said["error"]["message"]

    ask()
    assert answered, "a door that refuses everything would not break either"
