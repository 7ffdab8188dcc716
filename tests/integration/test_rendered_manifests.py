"""What is rendered for Kubernetes, Compose and systemd, under their own schemas, and all of it against each other."""

import importlib.resources
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer
import yaml
from small_snapshot import build

from openbook import config
from openbook.cli import app
from openbook.config import IndexServerSettings, ServerTls
from openbook.deployment import render
from openbook.deployment.topology import LOADS_WITHIN_S
from openbook.errors import InvalidConfig
from openbook.index.client.discovery import DNS_EVERY_S
from openbook.index.client.health import check
from openbook.index.server.server import IndexServer
from openbook.planning.constants import DEFAULTS
from openbook.planning.demand import Demand, machines
from openbook.planning.plan import plan
from openbook.planning.topology import topology as planned_topology
from openbook.serving.launch.cluster import complete
from openbook.serving.launch.environment import guards

ROOT = Path(__file__).parents[2]
TOPOLOGY = render.load(ROOT / "deploy" / "topology.yaml")
RENDERED = render.render(TOPOLOGY)
BASE = [path for path in RENDERED if path.startswith("deploy/kubernetes/base/")]
DNS_CACHE_S = 30
"""As long as CoreDNS, as clusters come with it, keeps an answer."""
OVERLAYS = [Path(path).parent for path in RENDERED if "/overlays/" in path]


def strictly(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    """An object of just these fields: Kubernetes drops any other without a word."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


STRING, INTEGER, BOOLEAN = ({"type": each} for each in ("string", "integer", "boolean"))
GROUP = {"rayStartParams": {"type": "object", "additionalProperties": STRING}, "template": {"type": "object"}}
# The CRD is in no package. What it says of each field that we set: ray.io_rayservices.yaml at KubeRay's 02a80a6.
RAY_SERVICE = strictly(
    ("rayClusterConfig",),
    serveConfigV2=STRING,
    excludeHeadPodFromServeSvc=BOOLEAN,
    rayClusterConfig=strictly(
        ("headGroupSpec",),
        rayVersion=STRING,
        authOptions=strictly(mode={"enum": ["disabled", "token"]}),
        enableInTreeAutoscaling=BOOLEAN,
        headGroupSpec=strictly(("template",), **GROUP),
        workerGroupSpecs={
            "type": "array",
            "items": strictly(
                ("groupName", "minReplicas", "maxReplicas", "template"),
                groupName=STRING,
                replicas=INTEGER,
                minReplicas=INTEGER,
                maxReplicas=INTEGER,
                **GROUP,
            ),
        },
    ),
)


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(RENDERED[path]))


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [each for path in BASE for each in documents(path) if each["kind"] in kinds]


@pytest.mark.parametrize("path", BASE)
def test_kubernetes_accepts_it(path: str) -> None:
    for each in documents(path):
        if each["kind"] == "RayService":
            jsonschema.validate(each["spec"], RAY_SERVICE)
            spec = each["spec"]["rayClusterConfig"]
            groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
            for pod in (group["template"] for group in groups):
                named = {"metadata": {"name": "ray", **pod["metadata"]}, "spec": pod["spec"]}
                kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **named}, "1.31", strict=True)
        elif each["kind"] != "Kustomization":
            kubernetes_validate.validate(each, "1.31", strict=True)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)
def test_kustomize_builds_every_overlay(overlay: Path) -> None:
    done = subprocess.run(["kubectl", "kustomize", str(ROOT / overlay)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (service,) = (each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "RayService")
    jsonschema.validate(service["spec"], RAY_SERVICE)
    args = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    (worker,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    gpus = worker["template"]["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", "0")
    assert config.parse(args).generator.num_gpus == int(gpus) == (overlay.name == "gpu")


def shown(key: str) -> tuple[str, Any]:
    """What docs/deploy.md shows in YAML that has this key, and its values."""
    blocks = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / "deploy.md").read_text(), re.MULTILINE | re.DOTALL)
    (text,) = (block for block in blocks if key in yaml.safe_load(block))
    return text, yaml.safe_load(text)


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl")
def test_with_the_overlay_of_the_page_index_servers_can_be_published_to(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "deploy" / "kubernetes", tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes" / "overlays" / "publish"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text(shown("kind")[0])
    done = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sets = [each for each in yaml.safe_load_all(done.stdout) if each["kind"] == "StatefulSet"]
    sets = [each for each in sets if each["spec"]["serviceName"] == "openbook-index"]
    assert len(sets) == TOPOLOGY.index.shards
    for each in sets:
        kubernetes_validate.validate(each, "1.31", strict=True)
        (container,) = each["spec"]["template"]["spec"]["containers"]
        names = {variable["name"] for variable in container["env"]}
        assert {"OPENBOOK_INDEX_SERVER__ADMIN_TOKEN", "OPENBOOK_INDEX__ADMIN_TOKEN"} <= names
        mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}
        assert not mounts["/snapshot"]
        (volume,) = (v for v in each["spec"]["template"]["spec"]["volumes"] if v["name"] == "snapshot")
        assert not volume["persistentVolumeClaim"].get("readOnly", False)


def test_what_the_page_lays_over_compose_is_of_its_services() -> None:
    (compose,) = documents("deploy/compose.yaml")
    for name, more in shown("services")[1]["services"].items():
        (snapshot,) = more["volumes"]
        assert f"{snapshot.rpartition('}')[2]}:ro" in {
            v.rpartition("}")[2] for v in compose["services"][name]["volumes"]
        }
        assert {key.partition("__")[0] for key in more["environment"]} == {"OPENBOOK_INDEX_SERVER", "OPENBOOK_INDEX"}


def test_every_container_is_guarded() -> None:
    pods = [each["spec"]["template"]["spec"] for each in of_kind("StatefulSet")]
    (service,) = of_kind("RayService")
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    pods += [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_no_log_of_a_container_grows_for_ever() -> None:
    (compose,) = documents("deploy/compose.yaml")
    for name, service in compose["services"].items():
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}, name


def test_kuberays_service_selects_the_head_and_our_policies_all_of_ray() -> None:
    """A pod has KubeRay's labels, by which that service selects, unless its template says otherwise."""
    (service,) = of_kind("RayService")
    cluster = service["spec"]["rayClusterConfig"]
    (policy,) = (each for each in of_kind("NetworkPolicy") if each["metadata"]["name"] == "openbook-endpoint")
    monitors = documents("deploy/kubernetes/monitoring/pods.yaml")
    (monitor,) = (each for each in monitors if each["metadata"]["name"] == "openbook-endpoint")
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        labels = group["template"]["metadata"]["labels"]
        assert not {"app.kubernetes.io/name", "app.kubernetes.io/created-by"} & labels.keys()
        assert not any(label.startswith("ray.io/") for label in labels)
        for selector in (policy["spec"]["podSelector"], monitor["spec"]["selector"]):
            assert selector["matchLabels"].items() <= labels.items()
        assert monitor["spec"]["jobLabel"] in labels
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"name": "serve-grpc", "containerPort": TOPOLOGY.ports.grpc} in head["ports"]
    name = f"`{service['metadata']['name']}-head-svc.<namespace>.svc:{TOPOLOGY.ports.grpc}`"
    assert name in (ROOT / "docs" / "deploy.md").read_text()


def test_every_pod_of_ray_has_the_guards() -> None:
    (service,) = of_kind("RayService")
    cluster = service["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        assert guards().items() <= {each["name"]: each["value"] for each in container["env"]}.items()


def test_workers_are_ready_once_they_answer_with_tls() -> None:
    """KubeRay's own probe, and what it asks of a head that serves, know no TLS."""
    (service,) = of_kind("RayService")
    assert service["spec"]["excludeHeadPodFromServeSvc"] is True
    head, (workers,) = (service["spec"]["rayClusterConfig"][each] for each in ("headGroupSpec", "workerGroupSpecs"))
    assert "readinessProbe" not in head["template"]["spec"]["containers"][0], "KubeRay asks Ray there"
    (worker,) = workers["template"]["spec"]["containers"]
    assert "OPENBOOK_TLS_CERTIFICATE" in {each["name"] for each in worker["env"]}
    (port,) = (each["containerPort"] for each in worker["ports"] if each["name"] == "serve")
    command = worker["readinessProbe"]["exec"]["command"]
    assert command[:2] == ["sh", "-c"]
    assert f" https://localhost:{port}/-/healthz | grep success" in command[2]
    image = (ROOT / "deploy" / "Dockerfile").read_text().split("\nFROM ")[-1]
    assert re.search(rf"apt-get install .*\b{command[2].split()[0]}\b", image), "the image has the program"


def test_the_endpoint_finds_the_index_servers_by_the_name_of_their_service() -> None:
    (service,) = (each for each in of_kind("Service") if each["metadata"]["name"] == "openbook-index")
    (ray,) = of_kind("RayService")
    settings = config.parse(yaml.safe_load(ray["spec"]["serveConfigV2"])["applications"][0]["args"])
    (port,) = (each["port"] for each in service["spec"]["ports"])
    assert service["spec"]["clusterIP"] == "None"
    assert settings.index.discover == f"dns://openbook-index.{service['metadata']['namespace']}.svc:{port}"
    sets = [each for each in of_kind("StatefulSet") if each["spec"]["serviceName"] == "openbook-index"]
    assert len(sets) == TOPOLOGY.index.shards
    for shard, each in enumerate(sets):
        assert each["spec"]["replicas"] == TOPOLOGY.index.replicas
        assert each["spec"]["minReadySeconds"] > DNS_CACHE_S + DNS_EVERY_S, "then the next replica goes"
        assert service["spec"]["selector"].items() <= each["spec"]["template"]["metadata"]["labels"].items()
        (container,) = each["spec"]["template"]["spec"]["containers"]
        asked = serves(container["args"])
        assert (asked["shard"], asked["port"], asked["threads"]) == (shard, port, TOPOLOGY.index.threads)
        environment = {each["name"]: each["value"] for each in container["env"]}
        assert config.load_index_server(None, environment, snapshot=asked["snapshot"]).tls


@pytest.mark.parametrize(("passages", "dimension"), [(1_000_000, 384), (80_000_000, 768)])
def test_planned_pods_fit_on_the_planned_machines(passages: int, dimension: int) -> None:
    """Of which Kubernetes keeps about a tenth for itself."""
    planned = plan(Demand(passages=passages, dimension=dimension, index="Flat"), machines(), DEFAULTS)
    files = render.render(planned_topology(planned).model_copy(update={"kubernetes": TOPOLOGY.kubernetes}))
    base = [each for path in BASE for each in yaml.safe_load_all(files.get(path, ""))]
    index = next(each for each in base if each and each["metadata"]["name"] == "openbook-index-0")["spec"]["template"]
    (ray,) = (each for each in base if each and each["kind"] == "RayService")
    worker = ray["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]
    assert not planned.index.everywhere or passages < 80_000_000
    for pod, tier, n in ((index, planned.index, planned.index.shards_each), (worker, planned.endpoint, 1)):
        asked = pod["spec"]["containers"][0]["resources"]["requests"]
        assert 0.5 * tier.machine.cores < n * quantity(asked["cpu"]) <= 0.9 * tier.machine.cores
        assert 0.5e9 * tier.machine.memory_gb < n * quantity(asked["memory"]) <= 0.9e9 * tier.machine.memory_gb


@pytest.mark.parametrize("memory_gb", [0.001, 4.8, 1234.567, 2_000_000])
def test_an_index_server_has_the_same_memory_everywhere(memory_gb: float) -> None:
    index = TOPOLOGY.index.model_copy(update={"memory_gb": memory_gb})
    files = render.render(TOPOLOGY.model_copy(update={"index": index}))
    servers = [each for each in yaml.safe_load_all(files["deploy/kubernetes/base/index.yaml"]) if each]
    server = next(each for each in servers if each["kind"] == "StatefulSet")["spec"]["template"]
    limit = round(quantity(server["spec"]["containers"][0]["resources"]["limits"]["memory"]))
    assert limit == pytest.approx(memory_gb * 1e9, rel=1e-9)
    assert yaml.safe_load(files["deploy/compose.yaml"])["services"]["index-0"]["mem_limit"] == limit
    assert f"\nMemoryHigh={limit}\n" in files["deploy/systemd/openbook-index@.service"]


def quantity(text: str) -> float:
    """As Kubernetes reads it."""
    units = {"m": 1e-3, "": 1.0, "M": 1e6, "G": 1e9, "Gi": 2**30, "Mi": 2**20}
    read = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", text)
    assert read, text
    return float(read[1]) * units[read[2]]


def test_ray_listens_where_the_topology_says() -> None:
    values = yaml.safe_load((ROOT / "deploy" / "topology.yaml").read_text()) | {"ports": {"ray": 6400}}
    files = render.render(config.section(render.Topology, "t.yaml", **values))
    (ray,) = yaml.safe_load_all(files["deploy/kubernetes/base/rayservice.yaml"])
    head = ray["spec"]["rayClusterConfig"]["headGroupSpec"]
    ports = {each["name"]: each["containerPort"] for each in head["template"]["spec"]["containers"][0]["ports"]}
    assert head["rayStartParams"]["port"] == str(ports["gcs-server"]) == "6400"


def test_who_has_no_kubernetes_may_take_the_port_of_its_metrics() -> None:
    values = yaml.safe_load((ROOT / "deploy" / "topology.yaml").read_text()) | {"ports": {"http": 8080}}
    del values["kubernetes"]
    assert render.render(config.section(render.Topology, "t.yaml", **values))


@pytest.mark.parametrize("port", [443, 8443])
def test_who_may_do_nothing_else_may_listen_on_a_port_of_roots_where_that_is_wanted(port: int) -> None:
    values = yaml.safe_load((ROOT / "deploy" / "topology.yaml").read_text()) | {"ports": {"http": port}}
    values = {key: value for key, value in values.items() if key not in ("aws", "gcp")}
    values["on_premise"]["ssh_user"] = "root"
    files = render.render(config.section(render.Topology, "t.yaml", **values))
    for unit in ("openbook", "openbook-index@"):
        text = files[f"deploy/systemd/{unit}.service"]
        assert ("\nAmbientCapabilities=CAP_NET_BIND_SERVICE\n" in text) == (port < 1024)
    (ray,) = yaml.safe_load_all(files["deploy/kubernetes/base/rayservice.yaml"])
    (workers,) = ray["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    pod = {"metadata": {"name": "ray"}, "spec": workers["template"]["spec"]}
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **pod}, "1.31", strict=True)
    low = {"name": "net.ipv4.ip_unprivileged_port_start", "value": "0"}
    assert (low in pod["spec"]["securityContext"].get("sysctls", [])) == (port < 1024)


def test_policies_allow_what_is_there_and_nothing_else() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind("NetworkPolicy")}
    assert policies["openbook-nothing-else"] == {"podSelector": {}, "policyTypes": ["Ingress"]}
    listens = {}
    for each in of_kind("StatefulSet"):
        labels = each["spec"]["template"]["metadata"]["labels"]
        (container,) = each["spec"]["template"]["spec"]["containers"]
        listens[labels["app.kubernetes.io/component"]] = {port["containerPort"] for port in container["ports"]}
    for part, ports in listens.items():
        spec = policies[f"openbook-{part}"]
        assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == ports
        assert all("from" in rule for rule in spec["ingress"]), "not from everywhere"
    everywhere = [rule for rule in policies["openbook-endpoint"]["ingress"] if "from" not in rule]
    (callers,) = ([port["port"] for port in rule["ports"]] for rule in everywhere)
    assert callers == [TOPOLOGY.ports.http, TOPOLOGY.ports.grpc]


def test_compose_accepts_it_and_settings_are_ours() -> None:
    schemas = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text())
    (compose,) = documents("deploy/compose.yaml")
    jsonschema.validate(compose, schema)
    services = compose["services"]
    for shard in range(TOPOLOGY.index.shards):
        assert serves(services[f"index-{shard}"]["command"])["shard"] == shard
    for each in services.values():
        assert each["read_only"]
        assert each["cap_drop"] == ["ALL"]
    assert services["endpoint"]["init"], "HAProxy's former processes leave helpers, which process 1 has to reap"
    settings = config.parse(yaml.safe_load(RENDERED["deploy/compose-openbook.yaml"]))
    assert settings.index.discover == f"dns://openbook-index:{TOPOLOGY.ports.index}"
    assert settings.serving.tls
    assert settings.access.is_guarded


def test_a_redis_and_secrets_of_ones_own_are_taken() -> None:
    values = yaml.safe_load((ROOT / "deploy" / "topology.yaml").read_text())
    own = {"url": "rediss://user:word@redis.example.org:6379/0", "tls": {"ca": "/etc/openbook/tls/redis.pem"}}
    values["endpoint"]["settings"] |= {"cache": own, "access": {"keys": "redis", **own}}
    values["secrets"] = {"folder": "../secrets"}
    files = render.render(config.section(render.Topology, "t.yaml", **values))
    (ray,) = (each for each in yaml.safe_load_all(files["deploy/kubernetes/base/rayservice.yaml"]) if each)
    configs = [yaml.safe_load(each) for each in (ray["spec"]["serveConfigV2"], files["deploy/serve-cpu.yaml"])]
    of_a_cluster, _ = complete(configs[1], [], "10.0.0.1", TOPOLOGY.index.shards)
    found = [each["applications"][0]["args"] for each in (configs[0], of_a_cluster)]
    for args in (*found, yaml.safe_load(files["deploy/compose-openbook.yaml"])):
        assert (args["cache"], args["access"]) == (own, {"keys": "redis", **own})
    services = yaml.safe_load(files["deploy/compose.yaml"])["services"]
    for name in ("index-0", "endpoint"):
        assert "./../../secrets:/etc/openbook/tls:ro" in services[name]["volumes"], "seen from deploy/"


def test_the_images_that_the_page_builds_are_those_that_are_started() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    built = set(re.findall(r"^docker build .* -t (\S+) \.$", page, re.MULTILINE))
    (compose,) = documents("deploy/compose.yaml")
    started = [f"index-{shard}" for shard in range(TOPOLOGY.index.shards)] + ["endpoint"]
    assert built == {compose["services"][name]["image"] for name in started}
    assert TOPOLOGY.kubernetes
    gpu = f"{TOPOLOGY.kubernetes.image}-gpu"
    assert f"`{gpu}`" in page
    assert gpu in RENDERED["deploy/kubernetes/overlays/gpu/kustomization.yaml"]


def test_the_page_makes_the_first_key_with_the_settings_that_the_container_has() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    shown = re.findall(r"^docker compose -p (\S+) exec endpoint openbook keys add (.*)$", page, re.MULTILINE)
    ((project, words),) = shown
    (compose,) = documents("deploy/compose.yaml")
    assert project == compose["name"]
    command: Any = typer.main.get_command(app)
    asked = command.commands["keys"].commands["add"].make_context("add", words.split()).params
    mounted = {volume.split(":")[1] for volume in compose["services"]["endpoint"]["volumes"]}
    assert str(asked["config"]) in mounted


def test_containers_have_as_long_to_stop_as_units() -> None:
    (compose,) = documents("deploy/compose.yaml")
    index = {f"index-{shard}" for shard in range(TOPOLOGY.index.shards)}
    for unit, names in (("openbook-index@", index), ("openbook", {"endpoint"})):
        (grace,) = re.findall(r"^TimeoutStopSec=(\d+)$", RENDERED[f"deploy/systemd/{unit}.service"], re.MULTILINE)
        assert {compose["services"][name]["stop_grace_period"] for name in names} == {f"{grace}s"}


def test_the_endpoint_waits_as_long_as_index_servers_may_read() -> None:
    """It would end and begin anew, again and again."""
    (service,) = of_kind("RayService")
    args = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]
    unit = RENDERED["deploy/systemd/openbook.service"]
    waits = {
        "kubernetes": args["index"].get("wait_s"),
        "compose": yaml.safe_load(RENDERED["deploy/compose-openbook.yaml"])["index"].get("wait_s"),
        "systemd": next(map(int, re.findall(r"^Environment=OPENBOOK_INDEX__WAIT_S=(\d+)$", unit, re.MULTILINE)), None),
    }
    assert waits == dict.fromkeys(waits, LOADS_WITHIN_S)
    (compose,) = documents("deploy/compose.yaml")
    for shard in range(TOPOLOGY.index.shards):  # who is unhealthy before has the endpoint never begin
        assert compose["services"][f"index-{shard}"]["healthcheck"]["start_period"] == f"{LOADS_WITHIN_S}s"


def test_the_endpoint_stops_no_sooner_than_it_has_answered() -> None:
    values = yaml.safe_load((ROOT / "deploy" / "topology.yaml").read_text())
    values["endpoint"]["settings"]["answer"] = {"max_timeout_s": 1000}
    files = render.render(config.section(render.Topology, "t.yaml", **values))
    compose = yaml.safe_load(files["deploy/compose.yaml"])
    assert compose["services"]["endpoint"]["stop_grace_period"] == "1030s"
    assert "\nTimeoutStopSec=1030\n" in files["deploy/systemd/openbook.service"]


def serves(args: list[str]) -> dict[str, Any]:
    """As `openbook index serve` itself reads its arguments."""
    assert args[:2] == ["index", "serve"]
    command: Any = typer.main.get_command(app)
    return dict(command.commands["index"].commands["serve"].make_context("serve", args[2:]).params)


@pytest.mark.parametrize("unit", ["openbook", "openbook-index@"])
def test_a_unit_says_nothing_that_systemd_247_does_not_know(unit: str) -> None:
    """Which has no %d: of a line with one it makes none, and whoever is told by it of TLS would serve in the clear."""
    text = RENDERED[f"deploy/systemd/{unit}.service"]
    assert set(re.findall("%.", text)) <= {"%i", "%n", "%t", "%S"}
    folder, loaded = "%t/credentials/%n/", set(re.findall("^LoadCredential=(.+):", text, re.MULTILINE))
    assert set(re.findall(rf"{folder}([^,}}]+)", text)) <= loaded


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze")
def test_systemd_accepts_its_units(tmp_path: Path) -> None:
    units = []
    for path, text in RENDERED.items():
        if path.startswith("deploy/systemd/"):
            unit = tmp_path / Path(path).name.replace("@.", "@0.")
            unit.write_text(text.replace("/opt/openbook/bin/openbook", "/bin/true"))  # it looks for programs
            units.append(str(unit))
    assert len(units) == 2
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *units]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.index"])
def test_hadolint_finds_nothing_in_the_dockerfiles(name: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("no hadolint for this machine")
    done = subprocess.run([str(hadolint), str(ROOT / "deploy" / name)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.index"])
def test_images_are_compiled_when_they_are_built(name: str) -> None:
    """Who runs there can write nothing, so each process would compile all that it imports, each health check too."""
    text = (ROOT / "deploy" / name).read_text()
    assert "--no-compile" not in text
    as_root = text.split("\nFROM ")[-1].partition("\nUSER ")[0]
    assert "compileall" in as_root, "of Python's own library the official image has nothing compiled"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.index"])
def test_images_can_write_traces_and_fetch_snapshots(name: str) -> None:
    (extras,) = re.findall(r"'\.\[(.*)\]'", (ROOT / "deploy" / name).read_text())
    assert {"otel", "remote"} <= set(extras.split(","))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("shards: 4", "shards: 0", r"index\.shards"),
        ("snapshot: ~/", "snapshot: $HOME/", r"index\.snapshot = '\$HOME/openbook/snapshot': .*pattern"),
        ("memory_gb: 16\n", "memory_gb: 0.00001\n", r"index\.memory_gb = 1e-05: .*greater than or equal to 0\.001"),
        ("replicas: 2\n", "replica: 2\n", r"index\.replica: no such key"),
        ("topology: split", "topology: splitt", r"serving\.topology = 'splitt'"),
        (
            "  cpu:\n",
            "  cpu:\n    serving: {tls: {certificate: c.pem, key: k.pem, client_ca: ca.pem}}\n",
            r"endpoint: serving\.tls cannot be set .*OPENBOOK_SERVING__TLS .*docs/keys\.md#tls",
        ),
        (
            "    serving: {",
            "    index: {tls: {ca: ca.pem, certificate: c.pem, key: k.pem}}\n    serving: {",
            r"endpoint: index\.tls cannot be set .*OPENBOOK_INDEX__TLS of ",
        ),
        ("workers: [10.0.0.2, 10.0.0.3]", "workers: []", r"on_premise\.workers"),
        ("name: openbook", "name: open book", r"name = 'open book'"),
        ("name: openbook", "name: openbook\nalertmanagers: [alerts]", r"alertmanagers.* = 'alerts'"),
        ("shards: 4", "shards: 3000", r"ports: 8265 \(Ray's dashboard\) and 7000\.\.9999 \(index\) must not overlap"),
        ("kubernetes:", "ports: {grpc: 8000}\n\nkubernetes:", r"ports: 8000 \(http\) and 8000 \(grpc\) must not"),
        ("kubernetes:", "ports: {keys: 9115}\n\nkubernetes:", r"ports: 9115 \(keys\) and 9110\.\.9141 \(metrics\)"),
        ("kubernetes:", "ports: {http: 8080}\n\nkubernetes:", r"8080 \(Ray's metrics, by KubeRay\) and 8080 \(http\)"),
        ("kubernetes:", "ports: {index: 17000}\n\nkubernetes:", r"10001\.\.19999 \(Ray's .*\) and 17000 \(index\)"),
        ("kubernetes:", "ports: {http: 443}\n\nkubernetes:", r"443 is below 1024, where ssh_user = ubuntu may not"),
        ("min_workers: 1", "min_workers: 5", r"endpoint: .*min_workers must be at most max_workers = 4, got 5"),
        ("kubernetes:", "ports: {http: 0}\n\nkubernetes:", r"ports\.http = 0: .*greater than or equal to 1$"),
        (
            "kubernetes:",
            "ports: {index: 65533}\n\nkubernetes:",
            r"ports: index must be at most 65535, got 65533\.\.65536$",
        ),
        (
            "kubernetes:",
            "ports: {metrics: 65505}\n\nkubernetes:",
            r"ports: metrics must be at most 65535, got 65505\.\.65536$",
        ),
        ("head: 10.0.0.1", "head: 10.0.0.2", r"different machines, got 10\.0\.0\.2 more than once"),
    ],
)
def test_a_typo_in_the_topology_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "topology.yaml").read_text()
    assert old in text
    path = tmp_path / "topology.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InvalidConfig, match=message):
        render.load(path)


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl")
def test_the_secrets_fit_each_other_and_stay_once_they_are_made(tmp_path: Path) -> None:
    def make(*names: str) -> dict[str, bytes]:
        script, environment = str(ROOT / "deploy" / "secrets.sh"), {**os.environ, "SECRETS": str(tmp_path / "secrets")}
        said = subprocess.run(["sh", script, *names], env=environment, check=True, capture_output=True, text=True)
        made = {path.name: path.read_bytes() for path in (tmp_path / "secrets").iterdir()}
        assert {line.split()[-1] for line in said.stdout.splitlines()[1:]} == made.keys()
        return made

    before = os.umask(0o077)
    try:
        made = make("answers.example.org", "10.0.0.1")
    finally:
        os.umask(before)
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o755, "whom a file is given to reaches it"
    assert made.keys() == {"ray-token", "ca.pem", "cert.pem", "key.pem"}, "the CA's key stays where it was made"
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "secrets").iterdir())
    tls = {"certificate": tmp_path / "secrets/cert.pem", "key": tmp_path / "secrets/key.pem"}
    snapshot = build(tmp_path)
    with IndexServer(IndexServerSettings(snapshot=snapshot, tls=ServerTls(**tls))) as server:
        trusted = {"tls": {"ca": str(tmp_path / "secrets/ca.pem")}, "server_name": TOPOLOGY.secrets.server_name}
        check(config.parse({"index": trusted}).index, server.address)
    assert make("other.example.org") == made
    (tmp_path / "secrets/cert.pem").unlink()
    (tmp_path / "secrets-ca/ca.key").unlink()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        make("other.example.org")
    assert "ca.key: the CA's key is not there" in failed.value.stderr
    assert (tmp_path / "secrets/key.pem").read_bytes() == made["key.pem"]
    assert not (tmp_path / "secrets/cert.pem").exists()


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl")
@pytest.mark.parametrize("said", ["secrets/", "secrets//", "secrets/.", "se crets"])
def test_the_cas_key_is_in_no_folder_that_goes_to_every_machine(said: str, tmp_path: Path) -> None:
    command, environment = ["sh", str(ROOT / "deploy" / "secrets.sh")], {**os.environ, "SECRETS": said}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    folder = (tmp_path / said).name
    assert {path.name for path in tmp_path.iterdir()} == {folder, f"{folder}-ca"}
    assert {path.name for path in (tmp_path / said).iterdir()} == {"ray-token", "ca.pem", "cert.pem", "key.pem"}


def test_a_token_that_could_not_be_made_is_none(tmp_path: Path) -> None:
    """What is there already stays, and everybody knows an empty one."""
    openssl = tmp_path / "bin" / "openssl"
    openssl.parent.mkdir()
    openssl.write_text('#!/bin/sh\ntest "$1" != rand\n')
    openssl.chmod(0o755)
    environment = {"PATH": f"{openssl.parent}:{os.environ['PATH']}", "SECRETS": str(tmp_path / "secrets")}
    done = subprocess.run(["sh", str(ROOT / "deploy" / "secrets.sh")], env=environment, capture_output=True)
    assert (done.returncode, list((tmp_path / "secrets").iterdir())) == (1, [])


@pytest.mark.parametrize(
    "name",
    ["bad name", "", "https://answers.example.org", "a,DNS:b", "a;b", "a.org:9000", "10.0.0.1:9000", "cafe:9000"],
)
def test_a_name_that_is_none_is_refused_before_anything_is_made(name: str, tmp_path: Path) -> None:
    assert refused(name, tmp_path) == f"'{name}' is neither a name nor an address\n"


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl")
@pytest.mark.parametrize("name", ["10.0.0.1:9000:9001", "10.0.0.1::", "1:2:3", "10.0.0.256"])
def test_nor_is_anything_made_for_what_looks_like_an_address_alone(name: str, tmp_path: Path) -> None:
    assert name in refused(name, tmp_path)


def refused(name: str, folder: Path) -> str:
    """What is said of this name, for which nothing is made."""
    command = ["sh", str(ROOT / "deploy" / "secrets.sh"), "answers.example.org", name]
    done = subprocess.run(
        command, env={**os.environ, "SECRETS": str(folder / "secrets")}, capture_output=True, text=True
    )
    assert (done.returncode, list(folder.iterdir())) == (1, [])
    return done.stderr


@pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl")
def test_the_runbook_makes_another_ca(tmp_path: Path) -> None:
    runbook = (ROOT / "docs" / "runbooks.md").read_text().partition("\n## Rotate keys and certificates\n")[2]
    blocks = re.findall(r"^```sh\n(.*?)^```", runbook.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    (certificate,) = (block for block in blocks if block.startswith("rm deploy/secrets/cert.pem\n"))
    both, new_alone = (block for block in blocks if "secrets-ca/" in block)
    secrets = tmp_path / "deploy" / "secrets"
    secrets.mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "secrets.sh", secrets.parent)

    def done(commands: str) -> tuple[bytes, ...]:
        """What the files are now, and whether the certificate is of a CA in ca.pem."""
        subprocess.run(["sh", "-euc", commands], cwd=tmp_path, check=True, capture_output=True)
        verify = ["openssl", "verify", "-CAfile", str(secrets / "ca.pem"), str(secrets / "cert.pem")]
        subprocess.run(verify, check=True, capture_output=True)
        assert {path.name for path in secrets.iterdir()} == {"ray-token", "ca.pem", "cert.pem", "key.pem"}
        return (secrets / "ca.pem").read_bytes(), (secrets / "cert.pem").read_bytes()

    old, of_old = done("sh deploy/secrets.sh")
    two, still_of_old = done(both)
    new = two.removesuffix(old)
    assert (two.count(b"BEGIN CERTIFICATE"), still_of_old) == (2, of_old)
    (secrets / "ca.pem").write_bytes(old + new)
    with pytest.raises(subprocess.CalledProcessError):
        done(certificate)
    assert {path.name for path in secrets.iterdir()} == {"ray-token", "ca.pem", "key.pem"}, "no halves of a certificate"
    (secrets / "ca.pem").write_bytes(two)
    (secrets / "cert.pem").write_bytes(of_old)
    _, of_new = done(certificate)
    assert done(new_alone) == (new, of_new)
