"""TLS at the endpoint: the HAProxy that Serve starts, as we start it, in front of servers of both protocols."""

import asyncio
import http.server
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health, health_pb2_grpc
from proxies import haproxy, until
from pydantic import ValidationError

from openbook import certificates
from openbook.client import Client
from openbook.config import ServerTls, ServingSettings
from openbook.doctor import look
from openbook.doctor.findings import Level
from openbook.errors import InvalidConfig, ShardUnavailable
from openbook.loadtest.kinds import Arrivals
from openbook.loadtest.run import measure
from openbook.loadtest.senders import Unreachable
from openbook.loadtest.settings import LoadSettings
from openbook.processes import free_port
from openbook.serving.launch import run, tls
from openbook.serving.launch.haproxy import socket_of
from openbook.v1 import answer_pb2, answer_pb2_grpc

SECTIONS = """frontend http_frontend
    bind 127.0.0.1:{http}
    default_backend http
backend http
    server one 127.0.0.1:{http_server}
frontend grpc_frontend
    # A comment, as Ray's have them.
    bind 127.0.0.1:{grpc} proto h2
    mode http
    default_backend grpc
backend grpc
    server one 127.0.0.1:{grpc_server} proto h2
"""


READY = b'{"status": "ok"}'


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", f"{len(READY)}")
        self.end_headers()
        self.wfile.write(READY)

    def log_message(self, *anything: object) -> None: ...


class Echo(answer_pb2_grpc.AnswerServiceServicer):
    def Answer(self, request: answer_pb2.AnswerRequest, context: Any) -> answer_pb2.AnswerResponse:  # noqa: N802
        formulation, decoding = answer_pb2.FORMULATION_TOKEN, answer_pb2.DECODING_THOROUGH
        return answer_pb2.AnswerResponse(answer=request.question, formulation=formulation, decoding=decoding)


@pytest.fixture(scope="module")
def behind() -> Iterator[tuple[int, int]]:
    """Ports of an HTTP and a gRPC server."""
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ready)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    with ThreadPoolExecutor() as pool:
        server = grpc.server(pool)
        answer_pb2_grpc.add_AnswerServiceServicer_to_server(Echo(), server)
        servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield web.server_port, port
        server.stop(None).wait()
    web.shutdown()
    thread.join()
    web.server_close()


@dataclass(frozen=True)
class Edge:
    """HAProxy with TLS."""

    folder: Path
    files: ServerTls
    http: int
    grpc: int

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def issue(self, ca: trustme.CA) -> None:
        """A new certificate in place of the one that is there."""
        issued = ca.issue_cert("127.0.0.1", "localhost")
        issued.private_key_pem.write_to_path(self.files.key)
        self.files.certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))

    def get(self, **options: Any) -> httpx.Response:
        return httpx.get(f"https://127.0.0.1:{self.http}/readyz", **options)

    def shown(self, port: int) -> bytes:
        """The certificate that it shows there."""
        context = ssl.create_default_context(cafile=self.ca)
        with (
            socket.create_connection(("127.0.0.1", port)) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            found = connection.getpeercert(binary_form=True)
        assert found
        return found


@contextmanager
def edge(folder: Path, ca: trustme.CA, behind: tuple[int, int], client_ca: trustme.CA | None = None) -> Iterator[Edge]:
    names = {"certificate": folder / "our cert.pem", "key": folder / "our key.pem"}
    if client_ca:
        client_ca.cert_pem.write_to_path(folder / "clients.pem")
        names["client_ca"] = folder / "clients.pem"
    found = Edge(folder, ServerTls.model_validate(names), free_port(), free_port())
    found.issue(ca)
    ca.cert_pem.write_to_path(found.ca)
    sections = SECTIONS.format(http=found.http, grpc=found.grpc, http_server=behind[0], grpc_server=behind[1])
    with haproxy(folder, sections, (found.http, found.grpc), tls.to_environment(found.files)):
        yield found


def refused(served: Edge, context: ssl.SSLContext) -> bool:
    try:
        served.get(verify=context)
    except httpx.TransportError:
        return True
    return False


def asked(server: str, *options: str) -> str:
    """What `openbook ask` says on standard error where it fails."""
    command = [sys.executable, "-m", "openbook.cli", "ask", "who", "--server", server, *options]
    env = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def served(ca: trustme.CA, behind: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with edge(tmp_path_factory.mktemp("tls"), ca, behind) as found:
        yield found


def test_both_protocols_are_encrypted_and_nothing_is_served_in_the_clear(served: Edge, tmp_path: Path) -> None:
    assert served.get(verify=ssl.create_default_context(cafile=served.ca)).content == READY
    with Client(f"127.0.0.1:{served.grpc}", tls_ca=served.ca) as client:
        assert client.answer("who").text == "who"
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{served.http}/readyz")
    with Client(f"127.0.0.1:{served.grpc}", timeout_s=5) as plain, pytest.raises(ShardUnavailable):
        plain.answer("who")


def test_who_trusts_another_authority_is_not_deceived(served: Edge, tmp_path: Path) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        served.get(verify=ssl.create_default_context(cafile=tmp_path / "other.pem"))
    with (
        Client(f"127.0.0.1:{served.grpc}", timeout_s=5, tls_ca=tmp_path / "other.pem") as client,
        pytest.raises(ShardUnavailable),
    ):
        client.answer("who")


def test_the_load_test_trusts_whom_it_is_told_to(served: Edge, tmp_path: Path) -> None:
    def measured(address: str, ca: Path | None = served.ca) -> dict[str, int]:
        settings = LoadSettings(
            address=address, tls_ca=ca, warm_up_s=0, duration_s=0.2, rate=50, arrivals=Arrivals.CONSTANT
        )
        return {each.status: each.n for each in asyncio.run(measure(settings)).measured.statuses}

    assert measured(f"grpcs://127.0.0.1:{served.grpc}") == {"OK": 10}
    assert measured(f"https://127.0.0.1:{served.http}") == {"UNIMPLEMENTED": 10}  # what is behind it knows no POST
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    with pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"):
        measured(f"https://127.0.0.1:{served.http}", tmp_path / "other.pem")
    with pytest.raises(Unreachable, match=r"^http://127\.0\.0\.1:\d+: "):
        measured(f"http://127.0.0.1:{served.http}", None)
    for address in (f"grpcs://127.0.0.1:{served.grpc}", f"https://127.0.0.1:{served.http}"):
        with pytest.raises(InvalidConfig, match=rf"tls_ca: its files cannot be used: {re.escape(__file__)}: "):
            measured(address, Path(__file__))
        with pytest.raises(InvalidConfig, match=r"tls_ca: .*none\.pem: cannot be read"):
            measured(address, tmp_path / "none.pem")
    with pytest.raises(ValidationError, match="tls_ca needs an address of grpcs:// or https://, got 127"):
        measured(f"127.0.0.1:{served.grpc}")


def test_the_load_test_trusts_whom_this_machine_trusts(served: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openbook.loadtest.grpc_sender.CONNECT_TIMEOUT_S", 2.0)
    monkeypatch.delenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(served.ca))
    for address in (f"grpcs://127.0.0.1:{served.grpc}", f"https://127.0.0.1:{served.http}"):
        assert asyncio.run(measure(LoadSettings(address=address, warm_up_s=0, duration_s=0.1, rate=50))).measured.n


def test_the_load_test_says_why_it_reaches_nobody(
    served: Edge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openbook.loadtest.grpc_sender.CONNECT_TIMEOUT_S", 0.5)
    trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
    settings = LoadSettings(
        address=f"grpcs://127.0.0.1:{served.grpc}", tls_ca=tmp_path / "other.pem", duration_s=0.2, rate=50
    )
    with pytest.raises(Unreachable, match=r"no gRPC server answers within .*CERTIFICATE_VERIFY_FAILED"):
        asyncio.run(measure(settings))
    monkeypatch.setattr("openbook.loadtest.grpc_sender.CONNECT_TIMEOUT_S", 0)
    settings = LoadSettings(address=f"grpcs://127.0.0.1:{served.grpc}", tls_ca=served.ca, duration_s=0.2, rate=50)
    with pytest.raises(Unreachable, match=r"within 0 s: it answers now$"):
        asyncio.run(measure(settings))


def test_this_machine_sees_whether_it_is_ready_without_a_certificate(
    served: Edge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(tmp_path / "haproxy.cfg"))
    serving = ServingSettings(tls=served.files, http_port=served.http, grpc_port=served.grpc)
    assert all((run._ask_over_http(serving), run._ask_over_grpc(serving))), "Serve has made no folder yet"
    (tmp_path / "node").symlink_to(served.folder)
    assert (run._ask_over_http(serving), run._ask_over_grpc(serving)) == ("", "")
    assert {socket_of(served.folder, name).stat().st_mode & 0o777 for name in ("http", "grpc")} == {0o600}


def test_the_doctor_looks_at_both_ports(served: Edge) -> None:
    at = {"http_port": served.http, "grpc_port": served.grpc}
    found = look.endpoint(ServingSettings(tls=served.files, **at))
    assert {each.what: each.level for each in found if "clock" not in each.what} == {
        f"endpoint https://127.0.0.1:{served.http}": Level.WELL,
        f"certificate of endpoint https://127.0.0.1:{served.http}": Level.WELL,
        f"endpoint 127.0.0.1:{served.grpc}": Level.WELL,
    }


def test_a_renewed_certificate_is_taken_up_while_it_serves(served: Edge, ca: trustme.CA) -> None:
    with Client(f"127.0.0.1:{served.grpc}", tls_ca=served.ca) as client:
        assert client.answer("before").text == "before"
        former = served.shown(served.http)
        whole = served.files.key.read_bytes()
        served.files.key.write_bytes(b"no key")  # what does not belong together is left
        until(lambda: "the former certificate goes on" in (served.folder / "log").read_text())
        assert served.shown(served.grpc) == former
        served.files.key.write_bytes(whole)
        served.issue(ca)
        until(lambda: served.shown(served.http) != former != served.shown(served.grpc))
        assert client.answer("after").text == "after"


def test_with_a_client_ca_only_its_holders_connect(ca: trustme.CA, behind: tuple[int, int], tmp_path: Path) -> None:
    clients = trustme.CA()
    with edge(tmp_path, ca, behind, clients) as served:
        ours = clients.issue_cert("somebody")
        certificate, key = tmp_path / "mine.pem", tmp_path / "mine.key"
        ours.cert_chain_pems[0].write_to_path(certificate)
        ours.private_key_pem.write_to_path(key)
        context = ssl.create_default_context(cafile=served.ca)
        with pytest.raises(httpx.TransportError):
            served.get(verify=context)
        told = asked(f"127.0.0.1:{served.grpc}", "--tls-ca", str(served.ca))
        assert re.fullmatch(
            r"openbook: failed to connect .*; it may want a certificate of yours, .*: tls_cert, --tls-cert\n", told
        )
        serving = ServingSettings(tls=served.files, http_port=served.http, grpc_port=served.grpc)
        ready, expiry, over_grpc = look.endpoint(serving)
        assert (ready.level, ready.says) == (
            Level.WELL,
            "asks for a client certificate, so not asked whether it is ready",
        )
        assert expiry.says.startswith("expires in ")
        assert (over_grpc.level, over_grpc.says) == (Level.WELL, "answers")
        context.load_cert_chain(certificate, key)
        assert served.get(verify=context).content == READY
        with Client(f"127.0.0.1:{served.grpc}", tls_ca=served.ca, tls_cert=certificate, tls_key=key) as holder:
            assert holder.answer("who").text == "who"
        trustme.CA().cert_pem.write_to_path(tmp_path / "clients.pem")  # another authority, while it serves
        until(lambda: refused(served, context))


def test_paths_in_ones_home_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    told = tls.to_environment(ServerTls(certificate=Path("~/a.pem"), key=Path("key.pem")))
    assert told[tls.VARIABLES["certificate"]] == str(tmp_path / "a.pem")
    assert told[tls.VARIABLES["key"]] == str(Path.cwd() / "key.pem")


def test_files_that_will_not_do_stop_the_start(ca: trustme.CA, tmp_path: Path) -> None:
    one, other = ca.issue_cert("a"), ca.issue_cert("b")
    one.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    other.private_key_pem.write_to_path(tmp_path / "key.pem")
    for key in ("key.pem", "none.pem"):
        with pytest.raises(InvalidConfig, match=r"serving.tls: .*cannot be (used|read)"):
            certificates.read("serving.tls", ServerTls(certificate=tmp_path / "cert.pem", key=tmp_path / key))
    with pytest.raises(InvalidConfig, match="OPENBOOK_TLS_CERTIFICATE and OPENBOOK_TLS_KEY must be given together"):
        tls.of_environment({"OPENBOOK_TLS_KEY": "key.pem"})
