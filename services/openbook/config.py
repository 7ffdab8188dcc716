"""Validated settings, one class per service. The only module that reads the environment or a settings file.

A settings file is YAML with the sections of `Settings`; `OPENBOOK_<SECTION>__<KEY>` in the environment wins over it.
Both are checked once, at the start, and a bad value stops the process with file, key and value.
"""

import os
import re
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from openbook.core.address import EXPECTED, is_address
from openbook.core.types import (
    MAX_BM25_WEIGHT,
    Decoding,
    Formulation,
    GenerationSettings,
    RetrievalSettings,
    RetrieverKind,
)
from openbook.errors import InvalidConfig, InvalidRequest, reason
from openbook.secret import SecretRedisUrl, SecretText, SecretToken, told, told_key

ENV_PREFIX = "OPENBOOK_"
INDEX_SERVER = "index_server"
MAX_K = 65_535  # less than shard.MAX_CANDIDATES: of as many it is not seen whether any was left out
GPU_MAX_K = 2048  # of FAISS
MAX_ROWS = 131_067  # of the longest queries, in the 2 GiB of one message
MAX_THREADS = 1024  # more than cores anywhere; of many times as many, FAISS dies of a signal
MAX_WORDS_CHARS = 1 << 16  # all questions of a call by words together: more would leave others no place to wait in

Port = Annotated[int, Field(ge=0, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Threads = Annotated[int, Field(ge=0, le=MAX_THREADS)]
# At most 11 days: HAProxy takes no timer of 25, and the clock of gRPC overflows at centuries.
Seconds = Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)]


def _checked_address(address: str) -> str:
    if not is_address(address):
        raise ValueError(EXPECTED)
    return address


Address = Annotated[str, AfterValidator(_checked_address)]


class Section(BaseModel):
    """Frozen, and loud about what it does not know."""

    # Hidden in pydantic's own message: ours shows what may be shown.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)


class ServerTls(Section):
    """Files in PEM. With a client CA, clients must show a certificate of it."""

    certificate: Path  # of the server, PEM
    key: Path  # of the certificate, PEM
    client_ca: Path | None = None  # who signs the certificates of clients; with none, any client may connect


class IndexServerSettings(Section):
    """One index server: one replica of one shard."""

    snapshot: Path  # a snapshot, or a root: a folder of them with a record of which one is served
    shard: Annotated[int, Field(ge=0)] = 0  # which one of the snapshot
    host: str = "127.0.0.1"  # address to listen on
    port: Port = 0  # 0 takes a free one
    # Of the connections without gRPC; 0 takes a free one, none: gRPC alone. Not encrypted, so not there with tls.
    frame_port: Port | None = 0
    # Of metrics over HTTP, for Prometheus: the first free one of 32 from here; 0 takes any, none serves none
    metrics_port: Port | None = None
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:\d+)$")] = "cpu"  # cpu, or a GPU: cuda:0 ...
    n_threads: Threads = 1  # of FAISS; 0 measures at the start how many pay
    huge_pages: bool = False  # a copy of a Flat or HNSW index in pages of 2 MB: faster, for as much memory of its own
    # Linux may push the index out of memory for vectors that are read; true: it stays, where `ulimit -l` allows as much
    keep_in_memory: bool = False
    max_k: Annotated[int, Field(ge=1, le=MAX_K)] = 1000  # hits in one request
    max_rows: Annotated[int, Field(ge=1, le=MAX_ROWS)] = 1024  # queries in one request
    # How many times as widely as its index was built a search may look: `nprobe`, `ef_search`, `rerank_factor`
    max_width: Positive = 64
    max_queued_rows: Positive = 4096  # queries waiting; beyond it the newest of who has most waiting is refused
    # Connections of clients; one more takes the place of an idle one, or of one of whoever has most, or is refused
    max_streams: Annotated[int, Field(ge=1, le=10_000)] = 64
    retain_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0  # a former snapshot that nobody names any more
    min_recall_at_10: Annotated[float, Field(ge=0, le=1)] = 0.0  # of what is prepared; above 0, it must be measured
    # URLs below which snapshots may be fetched into a root: s3://bucket/snapshots; none: from nowhere
    fetch_from: tuple[Annotated[str, Field(pattern=r"^(file|https?|s3|gs)://.")], ...] = ()
    # with none, only servers on loopback can be published to
    admin_token: Annotated[SecretToken, Field(min_length=16)] | None = None
    tls: ServerTls | None = None  # with none, connections are plain

    @model_validator(mode="after")
    def _goes_together(self) -> "IndexServerSettings":
        if self.device != "cpu" and self.max_k > GPU_MAX_K:
            raise ValueError(f"max_k must be at most {GPU_MAX_K} on {self.device}, got {self.max_k}")
        if self.keep_in_memory and (self.huge_pages or self.device != "cpu"):
            raise ValueError("keep_in_memory is for a mapped index: not with huge_pages, which copies it, nor on a GPU")
        frame_port = None if self.tls else self.frame_port
        ports = {"port": self.port, "metrics_port": self.metrics_port, "frame_port": frame_port}
        for (one, port), (other, its) in combinations(ports.items(), 2):
            if port and port == its:
                raise ValueError(f"{one} and {other} must differ, got {port} for both")
        return self


class ClientTls(Section):
    """Files in PEM. Certificate and key are for servers that ask who calls."""

    ca: Path  # who signs the certificates of servers, PEM
    certificate: Path | None = None  # our own, for servers that ask who calls, PEM
    key: Path | None = None  # of the certificate, PEM

    @model_validator(mode="after")
    def _both_or_none(self) -> "ClientTls":
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key must be given together")
        return self


class IndexClientSettings(Section):
    """How the serving tier reaches the index tier."""

    # host:port of every server, each says which shard it is; with none, `openbook up` starts its own
    addresses: tuple[Address, ...] = ()
    # in place of addresses, a list that is followed while they come and go: dns://host:port (all addresses of a name),
    # file:path (an address a line), ray://index:7000-7003 (those ports of each node with that resource)
    discover: Annotated[str, Field(pattern=r"^(file:.+|(dns|ray)://[^\s/:]+:\d+(-\d+)?)$")] | None = None
    timeout_s: Seconds = 2.0  # one call to one server
    wait_s: Annotated[float, Field(ge=0)] = 0.0  # at the start for a server of each shard; 0: not at all
    hedge_budget: Annotated[float, Field(ge=0, le=1)] = 0.05  # second calls for slow ones, as a share of all; 0: none
    tls: ClientTls | None = None  # with none, connections are plain
    server_name: str | None = None  # in the servers' certificates, if not their address, or the name after dns://
    admin_token: SecretToken | None = None  # for `openbook publish`

    @model_validator(mode="after")
    def _says_it_once(self) -> "IndexClientSettings":
        if self.addresses and self.discover:
            raise ValueError("addresses and discover must not be given together")
        return self

    @property
    def names_servers(self) -> bool:
        """Whether it says where any are."""
        return bool(self.addresses or self.discover)

    def at(self, addresses: tuple[str, ...]) -> "IndexClientSettings":
        """The same with these servers, whatever it named. Raises InvalidConfig: one is no host:port."""
        values = {**dict(self), "addresses": addresses, "discover": None}
        return section(IndexClientSettings, "arguments", **values)


class CacheSettings(Section):
    """The cache of query embeddings, and of answers if you like."""

    # with none, `openbook up` starts a Redis of its own; user and password may stand in it; rediss:// is encrypted
    url: SecretRedisUrl | None = None
    tls: ClientTls | None = None  # for rediss://; with none, certificates that this machine trusts
    timeout_s: Seconds = 0.05  # one round trip; longer than this is a miss
    ttl_s: Positive = 7 * 24 * 3600  # how long an entry is kept in Redis
    n_memory: Positive = 10_000  # embeddings kept in process, in front of Redis
    # of embeddings in Redis; float16 takes half the memory, and then cached and fresh ones differ in their bits
    dtype: Literal["float32", "float16"] = "float32"
    # answers kept in process, and as long as `ttl_s` in Redis, none of more than 100 kB; 0 keeps none. The search is
    # done for every question
    answers: Annotated[int, Field(ge=0)] = 0
    # with one, the same in every replica, nobody who does not know it can put entries into Redis that are believed
    secret: Annotated[SecretText, Field(min_length=16)] | None = None


Dtype = Literal["float32", "bfloat16", "float16", "auto"]


def _as_ray_gives_them(num_gpus: float) -> float:
    if num_gpus > 1 and num_gpus % 1:
        raise ValueError(f"above 1 GPU it must be a whole number, got {num_gpus:g}")
    return num_gpus


class ModelSettings(Section):
    """One model and the workers that run it."""

    model: str = "embedded"  # the default shipped with openbook, a hub name, or a folder
    device: str = "auto"  # auto, cpu, cuda, cuda:0 ...
    dtype: Dtype = "float32"  # auto: bfloat16 where it is the faster one
    n_threads: Threads = 0  # of torch; 0: OMP_NUM_THREADS, else all cores there are for it
    n_replicas: Positive = 1  # `split` only
    num_cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0  # reserved by each replica, `split` only
    # reserved by each replica: a fraction of one, or whole ones; under `fused` encoder and generator together
    num_gpus: Annotated[float, Field(ge=0), AfterValidator(_as_ray_gives_them)] = 0.0
    max_batch: Positive = 16  # questions computed at once
    max_queue: Positive = 256  # questions waiting; one more is refused


class EncoderSettings(ModelSettings):
    """The query encoder."""

    max_batch: Positive = 64
    passage_model: str = ""  # the encoder of the index's passages; empty: what `model` says, or is known of it


class GeneratorSettings(ModelSettings):
    """The generator."""

    max_tokens_in_flight: Positive = 65_536  # (passages x tokens of context and answers) at once: bounds memory


class ServedEncoderSettings(EncoderSettings):
    """The query encoder of an endpoint."""

    dtype: Dtype = "auto"  # auto: bfloat16 where it is the faster one
    n_threads: Threads = 1  # of torch; 0: OMP_NUM_THREADS, else all cores there are for it


class ServedGeneratorSettings(GeneratorSettings):
    """The generator of an endpoint."""

    dtype: Dtype = "auto"  # auto: bfloat16 where it is the faster one


class AnswerDefaults(Section):
    """What a request that leaves a field open gets, and the limits that no request may pass."""

    k: Positive = 5  # passages to read
    formulation: Formulation = Formulation.SEQUENCE  # how passages are marginalised out
    decoding: Decoding = Decoding.THOROUGH  # how RAG-Sequence scores its candidates
    n_beams: Positive = 4  # 1 is greedy
    max_new_tokens: Positive = 32  # of an answer
    length_penalty: float = 1.0  # above 0 longer answers are preferred
    timeout_s: Seconds = 30.0  # time from arrival within which an answer is worth having
    min_coverage: Annotated[float, Field(gt=0, le=1)] = 1.0  # answer if this share of the passages was searched
    # who finds the passages: the query, the question's words (the snapshot needs a BM25 index), or both
    retriever: RetrieverKind = RetrieverKind.DENSE
    # hybrid: the score is dense + so much of BM25's; with none, the ranks of both decide
    bm25_weight: Annotated[float, Field(ge=0, le=MAX_BM25_WEIGHT)] | None = None
    max_k: Positive = 100  # more are refused
    max_work: Positive = 100_000  # k x (300 + n_beams x max_new_tokens); more is refused, which bounds memory
    max_question_chars: Annotated[int, Field(ge=1, le=MAX_WORDS_CHARS)] = 2000  # longer questions are refused
    max_passages: Positive = 20  # of the caller's own in one request; more are refused
    max_passage_chars: Positive = 10_000  # longer ones are refused
    max_timeout_s: Seconds = 300.0  # longer ones are cut to this

    @model_validator(mode="after")
    def _can_be_served(self) -> "AnswerDefaults":
        for name, limit in (("k", self.max_k), ("timeout_s", self.max_timeout_s)):
            if getattr(self, name) > limit:
                raise ValueError(f"{name} must be at most max_{name} = {limit}, got {getattr(self, name)}")
        try:
            self.generation().work(self.k, self.max_work)
        except InvalidRequest as error:
            raise ValueError(str(error)) from None
        return self

    def retrieval(self) -> RetrievalSettings:
        """What a request that asks for nothing special retrieves."""
        return RetrievalSettings(
            k=self.k, min_coverage=self.min_coverage, retriever=self.retriever, bm25_weight=self.bm25_weight
        )

    def generation(self) -> GenerationSettings:
        """The decoding settings of a request that asks for nothing special."""
        return GenerationSettings(
            formulation=self.formulation,
            decoding=self.decoding,
            n_beams=self.n_beams,
            max_new_tokens=self.max_new_tokens,
            length_penalty=self.length_penalty,
        )


class ServingSettings(Section):
    """The endpoint."""

    # all in one process, or encoder and generator in replicas of their own
    topology: Literal["fused", "split"] = "fused"
    # HAProxy answers about twice as many questions a second; Serve's own, in Python, runs where that does not
    proxy: Literal["haproxy", "python"] = "haproxy"
    host: str = "127.0.0.1"  # address to listen on
    http_port: Annotated[Port, Field(ge=1)] = 8000  # of HTTP
    grpc_port: Annotated[Port, Field(ge=1)] = 9000  # of gRPC
    # Of each replica's own metrics, and of the index servers that `openbook up` starts: the first free one of 32 from
    # here; 0 takes any, none serves none
    metrics_port: Port | None = None
    # of ports 8000 and 9000, by HAProxy; with none, they are plain. Renewed files are taken up within seconds
    tls: ServerTls | None = None
    max_entries: Positive = 64  # questions in one batch, or texts in one call for embeddings; more are refused
    # of the ingress; 0: one, but where `openbook up` serves `fused` one for each GPU; without any, one for each core
    # and 4 GB, at most 4
    n_replicas: Annotated[int, Field(ge=0)] = 0
    num_cpus: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0  # reserved by each replica of the ingress
    # on a cluster, of the ingress and of each model: 1 keeps replicas apart, so that a lost node takes one of each
    max_replicas_per_node: Annotated[int, Field(ge=1, le=100)] | None = None
    # names of domains by which it may be asked where it listens on loopback and asks for no keys, such as those of a
    # proxy in front of it; addresses, names without a dot and those that nobody can register always may
    domains: tuple[Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")], ...] = ()
    # whose pages may ask from a browser, such as https://example.org; * for all
    cors_origins: tuple[Annotated[str, Field(pattern=r"^(\*|https?://[^/\s]+)$")], ...] = ()
    max_in_flight: Positive = 256  # questions admitted at once by one ingress replica; one more gets 429
    max_work_in_flight: Positive = 600_000  # of them together, as `answer.max_work` counts; what is beyond gets 429

    @model_validator(mode="after")
    def _proxy_has_tls(self) -> "ServingSettings":
        if self.tls and self.proxy == "python":
            raise ValueError("tls needs proxy: haproxy, for Serve's own proxy has none for gRPC")
        return self

    @model_validator(mode="after")
    def _has_two_ports(self) -> "ServingSettings":
        if self.http_port == self.grpc_port:
            raise ValueError(f"http_port and grpc_port must not be the same, got {self.http_port} twice")
        return self

    @property
    def http_url(self) -> str:
        """Where it answers over HTTP, as this machine opens it."""
        host = "localhost" if self.host == "0.0.0.0" else self.host  # which browsers do not all open
        return f"http{'s' if self.tls else ''}://{host}:{self.http_port}"

    @property
    def grpc_address(self) -> str:
        """Where it answers over gRPC."""
        return f"{self.host}:{self.grpc_port}"


Count = Annotated[int, Field(ge=1, lt=1 << 53)]


class Limits(Section):
    """How much one caller may ask for; none: as much as there are places for."""

    questions_per_minute: Count | None = None  # also those that only retrieve
    questions_per_day: Count | None = None  # from midnight to midnight, UTC
    tokens_per_minute: Count | None = None  # of answers: as many as were asked for (max_new_tokens)
    tokens_per_day: Count | None = None  # from midnight to midnight, UTC


OF_A_PROVIDER = r"^(https://|http://(127\.0\.0\.1|localhost)[:/])"
ScopeName = Literal["ask", "retrieve", "publish", "admin"]


class OidcSettings(Section):
    """Bearer tokens of an OpenID provider, beside keys or in their place."""

    issuer: Annotated[str, Field(pattern=OF_A_PROVIDER)]  # as its tokens name it
    audience: Annotated[str, Field(min_length=1)]  # what its tokens for us name
    # where its keys are; with none, where its configuration under /.well-known says
    jwks_url: Annotated[str, Field(pattern=OF_A_PROVIDER)] | None = None
    # what tokens may be signed by; none of them has a secret that we would have to know
    algorithms: Annotated[
        tuple[Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"], ...],
        Field(min_length=1),
    ] = ("RS256", "ES256")
    scopes_claim: str = "scope"  # names of scopes, in one text or as a list
    scopes: dict[str, ScopeName] = {  # what they are called there, and here
        "openbook:ask": "ask",
        "openbook:retrieve": "retrieve",
        "openbook:publish": "publish",
        "openbook:admin": "admin",
    }
    caller_claim: str = "sub"  # who calls
    tenant_claim: str | None = None  # his tenant; with none, he has none


class AccessSettings(Section):
    """Who may ask."""

    # Where keys are kept. none: nobody needs one, and the endpoint listens on loopback alone
    keys: Literal["none", "file", "redis"] = "none"
    path: Path | None = None  # of the file, for `file`; on a cluster every node must see it
    # of the Redis, for `redis`: one that forgets nothing, unlike the cache's; `openbook deploy serve` fills in its own
    url: SecretRedisUrl | None = None
    tls: ClientTls | None = None  # for rediss://; with none, certificates that this machine trusts
    # how long a key that was seen still lets in while file or Redis cannot be read; others are refused at once
    known_for_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    oidc: OidcSettings | None = None  # tokens that let in as keys do
    allow_anonymous: bool = False  # listen beyond loopback although nobody needs a key
    limits: Limits = Limits()  # of every caller whose key names no others

    @model_validator(mode="after")
    def _is_whole(self) -> "AccessSettings":
        if self.keys == "file" and self.path is None:
            raise ValueError("path must name the file where keys are kept")
        if not self.is_guarded and self.limits != Limits():
            raise ValueError("limits are of callers, who are known by keys or tokens alone: set keys")
        return self

    @property
    def is_guarded(self) -> bool:
        """Whether who asks must show who he is."""
        return self.keys != "none" or self.oidc is not None


class Settings(Section):
    """Everything `openbook.serving.app.build` needs."""

    index: IndexClientSettings = IndexClientSettings()
    cache: CacheSettings = CacheSettings()
    encoder: ServedEncoderSettings = ServedEncoderSettings()
    generator: ServedGeneratorSettings = ServedGeneratorSettings()
    answer: AnswerDefaults = AnswerDefaults()
    serving: ServingSettings = ServingSettings()
    access: AccessSettings = AccessSettings()

    @model_validator(mode="after")
    def _ray_gives_the_gpus(self) -> "Settings":
        if self.serving.topology == "fused":
            try:
                _as_ray_gives_them(self.encoder.num_gpus + self.generator.num_gpus)
            except ValueError as error:
                raise ValueError(f"encoder.num_gpus + generator.num_gpus, of one replica `fused`: {error}") from None
        return self

    @model_validator(mode="after")
    def _any_request_can_be_admitted(self) -> "Settings":
        if self.answer.max_work > self.serving.max_work_in_flight:
            limit = f"serving.max_work_in_flight = {self.serving.max_work_in_flight}"
            raise ValueError(f"answer.max_work must be at most {limit}, got {self.answer.max_work}")
        # All texts of a request enter the encoder's queue before any is taken out.
        at_once = {"answer.max_passages": self.answer.max_passages, "serving.max_entries": self.serving.max_entries}
        for limit, most in at_once.items():
            if self.encoder.max_queue < most:
                raise ValueError(f"encoder.max_queue must be at least {limit} = {most}, got {self.encoder.max_queue}")
        return self


class _Servers(Section):
    """What a settings file has for index servers."""

    index_server: IndexServerSettings


S = TypeVar("S", bound=Section)
Sources = Mapping[tuple[str, ...], str]
"""Where a value came from, by section and key, if not from the file; and by section, or (), all that gave any in it."""
NOWHERE: Sources = MappingProxyType({})


def load(path: Path | None = None, env: Mapping[str, str] | None = None) -> Settings:
    """Settings from a YAML file, overridden by the environment.

    Raises:
        InvalidConfig: the file cannot be read, or a key or value is not one of ours.
    """
    values, sources = _collect(path, env)
    source = str(path or "defaults")
    # One file may serve all processes, and what `openbook up` hands on is checked before anything starts. Which
    # snapshot its servers have, their command may say.
    _validated(_Servers, {INDEX_SERVER: {"snapshot": ".", **values.pop(INDEX_SERVER, {})}}, sources, source)
    return parse(values, source, sources)


def load_index_server(
    path: Path | None = None, env: Mapping[str, str] | None = None, **options: Any
) -> IndexServerSettings:
    """The section `index_server` of a file, overridden by the environment, overridden by options that are not None.

    Raises:
        InvalidConfig: as `load`.
    """
    sections, sources = _collect(path, env)
    given = {key: value for key, value in options.items() if value is not None}
    values, source = {**sections.get(INDEX_SERVER, {}), **given}, str(path or "openbook index serve")
    not_given = {keys: each for keys, each in sources.items() if keys[1:] not in {(key,) for key in given}}
    return _validated(IndexServerSettings, values, not_given, source, (INDEX_SERVER,))


def _collect(path: Path | None, env: Mapping[str, str] | None) -> tuple[dict[str, Any], dict[tuple[str, ...], str]]:
    """Sections of a file and the environment, and where what is not of the file alone came from."""
    values = _sections(path) if path else {}
    sources: dict[tuple[str, ...], str] = {}
    for name, text in sorted((os.environ if env is None else env).items()):
        section, separator, key = name.removeprefix(ENV_PREFIX).lower().partition("__")
        if not name.startswith(ENV_PREFIX) or not separator:
            continue
        source = sources[section, key] = f"environment variable {name}"
        for whole, in_file in (((), bool(values)), ((section,), section in values)):
            former = sources.get(whole, str(path) if in_file else "")
            sources[whole] = f"{former}, {source}" if former else source
        values.setdefault(section, {})[key] = _yaml(text, source)
    return values, sources


def parse(values: Mapping[str, Any], source: str = "arguments", sources: Sources = NOWHERE) -> Settings:
    """Settings from nested values, as they come from YAML or from a Serve config's `args`.

    Raises:
        InvalidConfig: names source, key, value and what was expected.
    """
    return _validated(Settings, values, sources, source)


def section(kind: type[S], source: str, **values: Any) -> S:
    """One section by itself, from the options of a command. Raises as `parse`."""
    return _validated(kind, values, NOWHERE, source)


def read(kind: type[S], path: Path) -> S:
    """A settings file that is one section by itself, whatever the environment says. Raises as `load`."""
    return _validated(kind, _sections(path), NOWHERE, str(path))


def read_mapping(kind: type[S], path: Path) -> S:
    """A settings file whose keys are those of one section, in no section. Raises as `load`."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise InvalidConfig(f"{path}: must map keys to values")
    if numbers := [key for key in values if not isinstance(key, str)]:
        raise InvalidConfig(f"{path}: keys must be words, got {numbers[0]!r}")
    return _validated(kind, values, NOWHERE, str(path))


_SAID = {"extra_forbidden": "no such key", "missing": "must be given"}
"""What pydantic says in words of its own."""


def _validated(
    kind: type[S], values: Mapping[str, Any], sources: Sources, source: str, within: tuple[str, ...] = ()
) -> S:
    lines = []
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        for problem in error.errors():
            given = problem["input"]
            is_counted = problem["type"] == "too_short" and isinstance(given, list | tuple)
            if is_counted and problem["ctx"]["actual_length"] < len(given):
                continue  # without the items that are wrong, which tell it themselves
            location = tuple(map(str, problem["loc"]))
            where = sources.get((*within, *location)[:2], source)
            said = _SAID.get(problem["type"], problem["msg"].removeprefix("Value error, "))
            said = re.sub("(?i)tuple", "list", said)  # YAML has no tuples
            lines.append(f"{where}: {told(kind, problem['type'], location, given)}{said}")
    # Out here, so that pydantic's error, which holds the values, is not this one's context.
    raise InvalidConfig("\n".join(lines))


def read_yaml(path: Path) -> Any:
    """What a file of YAML holds. Raises InvalidConfig."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: cannot be read: {reason(error)}") from None
    return _yaml(text, str(path))


def _sections(path: Path) -> dict[str, Any]:
    values = read_yaml(path)
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(section, dict) for section in values.values()):
        raise InvalidConfig(f"{path}: must map sections to keys and values")
    return values


class _Twice(yaml.MarkedYAMLError):
    """A key that its mapping has already."""


class _Loader(yaml.SafeLoader):
    """Safe, and loud about a key that its mapping has already: the first of two sections would be gone, unseen.

    A whole number is what stands there as it would be told. What YAML 1.1 makes another of (010 is eight, 1:30 ninety)
    stays text: a secret of digits is what was written.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # not constructed yet: what `<<` brings in may be said anew
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    raise _Twice(problem=told_key(key.value) or "a key", problem_mark=key.start_mark)
                seen.add((key.tag, key.value))
        return node


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int | str:
    number = loader.construct_yaml_int(node)
    return number if str(number) == node.value else str(node.value)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole)


def _yaml(text: str, source: str) -> Any:
    """What YAML makes of a text. Where it cannot, the place is named and not shown: a secret may stand there."""
    where = ""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        if error.problem_mark:
            where = f": line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
        if isinstance(error, _Twice):
            where += f": {error.problem} stands there a second time"
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date without such a day
        pass
    raise InvalidConfig(f"{source}: cannot be read as YAML{where}")
