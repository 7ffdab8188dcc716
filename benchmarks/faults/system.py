"""The whole system as `openbook up` starts it, with models that need no time, and what is needed to hurt it."""

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from openbook.cache.server import RedisServer
from openbook.config import EncoderSettings, GeneratorSettings, Settings, parse
from openbook.core.confidence import UNFITTED
from openbook.core.deadline import Check
from openbook.core.marginal import log_prior
from openbook.core.types import Float32, Generation, GenerationSettings, Passage, Retrieved, Token
from openbook.index.building.build import build_snapshot
from openbook.local_ray import ON_ALL_INTERFACES
from openbook.processes import end, free_port, free_ports, start
from openbook.serving.access.key_redis import KeyRedisBook
from openbook.serving.access.keys import KeyRecord, mint
from openbook.serving.access.scopes import Scope
from openbook.telemetry import N_METRICS_PORTS
from openbook.testing import HashEncoder

from .inject import TcpProxy

DIMENSION = 64
N_PASSAGES, N_SHARDS, N_REPLICAS = 400, 2, 2
JOIN_TIMEOUT_S = 120.0
SETTLED_S = 16.0
"""After which a node of Ray that has not given up on its agents never does."""
N_STARTS = 5
DEADLINE_S = 3.0
"""Of every question."""
RECITE = "recite"
"""Questions that begin so are streamed for two seconds."""
MARK = "OPENBOOK_BENCH_FAULTS"
"""In the environment of every process of the system: those whose parents are gone are known by it."""

KINDS = MappingProxyType(
    {
        "ingress": "ray::ServeReplica:openbook:ingress",
        "encoder": "ray::ServeReplica:openbook:encoder",
        "generator": "ray::ServeReplica:openbook:generator",
        "controller": "ray::ServeController",
        "proxy": "ray::HAProxyManager",
        "haproxy": "bin/haproxy -",
        "redis": "redis-server",
        "index": "index serve",
        "gcs": "gcs_server",
        "raylet": "raylet/raylet",
    }
)
"""What stands in the command lines of processes."""

LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    # Two of each; Redis is the one that `openbook up` starts, the index servers are not.
    "fused": {"serving": {"n_replicas": 2}},
    # The index servers are those that `openbook up` starts, one a shard; Redis is not.
    "split": {
        "serving": {"topology": "split"},
        "encoder": {"n_replicas": 2},
        "generator": {"n_replicas": 2},
        "answer": {"min_coverage": 0.5},
    },
    # As fused, on two nodes of Ray.
    "nodes": {"serving": {"n_replicas": 2}},
    # What record_faults.py records: two of all that there may be two of, with keys, and index servers in a list.
    "recorded": {
        "serving": {"topology": "split", "max_in_flight": 16},
        "encoder": {"n_replicas": 2},
        "generator": {"n_replicas": 2},
        "access": {"keys": "redis"},
    },
    # Each model in replicas of its own, on the nodes of Ray that are joined to a head without any.
    "apart": {
        "serving": {"topology": "split", "n_replicas": 2},
        "encoder": {"n_replicas": 2},
        "generator": {"n_replicas": 2},
    },
}


class EchoModel:
    """Answers with the best passage, as `openbook.testing.EchoGenerator` does, in a worker."""

    fingerprint = generates_by = "echo"
    calibration = UNFITTED

    def generate(
        self, questions: Sequence[str], retrieved: Sequence[Retrieved], settings: GenerationSettings, check: Check
    ) -> list[Generation]:
        """Bare."""
        check()
        return [self._echo(each, settings) for each in retrieved]

    def stream(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, check: Check
    ) -> Iterator[Token | Generation]:
        """Word by word."""
        generation = self._echo(retrieved, settings)
        words = generation.text.split() * (20 if question.startswith(RECITE) else 1)
        for word in words:
            check()
            if question.startswith(RECITE):
                time.sleep(2.0 / len(words))
            yield Token(f"{word} ", 0.0, tuple(generation.log_prior.tolist()))
        yield generation

    def _echo(self, retrieved: Retrieved, settings: GenerationSettings) -> Generation:
        words = retrieved.passages[0].text.split()[: settings.max_new_tokens]
        prior = log_prior(retrieved.scores)
        return Generation(" ".join(words), tuple(range(len(words))), 0.0, prior, prior)


def load_encoder(settings: EncoderSettings) -> HashEncoder:
    """In a replica."""
    return HashEncoder(DIMENSION)


def load_generator(settings: GeneratorSettings) -> EchoModel:
    """In a replica."""
    return EchoModel()


def passages() -> list[Passage]:
    """What is searched: each has words of its own, and some that it shares."""
    return [
        Passage(i, f"doc-{i}", f"title {i}", f"word{i} word{i // 7} word{i % 31} stands in passage {i}")
        for i in range(N_PASSAGES)
    ]


def vectors() -> Float32:
    """(n, d) of the passages."""
    return HashEncoder(DIMENSION).encode_passages(passages())


def write_snapshot(folder: Path, factory: str = "Flat") -> Path:
    """The passages in their shards."""
    encoder = HashEncoder(DIMENSION)
    build_snapshot(passages(), vectors(), folder, N_SHARDS, factory, "hash", encoder.fingerprint)
    return folder


class IndexReplica:
    """One index server on a port that stays the same, and the address at which it is asked: behind a proxy, or not."""

    def __init__(self, snapshot: Path, shard: int, proxied: bool = False) -> None:
        self.port = free_port()
        self._command = [sys.executable, "-m", "openbook.cli", "index", "serve", str(snapshot)]
        self._command += ["--shard", str(shard), "--port", str(self.port)]
        # On one machine the connections without gRPC would go past the proxy.
        self._env = {**os.environ, **({"OPENBOOK_INDEX_SERVER__FRAME_PORT": "null"} if proxied else {})}
        self.again()

    def again(self) -> None:
        """Start it, and for the second time where it was."""
        self.process = start(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=self._env)

    def wait(self) -> str:
        """Its address, once it listens."""
        assert self.process.stdout is not None
        if not (address := self.process.stdout.readline().strip()):
            raise RuntimeError(f"the index server ended with code {self.process.wait()}")
        return str(address)


@dataclass
class System:
    """A running system, and handles to hurt it with."""

    settings: Settings
    snapshot: Path
    folder: Path
    index: Sequence[IndexReplica] = ()  # replicas of shard 0, then those of shard 1
    index_proxy: TcpProxy | None = None  # in front of the first one
    redis_proxy: TcpProxy | None = None
    redis: Sequence[RedisServer] = ()  # of the cache, and of the keys
    servers: Path | None = None  # the list of index servers
    key: KeyRecord | None = None  # of all who ask, where keys are needed
    clock: Path | None = None
    node: "subprocess.Popen[Any] | None" = None
    nodes: "list[subprocess.Popen[Any]]" = field(default_factory=list)
    whole: Counter[str] = field(default_factory=Counter)

    @property
    def grpc(self) -> str:
        return self.settings.serving.grpc_address

    @property
    def http(self) -> str:
        return self.settings.serving.http_url

    @property
    def redis_port(self) -> int:
        """Of the Redis that answers, whatever stands in front of it."""
        assert self.settings.cache.url is not None
        behind = self.redis_proxy.target if self.redis_proxy else None
        return behind or int(self.settings.cache.url.get_secret_value().rsplit(":", 1)[1].split("/")[0])

    def pids(self, kind: str) -> list[int]:
        """The processes of one kind, the oldest first."""
        return [pid for pid, of in processes().items() if of == kind]

    def let_in(self) -> None:
        """Add the key to those that the Redis of the keys has."""
        if record := self.key:
            KeyRedisBook(self.settings.access).put(lambda records: record)

    def first(self, kind: str) -> int:
        """The oldest of them."""
        if not (pids := self.pids(kind)):
            raise RuntimeError(f"no process of the system is of the kind {kind}: {KINDS[kind]!r}")
        return pids[0]

    def kind(self, pid: int) -> str:
        """Of a process."""
        return processes().get(pid, "")

    def is_whole(self) -> bool:
        """Whether as many processes of each kind run as at the start."""
        return Counter(processes().values()) >= self.whole


def processes() -> dict[int, str]:
    """Every living process of the system of this benchmark, by age, and its kind."""
    found = {}
    family = set(psutil.Process().children(recursive=True))
    for process in sorted(psutil.process_iter(), key=psutil.Process.create_time):
        with suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process not in family and process.environ().get(MARK) != os.environ[MARK]:
                continue
            line = " ".join(process.cmdline())
            if kind := next((kind for kind, pattern in KINDS.items() if pattern in line), ""):
                found[process.pid] = kind
    return found


@contextmanager
def running(layout: str, folder: Path, n_nodes: int = 0, **more: dict[str, Any]) -> Iterator[System]:
    """The system of this layout on free ports, ready to be asked; with nodes beside Ray's head, and more settings."""
    os.environ[MARK] = str(os.getpid())
    clock = folder / "clock"
    clock.write_bytes(bytes(8))
    os.environ["OPENBOOK_BENCH_CLOCK"] = str(clock)
    here = str(Path(__file__).parent / "clock")
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    snapshot = write_snapshot(folder / "snapshot")
    with ExitStack() as stack:
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        from openbook.serving.app import assemble
        from openbook.serving.launch import run
        from openbook.serving.launch.local import local_tiers

        system = System(Settings(), snapshot, folder, clock=clock)
        values = _values(layout, system, stack)
        for name, section in more.items():
            values[name] = {**values.get(name, {}), **section}
        system.settings = stack.enter_context(local_tiers(snapshot, parse(values)))
        system.let_in()
        n_cpus = 0 if layout == "apart" else 8
        stack.enter_context(run.local_serve(system.settings.serving, n_cpus, shows_logs=False))
        if layout == "nodes":
            system.node = stack.enter_context(node())
        for _ in range(n_nodes):
            system.nodes.append(stack.enter_context(node()))
        run.deploy(assemble(system.settings, load_encoder, load_generator), system.settings.serving)
        system.whole = Counter(processes().values())
        yield system


def _values(layout: str, system: System, stack: ExitStack) -> dict[str, Any]:
    """Settings of a layout; starts what `openbook up` is not to start."""
    first = free_ports(2)
    values = {name: dict(section) for name, section in LAYOUTS[layout].items()}
    common: dict[str, dict[str, Any]] = {
        "index": {},
        "cache": {"n_memory": 1},  # Redis is asked for nearly every question
        "encoder": {"num_cpus": 0.1},
        "generator": {"num_cpus": 0.1},
        "serving": {"http_port": first, "grpc_port": first + 1, "num_cpus": 0.1},
    }
    for name, section in common.items():
        values[name] = {**section, **values.get(name, {})}
    if layout == "split":
        redis = stack.enter_context(RedisServer())
        system.redis_proxy = stack.enter_context(TcpProxy(redis.port))
        values["cache"]["url"] = f"redis://127.0.0.1:{system.redis_proxy.port}/0"
        return values
    if layout == "recorded":
        system.redis = [stack.enter_context(RedisServer()) for _ in range(2)]
        values["cache"]["url"], values["access"]["url"] = (each.url for each in system.redis)
        os.environ["OPENBOOK_API_KEY"], system.key = mint("load", time.time(), [Scope.ASK])
        first = free_ports(N_METRICS_PORTS)
        values["serving"]["metrics_port"], os.environ["OPENBOOK_INDEX_SERVER__METRICS_PORT"] = first, str(first)
    shards = [shard for shard in range(N_SHARDS) for _ in range(N_REPLICAS)]
    proxied = 0 if layout != "recorded" else None
    system.index = [IndexReplica(system.snapshot, shard, proxied=i == proxied) for i, shard in enumerate(shards)]
    for replica in system.index:
        stack.callback(lambda each: end(each.process), replica)
    addresses = [replica.wait() for replica in system.index]
    if layout == "recorded":
        system.servers = system.folder / "servers"
        system.servers.write_text("\n".join(addresses))
        values["index"]["discover"] = f"file:{system.servers}"
        return values
    system.index_proxy = stack.enter_context(TcpProxy(system.index[0].port))
    values["index"]["addresses"] = [f"127.0.0.1:{system.index_proxy.port}", *addresses[1:]]
    return values


@contextmanager
def node(n_cpus: int = 8) -> "Iterator[subprocess.Popen[Any]]":
    """One more node of the Ray that runs, in a session of its own; it has joined."""
    import ray

    before = {each["NodeID"] for each in ray.nodes()}  # one that was killed is alive to Ray for some seconds more
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--address={address}"]
    command += [f"--num-cpus={n_cpus}", "--node-ip-address=127.0.0.1", "--object-store-memory=80000000"]
    # Ours listens on loopback, where Ray lets nodes be joined on request alone.
    env = {**os.environ, **ON_ALL_INTERFACES}
    with ExitStack() as stack:
        for _ in range(N_STARTS):  # on a machine with much to do a node gives up before its agents are there
            process = start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
            stack.callback(end, process)
            give_up = time.monotonic() + JOIN_TIMEOUT_S
            while process.poll() is None and time.monotonic() < give_up:
                joined = any(each["Alive"] and each["NodeID"] not in before for each in ray.nodes())
                if joined and _has_settled(process.pid):
                    yield process
                    return
                time.sleep(0.1)
        raise RuntimeError(f"a node of Ray did not join: {process.poll()}")


def _has_settled(pid: int) -> bool:
    """Whether a node's agents run: until they do, it may still give up."""
    with suppress(psutil.Error):
        raylets = [each for each in psutil.Process(pid).children(recursive=True) if "raylet" in each.name()]
        return any(time.time() - each.create_time() > SETTLED_S for each in raylets)
    return False
