"""deploy/serve.yaml on a real Ray cluster of one node, with the models that it names, through Ray's own REST door: for
where no machines can be made. `ray up` on three of them, in `test_ray_up.py`, shows the same of the config for CPUs.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import yaml
from machines import missing

from openbook import local_ray
from openbook.cache.server import RedisServer
from openbook.client import Client
from openbook.config import AccessSettings, EncoderSettings, ServingSettings
from openbook.core.types import Passage
from openbook.errors import StartupError
from openbook.index.building.build import build_snapshot
from openbook.models.encoder import TextEncoder
from openbook.processes import free_port
from openbook.serving.access.key_redis import KeyRedisBook
from openbook.serving.access.keys import mint
from openbook.serving.access.scopes import Scope
from openbook.serving.launch import cluster, run
from openbook.serving.launch.ports import ClusterPorts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SERVE = Path(__file__).parents[2] / "deploy" / "serve.yaml"
PASSAGES = [
    Passage(0, "bell", "Telephone", "The telephone was invented by Alexander Graham Bell in 1876."),
    Passage(1, "curie", "Marie Curie", "Marie Curie was born in Warsaw."),
]
SECRET = "a-secret-of-the-house"


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster with nothing deployed: one node, which advertises the resource `index`."""

    ray: str
    dashboard: str
    serving: ServingSettings
    logs: Path


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Cluster]:
    if not missing():
        pytest.skip("test_ray_up.py deploys on three machines")
    serving = ServingSettings(http_port=free_port(), grpc_port=free_port())
    gcs, dashboard = free_port(), free_port()
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    options = {
        "--port": gcs,
        "--num-cpus": 4,
        "--resources": '{"index": 1}',
        "--include-dashboard": "true",
        "--dashboard-port": dashboard,
        "--dashboard-agent-listen-port": free_port(),
        "--object-store-memory": local_ray.OBJECT_STORE_BYTES,
    }
    # Not pytest's folder: the paths of Ray's sockets may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="ob-") as folder:
        options["--temp-dir"] = folder
        arguments = [str(part) for option in options.items() for part in option]
        flags = {**local_ray.FLAGS, **run.serve_flags(serving, Path(folder))}
        environment = {**os.environ, **flags}
        with Path(folder, "log").open("w") as log:
            node = subprocess.Popen([*command, *arguments], env=environment, stdout=log, stderr=log, text=True)
        address = f"http://127.0.0.1:{dashboard}"
        try:
            until_answered(f"{address}/api/serve/applications/", node, Path(folder, "log"))
            yield Cluster(f"127.0.0.1:{gcs}", address, serving, Path(folder, "session_latest", "logs"))
            # Serve's processes end at once when they are asked, and half a minute later when their node goes away.
            httpx.delete(f"{address}/api/serve/applications/", timeout=60)
        finally:
            node.send_signal(signal.SIGTERM)
            node.wait(120)


def until_answered(url: str, node: "subprocess.Popen[str]", log: Path) -> None:
    """Polls, as whoever waits for a deployment does; the test's own time limit ends it."""
    while node.poll() is None:
        try:
            if httpx.get(url, timeout=60).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"Ray ended with code {node.returncode}\n{log.read_text()}")


@pytest.fixture(scope="module")
def config(ray_cluster: Cluster, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """deploy/serve.yaml for a machine without GPUs."""
    values = cluster.load(SERVE)
    values["http_options"] |= {"host": "127.0.0.1", "port": ray_cluster.serving.http_port}
    values["grpc_options"]["port"] = ray_cluster.serving.grpc_port
    args = values["applications"][0]["args"]
    args["encoder"] |= {"n_threads": 1, "n_replicas": 1, "num_cpus": 0.1}
    args["generator"] |= {"device": "cpu", "dtype": "float32", "n_replicas": 1, "num_cpus": 0.1, "num_gpus": 0}
    args["serving"] |= {"n_replicas": 1, "num_cpus": 0.1}
    args["cache"] = {"url": redis_server.url, "secret": SECRET}
    args["access"]["url"] = redis_server.url
    del args["index"]  # TLS: nobody else is here
    path = tmp_path_factory.mktemp("deploy") / "serve.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_without_the_index_tier_nothing_is_deployed(ray_cluster: Cluster, config: Path) -> None:
    with pytest.raises(StartupError, match=r"the index tier is not there after 0 s: 1 of 3 servers"):
        cluster.deploy(config, 3, 1, 0, ray_address=ray_cluster.ray, dashboard=ray_cluster.dashboard)
    assert httpx.get(f"{ray_cluster.dashboard}/api/serve/applications/", timeout=60).json()["applications"] == {}


def test_the_config_deploys_and_answers_who_has_a_key(
    ray_cluster: Cluster, config: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    encoder = TextEncoder.load(EncoderSettings(), role="passage")
    vectors = np.asarray(encoder.encode_passages(PASSAGES), np.float32)
    snapshot = tmp_path / "snapshot"
    build_snapshot(PASSAGES, vectors, snapshot, 1, "Flat", "embedded", encoder.fingerprint)
    ports = ClusterPorts(index=free_port())
    where = {"ray_address": ray_cluster.ray, "dashboard": ray_cluster.dashboard}
    cluster.deploy(config, 1, 1, 600, ports, snapshot=str(snapshot), **where)
    http = f"http://127.0.0.1:{ray_cluster.serving.http_port}"
    until_running(ray_cluster)
    asked = {"question": "who invented the telephone?", "k": 2}
    assert httpx.post(f"{http}/v1/answer", json=asked, timeout=120).status_code == 401
    key, record = mint("web", time.time(), [Scope.ASK])
    KeyRedisBook(AccessSettings(keys="redis", url=redis_server.url)).put(lambda _: record)
    with Client(f"127.0.0.1:{ray_cluster.serving.grpc_port}", timeout_s=120, api_key=key) as client:
        answer = client.answer("who invented the telephone?", k=2)
    assert "bell" in answer.text.lower()
    assert answer.evidence[0].passage.title == "Telephone"
    over_http = httpx.post(f"{http}/v1/answer", json=asked, timeout=120, headers={"x-api-key": key})
    assert over_http.json()["answer"] == answer.text

    (server,) = index_servers(ports.index)
    cluster.deploy(config, 1, 1, 600, ports, snapshot=str(snapshot), **where)
    assert index_servers(ports.index) == [server], "to deploy the same again starts nothing anew"
    server.kill()
    while index_servers(ports.index) in ([], [server]) or not _answers(f"{http}/readyz"):
        time.sleep(0.1)
    over_http = httpx.post(f"{http}/v1/answer", json=asked, timeout=120, headers={"x-api-key": key})
    assert over_http.json()["answer"] == answer.text, "of a server that was started again"

    # At INFO Serve would write down what it was given to deploy.
    logged = {path: path.read_text(errors="replace") for path in ray_cluster.logs.rglob("*.log")}
    assert [path for path in logged if path.parent.name == "serve"]
    assert [path for path, text in logged.items() if SECRET in text] == []


def index_servers(port: int) -> list[psutil.Process]:
    """Those that listen there."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[-2:] == ["--port", str(port)] and "-c" not in process.cmdline():
                found.append(process)
    return found


def until_running(ray_cluster: Cluster) -> None:
    while True:
        details = httpx.get(f"{ray_cluster.dashboard}/api/serve/applications/", timeout=60).json()["applications"][
            "openbook"
        ]
        if details["status"] == "RUNNING":
            break
        assert details["status"] in ("NOT_STARTED", "DEPLOYING"), details["message"]
        time.sleep(0.1)
    health = f"http://127.0.0.1:{ray_cluster.serving.http_port}/readyz"
    while not _answers(health):
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=60).is_success
    except httpx.TransportError:
        return False
