"""For `ray up`: the cluster of a cloud, and of machines that stand; and the Serve config."""

import shlex
from collections.abc import Callable
from pathlib import PurePosixPath
from textwrap import indent
from typing import Any

from openbook.deployment import ray_machines
from openbook.deployment.files import Lines, to_yaml
from openbook.deployment.ray_clean_up import BIN, ENDED, RUNS, clean_up
from openbook.deployment.serve_config import serve_config
from openbook.deployment.topology import HAPROXY, Aws, Cloud, Gcp, OnPremise, Topology
from openbook.local_ray import N_STARTS
from openbook.serving.launch.environment import guards, haproxy_files, longest_s
from openbook.serving.launch.ports import INDEX_RESOURCE

SECRETS = "openbook/secrets"
"""In the home of the user on every machine."""

UP = "`ray up {path}`, ask at ports {http} (HTTP) and {grpc} (gRPC) of the head, `ray down {path}`."
NODES = """
  head    Ray, Redis, HAProxy, one replica of the endpoint
  index   every shard of the snapshot, each in a process of its own: {replicas} nodes, {replicas} replicas of each shard
  worker  encoder and generator; the autoscaler adds nodes as replicas ask for {what}

Before the first start: `sh deploy/secrets.sh`, and what docs/deploy.md says."""


def serve(topology: Topology, has_gpus: bool) -> str:
    """The Serve config."""
    index = {"tls": {"ca": f"~/{SECRETS}/ca.pem"}, "server_name": topology.secrets.server_name}
    args = topology.settings(has_gpus, index=index, serving={"metrics_port": topology.ports.metrics, "host": "0.0.0.0"})
    about = """
The serving tier for `openbook deploy serve`, which fills in where index servers and Redis are; or for `serve deploy`,
once you have. `args` are the sections of openbook.config.Settings; a misspelt one stops the start."""
    return to_yaml(serve_config(topology, args), about=about.strip())


def aws(topology: Topology, cloud: Aws, has_gpus: bool, path: str) -> str:
    """A cluster on AWS."""

    def node(kind: str, disk_gb: int) -> dict[str, Any]:
        disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": disk_gb, "VolumeType": "gp3"}}
        return {
            "InstanceType": kind,
            "ImageId": cloud.gpu_image if has_gpus and kind == cloud.gpu else cloud.image,
            "IamInstanceProfile": {"Name": cloud.profile},
            "BlockDeviceMappings": [disk],
        }

    types = _types(topology, cloud, has_gpus, node)
    return _of_a_cloud(topology, cloud, types, has_gpus, path, "aws", cache_stopped_nodes=False)


def gcp(topology: Topology, cloud: Gcp, has_gpus: bool, path: str) -> str:
    """A cluster on GCP, which tells Ray nothing of what its machines have."""

    # Ray gives its account to the head alone, and without one nobody reads a bucket.
    account = {
        "email": f"ray-autoscaler-sa-v1@{cloud.project}.iam.gserviceaccount.com",
        "scopes": ["https://www.googleapis.com/auth/cloud-platform"],
    }

    def node(kind: str, disk_gb: int) -> dict[str, Any]:
        image = cloud.gpu_image if has_gpus and kind == cloud.gpu else cloud.image
        initial = {"diskSizeGb": disk_gb, "sourceImage": image}
        return {
            "machineType": kind,
            "serviceAccounts": [account],
            "disks": [{"boot": True, "autoDelete": True, "type": "PERSISTENT", "initializeParams": initial}],
        }

    types = _types(topology, cloud, has_gpus, node)
    types["head"]["resources"]["CPU"] = cloud.cpus_of(cloud.head)
    types["worker"]["resources"]["CPU"] = cloud.cpus_of(cloud.gpu if has_gpus else cloud.cpu)
    if has_gpus:
        n_gpus = types["worker"]["resources"]["GPU"] = topology.endpoint.n_gpus
        where = f"projects/{cloud.project}/zones/{cloud.zone}/acceleratorTypes/{cloud.accelerator}"
        types["worker"]["node_config"] |= {
            "guestAccelerators": [{"acceleratorType": where, "acceleratorCount": n_gpus}],
            "scheduling": [{"onHostMaintenance": "TERMINATE"}],
        }
    return _of_a_cloud(topology, cloud, types, has_gpus, path, "gcp", project_id=cloud.project)


def on_premise(topology: Topology, hosts: OnPremise, path: str) -> str:
    """Machines that stand: Ray knows them by their addresses, and gives all of them the same commands."""
    home = _home(hosts.ssh_user)
    resources = shlex.quote(f'{{"{INDEX_RESOURCE}": 1}}')
    cpus = f" --num-cpus={hosts.worker_cpus}" if hosts.worker_cpus else ""
    fetch = hosts.fetch or topology.index.fetch
    config = {
        "cluster_name": topology.name,
        "min_workers": len(hosts.workers),
        "max_workers": len(hosts.workers),
        "idle_timeout_minutes": 10,
        "provider": {"type": "local", "head_ip": hosts.head, "worker_ips": list(hosts.workers)},
        "auth": {"ssh_user": hosts.ssh_user, "ssh_private_key": hosts.ssh_key},
        "file_mounts": _mounts(topology, home, hosts.has_gpus),
        "setup_commands": [hosts.install, _ON_PATH],
        "worker_setup_commands": [fetch] if fetch else [],
        "head_start_ray_commands": [
            *_head(topology, home, len(hosts.workers), _OLD_AUTOSCALER),
            clean_up(ENDED, topology.name),
            f"RAY_TMPDIR=/tmp {BIN}/python -P -m {ray_machines.__name__}",
        ],
        "worker_start_ray_commands": [
            *_worker(topology, home, f" --resources={resources}{cpus}"),
            clean_up("sleep 30", topology.name),  # for Ray may be started anew
        ],
    }
    about = UP.format(path=path, http=topology.ports.http, grpc=topology.ports.grpc)
    about += f"""

  {hosts.head:<15} the head: Ray, Redis, HAProxy, replicas of the endpoint
  {hosts.workers[0]:<15} and the other workers: every shard of the snapshot, each in a process of its own; models

Before the first start: `sh deploy/secrets.sh`, and what docs/deploy.md says."""
    return to_yaml(config, about=about)


_OLD_AUTOSCALER = {"RAY_enable_autoscaler_v2": "0"}
"""The newer one starts one worker too few of machines that stand."""


_ON_PATH = "grep -qs openbook/bin ~/.bashrc || echo 'export PATH=$HOME/openbook/bin:$PATH' >> ~/.bashrc"
"""`ray down` looks for `ray` there."""


def _types(
    topology: Topology, cloud: Cloud, has_gpus: bool, node: Callable[[str, int], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Kinds of nodes, each a `node` of so many GB. Serve places nothing on those of the index: they offer no CPUs."""
    index, endpoint = topology.index, topology.endpoint
    limits = {"min_workers": endpoint.min_workers, "max_workers": endpoint.max_workers}
    return {
        "head": {"resources": {}, "node_config": node(cloud.head, 100)},
        "index": {
            **dict.fromkeys(("min_workers", "max_workers"), index.replicas),
            "resources": {"CPU": 0, INDEX_RESOURCE: 1},
            "node_config": node(cloud.index, index.disk_gb),
        },
        "worker": {**limits, "resources": {}, "node_config": node(cloud.gpu if has_gpus else cloud.cpu, 100)},
    }


def _of_a_cloud(
    topology: Topology,
    cloud: Cloud,
    types: dict[str, dict[str, Any]],
    has_gpus: bool,
    path: str,
    name: str,
    **provider: Any,
) -> str:
    provider = {"type": name, "region": cloud.region, "availability_zone": cloud.zone, **provider}
    home = _home(cloud.ssh_user)
    if fetch := cloud.fetch or topology.index.fetch:  # a node's own list replaces the common one
        types["index"]["worker_setup_commands"] = [cloud.install, _ON_PATH, fetch]
    config = {
        "cluster_name": topology.name,
        "max_workers": topology.endpoint.max_workers + topology.index.replicas,
        "idle_timeout_minutes": 10,
        "provider": provider,
        "auth": {"ssh_user": cloud.ssh_user},
        "file_mounts": _mounts(topology, home, has_gpus),
        "setup_commands": [cloud.install, _ON_PATH],
        "head_node_type": "head",
        "available_node_types": types,
        "head_setup_commands": [
            "sudo apt-get update -q && sudo apt-get install -yq redis-server && "
            "sudo systemctl disable --now redis-server"
        ],
        "head_start_ray_commands": _head(topology, home, topology.index.replicas, {}),
        "worker_start_ray_commands": _worker(topology, home, ""),
    }
    about = UP.format(path=path, http=topology.ports.http, grpc=topology.ports.grpc)
    about += "\n" + NODES.format(replicas=topology.index.replicas, what="GPUs" if has_gpus else "CPUs")
    return to_yaml(config, about=about)


def _home(user: str) -> str:
    return "/root" if user == "root" else f"/home/{user}"


def _mounts(topology: Topology, home: str, has_gpus: bool) -> dict[str, str]:
    config = "deploy/serve.yaml" if has_gpus else "deploy/serve-cpu.yaml"
    return {f"{home}/{SECRETS}": str(topology.secrets.folder), f"{home}/openbook/serve.yaml": config}


def environment(topology: Topology, home: str) -> dict[str, str]:
    """Of every process of Ray's, and of what it starts."""
    secrets = f"{home}/{SECRETS}"
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": f"{secrets}/ray-token",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": f"{home}/openbook/bin/openbook-haproxy",
        **haproxy_files(PurePosixPath(f"{home}/{HAPROXY}")),
        **guards(longest_s(topology.served.answer)),
        "OPENBOOK_TLS_CERTIFICATE": f"{secrets}/cert.pem",
        "OPENBOOK_TLS_KEY": f"{secrets}/key.pem",
        "OPENBOOK_INDEX_SERVER__TLS": f"{{certificate: {secrets}/cert.pem, key: {secrets}/key.pem}}",
        "OPENBOOK_INDEX_SERVER__N_THREADS": str(topology.index.threads),
        "OPENBOOK_INDEX_SERVER__METRICS_PORT": str(topology.ports.metrics),
        "OMP_WAIT_POLICY": "PASSIVE",
        "RAY_TMPDIR": "/tmp",  # Ray's own place, else below the other, too deep for its sockets
        "TMPDIR": f"{home}/openbook/tmp",  # what killed processes leave is in one folder, of this user alone
    }


def _exports(topology: Topology, home: str, more: dict[str, str]) -> str:
    values = {**environment(topology, home), **more}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in values.items()]
    return "\n".join([*exports, f"mkdir -p -m 700 $TMPDIR ~/{HAPROXY}"])


def _head(topology: Topology, home: str, n_index: int, more: dict[str, str]) -> list[str]:
    """Ray is left alone where it runs, so that `ray up` may be said twice. Then the deployment waits for the index
    nodes, in the background.
    """
    exports, ports, index = _exports(topology, home, more), topology.ports, topology.index
    started = _started(f"--head --port={ports.ray} --autoscaling-config=~/ray_bootstrap_config.yaml")
    snapshot = shlex.quote(index.snapshot)  # the index machines know their ~
    serve = (
        f"{BIN}/openbook deploy serve {home}/openbook/serve.yaml --index-nodes {n_index} --shards {index.shards} "
        f"--index-port {ports.index} --redis-port {ports.redis} --keys-port {ports.keys} --snapshot {snapshot}"
    )
    return [
        Lines(
            f"{exports}\n"
            f"here=$(hostname -I | cut -d' ' -f1)\n"
            f"if ! {{ {RUNS} && (exec 3<>/dev/tcp/$here/{ports.ray}) 2>/dev/null; }}; then\n"
            f"{indent(started, '  ')}"
            "fi\n"
        ),
        Lines(f"{exports}\n{_FORMER}\nsetsid nohup {serve} >~/openbook/deploy.log 2>&1 </dev/null &\n"),
    ]


_FORMER = "pkill -u $(id -u) -f '^[^ ]*python[^ ]* [^ ]*openbook deploy serve '"
"""A former deployment that still waits would deploy what it has read then."""


def _worker(topology: Topology, home: str, options: str) -> list[str]:
    exports = _exports(topology, home, {})
    return [Lines(f"{exports}\n{_started(f'--address=$RAY_HEAD_IP:{topology.ports.ray}{options}')}")]


def _started(options: str) -> str:
    """A node of Ray's dies when its agents take longer than 15 s, which no setting changes, Ray says so after 30, and
    asks a worker that failed never again: so each tries again.
    """
    tries = " ".join(str(i + 1) for i in range(N_STARTS))
    return (
        "exec 9>~/openbook/starting\nflock 9\ntest -e ~/openbook/began || touch ~/openbook/began\nulimit -n 65536\n"
        f"for each in {tries}; do\n  {BIN}/ray stop 9>&-\n  {BIN}/ray start {options} 9>&- && break\ndone\n"
        f"exec 9>&-\n{RUNS}\n"
    )
