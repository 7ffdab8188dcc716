"""What Serve's configuration of HAProxy lacks; that HAProxy takes it is seen where a system is started."""

import json
import re
import string
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve._private import haproxy, haproxy_templates
from ray.serve.config import HTTPOptions

from openbook.config import ServerTls, parse
from openbook.errors import InvalidConfig
from openbook.serving.endpoint.load import LOAD_PATH
from openbook.serving.endpoint.openai_errors import PATHS, OpenAIError, openai_error_of_status, speaks_openai
from openbook.serving.endpoint.problems import MEDIA_TYPE, Problem, problem_of_status
from openbook.serving.launch import tls
from openbook.serving.launch.haproxy import (
    ERRORS,
    NO_UPGRADES,
    NOT_LISTED,
    OPENAI_PATHS,
    WHOLE_CALLS,
    error_files,
    mended,
)
from openbook.serving.launch.soonest import CHOSEN, NOT_TOLD, SOONEST_LUA

TEMPLATES = "".join(text for name, text in vars(haproxy_templates).items() if name.endswith("TEMPLATE"))
FOLDER = Path("/tmp/x")
SAMPLE = """global
    stats socket /tmp/x/admin.sock mode 666 level admin expose-fd listeners
defaults
    mode http
    errorfile 502 /tmp/x/500.http
    errorfile 503 /tmp/x/500.http
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind 127.0.0.1:8000
listen stats
  bind *:8404
  stats enable
"""


def test_what_is_missing_is_added_and_what_is_open_is_closed() -> None:
    lines = mended(SAMPLE, FOLDER).splitlines()
    assert lines[lines.index("defaults") + 1] == "    timeout http-request 10s"
    assert "    stats socket /tmp/x/admin.sock mode 600 level admin expose-fd listeners" in lines
    assert [line.split()[1] for line in lines if "bind" in line] == [
        "127.0.0.1:9101",
        "127.0.0.1:8000",
        "unix@/tmp/x/h",
        "127.0.0.1:8404",
    ]
    assert not any("errorfile" in line for line in lines)


def test_the_lines_to_be_mended_are_in_the_templates_of_this_ray() -> None:
    """Or it has others, and `mended` finds nothing to mend."""
    mends = mended(TEMPLATES, FOLDER)
    assert mends.count("timeout http-request 10s") == 2  # HTTP's defaults and gRPC's
    assert mends.count("retry-on conn-failure empty-response\n    retries 1\n") == 2
    assert mends.index("errorfile 503 /tmp/x/error-grpc-503") < mends.index("frontend grpc_frontend")
    assert (
        len(re.findall(r" check backup$", TEMPLATES, re.M))
        == len(re.findall(r" check backup weight 0$", mends, re.M))
        > 0
    )
    assert mends.count("    http-request deny deny_status 503\n") == TEMPLATES.count(" Ping ") == 3
    assert mends.count(CHOSEN) == 0  # no replica stands in a template: who is asked is seen in tests/integration
    assert LOAD_PATH in SOONEST_LUA
    assert LOAD_PATH in NOT_TOLD in mends
    assert mends.count("option http-buffer-request") == mends.count(NOT_LISTED + WHOLE_CALLS) == 1
    assert NO_UPGRADES in mends
    assert mends.count(" min-recv 1\n") == TEMPLATES.count("tcp-check expect ") == 2
    assert "mode 666" in TEMPLATES
    assert "mode 666" not in mends
    assert not re.search(r"bind \*?:", mends)
    assert "errorfile 50" not in re.sub(r"{%.*?%}|.*/error-grpc-.*", "", mends)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("defaults\n", "defaults ours\n"),
        ("frontend http_frontend\n", "frontend web\n"),
        (" mode 666 ", " mode 777 "),
        ("frontend prometheus\n", "frontend prometheus\n    maxconn 9\n"),
        ("listen stats\n", "listen stats\n  maxconn 9\n"),
        ("frontend prometheus\n", "frontend figures\n"),
        ("listen stats\n", "listen statistics\n"),
        ("frontend grpc_frontend\n", "frontend calls\n"),
    ],
)
def test_what_is_promised_and_finds_no_line_to_stand_in_is_not_left_out(old: str, new: str) -> None:
    assert old in TEMPLATES
    with pytest.raises(InvalidConfig, match="by this version of Ray"):
        mended(TEMPLATES.replace(old, new), FOLDER)


def test_serve_keeps_idle_connections_longer_than_the_minute_of_pools_and_proxies_in_front() -> None:
    """What one of them sends at the moment of closing is lost."""
    assert "timeout http-keep-alive {{ config.timeout_http_keep_alive_s }}s" in mended(TEMPLATES, FOLDER)
    config = haproxy.HAProxyConfig(http_options=HTTPOptions(), socket_path="s")
    assert config.timeout_http_keep_alive_s == 90  # as docs/operate.md says


def test_only_where_there_is_another_replica_one_is_soon_taken_for_frozen() -> None:
    def whole(*servers: str) -> str:
        backend = ["backend x", "    default-server fall 2 inter 5s check", *servers, "    server y 1:2 check backup"]
        return mended(SAMPLE + "\n".join([*backend, ""]), FOLDER)

    def watched(*servers: str) -> str:
        return whole(*servers).partition("backend x\n")[2].partition("    server")[0]

    one, two = "    server a 1:2 check observe layer4", "    server b 1:3 proto h2 check"
    assert watched(one) == "    default-server fall 2 inter 5s check\n"
    soon = "    default-server fall 2 inter 5s check inter 1s\n    timeout connect 2s\n"
    assert watched(one, two) == f"{soon}{CHOSEN}\n"
    assert f"lua-load {FOLDER}/soonest.lua \n" in whole(one)  # nobody is asked for his load
    assert f"lua-load {FOLDER}/soonest.lua a=1:2 c=1:4\n" in whole(one, "    server c 1:4 check observe layer4")


def test_errors_have_the_shape_of_all_others() -> None:
    files, lines = error_files(FOLDER), mended(SAMPLE, FOLDER)
    for status, (code, detail) in ERRORS.items():
        path = FOLDER / f"error-http-{status}"
        assert f"http-error status {status} content-type {MEDIA_TYPE} lf-file {path}\n" in lines
        shapes = re.fullmatch(r"%\[var\(txn\.openai,0\),iif\('(.*)','(.*)'\)\]", files[path])
        assert shapes
        openai, problem = map(json.loads, shapes.groups())
        assert OpenAIError.model_validate(openai, strict=True) == openai_error_of_status(status, detail)
        assert Problem.model_validate(problem, strict=True) == problem_of_status(status, detail, code, "")


@given(st.one_of(st.sampled_from(PATHS), st.from_regex(OPENAI_PATHS, alphabet=string.printable)), st.text("/ax"))
def test_openais_paths_are_those_of_the_endpoint(path: str, more: str) -> None:
    assert bool(re.search(OPENAI_PATHS, path + more)) == speaks_openai(path + more)


def test_callers_over_grpc_hear_a_status_of_grpc() -> None:
    lines = error_files(FOLDER)[FOLDER / "error-grpc-503"].split("\r\n")
    assert lines[0] == "HTTP/1.1 200 OK"
    assert {"content-type: application/grpc", "grpc-status: 14", f"grpc-message: {ERRORS[503][1]}"} < set(lines)
    assert lines[-2:] == ["", ""]


def test_both_protocols_are_encrypted_in_the_templates_of_this_ray() -> None:
    files = ServerTls(certificate=Path("c.pem"), key=Path("k.pem"), client_ca=Path("ca.pem"))
    lines = tls.encrypted(mended(TEMPLATES, FOLDER), FOLDER, files).splitlines()
    open_lines = [
        line for line in lines if re.match(" *bind ", line) and " ssl " not in line and "127.0.0.1" not in line
    ]
    assert sorted(line.split()[1] for line in open_lines) == ["unix@/tmp/x/g", "unix@/tmp/x/h"]
    assert all(" mode 600" in line for line in open_lines)
    assert sum("verify required" in line for line in lines) == 2


def test_where_nothing_can_be_encrypted_nothing_is_served() -> None:
    files = ServerTls(certificate=Path("c.pem"), key=Path("k.pem"))
    for config in (SAMPLE.replace("http_frontend", "web"), SAMPLE + "frontend grpc_frontend\nbackend x\n"):
        with pytest.raises(InvalidConfig, match=r"no line of (http|grpc)_frontend to encrypt"):
            tls.encrypted(config, FOLDER, files)


def test_no_version_of_tls_is_spoken_that_is_broken() -> None:
    files = ServerTls(certificate=Path("c.pem"), key=Path("k.pem"))
    lines = tls.encrypted(mended(TEMPLATES, FOLDER), FOLDER, files).splitlines()
    encrypted = [line for line in lines if " ssl crt " in line]
    assert len(encrypted) == 2
    assert all(" ssl-min-ver TLSv1.2 " in line for line in encrypted)


def test_links_lead_to_the_files_of_the_latest_start(tmp_path: Path) -> None:
    """HAProxy is started in the same folder again and again, whenever a replica comes or goes."""
    for name in ("former", "ours"):
        files = ServerTls(certificate=tmp_path / f"{name}.pem", key=tmp_path / f"{name}.key")
        tls.link(tmp_path, files)
    assert [(tmp_path / name).readlink() for name in (tls.CERTIFICATE, f"{tls.CERTIFICATE}.key")] == [
        files.certificate,
        files.key,
    ]


def test_haproxy_is_told_of_renewed_files_until_it_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[str | None] = [None, "no", "yes"]  # None: it does not answer
    parents, told = iter([7, 7, 7, 7, 1]), list[str]()

    def tell(commands: Path, command: str) -> str:
        if (said := answers.pop(0)) is None:
            raise OSError("refused")
        told.append(command.split(" ")[0])
        return said

    renewed = iter([True, False, False, False])
    found = SimpleNamespace(changed=lambda: next(renewed), current=[("cert", tls.CERTIFICATE, "PEM")])
    monkeypatch.setattr(tls, "Renewed", lambda *_: found)
    monkeypatch.setattr(tls, "tell", tell)
    monkeypatch.setattr(tls, "POLL_S", 0.0)
    monkeypatch.setattr(tls.os, "getppid", lambda: next(parents))
    tls.follow(ServerTls(certificate=Path("c.pem"), key=Path("k.pem")), FOLDER, FOLDER / "commands", 7)
    assert told == ["set", "commit"]


def test_serves_own_proxy_has_no_tls() -> None:
    files = {"certificate": "c.pem", "key": "k.pem"}
    with pytest.raises(InvalidConfig, match="tls needs proxy: haproxy"):
        parse({"serving": {"proxy": "python", "tls": files}})
    assert parse({"serving": {"tls": files}}).serving.http_url == "https://127.0.0.1:8000"
