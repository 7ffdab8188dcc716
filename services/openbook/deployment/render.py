"""All the files that follow from a topology."""

from pathlib import Path

from openbook.config import read_mapping
from openbook.deployment import compose, kubernetes, kubernetes_monitoring, prometheus, ray_cluster, systemd
from openbook.deployment.topology import Topology


def load(path: Path) -> Topology:
    """A topology file. Raises InvalidConfig: names file, key and value."""
    return read_mapping(Topology, path)


def render(topology: Topology) -> dict[str, str]:
    """Texts by path, relative to the folder that one deploys from."""
    files = {
        "deploy/serve.yaml": ray_cluster.serve(topology, has_gpus=True),
        "deploy/serve-cpu.yaml": ray_cluster.serve(topology, has_gpus=False),
        **systemd.units(topology),
        **prometheus.files(topology),
    }
    if cloud := topology.aws:
        for path, has_gpus in (("ray_cluster.yaml", True), ("deploy/ray/aws-cpu.yaml", False)):
            files[path] = ray_cluster.aws(topology, cloud, has_gpus, path)
    if gcp := topology.gcp:
        for path, has_gpus in (("deploy/ray/gcp.yaml", True), ("deploy/ray/gcp-cpu.yaml", False)):
            files[path] = ray_cluster.gcp(topology, gcp, has_gpus, path)
    if hosts := topology.on_premise:
        path = "deploy/ray/on-premise.yaml"
        files[path] = ray_cluster.on_premise(topology, hosts, path)
    if cluster := topology.kubernetes:
        files |= kubernetes.manifests(topology, cluster)
        files |= kubernetes_monitoring.monitoring(topology, cluster)
        files["deploy/compose.yaml"] = compose.compose(topology, cluster)
        files["deploy/compose-openbook.yaml"] = compose.settings(topology)
    return files


def write(files: dict[str, str], out: Path) -> list[str]:
    """Write them into a folder; returns the paths of those that changed."""
    changed = []
    for name, text in files.items():
        path = out / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            changed.append(name)
    return changed
