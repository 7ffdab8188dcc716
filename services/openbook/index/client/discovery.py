"""Who the index servers are, where that changes: lists that are read again and again, and what follows from them."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from openbook.config import IndexClientSettings
from openbook.core.address import EXPECTED, address_of, is_address
from openbook.errors import InvalidConfig
from openbook.telemetry import INDEX_LIST_ERRORS

log = logging.getLogger(__name__)

FILE_EVERY_S = 0.5
DNS_EVERY_S = 2.0
N_FORMER = 256


class Unreadable(Exception):
    """A list cannot be read, or says what makes no sense."""


class Source(Protocol):
    """A list of addresses, as it is now."""

    @property
    def name(self) -> str:
        """As the settings call it."""

    @property
    def server_name(self) -> str | None:
        """Whose certificate its servers show; None: that of their address."""

    @property
    def every_s(self) -> float:
        """Between two readings."""

    async def addresses(self) -> list[str]:
        """host:port of every server. Raises Unreadable."""


class Change(NamedTuple):
    """Between two states of a list."""

    joined: tuple[str, ...]
    left: tuple[str, ...]


@dataclass(slots=True)
class Listed:
    """The servers that are listed by now. No I/O.

    An empty list, or none, says that the list is broken rather than that all servers are gone: the last one holds.
    """

    addresses: tuple[str, ...]
    problem: str = ""
    """What was wrong with the last reading."""
    former: deque[str] = field(default_factory=lambda: deque(maxlen=N_FORMER))
    """Those that left last."""

    def heard(self, found: Sequence[str]) -> Change:
        """The list was read."""
        if not found:
            return self.failed("it names no server")
        new, self.problem = tuple(dict.fromkeys(found)), ""
        old, self.addresses = self.addresses, new
        left = tuple(address for address in old if address not in new)
        self.former.extend(left)
        return Change(tuple(address for address in new if address not in old), left)

    def failed(self, problem: str) -> Change:
        """It could not be: nothing changes."""
        self.problem = problem
        return Change((), ())


class Followed:
    """A source, read again and again; `on_change` hears of those who joined and left. Of one event loop."""

    def __init__(self, source: Source, listed: Listed, on_change: Callable[[Change], None]) -> None:
        self._source = source
        self._listed = listed
        self._on_change = on_change
        self._again: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Read it, and go on reading it in the background; nothing if that is done already."""
        if self._again is None:
            self._read(await _addresses(self._source))
            self._again = asyncio.create_task(self._go_on())

    async def close(self) -> None:
        """Read it no more."""
        if self._again is not None:
            again, self._again = self._again, None
            again.cancel()
            await asyncio.gather(again, return_exceptions=True)

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(self._source.every_s)
            self._read(await _addresses(self._source))

    def _read(self, found: list[str] | Unreadable) -> None:
        before = self._listed.problem
        change = self._listed.failed(str(found)) if isinstance(found, Unreadable) else self._listed.heard(found)
        if problem := self._listed.problem:
            INDEX_LIST_ERRORS.inc()
            if problem != before:
                known = ", ".join(self._listed.addresses) or "none"
                log.warning("index servers of %s: %s; those known go on: %s", self._source.name, problem, known)
        elif before:
            log.warning("index servers of %s: the list is whole again", self._source.name)
        if change.joined or change.left:
            joined, left = (", ".join(each) or "none" for each in change)
            log.info("index servers of %s: joined: %s; left: %s", self._source.name, joined, left)
            self._on_change(change)


async def _addresses(source: Source) -> list[str] | Unreadable:
    try:
        return await source.addresses()
    except Unreadable as error:
        return error
    except Exception as error:  # whatever it is, the list may be read next time: nobody would begin to follow it again
        return Unreadable(f"{type(error).__name__}: {error}")


class FileSource:
    """A file with an address a line; what follows a # is a comment."""

    every_s = FILE_EVERY_S
    server_name = None

    def __init__(self, path: Path) -> None:
        self.name = f"file:{path}"
        self._path = path

    async def addresses(self) -> list[str]:
        """Bare."""
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[str]:
        try:
            return parse_lines(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise Unreadable(f"cannot be read: {error}") from None


class DnsSource:
    """Every address of a name, such as that of a headless service, with each of the ports."""

    every_s = DNS_EVERY_S

    def __init__(self, host: str, ports: Sequence[int]) -> None:
        self.name = f"dns://{host}:{ports[0]}" + (f"-{ports[-1]}" if len(ports) > 1 else "")
        self.server_name: str | None = host
        self._ports = ports

    async def addresses(self) -> list[str]:
        """Bare."""
        loop = asyncio.get_running_loop()
        try:  # as all else here resolves names: /etc/hosts, search domains
            found = await loop.getaddrinfo(self.server_name, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unreadable(f"cannot be resolved: {error}") from None
        return combined({str(address[0]) for *_, address in found}, self._ports)


def parse_lines(text: str) -> list[str]:
    """The addresses in a file. Raises Unreadable: a line is none; the file may be half written, so none of it holds."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if address := line.partition("#")[0].strip():
            if not is_address(address):
                raise Unreadable(f"line {number} {EXPECTED}, got {address!r}")
            found.append(address)
    return found


def combined(hosts: set[str], ports: Sequence[int]) -> list[str]:
    """host:port of each host with each port, in order."""
    return [address_of(host, port) for host in sorted(hosts) for port in ports]


def parse_ports(where: str) -> tuple[str, range]:
    """The name and the ports of `name:7000` or `name:7000-7003`. Raises InvalidConfig."""
    name, _, ports = where.rpartition(":")
    first, _, last = ports.partition("-")
    if not name or not first.isdecimal() or not (last or first).isdecimal():
        raise InvalidConfig(
            f"index.discover: {where!r} must be a name and ports, such as index:7000 or index:7000-7003"
        )
    found = range(int(first), int(last or first) + 1)
    if not found or not 0 < found[0] <= found[-1] < 1 << 16:
        raise InvalidConfig(f"index.discover: ports must be 1..65535, the first one first, got {ports}")
    return name, found


def source_of(settings: IndexClientSettings) -> Source | None:
    """The list that the settings name, or none for addresses that do not change.

    Raises:
        InvalidConfig: it is one of Ray's, which only an endpoint can read, or makes no sense.
    """
    if settings.discover is None:
        return None
    kind, _, where = settings.discover.partition(":")
    if kind == "file":
        return FileSource(Path(where))
    if kind == "dns":
        return DnsSource(*parse_ports(where.removeprefix("//")))
    raise InvalidConfig(f"index.discover = {settings.discover!r} is for an endpoint on Ray: name the servers here")


async def addresses_now(settings: IndexClientSettings) -> tuple[tuple[str, ...], str | None]:
    """host:port of every server that the settings name, read once, and whose certificate they show, if one for all.

    Raises:
        InvalidConfig: none is named, or the list cannot be read.
    """
    source = source_of(settings)
    if source is None:
        if not settings.addresses:
            raise InvalidConfig("index.addresses or index.discover must name at least one server, got none")
        return tuple(dict.fromkeys(settings.addresses)), settings.server_name
    found = await _addresses(source)
    if isinstance(found, Unreadable) or not found:
        raise InvalidConfig(f"index.discover = {source.name!r}: {found or 'it names no server'}")
    return tuple(dict.fromkeys(found)), settings.server_name or source.server_name
