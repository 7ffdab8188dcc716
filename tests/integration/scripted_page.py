"""The endpoint's own application on a free port, in a thread, before a pipeline whose reader follows a script.

The reader knows some answers and believes of a passage that holds one that it says so; everything else follows from the
paper's formulas. What stands in a question says what goes wrong: see `Doors`, `Encoder` and `Reader`.
"""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openbook.cache.memory import MemoryCache
from openbook.config import parse
from openbook.core.context import Context
from openbook.core.marginal import answer_log_posterior, log_prior, next_log_marginal, sequence_next_log_marginal
from openbook.core.types import (
    Float32,
    Float64,
    Formulation,
    Generation,
    GenerationSettings,
    PartSettings,
    Passage,
    Retrieved,
    Token,
)
from openbook.errors import DeadlineExceeded, ModelUnavailable, Overloaded
from openbook.rag.pipeline import Pipeline
from openbook.serving.endpoint.http import build_app
from openbook.serving.endpoint.service import AnswerService
from openbook.testing import EchoGenerator, ExactIndex, HashEncoder, word_tokens

KEY = "the-right-key"
HOSTILE = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
ANSWERS = ("Alexander Graham Bell", "Antonio Meucci", "אלכסנדר בל 😀 1876", HOSTILE, "", "Jean-Paul, 1914-1918")
"""Those that the reader knows."""
PASSAGES = tuple(
    Passage(number, document_id, title, text)
    for number, (document_id, title, text) in enumerate(
        [
            ("https://example.org/bell", "Bell", "The telephone was patented by Alexander Graham Bell in 1876."),
            ("javascript:alert(1)", "Meucci", "Antonio Meucci showed a telephone in 1860, and had no patent."),
            ("", "The telephone", "Who invented the telephone? Many say Alexander Graham Bell."),
            ("he/1", "\u202eטלפון", "הטלפון: אלכסנדר בל 😀 1876 (RTL)."),
            ("x", HOSTILE, f"A telephone of {HOSTILE} 1876."),
            ("y", "Reis", "Johann Philipp Reis built one in 1861."),
        ]
    )
)


class Encoder(HashEncoder):
    """Refuses questions with `busy`, `late` or `gone` in them; has no end with one that `hangs`."""

    async def encode(self, questions: Sequence[str], context: Context) -> Float32:
        for word, error in (
            ("busy", Overloaded("256 questions are being answered: try again later", retry_after_s=7)),
            ("late", DeadlineExceeded("the deadline passed before the answer")),
            ("gone", ModelUnavailable("no replica of the encoder answers")),
        ):
            if word in questions[0]:
                raise error
        if "hangs" in questions[0]:
            await asyncio.Event().wait()
        return await super().encode(questions, context)


class Reader(EchoGenerator):
    """Says the tokens of a question with `slowly` when told to; breaks down after one of a question with `failing`; is
    cut off at one with `endless`.
    """

    fingerprint = generates_by = "scripted"

    def __init__(self) -> None:
        self.steps: asyncio.Queue[None] = asyncio.Queue()
        self.streamed: list[int] = []  # of each answer that is, its passages
        self.changed = threading.Condition()

    async def generate(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> Generation:
        if settings.labels:
            return await super().generate(question, retrieved, settings, context)
        prior = log_prior(retrieved.scores)
        if isinstance(settings, PartSettings):
            return _begun(_generation(ANSWERS[0], retrieved, settings, prior), len(settings.begun) + settings.n_more)
        wanted = [each for each in ANSWERS if f"“{each}”" in question] or ANSWERS[:2]
        found = [_generation(each, retrieved, settings, prior) for each in wanted]
        best, *others = sorted(found, key=lambda each: -each.log_likelihood)
        return replace(best, others=tuple(others[: settings.n_answers - 1]), cut="endless" in question)

    async def stream(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> AsyncIterator[Token | Generation]:
        generation = await self.generate(question, retrieved, settings, context)
        with self.changed:
            self.streamed.append(len(retrieved.passages))
            self.changed.notify_all()
        try:
            for token in generation.tokens:
                if "slowly" in question:
                    await self.steps.get()
                yield replace(token, start=None, end=None)
                if "failing" in question:
                    raise DeadlineExceeded("the deadline passed during the answer")
            yield generation
        finally:
            with self.changed:
                self.streamed.remove(len(retrieved.passages))
                self.changed.notify_all()


def _begun(generation: Generation, n: int) -> Generation:
    """Its first n tokens."""
    tokens = generation.tokens[:n]
    text = "".join(token.text for token in tokens)
    return replace(generation, text=text, token_ids=generation.token_ids[:n], tokens=tokens)


def _generation(text: str, retrieved: Retrieved, settings: GenerationSettings, prior: Float64) -> Generation:
    words = text.split(" ")
    says = np.array([[text in passage.text] for passage in retrieved.passages])
    first = np.arange(len(words)) == 0
    log_p = np.log(np.where(first, np.where(says, 0.8, 0.1), np.where(says, 0.95, 0.6)))  # (k, t)
    if settings.formulation is Formulation.TOKEN:
        each, weights = next_log_marginal(prior, log_p), prior[:, None] + log_p
    else:
        each, weights = sequence_next_log_marginal(prior, log_p.cumsum(1)), prior[:, None] + log_p.cumsum(1)
    posterior = (weights - np.logaddexp.reduce(weights, axis=0)).T  # (t, k)
    tokens = tuple(
        replace(token, log_likelihood=float(log_likelihood), log_posterior=tuple(row))
        for token, log_likelihood, row in zip(word_tokens(words, prior, 0.0), each, posterior.tolist(), strict=True)
    )
    of_answer = posterior[-1]
    if settings.formulation is Formulation.TOKEN:
        of_answer = answer_log_posterior(posterior, np.ones(len(words), bool))
    return Generation(text, tuple(range(len(words))), float(each.sum()), prior, of_answer, tokens)


class Doors:
    """In front of the application: asks for a key where a question has `secret` in it, breaks off where `broken`.

    Remembers every request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.requests: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].rpartition("/")[0] not in ("/v1", "/v1/answer"):
            return await self._app(scope, receive, send)
        message = await receive()
        self.requests.append(json.loads(message["body"]))
        question = self.requests[-1]["question"]
        key = dict(scope["headers"]).get(b"authorization", b"").decode()
        if "secret" in question and key != f"Bearer {KEY}":
            return await _refuse(send)
        messages = iter([message])

        async def replayed() -> Message:
            return next(messages, None) or await receive()

        n_sent = 0

        async def breaking(message: Message) -> None:
            nonlocal n_sent
            n_sent += 1
            if n_sent == 4 and "broken" in question:  # after the headers, the passages and one token
                raise ConnectionError("scripted")
            await send(message)

        return await self._app(scope, replayed, breaking)


async def _refuse(send: Send) -> None:
    """As RFC 9457 has it."""
    problem = {
        "title": "Unauthorized",
        "detail": "an API key is needed",
        "code": "UNAUTHENTICATED",
        "request_id": "r-401",
    }
    headers = [(b"content-type", b"application/problem+json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(problem).encode()})


class Endpoint:
    """Where it answers, what it was asked, and the reader's steps."""

    def __init__(self) -> None:
        encoder, self._reader = Encoder(), Reader()
        self.index = _index(PASSAGES, "exact")
        settings = parse({"answer": {"k": 3, "max_k": 10}})
        pipeline = Pipeline(encoder, self.index, self.index, self._reader, MemoryCache(100), settings.answer)
        self.doors = Doors(build_app(AnswerService(pipeline, settings, _ready)))
        self.url = ""
        self.loop: asyncio.AbstractEventLoop

    def publish(self, passages: Sequence[Passage], snapshot_id: str) -> None:
        """From now on these are the index, numbered anew."""
        vars(self.index).update(vars(_index(passages, snapshot_id)))

    def step(self) -> None:
        """One more token."""
        self.loop.call_soon_threadsafe(self._reader.steps.put_nowait, None)

    def only(self, n_passages: int) -> None:
        """Wait until one answer is being streamed, of so many passages, and none that would take its steps."""
        with self._reader.changed:
            assert self._reader.changed.wait_for(lambda: self._reader.streamed == [n_passages], timeout=20)


def _index(passages: Sequence[Passage], snapshot_id: str) -> ExactIndex:
    numbered = [replace(each, id=number) for number, each in enumerate(passages)]
    return ExactIndex(numbered, Encoder().encode_passages(numbered), snapshot_id, n_shards=2)


async def _ready() -> None:
    """Nothing is wrong."""


@contextmanager
def served() -> Iterator[Endpoint]:
    """On a free port of loopback, until the block ends."""
    endpoint = Endpoint()
    config = uvicorn.Config(endpoint.doors, lifespan="off", log_level="critical", interface="asgi3")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"

        async def serve() -> None:
            endpoint.loop = asyncio.get_running_loop()
            await server._serve([listening])  # not `serve`, which takes the signals

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            yield endpoint
        finally:
            server.should_exit = server.force_exit = True
            thread.join()
