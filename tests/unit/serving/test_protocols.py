"""docs/protocols.md does what it says: its code and its commands, against a small endpoint."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from small_endpoint import PASSAGES, on_a_port, service

from openbook.serving.endpoint.http import build_app

PAGE = (Path(__file__).parents[3] / "docs/protocols.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


CURLS = [block for block in blocks("sh") if block.startswith("curl")]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with on_a_port(build_app(service())) as found:
        yield found


def test_its_code_asks(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = PASSAGES[0].text
    for code in blocks("python"):
        exec(code.replace("http://localhost:8000", url).replace("invented", "patented"), {})
    cited = "Telephone https://example.org/bell"
    assert capsys.readouterr().out.splitlines() == [answer, cited, answer, "64", answer, answer]


@pytest.mark.parametrize("command", CURLS)
def test_its_commands_ask(command: str, url: str) -> None:
    _, _, place, *options = shlex.split(command.replace("\\\n", " "))
    assert options[::2] == ["-H", "-d"]
    path = place.removeprefix("localhost:8000")
    response = httpx.post(f"{url}{path}", headers={"content-type": "application/json"}, json=json.loads(options[3]))
    assert response.status_code == 200
    assert PASSAGES[0].text.split()[0] in response.text


def test_there_are_commands() -> None:
    assert len(CURLS) == 2
    assert len(blocks("python")) == 2
