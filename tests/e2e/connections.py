"""Who may connect to whom by the network policies, and who does while the whole system runs."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from openbook.deployment import render
from openbook.deployment.kubernetes_policies import policies
from openbook.telemetry import N_METRICS_PORTS

TOPOLOGY = render.load(Path(__file__).parents[2] / "deploy" / "topology.yaml")
PORTS = TOPOLOGY.ports
ANY = "any"
"""Port, where one part's processes are among themselves."""
OF_OPERATOR = {("operator", "endpoint", 8265), ("operator", "endpoint", PORTS.http)}
"""KubeRay's, which is not here: it asks whether Ray and the endpoint are well."""

Edge = tuple[str, str, Any]
"""Who connects, to whom, at which port of the topology."""


def allowed() -> set[Edge]:
    """By the rendered policies; replicas of the endpoint take one of several ports for metrics, which count as one."""
    component = "app.kubernetes.io/component"

    def who(source: dict[str, Any]) -> str:
        labels = {key: value for each in source.values() for key, value in each.get("matchLabels", {}).items()}
        return labels.get(component) or labels.get("kubernetes.io/metadata.name") or "operator"

    assert TOPOLOGY.kubernetes is not None
    edges: set[Edge] = set()
    for policy in policies(TOPOLOGY, TOPOLOGY.kubernetes):
        to = policy["spec"]["podSelector"].get("matchLabels", {}).get(component)
        for rule in policy["spec"].get("ingress", ()):
            sources = [who(each) for each in rule["from"]] if "from" in rule else ["callers"]
            ports = [each["port"] for each in rule["ports"]] if "ports" in rule else [ANY]
            edges |= {(source, to, port) for source in sources for port in ports}
    return edges


def connections(named: dict[int, tuple[str, int]], monitors: set[int]) -> set[Edge]:
    """Of this test and all that it started, as the kernel knows them.

    Args:
        named: whose the ports are that the topology names, and what they are there.
        monitors: from which ports metrics are read.
    """
    here = psutil.Process()
    started = {process.pid: process.cmdline() for process in here.children(recursive=True)}
    roles = {pid: "index" if {"index", "serve"} <= set(said) else "endpoint" for pid, said in started.items()}
    roles[here.pid] = "endpoint"  # which it deploys
    found = [each for each in psutil.net_connections("tcp") if each.pid in roles]
    listens = {each.laddr.port: roles[each.pid] for each in found if each.status == psutil.CONN_LISTEN}
    edges: set[Edge] = set()
    for each in found:
        if not each.raddr or each.raddr.port not in listens:
            continue
        port = each.raddr.port
        reads = each.laddr.port in monitors
        to, at = named.get(port) or (listens[port], PORTS.metrics if reads else ANY)
        asks = each.pid == here.pid and at in (PORTS.http, PORTS.grpc)
        edges.add(("monitoring" if reads else "callers" if asks else roles[each.pid], to, at))
    return edges


def scraped(first: int, stack: ExitStack) -> Iterator[socket.socket]:
    """Connections that read the metrics of whoever offers some, and are open still."""
    for port in range(first, first + N_METRICS_PORTS):
        connection = stack.enter_context(socket.socket())
        if connection.connect_ex(("127.0.0.1", port)) == 0:
            connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert connection.recv(15) == b"HTTP/1.0 200 OK"
            yield connection
