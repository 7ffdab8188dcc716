"""The config that Serve is handed, under `ray up` and on Kubernetes."""

from typing import Any

from openbook.deployment.topology import Overrides, Topology
from openbook.serving.launch.ports import SERVE_LOGGING


def serve_config(topology: Topology, args: Overrides) -> dict[str, Any]:
    """As values; `args`: the settings of the endpoint."""
    return {
        "proxy_location": "EveryNode",
        "logging_config": SERVE_LOGGING,
        "http_options": {"host": "0.0.0.0", "port": topology.ports.http},
        "grpc_options": {
            "port": topology.ports.grpc,
            "grpc_servicer_functions": ["openbook.serving.endpoint.ingress.add_services"],
        },
        "applications": [
            {"name": "openbook", "route_prefix": "/", "import_path": "openbook.serving.app:build", "args": args}
        ],
    }
