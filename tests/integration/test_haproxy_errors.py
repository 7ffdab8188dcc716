"""What callers hear of HAProxy itself: each in the shape that he expects on his path."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from time import monotonic, sleep

import httpx
import openai
import pytest

from openbook.processes import end, free_port, start
from openbook.serving.endpoint.openai_errors import openai_error_of_status
from openbook.serving.endpoint.problems import problem_of_status
from openbook.serving.launch.haproxy import ERRORS

PATIENCE_S = 30.0
CONFIG = """global
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend http
backend http
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of HAProxy without a replica."""
    folder = tmp_path_factory.mktemp("haproxy")
    config, port = folder / "haproxy.cfg", free_port()
    config.write_text(CONFIG.format(port=port))
    command = [sys.executable, "-m", "openbook.serving.launch.haproxy", "-db", "-f", str(config)]
    process = start(command, env={**os.environ}, stdout=subprocess.DEVNULL, stderr=None)
    try:
        give_up = monotonic() + PATIENCE_S
        while not listens(port):
            assert process.poll() is None
            assert monotonic() < give_up
            sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        end(process)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


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
