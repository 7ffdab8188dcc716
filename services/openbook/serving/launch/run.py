"""Ray and Serve on this machine, for `openbook up`, the demo and the tests: started, awaited, stopped."""

import logging
import os
import re
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPException
from math import ceil, inf
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from openbook import errors, local_ray
from openbook.config import ServingSettings, Settings
from openbook.errors import StartupError
from openbook.files import temporary_folder
from openbook.processes import free_port, free_ports, is_loopback, of_module
from openbook.serving.launch import checks, tls
from openbook.serving.launch.environment import LONGEST_S, guards, haproxy_files, longest_s
from openbook.serving.launch.fitting import fitted
from openbook.serving.launch.haproxy import PARENT, socket_of
from openbook.serving.launch.ports import SERVE_LOGGING
from openbook.serving.launch.stop import stop_serve

log = logging.getLogger(__name__)

APPLICATION = "openbook"
POLL_S = 0.5
READY_TIMEOUT_S = 60.0
N_REPLICA_PORTS = 128
SPARE_CPUS = 64
"""Ray only counts them. In an update new replicas stand beside the old ones, and there may be more of them."""
EVERYWHERE = ("0.0.0.0", "::")


@contextmanager
def local_serve(
    serving: ServingSettings, num_cpus: float, shows_logs: bool = True, stops_within_s: int = LONGEST_S
) -> Iterator[None]:
    """A Ray of our own with Serve in it and nothing deployed yet. One process can run one kind of proxy only.

    With `shows_logs`, what is logged in its processes stands on standard error here. What was asked before it stops has
    `stops_within_s` to be answered.

    Raises:
        PortInUse: another process listens on `http_port` or `grpc_port`; nothing was started.
        InvalidConfig: the files of `tls` cannot be used, or `host` is an address of IPv6.
        StartupError: Ray does not start, or no program may run where temporary files are.
    """
    checks.check(serving)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder("openbook-ray-", local_ray.place()))
        programs = stack.enter_context(temporary_folder("openbook-ray-"))
        flags = serve_flags(serving, folder, stops_within_s, programs)
        stack.enter_context(local_ray.started(num_cpus, flags, shows_logs))

        from ray import serve
        from ray.serve.config import HTTPOptions, gRPCOptions
        from ray.serve.schema import LoggingConfig

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        stack.callback(stop_serve, APPLICATION, stops_within_s)
        serve.start(
            proxy_location="HeadOnly",
            http_options=HTTPOptions(host=serving.host, port=serving.http_port),
            grpc_options=gRPCOptions(
                port=serving.grpc_port, grpc_servicer_functions=["openbook.serving.endpoint.ingress.add_services"]
            ),
            logging_config=LoggingConfig(**SERVE_LOGGING),
        )
        yield


def deploy(
    application: Any, serving: ServingSettings, timeout_s: float = inf, is_wanted: Callable[[], bool] = lambda: True
) -> None:
    """Deploy, and wait until the endpoint answers; for replicas to start no longer than `timeout_s`, nor than it
    `is_wanted`.

    Raises:
        StartupError: the one that kept a replica from starting, or that nothing answered in time; Serve goes on trying.
    """
    from ray import serve

    target = serve.RunTarget(application, name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    _await_running(timeout_s, is_wanted)
    _await_ready(serving)


def _await_running(timeout_s: float, is_wanted: Callable[[], bool]) -> None:
    """As Serve does, which waits for ever where there is no room for a replica."""
    from ray import serve

    began = time.monotonic()
    while (application := serve.status().applications[APPLICATION]).status != "RUNNING":
        parts = [f"{name} {each.status.value} {each.message}" for name, each in application.deployments.items()]
        said, waited_s = "\n".join([application.message, *parts]).strip(), time.monotonic() - began
        if application.status == "DEPLOY_FAILED":
            raise _why(said)
        if waited_s >= timeout_s or not is_wanted():
            raise StartupError(f"the application does not run after {waited_s:.0f} s: {said}")
        time.sleep(POLL_S)


@contextmanager
def running(settings: Settings, shows_logs: bool = True) -> Iterator[None]:
    """The application on a Ray of its own, as `local_serve`.

    Raises:
        PortInUse, StartupError: as `local_serve` and `deploy`.
    """
    settings = fitted(settings)
    serving, models = settings.serving, (settings.encoder, settings.generator)
    num_cpus = serving.num_cpus * serving.n_replicas
    if serving.topology == "split":
        num_cpus += sum(model.num_cpus * model.n_replicas for model in models)
    num_cpus = ceil(num_cpus + SPARE_CPUS)  # Ray knows no other amounts above one
    with local_serve(serving, num_cpus, shows_logs, longest_s(settings.answer)):
        update(settings)
        yield


def update(settings: Settings, timeout_s: float = inf, is_wanted: Callable[[], bool] = lambda: True) -> None:
    """Deploy the application as these settings say; where it runs, replica by replica, without a pause. How long it
    waits is as for `deploy`.

    Raises:
        StartupError: as `deploy`.
    """
    from openbook.serving.app import assemble, make_encoder, make_generator

    deploy(assemble(fitted(settings), make_encoder, make_generator), settings.serving, timeout_s, is_wanted)


def serve_flags(
    serving: ServingSettings, folder: Path, stops_within_s: int = LONGEST_S, programs: Path | None = None
) -> dict[str, str]:
    """What Serve reads from the environment, beside `openbook.local_ray.FLAGS`. Sockets are in the folder, HAProxy's
    starter in that of `programs`, if it is another. Raises StartupError.
    """
    haproxy: dict[str, object] = {"METRICS_PORT": free_port(), "STATS_PORT": free_port(), "NBTHREAD": 1}
    if serving.proxy == "haproxy":
        environment = tls.to_environment(serving.tls) if serving.tls else {}
        haproxy["BINARY_PATH"] = _starter(programs or folder, environment)
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(serving.proxy == "haproxy")),
        # By default a proxy that is not up 15 s after it began is killed: it took longer on a machine with much to do.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": str(READY_TIMEOUT_S),
        "RAY_prestart_worker_first_driver": "0",  # by default an idle process for each CPU that it counts
        # How long a replica that is to stop still answers: until the proxy has heard of it. By default half a minute.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": "openbook.serving.endpoint.quiet.quieten",
        **guards(stops_within_s),
        # Less than of others, for the same lines stand on our standard error: of ended processes Ray keeps these files
        # until it ends itself, in a container in memory. Not still less: of each full one Ray may show the last lines
        # to nobody.
        "RAY_ROTATION_MAX_BYTES": str(4 << 20),
        "RAY_ROTATION_BACKUP_COUNT": "1",
        # How long a port is left alone after its replica. By default longer than any answer may take, for former
        # processes of HAProxy may still ask there what was meant for another application. Here is none, and replicas
        # that die one after the other would use up all ports.
        "RAY_SERVE_PORT_QUARANTINE_S": "10",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
        **_replica_ports("HTTP"),
        **_replica_ports("GRPC"),
        # HAProxy reaches replicas where Ray says that they are, and they listen where the endpoint does.
        **({} if is_loopback(serving.host) or serving.host in EVERYWHERE else local_ray.ON_ALL_INTERFACES),
        **haproxy_files(folder),
        **{f"RAY_SERVE_HAPROXY_{name}": str(value) for name, value in haproxy.items()},
    }


def _replica_ports(protocol: str) -> dict[str, str]:
    """Ports of our own. By default all systems of a machine take the same, and Serve lets gRPC ports be shared: one
    system would answer what another was asked.
    """
    first, name = free_ports(N_REPLICA_PORTS), f"RAY_SERVE_DIRECT_INGRESS_{{}}_{protocol}_PORT"
    return {name.format("MIN"): str(first), name.format("MAX"): str(first + N_REPLICA_PORTS - 1)}


def _starter(folder: Path, environment: Mapping[str, str]) -> Path:
    """A program that is `serving.launch.haproxy`, whether or not openbook is installed. Raises StartupError."""
    path = folder / "haproxy"
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    exports += f"export {PARENT}=$PPID\n"
    program = shlex.join(of_module("openbook.serving.launch.haproxy"))
    path.write_text(f'#!/bin/sh\n{exports}exec {program} "$@"\n')
    path.chmod(0o700)
    if not os.access(path, os.X_OK):
        raise StartupError(
            f"{folder}: no program may run there, as HAProxy's must: set TMPDIR to a place not mounted noexec"
        )
    return path


def _await_ready(serving: ServingSettings) -> None:
    """Until questions are answered over both protocols: proxies may know the way for the one before the other."""
    give_up = time.monotonic() + READY_TIMEOUT_S
    for what, try_once in (("HTTP", _ask_over_http), ("gRPC", _ask_over_grpc)):
        while said := try_once(serving):
            if time.monotonic() > give_up:
                raise StartupError(f"the endpoint is not ready over {what} within {READY_TIMEOUT_S:.0f} s: {said}")
            time.sleep(0.05)


def _ask_over_http(serving: ServingSettings) -> str:
    """Nothing if questions can be answered, else what was said."""
    connection = HTTPConnection(serving.host, serving.http_port, timeout=5)
    if serving.tls:
        connection = _UnixConnection(_socket("http"))
    try:
        connection.request("GET", "/readyz")
        reply = connection.getresponse()
        said = reply.read().decode(errors="replace")
    except (OSError, HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return "" if reply.status == 200 else said


class _UnixConnection(HTTPConnection):
    """HTTP through a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=5)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _socket(protocol: str) -> Path:
    """Of HAProxy, in the folder that Serve makes for the only node; `serve_flags` hold as long as it runs."""
    folder = Path(os.environ["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent
    return next(folder.glob(str(socket_of(Path("*"), protocol))), folder)


def _ask_over_grpc(serving: ServingSettings) -> str:
    """As `_ask_over_http`. Over a connection of its own, which no former proxy holds."""
    options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
    address = serving.grpc_address
    if serving.tls:
        address = f"unix:{_socket('grpc')}"
    with grpc.insecure_channel(address, options) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)  # type: ignore[attr-defined]
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "" if reply.status == health_pb2.HealthCheckResponse.SERVING else "NOT_SERVING"


def _why(status: str) -> StartupError | errors.OpenbookError:
    """Our own error out of the traceback that Serve tells, else the whole of it."""
    found = re.findall(r"openbook\.errors\.(\w+): (.+)", status)
    if found:
        name, message = found[-1]
        kind = getattr(errors, name, StartupError)
        return kind(message)
    return StartupError(f"the application does not start: {status}")
