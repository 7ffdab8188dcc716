"""Index servers and Redis for one machine: whatever ends the start, nothing is left running."""

import asyncio
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certificates import tls_files
from proxies import CONFIG, PATIENCE_S, configure, listens, until
from redis import Redis
from redis.exceptions import RedisError

from openbook import processes as tethered
from openbook.cache.server import RedisServer
from openbook.config import ServingSettings, Settings, parse
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.types import Passage, RetrievalSettings
from openbook.errors import DeadlineExceeded, InvalidConfig, InvalidRequest, PortInUse, ShardUnavailable, StartupError
from openbook.index.building.build import build_snapshot
from openbook.index.client.publish import held_by_servers, publish
from openbook.index.client.sharded import ShardedIndex
from openbook.index.disk.root import Root
from openbook.index.disk.snapshot import Snapshot
from openbook.processes import free_port, free_ports, of_module
from openbook.serving.launch import haproxy, local, probe, run, supervise
from openbook.serving.launch.checks import check_metrics
from openbook.serving.launch.local import IndexProcess, local_tiers


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    passages = [Passage(i, "d", "t", "x") for i in range(4)]
    build_snapshot(passages, np.eye(4, dtype=np.float32), tmp_path / "s", 2, "Flat", "e", "f")
    return tmp_path / "s"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[IndexProcess]:
    """Every index process that is started during the test."""
    processes: list[IndexProcess] = []

    class Recorded(IndexProcess):
        def __init__(self, *asked: Any, **options: Any) -> None:
            super().__init__(*asked, **options)
            processes.append(self)

    monkeypatch.setattr(local, "IndexProcess", Recorded)
    monkeypatch.setattr(tethered, "STOP_TIMEOUT_S", 60.0)  # one that is slow to end was not killed
    return processes


def test_they_are_named_in_the_settings_while_they_run(
    snapshot: Path, started: list[IndexProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBOOK_INDEX_SERVER__Frame_Port", "1")  # of the other shard, too
    monkeypatch.setenv("OPENBOOK_INDEX_SERVER__TLS", "{certificate: none, key: none}")  # we speak none
    with local_tiers(snapshot, Settings()) as settings:
        assert len(set(settings.index.addresses)) == 2
        assert str(settings.cache.url).startswith("redis://127.0.0.1:")
        assert all(each.process.poll() is None for each in started)
        assert {os.getsid(each.process.pid) for each in started} == {os.getsid(0)}  # scheduled beside the models
        assert os.getpgrp() not in {os.getpgid(each.process.pid) for each in started}  # which Ctrl-C does not reach
    assert [each.process.poll() for each in started] == [0, 0]


def test_a_redis_that_nobody_runs_is_told_at_the_start(snapshot: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not by the first question: then it is a miss, and nobody looks into the log of a system that was ready."""
    settings = parse({"cache": {"url": f"redis://:secret@127.0.0.1:{free_port()}"}})
    with local_tiers(snapshot, settings) as complete:
        assert complete.cache == settings.cache
    said = "".join(each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    assert re.match(r"cache\.url = redis://\S+ cannot be used, so every lookup is a miss: .*refused", said)
    assert "secret" not in said


def test_a_start_that_fails_leaves_nothing_behind(snapshot: Path, started: list[IndexProcess]) -> None:
    vectors = snapshot / "shard-0001" / "vectors.npy"
    vectors.write_bytes(vectors.read_bytes()[:-1])
    with (
        pytest.raises(StartupError, match=r"index server of shard 1 ended with code 1: openbook: .*vectors\.npy"),
        local_tiers(snapshot, Settings()),
    ):
        pass
    assert all(each.process.poll() is not None for each in started)


def test_a_used_port_is_told_before_any_of_them_starts(snapshot: Path, started: list[IndexProcess]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = Settings(serving=ServingSettings(http_port=port, grpc_port=free_port()))
        with (
            pytest.raises(PortInUse, match=rf"serving\.http_port = {port} on 127"),
            local.local_system(snapshot, settings),
        ):
            pass
    assert not started


def test_keys_that_cannot_be_looked_up_are_told_before_any_of_them_starts(
    snapshot: Path, started: list[IndexProcess], tmp_path: Path
) -> None:
    """And a change to such settings is left. Of Redis only its name is looked at: it may start later."""
    none, known = str(tmp_path / "none.jsonl"), {"index": {"addresses": ["i:1"]}, "cache": {"url": "redis://r:1/0"}}
    for access, said in (
        ({"keys": "file", "path": none}, r"access\.path = .*none\.jsonl': cannot be read.* `openbook keys add`"),
        ({"keys": "redis"}, r"access\.url must be set to a Redis server"),
        ({"keys": "redis", "url": "http://127.0.0.1:1/0"}, r"access\.url = .*: no URL of a Redis server"),
    ):
        with pytest.raises(InvalidConfig, match=said):
            local.updated(parse(known), parse({"access": access}))
        with pytest.raises(InvalidConfig, match=said):
            local.local_system(snapshot, parse({"access": access})).__enter__()
    assert not started
    local.updated(parse(known), parse({"access": {"keys": "redis", "url": "redis://127.0.0.1:1/0"}}))


@pytest.mark.parametrize("name", ["http_port", "grpc_port"])
def test_index_servers_whose_metrics_would_take_the_endpoints_port_are_not_started(
    snapshot: Path, started: list[IndexProcess], name: str
) -> None:
    first = free_ports(3)
    ports = {"metrics_port": first, "http_port": first + 2, "grpc_port": first + 2, name: first + 1}
    taken = rf"serving\.{name} = {first + 1}: .* serving\.metrics_port = {first} on, {first}\.\.{first + 1}"
    with (
        pytest.raises(InvalidConfig, match=taken),
        local_tiers(snapshot, Settings(serving=ServingSettings(**ports))),
    ):
        pass
    assert not started


@pytest.mark.parametrize(
    ("host", "proxy", "meet"),
    [
        ("localhost", "haproxy", {"http_port", "grpc_port"}),
        ("0.0.0.0", "haproxy", {"http_port", "grpc_port"}),
        ("10.0.0.5", "haproxy", set()),
        ("127.0.0.2", "haproxy", set()),
        ("10.0.0.5", "python", {"grpc_port"}),
    ],
)
def test_an_endpoint_that_listens_elsewhere_may_have_the_ports_of_index_servers_metrics(
    host: str, proxy: str, meet: set[str]
) -> None:
    for name in ("http_port", "grpc_port"):
        ports = {"metrics_port": 7999, "http_port": 9000, "grpc_port": 9001, name: 8000}
        serving = ServingSettings.model_validate({"host": host, "proxy": proxy, **ports})
        with pytest.raises(InvalidConfig, match=name) if name in meet else nullcontext():
            check_metrics(serving, 2)


def test_an_index_servers_metrics_leave_it_its_own_port(snapshot: Path, started: list[IndexProcess]) -> None:
    first = free_ports(3)
    with socket.create_server(("127.0.0.1", first)):  # as another one's metrics are
        server = local.IndexProcess(snapshot, 0, metrics_port=first, port=first + 1)
        try:
            assert server.address() == f"127.0.0.1:{first + 1}"
            socket.create_connection(("127.0.0.1", first + 2)).close()
        finally:
            server.stop()


def test_an_interruption_while_they_read_their_shards_leaves_nothing_behind(
    snapshot: Path, started: list[IndexProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: IndexProcess) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(IndexProcess, "address", interrupted)
    with pytest.raises(KeyboardInterrupt), local_tiers(snapshot, Settings()):
        pass
    assert all(each.process.poll() is not None for each in started)


def test_what_was_published_to_a_root_is_served_after_a_restart(snapshot: Path, tmp_path: Path) -> None:
    passages = [Passage(i, "d", "t", "new") for i in range(4)]
    new_id = build_snapshot(passages, -np.eye(4, dtype=np.float32), tmp_path / "new", 2, "Flat", "e", "f").snapshot_id
    Root.create(tmp_path / "root", snapshot)
    with local_tiers(tmp_path / "root", Settings()) as settings:
        assert asyncio.run(publish(tmp_path / "new", settings.index)) == 2
    with local_tiers(tmp_path / "root", Settings()) as settings:
        held = asyncio.run(held_by_servers(settings.index))
    assert [(row.state, row.snapshot_id, row.sequence) for row in held] == [("current", new_id, 2)] * 2


UP = """
import os, signal, subprocess, sys
from pathlib import Path
from openbook.config import ServingSettings, Settings, parse
from openbook.serving.launch.local import local_tiers

class Told(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        os.write(1, b"%d\\n" % self.pid)  # a line at once: other threads start others

subprocess.Popen = Told
with local_tiers(Path(sys.argv[1]), Settings()):
    print("ready", flush=True)
    signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_whoever_is_killed_leaves_nothing_behind(snapshot: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", UP, str(snapshot)], stdout=subprocess.PIPE, text=True) as killed:
        try:
            assert killed.stdout is not None
            *children, last = (killed.stdout.readline() for _ in range(4))
            assert last == "ready\n"  # after two index servers and Redis
            ends = [os.pidfd_open(int(pid)) for pid in children]
        finally:
            killed.kill()
    for end in ends:
        assert select.select([end], [], [], 60)[0]
        os.close(end)


@pytest.fixture
def proxy_port(tmp_path: Path) -> int:
    """Where HAProxy is to listen, by a configuration in the folder."""
    port = free_port()
    configure(tmp_path, f"frontend http_frontend\n    bind 127.0.0.1:{port}\n")
    return port


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has died")
def test_haproxy_ends_with_serves_proxy_even_if_that_is_killed(tmp_path: Path, proxy_port: int) -> None:
    """Ray's node, which would end it, ends with the system that is killed."""
    program = run.serve_flags(ServingSettings(), tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"]
    starts = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()"
    command = [sys.executable, "-c", starts, program, "-db", "-f", str(tmp_path / CONFIG)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout is not None
        end = os.pidfd_open(int(proxy.stdout.readline()))
        try:
            until(lambda: listens(proxy_port))
            proxy.kill()
            assert select.select([end], [], [], PATIENCE_S)[0]
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(end, signal.SIGKILL)
            proxy.kill()
            os.close(end)
    assert not listens(proxy_port)


def test_haproxy_does_not_start_for_a_proxy_that_has_died_before(tmp_path: Path, proxy_port: int) -> None:
    command = [*of_module(haproxy.__name__), "-db", "-f", str(tmp_path / CONFIG)]
    env = {**os.environ, haproxy.PARENT: "0"}
    assert subprocess.run(command, env=env, timeout=PATIENCE_S, check=False).returncode == 1


async def searched(settings: Settings, snapshot_id: str) -> None:
    """Returns once a search finds this snapshot."""
    tier = ShardedIndex.of(settings.index)
    try:
        async with asyncio.timeout(120):
            while True:
                with suppress(ShardUnavailable, DeadlineExceeded):
                    context = Context(Deadline.after(5))
                    hits = await tier.search(np.eye(4, dtype=np.float32), RetrievalSettings(k=2), context)
                    assert hits.snapshot_id == snapshot_id
                    return
                await asyncio.sleep(0.05)
    finally:
        await tier.close()


def kept(settings: Settings) -> None:
    """Returns once Redis keeps what it is given."""
    assert settings.cache.url is not None
    url, give_up = settings.cache.url.get_secret_value(), time.monotonic() + 120
    while time.monotonic() < give_up:
        with Redis.from_url(url, socket_timeout=5) as redis, suppress(RedisError):
            redis.set("key", "value")
            assert redis.get("key") == b"value"
            return
        time.sleep(0.05)
    raise AssertionError("Redis did not come back")


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_what_ends_or_freezes_comes_back_where_it_was(
    snapshot: Path,
    tmp_path: Path,
    fault: signal.Signals,
    started: list[IndexProcess],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(supervise, "PROBE_EVERY_S", 0.2)
    monkeypatch.setattr(supervise, "PROBE_TIMEOUT_S", 0.5)
    redis: list[RedisServer] = []

    def begin() -> RedisServer:
        redis.append(RedisServer())
        return redis[0]

    monkeypatch.setattr(local, "RedisServer", begin)
    passages = [Passage(i, "d", "t", "new") for i in range(4)]
    new_id = build_snapshot(passages, -np.eye(4, dtype=np.float32), tmp_path / "new", 2, "Flat", "e", "f").snapshot_id
    Root.create(tmp_path / "root", snapshot)
    with local_tiers(tmp_path / "root", Settings()) as settings:
        asyncio.run(publish(tmp_path / "new", settings.index))
        former = [each.process for each in (*started, *redis)]
        for process in former:
            process.send_signal(fault)
        for process in former:
            process.wait(60)
        asyncio.run(searched(settings, new_id))
        kept(settings)
        assert [process.returncode for process in former] == [-signal.SIGKILL] * 3
    assert [each.process.returncode for each in started] == [0, 0]
    assert redis[0].process.returncode is not None
    assert not redis[0].folder.exists()
    said = [each.getMessage() for each in caplog.records if each.name == supervise.__name__]
    for name in ("the index server of shard 0", "the index server of shard 1", "Redis"):
        what = "ended with SIGKILL" if fault == signal.SIGKILL else "did not answer 3 times in a row"
        assert any(each.startswith(f"{name} {what}") for each in said)
        assert any(each.startswith(f"{name} serves again at ") for each in said)


def test_one_that_cannot_start_is_tried_again_until_it_can(
    snapshot: Path, started: list[IndexProcess], caplog: pytest.LogCaptureFixture
) -> None:
    with local_tiers(snapshot, Settings()) as settings:
        vectors = snapshot / "shard-0001" / "vectors.npy"
        vectors.rename(snapshot / "gone")
        next(each for each in started if each.shard == 1).process.kill()
        while not any("does not start" in each.getMessage() for each in caplog.records):
            time.sleep(0.01)
        (snapshot / "gone").rename(vectors)
        asyncio.run(searched(settings, Snapshot.open(snapshot).manifest.snapshot_id))
    [first, *_] = [each.getMessage() for each in caplog.records if "does not start" in each.getMessage()]
    assert re.search(r"shard 1 does not start: .* ended with code 1: openbook: .*vectors\.npy", first)


def test_they_serve_as_the_file_says_but_what_and_where(snapshot: Path, tmp_path: Path) -> None:
    of_others = "snapshot: none, shard: 7, port: 1, host: none.invalid, frame_port: 1, tls: {certificate: c, key: k}"
    said = f"index_server: {{{of_others}, max_k: 1}}"
    (tmp_path / "openbook.yaml").write_text(said)
    with (
        local_tiers(snapshot, Settings(), tmp_path / "openbook.yaml") as settings,
        pytest.raises(InvalidRequest, match=r"k must be 1\.\.1, got 2"),
    ):
        asyncio.run(searched(settings, "any"))


def test_with_nothing_to_serve_it_says_what_to_name() -> None:
    with pytest.raises(InvalidConfig, match="name a snapshot to serve"), local_tiers(None, Settings()):
        pass


@pytest.mark.parametrize("client_ca", [False, True])
def test_a_server_with_tls_is_looked_at_without_a_word_in_its_log(
    snapshot: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], client_ca: bool
) -> None:
    tls, trusted = tls_files(tmp_path)
    files = {"certificate": str(tls.certificate), "key": str(tls.key)}
    files |= {"client_ca": str(trusted.ca)} if client_ca else {}
    server = IndexProcess(snapshot, 0, env={**os.environ, "OPENBOOK_INDEX_SERVER__TLS": json.dumps(files)})
    try:
        server.address()
        assert server.answers(60.0)
        server.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.process.pid, os.WSTOPPED)  # until each of its threads has
        assert not server.answers(0.2)
        server.process.send_signal(signal.SIGCONT)
    finally:
        server.stop()
    assert server.answers(60.0), "who refuses has not frozen"
    server._listener.join()
    assert "Handshake failed" not in capfd.readouterr().err


HANGS = """
import ctypes, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import grpc
from openbook.config import ServerTls
from openbook.index.server.server import _credentials

tls = ServerTls(certificate=Path(sys.argv[1]), key=Path(sys.argv[2]))
server = grpc.server(ThreadPoolExecutor(1))
print(server.add_secure_port("127.0.0.1:0", _credentials(tls)), flush=True)
server.start()
input()
ctypes.PyDLL(None).pause()  # with Python's lock
"""


def test_a_server_with_tls_whose_python_hangs_is_silent(tmp_path: Path) -> None:
    tls, _ = tls_files(tmp_path)
    command = [sys.executable, "-c", HANGS, str(tls.certificate), str(tls.key)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin
            assert process.stdout
            address = f"127.0.0.1:{int(process.stdout.readline())}"
            assert probe.answers(address, True, 60.0)
            process.stdin.write("\n")
            process.stdin.flush()
            give_up = time.monotonic() + 60
            while probe.answers(address, True, 0.3):
                assert time.monotonic() < give_up
        finally:
            process.kill()
