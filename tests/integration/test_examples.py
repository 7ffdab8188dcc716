"""The programs in examples/ that need no endpoint; tests/e2e/test_whole_system.py has an answer for the others."""

import json
import runpy
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
import small_snapshot

from openbook.index.building.build import build_snapshot
from openbook.index.disk.root import Root
from openbook.processes import free_port
from openbook.testing import served
from openbook.v1.answer_pb2_grpc import AnswerServiceServicer, add_AnswerServiceServicer_to_server

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> None:
    """As `python examples/NAME ARGUMENTS`, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_documents_become_a_snapshot_that_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    run("build_and_search.py", "who invented the telephone?")
    best, second = capsys.readouterr().out.splitlines()
    assert "Alexander Graham Bell: " in best
    assert float(best.split()[0]) > float(second.split()[0])


def test_tensors_are_decoded(capsys: pytest.CaptureFixture[str]) -> None:
    run("decode_tensors.py")
    *answers, loss = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in answers] == ["RAG-sequence"] * 2 + ["RAG-token"] * 2
    assert loss.startswith("loss ")


def test_a_snapshot_is_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passages = [small_snapshot.Passage(i, f"doc-{i}", f"title {i}", f"new text {i}") for i in range(small_snapshot.N)]
    first = small_snapshot.build(tmp_path / "root", 2)
    second = tmp_path / "root" / "second"
    built = build_snapshot(passages, small_snapshot.VECTORS, second, 2, "Flat", "encoder", "fingerprint")
    Root.create(tmp_path / "root", first)
    with served(first) as servers:
        run("publish.py", str(second), *(server.address for server in servers))
    said = capsys.readouterr().out
    assert f"{second}: publication 2" in said
    assert said.count(f"current {built.snapshot_id[:12]}, 20 passages") == 2


@pytest.mark.parametrize(
    ("status", "body"), [(404, b"<html>"), (404, b'{"detail": "Not Found"}'), (500, b"[]"), (200, b"{}"), (200, b"[]")]
)
def test_another_web_server_is_one_line(status: int, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *said: object) -> None: ...

    monkeypatch.setenv("no_proxy", "*")
    with HTTPServer(("127.0.0.1", 0), Other) as http, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(http.handle_request)
        with pytest.raises(
            SystemExit, match=rf"^http://127\.0\.0\.1:\d+: .*{'no answer' if status == 200 else status}"
        ):
            run("ask_http.py", "who?", "--server", f"http://127.0.0.1:{http.server_port}")
        asked.result()


def test_examples_show_the_key_that_the_environment_has(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, paths = [], []

    class OverHttp(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            shown.append(self.headers["authorization"])
            paths.append(self.path)
            body = json.dumps({"code": "UNAUTHENTICATED", "detail": "no", "request_id": "1"}).encode()
            self.send_response(401)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *said: object) -> None: ...

    class OverGrpc(AnswerServiceServicer):
        def Answer(self, request: Any, context: Any) -> Any:  # noqa: N802
            shown.append(dict(context.invocation_metadata()).get("authorization"))
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")

    monkeypatch.setenv("OPENBOOK_API_KEY", "ob_mine")
    monkeypatch.setenv("no_proxy", "*")
    with HTTPServer(("127.0.0.1", 0), OverHttp) as http, ThreadPoolExecutor(2) as threads:
        threads.submit(http.serve_forever)
        server = grpc.server(threads)
        add_AnswerServiceServicer_to_server(OverGrpc(), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            for name in ("ask.py", "ask_async.py"):
                with pytest.raises(SystemExit, match=r"^Unauthenticated: no"):
                    run(name, "who?", "--server", address)
            with pytest.raises(SystemExit, match=r"^UNAUTHENTICATED: no \(request 1\)"):
                run("ask_http.py", "who?", "--server", f"http://127.0.0.1:{http.server_port}/")
        finally:
            server.stop(0).wait()
            http.shutdown()
    assert shown == ["Bearer ob_mine"] * 3
    assert paths == ["/v1/answer"]  # though the address ends with a slash, as `openbook up` tells it


def test_nobody_at_the_address_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    address = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SystemExit, match=f"^{address}: .*refused"):
        run("ask_http.py", "who?", "--server", address)


def test_whoever_is_no_endpoint_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    for name, said in (("ask.py", "InvalidConfig: address must be host:port"), ("ask_http.py", "nosuch: unknown url")):
        with pytest.raises(SystemExit, match=f"^{said}"):
            run(name, "who?", "--server", "nosuch")
    with ThreadPoolExecutor(1) as threads, socket.create_server(("127.0.0.1", 0)) as silent:
        caller = threads.submit(silent.accept)
        # Ends before any question, and reads it: of one closed at once the client sees one of two things.
        threads.submit(lambda: caller.result()[0].shutdown(socket.SHUT_WR))
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SystemExit, match=f"^{address}: .*without response"):
            run("ask_http.py", "who?", "--server", address)
        caller.result()[0].close()


def test_what_is_no_address_of_a_server_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^InvalidConfig: .* = 'nope': must be host:port with a port of 1\.\.65535$"):
        run("publish.py", str(tmp_path), "nope")


@pytest.mark.parametrize("name", ["build_and_search.py", "publish.py"])
def test_who_gives_no_arguments_is_told_which(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(name)
    assert "the following arguments are required: " in capsys.readouterr().err


def test_every_example_is_run() -> None:
    folder = Path(__file__).parent
    tests = [Path(__file__), folder / "test_loadtest.py", folder.parent / "e2e" / "test_whole_system.py"]
    said = "".join(path.read_text(encoding="utf-8") for path in tests)
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in said] == []
