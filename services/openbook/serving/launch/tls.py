"""TLS of the endpoint, by HAProxy: on the lines that it listens by; certificates are replaced while it serves.

`openbook.serving.launch.haproxy` reads from the environment which files to take.
"""

import logging
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from openbook.certificates import Pem, Renewed
from openbook.config import ServerTls
from openbook.errors import InvalidConfig
from openbook.files import at_home

log = logging.getLogger(__name__)

VARIABLES = {
    "certificate": "OPENBOOK_TLS_CERTIFICATE",
    "key": "OPENBOOK_TLS_KEY",
    "client_ca": "OPENBOOK_TLS_CLIENT_CA",
}
"""Of each proxy's environment, by the setting."""

CERTIFICATE, CLIENT_CA = "tls.pem", "tls-client-ca.pem"
"""Links in HAProxy's folder; it looks for the key in the file of the same name and `.key`."""

PROTOCOLS = {"http_frontend": "h2,http/1.1", "grpc_frontend": "h2"}
"""By frontend: what is spoken after the handshake."""

POLL_S = 1.0
TIMEOUT_S = 5.0


def to_environment(tls: ServerTls) -> dict[str, str]:
    """What HAProxy's program is to be told."""
    paths = {variable: getattr(tls, name) for name, variable in VARIABLES.items()}
    return {variable: str(at_home(path).absolute()) for variable, path in paths.items() if path}


def of_environment(environment: Mapping[str, str]) -> ServerTls | None:
    """What it was told; None for no TLS.

    Raises:
        InvalidConfig: a certificate without a key, or the other way round.
    """
    given = {name: environment[variable] for name, variable in VARIABLES.items() if environment.get(variable)}
    if not given:
        return None
    if not {"certificate", "key"} <= given.keys():
        raise InvalidConfig(f"{VARIABLES['certificate']} and {VARIABLES['key']} must be given together")
    return ServerTls.model_validate(given)


def encrypted(config: str, folder: Path, tls: ServerTls) -> str:
    """HAProxy's configuration with TLS in front of both protocols.

    Args:
        config: as Serve writes it.
        folder: where the links of `link` stand.
        tls: the files.

    Raises:
        InvalidConfig: it is not known where to put it: nothing is served in the clear then.
    """
    options = f" ssl crt {folder / CERTIFICATE} ssl-min-ver TLSv1.2"
    if tls.client_ca:
        options += f" ca-file {folder / CLIENT_CA} verify required"
    for frontend, alpn in PROTOCOLS.items():
        config, n = re.subn(
            rf"^(frontend {frontend}\n(?:(?!frontend |backend ).*\n)*? *)(bind .*)\n",
            rf"\1\2{options} alpn {alpn}\n",
            config,
            flags=re.M,
        )
        if n != 1 and (n or f"frontend {frontend}\n" in config or frontend == "http_frontend"):
            raise InvalidConfig(f"serving.tls: no line of {frontend} to encrypt, of this version of Ray")
    return config


def link(folder: Path, tls: ServerTls) -> None:
    """Put links to the files where the configuration of `encrypted` looks for them."""
    files = {CERTIFICATE: tls.certificate, f"{CERTIFICATE}.key": tls.key, CLIENT_CA: tls.client_ca}
    for name, path in files.items():
        (folder / name).unlink(missing_ok=True)
        if path:
            (folder / name).symlink_to(path.absolute())


def follow(tls: ServerTls, folder: Path, commands: Path, process: int) -> None:
    """Give HAProxy the files anew whenever they change, for as long as our parent is this process.

    Args:
        tls: the files.
        folder: of the links.
        commands: HAProxy's socket for commands.
        process: HAProxy's id.
    """
    files, is_told = Renewed("serving.tls", tls, _payloads), True
    while os.getppid() == process:
        time.sleep(POLL_S)
        if files.changed() or not is_told:
            is_told = False
            try:
                for kind, name, pem in files.current:
                    said = tell(commands, f"set ssl {kind} {folder / name} <<\n{pem}\n\n")
                    said += tell(commands, f"commit ssl {kind} {folder / name}\n")
                    log.warning("%s", said.strip())
                is_told = True
            except OSError as error:
                log.warning("HAProxy was not told of the renewed certificate: %s", error)


def _payloads(pem: Pem) -> list[tuple[str, str, str]]:
    """What HAProxy calls each kind of file, its link, and its content."""
    given = {
        ("cert", CERTIFICATE): pem.certificate + b"\n" + pem.key,
        ("ca-file", CLIENT_CA): pem.authorities,
    }
    # An empty line would end it.
    lines = {name: text.decode(errors="replace").splitlines() for name, text in given.items() if text}
    return [(*name, "\n".join(filter(str.strip, each))) for name, each in lines.items()]


def tell(commands: Path, command: str) -> str:
    """What HAProxy says to a command. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(str(commands))
        connection.sendall(command.encode())
        parts = []
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts).decode(errors="replace")
