"""What keeps an endpoint of this machine from starting, told before anything is started."""

import socket

from openbook import certificates
from openbook.config import ServingSettings
from openbook.errors import InvalidConfig, PortInUse


def check(serving: ServingSettings) -> None:
    """Whether an endpoint can be started by these settings, as far as it is seen at once.

    Raises:
        PortInUse: another process listens on `http_port` or `grpc_port`.
        InvalidConfig: the files of `tls` cannot be used, or `host` is an address of IPv6.
    """
    if serving.tls:
        certificates.read("serving.tls", serving.tls)
    if ":" in serving.host:
        raise InvalidConfig(f"serving.host must be a name or an IPv4 address, got {serving.host}")
    for name in ("http_port", "grpc_port"):
        _check_free(serving.host, getattr(serving, name), name)


def check_metrics(serving: ServingSettings, n_servers: int) -> None:
    """Whether so many index servers, whose metrics listen on 127.0.0.1 before the endpoint does, leave it its ports.

    Raises:
        InvalidConfig: they take `http_port` or `grpc_port`.
    """
    if first := serving.metrics_port:
        last = first + n_servers - 1
        # Serve's own proxy listens for gRPC everywhere, whatever the host.
        hosts = {"http_port": serving.host, "grpc_port": "0.0.0.0" if serving.proxy == "python" else serving.host}
        for name, host in hosts.items():
            is_taken = first <= (port := getattr(serving, name)) <= last
            if is_taken and socket.gethostbyname(host) in ("127.0.0.1", "0.0.0.0"):
                taken = f"the index servers' metrics take serving.metrics_port = {first} on, {first}..{last}"
                raise InvalidConfig(f"serving.{name} = {port}: {taken}")


def _check_free(host: str, port: int, name: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortInUse(f"serving.{name} = {port} on {host}: {error.strerror}") from None
