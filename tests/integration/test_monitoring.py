"""Rules and dashboards: what they name exists, what is wrong fires its alert, and what is right fires none."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts import load_script

from openbook.deployment import prometheus, render

ROOT = Path(__file__).parents[2]
TOPOLOGY = render.load(ROOT / "deploy" / "topology.yaml")
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
RECORDED = sorted((ROOT / "tests" / "prometheus").glob("*.yaml"))
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
    rows = re.findall(r"^\| `(openbook_\w+)` \|", (ROOT / "docs" / "operate.md").read_text(), re.MULTILINE)
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
    """The last call of one replica fails, or all from then on; another replica is asked all the time, and content."""
    series = {
        'openbook_cache_up{instance="a"}': "1+0x4 0+0x14",
        'openbook_stage_seconds_count{stage="cache", instance="a"}': asked,
        'openbook_cache_up{instance="b"}': "1+0x20",
        'openbook_stage_seconds_count{stage="cache", instance="b"}': "0+1x20",
    }
    fire(series, fires, tmp_path)


def fire(series: dict[str, str], fires: list[str], tmp_path: Path) -> None:
    """These alerts alone, in the five minutes of the series: one value every 15 s."""
    series = {'openbook_process{role="ingress"}': "1+0x20", **series}
    check = {
        "expr": 'group by (alertname) (max_over_time(ALERTS{alertstate="firing"}[5m]))',
        "eval_time": "5m",
        "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in fires],
    }
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "15s", "input_series": inputs, "promql_expr_test": [check]}
    whole = {"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": [test]}
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


def test_kubernetes_reads_every_port_of_every_pod_and_the_same_rules() -> None:
    rendered = render.render(TOPOLOGY)
    folder = "deploy/kubernetes/monitoring"
    (rules,) = yaml.safe_load_all(rendered[f"{folder}/rules.yaml"])
    assert rules["spec"] == yaml.safe_load(RULES.read_text())
    monitors = {each["metadata"]["name"]: each["spec"] for each in yaml.safe_load_all(rendered[f"{folder}/pods.yaml"])}
    read = [each["relabelings"][0] for each in monitors["openbook-endpoint"]["podMetricsEndpoints"]]
    assert [each["replacement"] for each in read] == [f"$1:{port}" for port in prometheus.ports(TOPOLOGY)]
    policies = yaml.safe_load_all(rendered["deploy/kubernetes/base/network-policies.yaml"])
    (policy,) = (each["spec"] for each in policies if each["metadata"]["name"] == "openbook-endpoint")
    allowed = {
        (port["port"], port["endPort"])
        for rule in policy["ingress"]
        for port in rule.get("ports", ())
        if "endPort" in port
    }
    assert allowed == {(prometheus.ports(TOPOLOGY)[0], prometheus.ports(TOPOLOGY)[-1])}


@pytest.mark.skipif(not shutil.which("kubectl"), reason="no kubectl")
def test_kustomize_builds_what_the_operator_reads() -> None:
    command = ["kubectl", "kustomize", str(ROOT / "deploy/kubernetes/monitoring")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [each["kind"] for each in yaml.safe_load_all(done.stdout)] == ["PodMonitor", "PodMonitor", "PrometheusRule"]
