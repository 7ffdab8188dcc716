"""Two small ingresses behind the HAProxy that Serve configures and we mend, without Ray."""

import csv
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep

import psutil
from proxies import CONFIG, PATIENCE_S, started
from ray.serve._private import haproxy
from ray.serve._private.common import RequestProtocol
from ray.serve.config import HTTPOptions, gRPCOptions

from openbook.processes import end, free_port, free_ports, start
from openbook.serving.launch import tls


@dataclass
class Behind:
    """HAProxy, and what stands behind it."""

    folder: Path
    http: int
    grpc: int
    ingresses: "list[subprocess.Popen[str]]"
    ports: list[list[int]]  # theirs, of HTTP and gRPC
    pid: int = 0  # of HAProxy

    def takes_commands(self) -> bool:
        """Whether HAProxy listens to us: its socket is there a moment before."""
        try:
            return bool(self._figures())
        except OSError:
            return False

    def until(self, status: str, *ingresses: int) -> set[str]:
        """What came of the last check, once HAProxy has all of these in this state; up are those that said so."""
        found = self._once(
            lambda row: row["status"] == status and (status != "UP" or row["check_status"].endswith("OK")), *ingresses
        )
        return {row["check_status"].removeprefix("* ") for row in found}

    def until_silent(self, ingress: int) -> None:
        """Once three checks of it have failed while it was up: where another one is up, two are enough to lose it."""
        self._once(lambda row: int(row["chkfail"]) > 2, ingress)

    def _once(self, holds: Callable[[dict[str, str]], bool], *ingresses: int) -> list[dict[str, str]]:
        """Their figures over both protocols, once all are so."""
        give_up = monotonic() + PATIENCE_S
        while True:
            figures = self._figures()
            found = [figures[protocol, str(number)] for protocol in ("http", "grpc") for number in ingresses]
            if all(holds(row) for row in found):
                return found
            assert monotonic() < give_up, found
            sleep(0.02)

    def take_places(self, ingress: int, stack: ExitStack) -> None:
        """All of those that wait to be accepted, of a frozen one: as if its machine were lost, it answers no packet."""
        host, _, port = self._figures()["http", str(ingress)]["addr"].rpartition(":")
        with suppress(TimeoutError):
            while True:
                stack.enter_context(socket.create_connection((host, int(port)), timeout=0.2))

    def down_s(self, ingress: int) -> int:
        """For how long HAProxy has held it for lost over HTTP, whole seconds."""
        return int(self._figures()["http", str(ingress)]["lastchg"])

    def n_open(self, section: str, name: str) -> int:
        """Connections of a frontend, calls of a backend, as they are now."""
        return int(self._figures()[section, name]["scur"])

    def _figures(self) -> dict[tuple[str, str], dict[str, str]]:
        rows = csv.DictReader(tls.tell(self.folder / "admin.sock", "show stat\n").splitlines())
        return {(row["# pxname"], row["svname"]): row for row in rows}

    @contextmanager
    def succeeded_by_one_that_knows(self, *ingresses: int) -> Iterator[None]:
        """Another HAProxy has our ports, as Serve starts one whenever a replica comes or goes."""
        former = psutil.Process(self.pid)
        _configure(self, ingresses)
        leave = ["-sf", str(self.pid), "-x", str(self.folder / "admin.sock")]
        with started(self.folder, lambda: not _listens(former), arguments=leave) as process:
            self.pid = process.pid
            yield

    def tell_all(self, number: int) -> None:
        for process in self.ingresses:
            process.send_signal(number)

    def go_on(self, *ingresses: "subprocess.Popen[str]") -> None:
        """They answer what they owe."""
        for process in ingresses:
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()


@contextmanager
def behind_haproxy(folder: Path) -> Iterator[Behind]:
    """Both are up."""
    script = Path(__file__).parent / "small_ingress.py"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ExitStack() as stack:
        ingresses = [start([sys.executable, str(script)], text=True, **pipes) for _ in range(2)]
        for process in ingresses:
            stack.callback(end, process)
        said = [process.stdout.readline().split() for process in ingresses if process.stdout]
        ports = [[int(each) for each in pair] for pair in said]
        assert len(ports) == 2
        found = Behind(folder, free_port(), free_port(), ingresses, ports)
        _configure(found, range(2))
        stack.callback(found.tell_all, signal.SIGCONT)
        found.pid = stack.enter_context(started(folder, found.takes_commands)).pid
        found.until("UP", 0, 1)
        yield found


def _listens(process: psutil.Process) -> bool:
    """Whether it takes connections by any port."""
    return any(each.status == psutil.CONN_LISTEN for each in process.net_connections())


def _configure(behind: Behind, ingresses: Iterable[int]) -> None:
    """As Serve's manager of HAProxy writes it, for these."""
    spare = free_ports(3)
    files = {name: str(behind.folder / name) for name in ("server_state_base", "server_state_file")}
    config = haproxy.HAProxyConfig(
        socket_path=str(behind.folder / "admin.sock"),
        metrics_socket_path=str(behind.folder / "metrics.sock"),
        **files,
        nbthread=1,
        timeout_client_s=60,
        stats_port=spare,
        metrics_port=spare + 1,
        http_options=HTTPOptions(host="127.0.0.1", port=behind.http),
        grpc_options=gRPCOptions(port=behind.grpc, grpc_servicer_functions=["any"]),
    )
    backends = {
        name: haproxy.BackendConfig(
            name=name,
            path_prefix="/",
            app_name="openbook",
            protocol=protocol,
            servers=[haproxy.ServerConfig(str(number), "127.0.0.1", behind.ports[number][i]) for number in ingresses],
            fallback_server=haproxy.ServerConfig("fallback", "127.0.0.1", spare + 2),
        )
        for i, (name, protocol) in enumerate((("http", RequestProtocol.HTTP), ("grpc", RequestProtocol.GRPC)))
    }
    api = haproxy.HAProxyApi(config, backends, config_file_path=str(behind.folder / CONFIG))
    api._generate_config_file_internal()
