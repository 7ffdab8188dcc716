"""What the Prometheus operator reads on Kubernetes: which pods, and the rules."""

from typing import Any

from openbook.deployment import prometheus
from openbook.deployment.files import to_yaml
from openbook.deployment.kubernetes_common import PART, kustomization, labels_of, meta, resource
from openbook.deployment.topology import Kubernetes, Topology

API, FOLDER = "monitoring.coreos.com/v1", "deploy/kubernetes/monitoring"


def monitoring(topology: Topology, cluster: Kubernetes) -> dict[str, str]:
    """Texts by path."""
    rule = resource(API, "PrometheusRule", meta(cluster, "openbook", "monitoring"), prometheus.groups(topology))
    index = [{"port": "metrics", "interval": prometheus.EVERY}]
    # A pod of Ray has many processes, each at a port of its own: one name of a port, and all addresses that follow.
    endpoint = [
        {
            "port": "metrics",
            "interval": prometheus.EVERY,
            "relabelings": [
                {"sourceLabels": ["__meta_kubernetes_pod_ip"], "targetLabel": target, "replacement": f"$1:{port}"}
                for target in ("__address__", "instance")
            ],
        }
        for port in topology.metrics_ports
    ]
    parts = {
        "pods.yaml": to_yaml(_pods(cluster, "index", index), _pods(cluster, "endpoint", endpoint)),
        "rules.yaml": to_yaml(rule),
    }
    parts["kustomization.yaml"] = to_yaml(kustomization(list(parts)), about="Needs the Prometheus operator.")
    return {f"{FOLDER}/{name}": text for name, text in parts.items()}


def _pods(cluster: Kubernetes, part: str, endpoints: list[dict[str, Any]]) -> dict[str, Any]:
    spec = {"jobLabel": PART, "selector": {"matchLabels": labels_of(part)}, "podMetricsEndpoints": endpoints}
    return resource(API, "PodMonitor", meta(cluster, f"openbook-{part}", "monitoring"), spec)
