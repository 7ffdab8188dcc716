"""MCP, asked by its own client: over HTTP, and over standard input and output."""

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest
from certificates import tls_files
from mcp import Client, MCPError
from mcp.client.stdio import StdioServerParameters
from mcp_types import INVALID_REQUEST, PARSE_ERROR, CallToolResult, TextContent, ToolListChangedNotification
from small_endpoint import PASSAGES, QUESTION, on_a_port, request, service

from openbook import __version__, mcp_stdio
from openbook.config import Limits
from openbook.core.context import Context
from openbook.core.types import Generation, GenerationSettings, Retrieved
from openbook.errors import InvalidConfig, Overloaded
from openbook.processes import free_port
from openbook.serving.access.gate import Gate
from openbook.serving.access.key_file import KeyFile
from openbook.serving.endpoint.http import build_app
from openbook.serving.endpoint.mcp import _snippet
from openbook.testing import EchoGenerator

CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}


class Busy(EchoGenerator):
    """Refuses the question that says so."""

    async def generate(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> Generation:
        if "busy" in question:
            raise Overloaded("generator: would be done in 7.2 s", retry_after_s=2.2)
        if "broken" in question:
            raise RuntimeError("a secret of the house")
        return await super().generate(question, retrieved, settings, context)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with on_a_port(build_app(service(generator=Busy()))) as found:
        yield found


def over_stdio(url: str, *options: str) -> StdioServerParameters:
    return StdioServerParameters(
        command=sys.executable, args=["-m", "openbook.cli", "mcp", "--server", url, *options], env=dict(os.environ)
    )


PARAMS = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


def bridged(url: str, lines: str) -> str:
    """What the bridge says to them, until their end."""
    started = over_stdio(url)
    how: dict[str, Any] = {"env": started.env, "capture_output": True, "text": True, "check": True, "timeout": 60}
    return subprocess.run([started.command, *started.args], input=lines, **how).stdout


def use(server: Any, how: Callable[[Client], Awaitable[None]], mode: str = "auto") -> None:
    async def main() -> None:
        async with Client(server, mode=mode) as client:
            await how(client)

    asyncio.run(main())


async def call(client: Client, name: str, **arguments: Any) -> Any:
    """The result, which stands there twice."""
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result
    assert json.loads(text(result)) == result.structured_content
    return result.structured_content


def text(result: CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


async def everything(client: Client) -> None:
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(tools) == {"search", "fetch", "answer"}
    assert tools["search"].input_schema["required"] == ["query"]
    assert all(tool.description for tool in tools.values())
    assert (about := client.server_info)
    assert (about.name, about.title, about.version) == ("openbook", "openbook", __version__)
    found = await call(client, "search", query=QUESTION)
    first, _ = found["results"]
    assert (first["title"], first["url"]) == ("Telephone", "https://example.org/bell")
    whole = await call(client, "fetch", id=first["id"])
    assert {"id", "title", "text", "url", "metadata"} == set(whole)
    assert (whole["text"], whole["url"]) == (PASSAGES[0].text, first["url"])
    answer = await call(client, "answer", question=QUESTION, k=1)
    assert (answer["answer"], answer["probability"], answer["abstained"]) == (PASSAGES[0].text, 1.0, False)
    assert answer["cut"] is False
    (cited,) = answer["citations"]
    assert (cited["text"], cited["id"], cited["title"]) == (answer["answer"], first["id"], "Telephone")
    assert (await call(client, "answer", question="Curie?", labels=["Paris", "Warsaw"]))["answer"] == "Warsaw"


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_tools_work_over_http_for_clients_old_and_new(mode: str, url: str) -> None:
    use(f"{url}/mcp", everything, mode)


def test_a_tool_says_how_many_passages_may_be_asked_for() -> None:
    body = {**CALL, "method": "tools/list"}
    tools = {tool["name"]: tool["inputSchema"]["properties"] for tool in post(body).json()["result"]["tools"]}
    for name in ("search", "answer"):
        assert tools[name]["k"]["anyOf"] == [{"type": "integer", "minimum": 1, "maximum": 100}, {"type": "null"}]


def test_the_tools_work_over_standard_input_and_output(url: str) -> None:
    use(over_stdio(url), everything)


def test_ctrl_c_ends_the_bridge_though_its_input_goes_on(url: str) -> None:
    begin = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": PARAMS}
    started = over_stdio(url)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([started.command, *started.args], env=started.env, **pipes) as bridge:
        try:
            print(json.dumps(begin), file=bridge.stdin, flush=True)
            assert '"result"' in bridge.stdout.readline()
            bridge.send_signal(signal.SIGINT)
            assert bridge.wait(30) == -signal.SIGINT
        finally:
            bridge.kill()


def test_a_bridge_that_was_told_to_ignore_ctrl_c_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what a script starts with `&`: Ctrl-C is for the script."""

    async def until_the_input_ends(*_: object) -> None:
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    monkeypatch.setattr(mcp_stdio, "_run", until_the_input_ends)
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        mcp_stdio.run("http://127.0.0.1:1")
    finally:
        signal.signal(signal.SIGINT, former)


def test_a_call_that_meets_no_endpoint_fails_alone() -> None:
    app, port = build_app(service()), free_port()

    async def main() -> None:
        async with AsyncExitStack() as stack:
            with on_a_port(app, port) as url:
                client = await stack.enter_async_context(Client(over_stdio(url), read_timeout_seconds=60))
                await call(client, "search", query=QUESTION)
            failed = await client.call_tool("search", {"query": QUESTION})
            assert failed.is_error
            assert text(failed).startswith(f"{url}/mcp: ")
            with on_a_port(app, port):
                await call(client, "search", query=QUESTION)

    asyncio.run(main())


def refusal(url: str, **env: str) -> str:
    """What the bridge says that is let in nowhere."""
    command = [sys.executable, "-m", "openbook.cli", "mcp", "--server", url]
    options: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "input": ""}
    done = subprocess.run(command, env={**os.environ, **env}, **options)
    assert done.returncode == 1
    assert done.stderr.startswith(f"openbook: {url}/mcp: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix(f"openbook: {url}/mcp: ")


def test_a_bridge_that_starts_before_its_endpoint_has_its_tools_once_it_is_there() -> None:
    """It tells a client that listens for it, as those of before 2026 may."""
    app, port = build_app(service()), free_port()
    url, changed = f"http://127.0.0.1:{port}", asyncio.Event()

    async def heard(message: object) -> None:
        if isinstance(message, ToolListChangedNotification):
            changed.set()

    async def main() -> None:
        async with Client(over_stdio(url), mode="legacy", message_handler=heard) as client:
            with pytest.raises(MCPError, match=f"^{url}/mcp: nobody speaks MCP there: "):
                await client.list_tools()
            failed = await client.call_tool("search", {"query": QUESTION})
            assert failed.is_error
            assert text(failed).startswith(f"{url}/mcp: nobody speaks MCP there: ")
            with on_a_port(app, port):
                await asyncio.wait_for(changed.wait(), 60)
                assert len((await client.list_tools()).tools) == 3
                await call(client, "search", query=QUESTION)

    asyncio.run(main())


def test_what_was_asked_before_the_input_ended_is_answered(url: str) -> None:
    """All but what was cancelled: nobody answers that."""
    params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    begin = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
    asked = [{**CALL, "id": id, "params": {"name": "search", "arguments": {"query": QUESTION}}} for id in range(2, 9)]
    cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 8}}
    said = bridged(url, "".join(f"{json.dumps(each)}\n" for each in [begin, *asked, cancel]))
    answers = {answer["id"]: answer.get("result") for answer in map(json.loads, said.splitlines())}
    assert {id for id, result in answers.items() if result and not result.get("isError")} >= set(range(1, 8))


def test_a_line_that_is_no_message_is_told_so_and_the_next_is_answered(url: str) -> None:
    begin = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": PARAMS})
    no_id = '{"jsonrpc": "2.0", "id": 1.5, "method": "tools/list"}'
    lines = ["{", "", " ", "[]", r'{"jsonrpc": "2.0", "id": 2, "method": "\ud800"}', begin, no_id, '{"id']
    answers = [*map(json.loads, bridged(url, "\n".join(lines)).splitlines())]
    told = [each["error"]["code"] for each in answers if each["id"] is None]
    assert told == [PARSE_ERROR, INVALID_REQUEST, PARSE_ERROR, INVALID_REQUEST, PARSE_ERROR]
    assert [each["id"] for each in answers if "result" in each] == [1]


@pytest.mark.parametrize(
    "url", ["localhost:9000", "", "ftp://a", "http://", "http://a:99999", "http://a:b", "http://[::1", "http://a\n"]
)
def test_an_address_at_which_nobody_can_ever_be_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfig, match=r"^--server must be http://host:port or https://host:port, got "):
        mcp_stdio.run(url)


@pytest.mark.parametrize("path", ["/", "/mcp", "/mcp/"])
def test_the_bridge_takes_the_address_of_mcp_too(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def run(url: str, *_: object) -> None:
        asked.append(url)

    monkeypatch.setattr(mcp_stdio, "_run", run)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    mcp_stdio.run(f"http://a:1{path}")
    assert asked == ["http://a:1/mcp"]


def test_the_bridge_says_why_it_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys.jsonl"
    keys.touch()
    with on_a_port(build_app(service(), Gate(KeyFile(keys, 60.0), Limits()))) as url:
        said = refusal(url, OPENBOOK_API_KEY="ob_wrong", http_proxy="http://127.0.0.1:1", no_proxy="")
    assert said.startswith("the key is none of ours: ")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Options of one who has a certificate of the authority that signed it."""
    server, client = tls_files(tmp_path)
    return {"--tls-ca": f"{client.ca}", "--tls-cert": f"{server.certificate}", "--tls-key": f"{server.key}"}


def test_the_bridge_shows_its_certificate_to_who_asks_for_one(files: dict[str, str]) -> None:
    ca, certificate, key = files.values()
    pair = {"ssl_certfile": certificate, "ssl_keyfile": key}
    with on_a_port(build_app(service()), ssl_ca_certs=ca, ssl_cert_reqs=ssl.CERT_REQUIRED, **pair) as url:
        use(over_stdio(url, *chain.from_iterable(files.items())), everything)


def test_who_asks_in_the_clear_where_tls_is_spoken_hears_of_it(files: dict[str, str]) -> None:
    pair = {"ssl_certfile": files["--tls-cert"], "ssl_keyfile": files["--tls-key"]}

    async def hear(client: Client) -> None:
        with pytest.raises(MCPError, match=r"; it may want https://$"):
            await client.list_tools()

    with on_a_port(build_app(service()), **pair) as url:
        use(over_stdio(url.replace("https", "http")), hear)
        assert "certificate verify failed" in refusal(url)


def test_files_of_tls_that_will_not_do_are_refused(files: dict[str, str]) -> None:
    ca, certificate, key = map(Path, files.values())
    with pytest.raises(InvalidConfig, match="need an address of https://, got http://a:1"):
        mcp_stdio.run("http://a:1", None, ca)
    with pytest.raises(InvalidConfig, match="must be given together"):
        mcp_stdio.run("https://a:1", None, ca, certificate)
    with pytest.raises(InvalidConfig, match=r"tls: .*none\.pem: cannot be read"):
        mcp_stdio.run("https://a:1", None, ca, certificate, key.with_name("none.pem"))


def test_a_key_that_no_header_holds_is_refused_and_not_told() -> None:
    for key in ("ob_se\ncret", "ob_secrét"):
        with pytest.raises(InvalidConfig, match="printable ASCII") as refused:
            mcp_stdio.run("http://127.0.0.1:1", key)
        assert "ob_" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("search", {"query": ""}, "INVALID_ARGUMENT: query must have 1..2000 characters, got none"),
        ("search", {"query": "x", "k": 0}, "INVALID_ARGUMENT: k must be 1..100, got 0"),
        ("search", {}, "INVALID_ARGUMENT: query is missing"),
        ("search", {"query": "x", "n": 3}, "INVALID_ARGUMENT: unknown key 'n'"),
        ("fetch", {"id": "other:0"}, "NOT_FOUND: the index holds snapshot exact, asked for other"),
        ("fetch", {"id": "exact:3"}, "NOT_FOUND: passage id must be 0..2, got 3"),
        ("fetch", {"id": "exact:" + "9" * 50}, "NOT_FOUND: id must be one that search gave, got 'exact:9"),
        ("fetch", {"id": "3"}, "NOT_FOUND: id must be one that search gave, got '3'"),
        ("fetch", {"id": "exact:²"}, "NOT_FOUND: id must be one that search gave"),
        (
            "answer",
            {"question": "x", "min_probability": 2},
            "INVALID_ARGUMENT: min_probability must be 0.0..1.0, got 2",
        ),
        ("answer", {"question": "busy"}, "RESOURCE_EXHAUSTED: generator: would be done in 7.2 s (try again in 3 s)"),
        ("answer", {"question": "broken"}, "INTERNAL: internal error, request id mine"),
    ],
    ids=str,
)
def test_what_a_tool_refuses_is_said_in_its_result(name: str, arguments: Any, message: str) -> None:
    result = post({**CALL, "params": {"name": name, "arguments": arguments}}).json()["result"]
    assert result["isError"]
    assert result["content"][0]["text"].startswith(message)


def post(body: Any, **headers: str) -> httpx.Response:
    accepted = {"accept": "application/json, text/event-stream", "x-request-id": "mine"}
    return request("POST", "/mcp", service(generator=Busy()), json=body, headers={**accepted, **headers})


@pytest.mark.parametrize("id", [None, 1.5, True, [1]])
def test_a_request_with_an_id_that_is_none_is_refused_and_a_notification_taken(id: Any) -> None:
    refused = post({"jsonrpc": "2.0", "id": id, "method": "tools/list"})
    assert (refused.status_code, refused.json()["id"]) == (400, None)
    assert refused.json()["error"] == {"code": INVALID_REQUEST, "message": "id must be a text or a whole number"}
    taken = post({"jsonrpc": "2.0", "method": "notifications/initialized"})
    assert (taken.status_code, taken.content) == (202, b"")


@pytest.mark.parametrize(
    ("passage", "snippet"),
    [
        ("x" * 300, "x" * 300),
        ("x" * 290 + " " + "y" * 20, "x" * 290 + " ..."),
        ("苏" * 400, "苏" * 300 + " ..."),
    ],
    ids=["short", "long", "without a space"],
)
def test_a_passage_among_results_ends_with_a_word_where_it_has_words(passage: str, snippet: str) -> None:
    assert _snippet(passage) == snippet


def test_a_tool_that_there_is_none_of_is_an_error_of_the_protocol() -> None:
    error = post({**CALL, "params": {"name": "delete", "arguments": {}}}).json()["error"]
    assert (error["code"], error["message"]) == (-32602, "tool must be one of search, fetch, answer, got 'delete'")


def test_there_are_no_sessions_to_get_or_delete() -> None:
    for method in ("GET", "DELETE"):
        response = request(method, "/mcp")
        assert (response.status_code, response.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("body", [[], 5, {}, {"jsonrpc": "2.0"}, {**CALL, "params": 5}, {**CALL, "method": "x/y"}])
def test_what_is_no_call_breaks_nothing(body: Any) -> None:
    assert post(body).status_code in (200, 400)


def test_without_its_package_the_endpoint_works_without_it() -> None:
    code = """
import sys
sys.modules["mcp"] = None
import asyncio, importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "mcp" else found(name, *more)
from small_endpoint import request, QUESTION
assert request("POST", "/mcp", json={}).status_code == 404
assert request("POST", "/v1/answer", json={"question": QUESTION}).status_code == 200
"""
    folder = __file__.rpartition("/")[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_beside_a_version_of_its_package_that_is_too_old_the_endpoint_works_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "openbook.serving.endpoint.mcp")
    monkeypatch.setitem(sys.modules, "mcp_types", None)  # which 1.x had within it
    assert request("POST", "/mcp", service(), json={}).status_code == 404
    (said,) = caplog.messages
    assert said.startswith("there is no /mcp: ")
    assert said.endswith(": pip install 'openbook[mcp]'")
