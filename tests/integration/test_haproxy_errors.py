"""What callers hear of HAProxy itself: each in the shape that he expects on his path."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from proxies import haproxy

from openbook.processes import free_port
from openbook.serving.endpoint.openai_errors import openai_error_of_status
from openbook.serving.endpoint.problems import problem_of_status
from openbook.serving.launch.haproxy import ERRORS

SECTIONS = """frontend http_frontend
    bind 127.0.0.1:{port}
    default_backend http
backend http
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
