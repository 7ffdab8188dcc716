"""What callers hear of HAProxy itself: each in the shape that he expects on his path."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from proxies import haproxy

from openbook.processes import free_port
from openbook.serving.endpoint.openai_errors import openai_error_of_status
from openbook.serving.endpoint.problems import problem_of_status
from openbook.serving.launch.haproxy import ERRORS, MAX_REFLECTIONS

SECTIONS = """frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend http
backend http
"""
GRPC = """frontend http_frontend
    bind 127.0.0.1:{http}
frontend grpc_frontend
    bind 127.0.0.1:{port} proto h2
    default_backend grpc
backend grpc
    server one 127.0.0.1:{replica} proto h2
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of HAProxy without a replica."""
    port = free_port()
    with haproxy(tmp_path_factory.mktemp("haproxy"), SECTIONS.format(port=port), (port,)):
        yield f"http://127.0.0.1:{port}"


def test_openais_client_reads_what_it_knows(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    expected = openai_error_of_status(503, ERRORS[503][1]).model_dump()["error"]
    for ask in (
        lambda: client.chat.completions.create(model="openbook", messages=[{"role": "user", "content": "who"}]),
        lambda: client.embeddings.create(model="openbook", input="who"),
        client.models.list,
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            ask()
        assert caught.value.status_code == 503
        assert caught.value.response.headers["content-type"] == "application/json"
        assert caught.value.body == expected


@pytest.mark.parametrize("path", ["/v1/answer", "/readyz", "/v1/modelship"])
def test_all_others_read_problem_details(url: str, path: str) -> None:
    reply = httpx.get(url + path)
    assert (reply.status_code, reply.headers["content-type"]) == (503, "application/problem+json")
    assert reply.json() == problem_of_status(503, ERRORS[503][1], "UNAVAILABLE", "").model_dump()


def test_what_serve_itself_would_list_is_nothing_for_callers(tmp_path: Path) -> None:
    port = free_port()
    with (
        haproxy(tmp_path, GRPC.format(http=free_port(), port=port, replica=free_port()), (port,)),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary("/ray.serve.RayServeAPIService/ListApplications")(bytes(1 << 20), timeout=30)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_calls_of_reflection_that_never_end_are_few_and_keep_nobody_out(tmp_path: Path) -> None:
    asked = reflection_pb2.ServerReflectionRequest(list_services="")

    async def scenario() -> None:
        server, port = grpc.aio.server(), free_port()
        reflection.enable_server_reflection([reflection.SERVICE_NAME], server)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        replica = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            with haproxy(tmp_path, GRPC.format(http=free_port(), port=port, replica=replica), (port,)):
                async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    begin = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo

                    async def answered() -> grpc.aio.StreamStreamCall:
                        call = begin()
                        await call.write(asked)
                        assert (await call.read()).list_services_response.service
                        return call

                    open_calls = [await answered() for _ in range(MAX_REFLECTIONS)]
                    refused = begin(timeout=30)
                    assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    assert f"{MAX_REFLECTIONS} of reflection" in await refused.details()
                    await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
                    await open_calls[0].done_writing()
                    assert await open_calls[0].code() is grpc.StatusCode.OK
                    while len(open_calls) == MAX_REFLECTIONS:
                        with suppress(grpc.aio.AioRpcError):  # HAProxy lets go of it a moment later
                            open_calls.append(await answered())
        finally:
            await server.stop(0)

    asyncio.run(scenario())
