"""OpenAI's protocol, asked by OpenAI's own client and by hand."""

import asyncio
import base64
import itertools
import json
import math
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from small_endpoint import PASSAGES, QUESTION, SETTINGS, in_process, on_a_port, request, service

from openbook.config import parse
from openbook.core.context import Context
from openbook.core.types import Generation, GenerationSettings, Retrieved
from openbook.errors import Overloaded
from openbook.serving.endpoint.http import build_app
from openbook.serving.endpoint.openai import chat as completions
from openbook.serving.endpoint.openai_errors import speaks_openai
from openbook.serving.endpoint.service import AnswerService
from openbook.testing import EchoGenerator, HashEncoder

ANSWER = "Bell patented the telephone in 1876"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with on_a_port(build_app(service())) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as connected:
        yield connected


def chat(**fields: Any) -> httpx.Response:
    return request("POST", CHAT, json={"model": "openbook", "messages": MESSAGES, **fields})


def error(response: httpx.Response) -> dict[str, Any]:
    assert list(response.json()) == ["error"]
    found: dict[str, Any] = response.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


# --- chat


def test_openais_client_gets_an_answer_with_its_citations(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="openbook", messages=MESSAGES, max_completion_tokens=3, temperature=0, extra_body={"k": 1}
    )
    (choice,) = reply.choices
    assert choice.message.content == "Bell patented the"
    assert choice.message.role == "assistant"
    assert choice.message.annotations
    (annotation,) = choice.message.annotations
    cited = annotation.url_citation
    assert (cited.start_index, cited.end_index) == (0, len("Bell patented the"))
    assert (cited.title, cited.url) == ("Telephone", "https://example.org/bell")
    assert reply.usage
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (4, 4 + reply.usage.completion_tokens)
    assert reply.model == "openbook"
    assert reply.id == f"chatcmpl-{reply._request_id}"
    extra = reply.model_extra
    assert extra
    assert [each["text"] for each in extra["citations"]] == [PASSAGES[0].text]
    assert extra["openbook"]["answer"] == choice.message.content
    assert extra["openbook"]["tokens"] == []


def test_a_stream_is_the_answer_in_pieces_with_its_citations_last(client: openai.OpenAI) -> None:
    for how in ({}, {"formulation": "token", "n_beams": 1}):
        chunks = list(
            client.chat.completions.create(
                model="reader", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, extra_body=how
            )
        )
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == ANSWER
        assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1].finish_reason == "stop"
        (annotation,) = choices[-1].delta.model_extra["annotations"]  # type: ignore[index]
        assert annotation["url_citation"]["title"] == "Telephone"
        assert (annotation["url_citation"]["start_index"], annotation["url_citation"]["end_index"]) == (0, len(ANSWER))
        assert not chunks[-1].choices
        assert chunks[-1].usage
        assert chunks[-1].usage.prompt_tokens == 4
        assert chunks[-2].model_extra["openbook"]["answer"] == ANSWER  # type: ignore[index]
        assert len({chunk.id for chunk in chunks}) == 1
        assert len(choices) > 4  # it came in pieces


@pytest.mark.parametrize(
    ("how", "reasons"),
    [
        ({"max_completion_tokens": 3}, ["length"]),
        ({"max_completion_tokens": 3, "n": 2}, ["length"] * 2),
        ({"max_completion_tokens": 6}, ["stop"]),
        ({"max_completion_tokens": 1, "labels": ["a", "b"]}, ["stop"]),
    ],
)
def test_a_choice_tells_whether_it_was_cut(how: dict[str, Any], reasons: list[str]) -> None:
    body = {"model": "openbook", "messages": MESSAGES, **how}
    whole = request("POST", CHAT, json=body).json()
    assert [choice["finish_reason"] for choice in whole["choices"]] == reasons
    *_, last, done = request("POST", CHAT, json={**body, "stream": True}).text.strip().split("\n\n")
    assert done == "data: [DONE]"
    assert [each["finish_reason"] for each in json.loads(last.removeprefix("data: "))["choices"]] == reasons


def test_the_asynchronous_client_streams_and_asks(url: str) -> None:
    async def ask() -> tuple[str | None, str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            whole = await client.chat.completions.create(model="openbook", messages=MESSAGES)
            stream = await client.chat.completions.create(model="openbook", messages=MESSAGES, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
            return whole.choices[0].message.content, "".join(pieces)

    assert asyncio.run(ask()) == (ANSWER, ANSWER)


def test_a_stream_ends_with_done_and_without_usage_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "time", SimpleNamespace(time=itertools.count().__next__))
    *chunks, done = chat(stream=True).text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    read = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    assert len({chunk["created"] for chunk in read}) == 1
    assert not any("usage" in chunk for chunk in read)
    assert [("citations" in chunk) for chunk in read] == [False] * (len(read) - 1) + [True]


def test_the_last_message_of_the_user_is_the_question() -> None:
    messages = [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "where was Curie born?"},
        {"role": "assistant", "content": "in Warsaw"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "who patented"}, {"type": "text", "text": "the telephone?"}],
        },
        {"role": "assistant", "content": None},
    ]
    assert chat(messages=messages).json()["choices"][0]["message"]["content"] == ANSWER


def test_passages_of_the_callers_own_are_cited_too() -> None:
    own = [{"text": "Meucci patented the telephone"}, {"text": "no", "title": "No", "document_id": "http://a/b c"}]
    reply = chat(k=0, passages=own).json()
    assert [(cited["title"], cited["url"]) for cited in reply["citations"]] == [
        ("", "openbook:-1"),
        ("No", "http://a/b c"),
    ]
    (annotation,) = reply["choices"][0]["message"]["annotations"]
    assert annotation["url_citation"]["url"] == "openbook:-1"


def test_several_answers_are_several_choices() -> None:
    choices = chat(n=2, n_beams=2).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))


def test_tokens_and_their_probabilities_are_told_if_asked_for() -> None:
    reply = chat(logprobs=True, tokens=True).json()
    tokens = reply["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == ANSWER
    assert all(bytes(token["bytes"]).decode() == token["token"] for token in tokens)
    assert reply["openbook"]["tokens"]
    assert chat().json()["choices"][0]["logprobs"] is None


def test_an_answer_less_probable_than_asked_is_a_refusal() -> None:
    class Unsure(EchoGenerator):
        async def generate(
            self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
        ) -> Generation:
            from dataclasses import replace

            return replace(await super().generate(question, retrieved, settings, context), log_likelihood=math.log(0.1))

    body = {"model": "openbook", "messages": MESSAGES, "min_probability": 0.5}
    message = request("POST", CHAT, service(generator=Unsure()), json=body).json()["choices"][0]["message"]
    assert (message["content"], message["annotations"]) == (None, [])
    assert "min_probability" in message["refusal"]
    streamed = request("POST", CHAT, service(generator=Unsure()), json={**body, "stream": True}).text
    *chunks, _ = streamed.removesuffix("\n\n").split("\n\n")
    deltas = [json.loads(chunk.removeprefix("data: "))["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == ""
    assert [delta["refusal"] for delta in deltas if "refusal" in delta] == [message["refusal"]]


@pytest.mark.parametrize(
    ("fields", "param", "code", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter", "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter", "not supported"),
        ({"logit_bias": {"1": 5}}, "logit_bias", "unsupported_parameter", "logit_bias is not supported"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter", "got 0.5"),
        ({"stop": ["."]}, "stop", "unsupported_parameter", "stop is not supported"),
        ({"top_logprobs": 3}, "top_logprobs", "unsupported_parameter", "got 3"),
        ({"n_beans": 3}, "n_beans", "unknown_parameter", "unknown parameter 'n_beans'"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value", "max_tokens must be 1..512, got 0"),
        ({"max_completion_tokens": 1000}, "max_completion_tokens", "invalid_value", "must be 1..512, got 1000"),
        ({"max_tokens": 5, "max_completion_tokens": 1000}, "max_completion_tokens", "invalid_value", "got 1000"),
        ({"max_tokens": 5, "max_new_tokens": 0}, "max_new_tokens", "invalid_request", "max_new_tokens must be 1..512"),
        ({"max_new_tokens": 0}, "max_new_tokens", "invalid_request", "max_new_tokens must be 1..512, got 0"),
        ({"n": 0}, "n", "invalid_value", "n must be 1..4, got 0"),
        ({"temperature": -1}, "temperature", "invalid_value", "temperature must be 0.0..10.0, got -1"),
        ({"k": 0}, "k", "invalid_request", "k must be"),
        ({"k": "five"}, "k", "invalid_request", "valid integer, got 'five'"),
        ({"question": "who?"}, "question", "unsupported_parameter", "must be the last message"),
        ({"messages": []}, "messages", "missing", "one of role 'user'"),
        ({"messages": "who?"}, "messages", "invalid_request", "valid list"),
        ({"messages": [{"role": "user", "content": " "}]}, "messages", "invalid_value", "question must have 1..2000"),
        ({"messages": [{"role": "user", "content": "a" * 2001}]}, "messages", "invalid_value", "got 2001"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "unsupported_parameter",
            "parts of type 'text' alone, got 'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": "who?"}]}]},
            "messages.0.content",
            "invalid_request",
            "messages.0.content: should be text or a list of parts, objects with a type",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_had_is_refused_by_name(fields: dict[str, Any], param: str, code: str, message: str) -> None:
    for stream in (False, True):
        refused = chat(**fields, stream=stream)
        assert refused.status_code == 400
        assert refused.headers["x-request-id"]
        found = error(refused)
        assert (found["param"], found["code"], found["type"]) == (param, code, "invalid_request_error")
        assert message in found["message"]


def test_what_asks_for_nothing_is_accepted() -> None:
    nothing = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": None,
        "logprobs": False,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "stop": None,
        "parallel_tool_calls": True,
    }
    assert chat(**nothing).status_code == 200


# --- errors


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model must be one of openbook, reader, got 'gpt-5'") as refused:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_who_is_refused_for_want_of_a_place_hears_when_to_come_again() -> None:
    under_test = service()

    async def overloaded(*anything: object) -> None:
        raise Overloaded("generator: would be done in 7.2 s", retry_after_s=2.2)

    under_test._pipeline.answer = overloaded  # type: ignore[method-assign,assignment]
    reply = request("POST", CHAT, under_test, json={"model": "openbook", "messages": MESSAGES})
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "3")
    assert (error(reply)["type"], error(reply)["code"]) == ("rate_limit_error", "rate_limit_exceeded")


def test_an_error_in_the_middle_of_a_stream_is_raised_by_openais_client() -> None:
    class Broken(EchoGenerator):
        async def stream(
            self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
        ) -> AsyncIterator[Any]:
            raise RuntimeError("a secret of the house")
            yield

    async def ask(http: httpx.AsyncClient) -> None:
        client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
        stream = await client.chat.completions.create(model="openbook", messages=MESSAGES, stream=True)
        assert [chunk.choices[0].delta.role async for chunk in stream] == ["assistant"]

    with pytest.raises(openai.APIError, match=r"^internal error, request id \w+$"):
        in_process(ask, service(generator=Broken()))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 404), ("POST", "/v1/responses", 404), ("GET", CHAT, 405), ("POST", "/v1/models", 405)],
)
def test_openais_paths_have_its_errors_whatever_is_wrong(method: str, path: str, status: int) -> None:
    refused = request(method, path, json={})
    assert refused.status_code == status
    assert error(refused)["type"] == "invalid_request_error"


SURROGATE = rb'{"model": "openbook", "messages": [{"role": "user", "content": "a"}], "input": "a", "\ud800": [[]]}'


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"model": 5}', b"[" * 5000, b"x" * (1 << 21), SURROGATE], ids=range(8)
)
def test_no_body_breaks_it(body: bytes) -> None:
    for path in (CHAT, "/v1/embeddings"):
        refused = request("POST", path, content=body, headers={"content-type": "application/json"})
        assert refused.status_code in (400, 413)
        assert error(refused)["type"] == "invalid_request_error"


def test_only_openais_paths_are_openais() -> None:
    assert speaks_openai("/v1/models")
    assert speaks_openai("/v1/models/a/b")
    assert not speaks_openai("/v1/modelsx")
    assert not speaks_openai("/v1/answer")


# --- embeddings and models


def test_embeddings_are_the_query_encoders(client: openai.OpenAI) -> None:
    texts = [QUESTION, "where was Marie Curie born?"]
    expected = HashEncoder().encode_questions(texts)
    for encoding_format in ("float", "base64"):
        reply = client.embeddings.create(model="openbook", input=texts, encoding_format=encoding_format)  # type: ignore[arg-type]
        if encoding_format == "base64":
            found = [np.frombuffer(base64.b64decode(each.embedding), "<f4") for each in reply.data]  # type: ignore[call-overload]
        else:
            found = [np.array(each.embedding, np.float32) for each in reply.data]
        assert np.array_equal(np.stack(found), expected)
    one = client.embeddings.create(model="embedded", input=QUESTION, dimensions=64)
    assert np.array_equal(np.array(one.data[0].embedding, np.float32), expected[0])
    assert one.usage.prompt_tokens == 4


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"input": []}, "input must be 1..4 (serving.max_entries), got 0", "input"),
        ({"input": ["a"] * 5}, "input must be 1..4 (serving.max_entries), got 5", "input"),
        ({"input": [1, 2]}, "input: should be UTF-8 text or a list of texts, not tokens, got [1, 2]", "input"),
        ({"input": [[1, 2], [3]]}, "not tokens, got [[1, 2], [3]]", "input"),
        ({"input": 5}, "input: should be UTF-8 text or a list of texts", "input"),
        ({"input": ""}, "input[0] must have 1..2000 characters, got none", "input[0]"),
        ({"input": "a", "dimensions": 3}, "dimensions must be 64, got 3", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "'float' or 'base64', got 'int8'", "encoding_format"),
        ({"input": "a", "timeout_s": -1}, "timeout_s must be above 0", "timeout_s"),
        ({"input": "a", "truncate": True}, "unknown key 'truncate'", None),
    ],
    ids=str,
)
def test_embeddings_that_cannot_be_had_are_refused(fields: dict[str, Any], message: str, param: str | None) -> None:
    refused = request("POST", "/v1/embeddings", json={"model": "openbook", **fields})
    assert refused.status_code == 400
    assert message in error(refused)["message"]
    if param:
        assert error(refused)["param"] == param


def test_an_encoding_format_of_null_is_left_out() -> None:
    """As LiteLLM has it, where nobody says one."""
    asks = [{"model": "openbook", "input": QUESTION, **each} for each in ({}, {"encoding_format": None})]
    left_out, null = (request("POST", "/v1/embeddings", json=each) for each in asks)
    assert (null.status_code, null.json()) == (200, left_out.json())


def test_embeddings_of_another_dimension_are_refused_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnswerService, "embed", None)
    refused = request("POST", "/v1/embeddings", json={"model": "openbook", "input": "a", "dimensions": 3})
    assert (refused.status_code, error(refused)["param"]) == (400, "dimensions")


def test_models_are_listed_without_their_folders(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["openbook", "reader", "embedded"]
    assert client.models.retrieve("reader").id == "reader"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("/models/reader")
    hub = parse({"generator": {"model": "facebook/rag-token-nq"}})
    assert request("GET", "/v1/models/facebook/rag-token-nq", service(hub)).json()["id"] == "facebook/rag-token-nq"
    assert SETTINGS.generator.model == "/models/reader"


@pytest.mark.parametrize(
    "folder", ["../secret/reader", "~/secret/reader", "my/secret/reader", "./reader", "secret/reader/"]
)
def test_a_folder_is_none_of_the_callers_wherever_it_is(folder: str) -> None:
    there = service(parse({"generator": {"model": folder}}))
    assert [each["id"] for each in request("GET", "/v1/models", there).json()["data"]] == [
        "openbook",
        "reader",
        "embedded",
    ]
