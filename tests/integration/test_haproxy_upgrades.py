"""Who asks for another protocol asks nobody else's questions: uvicorn would take his body for the next request."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest
import uvicorn
from proxies import haproxy
from starlette.types import ASGIApp, Receive, Scope, Send

from openbook.processes import free_port
from openbook.serving.endpoint.bodies import BufferedBodies

SECTIONS = """frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend http
backend http
    http-reuse always
    server one 127.0.0.1:{replica}
"""
INSIDE = b"GET /inside HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[int]:
    """As Serve's replicas do; gives the port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(app, lifespan="off", log_level="critical", http="httptools", interface="asgi3")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve([listening]))  # not `serve`, which takes the signals
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            await task


@pytest.mark.parametrize("protocol", ["other", "websocket"])
def test_a_body_is_a_body_whatever_protocol_is_asked_for(protocol: str, tmp_path: Path) -> None:
    asked: list[tuple[str, bytes]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        asked.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def scenario() -> None:
        async with serving(app) as replica:
            port = free_port()
            with haproxy(tmp_path, SECTIONS.format(port=port, replica=replica), (port,)):
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                    wants = {"connection": "upgrade", "upgrade": protocol, "sec-websocket-key": "A" * 22 + "=="}
                    body = bytes(1 << 15) + INSIDE
                    (await client.put("/one", content=body, headers=wants)).raise_for_status()
                    (await client.put("/two", content=INSIDE)).raise_for_status()
        assert asked == [("/one", body), ("/two", INSIDE)]

    asyncio.run(scenario())


def test_without_haproxy_nothing_more_is_read_of_him() -> None:
    asked: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def scenario() -> bytes:
        async with serving(BufferedBodies(app)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            wants = b"Connection: upgrade\r\nUpgrade: other\r\nContent-Length: %d\r\n\r\n" % len(INSIDE)
            writer.write(b"PUT /one HTTP/1.1\r\nHost: x\r\n" + wants)
            heard = await reader.readuntil(b"\r\n\r\n")
            with suppress(ConnectionError):
                writer.write(INSIDE)
                heard += await reader.read()  # until it is closed
            writer.close()
            return heard

    assert asyncio.run(scenario()).count(b"HTTP/1.1 200") == 1
    assert asked == ["/one"]
