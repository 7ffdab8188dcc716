"""Whether an index server says anything at all."""

import socket
import ssl
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def answers(address: str, has_tls: bool, timeout_s: float) -> bool:
    """Not if it has frozen. To refuse is a sign of life."""
    return (_begins_tls if has_tls else _is_checked)(address, timeout_s)


def _is_checked(address: str, timeout_s: float) -> bool:
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    return True


def _begins_tls(address: str, timeout_s: float) -> bool:
    """By the first words of a handshake, and no more: we may have no certificate that it wants to see, and it logs each
    handshake that fails. It says nothing while its Python hangs: gRPC asks that first which certificate to show.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # it is not asked who it is
    ours = ssl.MemoryBIO()
    try:
        context.wrap_bio(ssl.MemoryBIO(), ours).do_handshake()
    except ssl.SSLWantReadError:
        hello = ours.read()
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout_s) as connection:
            connection.sendall(hello)
            connection.recv(1)
    except TimeoutError:
        return False
    except OSError:
        return True
    return True
