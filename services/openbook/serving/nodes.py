"""The nodes of a Ray cluster that have a resource, as a list of index servers: it follows nodes that come and go."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from openbook.config import IndexClientSettings
from openbook.index.client.discovery import Source, Unreadable, combined, parse_ports

NODES_EVERY_S = 2.0
NodesOfRay = Callable[[], list[dict[str, Any]]]


def _nodes_of_ray() -> list[dict[str, Any]]:
    import ray

    return list(ray.nodes())


class RayNodes:
    """The ports of every living node with the resource. To be read by a process that has joined the cluster. Fits
    `openbook.index.client.discovery.Source`.
    """

    every_s = NODES_EVERY_S
    server_name = None

    def __init__(self, resource: str, ports: Sequence[int], nodes: NodesOfRay = _nodes_of_ray) -> None:
        self.name = f"ray://{resource}:{ports[0]}-{ports[-1]}"
        self._resource = resource
        self._ports = ports
        self._nodes = nodes

    async def addresses(self) -> list[str]:
        """Bare."""
        try:
            nodes = await asyncio.to_thread(self._nodes)
        except Exception as error:  # the head is away; Ray has many names for that
            raise Unreadable(f"Ray does not tell its nodes: {type(error).__name__}: {error}") from None
        return combined(hosts_with(nodes, self._resource), self._ports)


def hosts_with(nodes: Iterable[Mapping[str, Any]], resource: str) -> set[str]:
    """Addresses of the living nodes, as `ray.nodes()` tells them, that have some of a resource."""
    return {node["NodeManagerAddress"] for node in nodes if node["Alive"] and node["Resources"].get(resource)}


def source_on_ray(settings: IndexClientSettings) -> Source | None:
    """The list that `ray://` names; None if the settings name something else. Raises InvalidConfig."""
    kind, _, where = (settings.discover or "").partition("://")
    return RayNodes(*parse_ports(where)) if kind == "ray" else None
