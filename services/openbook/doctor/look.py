"""Looking: at this machine, and at every server that the settings name."""

import asyncio
import email.utils
import importlib.metadata
import os
import resource
import shutil
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from math import inf
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from openbook import certificates
from openbook.config import ClientTls, ServingSettings, Settings
from openbook.core.address import address_of
from openbook.doctor import findings
from openbook.doctor.findings import Finding, Level
from openbook.errors import InvalidConfig, OpenbookError, reason
from openbook.files import at_home
from openbook.index.client.client import IndexClient, channel_credentials
from openbook.index.client.discovery import addresses_now
from openbook.v1.index_pb2 import InfoResponse

TIMEOUT_S = 5.0
FREE = "does not run, and its port is free"
MAX_BYTES = 1000
"""Of what is said at the endpoint's port, by whomever."""
PACKAGES = (
    *("openbook", "grpcio", "numpy", "faiss-cpu", "faiss-gpu", "numba", "redis", "ray", "torch", "transformers"),
    findings.SLOW_TO_START,
)


def look(settings: Settings, folder: Path) -> Iterator[Finding]:
    """All there is to find, one after the other."""
    yield from this_machine(folder)
    if settings.index.names_servers:
        yield from index_servers(settings)
    if settings.cache.url is not None:
        yield redis("the cache's Redis", "cache", settings)
    if settings.access.url is not None:
        yield redis("the keys' Redis", "access", settings)
    yield from endpoint(settings.serving)


def this_machine(folder: Path) -> Iterator[Finding]:
    """Versions, limits, memory that is shared, disk."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    yield findings.versions(found)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield findings.open_files(*(inf if each == resource.RLIM_INFINITY else each for each in limits))
    if Path("/dev/shm").is_dir():
        shared = os.statvfs("/dev/shm")
        yield findings.shared_memory(shared.f_blocks * shared.f_frsize)
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        yield Finding(f"disk of {folder}", Level.ILL, reason(error))
    else:
        yield findings.disk(str(folder), usage.free, usage.total)


def index_servers(settings: Settings) -> Iterator[Finding]:
    """Who answers, how fast, and whether they make a whole."""
    index = settings.index
    try:
        addresses, server_name = asyncio.run(addresses_now(index))
        infos = asyncio.run(_infos(settings, addresses, server_name))
    except InvalidConfig as error:
        yield Finding("index tier", Level.ILL, str(error))
        return
    there: dict[str, InfoResponse] = {}
    for address, (info, seconds) in infos.items():
        what = f"index server {address}"
        if isinstance(info, OpenbookError):
            yield Finding(what, Level.ILL, str(info).removeprefix(f"{address}: "))
            continue
        there[address] = info
        yield Finding(what, Level.WELL, f"shard {info.shard} of snapshot {info.snapshot_id}, in {seconds * 1e3:.0f} ms")
        if index.tls:
            yield _certificate(what, address, server_name or address.rpartition(":")[0].strip("[]"), index.tls)
    if there:
        n_shards = max(held.n_shards for info in there.values() for held in info.held)
        snapshots = {address: info.snapshot_id for address, info in there.items()}
        yield findings.index_tier(snapshots, {address: info.shard for address, info in there.items()}, n_shards)


async def _infos(
    settings: Settings, addresses: tuple[str, ...], server_name: str | None
) -> dict[str, tuple[InfoResponse | OpenbookError, float]]:
    credentials = channel_credentials(settings.index.tls)

    async def one(address: str) -> tuple[InfoResponse | OpenbookError, float]:
        client, begun = IndexClient(address, credentials, server_name), time.monotonic()
        try:
            return await client.info(TIMEOUT_S), time.monotonic() - begun
        except OpenbookError as error:
            return error, time.monotonic() - begun
        finally:
            await client.close()

    return dict(zip(addresses, await asyncio.gather(*map(one, addresses)), strict=True))


def _certificate(what: str, address: str, server_name: str, tls: ClientTls) -> Finding:
    host, _, port = address.rpartition(":")
    try:
        context = certificates.of_who_connects(tls.ca)
        if tls.certificate and tls.key:
            context.load_cert_chain(at_home(tls.certificate), at_home(tls.key))
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host.strip("[]"), int(port)), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=server_name) as connection,
        ):
            shown = connection.getpeercert() or {}
    except OSError as error:
        return Finding(f"certificate of {what}", Level.ILL, str(error))
    return _expiry(what, shown)


def _expiry(what: str, shown: Mapping[str, object]) -> Finding:
    return findings.certificate(what, ssl.cert_time_to_seconds(str(shown["notAfter"])), time.time())


def redis(what: str, section: str, settings: Settings) -> Finding:
    """Whether it answers, and what its clock says."""
    try:
        from redis.exceptions import NoPermissionError, RedisError
    except ModuleNotFoundError:  # as where index servers are, who need none
        return Finding(what, Level.MIND, "cannot be asked from here: redis is not installed")

    from openbook.cache.redis import connect_blocking

    where = settings.cache if section == "cache" else settings.access
    try:
        with connect_blocking(section, where.url, where.tls, TIMEOUT_S) as client:
            begun = time.time()
            seconds, micros = client.time()
            ended = time.time()
    except NoPermissionError:  # which a cache does not need
        return Finding(what, Level.WELL, "answers; its user has no right to ask for its clock (+time)")
    except (RedisError, OpenbookError, UnicodeError) as error:  # the last of a name that no host can have
        return Finding(what, Level.ILL, str(error))
    found = findings.clock(what, seconds + micros / 1e6 - (begun + ended) / 2, (ended - begun) / 2)
    return Finding(what, found.level, f"answers in {(ended - begun) * 1e3:.0f} ms, clock {found.says}")


def endpoint(serving: ServingSettings) -> Iterator[Finding]:
    """Of this machine: whether it is ready, or whether its ports are free."""
    what = f"endpoint {serving.http_url}"
    host = "127.0.0.1" if serving.host == "0.0.0.0" else serving.host
    connection: HTTPConnection = HTTPConnection(host, serving.http_port, timeout=TIMEOUT_S)
    shown = None
    if serving.tls:
        path = serving.tls.certificate
        try:
            context = _trusting(path)
        except OSError as error:
            yield Finding(f"certificate of {what}", Level.ILL, f"{path}: cannot be read: {reason(error)}")
            return
        connection = HTTPSConnection(host, serving.http_port, timeout=TIMEOUT_S, context=context)
    try:
        connection.connect()
        shown = connection.sock.getpeercert() if isinstance(connection.sock, ssl.SSLSocket) else None
        connection.request("GET", "/readyz")
        reply = connection.getresponse()
        body, date = reply.read(MAX_BYTES), reply.headers.get("date")
    except ConnectionRefusedError:
        yield Finding(what, Level.WELL, FREE)
        yield _free(serving, host)
        return
    except (socket.gaierror, UnicodeError) as error:
        yield Finding(what, Level.ILL, f"serving.host = {serving.host!r} cannot be resolved: {error}")
        return
    except ssl.SSLCertVerificationError as error:
        yield Finding(f"certificate of {what}", Level.ILL, error.verify_message)
        return
    except (OSError, HTTPException) as error:
        # TLS 1.3 refuses who shows no certificate after the handshake, in which the endpoint has shown its own.
        if shown and serving.tls and serving.tls.client_ca and isinstance(error, ssl.SSLError | ConnectionError):
            yield Finding(what, Level.WELL, "asks for a client certificate, so not asked whether it is ready")
            yield _expiry(what, shown)
            yield _over_grpc(serving, host)
            return
        yield Finding(what, Level.ILL, f"something else has its port, or it hangs: {type(error).__name__}: {error}")
        return
    finally:
        connection.close()
    yield findings.readiness(what, reply.status, body)
    with suppress(ValueError):  # none, or none that can be read
        offset_s = email.utils.parsedate_to_datetime(str(date)).timestamp() - time.time()
        yield findings.clock(what, offset_s, 1.0)
    if shown:
        yield _expiry(what, shown)
    yield _over_grpc(serving, host)


def _over_grpc(serving: ServingSettings, host: str) -> Finding:
    """Whether the endpoint serves gRPC too."""
    why = (_shakes_hands if serving.tls else _is_healthy)(serving, host)
    well = "answers" if serving.tls else "is ready"
    return Finding(f"endpoint {serving.grpc_address}", Level.ILL if why else Level.WELL, why or well)


def _free(serving: ServingSettings, host: str) -> Finding:
    """Whether the port of gRPC is, of an endpoint that does not run."""
    what = f"endpoint {serving.grpc_address}"
    try:
        socket.create_connection((host, serving.grpc_port), TIMEOUT_S).close()
    except ConnectionRefusedError:
        return Finding(what, Level.WELL, FREE)
    except OSError as error:
        return Finding(what, Level.ILL, f"does not run: {error}")
    return Finding(what, Level.ILL, "does not run, and something else has its port")


def _is_healthy(serving: ServingSettings, host: str) -> str:
    """Why gRPC is not served, in the clear; empty if it is."""
    with grpc.insecure_channel(address_of(host, serving.grpc_port), (("grpc.enable_http_proxy", 0),)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            status = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S).status
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "" if status == health_pb2.HealthCheckResponse.SERVING else "NOT_SERVING"


def _shakes_hands(serving: ServingSettings, host: str) -> str:
    """As `_is_healthy`, as far as can be seen without a client's certificate."""
    assert serving.tls
    try:
        context = _trusting(serving.tls.certificate)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, serving.grpc_port), TIMEOUT_S) as plain,
            context.wrap_socket(plain) as connection,
        ):
            return "" if connection.selected_alpn_protocol() == "h2" else "something else has its port"
    except OSError as error:
        return str(error)


def _trusting(certificate: Path) -> ssl.SSLContext:
    """That certificate itself, whoever signed it and whatever it is called."""
    context = certificates.of_who_connects(certificate)
    context.check_hostname = False
    return context
