"""For Kubernetes: StatefulSets of index servers behind one headless service, Redis, a RayService of KubeRay, and who
may speak to whom; a base, and overlays with GPUs and without.
"""

from typing import Any

from openbook.deployment.files import Lines, to_yaml
from openbook.deployment.kubernetes_common import (
    TLS,
    env,
    guarded,
    index_name,
    kustomization,
    labels_of,
    meta,
    pod_security,
    requested,
    resource,
    volumes,
)
from openbook.deployment.kubernetes_index import budget, headless, redis_and_service, shard_set
from openbook.deployment.kubernetes_policies import policies
from openbook.deployment.serve_config import serve_config
from openbook.deployment.topology import LOADS_WITHIN_S, Kubernetes, Topology
from openbook.serving.launch.environment import guards, longest_s
from openbook.serving.launch.ports import with_redis

BASE, OVERLAYS = "deploy/kubernetes/base", "deploy/kubernetes/overlays"


def manifests(topology: Topology, cluster: Kubernetes) -> dict[str, str]:
    """Texts by path."""
    index = [
        headless(topology, cluster),
        *(shard_set(topology, cluster, shard) for shard in range(topology.index.shards)),
    ]
    index += [budget(cluster, shard) for shard in range(topology.index.shards)]
    redis = [
        each for name in topology.redis_of_ours(True, False) for each in redis_and_service(topology, cluster, name)
    ]
    name = index_name(cluster)
    parts = {
        "namespace.yaml": to_yaml({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": cluster.namespace}}),
        "index.yaml": to_yaml(*index, about=f"Index servers. The certificate in secret openbook-tls is of {name}."),
        "redis.yaml": to_yaml(*redis, about="The cache, which forgets, and the keys, which it does not."),
        "rayservice.yaml": to_yaml(_ray_service(topology, cluster), about="The endpoint, by KubeRay from 1.5.1 on."),
        "network-policies.yaml": to_yaml(*policies(topology, cluster), about="Who may speak to whom; nobody else may."),
    }
    if not redis:
        del parts["redis.yaml"]
    files = {f"{BASE}/{name}": text for name, text in parts.items()}
    files[f"{BASE}/kustomization.yaml"] = to_yaml(kustomization(list(parts)))
    for name, has_gpus in (("cpu", False), ("gpu", True)):
        files[f"{OVERLAYS}/{name}/kustomization.yaml"] = to_yaml(_overlay(topology, cluster, has_gpus))
    return files


def _serve_config(topology: Topology, cluster: Kubernetes, has_gpus: bool) -> str:
    """What KubeRay hands to Serve."""
    ports = topology.ports
    settings = topology.settings(
        has_gpus,
        index={
            "discover": f"dns://{index_name(cluster)}:{ports.index}",
            "tls": {"ca": f"{TLS}/ca.crt"},
            "wait_s": LOADS_WITHIN_S,
        },
        serving={"metrics_port": ports.metrics, "host": "0.0.0.0"},
    )
    args = with_redis(
        settings,
        f"redis://openbook-cache.{cluster.namespace}.svc:{ports.redis}/0",
        f"redis://openbook-keys.{cluster.namespace}.svc:{ports.keys}/0",
    )
    return to_yaml(serve_config(topology, args)).partition("\n")[2]


def _ray_service(topology: Topology, cluster: Kubernetes) -> dict[str, Any]:
    endpoint = topology.endpoint
    head = {
        "rayStartParams": {"num-cpus": "2", "dashboard-host": "0.0.0.0", "port": str(topology.ports.ray)},
        "template": _ray_pod(topology, cluster, "ray-head", 2, 8, is_head=True),
    }
    workers = {
        "groupName": "models",
        "replicas": endpoint.min_workers,
        "minReplicas": endpoint.min_workers,
        "maxReplicas": endpoint.max_workers,
        "rayStartParams": {},
        "template": _ray_pod(topology, cluster, "ray-worker", endpoint.cpus, endpoint.memory_gb, is_head=False),
    }
    spec = {
        "serveConfigV2": Lines(_serve_config(topology, cluster, has_gpus=False)),
        "excludeHeadPodFromServeSvc": True,  # it would be in only if it answered without TLS
        "rayClusterConfig": {
            "rayVersion": cluster.ray_version,
            "authOptions": {"mode": "token"},  # KubeRay makes the token
            "enableInTreeAutoscaling": True,
            "headGroupSpec": head,
            "workerGroupSpecs": [workers],
        },
    }
    return resource("ray.io/v1", "RayService", meta(cluster, "openbook", "endpoint"), spec)


def _ray_pod(
    topology: Topology, cluster: Kubernetes, name: str, cpus: int, memory_gb: int, is_head: bool
) -> dict[str, Any]:
    ports = topology.ports
    # KubeRay looks for these names; without them the gRPC port would not be Serve's.
    named = {"serve": ports.http, "serve-grpc": ports.grpc, "metrics": ports.metrics}
    if is_head:
        named |= {"gcs-server": ports.ray, "dashboard": 8265, "client": 10001}
    environment = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": "/opt/openbook/bin/openbook-haproxy",
        **guards(longest_s(topology.served.answer)),
        "OPENBOOK_TLS_CERTIFICATE": f"{TLS}/tls.crt",
        "OPENBOOK_TLS_KEY": f"{TLS}/tls.key",
    }
    container = {
        "name": name,
        "image": cluster.image,
        "ports": [{"name": each, "containerPort": port} for each, port in named.items()],
        "env": [env(key, value) for key, value in environment.items()],
        "resources": {
            "requests": {"cpu": requested(cpus), "memory": f"{memory_gb}G"},
            "limits": {"cpu": str(cpus), "memory": f"{memory_gb}G"},  # of which Ray gives away the CPUs
        },
        "securityContext": guarded(),
        "volumeMounts": [
            {"name": "tls", "mountPath": TLS, "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "home", "mountPath": "/home/openbook"},
        ],
    }
    if not is_head:
        container["readinessProbe"] = _answers(ports.http)
    return {
        "metadata": {"labels": labels_of("endpoint")},
        "spec": {
            "securityContext": pod_security(topology),
            "containers": [container],
            "volumes": volumes("tmp", "home"),
        },
    }


def _answers(port: int) -> dict[str, Any]:
    """What KubeRay asks of workers where there is no probe, with TLS: without TLS no worker would ever be ready."""
    # Whoever asks is in the same pod, by a name that need not stand in the certificate.
    command = f"curl -fsk https://localhost:{port}/-/healthz | grep success"
    return {
        "exec": {"command": ["sh", "-c", command]},
        "initialDelaySeconds": 10,
        "periodSeconds": 5,
        "timeoutSeconds": 5,
        "failureThreshold": 1,
    }


def _overlay(topology: Topology, cluster: Kubernetes, has_gpus: bool) -> dict[str, Any]:
    patches = [{"op": "replace", "path": "/spec/serveConfigV2", "value": _serve_config(topology, cluster, has_gpus)}]
    if has_gpus:
        worker = "/spec/rayClusterConfig/workerGroupSpecs/0/template/spec/containers/0/resources"
        n_gpus = str(topology.endpoint.n_gpus)
        patches += [
            {"op": "add", "path": f"{worker}/{kind}/nvidia.com~1gpu", "value": n_gpus}
            for kind in ("requests", "limits")
        ]
        image = f"{cluster.image}-gpu"
        patches += [
            {
                "op": "replace",
                "path": f"/spec/rayClusterConfig/{where}/template/spec/containers/0/image",
                "value": image,
            }
            for where in ("headGroupSpec", "workerGroupSpecs/0")
        ]
    target = {"group": "ray.io", "version": "v1", "kind": "RayService", "name": "openbook"}
    patch = Lines(to_yaml(patches).partition("\n")[2])
    return kustomization(["../../base"], patches=[{"target": target, "patch": patch}])
