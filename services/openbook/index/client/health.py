"""Whether one index server can be asked, by gRPC's own health protocol."""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from openbook.config import IndexClientSettings
from openbook.errors import ShardUnavailable
from openbook.index.client.client import channel_credentials

TIMEOUT_S = 5.0


def check(settings: IndexClientSettings, address: str) -> None:
    """Ask it, under the TLS of the settings.

    Raises:
        ShardUnavailable: it does not serve, or does not answer in time.
        InvalidConfig: a file for TLS cannot be read.
    """
    credentials = channel_credentials(settings.tls)()
    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
    if settings.server_name:
        options.append(("grpc.ssl_target_name_override", settings.server_name))
    opened = (
        grpc.secure_channel(address, credentials, options) if credentials else grpc.insecure_channel(address, options)
    )
    with opened as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise ShardUnavailable(f"{address}: {error.code().name}: {error.details()}") from None
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise ShardUnavailable(f"{address}: does not serve")
