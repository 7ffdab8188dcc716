"""How both clients reach an endpoint: TLS, key, what is tried again, and errors as the server raised them."""

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from numbers import Real
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

import grpc

from openbook import wire
from openbook.client import messages
from openbook.core.address import EXPECTED, is_address
from openbook.errors import BodyTooLarge, InvalidConfig
from openbook.processes import is_here
from openbook.secret import bearer
from openbook.v1 import answer_pb2

GRACE_S = 1.0
"""How much longer than the server we wait, so that its own, better explained refusal comes first."""
MAX_TIMEOUT_S = 1e9
"""gRPC's clock overflows where a call is due in centuries: it would be late at once."""
TOO_LARGE = "message larger than max"
"""gRPC's own words. Its code for it is that of who is to come again."""
HINTS = {
    wire.OTHERS: "is that an endpoint's gRPC port (serving.grpc_port, 9000 by default), or one of another version, "
    "or does a proxy refuse?",
    re.compile("failed to connect to all.*refused"): "nobody listens there: does the endpoint run (openbook up)?",
    re.compile("failed to connect to all.*Socket closed"): "it may want TLS: tls or tls_ca, --tls or --tls-ca",
    re.compile("TSI_DATA_CORRUPTED"): "it may want a certificate of yours, of an authority that it trusts: tls_cert, "
    "--tls-cert",
}
"""What gRPC's own words may mean."""

KEEPALIVE = {"grpc.keepalive_time_ms": 330_000, "grpc.keepalive_timeout_ms": 20_000}
"""A connection that a firewall has forgotten is given up when nothing of what was sent on it arrives for 20 s: TCP by
itself sends it again for a quarter of an hour. gRPC does so (TCP_USER_TIMEOUT) only where there are pings, and its
servers take those that come more often than every 300 s for an attack.
"""

SERVICE = answer_pb2.DESCRIPTOR.services_by_name["AnswerService"].full_name
RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": SERVICE}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 3,
                # Nothing was computed, or nothing that anybody has: asking twice changes nothing.
                "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
            },
        }
    ],
    # The budget: a call that has to be tried again costs 1, one that succeeds brings .1; at half of it nothing is
    # tried again. So those who ask never make a fault many times what it is.
    "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
}
"""gRPC's own retries (its gRFC A6). The server says after which time, or that it makes no sense, in
`grpc-retry-pushback-ms`."""


class ConnectionOptions(TypedDict, total=False):
    """What may be said of a connection."""

    tls: bool  # the endpoint's certificate is signed by an authority that this machine trusts
    tls_ca: Path | str | None  # or by this one, a file in PEM
    tls_cert: Path | str | None  # our own certificate, for an endpoint that asks for one
    tls_key: Path | str | None  # of that certificate
    retries: bool  # whether what may be tried again is; by default it is


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the endpoint is, and how it is to be asked. With neither `tls` nor `tls_ca` it is plain.

    Raises:
        InvalidConfig: the address or the time is none, no header holds the key, or a file is missing.
    """

    address: str  # host:port
    timeout_s: float = 30.0
    api_key: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_ca: Path | str | None = None
    tls_cert: Path | str | None = None
    tls_key: Path | str | None = None
    retries: bool = True

    def __post_init__(self) -> None:
        if not (_is_number(self.timeout_s) and 0 < self.timeout_s <= MAX_TIMEOUT_S):  # also refuses NaN
            raise InvalidConfig(f"timeout_s must be above 0, at most {MAX_TIMEOUT_S:g}, got {self.timeout_s!r:.80}")
        if not isinstance(self.api_key, str | None):
            raise InvalidConfig(f"api_key must be text, got {type(self.api_key).__name__}")
        bearer(self.api_key)
        if not (isinstance(self.address, str) and is_address(self.address)):
            raise InvalidConfig(f"address {EXPECTED}, got {self.address!r:.300}")
        for name in ("tls_ca", "tls_cert", "tls_key"):
            if not isinstance(path := getattr(self, name), str | PathLike | None) or path == "":
                raise InvalidConfig(f"{name} must be the path of a file, or None, got {path!r:.80}")
        if self.retries not in (True, False):
            raise InvalidConfig(f"retries must be True or False, got {self.retries!r:.80}")
        if (self.tls_cert is None) != (self.tls_key is None) or (self.tls_cert and not (self.tls or self.tls_ca)):
            raise InvalidConfig("tls_cert and tls_key must be given together, and tls_ca or tls with them")

    def channel(self, library: ModuleType) -> Any:
        """A channel of `grpc`, or of `grpc.aio`. Raises InvalidConfig: a file cannot be read, or not be used."""
        target, options = self.address, self._options()
        host, _, port = self.address.rpartition(":")
        if host == "localhost" and _listens("127.0.0.1", int(port)):
            # gRPC asks ::1 too, and tells of whichever failed last: "Connection refused" in place of the reason.
            target = f"ipv4:127.0.0.1:{port}"
            options.append(("grpc.default_authority", self.address))  # whose name the certificate has
        if credentials := self._credentials():
            return library.secure_channel(target, credentials, options)
        return library.insecure_channel(target, options)

    def _options(self) -> list[tuple[str, Any]]:
        options: list[tuple[str, Any]] = [
            ("grpc.enable_retries", int(self.retries)),
            ("grpc.enable_http_proxy", int(not is_here(self.address))),
            ("grpc.max_receive_message_length", -1),  # batches of answers with their passages
            # Kept to be sent again, with its metadata: all that the endpoint takes. By itself gRPC keeps 256 KiB.
            ("grpc.per_rpc_retry_buffer_size", (4 << 20) + (64 << 10)),
            *KEEPALIVE.items(),
        ]
        return [*options, ("grpc.service_config", json.dumps(RETRIES))] if self.retries else options

    def _credentials(self) -> grpc.ChannelCredentials | None:
        if not (self.tls or self.tls_ca):
            return None
        from openbook import certificates  # with it come all settings, which a client in the clear does without

        pem = certificates.load("tls", self.tls_cert, self.tls_key, self.tls_ca)
        authorities = pem.authorities or certificates.trusted()
        return grpc.ssl_channel_credentials(authorities, pem.key or None, pem.certificate or None)

    def call(self) -> dict[str, Any]:
        """Arguments of every call."""
        shown = bearer(self.api_key)
        return {
            "timeout": self.timeout_s + GRACE_S,
            "metadata": (("authorization", shown),) if shown else (),
        }


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _listens(host: str, port: int) -> bool:
    """Whether anybody does, on loopback, where that is known at once."""
    try:
        socket.create_connection((host, port), 0.1).close()
    except OSError:
        return False
    return True


@contextmanager
def errors() -> Iterator[None]:
    """Errors of gRPC become those that the server raised."""
    try:
        yield
    except grpc.RpcError as error:
        metadata: Any = error.trailing_metadata()
        trailing = dict(metadata or ())
        details = error.details() or ""
        if wire.ERROR_HEADER not in trailing and TOO_LARGE in details:
            raise BodyTooLarge(f"the request is larger than the endpoint takes: {details}") from None
        if wire.ERROR_HEADER not in trailing:
            details = "; ".join([details, *(hint for words, hint in HINTS.items() if words.search(details))])
        retry_after_s = None
        with suppress(KeyError, ValueError):  # a proxy's may be a date
            retry_after_s = float(trailing["retry-after"])
        name = trailing.get(wire.ERROR_HEADER, "")
        raise messages.error(error.code().name, details, retry_after_s, name) from None
