"""`openbook up`: what it serves when nothing is named, and what it says of the page."""

import json
import logging
import signal
import sys
import time
import webbrowser
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import NoReturn

import pytest
import trustme
from typer.testing import CliRunner

from openbook import demo
from openbook.cli import app
from openbook.config import Settings
from openbook.serving.launch import local

EMBEDDED = Path("the/embedded/corpus")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Path | None]:
    """The snapshots of all systems that were started, and their files of settings."""
    started: list[Path | None] = []

    @contextmanager
    def local_system(snapshot: Path | None, settings: Settings, settings_file: Path | None) -> Iterator[Settings]:
        started.extend([snapshot, settings_file] if settings_file else [snapshot])
        yield settings

    monkeypatch.setattr(local, "local_system", local_system)
    monkeypatch.setattr(demo, "embedded_snapshot", lambda folder: EMBEDDED)
    monkeypatch.setattr("openbook.logs.setup_logging", lambda role: None)
    monkeypatch.setattr(time, "sleep", stop)  # it would, until it is stopped
    return started


def stop(seconds: float) -> NoReturn:
    raise SystemExit(0)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that a browser was sent to."""
    addresses: list[str] = []
    monkeypatch.setattr(webbrowser, "open", addresses.append)
    return addresses


def up(*options: str, env: dict[str, str] | None = None) -> str:
    result = CliRunner().invoke(app, ["up", *options], env=env, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_without_a_snapshot_it_serves_the_embedded_corpus(served: list[Path | None], opened: list[str]) -> None:
    assert "ready: http://127.0.0.1:8000/ in a browser, gRPC 127.0.0.1:9000" in up()
    assert (served, opened) == ([EMBEDDED], [])


def test_a_snapshot_or_index_servers_that_are_named_are_served(served: list[Path | None]) -> None:
    up("snapshot")
    up(env={"OPENBOOK_INDEX__ADDRESSES": '["10.0.0.5:7000"]'})
    assert served == [Path("snapshot"), None]


def test_what_the_file_says_of_index_servers_is_for_those_that_it_starts(
    served: list[Path | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "follow", lambda path, settings, seen, look: None)
    (tmp_path / "openbook.yaml").write_text("index_server: {n_threads: 2}")
    up("snapshot", "--config", str(tmp_path / "openbook.yaml"))
    assert served == [Path("snapshot"), tmp_path / "openbook.yaml"]


def test_it_opens_the_page_if_asked_to(served: list[Path | None], opened: list[str]) -> None:
    up("--open", env={"OPENBOOK_SERVING__HTTP_PORT": "8765"})
    assert opened == ["http://127.0.0.1:8765/"]


def test_where_it_listens_everywhere_the_page_has_an_address_that_opens(served: list[Path | None]) -> None:
    assert "ready: http://localhost:8000/ in a browser, gRPC 0.0.0.0:9000" in up(
        env={"OPENBOOK_SERVING__HOST": "0.0.0.0"}
    )


@pytest.mark.parametrize("follows", [False, True])
def test_it_says_what_becomes_of_a_renewed_certificate(
    follows: bool,
    served: list[Path | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """HAProxy takes it by itself, and says so where nobody looks. With a file of settings as without."""
    certificate, key, config = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "openbook.yaml"

    def renew() -> None:
        issued = trustme.CA().issue_cert("localhost")
        key.write_bytes(issued.private_key_pem.bytes())
        certificate.write_bytes(issued.cert_chain_pems[0].bytes())

    steps: list[Callable[[], object]] = [lambda: certificate.write_text("half of"), renew, lambda: stop(0)]
    renew()
    config.write_text("{}")
    monkeypatch.setattr(time, "sleep", lambda seconds: steps.pop(0)())
    with caplog.at_level(logging.INFO, "openbook"):
        up(
            *(["--config", str(config)] if follows else []),
            env={"OPENBOOK_SERVING__TLS": json.dumps({"certificate": str(certificate), "key": str(key)})},
        )
    unusable, renewed = caplog.messages
    assert "its files cannot be used" in unusable
    assert unusable.endswith("the former certificate goes on")
    assert renewed == "serving.tls: certificates were renewed"


def test_what_an_index_server_says_is_read_on_where_nobody_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its pipe would close, and of all that it says later nothing would be in the log, nor why it ended."""
    said = deque[str]()
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "__stderr__", full)
        local._pass_on(StringIO("one\ntwo\n"), said)
    assert list(said) == ["one", "two"]


def test_the_corpus_is_built_once(tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    assert demo.embedded_snapshot(tmp_path) == tmp_path / "snapshot"


def test_signals_that_were_ignored_at_the_start_still_are() -> None:
    """SIGHUP under `nohup`; SIGINT where a script starts it in the background."""
    former = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGHUP, signal.SIGINT)}
    try:
        reached = False
        with local.until_stopped():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGINT)
            reached = True
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("SIGTERM stops it all the same")
        assert reached
        assert [signal.getsignal(each) for each in former] == [signal.SIG_IGN] * 2
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)


def test_a_second_signal_does_not_cut_the_clean_stop_short() -> None:
    former, is_clean = signal.getsignal(signal.SIGINT), False
    with local.until_stopped():
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.raise_signal(each)
            is_clean = True
    assert is_clean
    assert signal.getsignal(signal.SIGINT) is former
