"""The topology file: what runs where, said once. `openbook deploy render` makes all the rest from it."""

import re
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from openbook.config import MAX_THREADS, Positive, Section, Settings, parse
from openbook.errors import InvalidConfig
from openbook.serving.launch import ports
from openbook.serving.launch.environment import MAX_FOLDER
from openbook.telemetry import N_METRICS_PORTS

Name = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,42}$")]
FixedPort = Annotated[int, Field(ge=1, le=65535)]  # others are told of it: none that the system chooses
HAPROXY = "openbook/run"
"""In the home of the user on every machine, where HAProxy has its files."""
MAX_USER = MAX_FOLDER - len(f"/home//{HAPROXY}")
User = Annotated[str, Field(max_length=MAX_USER)]
Overrides = dict[str, dict[str, Any]]
"""Sections of `Settings`, as a Serve config's `args`."""
LOADS_WITHIN_S = 3600
"""How long an index server may take to read all of its files, and the endpoint waits for it."""
_FAMILY = "[a-z][0-9]+[a-z]*"
_CPUS = re.compile(
    rf"(?:{_FAMILY}-)?custom-(?P<custom>[1-9][0-9]*)-[0-9]+(?:-ext)?"
    rf"|{_FAMILY}-(?:standard|highmem|highcpu)-(?P<n>[1-9][0-9]*)(?:-[a-z]+)?"
)
"""In names of GCP's machines."""
_OTHERS = [
    ("Ray's dashboard", range(8265, 8266)),
    ("HAProxy", range(8404, 8405)),
    ("HAProxy", range(9101, 9102)),
    ("Ray's clients and workers", range(10001, 20_000)),
    ("Serve's replicas", range(30_000, 31_001)),
    ("Serve's replicas", range(40_000, 41_001)),
    ("Ray's agents", range(52_365, 52_366)),
]
"""What listens besides, of Ray all that has fixed ports or a range of its own."""
_OF_ALL = 1024
"""From this port on everybody may listen."""
_OF_KUBERAY = ("Ray's metrics, by KubeRay", range(8080, 8081))


class Ports(Section):
    """Where processes listen, on every kind of machine."""

    index: FixedPort = ports.ClusterPorts.index  # of shard 0 where one machine serves several; the others follow
    ray: FixedPort = ports.RAY_PORT  # of Ray's head
    redis: FixedPort = ports.ClusterPorts.redis  # of the cache
    keys: FixedPort = ports.ClusterPorts.keys  # of the Redis that has the keys
    http: FixedPort = ports.HTTP_PORT  # of the endpoint
    grpc: FixedPort = ports.GRPC_PORT  # of the endpoint
    metrics: FixedPort = ports.METRICS_PORT  # of each process: the first free one of 32 from here


class Index(Section):
    """The index tier."""

    shards: Positive  # of the snapshot
    replicas: Positive = 2  # of each shard, each on a machine of its own
    threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] = 2  # of FAISS, of each server
    # of each server, page cache included; of 10^9 bytes
    memory_gb: Annotated[float, Field(ge=0.001, allow_inf_nan=False)] = 8
    disk_gb: Positive = 100  # of each machine
    # its folder on the machines, which know their ~, and no variables
    snapshot: Annotated[str, Field(pattern=r"^[^$]+$")] = "~/openbook/snapshot"
    fetch: str | None = None  # a shell command that brings it there; with none, it lies there

    @property
    def memory_mb(self) -> int:
        """Of each server; of 10^6 bytes."""
        return round(self.memory_gb * 1000)

    @property
    def memory_bytes(self) -> int:
        """Of each server."""
        return self.memory_mb * 10**6


class Endpoint(Section):
    """The serving tier."""

    settings: Overrides = Field(default_factory=dict)  # the sections of a settings file, for every kind of machine
    gpu: Overrides = Field(default_factory=dict)  # over them where generators have GPUs
    cpu: Overrides = Field(default_factory=dict)  # over them where they have none
    min_workers: Annotated[int, Field(ge=0)] = 1  # machines with models
    max_workers: Positive = 4  # to which the autoscaler goes
    n_gpus: Positive = 1  # of each machine, or pod, with models where there are GPUs
    cpus: Positive = 4  # of each pod with models, on Kubernetes: of which it asks for nine tenths
    memory_gb: Positive = 16  # of each pod with models, on Kubernetes; of 10^9 bytes

    @model_validator(mode="after")
    def _begins_within_its_limit(self) -> "Endpoint":
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers must be at most max_workers = {self.max_workers}, got {self.min_workers}")
        return self


class Secrets(Section):
    """Files that `deploy/secrets.sh` makes: Ray's token, a CA, a certificate and its key."""

    folder: Path = Path("deploy/secrets")  # on the machine that deploys
    server_name: Name = "openbook"  # in the certificate, besides the addresses of the endpoint


class Cloud(Section):
    """What both clouds need."""

    region: str
    zone: str
    head: str  # the kind of machine
    index: str
    gpu: str  # with as many GPUs as endpoint.n_gpus
    cpu: str  # where there are no GPUs
    install: str  # a shell command after which ~/openbook/bin/openbook is there
    fetch: str | None = None  # in place of index.fetch
    ssh_user: User = "ubuntu"  # at most 19 letters: the sockets of HAProxy lie in his home


class Aws(Cloud):
    """Amazon's machines."""

    profile: str = "openbook"  # of the machines: may read wheel and snapshot, and start and end machines of it
    image: str = "resolve:ssm:/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id"
    gpu_image: str = (  # with NVIDIA's driver
        "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
    )


class Gcp(Cloud):
    """Google's machines."""

    project: str
    image: str = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
    gpu_image: str = (  # with NVIDIA's driver
        "projects/ubuntu-os-accelerator-images/global/images/family/ubuntu-accelerator-2404-amd64-with-nvidia-580"
    )
    accelerator: str = "nvidia-l4"
    cpus: dict[str, Positive] = Field(default_factory=dict)  # by kind of machine, where its name does not say how many

    @model_validator(mode="after")
    def _has_known_cpus(self) -> "Gcp":
        for key, kind in (("head", self.head), ("gpu", self.gpu), ("cpu", self.cpu)):
            if kind not in self.cpus and not _CPUS.fullmatch(kind):
                raise ValueError(f"{key} = {kind} does not say how many CPUs it has: add `cpus: {{{kind}: N}}`")
        return self

    def cpus_of(self, kind: str) -> int:
        """Of a kind of machine."""
        if kind in self.cpus:
            return self.cpus[kind]
        found = _CPUS.fullmatch(kind)
        assert found  # it was looked at
        return int(found["custom"] or found["n"])


class OnPremise(Section):
    """Machines that stand. Every worker serves the index, and models as far as it has cores."""

    head: str  # address
    workers: Annotated[tuple[str, ...], Field(min_length=1)]  # addresses
    ssh_user: User = "openbook"  # at most 19 letters: the sockets of HAProxy lie in his home
    ssh_key: str = "~/.ssh/id_ed25519"  # on the machine that deploys
    install: str  # as for a cloud
    fetch: str | None = None  # in place of index.fetch
    has_gpus: bool = False
    worker_cpus: Positive | None = None  # that Ray may give away on each; with none, all

    @model_validator(mode="after")
    def _has_each_once(self) -> "OnPremise":
        hosts = [self.head, *self.workers]
        if twice := [host for host in dict.fromkeys(hosts) if hosts.count(host) > 1]:
            raise ValueError(f"head and workers must be different machines, got {', '.join(twice)} more than once")
        return self


class Kubernetes(Section):
    """A cluster with KubeRay."""

    namespace: Name = "openbook"
    image: str  # of the serving tier
    index_image: str  # of the index tier
    redis_image: str = "docker.io/library/redis:7.4-alpine"
    prometheus_image: str = "docker.io/prom/prometheus:v2.53.4"  # of Compose's profile `metrics`
    grafana_image: str = "docker.io/grafana/grafana:10.4.2"  # of Compose's profile `metrics`
    ray_version: str  # in the image
    claim: Name = "openbook-snapshot"  # a volume that many read, with the snapshot in it


class Topology(Section):
    """The whole file."""

    name: Name = "openbook"  # of Ray's cluster, Compose's project, Prometheus's job
    index: Index
    endpoint: Endpoint = Endpoint()
    ports: Ports = Ports()
    secrets: Secrets = Secrets()
    aws: Aws | None = None
    gcp: Gcp | None = None
    on_premise: OnPremise | None = None
    kubernetes: Kubernetes | None = None
    runbooks: str = "docs/runbooks.md"  # where alerts send their reader: a URL, or a file of this folder
    # host:port of each Alertmanager that Prometheus tells of alerts; with none, they stand on its own page alone
    alertmanagers: tuple[Annotated[str, Field(pattern=r"^[^\s/]+:[0-9]+$")], ...] = ()

    @model_validator(mode="after")
    def _can_be_served(self) -> "Topology":
        listen = [(each, range(port, port + 1)) for each, port in self.ports.model_dump().items()]
        others = [*_OTHERS, *([_OF_KUBERAY] if self.kubernetes else [])]
        listen = [*others, *listen, ("index", self.index_ports), ("metrics", self.metrics_ports)]
        for name, taken in listen:
            if taken.stop > 1 << 16:
                raise ValueError(f"ports: {name} must be at most 65535, got {_shown(taken)}")
        for (name, one), (other, another) in combinations(listen, 2):
            if name != other and one.start < another.stop and another.start < one.stop:
                raise ValueError(f"ports: {_shown(one)} ({name}) and {_shown(another)} ({other}) must not overlap")
        for each in (self.aws, self.gcp, self.on_premise):
            if each and each.ssh_user != "root" and self.low_port:
                who = f"ssh_user = {each.ssh_user}"
                raise ValueError(f"ports: {self.low_port} is below {_OF_ALL}, where {who} may not listen")
        for has_gpus in (True, False):
            try:
                told = parse(self.settings(has_gpus), "endpoint")
            except InvalidConfig as error:
                raise ValueError(str(error)) from None
            for name, tls in (("index", told.index.tls), ("serving", told.serving.tls)):
                if tls:  # of which nothing would be left, not even who may connect
                    own = f"OPENBOOK_{name.upper()}__TLS of the endpoint's container or unit (docs/keys.md#tls)"
                    why = f"what is rendered has the files of `secrets`. Certificates of clients: {own}"
                    raise ValueError(f"endpoint: {name}.tls cannot be set here: {why}")
        return self

    @property
    def low_port(self) -> int | None:
        """One where root alone may listen, unless somebody is allowed to."""
        return next((port for port in self.ports.model_dump().values() if port < _OF_ALL), None)

    @property
    def index_ports(self) -> range:
        """Of a machine that serves every shard."""
        return range(self.ports.index, self.ports.index + self.index.shards)

    @property
    def metrics_ports(self) -> range:
        """Of a machine: each process takes the first that is free."""
        return range(self.ports.metrics, self.ports.metrics + N_METRICS_PORTS)

    @property
    def served(self) -> Settings:
        """What the endpoint is told, where there are no GPUs."""
        return parse(self.settings(has_gpus=False))

    def index_server(self, shard: int) -> list[str]:
        """Arguments of the program of a container that serves a shard, of the snapshot in /snapshot."""
        port, metrics = self.ports.index, self.ports.metrics
        where = ["--shard", str(shard), "--host", "0.0.0.0", "--port", str(port), "--metrics-port", str(metrics)]
        return ["index", "serve", "/snapshot", *where, "--threads", str(self.index.threads)]

    def redis_server(self, keeps: bool) -> list[str]:
        """The program of a container: the Redis of the keys, which keeps them, or that of the cache, which forgets."""
        port = self.ports.keys if keeps else self.ports.redis
        evicts = ["--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]
        how = ["--appendonly", "yes", "--appendfsync", "always"] if keeps else evicts
        return ["redis-server", "--port", str(port), "--save", "", "--dir", "/data", *how]

    def settings(self, has_gpus: bool, **more: dict[str, Any]) -> Overrides:
        """The `args` of the Serve config: what holds everywhere, then what holds here."""
        found: Overrides = {}
        for layer in (self.endpoint.settings, self.endpoint.gpu if has_gpus else self.endpoint.cpu, more):
            for section, values in layer.items():
                found[section] = {**found.get(section, {}), **values}
        return found

    def redis_of_ours(self, *has_gpus: bool) -> list[str]:
        """Which Redis the endpoint needs of us, "cache" and "keys", on any of these kinds of machines."""
        needs = {"cache": ports.needs_cache, "keys": ports.needs_keys}
        return [name for name, is_needed in needs.items() if any(is_needed(self.settings(each)) for each in has_gpus)]


def _shown(ports: range) -> str:
    return str(ports.start) if len(ports) == 1 else f"{ports.start}..{ports.stop - 1}"
