"""Files of TLS: whether they can be used, and what is made of them, anew when they are replaced while we serve."""

import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from openbook.config import ClientTls, ServerTls
from openbook.errors import InvalidConfig
from openbook.files import at_home

log = logging.getLogger(__name__)

T = TypeVar("T")


class Pem(NamedTuple):
    """What the files hold; nothing where there is no file."""

    certificate: bytes
    key: bytes
    authorities: bytes
    """Whose certificates are accepted of the other side."""


class Renewed(Generic[T]):
    """What is made of the files, which somebody may replace at any moment, one after the other.

    Files that cannot be used, because one is half written or they do not belong together, leave it as it was; the log
    says so once. By one caller at a time.

    Args:
        section: of the settings, for messages.
        tls: the files.
        make: what is made of their content.

    Raises:
        InvalidConfig: they cannot be used at first.
    """

    def __init__(self, section: str, tls: ServerTls | ClientTls, make: Callable[[Pem], T]) -> None:
        self._section, self._tls, self._make = section, tls, make
        self._state = _state(tls)
        self.current = make(read(section, tls))

    def changed(self) -> bool:
        """Whether `current` has been made anew: the files have changed, and can be used."""
        state = _state(self._tls)
        if state == self._state:
            return False
        self._state = state
        try:
            pem = read(self._section, self._tls)
        except InvalidConfig as error:
            log.warning("%s; the former certificate goes on", error)
            return False
        if _state(self._tls) != state:  # what was read is perhaps not what was checked: look again the next time
            self._state = []
            return False
        self.current = self._make(pem)
        log.info("%s: certificates were renewed", self._section)
        return True

    def now(self) -> T:
        """What is to be used now."""
        self.changed()
        return self.current


def read(section: str, tls: ServerTls | ClientTls) -> Pem:
    """What the files hold. Raises as `load`."""
    return load(section, *_paths(tls))


def load(
    section: str,
    certificate: Path | str | None = None,
    key: Path | str | None = None,
    authorities: Path | str | None = None,
) -> Pem:
    """What the files hold.

    Raises:
        InvalidConfig: one cannot be read or is not whole, or a key and its certificate do not belong together.
    """
    certificate, key, authorities = paths = [_at_home(path) for path in (certificate, key, authorities)]
    try:
        pem = Pem(*(path.read_bytes() if path else b"" for path in paths))
    except OSError as error:
        raise InvalidConfig(f"{section}: {error.filename}: cannot be read: {error.strerror}") from None
    used = f"{authorities}"
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if authorities:
            context.load_verify_locations(authorities)
        if certificate:
            used = f"{certificate} with {key}"
            context.load_cert_chain(certificate, key, password="")  # never asks for one
    except OSError as error:  # as those of ssl are
        raise InvalidConfig(f"{section}: its files cannot be used: {used}: {error}") from None
    return pem


def trusted() -> bytes | None:
    """Whom this machine trusts, as OpenSSL finds them, for gRPC: by itself it knows but the list it was built with.

    None, for that list: there are none here, or gRPC's own variable names others.
    """
    if "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH" in os.environ:
        return None
    found = ssl.get_default_verify_paths()
    file = [Path(found.cafile)] if found.cafile else []
    by_hash = sorted(Path(found.capath).glob("[0-9a-f]" * 8 + ".[0-9]")) if found.capath else []
    # OpenSSL too passes over links that lead nowhere.
    return b"\n".join(path.read_bytes() for path in (*file, *by_hash) if os.access(path, os.R_OK)) or None


def of_who_connects(authorities: Path | None = None, content: str | None = None) -> ssl.SSLContext:
    """Trusts those of the file, or this content of one, and with neither whom this machine trusts. Raises OSError."""
    context = ssl.create_default_context(cafile=_at_home(authorities), cadata=content)
    # Both as gRPC does. By default Python is strict since 3.13, and before needs the authority of an authority too.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _paths(tls: ServerTls | ClientTls) -> tuple[Path | None, Path | None, Path | None]:
    authorities = tls.client_ca if isinstance(tls, ServerTls) else tls.ca
    return _at_home(tls.certificate), _at_home(tls.key), _at_home(authorities)


def _at_home(path: Path | str | None) -> Path | None:
    return None if path is None else at_home(path)


def _state(tls: ServerTls | ClientTls) -> list[tuple[int, ...] | None]:
    """What changes when a file does, or who may read it."""
    states: list[tuple[int, ...] | None] = []
    for path in filter(None, _paths(tls)):
        try:
            found = path.stat()
        except OSError:
            states.append(None)
        else:
            states.append((found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino))
    return states
