"""The composition root: settings in, a Serve application out. `fused` in one process, or `split` into deployments."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from prometheus_client import REGISTRY
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from openbook import config
from openbook.cache.redis import open_answers, open_embeddings
from openbook.config import GeneratorSettings, ModelSettings, ServedEncoderSettings, Settings
from openbook.core.space import Space
from openbook.errors import InvalidConfig
from openbook.index.client.metrics import TierMetrics
from openbook.index.client.opening import open_index
from openbook.logs import setup_logging
from openbook.processes import loading, threads
from openbook.rag.pipeline import Pipeline
from openbook.rag.ports import Generator
from openbook.serving.access.exposure import check_exposure
from openbook.serving.access.gate import open_gate
from openbook.serving.endpoint.ingress import AnswerIngress
from openbook.serving.endpoint.load import tell
from openbook.serving.endpoint.service import AnswerService
from openbook.serving.nodes import source_on_ray
from openbook.serving.workers.encoder import EncoderDeployment, EncoderLoader, EncoderModel, LocalEncoder, RemoteEncoder
from openbook.serving.workers.generator import (
    GeneratorDeployment,
    GeneratorLoader,
    GeneratorModel,
    LocalGenerator,
    RemoteGenerator,
)
from openbook.serving.workers.hop import over_grpc
from openbook.serving.workers.queue import Load
from openbook.serving.workers.routing import AnsweringRouter
from openbook.serving.workers.worker import Replica, apart
from openbook.telemetry import MetricsServer
from openbook.tracing.spans import setup_tracing

log = logging.getLogger(__name__)

SomeModel = TypeVar("SomeModel", bound=ModelSettings)

GRACE_S = 5.0
"""For a replica that is told to stop, beyond the time that any question may take."""

HEALTH_CHECK_S = 1.0
"""Between two of Serve's looks at a replica: one that died is missed, and its successor started, after at most this."""

ENVIRONMENT = {
    # Of a thread that waits for the others' part of a product, before it sleeps: 3 ms. libgomp's own default, which
    # OMP_WAIT_POLICY in our environment would change.
    "GOMP_SPINCOUNT": "300000",
    # A pool of its own, as many threads as cores, for what one does in milliseconds; begun while the model loads, it
    # would give way to everybody for ever: see `apart`.
    "TOKENIZERS_PARALLELISM": "false",
    # Of those that call each other: what a message may hold is checked where it comes in.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": "-1",
}
"""Of a replica."""

SPARE_PLACES = 32
"""Beyond those admitted: for the requests that we refuse ourselves, with a reason, and for health checks."""


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application from the `args` of a Serve config: the sections of `Settings`.

    Raises:
        InvalidConfig: an unknown key, a bad value, no address of the index tier or the cache, or nothing said about
            who may ask.
    """
    settings = config.parse(args, "serve args")
    check_exposure("what is deployed on a cluster", settings.access)  # Serve knows where it listens, we do not
    if settings.serving.tls:
        raise InvalidConfig(
            "serving.tls is for `openbook up`; on a cluster HAProxy is told otherwise: docs/keys.md#tls"
        )
    return assemble(_with_threads(settings), make_encoder, make_generator)


def _with_threads(settings: Settings) -> Settings:
    """With as many threads as a model's replica has CPUs, where they are left open: Serve calls us in a task of its
    own, whose cores and OMP_NUM_THREADS say nothing of those of replicas.
    """

    def threaded(model: SomeModel) -> SomeModel:
        of = model if settings.serving.topology == "split" else settings.serving
        return model.model_copy(update={"n_threads": model.n_threads or max(1, int(of.num_cpus))})

    return settings.model_copy(
        update={"encoder": threaded(settings.encoder), "generator": threaded(settings.generator)}
    )


def make_encoder(settings: ServedEncoderSettings) -> EncoderModel:
    """The encoder that the settings name, for questions. Raises InvalidModel."""
    from openbook.models.pair import EncoderPair

    return EncoderPair.load(on_its_gpu(settings))


def make_generator(settings: GeneratorSettings) -> GeneratorModel:
    """The generator that the settings name. Raises InvalidModel."""
    from openbook.models.generator import RagGenerator

    return RagGenerator.load(on_its_gpu(settings))


def on_its_gpu(model: SomeModel) -> SomeModel:
    """A model's settings, with one of the GPUs that this replica sees for its own: each on a node takes another, in
    turn. With `num_gpus` Ray shows it no others.
    """
    from openbook.models.checkpoint import devices_of

    devices = devices_of(model.device)
    if len(devices) == 1:
        return model
    rank = serve.get_replica_context().rank.local_rank
    return model.model_copy(update={"device": devices[rank % len(devices)]})


def assemble(settings: Settings, make_encoder: EncoderLoader, make_generator: GeneratorLoader) -> serve.Application:
    """The application with models of the caller's choice; the loaders run in the replicas.

    Raises:
        InvalidConfig: no address of the index tier or the cache.
    """
    if not settings.index.names_servers:
        raise InvalidConfig("index.addresses or index.discover must name at least one server, got none")
    if settings.cache.url is None:
        raise InvalidConfig("cache.url must name a Redis server, got none")
    if settings.access.keys == "redis" and settings.access.url is None:
        raise InvalidConfig("access.url must name the Redis server that has the keys, got none")
    encoder, generator = settings.encoder, settings.generator
    if settings.serving.topology == "split":
        return _ingress(settings, n_threads=1, num_gpus=0).bind(
            settings,
            _model("encoder", EncoderDeployment, encoder, settings).bind(encoder, make_encoder, settings.serving),
            _model("generator", GeneratorDeployment, generator, settings).bind(
                generator, make_generator, settings.serving
            ),
        )
    n_threads = max(threads(encoder.n_threads), threads(generator.n_threads))
    return _ingress(settings, n_threads, encoder.num_gpus + generator.num_gpus).bind(
        settings, make_encoder, make_generator
    )


class Ingress(AnswerIngress, Replica):
    """The endpoint with everything behind it: the models in this process (`fused`) or behind handles (`split`).

    Raises:
        InvalidModel: a model cannot be loaded.
        InvalidConfig: the index tier gives fewer hits than `answer.k`.
        ShardUnavailable: the index tier cannot be reached, nor as much of it as `answer.min_coverage` asks for.
        SnapshotMismatch: the index was not built by this encoder.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: Settings,
        encoder: EncoderLoader | DeploymentHandle,
        generator: GeneratorLoader | DeploymentHandle,
    ) -> None:
        setup_logging("ingress")
        setup_tracing("ingress")
        # While it waits for the index it answers nobody, and `OpenbookEndpointLost` asks for a process of its role.
        metrics = MetricsServer("ingress-starting", settings.serving.host, settings.serving.metrics_port)
        gate = open_gate(settings)  # before anything is loaded: without keys there is nothing to serve
        if gate:
            await gate.ask_early()
        the_encoder: RemoteEncoder | LocalEncoder
        the_generator: Generator
        load: Callable[[], Load] | None = None
        min_coverage = settings.answer.min_coverage
        with loading():
            if isinstance(encoder, DeploymentHandle):
                the_encoder = await RemoteEncoder.connect(over_grpc(encoder), settings.encoder)
            else:
                the_encoder = LocalEncoder(apart(lambda: encoder(settings.encoder)), settings.encoder)
            asks_for = Space(f"query encoder {settings.encoder.model!r}", the_encoder.space, the_encoder.dimension)
            index = await open_index(settings.index, asks_for, source_on_ray(settings.index), min_coverage)
            if settings.answer.k > index.max_k:
                limit = f"index_server.max_k = {index.max_k}"
                raise InvalidConfig(f"answer.k must be at most {limit}, got {settings.answer.k}")
            if isinstance(generator, DeploymentHandle):
                the_generator = await RemoteGenerator.connect(over_grpc(generator), settings.generator)
            else:
                local = LocalGenerator(apart(lambda: generator(settings.generator)), settings.generator)
                local.warm_up()
                the_generator, load = local, local.load
        REGISTRY.register(TierMetrics(index))
        cache, answers = open_embeddings(settings.cache), open_answers(settings.cache)
        pipeline = Pipeline(the_encoder, index, index, the_generator, cache, settings.answer, answers=answers)
        quotas = gate.quotas if gate else None
        check_ready = partial(index.connect, min_coverage)
        service = AnswerService(pipeline, settings, check_ready, quotas, lambda: index.named, load)
        super().__init__(service, gate)
        tell(service.load)
        metrics.become("ingress")
        log.info("%s: snapshot %s, %d passages", settings.serving.topology, index.snapshot_id, index.n_passages)


def _ingress(settings: Settings, n_threads: int, num_gpus: float) -> serve.Deployment:
    serving = settings.serving
    n_ongoing = serving.max_in_flight + SPARE_PLACES
    return _deployment(
        "ingress", serve.ingress()(Ingress), n_ongoing, n_threads, serving.num_cpus, num_gpus, _grace_s(settings)
    ).options(num_replicas=max(1, serving.n_replicas), max_replicas_per_node=serving.max_replicas_per_node)


def _grace_s(settings: Settings) -> float:
    return settings.answer.max_timeout_s + GRACE_S


def _model(name: str, kind: type[Any], model: ModelSettings, settings: Settings) -> serve.Deployment:
    # All that its own queue holds, and the batch under way: the queue refuses with a reason, Serve without.
    n_ongoing = model.max_queue + model.max_batch + SPARE_PLACES
    n_threads = threads(model.n_threads)
    return _deployment(name, kind, n_ongoing, n_threads, model.num_cpus, model.num_gpus, _grace_s(settings)).options(
        num_replicas=model.n_replicas,
        max_replicas_per_node=settings.serving.max_replicas_per_node,
        request_router_config=RequestRouterConfig(request_router_class=AnsweringRouter),
    )


def _deployment(
    name: str, kind: type[Any], n_ongoing: int, n_threads: int, num_cpus: float, num_gpus: float, grace_s: float
) -> serve.Deployment:
    return serve.deployment(
        kind,
        name=name,
        max_ongoing_requests=n_ongoing,
        max_queued_requests=n_ongoing,
        health_check_period_s=HEALTH_CHECK_S,
        max_constructor_retry_count=1,  # a wrong path stays wrong: say so at once, not after 20 loads
        graceful_shutdown_timeout_s=grace_s,
        max_surge_percent=100,  # in an update the new replicas answer before the old ones stop
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        ray_actor_options={
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            # Ray gives a replica with one CPU or less one thread, whatever the settings say.
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(n_threads), **ENVIRONMENT}},
        },
    )
