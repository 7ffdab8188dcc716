"""What `openbook deploy serve` waits for, and when it goes on without."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import yaml

from openbook.errors import InvalidConfig, StartupError
from openbook.serving.launch import cluster, fleet
from openbook.serving.launch.cluster import GRACE_S, POLL_S
from openbook.serving.launch.ports import ClusterPorts

INGRESS = {"import_path": "openbook.serving.app:build", "name": "ours"}
ARGS = {"access": {"keys": "redis"}}
BEGAN = 1000.0


class Cluster:
    """A head and its clock. How many index nodes there are follows from the time."""

    def __init__(self) -> None:
        self.now = BEGAN
        self.n_nodes: Callable[[float], int] = lambda now: 2
        self.kept: list[fleet.Wanted] = []
        self.given: list[Any] = []
        self.awaited: list[Any] = []

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"Alive": True, "NodeManagerAddress": f"10.0.0.{i}", "Resources": {"index": 1.0}}
            for i in range(self.n_nodes(self.now))
        ]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def handed_in(self, values: Any, dashboard: str, timeout_s: float) -> str:
        self.given.append((self.now, values))
        return "a client"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()

    @contextmanager
    def joined(address: str) -> Iterator[None]:
        yield

    monkeypatch.setattr(cluster.local_ray, "joined", joined)
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: found.now, sleep=found.sleep))
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "the head"))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.100")
    monkeypatch.setattr(ray, "nodes", found.nodes)
    monkeypatch.setattr(cluster, "_why_not", lambda index: "" if index.addresses else "nobody answers")
    monkeypatch.setattr(cluster, "handed_in", found.handed_in)
    monkeypatch.setattr(cluster, "wait_until_running", lambda *arguments: found.awaited.extend(arguments))
    monkeypatch.setattr(fleet, "keep", lambda wanted, timeout_s: found.kept.append(wanted))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    return found


def config(folder: Path, args: dict[str, Any] | None = None) -> Path:
    application = {**INGRESS, "args": {**ARGS, **(args or {})}}
    (folder / "serve.yaml").write_text(yaml.safe_dump({"applications": [application]}))
    return folder / "serve.yaml"


def test_it_deploys_at_once_where_all_are_there(here: Cluster, tmp_path: Path) -> None:
    cluster.deploy(config(tmp_path), 2, 3, 600.0, snapshot="~/snapshot")
    assert here.kept == [fleet.Wanted("~/snapshot", 3, ClusterPorts(), True, cluster.KEYS_FOLDER, "")]
    [(at, values)] = here.given
    assert at == BEGAN
    assert values["applications"][0]["args"]["cache"]["url"] == "redis://10.0.0.100:6380/0"
    assert here.awaited == ["a client", "ours", 600.0, "the head"]


def test_it_starts_only_what_the_config_needs(here: Cluster, tmp_path: Path) -> None:
    own = {"cache": {"url": "redis://mine/0"}, "access": {"allow_anonymous": True}}
    cluster.deploy(config(tmp_path, own), 2, 3, 600.0, snapshot="~/snapshot")
    [wanted] = here.kept
    assert (wanted.has_cache, wanted.keys_folder) == (False, "")


def test_those_that_are_missing_hold_it_up_for_a_while_from_when_each_shard_is_there(
    here: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begins = BEGAN + 60.0
    here.n_nodes = lambda now: int(now >= begins)
    cluster.deploy(config(tmp_path), 2, 3, 600.0)
    [(at, _)] = here.given
    assert begins + GRACE_S < at <= begins + GRACE_S + 2 * POLL_S
    assert "deploying with 3 of 6 servers" in caplog.text
    assert not here.kept, "they run already"


def test_nobody_is_deployed_without_an_index_tier(here: Cluster, tmp_path: Path) -> None:
    here.n_nodes = lambda now: 0
    with pytest.raises(StartupError, match=r"the index tier is not there after 60 s: 0 of 6 servers"):
        cluster.deploy(config(tmp_path), 2, 3, 60.0)
    assert (here.given, 60.0 < here.now - BEGAN <= 60.0 + 2 * POLL_S) == ([], True)


def test_servers_that_the_config_names_are_all_that_are_waited_for(here: Cluster, tmp_path: Path) -> None:
    here.n_nodes = lambda now: 0
    path = config(tmp_path, {"index": {"addresses": [f"i:{port}" for port in range(1, 7)]}})
    cluster.deploy(path, 2, 3, 60.0)
    [(at, values)] = here.given
    assert (at, values["applications"][0]["args"]["index"].keys()) == (BEGAN, {"addresses"})


def test_a_file_that_maps_nothing_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("- applications")
    with pytest.raises(InvalidConfig, match=r"serve\.yaml: must map keys to values"):
        cluster.load(tmp_path / "serve.yaml")
