"""Rules and dashboards: what they name exists, what is wrong fires its alert, and what is right fires none."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.utils import floatToGoString
from scripts import load_script

from openbook import config
from openbook.deployment import prometheus, render
from openbook.telemetry import REQUEST_SECONDS, SHARD_SECONDS

ROOT = Path(__file__).parents[2]
TOPOLOGY = render.load(ROOT / "deploy" / "topology.yaml")
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
RECORDED = sorted((ROOT / "tests" / "prometheus").glob("*.yaml"))
PAGE = (ROOT / "docs" / "operate.md").read_text()
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool")


def promtool(*arguments: str | Path) -> str:
    """What it says; it has to be content."""
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


MAKE = load_script(ROOT / "deploy" / "grafana" / "make.py")


def expressions() -> list[str]:
    """Of all dashboards."""
    boards = [json.loads((MAKE.FOLDER / f"{name}.json").read_text()) for name in MAKE.BOARDS]
    return [target["expr"] for board in boards for panel in board["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("name", MAKE.BOARDS)
def test_a_dashboard_is_what_its_script_makes(name: str) -> None:
    assert (MAKE.FOLDER / f"{name}.json").read_text() == MAKE.text(name), "run: python deploy/grafana/make.py"


def test_every_metric_of_the_endpoint_and_the_index_tier_is_on_a_dashboard() -> None:
    rows = re.findall(r"^\| `(openbook_\w+)` \|", PAGE, re.MULTILINE)
    shown = " ".join([*expressions(), RULES.read_text()])
    assert len(rows) > 20
    assert [name for name in rows if name not in shown] == []


def test_what_dashboards_take_from_rules_is_recorded_there() -> None:
    named = {name for text in expressions() for name in re.findall(r"openbook:[\w:]+", text)}
    assert named
    assert named <= set(prometheus.records())


def test_every_alert_says_what_to_do_and_was_seen_to_fire() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "runbooks.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    alerts = prometheus.alerts(TOPOLOGY)
    assert {alert.runbook for alert in alerts} <= anchors
    tests = [yaml.safe_load(path.read_text())["tests"][0]["promql_expr_test"] for path in RECORDED]
    fired = {each["labels"] for test in tests for check in test for each in check["exp_samples"]}
    assert fired == {f'{{alertname="{alert.name}"}}' for alert in alerts}


@needs_promtool
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_what_was_recorded_fires_what_it_should_within_two_minutes_and_nothing_before(path: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", path)


@needs_promtool
@pytest.mark.parametrize(("failing", "fires"), [("0+0x6 1+0x13", []), ("0+1x20", ["OpenbookQuestionsFail"])])
def test_one_failure_in_a_quiet_night_wakes_nobody(failing: str, fires: list[str], tmp_path: Path) -> None:
    """One question every 15 s is answered; another one fails once, or all the time."""
    series = {
        'openbook_requests_total{method="Answer", code="OK"}': "0+1x20",
        'openbook_requests_total{method="Answer", code="INTERNAL"}': failing,
    }
    fire(series, fires, tmp_path)


@needs_promtool
@pytest.mark.parametrize(("asked", "fires"), [("0+1x5 5+0x14", []), ("0+1x20", ["OpenbookCacheLost"])])
def test_one_slow_read_of_the_cache_before_a_quiet_night_is_no_loss(
    asked: str, fires: list[str], tmp_path: Path
) -> None:
    """The last call of one replica to Redis fails, or all from then on; one question is found in process all the time.
    Another replica asks Redis, and is content.
    """
    series = {
        'openbook_cache_up{tier="redis", instance="a"}': "1+0x4 0+0x14",
        'openbook_cache_lookups_total{tier="redis", outcome="miss", instance="a"}': asked,
        'openbook_cache_lookups_total{tier="memory", outcome="hit", instance="a"}': "0+1x20",
        'openbook_stage_seconds_count{stage="cache", instance="a"}': "0+1x20",
        'openbook_cache_up{tier="redis", instance="b"}': "1+0x20",
        'openbook_cache_lookups_total{tier="redis", outcome="hit", instance="b"}': "0+1x20",
    }
    fire(series, fires, tmp_path)


@needs_promtool
@pytest.mark.parametrize(
    ("name", "alert"),
    [
        ("openbook_index_list_errors_total", "OpenbookServerListLost"),
        ('openbook_refused_total{by="endpoint", want="keys"}', "OpenbookKeysLost"),
    ],
)
def test_what_failed_once_wakes_nobody(name: str, alert: str, tmp_path: Path) -> None:
    fire({name: "0+0x6 1+0x13"}, [], tmp_path)
    fire({name: "0+0x6 0+2x13"}, [alert], tmp_path)


@needs_promtool
@pytest.mark.parametrize(
    ("answer", "gone", "fires"),
    [
        ("2+0x4 1+0x15", "0+0x4 1+0x15", ["OpenbookReplicaLost"]),
        ("2+0x4 1+0x15", "0+0x20", ["OpenbookReplicaLost"]),
        ("2+0x4 1+0x2 2+0x12", "0+0x20", []),
        ("1+0x4 2+0x15", "0+0x20", []),
        ("2+0x4 0+0x15", "0+0x20", ["OpenbookShardLost"]),
    ],
)
def test_a_replica_is_missed_whether_it_is_listed_or_not(
    answer: str, gone: str, fires: list[str], tmp_path: Path
) -> None:
    """DNS, and Ray, drop from their lists who died."""
    states = {"answers": answer, "gone": gone}
    fire({f'openbook_shard_servers{{shard="0", state="{name}"}}': states[name] for name in states}, fires, tmp_path)


@needs_promtool
@pytest.mark.parametrize("method", ["Search", "Candidates"])
@pytest.mark.parametrize(("timeout_s", "of_a_call_s"), [(10, 2), (30, 2), (300, 30)])
def test_searches_that_are_cut_off_are_slow(method: str, timeout_s: float, of_a_call_s: float, tmp_path: Path) -> None:
    """However long an answer may take, and whoever finds the passages."""
    rules = rules_for(tmp_path, answer={"timeout_s": timeout_s}, index={"timeout_s": of_a_call_s})
    name = f'openbook_shard_seconds_bucket{{method="{method}", shard="0", le="{{}}"}}'
    series = {'openbook_requests_total{method="Answer", code="OK"}': "0+5x20"}
    fire(series | of_histogram(SHARD_SECONDS, name, of_a_call_s), ["OpenbookShardSlow"], tmp_path, rules)


@needs_promtool
@pytest.mark.parametrize("timeout_s", [10, 120, 300, 1000])
def test_answers_that_need_most_of_their_time_are_slow(timeout_s: float, tmp_path: Path) -> None:
    rules = rules_for(tmp_path, answer={"timeout_s": timeout_s, "max_timeout_s": 1000})
    name = 'openbook_request_seconds_bucket{method="Answer", le="{}"}'
    series = {'openbook_requests_total{method="Answer", code="OK"}': "0+5x20"}
    fire(series | of_histogram(REQUEST_SECONDS, name, 0.9 * timeout_s), ["OpenbookAnswersSlow"], tmp_path, rules)


def of_histogram(kind: Any, name: str, seconds: float) -> dict[str, str]:
    """Buckets, in `name` each by its bound, of what takes so long each time."""
    bounds = kind._kwargs["buckets"]
    return {
        name.replace("{}", floatToGoString(bound)): "0+5x20" if seconds <= bound else "0+0x20"
        for bound in (*bounds, float("inf"))
    }


def rules_for(folder: Path, **settings: dict[str, Any]) -> Path:
    """The rules where the endpoint has these settings."""
    values = yaml.safe_load((ROOT / "deploy" / "topology.yaml").read_text())
    values["endpoint"]["settings"] |= settings
    files = render.render(config.section(render.Topology, "t.yaml", **values))
    path = folder / "rules.yaml"
    path.write_text(files["deploy/prometheus/rules.yaml"])
    return path


def fire(series: dict[str, str], fires: list[str], tmp_path: Path, rules: Path = RULES) -> None:
    """These alerts alone, in the five minutes of the series: one value every 15 s."""
    series = {'openbook_process{role="ingress"}': "1+0x20", **series}
    check = {
        "expr": 'group by (alertname) (max_over_time(ALERTS{alertstate="firing"}[5m]))',
        "eval_time": "5m",
        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in fires],
    }
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "15s", "input_series": inputs, "promql_expr_test": [check]}
    whole = {"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": [test]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(whole))
    promtool("test", "rules", tmp_path / "test.yaml")


@needs_promtool
def test_a_fault_that_no_alert_tells_of_is_noticed(tmp_path: Path) -> None:
    """That the tests above can fail."""
    test: dict[str, Any] = yaml.safe_load((ROOT / "tests/prometheus/replica-lost.yaml").read_text())
    rules = RULES.read_text().replace("OpenbookReplicaLost", "OpenbookSomething")
    (tmp_path / "rules.yaml").write_text(rules)
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({**test, "rule_files": ["rules.yaml"]}))
    with pytest.raises(AssertionError, match="OpenbookReplicaLost"):
        promtool("test", "rules", tmp_path / "test.yaml")


@needs_promtool
def test_prometheus_accepts_configurations_and_every_expression_of_a_dashboard(tmp_path: Path) -> None:
    configurations = [path for path in RULES.parent.glob("*.yaml") if path != RULES]
    assert len(configurations) == 2
    promtool("check", "config", *configurations)
    shown = [expression.replace("$__rate_interval", "1m") for expression in expressions()]
    rules = [{"record": f"x{i}", "expr": expression} for i, expression in enumerate(shown)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "x", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", "--lint=none", tmp_path / "rules.yaml")


@needs_promtool
def test_prometheus_tells_the_alertmanagers_that_the_topology_names(tmp_path: Path) -> None:
    files = prometheus.files(TOPOLOGY.model_copy(update={"alertmanagers": ("10.0.0.5:9093", "alerts:9093")}))
    paths = [tmp_path / Path(name).name for name in files]
    for path, text in zip(paths, files.values(), strict=True):
        path.write_text(text)
    configurations = [path for path in paths if path.name != RULES.name]
    promtool("check", "config", *configurations)
    for path in configurations:
        (told,) = yaml.safe_load(path.read_text())["alerting"]["alertmanagers"]
        assert told == {"static_configs": [{"targets": ["10.0.0.5:9093", "alerts:9093"]}]}
    assert "alerting" not in prometheus.files(TOPOLOGY)[f"{prometheus.FOLDER}/compose.yaml"]


def test_the_page_labels_all_that_the_operator_reads() -> None:
    (labels,) = re.findall(r"^kubectl .* label podmonitor,prometheusrule -l (\S+)=(\S+) ", PAGE, re.MULTILINE)
    rendered = render.render(TOPOLOGY)
    read = [rendered[f"deploy/kubernetes/monitoring/{name}.yaml"] for name in ("rules", "pods")]
    metadata = [each["metadata"] for text in read for each in yaml.safe_load_all(text)]
    assert len(metadata) == 3
    assert all(each["labels"][labels[0]] == labels[1] for each in metadata)


def test_kubernetes_reads_every_port_of_every_pod_and_the_same_rules() -> None:
    rendered = render.render(TOPOLOGY)
    folder = "deploy/kubernetes/monitoring"
    (rules,) = yaml.safe_load_all(rendered[f"{folder}/rules.yaml"])
    assert rules["spec"] == yaml.safe_load(RULES.read_text())
    monitors = {each["metadata"]["name"]: each["spec"] for each in yaml.safe_load_all(rendered[f"{folder}/pods.yaml"])}
    read = [each["relabelings"][0] for each in monitors["openbook-endpoint"]["podMetricsEndpoints"]]
    assert [each["replacement"] for each in read] == [f"$1:{port}" for port in TOPOLOGY.metrics_ports]
    policies = yaml.safe_load_all(rendered["deploy/kubernetes/base/network-policies.yaml"])
    (policy,) = (each["spec"] for each in policies if each["metadata"]["name"] == "openbook-endpoint")
    allowed = {
        (port["port"], port["endPort"])
        for rule in policy["ingress"]
        for port in rule.get("ports", ())
        if "endPort" in port
    }
    assert allowed == {(TOPOLOGY.metrics_ports[0], TOPOLOGY.metrics_ports[-1])}


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl")
def test_kustomize_builds_what_the_operator_reads() -> None:
    command = ["kubectl", "kustomize", str(ROOT / "deploy/kubernetes/monitoring")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [each["kind"] for each in yaml.safe_load_all(done.stdout)] == ["PodMonitor", "PodMonitor", "PrometheusRule"]
