"""Each process's metrics can be read at a port of its own."""

import logging
import urllib.request
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from openbook import telemetry
from openbook.errors import PortInUse, StartupError
from openbook.processes import free_ports
from openbook.telemetry import MetricsServer


def read(port: int | None) -> dict[str, float]:
    """What a process says of what it is."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics") as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    assert {"process_start_time_seconds", "openbook_stage_seconds"} <= {family.name for family in families}
    (family,) = (family for family in families if family.name == "openbook_process")
    return {sample.labels["role"]: sample.value for sample in family.samples}


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("openbook_refused_total", {"by": "endpoint", "want": "keys"}),
        ("openbook_cache_errors_total", {"operation": "digest"}),
        ("openbook_cache_errors_total", {"operation": "value"}),
        ("openbook_index_list_errors_total", {}),
    ],
)
def test_the_first_of_what_alerts_look_for_is_seen_as_a_rise(name: str, labels: dict[str, str]) -> None:
    assert REGISTRY.get_sample_value(name, labels) is not None


def test_processes_that_are_told_the_same_port_share_a_range() -> None:
    first = free_ports(telemetry.N_METRICS_PORTS)
    with MetricsServer("one", "127.0.0.1", first) as one, MetricsServer("two", "127.0.0.1", first) as two:
        assert (one.port, two.port) == (first, first + 1)
        assert read(one.port)["one"] == read(two.port)["two"] == 1
    with MetricsServer("three", "127.0.0.1", first) as again:
        assert again.port == first


def test_nothing_listens_where_no_port_was_named() -> None:
    with MetricsServer("silent", "127.0.0.1", None) as server:
        assert server.port is None
    with MetricsServer("any", "127.0.0.1", 0) as server:
        assert server.port
        assert read(server.port)["any"] == 1


def test_where_they_are_is_told_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener = SimpleNamespace(server_port=9)
    monkeypatch.setattr(telemetry, "start_http_server", lambda *_: (listener, None))
    with caplog.at_level(logging.INFO, telemetry.__name__):
        for host in ("127.0.0.1", "::1"):
            MetricsServer("one", host, 9)
    assert [each.split()[-1] for each in caplog.messages] == ["http://127.0.0.1:9/metrics", "http://[::1]:9/metrics"]


def test_where_nobody_can_listen_the_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "N_METRICS_PORTS", 1)
    with (
        MetricsServer("one", "127.0.0.1", 0) as one,
        pytest.raises(PortInUse, match=rf"ports {one.port}\.\.{one.port} are all taken"),
    ):
        MetricsServer("two", "127.0.0.1", one.port)
    with pytest.raises(StartupError, match=r"203\.0\.113\.1:9: cannot listen"):
        MetricsServer("elsewhere", "203.0.113.1", 9)
