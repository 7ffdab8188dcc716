"""What `openbook doctor` thinks of what it finds, and that it looks where settings say."""

import resource
import socket
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from openbook.cli import app
from openbook.config import parse
from openbook.doctor import findings, look
from openbook.doctor.findings import Finding, Level, worst
from openbook.processes import free_port

DAY_S = 86_400.0


@pytest.mark.parametrize(
    ("finding", "level", "says"),
    [
        (findings.versions({"faiss-cpu": "1.15.1"}), Level.WELL, "faiss-cpu 1.15.1"),
        (findings.versions({"grpcio": "1.80"}), Level.MIND, "can ask an index, and serve none"),
        (findings.versions({"faiss-cpu": "1.15", "faiss-gpu": "1.15"}), Level.ILL, "exclude each other"),
        (findings.versions({"faiss-cpu": "1.15.1", "rfc3987-syntax": "1.1"}), Level.MIND, "by seconds"),
        (findings.open_files(1024, 1 << 20), Level.MIND, "1024: `ulimit -n 65536` where it is started"),
        (findings.open_files(1024, 4096), Level.MIND, "1024, and 4096 for who raises it: root raises that"),
        (findings.open_files(1 << 20, 1 << 20), Level.WELL, "1048576"),
        (findings.shared_memory(64 << 20), Level.MIND, "0.1 GiB"),
        (findings.disk("x", 9 << 30, 500 << 30), Level.MIND, "9.0 of 500.0 GiB free"),
        (findings.disk("x", 9 << 30, 20 << 30), Level.WELL, "free"),
        (findings.clock("a", 3.0, 0.5), Level.MIND, "+3.0 s"),
        (findings.clock("a", -2.4, 0.5), Level.WELL, "-2.4 s from ours, give or take 0.5"),
        (findings.certificate("a", 10 * DAY_S, 12 * DAY_S), Level.ILL, "expired 2 days ago"),
        (findings.certificate("a", 20 * DAY_S, 0.0), Level.MIND, "expires in 20 days"),
        (findings.certificate("a", 90 * DAY_S, 0.0), Level.WELL, "expires in 90 days"),
        (findings.index_tier({"a": "s"}, {"a": 0}, 2), Level.ILL, "nobody serves shard 1 of 2"),
        (findings.index_tier({"a": "s", "b": "t"}, {"a": 0, "b": 1}, 2), Level.MIND, "a has s, b has t"),
        (findings.index_tier({"a": "s", "b": "s"}, {"a": 0, "b": 0}, 1), Level.WELL, "1 shard, 2 servers"),
        (findings.index_tier({"a": "s"}, {"a": 0}, 1), Level.WELL, "1 shard, 1 server; one server alone has shard 0"),
    ],
)
def test_findings_are_judged(finding: Finding, level: Level, says: str) -> None:
    assert finding.level is level
    assert says in finding.says


def test_open_files_are_as_many_as_a_process_that_is_started_now_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = (1024, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    (told,) = (each for each in look.this_machine(tmp_path) if each.what == "open files")
    assert (told.level, told.says) == (Level.MIND, "1024: `ulimit -n 65536` where it is started")
    limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    (told,) = (each for each in look.this_machine(tmp_path) if each.what == "open files")
    assert (told.level, told.says) == (Level.WELL, "no limit")


def test_the_report_is_as_bad_as_its_worst() -> None:
    assert worst([]) is Level.WELL
    assert worst([Finding("a", Level.MIND, ""), Finding("b", Level.WELL, "")]) is Level.MIND


def test_it_names_a_server_that_does_not_answer_and_a_port_that_is_not_ours(tmp_path: Path) -> None:
    with socket.socket() as silent, socket.create_server(("127.0.0.1", 0)) as other:
        silent.bind(("127.0.0.1", 0))  # and listens to nobody
        other.settimeout(0.01)
        gone = f"127.0.0.1:{silent.getsockname()[1]}"
        environment = {
            "OPENBOOK_INDEX__ADDRESSES": f'["{gone}"]',
            "OPENBOOK_CACHE__URL": f"redis://{gone}",
            "OPENBOOK_SERVING__HTTP_PORT": str(silent.getsockname()[1]),
            "OPENBOOK_SERVING__GRPC_PORT": str(other.getsockname()[1]),
        }
        result = CliRunner().invoke(app, ["doctor", "--folder", str(tmp_path)], env=environment)
    rows = result.output.splitlines()
    assert result.exit_code == 1
    assert [row for row in rows if row.startswith("ill") and f"index server {gone}: failed to connect" in row]
    assert [row for row in rows if row.startswith("ill") and "the cache's Redis" in row]
    assert [row for row in rows if row.startswith("well") and "does not run, and its port is free" in row]
    assert [row for row in rows if row.startswith("ill") and "does not run, and something else has its port" in row]


def test_a_folder_that_is_not_there_is_a_row_and_the_rest_is_looked_at(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        environment = {
            "OPENBOOK_SERVING__HTTP_PORT": str(silent.getsockname()[1]),
            "OPENBOOK_SERVING__GRPC_PORT": str(free_port()),
        }
        result = CliRunner().invoke(app, ["doctor", "--folder", str(tmp_path / "none")], env=environment)
    assert result.exit_code == 1
    rows = result.output.splitlines()
    assert [row for row in rows if row.startswith("ill") and row.endswith("none: No such file or directory")]
    assert rows[-1].startswith("well")
    assert "its port is free" in rows[-1]


def test_a_redis_whose_name_no_host_can_have_is_ill() -> None:
    told = look.redis("it", "cache", parse({"cache": {"url": "redis://cache..example.org/0"}}))
    assert (told.level, "label empty" in told.says) == (Level.ILL, True)


def test_where_redis_is_not_installed_the_rest_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.exceptions", None)
    serving = {"http_port": free_port(), "grpc_port": free_port()}
    *_, told, over_http, over_grpc = look.look(parse({"cache": {"url": "redis://none"}, "serving": serving}), tmp_path)
    assert told == Finding("the cache's Redis", Level.MIND, "cannot be asked from here: redis is not installed")
    assert {over_http.level, over_grpc.level} == {Level.WELL}
