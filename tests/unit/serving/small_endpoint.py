"""An endpoint over HTTP without Ray: fakes behind the real application, in this process or on a port of its own."""

import asyncio
import math
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from threading import Thread
from typing import Any, TypeVar

import httpx
import uvicorn
from fastapi import FastAPI

from openbook.cache.memory import MemoryCache
from openbook.config import Settings, parse
from openbook.core.context import Context
from openbook.core.types import Generation, GenerationSettings, Passage, Retrieved
from openbook.rag.pipeline import Pipeline
from openbook.serving.endpoint.http import build_app
from openbook.serving.endpoint.service import AnswerService
from openbook.testing import EchoGenerator, ExactIndex, HashEncoder

PASSAGES = [
    Passage(0, "https://example.org/bell", "Telephone", "Bell patented the telephone in 1876"),
    Passage(1, "curie", "Marie Curie", "Curie was born in Warsaw"),
    Passage(2, "der Mond", "Moon", "the Moon goes around the Earth"),
]
QUESTION = "who patented the telephone?"
SETTINGS = parse({"answer": {"k": 2}, "generator": {"model": "/models/reader"}, "serving": {"max_entries": 4}})
T = TypeVar("T")


class FastGenerator(EchoGenerator):
    """Like fast decoding: a passage that did not propose the answer has probability zero."""

    async def generate(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> Generation:
        echo = await super().generate(question, retrieved, settings, context)
        posterior = echo.log_posterior.copy()
        posterior[1:] = -math.inf
        return replace(echo, log_posterior=posterior)


async def ready() -> None:
    """Nothing is wrong."""


def service(settings: Settings = SETTINGS, generator: Any = None) -> AnswerService:
    encoder = HashEncoder()
    index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
    pipeline = Pipeline(encoder, index, index, generator or EchoGenerator(), MemoryCache(10), settings.answer)
    return AnswerService(pipeline, settings, ready)


app = cache(lambda: build_app(service()))
"""For those who change nothing of it: to make one takes longer than to ask it."""


def in_process(
    use: Callable[[httpx.AsyncClient], Coroutine[Any, Any, T]], under_test: AnswerService | None = None
) -> T:
    """What comes of using a client whose requests go straight into the application."""

    async def run() -> T:
        transport = httpx.ASGITransport(build_app(under_test) if under_test else app())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await use(client)

    return asyncio.run(run())


def request(method: str, path: str, under_test: AnswerService | None = None, **options: Any) -> httpx.Response:
    return in_process(lambda client: client.request(method, path, **options), under_test)


@contextmanager
def on_a_port(app: FastAPI, port: int = 0, **tls: Any) -> Iterator[str]:
    """The URL where it listens for as long as the body runs; with uvicorn's options of TLS if there are any."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", lifespan="off", **tls))
        thread = Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
