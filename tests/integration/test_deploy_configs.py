"""The files that people deploy with, under Ray's own schemas and our stricter eyes."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from openbook import config
from openbook.cli import app
from openbook.errors import InvalidConfig
from openbook.serving.launch import cluster, run

ROOT = Path(__file__).parents[2]
SERVE = ROOT / "deploy" / "serve.yaml"
NEEDED = [
    "RAY_SERVE_ENABLE_HA_PROXY=1",
    "RAY_SERVE_HAPROXY_BINARY_PATH=$HOME/openbook/bin/openbook-haproxy",
    *(f"{name}={value}" for name, value in run.GUARDS.items()),
]
"""Of every node: see `run.GUARDS`."""


@pytest.fixture
def prepared() -> dict[str, Any]:
    """ray_cluster.yaml as `ray up` sees it."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    # file_mounts must exist, and are relative to the folder where `ray up` runs.
    values = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())
    prepared: dict[str, Any] = prepare_config(values)
    validate_config(prepared)
    return prepared


def test_ray_accepts_the_cluster(prepared: dict[str, Any]) -> None:
    assert set(prepared["available_node_types"]) == {"head", "index", "gpu"}
    for source in prepared["file_mounts"].values():
        assert (ROOT / source).exists()


def test_every_node_installs_openbook_and_starts_ray_with_haproxy(prepared: dict[str, Any]) -> None:
    setups = [prepared["head_setup_commands"], prepared["worker_setup_commands"]]
    # A node type's own list replaces the common one.
    setups += [
        n["worker_setup_commands"] for n in prepared["available_node_types"].values() if "worker_setup_commands" in n
    ]
    for commands in setups:
        assert any("pip install" in command for command in commands), commands
    for starts in (prepared["head_start_ray_commands"], prepared["worker_start_ray_commands"]):
        (start,) = (command for command in starts if "ray start" in command)
        for setting in NEEDED:
            assert setting in start.split("ray start")[0].replace(";", "").split()


def test_the_docs_say_what_ray_must_be_started_with() -> None:
    page = (ROOT / "docs/serve.md").read_text()
    for setting in NEEDED:
        assert setting.replace("$HOME/openbook", ".venv") in page


def test_index_nodes_listen_where_the_deployment_looks(prepared: dict[str, Any]) -> None:
    index = prepared["available_node_types"]["index"]
    (serve,) = (command for command in index["worker_setup_commands"] if "openbook index serve" in command)
    (deploy,) = (command for command in prepared["head_start_ray_commands"] if "openbook deploy" in command)
    # Read as the command itself reads them.
    command: Any = typer.main.get_command(app)
    asked = (
        command.commands["deploy"].make_context("deploy", shlex.split(deploy.partition("openbook deploy")[2])).params
    )
    assert asked["config"] == Path("/home/ubuntu/deploy/serve.yaml")
    assert asked["shards"] == int(re.search(r"seq 0 (\d+)", serve)[1]) + 1  # type: ignore[index]
    assert asked["index_nodes"] == index["min_workers"]
    assert f"--port $(({cluster.INDEX_PORT} + shard))" in serve
    assert index["resources"][cluster.INDEX_RESOURCE]
    for port in (cluster.REDIS_PORT, cluster.KEYS_PORT):
        assert any(
            f"redis-server --bind 0.0.0.0 --protected-mode no --port {port}" in command
            for command in prepared["head_setup_commands"]
        )


def test_rays_own_defaults_are_not_what_makes_it_valid(prepared: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import validate_config

    with pytest.raises(Exception, match="hed_node_type"):
        validate_config({**prepared, "hed_node_type": "head"})


def test_serve_accepts_the_application() -> None:
    values = cluster.load(SERVE)
    assert values["applications"][0]["import_path"] == "openbook.serving.app:build"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_gpus: 1", "num_gpu: 1", r"args of openbook: generator\.num_gpu: .*not permitted"),
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
    values, addresses = cluster.complete(cluster.load(SERVE), nodes, "10.0.0.1", n_shards=2)
    assert addresses == ["10.0.0.2:7000", "10.0.0.2:7001", "10.0.0.3:7000", "10.0.0.3:7001"]
    settings = config.parse(values["applications"][0]["args"])
    assert settings.index.addresses == tuple(addresses)
    assert str(settings.cache.url) == "redis://10.0.0.1:6380/0"
    assert (settings.access.keys, str(settings.access.url)) == ("redis", "redis://10.0.0.1:6381/0")
    assert settings.generator.num_gpus == 1
