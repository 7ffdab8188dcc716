"""What all our resources of Kubernetes share."""

from typing import Any

from openbook.deployment.topology import Kubernetes, Topology

TLS, UID = "/etc/openbook/tls", 10001
PART = "app.kubernetes.io/component"


def resource(api: str, kind: str, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """One of our resources."""
    return {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec}


def kustomization(resources: list[str], **more: Any) -> dict[str, Any]:
    """What `kubectl apply -k` puts together."""
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": resources,
        **more,
    }


def meta(cluster: Kubernetes, name: str, part: str) -> dict[str, Any]:
    """Of one of our resources."""
    return {"name": name, "namespace": cluster.namespace, "labels": labels_of(part)}


def volumes(*empty: str) -> list[dict[str, Any]]:
    """Of a pod: the certificate, and folders that end with it."""
    return [
        {"name": "tls", "secret": {"secretName": "openbook-tls"}},
        *({"name": each, "emptyDir": {}} for each in empty),
    ]


def labels_of(part: str) -> dict[str, str]:
    """That all of a part have, and are selected by.

    Ray's pods keep the name that KubeRay gives them: by it `openbook-head-svc` selects the head, the door for gRPC.
    """
    name = {} if part == "endpoint" else {"app.kubernetes.io/name": "openbook"}
    return {**name, PART: part}


def requested(cpus: int) -> str:
    """Of a pod for a machine with so many CPUs: Kubernetes keeps some, and a pod that asks for all waits for ever."""
    return f"{900 * cpus}m"


def guarded() -> dict[str, Any]:
    """Of every container."""
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def pod_security(topology: Topology) -> dict[str, Any]:
    """Of every pod: nobody in particular."""
    may_listen = {"sysctls": [{"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}]}
    return {
        "runAsNonRoot": True,
        "runAsUser": UID,
        "runAsGroup": UID,
        "fsGroup": UID,
        "seccompProfile": {"type": "RuntimeDefault"},
        **(may_listen if topology.low_port else {}),
    }


def index_name(cluster: Kubernetes) -> str:
    """The name of the index servers' headless service."""
    return f"openbook-index.{cluster.namespace}.svc"


def env(name: str, value: str) -> dict[str, str]:
    """A variable of a container."""
    return {"name": name, "value": value}
