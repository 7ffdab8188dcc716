"""What keeps the endpoint from starting is told at once, in our own words, and leaves nothing behind."""

import os
import socket
from collections.abc import Iterator

import pytest
from small_system import DIMENSION, QUESTION, EchoModel, load_echo, load_hash, serving_tier, write_snapshot

from openbook.cache.server import RedisServer
from openbook.client import Client
from openbook.config import EncoderSettings, GeneratorSettings, IndexClientSettings, ServingSettings, Settings
from openbook.errors import InvalidConfig, InvalidModel, OpenbookError, PortInUse, ShardUnavailable, SnapshotMismatch
from openbook.processes import free_port
from openbook.serving.app import assemble, build
from openbook.serving.launch import run
from openbook.serving.workers.encoder import EncoderLoader
from openbook.serving.workers.generator import GeneratorLoader
from openbook.testing import HashEncoder

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def load_other_space(settings: EncoderSettings) -> HashEncoder:
    return HashEncoder(2 * DIMENSION)


def load_nothing(settings: GeneratorSettings) -> EchoModel:
    raise InvalidModel("generator 'nowhere': no such folder")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[Settings]:
    snapshot = write_snapshot(tmp_path_factory.mktemp("start") / "snapshot")
    with serving_tier(snapshot, redis_server.url, {}, modules=[__name__]) as running:
        yield running.settings


@pytest.mark.parametrize("topology", ["fused", "split"])
@pytest.mark.parametrize(
    ("address", "encoder", "generator", "error", "message"),
    [
        (None, load_other_space, load_echo, SnapshotMismatch, "dimension 128 .*hash-128.* dimension 64 .*hash-64"),
        ("127.0.0.1:1", load_hash, load_echo, ShardUnavailable, "127.0.0.1:1"),
        (None, load_hash, load_nothing, InvalidModel, "generator 'nowhere': no such folder$"),
    ],
)
def test_a_replica_that_cannot_start_says_why(
    topology: str,
    address: str | None,
    encoder: EncoderLoader,
    generator: GeneratorLoader,
    error: type[OpenbookError],
    message: str,
    system: Settings,
) -> None:
    index = IndexClientSettings(addresses=(address,), timeout_s=1) if address else system.index
    serving = system.serving.model_copy(update={"topology": topology})
    settings = system.model_copy(update={"index": index, "serving": serving})
    with pytest.raises(error, match=message):
        run.deploy(assemble(settings, encoder, generator), settings.serving)
    # The next one, put right, starts.
    run.deploy(assemble(system, load_hash, load_echo), system.serving)
    with Client(f"127.0.0.1:{system.serving.grpc_port}", timeout_s=120) as client:
        assert client.answer(QUESTION).answer


def test_arguments_are_checked_before_anything_is_deployed() -> None:
    with pytest.raises(InvalidConfig, match=r"serve args: serving\.topologie = 'split'"):
        build({"serving": {"topologie": "split"}})
    with pytest.raises(InvalidConfig, match=r"index\.addresses must name at least one server"):
        build({"cache": {"url": "redis://127.0.0.1"}})
    with pytest.raises(InvalidConfig, match=r"cache\.url must name a Redis server"):
        build({"index": {"addresses": ["127.0.0.1:7000"]}})


@pytest.mark.parametrize("name", ["http_port", "grpc_port"])
def test_a_used_port_is_named_before_anything_starts(name: str) -> None:
    before = dict(os.environ)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"http_port": free_port(), "grpc_port": free_port(), name: taken.getsockname()[1]}
        serve = run.local_serve(ServingSettings(**ports), num_cpus=1)
        with pytest.raises(PortInUse, match=rf"serving\.{name} = {ports[name]} on 127\.0\.0\.1"):
            serve.__enter__()
    assert dict(os.environ) == before
