"""For one machine with containers: a Compose file."""

import os
from pathlib import Path
from typing import Any

from openbook.deployment.files import to_yaml
from openbook.deployment.topology import LOADS_WITHIN_S, Kubernetes, Topology
from openbook.serving.launch.environment import longest_s
from openbook.serving.launch.ports import with_redis

GUARDED = {
    "read_only": True,
    "user": "10001:10001",
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "tmpfs": ["/tmp"],
    "restart": "unless-stopped",
    # Docker's own default, which others may read, but it would grow for ever: a line for each request.
    "logging": {"driver": "json-file", "options": {"max-size": "20m", "max-file": "5"}},
}
AHEAD = 16 * 1024
"""Sixteen times what everybody has: who hardly works is not to wait behind the models, which take all cores."""
TLS = "/etc/openbook/tls"


def compose(topology: Topology, images: Kubernetes) -> str:
    """Every shard in a container, behind one name on the network; Redis, as far as it is ours; the endpoint."""
    ports, index = topology.ports, topology.index
    secrets = f"{_beside(topology.secrets.folder)}:{TLS}:ro"
    serves = {
        f"index-{shard}": {
            "image": images.index_image,
            "command": topology.index_server(shard),
            **GUARDED,
            "environment": {
                "OPENBOOK_INDEX_SERVER__TLS": f"{{certificate: {TLS}/cert.pem, key: {TLS}/key.pem}}",
                "OPENBOOK_INDEX__TLS": f"{{ca: {TLS}/ca.pem}}",
                "OPENBOOK_INDEX__SERVER_NAME": topology.secrets.server_name,
                "OMP_WAIT_POLICY": "PASSIVE",
            },
            "volumes": ["${OPENBOOK_SNAPSHOT:?the folder of a snapshot}:/snapshot:ro", secrets],
            "networks": {"inside": {"aliases": ["openbook-index"]}},
            "mem_limit": index.memory_bytes,
            "cpu_shares": AHEAD,
            "stop_grace_period": "60s",
            "healthcheck": _check(["openbook", "index", "check", f"localhost:{ports.index}"]),
        }
        for shard in range(index.shards)
    }
    redis = {
        "cache": {**_redis(topology, images, keeps=False), "tmpfs": ["/data"]},
        "keys": {**_redis(topology, images, keeps=True), "volumes": ["keys:/data"]},
    }
    redis = {name: each for name, each in redis.items() if name in topology.redis_of_ours(False)}
    endpoint = {
        "image": images.image,
        "command": ["up", "--config", "/etc/openbook/openbook.yaml"],
        "init": True,  # who reaps what HAProxy's former processes leave: as process 1, `openbook up` would not
        **GUARDED,
        "tmpfs": ["/tmp:exec,mode=1777", "/home/openbook:uid=10001,gid=10001"],
        "shm_size": "1g",
        "volumes": ["./compose-openbook.yaml:/etc/openbook/openbook.yaml:ro", secrets],
        "ports": [f"{ports.http}:{ports.http}", f"{ports.grpc}:{ports.grpc}"],
        "networks": ["inside", "outside"],
        "depends_on": {name: {"condition": "service_healthy"} for name in [*serves, *redis]},
        # What was asked is answered, as with systemd; Compose itself gives 10 s.
        "stop_grace_period": f"{longest_s(topology.served.answer)}s",
        "healthcheck": _check(["curl", "-fsS", "--cacert", f"{TLS}/ca.pem", f"https://localhost:{ports.http}/readyz"]),
    }
    config = {
        "name": topology.name,
        "services": {
            **serves,
            **redis,
            "endpoint": endpoint,
            **_metrics(images),
        },
        "networks": {"inside": {"internal": True}, "outside": {}},
        **({"volumes": {"keys": {}}} if "keys" in redis else {}),
    }
    about = f"""\
`OPENBOOK_SNAPSHOT=... docker compose -f deploy/compose.yaml up`, after
`SECRETS={topology.secrets.folder} sh deploy/secrets.sh` and, as the containers' user is 10001 and callers read the CA,
`sudo chown 10001 {topology.secrets.folder}/*.pem; sudo chmod a+r {topology.secrets.folder}/ca.pem`.
With `--profile metrics` before `up` also Prometheus and Grafana, on ports 9090 and 3000 of loopback."""
    return to_yaml(config, about=about)


def settings(topology: Topology) -> str:
    """The settings file of the endpoint among these containers."""
    ports = topology.ports
    found = topology.settings(
        False,
        index={
            "discover": f"dns://openbook-index:{ports.index}",
            "tls": {"ca": f"{TLS}/ca.pem"},
            "server_name": topology.secrets.server_name,
            "wait_s": LOADS_WITHIN_S,
        },
        serving={
            "host": "0.0.0.0",
            "http_port": ports.http,
            "grpc_port": ports.grpc,
            "metrics_port": ports.metrics,
            "tls": {"certificate": f"{TLS}/cert.pem", "key": f"{TLS}/key.pem"},
        },
    )
    return to_yaml(with_redis(found, f"redis://cache:{ports.redis}/0", f"redis://keys:{ports.keys}/0"))


def _beside(folder: Path) -> str:
    """As Compose reads it, from the folder of its file."""
    is_whole = folder.is_absolute() or str(folder).startswith("~")
    return str(folder) if is_whole else f"./{os.path.relpath(folder, 'deploy')}"


def _redis(topology: Topology, images: Kubernetes, keeps: bool) -> dict[str, Any]:
    port = topology.ports.keys if keeps else topology.ports.redis
    return {
        "image": images.redis_image,
        "command": topology.redis_server(keeps),
        **GUARDED,
        "user": "redis",
        "tmpfs": [],
        "networks": ["inside"],
        "healthcheck": _check(["redis-cli", "-p", str(port), "ping"]),
    }


def _metrics(images: Kubernetes) -> dict[str, Any]:
    """Prometheus with our rules, Grafana with our dashboards; both forget when they are removed."""
    common = {**GUARDED, "profiles": ["metrics"], "networks": ["inside", "outside"]}
    return {
        "prometheus": {
            "image": images.prometheus_image,
            "command": ["--config.file=/etc/prometheus/compose.yaml", "--storage.tsdb.path=/prometheus"],
            **common,
            "user": "nobody",
            "tmpfs": ["/prometheus:uid=65534,gid=65534"],
            "volumes": ["./prometheus:/etc/prometheus:ro"],
            "ports": ["127.0.0.1:9090:9090"],
        },
        "grafana": {
            "image": images.grafana_image,
            **common,
            "user": "472",
            "environment": {"GF_AUTH_ANONYMOUS_ENABLED": "true", "GF_ANALYTICS_REPORTING_ENABLED": "false"},
            "tmpfs": ["/tmp", "/var/lib/grafana:uid=472,gid=472"],
            "volumes": [
                "./grafana/provisioning:/etc/grafana/provisioning:ro",
                "./grafana/dashboards:/var/lib/dashboards:ro",
            ],
            "ports": ["127.0.0.1:3000:3000"],
        },
    }


def _check(command: list[str]) -> dict[str, Any]:
    start = f"{LOADS_WITHIN_S}s"
    return {"test": ["CMD", *command], "interval": "15s", "timeout": "8s", "start_period": start, "retries": 3}
