"""Ray for this process: one of our own on this machine, or a cluster that stands."""

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from openbook.errors import StartupError

log = logging.getLogger(__name__)

FLAGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's own ports on loopback: whoever reaches one runs what he likes.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Of a Ray of our own: what it reads from the environment, and hands on to its processes."""

ON_ALL_INTERFACES = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
"""For one that must be reached by another address than loopback."""

N_STARTS = 5
"""A node of Ray's dies when its agents are not up within 15 s, which no setting changes, and Ray says so after 30: too
early on a machine with much to do. Seen also in a process that served gRPC itself: the node's process left no log at
all. Ray forks to start it, so gRPC's fork handlers are suspected; that was not proven."""

OBJECT_STORE_BYTES = 80_000_000
"""What passes through it is small: settings, questions, answers."""

MAX_PLACE = 16


def place() -> Path:
    """Where temporary files are; /tmp where that is too deep for sockets, whose paths may have some hundred characters:
    Ray, and Serve for HAProxy, need most of that for names of their own.
    """
    there = tempfile.gettempdir()
    return Path(there if len(there) <= MAX_PLACE else "/tmp")


@contextmanager
def started(num_cpus: float, flags: Mapping[str, str], log_to_driver: bool = True) -> Iterator[None]:
    """A Ray of our own. Joins no other, and leaves nothing behind but its logs, where an error ended the body. `flags`
    are in the environment like `FLAGS`.

    Ray's libraries read theirs when they are imported: do so in the body, and only one set of them in a process counts.

    Raises:
        StartupError: Ray does not start.
    """
    colours = {} if sys.stderr.isatty() else {"RAY_COLOR_PREFIX": "0"}
    with _environment({**FLAGS, **colours, "RAY_TMPDIR": os.environ.get("RAY_TMPDIR") or str(place()), **flags}):
        import ray

        former = _sessions()
        with ExitStack() as left:
            left.callback(lambda: _remove(_sessions() - former))
            try:
                _start(num_cpus, log_to_driver)
                yield
            except Exception:
                left.pop_all()
                raise
            finally:
                ray.shutdown()


@contextmanager
def joined(address: str) -> Iterator[None]:
    """The cluster at an address.

    Raises:
        StartupError: it cannot be joined.
    """
    import ray

    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    except Exception as error:  # Ray raises no class of its own
        raise StartupError(f"Ray at {address} cannot be joined: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _start(num_cpus: float, log_to_driver: bool) -> None:
    import ray

    for attempt in range(N_STARTS):
        try:
            with _our_signals(), _own_groups(), _without_what_nobody_asks():
                # Without address="local" it would join whatever Ray it finds.
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    logging_level=logging.WARNING,
                    log_to_driver=log_to_driver,
                )
            return
        except Exception as error:  # Ray raises no class of its own
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt + 1 == N_STARTS:
                raise StartupError(f"Ray does not start: {error}") from None
            log.warning("Ray did not start in time; trying again")


def _sessions() -> set[Path]:
    """Folders of Rays that were started here: the process stands in their names. Ray itself does not tell until it has
    started.
    """
    from ray._common.utils import get_default_ray_temp_dir

    return set(Path(get_default_ray_temp_dir()).glob(f"session_*_{os.getpid()}"))


def _remove(sessions: set[Path]) -> None:
    """Folders of Rays that have ended. The link to the latest leads to the one before, if there is one: Ray never
    renews one that leads nowhere.
    """
    for session in sessions:
        shutil.rmtree(session, ignore_errors=True)  # a process of it may write its last words
        latest = session.with_name("session_latest")
        if latest.is_symlink() and not latest.exists():
            latest.unlink(missing_ok=True)
            for other in sorted(session.parent.glob("session_[0-9]*"))[-1:]:
                with suppress(FileExistsError):  # another Ray has just started
                    latest.symlink_to(other)


@contextmanager
def _our_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself, and leaves the process with code 15. So it may where it would end us anyhow; what
    we do about it ourselves we go on doing, also when it comes while Ray starts.
    """
    handler = signal.getsignal(signal.SIGTERM)
    is_ours = handler not in (signal.SIG_DFL, None) and threading.current_thread() is threading.main_thread()
    try:
        try:
            yield
        finally:
            if is_ours and signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:  # as it is once we stop
                signal.signal(signal.SIGTERM, handler)
    except SystemExit:
        if is_ours:
            signal.raise_signal(signal.SIGTERM)
        raise


@contextmanager
def _own_groups() -> Iterator[None]:
    """Ray's processes would be of our group, to which go the signals of a terminal that closes, of a shell's `kill %1`,
    of `timeout`: they would end at once, and answers under way be cut off. Each has its own, as its workers do. It ends
    with us all the same.
    """
    from ray._private import services

    former = services.ConsolePopen
    services.ConsolePopen = partial(former, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = former


@contextmanager
def _without_what_nobody_asks() -> Iterator[None]:
    """Ray would start its autoscaler and, even without a dashboard, that one's server: two processes of 100 MB each for
    which one machine has no use.
    """
    from ray._private.node import Node

    former = Node.start_monitor, Node.start_api_server
    Node.start_monitor = Node.start_api_server = lambda *_, **__: None
    try:
        yield
    finally:
        Node.start_monitor, Node.start_api_server = former


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    former = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in former.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
