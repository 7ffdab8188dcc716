"""Endpoints whose answers, refusals and silences follow a script: real servers of both protocols, on free ports.

`python scripted_endpoint.py AFTER_S STALL_S` is one that stalls, over gRPC, in a process of its own.
"""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from time import monotonic
from typing import Any

import grpc.aio
import uvicorn

from openbook.v1 import answer_pb2, answer_pb2_grpc
from openbook.v1.answer_pb2 import AnswerEvent, AnswerRequest, AnswerResponse, RetrieveRequest, RetrieveResponse

caller: ContextVar[str] = ContextVar("caller", default="")
"""Who asks, for the script that answers."""

peer: ContextVar[object] = ContextVar("peer", default=None)
"""The other end of the connection."""

Script = Callable[[str], Awaitable[AnswerResponse]]
"""The answer to a question. Raises Refused, and in a stream, of whose passages its caller knows by then, Ended."""


class Refused(Exception):
    """The question ends with this code, and over HTTP with this status."""

    def __init__(self, code: grpc.StatusCode, status: int = 500) -> None:
        super().__init__(code.name)
        self.code = code
        self.status = status


class Ended(Exception):
    """The stream ends here, without an answer."""


def answered(text: str, snapshot_id: str = "s", score: float = 1.0) -> AnswerResponse:
    evidence = [answer_pb2.Evidence(passage={"id": 7, "text": "Warsaw"}, score=score)]
    return AnswerResponse(answer=text, snapshot_id=snapshot_id, evidence=evidence)


async def echo(question: str) -> AnswerResponse:
    return answered(question.upper())


def stalling(after_s: float, stall_s: float) -> Script:
    """Answers at once, but from `after_s` after the first question on nobody for `stall_s`, and then those who wait."""
    begun: list[float] = []
    over = asyncio.Event()

    async def script(question: str) -> AnswerResponse:
        if not begun:
            begun.append(monotonic())
            asyncio.get_running_loop().call_later(after_s + stall_s, over.set)
        if monotonic() - begun[0] >= after_s:
            await over.wait()
        return answered(question)

    return script


class Servicer(answer_pb2_grpc.AnswerServiceServicer):
    """Streams three tokens, which are decided when the answer is. A stream's end comes `linger_s` after all that is in
    it; `on_end` is called then, unless its caller has left."""

    def __init__(self, script: Script, linger_s: float, on_end: Callable[[], None]) -> None:
        self._script = script
        self._linger_s = linger_s
        self._on_end = on_end

    async def _run(self, question: str, context: Any) -> AnswerResponse:
        caller.set(dict(context.invocation_metadata() or ()).get("x-caller", ""))
        peer.set(context.peer())
        if not question:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "question must not be empty")
        try:
            return await self._script(question)
        except Refused as refused:
            await context.abort(refused.code, f"scripted {refused}")
            raise

    async def Answer(self, request: AnswerRequest, context: Any) -> AnswerResponse:  # type: ignore[override]  # noqa: N802
        return await self._run(request.question, context)

    async def Retrieve(self, request: RetrieveRequest, context: Any) -> RetrieveResponse:  # type: ignore[override]  # noqa: N802
        answer = await self._run(request.question, context)
        return RetrieveResponse(evidence=answer.evidence, snapshot_id=answer.snapshot_id)

    async def AnswerStream(self, request: AnswerRequest, context: Any) -> AsyncIterator[AnswerEvent]:  # type: ignore[override]  # noqa: N802
        yield AnswerEvent(retrieved=RetrieveResponse(snapshot_id="s"))
        try:
            answer = await self._run(request.question, context)
        except Ended:
            return
        for token in ("a", "b", "c"):
            yield AnswerEvent(token=answer_pb2.Token(text=token))
        yield AnswerEvent(answer=answer)
        await asyncio.sleep(self._linger_s)
        self._on_end()


@asynccontextmanager
async def grpc_endpoint(
    script: Script, port: int = 0, linger_s: float = 0.0, on_end: Callable[[], None] = lambda: None
) -> AsyncIterator[str]:
    """Its address."""
    server = grpc.aio.server()
    answer_pb2_grpc.add_AnswerServiceServicer_to_server(Servicer(script, linger_s, on_end), server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def http_endpoint(script: Script, linger_s: float = 0.0) -> AsyncIterator[str]:
    """Its address, `http://` in front. A reply's end comes `linger_s` after all that is in it."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        if scope["method"] != "POST":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        question = json.loads(body)["question"]
        caller.set(dict(scope["headers"]).get(b"x-caller", b"").decode())
        peer.set(scope["client"])

        async def begin(status: int, kind: bytes) -> None:
            await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})

        async def tell(part: str) -> None:
            await send({"type": "http.response.body", "body": part.encode(), "more_body": True})

        if scope["path"] == "/v1/answer/stream":
            await begin(200, b"text/event-stream")
            await tell(event("retrieved", {}))
            with suppress(Ended):
                answer = as_json(await script(question))
                for told in (("token", {"text": "a"}), ("token", {"text": "b"}), ("answer", answer)):
                    await tell(event(*told))
        else:
            try:
                answer = as_json(await script(question))
                await begin(200, b"application/json")
                await tell(json.dumps(answer))
            except Refused as refused:
                await begin(refused.status, b"application/json")
                await tell(json.dumps({"code": refused.code.name, "detail": "scripted", "request_id": "r"}))
        await asyncio.sleep(linger_s)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="warning", interface="asgi3"))
    # Of protocol TCP by name, or else asyncio leaves Nagle's algorithm on: 40 ms. Callers wait in its queue.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen(1024)
    task = asyncio.create_task(server._serve([listening]))  # not `serve`, which takes the signals
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task


def event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def as_json(answer: AnswerResponse) -> dict[str, Any]:
    evidence = [
        {"passage": {"id": each.passage.id}, "score": each.score, "log_prior": each.log_prior}
        for each in answer.evidence
    ]
    coverage: dict[str, Any] = {"missing_shards": list(answer.coverage.missing_shards)}
    return {
        "answer": answer.answer,
        "snapshot_id": answer.snapshot_id,
        "evidence": evidence,
        "coverage": coverage,
        "log_likelihood": answer.log_likelihood,
    }


async def main(after_s: float, stall_s: float) -> None:
    async with grpc_endpoint(stalling(after_s, stall_s)) as address:
        print(address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*map(float, sys.argv[1:])))
