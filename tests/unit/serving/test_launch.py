"""How a system of one machine is started, asked whether it is ready, and ended: with what Ray and Serve would say."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import ray
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from openbook.config import AnswerDefaults, ServingSettings, parse
from openbook.errors import InvalidModel, StartupError
from openbook.serving.launch import run, stop
from openbook.serving.launch.environment import LONGEST_S, longest_s

THERE = {"index": {"addresses": ["a:1"]}, "cache": {"url": "redis://b"}}
OF_RAY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Whether its own ports are on all interfaces."""


@pytest.mark.parametrize(("topology", "n_cpus"), [("fused", 3 * 2.5), ("split", 3 * 2.5 + 4 * 10 + 5 * 20)])
def test_ray_counts_on_as_many_cpus_as_all_replicas_reserve_and_some_for_an_update(
    topology: str, n_cpus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or they wait for ever for a machine with more."""
    given = list[float]()
    monkeypatch.setattr(run, "local_serve", lambda *arguments: given.append(arguments[1]) or nullcontext())
    monkeypatch.setattr(run, "update", lambda settings: None)
    sizes = {"encoder": {"n_replicas": 4, "num_cpus": 10}, "generator": {"n_replicas": 5, "num_cpus": 20}}
    serving = {"topology": topology, "n_replicas": 3, "num_cpus": 2.5}
    with run.running(parse({**THERE, **sizes, "serving": serving})):
        [n_counted] = given
    assert n_counted == int(n_counted), "Ray knows no other amounts above one"
    assert 0 <= n_counted - run.SPARE_CPUS - n_cpus < 1


@pytest.mark.parametrize(("host", "is_open"), [("127.0.0.1", False), ("0.0.0.0", False), ("10.0.0.5", True)])
def test_rays_own_ports_are_on_loopback_wherever_haproxy_reaches_replicas_there(
    host: str, is_open: bool, tmp_path: Path
) -> None:
    """Whoever reaches one of them runs what he likes."""
    assert (run.serve_flags(ServingSettings(host=host), tmp_path).get(OF_RAY) == "1") == is_open


def test_haproxys_program_knows_the_files_of_tls_whatever_their_folder_is_called(tmp_path: Path) -> None:
    files = {"certificate": tmp_path / "it's ours" / "c.pem", "key": tmp_path / "k.pem"}
    flags = run.serve_flags(ServingSettings.model_validate({"tls": files}), tmp_path)
    lines = Path(flags["RAY_SERVE_HAPROXY_BINARY_PATH"]).read_text().splitlines()
    assert f"""export OPENBOOK_TLS_CERTIFICATE='{tmp_path}/it'"'"'s ours/c.pem'""" in lines
    assert f"export OPENBOOK_TLS_KEY={tmp_path}/k.pem" in lines


def test_replicas_have_ports_in_a_row_that_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "free_ports", lambda n: 20_000)
    flags = run.serve_flags(ServingSettings(), tmp_path)
    for kind in ("HTTP", "GRPC"):
        first, last = (int(flags[f"RAY_SERVE_DIRECT_INGRESS_{end}_{kind}_PORT"]) for end in ("MIN", "MAX"))
        assert (first, last) == (20_000, 20_000 + run.N_REPLICA_PORTS - 1)


@pytest.mark.parametrize(
    ("told", "kind", "message"),
    [
        ("openbook.errors.InvalidConfig: first\nopenbook.errors.InvalidModel: last", InvalidModel, r"^last$"),
        ("openbook.errors.OfTomorrow: what", StartupError, r"^what$"),
        ("RuntimeError: what", StartupError, r"^the application does not start: RuntimeError: what$"),
    ],
)
def test_why_a_replica_does_not_start_is_what_it_said_last(told: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        raise run._why(told)


@contextmanager
def saying(reply: bytes) -> Iterator[ServingSettings]:
    """An endpoint that says the same to whatever it is asked over HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def say() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(reply)

        thread = Thread(target=say)
        thread.start()
        yield ServingSettings(http_port=listener.getsockname()[1])
        thread.join()


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", ""),
        (b"HTTP/1.1 503 No\r\ncontent-length: 12\r\n\r\nno \xff replica", "no \ufffd replica"),
        (b"SSH-2.0\r\n", "BadStatusLine: SSH-2.0\r\n"),
        (b"", "RemoteDisconnected: Remote end closed connection without response"),
    ],
)
def test_it_is_ready_over_http_when_it_says_so(reply: bytes, said: str) -> None:
    with saying(reply) as serving:
        assert run._ask_over_http(serving) == said


def test_it_is_ready_over_grpc_when_it_says_so() -> None:
    with ThreadPoolExecutor(1) as pool:
        server, servicer = grpc.server(pool), health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        serving = ServingSettings(grpc_port=server.add_insecure_port("127.0.0.1:0"))
        server.start()
        for status, said in (("NOT_SERVING", "NOT_SERVING"), ("SERVING", "")):
            servicer.set("", health_pb2.HealthCheckResponse.ServingStatus.Value(status))
            assert run._ask_over_grpc(serving) == said
        server.stop(None).wait()
    assert run._ask_over_grpc(serving).startswith("UNAVAILABLE: ")


@pytest.mark.parametrize(("http", "grpc", "what"), [("no", "", "HTTP"), ("", "no", "gRPC")])
def test_what_does_not_become_ready_over_both_protocols_is_told(
    http: str, grpc: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "READY_TIMEOUT_S", -1.0)
    monkeypatch.setattr(run, "_ask_over_http", lambda serving: http)
    monkeypatch.setattr(run, "_ask_over_grpc", lambda serving: grpc)
    with pytest.raises(StartupError, match=rf"not ready over {what} within .*: no$"):
        run._await_ready(ServingSettings())


def test_replicas_have_their_time_to_finish_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, ended = list[bool](), list[Any]()
    controller = SimpleNamespace(
        delete_apps=SimpleNamespace(remote=ended.append),
    )
    monkeypatch.setattr(ray, "get", lambda ref, timeout: ref)

    def named(n_looks: int) -> None:
        def list_named_actors(of_all: bool) -> list[dict[str, str]]:
            looks.append(of_all)
            assert len(looks) < 10
            ours = f"SERVE_REPLICA::{run.APPLICATION}#Ingress#x"
            return [{"name": "SERVE_REPLICA::another#x"}, *[{"name": ours}] * (len(looks) <= n_looks)]

        looks.clear()
        monkeypatch.setattr(ray.util, "list_named_actors", list_named_actors)

    named(2)
    stop.end_application(controller, run.APPLICATION, {}, 60)
    assert (len(looks), ended) == (3, [[run.APPLICATION]])
    named(1000)
    stop.end_application(controller, run.APPLICATION, {}, -1)
    assert not looks


def test_whoever_allows_shorter_answers_gives_none_less_time_than_by_default() -> None:
    """Settings change while it runs, and what HAProxy was told does not."""
    assert longest_s(AnswerDefaults(timeout_s=1, max_timeout_s=1)) == LONGEST_S
    assert longest_s(AnswerDefaults(max_timeout_s=1000)) > 1000
