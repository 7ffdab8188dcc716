"""A process that HAProxy takes for an ingress of Serve: who asks it, `/Ingress/Ask`, hears its process's number.

A question `large` has a large answer. A question `slow` is answered, and a stream, `/Ingress/Follow`, goes on from its
first part, once a line comes on standard input. From SIGUSR1 on it says, asked for its health, that it drains, as
`ray.serve._private.replica` does. Asked for its load, it says what was last put at `/load`.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator

import grpc
from aiohttp import web

ME = str(os.getpid())
LARGE = 1_500_000


class Ingress:
    """What it answers, over both protocols."""

    def __init__(self) -> None:
        self.draining = False
        self.told = asyncio.Event()
        self.load = b""

    @property
    def health(self) -> str:
        return "DRAINING" if self.draining else "success"

    async def ask(self, question: bytes) -> bytes:
        if question == b"slow":
            await self.told.wait()
        return bytes(LARGE) if question == b"large" else ME.encode()

    async def follow(self) -> AsyncIterator[bytes]:
        yield ME.encode()
        await self.told.wait()
        yield ME.encode()


def over_grpc(ingress: Ingress) -> list[grpc.GenericRpcHandler]:
    async def healthz(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        context.set_code(grpc.StatusCode.UNAVAILABLE if ingress.draining else grpc.StatusCode.OK)
        context.set_details(ingress.health)
        return bytes([0x0A, len(ingress.health)]) + ingress.health.encode()  # the first field of a message

    async def ask(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return await ingress.ask(request)

    async def follow(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> AsyncIterator[bytes]:
        async for part in ingress.follow():
            yield part

    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    return [
        grpc.method_handlers_generic_handler("ray.serve.RayServeAPIService", {"Healthz": unary(healthz)}),
        grpc.method_handlers_generic_handler("Ingress", {"Ask": unary(ask), "Follow": stream(follow)}),
    ]


def over_http(ingress: Ingress) -> web.Application:
    async def healthz(request: web.Request) -> web.Response:
        return web.Response(text=ingress.health, status=503 if ingress.draining else 200)

    async def ask(request: web.Request) -> web.Response:
        return web.Response(body=await ingress.ask(await request.read()))

    async def follow(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for part in ingress.follow():
            await response.write(part)
        return response

    async def load(request: web.Request) -> web.Response:
        ingress.load = await request.read()
        return web.Response()

    async def says_load(request: web.Request) -> web.Response:
        return web.Response(body=ingress.load, status=200 if ingress.load else 404)

    application = web.Application(client_max_size=1 << 20)
    application.router.add_get("/-/healthz", healthz)
    application.router.add_get("/-/load", says_load)
    application.router.add_put("/load", load)
    application.router.add_post("/Ingress/Ask", ask)
    application.router.add_post("/Ingress/Follow", follow)
    return application


async def main() -> None:
    """Print the ports of HTTP and gRPC, then serve until the process is ended."""
    logging.disable()  # of those who leave
    ingress = Ingress()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(over_grpc(ingress))
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    runner = web.AppRunner(over_http(ingress))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, lambda: setattr(ingress, "draining", True))
    print(runner.addresses[0][1], grpc_port, flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    ingress.told.set()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
