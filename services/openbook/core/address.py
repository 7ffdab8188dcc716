"""Where a server listens, as settings and options say it."""

import re

EXPECTED = "must be host:port with a port of 1..65535"
HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^\s:\[\]\ud800-\udfff]+):([0-9]{1,5})")


def address_of(host: str, port: int) -> str:
    """As it is written, also of an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_address(text: str) -> bool:
    """Whether it is as expected. gRPC takes larger ports modulo 65536: it would connect to somebody else."""
    match = HOST_AND_PORT.fullmatch(text)
    return match is not None and 0 < int(match[1]) < 1 << 16
