"""Index servers and Redis on Kubernetes."""

from typing import Any

from openbook.deployment.kubernetes_common import (
    TLS,
    env,
    guarded,
    index_name,
    labels_of,
    meta,
    pod_security,
    requested,
    resource,
    volumes,
)
from openbook.deployment.topology import LOADS_WITHIN_S, Kubernetes, Topology

MIN_READY_S = 60
"""From a replica's being ready until the next one of its shard is taken. Clients learn of its new address by DNS, where
a cache may keep the former answer for half a minute.
"""


def headless(topology: Topology, cluster: Kubernetes) -> dict[str, Any]:
    """All index servers under one name."""
    ports = [{"name": "grpc", "port": topology.ports.index}]
    spec = {"clusterIP": "None", "selector": labels_of("index"), "ports": ports}
    return resource("v1", "Service", meta(cluster, "openbook-index", "index"), spec)


def shard_set(topology: Topology, cluster: Kubernetes, shard: int) -> dict[str, Any]:
    """The index servers of one shard."""
    name, port, metrics = f"openbook-index-{shard}", topology.ports.index, topology.ports.metrics
    labels = {**labels_of("index"), "openbook/shard": str(shard)}
    check = ["openbook", "index", "check", f"localhost:{port}"]
    container = {
        "name": "index",
        "image": cluster.index_image,
        "args": topology.index_server(shard),
        "env": [
            env("OPENBOOK_INDEX_SERVER__TLS", f"{{certificate: {TLS}/tls.crt, key: {TLS}/tls.key}}"),
            env("OPENBOOK_INDEX__TLS", f"{{ca: {TLS}/ca.crt}}"),
            env("OPENBOOK_INDEX__SERVER_NAME", index_name(cluster)),
            env("OMP_WAIT_POLICY", "PASSIVE"),
        ],
        "ports": [{"name": "grpc", "containerPort": port}, {"name": "metrics", "containerPort": metrics}],
        "startupProbe": {
            "exec": {"command": check},
            "periodSeconds": 10,
            "timeoutSeconds": 8,
            "failureThreshold": LOADS_WITHIN_S // 10,
        },
        "readinessProbe": {"exec": {"command": check}, "periodSeconds": 15, "timeoutSeconds": 8},
        "livenessProbe": {"exec": {"command": check}, "periodSeconds": 30, "timeoutSeconds": 8},
        "resources": {
            "requests": {"cpu": requested(topology.index.threads), "memory": f"{topology.index.memory_mb}M"},
            "limits": {"memory": f"{topology.index.memory_mb}M"},
        },
        "securityContext": guarded(),
        "volumeMounts": [
            {"name": "snapshot", "mountPath": "/snapshot", "readOnly": True},
            {"name": "tls", "mountPath": TLS, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    pod = {
        "automountServiceAccountToken": False,
        "securityContext": pod_security(topology),
        "terminationGracePeriodSeconds": 60,
        # A lost node never takes both replicas of a shard.
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}},
        "containers": [container],
        "volumes": [
            {"name": "snapshot", "persistentVolumeClaim": {"claimName": cluster.claim, "readOnly": True}},
            *volumes("tmp"),
        ],
    }
    spec = {
        "serviceName": "openbook-index",
        "replicas": topology.index.replicas,
        "minReadySeconds": MIN_READY_S,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    return resource("apps/v1", "StatefulSet", {**meta(cluster, name, "index"), "labels": labels}, spec)


def budget(cluster: Kubernetes, shard: int) -> dict[str, Any]:
    """Whoever drains nodes takes one replica of a shard at a time."""
    labels = {**labels_of("index"), "openbook/shard": str(shard)}
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    return resource("policy/v1", "PodDisruptionBudget", meta(cluster, f"openbook-index-{shard}", "index"), spec)


def redis_and_service(topology: Topology, cluster: Kubernetes, name: str) -> list[dict[str, Any]]:
    """The Redis of the cache or of the keys, and its service."""
    keeps = name == "keys"
    port = topology.ports.keys if keeps else topology.ports.redis
    labels = labels_of(name)
    container = {
        "name": "redis",
        "image": cluster.redis_image,
        "args": topology.redis_server(keeps),
        "ports": [{"name": "redis", "containerPort": port}],
        "readinessProbe": {"exec": {"command": ["redis-cli", "-p", str(port), "ping"]}, "timeoutSeconds": 5},
        "resources": {"requests": {"cpu": "250m", "memory": "1200Mi"}, "limits": {"memory": "1200Mi"}},
        "securityContext": guarded(),
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "securityContext": pod_security(topology),
        "containers": [container],
    }
    claim = {
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    if not keeps:
        pod["volumes"] = [{"name": "data", "emptyDir": {}}]
    spec = {
        "serviceName": f"openbook-{name}",
        "replicas": 1,
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
        **({"volumeClaimTemplates": [claim]} if keeps else {}),
    }
    named = meta(cluster, f"openbook-{name}", name)
    service = resource("v1", "Service", named, {"selector": labels, "ports": [{"name": "redis", "port": port}]})
    return [service, resource("apps/v1", "StatefulSet", named, spec)]
