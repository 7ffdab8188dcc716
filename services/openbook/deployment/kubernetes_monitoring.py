"""What the Prometheus operator reads on Kubernetes: which pods, and the rules."""

from typing import Any

from openbook.deployment import prometheus
from openbook.deployment.files import to_yaml
from openbook.deployment.kubernetes_common import PART, labels_of, meta
from openbook.deployment.topology import Kubernetes, Topology

FOLDER = "deploy/kubernetes/monitoring"


def monitoring(topology: Topology, cluster: Kubernetes) -> dict[str, str]:
    """Texts by path."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": meta(cluster, "openbook", "monitoring"),
        "spec": prometheus.groups(topology),
    }
    index = [{"port": "metrics", "interval": prometheus.EVERY}]
    # A pod of Ray has many processes, each at a port of its own: one name of a port, and all addresses that follow.
    endpoint = [
        {
            "port": "metrics",
            "interval": prometheus.EVERY,
            "relabelings": [
                {
                    "sourceLabels": ["__meta_kubernetes_pod_ip"],
                    "targetLabel": target,
                    "replacement": f"$1:{port}",
                }
                for target in ("__address__", "instance")
            ],
        }
        for port in prometheus.ports(topology)
    ]
    parts = {
        "pods.yaml": to_yaml(_pods(cluster, "index", index), _pods(cluster, "endpoint", endpoint)),
        "rules.yaml": to_yaml(rule),
    }
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(parts),
    }
    parts["kustomization.yaml"] = to_yaml(kustomization, about="Needs the Prometheus operator.")
    return {f"{FOLDER}/{name}": text for name, text in parts.items()}


def _pods(cluster: Kubernetes, part: str, endpoints: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": meta(cluster, f"openbook-{part}", "monitoring"),
        "spec": {
            "jobLabel": PART,
            "selector": {"matchLabels": labels_of(part)},
            "podMetricsEndpoints": endpoints,
        },
    }
