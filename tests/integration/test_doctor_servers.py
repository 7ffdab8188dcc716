"""`openbook doctor` before real servers: who holds what, and when their certificates expire."""

import asyncio
import http.server
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from certificates import by_intermediate, plain, strict_as_since_3_13, tls_files
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from redis import Redis
from small_snapshot import build

from openbook.cache.server import RedisServer
from openbook.config import ClientTls, IndexServerSettings, ServerTls, ServingSettings, parse
from openbook.doctor.findings import Level
from openbook.doctor.look import _certificate, _shakes_hands, endpoint, index_servers, redis
from openbook.index.server.server import IndexServer
from openbook.loadtest.http_sender import opened
from openbook.loadtest.settings import LoadSettings
from openbook.processes import free_port


def test_servers_that_make_a_whole_are_well(tmp_path: Path, redis_server: RedisServer) -> None:
    tls, trusted = tls_files(tmp_path, "index.test")
    snapshot = build(tmp_path, n_shards=2)
    at = [IndexServerSettings(snapshot=snapshot, shard=shard, tls=tls) for shard in (0, 1)]
    with IndexServer(at[0]) as first:
        index = {"tls": {"ca": str(trusted.ca)}, "server_name": "index.test", "timeout_s": 60}
        half = parse({"index": {**index, "addresses": [first.address]}})
        assert list(index_servers(half))[-1].says == "nobody serves shard 1 of 2"
        with IndexServer(at[1]) as second:
            settings = parse({"index": {**index, "addresses": [first.address, second.address]}})
            found = {finding.what: finding for finding in index_servers(settings)}
    assert {finding.level for finding in found.values()} == {Level.WELL}
    assert found[f"index server {second.address}"].says.startswith("shard 1 of snapshot ")
    assert found[f"certificate of index server {first.address}"].says.startswith("expires in ")

    settings = parse({"cache": {"url": redis_server.url}})
    told = redis("the cache's Redis", "cache", settings)
    assert (told.level, "clock" in told.says) == (Level.WELL, True)


def test_a_redis_is_well_whose_user_has_only_the_rights_that_a_cache_needs(redis_server: RedisServer) -> None:
    with Redis(port=redis_server.port) as client:
        client.execute_command("ACL", "SETUSER", "few", "on", ">rights", "~openbook:*", "+mget", "+set")
    told = redis("it", "cache", parse({"cache": {"url": f"redis://few:rights@127.0.0.1:{redis_server.port}/0"}}))
    assert (told.level, told.says) == (Level.WELL, "answers; its user has no right to ask for its clock (+time)")


def test_a_certificate_that_cannot_be_read_is_named_and_not_the_port(tmp_path: Path) -> None:
    tls = ServerTls(certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    (missing,) = endpoint(ServingSettings(tls=tls))
    assert (missing.level, missing.what) == (Level.ILL, "certificate of endpoint https://127.0.0.1:8000")
    assert missing.says == f"{tls.certificate}: cannot be read: No such file or directory"
    tls.certificate.write_text("no certificate")
    (damaged,) = endpoint(ServingSettings(tls=tls))
    assert damaged.says.startswith(f"{tls.certificate}: cannot be read: ")


class Web(http.server.BaseHTTPRequestHandler):
    """Says 200 to whatever it is asked, and what its server has to say."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.says)  # type: ignore[attr-defined]

    def log_message(self, *anything: object) -> None: ...


@contextmanager
def web(says: bytes, context: ssl.SSLContext | None = None) -> Iterator[int]:
    """Its port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web) as server:
        server.says = says  # type: ignore[attr-defined]
        if context:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("says", [b"<html>It works!", b'"ok"', b"{}", b"\xff"])
def test_another_web_server_at_its_port_is_not_ready(says: bytes) -> None:
    with web(says) as port:
        told = next(endpoint(ServingSettings(http_port=port)))
    assert (told.level, told.says[:29]) == (Level.ILL, "something else has its port: ")


def test_what_another_web_server_calls_a_date_may_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Web, "date_time_string", lambda self: "soon")
    with web(b"") as port:
        first, over_grpc = endpoint(ServingSettings(http_port=port, grpc_port=free_port()))
    assert (first.level, over_grpc.level) == (Level.ILL, Level.ILL)


@contextmanager
def healthy(says: Any) -> Iterator[int]:
    """The port of a gRPC server with this to say of its health."""
    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        servicer = health.HealthServicer()
        servicer.set("", says)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield port
        finally:
            server.stop(0).wait()


def test_an_endpoint_is_looked_at_over_both_protocols() -> None:
    def told(http_port: int, grpc_port: int) -> tuple[Level, str]:
        *_, over_grpc = endpoint(ServingSettings(http_port=http_port, grpc_port=grpc_port))
        assert over_grpc.what == f"endpoint 127.0.0.1:{grpc_port}"
        return over_grpc.level, over_grpc.says

    serves, serves_not = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    with web(b'{"status": "ok"}') as port:
        first, *_ = endpoint(ServingSettings(http_port=port))
        assert (first.level, first.says) == (Level.WELL, "is ready")
        with healthy(serves) as grpc_port:
            assert told(port, grpc_port) == (Level.WELL, "is ready")
        with healthy(serves_not) as grpc_port:
            assert told(port, grpc_port) == (Level.ILL, "NOT_SERVING")
        level, why = told(port, free_port())
        assert (level, why.partition(":")[0]) == (Level.ILL, "UNAVAILABLE")
        with socket.create_server(("127.0.0.1", 0)) as other:
            other_port = other.getsockname()[1]
            assert told(free_port(), other_port) == (Level.ILL, "does not run, and something else has its port")
    assert told(free_port(), free_port()) == (Level.WELL, "does not run, and its port is free")


@pytest.mark.parametrize("host", ["none.invalid", "x" * 64])
def test_a_host_that_is_no_name_is_said_to_be_none(host: str) -> None:
    (told,) = endpoint(ServingSettings(host=host))
    assert (told.level, told.says.partition(": ")[0]) == (Level.ILL, f"serving.host = {host!r} cannot be resolved")


def showing(folder: Path, issued: trustme.LeafCert) -> ssl.SSLContext:
    """Of a server with that certificate, which is left in the folder."""
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


@contextmanager
def greets_one(folder: Path, issued: trustme.LeafCert, asks: bool, speaks: Sequence[str] = ()) -> Iterator[int]:
    """The port of who speaks TLS to one, and may ask for a certificate. Leaves its own in the folder."""
    context = showing(folder, issued)
    context.set_alpn_protocols(speaks)
    if asks:
        context.load_verify_locations(folder / "cert.pem")
        context.verify_mode = ssl.CERT_REQUIRED

    def greet_one() -> None:
        with suppress(OSError), context.wrap_socket(listening.accept()[0], server_side=True):
            pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=greet_one)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


def test_an_expired_certificate_of_the_endpoint_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    yesterday = datetime.now(UTC) - timedelta(days=1)
    issued = trustme.CA().issue_cert("127.0.0.1", not_before=yesterday - timedelta(days=9), not_after=yesterday)
    tls = ServerTls(certificate=Path("~/cert.pem"), key=Path("~/key.pem"))
    with greets_one(tmp_path, issued, asks=False) as port:
        (told,) = endpoint(ServingSettings(tls=tls, http_port=port))
    assert (told.level, told.says) == (Level.ILL, "certificate has expired")
    assert told.what.startswith("certificate of endpoint https://")


def test_where_client_certificates_are_asked_for_grpc_is_looked_at_too(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    tls = ServerTls(certificate=cert, key=key, client_ca=cert)
    with greets_one(tmp_path, trustme.CA().issue_cert("127.0.0.1"), asks=True) as port:
        asks, _, over_grpc = endpoint(ServingSettings(tls=tls, http_port=port, grpc_port=free_port()))
    assert (asks.level, asks.says.partition(",")[0]) == (Level.WELL, "asks for a client certificate")
    assert (over_grpc.level, "refused" in over_grpc.says) == (Level.ILL, True)


@pytest.mark.parametrize("issued", [plain, by_intermediate])
def test_a_certificate_that_grpc_takes_is_taken_with_any_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, issued: Callable[[Path], trustme.LeafCert]
) -> None:
    async def is_reached(address: str) -> None:
        async with opened(LoadSettings(address=address, tls_ca=tmp_path / "ca.pem"), []):
            pass

    strict_as_since_3_13(monkeypatch)
    with web(b"", showing(tmp_path, issued(tmp_path))) as port:
        told = _certificate("it", f"127.0.0.1:{port}", "127.0.0.1", ClientTls(ca=tmp_path / "ca.pem"))
        assert told.says.startswith("expires in ")
        asyncio.run(is_reached(f"https://127.0.0.1:{port}"))


@pytest.mark.parametrize(
    ("speaks", "why"),
    [(["h2"], ""), (["http/1.1"], "something else has its port"), ([], "something else has its port")],
)
def test_what_speaks_tls_at_the_port_of_grpc_must_speak_http_2(tmp_path: Path, speaks: list[str], why: str) -> None:
    tls = ServerTls(certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    with greets_one(tmp_path, trustme.CA().issue_cert("127.0.0.1"), asks=False, speaks=speaks) as port:
        assert _shakes_hands(ServingSettings(tls=tls, grpc_port=port), "127.0.0.1") == why
