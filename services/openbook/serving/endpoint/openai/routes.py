"""The paths of OpenAI's protocol: /v1/chat/completions, /v1/embeddings, /v1/models."""

import base64
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import PurePath
from typing import Annotated, Any

from fastapi import Body, FastAPI, Request, Response

from openbook.logs import as_ours
from openbook.rag.answer import Event
from openbook.serving.endpoint.asked import asked
from openbook.serving.endpoint.openai.chat import Chat, n_words
from openbook.serving.endpoint.openai.replies import (
    ChatCompletion,
    Embedding,
    Embeddings,
    ModelCard,
    ModelList,
    Usage,
)
from openbook.serving.endpoint.openai.requests import ChatRequest, EmbeddingsRequest
from openbook.serving.endpoint.openai_errors import OpenAIError, UnknownModel, openai_error
from openbook.serving.endpoint.openapi import streamed
from openbook.serving.endpoint.replies import EventStream, to_json
from openbook.serving.endpoint.service import AnswerService

OURSELVES = "openbook"
"""A name for every model."""
OPENAI: dict[str, Any] = {
    "tags": ["OpenAI"],
    "responses": {"default": {"model": OpenAIError, "description": "Any error, in OpenAI's shape."}},
}
"""Of all its paths, for OpenAPI."""
CHAT = {"model": OURSELVES, "messages": [{"role": "user", "content": "who invented the telephone?"}]}
CHATS: dict[str, Any] = {"a question": {"value": CHAT}, "in chunks": {"value": {**CHAT, "stream": True}}}
CHUNKS = """data: {"choices": [{"index": 0, "delta": {"content": "Alexander"}, ...}], ...}

data: [DONE]

"""
WHOLE_OR_CHUNKS = OPENAI["responses"] | streamed(CHUNKS, "Whole; with `stream` as server-sent events, a chunk each.")
EMBED = {"model": OURSELVES, "input": ["who invented the telephone?", "where was Marie Curie born?"]}


def add_openai(app: FastAPI, service: AnswerService) -> None:
    """OpenAI's paths in front of `service`. What they raise becomes OpenAI's errors where all errors pass."""
    settings = service.settings
    generators = [OURSELVES, _shown(settings.generator.model)]
    encoders = [OURSELVES, _shown(settings.encoder.model)]

    @app.post("/v1/chat/completions", response_model=ChatCompletion, **OPENAI | {"responses": WHOLE_OR_CHUNKS})
    async def chat_completions(
        body: Annotated[ChatRequest, Body(openapi_examples=CHATS)], request: Request
    ) -> Response:
        """The answer to the user's last message; earlier ones are not read. With `stream` in chunks."""
        check_model(body.model, generators)
        question = body.asked()
        told = question.model_copy(update={"tokens": True})  # citations are made of them
        chat = Chat(body, tells_tokens=bool(question.tokens))
        with asked(request, question.request_id) as context, body.in_their_words():
            if not body.stream:
                return to_json(chat.completion(await service.answer(told, context)))
            events = service.stream(told, context)
            first = await anext(events)  # what fails until here has a status of its own
        return EventStream(_sent(chat, first, events, context.request_id), events)

    @app.post("/v1/embeddings", response_model=Embeddings, **OPENAI)
    async def embeddings(
        body: Annotated[EmbeddingsRequest, Body(openapi_examples={"two questions": {"value": EMBED}})], request: Request
    ) -> Response:
        """The query encoder's embeddings of questions, as the index is searched with them: not of length 1."""
        check_model(body.model, encoders)
        with asked(request) as context:
            body.check_dimension(service.dimension)
            found = await service.embed(body.texts, body.timeout_s, context)
        packed = body.encoding_format == "base64"
        data = [
            Embedding(index=n, embedding=base64.b64encode(each.astype("<f4")).decode() if packed else each.tolist())
            for n, each in enumerate(found)
        ]
        n_read = sum(map(n_words, body.texts))
        usage = Usage(prompt_tokens=n_read, total_tokens=n_read)
        return to_json(Embeddings(data=data, model=body.model, usage=usage))

    @app.get("/v1/models", **OPENAI)
    async def models() -> ModelList:
        """What `model` may be in a request."""
        return ModelList(data=[ModelCard(id=name) for name in dict.fromkeys([*generators, *encoders])])

    @app.get("/v1/models/{name:path}", **OPENAI)
    async def model(name: str) -> ModelCard:
        """One of them."""
        check_model(name, [*generators, *encoders])
        return ModelCard(id=name)


def check_model(name: str, known: list[str]) -> None:
    """Raises UnknownModel for a name of no model here."""
    if name not in known:
        raise UnknownModel(f"model must be one of {', '.join(dict.fromkeys(known))}, got {name[:100]!r}")


def _shown(model: str) -> str:
    """A model's name as callers may know it: of a folder no more than its own. With one slash it may be a hub's."""
    return model if re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", model) else PurePath(model).name


async def _sent(chat: Chat, first: Event, events: AsyncGenerator[Event], request_id: str) -> AsyncGenerator[str]:
    try:
        async with aclosing(chat.chunks(first, events)) as chunks:
            async for chunk in chunks:
                yield f"data: {chunk.to_json()}\n\n"
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield f"data: {openai_error(as_ours(error, request_id)).model_dump_json()}\n\n"
