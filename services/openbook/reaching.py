"""How commands reach an endpoint over gRPC: the options that they share, and the client that they ask with."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from openbook.client import Client

Tls = Annotated[bool, typer.Option("--tls", help="Its certificate is signed by whom this machine trusts ...")]
Ca = Annotated[Path | None, typer.Option(help="... or by this authority, PEM. Neither: plain.")]
Cert = Annotated[Path | None, typer.Option(help="Our own certificate, PEM, if it asks for one.")]
Key = Annotated[Path | None, typer.Option(help="Of our certificate, PEM.")]

TLS = ("tls", "tls_ca", "tls_cert", "tls_key")


def client(server: str, given: Mapping[str, Any], timeout_s: float = 30.0) -> "Client":
    """Asks there, with these options of the command. Raises as `Client`."""
    from openbook.client import Client

    # The key is no option: everybody on this machine would see it in the list of processes.
    return Client(server, timeout_s, os.environ.get("OPENBOOK_API_KEY"), **{name: given[name] for name in TLS})
