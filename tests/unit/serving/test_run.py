"""What `openbook up` hands to Serve."""

import asyncio
import os
import socket
import subprocess
import tempfile
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from prometheus_client import CollectorRegistry
from ray import cloudpickle, serve
from ray.serve.schema import (
    ApplicationStatus,
    ApplicationStatusOverview,
    DeploymentStatus,
    DeploymentStatusOverview,
    DeploymentStatusTrigger,
    ReplicaRank,
    ServeStatus,
)

from openbook.cache.redis import TieredCache
from openbook.config import ServingSettings, Settings, parse
from openbook.errors import InvalidConfig, InvalidModel, StartupError
from openbook.processes import free_port, free_ports
from openbook.serving import app
from openbook.serving.launch import fitting, run, stop
from openbook.serving.workers.routing import AnsweringRouter


def test_secrets_reach_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = parse(
        {
            "index": {"addresses": ["127.0.0.1:7000"], "admin_token": "correct-horse-battery"},
            "cache": {"url": "redis://:staple@127.0.0.1:6379/0"},
        }
    )
    deployed: list[Any] = []
    monkeypatch.setattr(run, "local_serve", lambda *_: nullcontext())
    monkeypatch.setattr(run, "deploy", lambda application, *_: deployed.append(application))
    with run.running(settings):
        (application,) = deployed
    arrived, *_ = cloudpickle.loads(cloudpickle.dumps(application._bound_deployment.init_args))
    assert isinstance(arrived, Settings)
    assert arrived == fitting.fitted(settings)
    assert arrived.index.admin_token is not None
    assert arrived.index.admin_token.get_secret_value() == "correct-horse-battery"


def test_an_endpoint_counts_as_one_once_it_has_as_much_of_its_index_as_it_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or nobody is called while it waits: the alert asks for a process of this role. It has all that settings name."""
    roles, asked, made = list[str](), list[float](), list[Any]()
    warmed, gates, told = list[bool](), list[Any](), list[Any]()

    async def connect(min_coverage: float) -> None:
        asked.append(min_coverage)

    async def open_index(settings: Any, queries: Any, source: Any, min_coverage: float) -> Any:
        assert roles == ["ingress-starting"]
        assert source.name == "ray://index:7000-7001"
        await connect(min_coverage)
        return SimpleNamespace(connect=connect, snapshot_id="snapshot", n_passages=1, max_k=1000)

    (tmp_path / "keys").touch()
    model = SimpleNamespace(space="fingerprint", dimension=2, warm_up=lambda: warmed.append(True), load="load")
    for name in ("setup_logging", "setup_tracing", "LocalEncoder", "LocalGenerator"):
        monkeypatch.setattr(app, name, lambda *_, **__: model)
    monkeypatch.setattr(app, "Pipeline", lambda *_, answers: made.append(answers))
    monkeypatch.setattr(app, "open_index", open_index)
    monkeypatch.setattr(app, "TierMetrics", lambda index: CollectorRegistry())
    monkeypatch.setattr(app, "REGISTRY", CollectorRegistry())
    monkeypatch.setattr(app, "AnswerService", lambda *them: made.extend(them[2:4]) or SimpleNamespace(load=them[5]))
    monkeypatch.setattr(app, "tell", told.append)
    monkeypatch.setattr(
        "openbook.serving.endpoint.ingress.AnswerIngress.__init__", lambda replica, service, gate: gates.append(gate)
    )
    monkeypatch.setattr(
        app, "MetricsServer", lambda role, *_: roles.append(role) or SimpleNamespace(become=roles.append)
    )

    async def scenario() -> None:
        replica: Any = app.Ingress.__new__(app.Ingress)
        settings = parse(
            {
                "index": {"discover": "ray://index:7000-7001"},
                "answer": {"min_coverage": 0.5},
                "cache": {"url": "redis://127.0.0.1:1/0", "answers": 9},
                "access": {"keys": "file", "path": str(tmp_path / "keys")},
            }
        )
        await replica.__init__(settings, lambda _: None, lambda _: None)
        answers, check_ready, quotas = made
        await check_ready()
        assert isinstance(answers, TieredCache)
        (gate,) = gates
        assert quotas is gate.quotas
        assert told == ["load"]

    asyncio.run(scenario())
    assert (roles, asked, warmed) == (["ingress-starting", "ingress"], [0.5, 0.5], [True])


def test_an_endpoint_whose_index_has_fewer_hits_than_its_questions_ask_for_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else all would fail that say nothing of k, and it would count as ready."""

    async def open_index(*_: Any) -> Any:
        return SimpleNamespace(max_k=4)

    for name in ("setup_logging", "setup_tracing", "MetricsServer"):
        monkeypatch.setattr(app, name, lambda *_: None)
    monkeypatch.setattr(app, "LocalEncoder", lambda *_: SimpleNamespace(space="fingerprint", dimension=2))
    monkeypatch.setattr(app, "open_index", open_index)
    replica: Any = app.Ingress.__new__(app.Ingress)
    settings = parse({"cache": {"url": "redis://127.0.0.1:1/0"}})
    with pytest.raises(InvalidConfig, match=r"answer\.k must be at most index_server\.max_k = 4, got 5"):
        asyncio.run(replica.__init__(settings, lambda _: None, lambda _: pytest.fail("it was loaded")))


def test_what_was_asked_has_its_time_when_the_endpoint_stops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As long as the settings say that an answer may take, also when HAProxy begins anew."""
    given: list[Any] = []

    def local_serve(*arguments: Any) -> nullcontext[None]:
        given.extend(arguments)
        return nullcontext()

    monkeypatch.setattr(run, "local_serve", local_serve)
    monkeypatch.setattr(run, "update", lambda settings: None)
    there = {"index": {"addresses": ["a:1"]}, "cache": {"url": "redis://b"}}
    with run.running(parse({**there, "answer": {"max_timeout_s": 1000}})):
        serving, _, _, stops_within_s = given
    assert stops_within_s > 1000
    assert int(run.serve_flags(serving, tmp_path, stops_within_s)["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > 1000


def test_replicas_that_still_start_are_not_waited_for_when_the_endpoint_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no answers to finish. One that answers has its time, and Serve the time to tell all of them."""
    states = {f"SERVE_REPLICA::openbook#ingress#{state}": state for state in ("STARTING", "RUNNING")}
    starts, answers = states
    alive, n_waits = set(states), 0

    class Controller:
        """As Serve's, of which Ray would make an actor."""

        def __getattr__(self, method: str) -> Any:
            return SimpleNamespace(remote=lambda *_: getattr(self, f"_{method}")())

        def _delete_apps(self) -> None:
            states.clear()

    def sleep(seconds: float) -> None:
        nonlocal n_waits
        n_waits += 1
        assert alive >= {starts}
        assert n_waits <= 3, "it waits for what starts"
        if n_waits == 3:
            alive.remove(answers)

    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(ray, "kill", alive.remove)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda _: [{"name": name} for name in alive])
    monkeypatch.setattr(stop.time, "sleep", sleep)
    stop.end_application(Controller(), "openbook", dict(states), 60)
    assert (n_waits, alive) == (3, set())


def test_a_first_start_that_is_interrupted_waits_for_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which Serve would let come up first, minutes with large models, and then end. Ray's end is that of all."""

    def told(method: str) -> Any:
        assert method == "get_serve_instance_details", "Serve is told"
        replicas = [{"actor_name": name, "state": "STARTING"} for name in "ab"]
        details = {"applications": {"openbook": {"deployments": {"ingress": {"replicas": replicas}}}}}
        return SimpleNamespace(remote=lambda: details)

    controller = type("Controller", (), {"__getattr__": lambda _, method: told(method)})()
    monkeypatch.setattr(ray, "get", lambda value, timeout: value)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: controller)
    monkeypatch.setattr(serve, "shutdown", lambda: told("shutdown"))
    stop.stop_serve("openbook", 60)


@pytest.fixture
def flags_of_ray(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What Rays of our own would be started with, which none is."""
    found: list[dict[str, str]] = []

    def init(**options: Any) -> None:
        found.append(dict(os.environ))
        raise OSError("no Ray in this test")

    monkeypatch.setattr(ray, "init", init)
    return found


def test_sockets_find_room_wherever_temporary_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags_of_ray: list[dict[str, str]]
) -> None:
    """Those of HAProxy, whose paths have a node's id in them, and Ray's."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    for place in (tmp_path / ("d" * 100), Path("/var/tmp")):
        place.mkdir(exist_ok=True)
        monkeypatch.setenv("TMPDIR", str(place))
        monkeypatch.setattr(tempfile, "tempdir", None)
        serving = ServingSettings(http_port=free_port(), grpc_port=free_port())
        with pytest.raises(StartupError, match="no Ray"), run.local_serve(serving, num_cpus=1):
            pass
        told = flags_of_ray.pop()
        folder, name = os.path.split(told["RAY_SERVE_HAPROXY_SOCKET_PATH"])
        assert len(f"{folder}/{ray.NodeID.from_random().hex()}/{name}") <= 97
        assert len(f"{told['RAY_TMPDIR']}/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store") <= 107
        assert Path(told["RAY_SERVE_HAPROXY_BINARY_PATH"]).is_relative_to(place), "programs may not run in /tmp"
        assert (told["RAY_TMPDIR"] == "/var/tmp") == (place == Path("/var/tmp"))


def test_haproxys_program_imports_nothing_that_lies_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "grpc.py").write_text("raise SystemExit('somebody else')")
    program = run.serve_flags(ServingSettings(), tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    said = subprocess.run([program], cwd=tmp_path, capture_output=True, text=True, check=False).stderr
    assert "'-f' is not in list" in said


def test_a_place_where_no_program_may_run_is_named_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "chmod", lambda path, mode: None)  # as if it were mounted noexec
    with pytest.raises(StartupError, match=rf"{tmp_path}: .* TMPDIR"):
        run.serve_flags(ServingSettings(), tmp_path)
    run.serve_flags(ServingSettings(proxy="python"), tmp_path)


NO_ROOM = "1 replicas that have taken more than 30s to be scheduled. Resources required: {'GPU': 1.0}"


def told(status: ApplicationStatus, message: str = "") -> ServeStatus:
    """What Serve says of our application."""
    of_one = DeploymentStatusOverview(DeploymentStatus.UPDATING, DeploymentStatusTrigger.UNSPECIFIED, {}, message)
    return ServeStatus(applications={run.APPLICATION: ApplicationStatusOverview(status, "", 0.0, {"Ingress": of_one})})


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> list[ServeStatus]:
    """What Serve says, one thing after the other; the last again and again."""
    found: list[ServeStatus] = []
    monkeypatch.setattr(serve, "run_many", lambda targets, wait_for_applications_running: None)
    monkeypatch.setattr(serve, "status", lambda: found.pop(0) if found[1:] else found[0])
    monkeypatch.setattr(run, "_await_ready", lambda serving: None)
    monkeypatch.setattr(run, "POLL_S", 0.0)
    return found


def test_a_deployment_ends_when_it_runs_or_fails(says: list[ServeStatus]) -> None:
    says += [told(ApplicationStatus.DEPLOYING), told(ApplicationStatus.DEPLOYING, NO_ROOM)]
    says += [told(ApplicationStatus.RUNNING)]
    run.deploy(None, ServingSettings())
    says[:] = [
        told(ApplicationStatus.DEPLOYING),
        told(ApplicationStatus.DEPLOY_FAILED, "openbook.errors.InvalidModel: m"),
    ]
    with pytest.raises(InvalidModel, match=r"^m$"):
        run.deploy(None, ServingSettings())


def test_a_deployment_that_finds_no_room_ends_in_time_or_when_nobody_wants_it_any_more(
    says: list[ServeStatus],
) -> None:
    says += [told(ApplicationStatus.DEPLOYING, NO_ROOM)]
    with pytest.raises(StartupError, match=r"does not run after 0 s: Ingress UPDATING 1 replicas .*'GPU'"):
        run.deploy(None, ServingSettings(), timeout_s=0.0)
    wanted = [True, True, False]
    with pytest.raises(StartupError, match="Ingress UPDATING 1 replicas"):
        run.deploy(None, ServingSettings(), is_wanted=lambda: wanted.pop(0))
    assert not wanted


def test_systems_on_one_machine_share_no_ports(tmp_path: Path) -> None:
    """Serve's gRPC ports can be listened on by several: each would get some of the other's questions."""
    flags = [run.serve_flags(ServingSettings(), tmp_path) for _ in range(2)]
    for kind in ("HTTP", "GRPC"):
        firsts = {int(each[f"RAY_SERVE_DIRECT_INGRESS_MIN_{kind}_PORT"]) for each in flags}
        assert len(firsts) == 2
        assert all(20_000 <= first < 30_000 for first in firsts)


def test_replicas_that_die_one_after_the_other_never_use_up_the_ports(tmp_path: Path) -> None:
    """Serve leaves a port alone for a while after its replica, by default longer than any answer may take."""
    flags = run.serve_flags(ServingSettings(), tmp_path, stops_within_s=3630)
    a_second = run.N_REPLICA_PORTS / float(flags["RAY_SERVE_PORT_QUARANTINE_S"])
    assert a_second > 10


def test_what_a_replica_leaves_behind_is_little(tmp_path: Path) -> None:
    """Ray keeps the logs of ended ones until it ends itself, in a container in memory; the same lines stand on our
    standard error.
    """
    flags = run.serve_flags(ServingSettings(), tmp_path)
    n_files = 1 + int(flags["RAY_ROTATION_BACKUP_COUNT"])
    assert n_files * int(flags["RAY_ROTATION_MAX_BYTES"]) <= 8 << 20


def test_ports_in_a_row_are_free() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        first = free_ports(100)
        assert taken.getsockname()[1] not in range(first, first + 100)
        for port in range(first, first + 100):
            with socket.socket() as probe:
                probe.bind(("", port))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"serving": {"n_replicas": 2}}, 4),
        ({"serving": {"n_replicas": 3}}, 2),
        ({"serving": {"n_replicas": 20}}, 1),
        ({"serving": {"n_replicas": 2}, "generator": {"n_threads": 3}}, 3),
        ({"serving": {"n_replicas": 2, "topology": "split"}}, 0),
        ({"serving": {"topology": "split"}, "generator": {"n_replicas": 8}}, 1),
        ({"serving": {"n_replicas": 1}}, 0),
        ({}, 2),
    ],
)
def test_generators_of_one_machine_share_its_cores(
    values: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "threads", lambda: 8)
    monkeypatch.setattr(fitting, "memory_bytes", lambda: 24 << 30)
    deployed: list[Any] = []
    monkeypatch.setattr(run, "deploy", lambda application, *_: deployed.append(application))
    run.update(parse({"index": {"addresses": ["a:1"]}, "cache": {"url": "redis://b"}, **values}))
    (application,) = deployed
    (arrived, *_) = application._bound_deployment.init_args
    assert arrived.generator.n_threads == expected


@pytest.mark.parametrize(
    ("n_cores", "gb", "values", "expected"),
    [
        (2, 24, {}, 2),
        (16, 64, {}, 4),
        (16, 8, {}, 2),
        (2, 2, {}, 1),
        (4, 24, {"generator": {"n_threads": 2}}, 2),
        (2, 24, {"generator": {"n_threads": 3}}, 1),
        (2, 24, {"serving": {"n_replicas": 3}}, 3),
        (2, 24, {"serving": {"topology": "split"}}, 1),
        (2, 24, {"generator": {"num_gpus": 0.5}}, 1),
        (2, 24, {"encoder": {"device": "cuda:0"}}, 1),
    ],
)
def test_as_many_replicas_as_the_machine_has_use_for(
    n_cores: int, gb: int, values: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "threads", lambda: n_cores)
    monkeypatch.setattr(fitting, "memory_bytes", lambda: gb << 30)
    monkeypatch.setattr(fitting, "n_gpus", lambda: 0)
    assert fitting.fitted(parse(values)).serving.n_replicas == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, 8),
        ({"serving": {"n_replicas": 3}}, 3),
        ({"generator": {"device": "cuda"}}, 8),
        ({"generator": {"device": "cpu"}}, 4),
        ({"generator": {"num_gpus": 1}}, 1),
        ({"generator": {"device": "cuda:1"}}, 1),
    ],
)
def test_each_gpu_has_a_replica(values: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "threads", lambda: 96)
    monkeypatch.setattr(fitting, "memory_bytes", lambda: 64 << 30)
    monkeypatch.setattr(fitting, "n_gpus", lambda: 8)
    settings = fitting.fitted(parse(values))
    assert settings.serving.n_replicas == expected

    def device(rank: int) -> str:
        monkeypatch.setattr(
            app.serve,
            "get_replica_context",
            lambda: SimpleNamespace(rank=ReplicaRank(rank=9, node_rank=1, local_rank=rank)),
        )
        return app.on_its_gpu(settings.generator).device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    asked = settings.generator.device
    of_all = asked in ("auto", "cuda")
    assert [device(rank) for rank in range(10)] == ([f"cuda:{i % 8}" for i in range(10)] if of_all else [asked] * 10)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert device(3) == asked


def test_where_there_is_no_driver_torch_is_not_asked_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 / 0)
    assert fitting.n_gpus() == 0
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert fitting.n_gpus() == 2


@pytest.mark.parametrize(
    ("values", "encoder", "generator"),
    [
        ({"serving": {"topology": "split"}, "generator": {"num_cpus": 4.5}}, 1, 4),
        ({"serving": {"topology": "split"}, "encoder": {"num_cpus": 2, "n_threads": 0}}, 2, 1),
        ({"serving": {"num_cpus": 8}}, 1, 8),
        ({"serving": {"num_cpus": 8}, "generator": {"n_threads": 3}}, 1, 3),
        ({"serving": {"num_cpus": 0.1}}, 1, 1),
    ],
)
def test_on_a_cluster_models_have_the_threads_of_their_replicas_cpus(
    values: dict[str, Any], encoder: int, generator: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in Serve's task that builds the application
    there = {"index": {"addresses": ["127.0.0.1:7000"]}, "cache": {"url": "redis://127.0.0.1"}}
    application = app.build({**there, **values, "access": {"allow_anonymous": True}})
    settings = application._bound_deployment.init_args[0]
    assert (settings.encoder.n_threads, settings.generator.n_threads) == (encoder, generator)


THERE = {"index": {"addresses": ["a:1"]}, "cache": {"url": "redis://b"}}
SIZES = {
    "encoder": {"num_cpus": 2, "num_gpus": 0.25, "n_threads": 3, "n_replicas": 4, "max_queue": 100, "max_batch": 10},
    "generator": {"num_cpus": 5, "num_gpus": 0.5, "n_threads": 6, "n_replicas": 7, "max_queue": 200, "max_batch": 20},
}


@cache
def handed_to_serve(topology: str) -> dict[str, Any]:
    """The deployments, by name."""
    serving = {"topology": topology, "num_cpus": 8, "n_replicas": 9, "max_in_flight": 300, "max_replicas_per_node": 2}
    settings = parse({**THERE, **SIZES, "serving": serving, "answer": {"max_timeout_s": 1000}})
    application = app.assemble(settings, lambda _: None, lambda _: None)  # type: ignore[arg-type, return-value]
    bound = [application, *application._bound_deployment.init_args]
    deployments = [each._bound_deployment for each in bound if isinstance(each, serve.Application)]
    return {each.name: each for each in deployments}


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ("fused", {"ingress": (9, 8, 0.75, 6, 300)}),
        (
            "split",
            {"ingress": (9, 8, 0, 1, 300), "encoder": (4, 2, 0.25, 3, 110), "generator": (7, 5, 0.5, 6, 220)},
        ),
    ],
)
def test_a_replica_has_what_its_settings_reserve_and_as_many_calls_as_it_may_refuse_itself(
    topology: str, expected: dict[str, tuple[float, ...]]
) -> None:
    deployments = handed_to_serve(topology)
    assert deployments.keys() == expected.keys()
    for name, (n_replicas, n_cpus, n_gpus, n_threads, n_calls) in expected.items():
        each, options = deployments[name], deployments[name].ray_actor_options
        assert (each.num_replicas, options["num_cpus"], options["num_gpus"]) == (n_replicas, n_cpus, n_gpus)
        environment = options["runtime_env"]["env_vars"]
        assert environment == {"OMP_NUM_THREADS": str(n_threads), **app.ENVIRONMENT}
        assert (each.max_ongoing_requests, each.max_queued_requests) == (n_calls + app.SPARE_PLACES,) * 2


def test_replicas_stand_apart_have_their_time_to_stop_and_are_missed_soon() -> None:
    for name, each in handed_to_serve("split").items():
        config, replica = each._deployment_config, each._replica_config
        assert replica.max_replicas_per_node == 2
        assert config.graceful_shutdown_timeout_s > 1000, "what was asked may take so long"
        assert (config.health_check_period_s, config.max_constructor_retry_count) == (1, 1)
        assert config.max_surge_percent == 100, "in an update new ones answer before old ones stop"
        router = config.request_router_config.get_request_router_class()
        assert (router is AnsweringRouter) == (name != "ingress")


def test_tls_of_our_own_is_refused_on_a_cluster() -> None:
    """Or somebody would think that it is there."""
    tls = {"certificate": "c.pem", "key": "k.pem"}
    with pytest.raises(InvalidConfig, match=r"serving\.tls is for `openbook up`"):
        app.build({**THERE, "serving": {"tls": tls}, "access": {"allow_anonymous": True}})
