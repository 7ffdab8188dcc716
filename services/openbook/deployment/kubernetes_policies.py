"""Who may speak to whom on Kubernetes."""

from typing import Any

from openbook.deployment.kubernetes_common import labels_of, meta, resource
from openbook.deployment.topology import Kubernetes, Topology

POLICY = "networking.k8s.io/v1", "NetworkPolicy"


def policies(topology: Topology, cluster: Kubernetes) -> list[dict[str, Any]]:
    """What comes in; what goes out is the other side's coming in, and names."""
    ports = topology.ports
    endpoint = {"podSelector": {"matchLabels": labels_of("endpoint")}}
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}

    def policy(part: str, *rules: tuple[list[dict[str, Any]] | None, list[int | range]]) -> dict[str, Any]:
        ingress = [
            {**({"from": sources} if sources is not None else {}), "ports": [_port(each) for each in numbers]}
            if numbers
            else {"from": sources}
            for sources, numbers in rules
        ]
        spec = {"podSelector": {"matchLabels": labels_of(part)}, "policyTypes": ["Ingress"], "ingress": ingress}
        return resource(*POLICY, meta(cluster, f"openbook-{part}", part), spec)

    none = {"podSelector": {}, "policyTypes": ["Ingress"]}
    nothing = resource(*POLICY, meta(cluster, "openbook-nothing-else", "all"), none)
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}}
    return [
        nothing,
        policy("index", ([endpoint], [ports.index]), ([monitoring], [ports.metrics])),
        *(
            policy(name, ([endpoint], [ports.keys if name == "keys" else ports.redis]))
            for name in topology.redis_of_ours(True, False)
        ),
        policy(
            "endpoint",
            (None, [ports.http, ports.grpc]),  # callers, who show keys
            ([endpoint], []),  # Ray among itself
            ([operator], [8265, ports.http]),
            ([monitoring], [topology.metrics_ports]),
        ),
    ]


def _port(number: int | range) -> dict[str, Any]:
    return {"port": number[0], "endPort": number[-1]} if isinstance(number, range) else {"port": number}
