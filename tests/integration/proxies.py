"""HAProxy as the endpoint starts it, in front of what a test has."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from openbook.processes import end, free_port, start

PATIENCE_S = 30.0
CONFIG, LOG = "haproxy.cfg", "log"
HEAD = """global
    stats socket {folder}/admin.sock mode 666 level admin expose-fd listeners
defaults
    mode http
    timeout connect 5s
    timeout client 30s
    timeout server 30s
frontend prometheus
    bind :{figures}
listen stats
  bind *:{stats}
"""


@contextmanager
def haproxy(
    folder: Path, sections: str, ports: tuple[int, ...], environment: Mapping[str, str] | None = None
) -> Iterator[Path]:
    """HAProxy with these frontends and backends, once it listens on all the ports. Gives its log."""
    configure(folder, sections)
    with started(folder, lambda: all(map(listens, ports)), environment):
        yield folder / LOG


def configure(folder: Path, sections: str) -> None:
    """Write a configuration as Serve's, with these frontends and backends, into the folder."""
    (folder / CONFIG).write_text(HEAD.format(folder=folder, figures=free_port(), stats=free_port()) + sections)


@contextmanager
def started(
    folder: Path,
    is_ready: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> "Iterator[subprocess.Popen[bytes]]":
    """HAProxy with the configuration that stands in the folder, once it is ready."""
    command = [sys.executable, "-m", "openbook.serving.launch.haproxy", "-db", "-f", str(folder / CONFIG), *arguments]
    with (folder / LOG).open("w") as output:
        process = start(command, env={**os.environ, **(environment or {})}, stdout=output, stderr=output)
    try:
        until(lambda: process.poll() is not None or is_ready())
        assert process.poll() is None, (folder / LOG).read_text()
        yield process
    finally:
        end(process)


def listens(port: int) -> bool:
    """Whether anybody listens there, on loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(condition: Callable[[], bool]) -> None:
    """Wait for it."""
    give_up = monotonic() + PATIENCE_S
    while not condition():
        assert monotonic() < give_up
        sleep(0.02)
