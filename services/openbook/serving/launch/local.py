"""The whole system on one machine: index servers, Redis and Ray Serve, started in order and stopped in reverse."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, NoReturn

import yaml

from openbook import config, files
from openbook.cache.redis import warn_if_useless
from openbook.cache.server import RedisServer, find_server
from openbook.config import Settings
from openbook.errors import InvalidConfig, OpenbookError, StartupError
from openbook.index.disk.root import served_by
from openbook.index.disk.snapshot import Snapshot
from openbook.processes import STOP_SIGNALS, end, free_port, of_module, on_stop_signals, start
from openbook.secret import RedisUrl
from openbook.serving.access.exposure import check_host
from openbook.serving.access.gate import open_gate
from openbook.serving.launch import checks, probe
from openbook.serving.launch.supervise import Supervised

log = logging.getLogger(__name__)

FIXED = ("host", "http_port", "grpc_port", "proxy", "tls")
"""Of the endpoint: proxies are started with them, once."""
POLL_S = 1.0
UPDATE_TIMEOUT_S = 1800.0
"""To fetch and load models, beside what replicas may wait for their index. No room for a replica looks the same."""


class IndexProcess:
    """One index server in a process of its own, on a port that stays the same: of loopback, and a free one, unless it
    is said otherwise. What is not said here, the settings file and the environment may say. Fits `supervise.Service`.

    Raises:
        InvalidConfig: these say what cannot be.
    """

    def __init__(
        self,
        snapshot: Path,
        shard: int,
        metrics_port: int | None = None,
        settings_file: Path | None = None,
        host: str = "127.0.0.1",
        port: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.shard = shard
        self._env = env
        self._has_tls = config.load_index_server(settings_file, env, snapshot=snapshot).tls is not None
        # Not one of those that the system hands out: while the server is down, it might become somebody's.
        port = port or free_port()
        self._command = [*of_module("openbook.cli"), "index", "serve", str(snapshot)]
        self._command += ["--shard", str(shard), "--host", host, "--port", str(port)]
        if metrics_port is not None:
            self._command += ["--metrics-port", str(metrics_port)]
        if settings_file is not None:
            self._command += ["--config", str(settings_file)]
        self._address = ""
        self._start()

    def again(self) -> None:
        """Bare."""
        end(self.process)  # which closes its pipes
        self._start()

    def _start(self) -> None:
        self._said: deque[str] = deque(maxlen=1)
        self.process = start(self._command, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        errors, self.process.stderr = self.process.stderr, None
        self._listener = threading.Thread(target=_pass_on, args=(errors, self._said), daemon=True)
        self._listener.start()

    def address(self) -> str:
        """Where it listens, once it has read every byte of its shard.

        Raises:
            StartupError: it ended before; carries the last that it said.
        """
        assert self.process.stdout is not None
        # It prints its address once it listens, and nothing if it never does.
        self._address = str(self.process.stdout.readline()).strip()
        if not self._address:
            code = self.process.wait()
            self._listener.join()
            raise StartupError(f"the index server of shard {self.shard} ended with code {code}: {''.join(self._said)}")
        return self._address

    def answers(self, timeout_s: float) -> bool:
        """Bare."""
        return probe.answers(self._address, self._has_tls, timeout_s)

    def stop(self) -> None:
        """Let it finish what it serves, then end it."""
        end(self.process)


def _pass_on(errors: IO[str], said: "deque[str]") -> None:
    """To our standard error, and remember what was said last."""
    with errors:
        for line in errors:
            with suppress(OSError):  # its disk is full, or nobody reads it: perhaps for a while
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, line.encode())
            said.append(line.strip())


@contextmanager
def _own_section(settings_file: Path, has_tls: bool) -> Iterator[Path]:
    """A file with what the settings say of index servers, for ours: each has a port for frames of its own, and TLS only
    where we speak it too.
    """
    section = {**((config.read_yaml(settings_file) or {}).get(config.INDEX_SERVER) or {})}
    if section.get("frame_port") is not None:
        section["frame_port"] = 0
    if not has_tls:
        section.pop("tls", None)
    with files.temporary_folder("openbook-index-") as folder:
        files.write(folder / "openbook.yaml", yaml.safe_dump({config.INDEX_SERVER: section}))
        yield folder / "openbook.yaml"


def _own_environment(has_tls: bool) -> dict[str, str]:
    """As `_own_section`: the environment wins over it."""
    env = {**os.environ}
    for name in os.environ:
        key = name.lower()  # as `config` reads it
        if key == f"openbook_{config.INDEX_SERVER}__frame_port" and yaml.safe_load(env[name]) is not None:
            env[name] = "0"
        elif key == f"openbook_{config.INDEX_SERVER}__tls" and not has_tls:
            del env[name]
    return env


@contextmanager
def local_tiers(snapshot: Path | None, settings: Settings, settings_file: Path | None = None) -> Iterator[Settings]:
    """Index servers of a snapshot or a root, and Redis, as far as the settings name none; yields settings with them.
    `settings_file`: whose section `index_server` is for these servers, as it is now.

    What is published to the servers of a root, the next ones serve. What ends or freezes is started again: `supervise`.

    Raises:
        InvalidSnapshot: the folder is neither a snapshot nor a root, or its files were altered.
        InvalidConfig: neither a snapshot nor index servers, no redis-server to start, or as `checks.check_metrics`.
        StartupError: a process does not start.
    """
    index, cache = settings.index, settings.cache
    with ExitStack() as stack:
        if not index.names_servers:
            if snapshot is None:
                raise InvalidConfig("name a snapshot to serve, or set index.addresses to servers that run")
            has_tls = index.tls is not None
            own = stack.enter_context(_own_section(settings_file, has_tls)) if settings_file else None
            env = _own_environment(has_tls)
            servers: list[Supervised] = []
            shards = range(len(Snapshot.open(served_by(snapshot)).manifest.shards))
            checks.check_metrics(settings.serving, len(shards))
            for shard in shards:
                begin = partial(IndexProcess, snapshot, shard, settings.serving.metrics_port, own, env=env)
                servers.append(Supervised(f"the index server of shard {shard}", begin))
                stack.callback(servers[-1].stop)
            index = index.at(tuple(server.address() for server in servers))
        if cache.url is None:
            redis = Supervised("Redis", RedisServer)
            stack.callback(redis.stop)
            log.info("cache: %s serves %s", find_server(), redis.address())
            cache = cache.model_copy(update={"url": RedisUrl(redis.address())})
        else:
            warn_if_useless(cache)
        yield settings.model_copy(update={"index": index, "cache": cache})


@contextmanager
def local_system(
    snapshot: Path | None, settings: Settings, settings_file: Path | None = None, shows_logs: bool = True
) -> Iterator[Settings]:
    """All of it, ready to be asked; yields settings that name every address. `settings_file` as for `local_tiers`,
    `shows_logs` as for `run.local_serve`.

    Raises:
        InvalidConfig: others would reach it, and nothing is said about who may ask; or as `open_gate` and
            `checks.check`.
        StartupError: as `checks.check`, `local_tiers` and `openbook.serving.launch.run.running`.
    """
    from openbook.serving.launch.run import running

    _check_access(settings)
    checks.check(settings.serving)  # and once more before Ray starts, which is seconds later
    with local_tiers(snapshot, settings, settings_file) as complete, running(complete, shows_logs):
        yield complete


def _check_access(settings: Settings) -> None:
    """Raises InvalidConfig what each replica would, once all else has started; asks neither Redis nor a provider."""
    check_host(settings)
    open_gate(settings)


FileState = tuple[int, int, int] | None  # none while there is none


def follow(path: Path, settings: Settings, seen: FileState, look: Callable[[], object] = lambda: None) -> NoReturn:
    """Whenever the settings file changes from what was `seen` of it, run the system by what it says now, without a
    pause. What cannot be done is logged and left: the system, which was started with `settings`, goes on as it was.
    As often it does `look`.
    """
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    running, problems = settings, (OpenbookError, RayError, RayServeException)
    while True:
        time.sleep(POLL_S)
        look()
        if state_of(path) == seen:
            continue
        seen = state_of(path)
        try:
            changed = updated(settings, config.load(path))
            if changed == running:
                continue
            log.info("%s has changed: updating", path)
            try:
                _update(changed, partial(_says_still, path, settings, changed))
            except problems as error:
                log.warning("%s: not in force: %s", path, error)
                _update(running)  # Serve would go on trying
                continue
            running = changed
            log.info("%s: in force", path)
        except problems as error:
            log.warning("%s: not in force: %s", path, error)


def _update(settings: Settings, is_wanted: Callable[[], bool] = lambda: True) -> None:
    from openbook.serving.launch.run import update

    update(settings, UPDATE_TIMEOUT_S + settings.index.wait_s, is_wanted)


def _says_still(path: Path, settings: Settings, wanted: Settings) -> bool:
    """Whether the file asks for these settings, of a system that was started with others, as far as it can be read."""
    try:
        return updated(settings, config.load(path)) == wanted
    except OpenbookError:
        return True


def updated(settings: Settings, wanted: Settings) -> Settings:
    """What a system that was started with these settings can become of those wanted: where they name no index servers
    or no Redis, with those that it has had since.

    Raises:
        InvalidConfig: a setting differs that needs another start; or as `local_system`.
    """
    _check_access(wanted)
    for name in FIXED:
        now, then = getattr(settings.serving, name), getattr(wanted.serving, name)
        if now != then:
            raise InvalidConfig(f"serving.{name} cannot change from {now} to {then} while the system runs")
    return wanted.model_copy(
        update={
            "index": wanted.index if wanted.index.names_servers else wanted.index.at(settings.index.addresses),
            "cache": wanted.cache.model_copy(update={"url": wanted.cache.url or settings.cache.url}),
        }
    )


def state_of(path: Path) -> FileState:
    """What changes when a file does."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


@contextmanager
def until_stopped() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the body early and quietly. They cannot cut short the clean stop that follows."""

    def stop(told: signal.Signals, _: object) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        log.info("%s: stopping", told.name)
        raise KeyboardInterrupt

    with on_stop_signals(stop), suppress(KeyboardInterrupt):
        yield
