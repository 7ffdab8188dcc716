"""What Prometheus is told: which processes to read, what to derive from them, and when to call somebody."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from openbook.deployment.files import to_yaml
from openbook.deployment.topology import Topology

FOLDER = "deploy/prometheus"
EVERY = "15s"
"""Between two scrapes. Rules look back a minute, which needs four of them."""
ASKED = 'method=~"Answer.*|Retrieve|Embed|GetPassage"'
"""The endpoint's methods: index servers count theirs under the same name."""
NOT_OURS = "OK|CANCELLED|RESOURCE_EXHAUSTED|INVALID_ARGUMENT|NOT_FOUND|PERMISSION_DENIED|UNAUTHENTICATED"
"""Codes of requests that did not fail, were refused, or were at fault themselves."""


BEYOND_ONE_MOMENT = "1m"
"""As far as rates look back: what was bad for some seconds and is over is not told."""
BUSY = "openbook:requests:rate1m > 0.1"
"""Six requests a minute: of fewer no tenth can be told."""
SLOW_ANSWER_S, SLOW_SEARCH_S = 240.0, 7.5
"""Slow, whatever the settings say: no quantile is told to be beyond a histogram's last bucket, of 300 and of 10 s."""


class Alert(NamedTuple):
    """Who is called, when, and where he reads what to do."""

    name: str
    severity: str  # page: users notice, now; ticket: they may, if nobody looks
    runbook: str  # a section of docs/runbooks.md
    wait: str  # for how long it must be so
    expression: str
    summary: str


def records() -> dict[str, str]:
    """Series that several readers need, and what they are."""
    asked, seconds = f"openbook_requests_total{{{ASKED}}}", "openbook_request_seconds_bucket"
    failed = f'openbook_requests_total{{{ASKED}, code!~"{NOT_OURS}"}}'
    refused = 'openbook_refused_total{want=~"places|work|time|room"}'
    of_stages = "openbook_stage_seconds_count"
    return {
        "openbook:requests:rate1m": f"sum(rate({asked}[1m]))",
        "openbook:failures:ratio1m": f"(sum(rate({failed}[1m])) or vector(0)) / (openbook:requests:rate1m > 0)",
        "openbook:refusals:ratio1m": f"(sum(rate({refused}[1m])) or vector(0)) / (openbook:requests:rate1m > 0)",
        "openbook:answer_seconds:p90_1m": _p90(f'{seconds}{{method="Answer"}}'),
        "openbook:search_seconds:p90_1m": _p90('openbook_shard_seconds_bucket{method=~"Search|Candidates"}', "shard"),
        "openbook:cache_hits:ratio1m": f'1 - sum(rate({of_stages}{{stage="encode"}}[1m]))'
        f' / sum(rate({of_stages}{{stage="cache"}}[1m]))',
    }


def several(rate: str) -> str:
    """Three a minute: one that fails in a quiet night wakes nobody."""
    return f"{rate} > 0.05"


def often(ratio: str) -> str:
    """One request in twenty, and three a minute."""
    return f"{ratio} > 0.05 and {several(f'{ratio} * openbook:requests:rate1m')}"


def alerts(topology: Topology) -> list[Alert]:
    """Those that hold wherever it runs; what is slow follows from the time that an answer and a search have."""
    settings = topology.served
    timeout_s = settings.answer.timeout_s
    slow_answer_s = min(timeout_s / 2, SLOW_ANSWER_S)
    slow_search_s = min(timeout_s / 10, settings.index.timeout_s / 2, SLOW_SEARCH_S)
    servers = "openbook_shard_servers"
    answer = f'{servers}{{shard!="", state="answers"}}'
    none_answers = f"min by (shard) ({answer}) == 0"
    # DNS, and Ray, list nobody who is dead: nobody is gone, and fewer answer.
    gone = f'max by (shard) ({servers}{{state="gone"}}) > 0'
    fewer = f"max by (shard) (max_over_time({answer}[15m]) - {answer}) > 0"
    return [
        Alert(
            "OpenbookEndpointLost",
            "page",
            "lose-the-head",
            "30s",
            'absent(openbook_process{role="ingress"})',
            "no replica of the endpoint can be read",
        ),
        Alert(
            "OpenbookQuestionsFail",
            "page",
            "questions-fail",
            BEYOND_ONE_MOMENT,
            often("openbook:failures:ratio1m"),
            "{{ $value | humanizePercentage }} of requests fail",
        ),
        Alert(
            "OpenbookShardLost",
            "page",
            "lose-a-shard",
            "30s",
            none_answers,
            "no server of shard {{ $labels.shard }} answers",
        ),
        Alert(
            "OpenbookKeysLost",
            "page",
            "lose-redis",
            # Keys that are known are let in for a minute: with another one nobody would hear of it within two.
            "45s",
            several('sum(rate(openbook_refused_total{want="keys"}[1m]))'),
            "keys cannot be read: callers are refused",
        ),
        Alert(
            "OpenbookOverloaded",
            "page",
            "overload",
            BEYOND_ONE_MOMENT,
            often("openbook:refusals:ratio1m"),
            "{{ $value | humanizePercentage }} of requests are refused for want of room or time",
        ),
        Alert(
            "OpenbookAnswersSlow",
            "ticket",
            "slow-answers",
            BEYOND_ONE_MOMENT,
            f"openbook:answer_seconds:p90_1m > {slow_answer_s:g} and {BUSY}",
            f"one answer in ten takes longer than {{{{ $value | humanizeDuration }}}}, of {timeout_s:g} s",
        ),
        Alert(
            "OpenbookReplicaLost",
            "ticket",
            "lose-a-shard",
            "1m",
            f"({gone} or {fewer}) unless on (shard) {none_answers}",
            "{{ $value }} servers of shard {{ $labels.shard }} do not answer",
        ),
        Alert(
            "OpenbookShardSlow",
            "ticket",
            "slow-answers",
            BEYOND_ONE_MOMENT,
            f"openbook:search_seconds:p90_1m > {slow_search_s:g} and on () {BUSY}",
            "one search of shard {{ $labels.shard }} in ten takes longer than {{ $value | humanizeDuration }}",
        ),
        Alert(
            "OpenbookCacheLost",
            "ticket",
            "lose-redis",
            BEYOND_ONE_MOMENT,
            # Of those that ask it: who failed once, and then knew all that he was asked, says 0 for ever.
            "count(openbook_cache_up == 0 and on (job, instance, tier) rate(openbook_cache_lookups_total[1m]) > 0) > 0",
            "Redis fails: every question is encoded",
        ),
        Alert(
            "OpenbookCacheOverwritten",
            "ticket",
            "lose-redis",
            "0s",
            'sum(rate(openbook_cache_errors_total{operation=~"digest|value"}[1m])) > 0',
            "Redis holds what openbook has not written",
        ),
        Alert(
            "OpenbookCrashLoop",
            "ticket",
            "a-process-dies-again-and-again",
            "0s",
            "changes(process_start_time_seconds[5m]) >= 3 and on (job, instance) openbook_process",
            "{{ $labels.instance }} was started {{ $value }} times in five minutes",
        ),
        Alert(
            "OpenbookSnapshotsDiffer",
            "ticket",
            "publish",
            "1m",
            'count(count by (snapshot) (openbook_index_snapshots{state="current"})) > 1',
            "index servers have different snapshots: one of them missed a publication",
        ),
        Alert(
            "OpenbookServerListLost",
            "ticket",
            "lose-a-shard",
            BEYOND_ONE_MOMENT,
            several("sum(rate(openbook_index_list_errors_total[1m]))"),
            "the list of index servers cannot be read: changes of it go unnoticed",
        ),
    ]


def groups(topology: Topology) -> dict[str, Any]:
    """All of them, as a file of rules, and as the `spec` of a PrometheusRule."""
    found = [
        {
            "alert": each.name,
            "expr": each.expression,
            "for": each.wait,
            "labels": {"severity": each.severity},
            "annotations": {"summary": each.summary, "runbook_url": f"{topology.runbooks}#{each.runbook}"},
        }
        for each in alerts(topology)
    ]
    recorded = [{"record": name, "expr": expression} for name, expression in records().items()]
    return {"groups": [{"name": "openbook", "interval": EVERY, "rules": [*recorded, *found]}]}


def files(topology: Topology) -> dict[str, str]:
    """Rules and configurations by path."""
    found = {f"{FOLDER}/rules.yaml": to_yaml(groups(topology))}
    if topology.kubernetes:
        of_names = [
            {"names": ["openbook-index"], "type": "A", "port": topology.ports.metrics, "refresh_interval": EVERY}
        ]
        found[f"{FOLDER}/compose.yaml"] = _config(topology, ["endpoint"], dns_sd_configs=of_names)
    if hosts := topology.on_premise:
        found[f"{FOLDER}/on-premise.yaml"] = _config(topology, [hosts.head, *hosts.workers])
    return found


def _config(topology: Topology, machines: Sequence[str], **more: Any) -> str:
    targets = [f"{machine}:{port}" for machine in machines for port in topology.metrics_ports]
    told = [{"targets": list(topology.alertmanagers)}]
    config = {
        "global": {"scrape_interval": EVERY, "evaluation_interval": EVERY},
        **({"alerting": {"alertmanagers": [{"static_configs": told}]}} if topology.alertmanagers else {}),
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": topology.name, **more, "static_configs": [{"targets": targets}]}],
    }
    return to_yaml(config, about="Targets that nobody listens at are down: as many processes run as the others.")


def _p90(of: str, *by: str) -> str:
    return f"histogram_quantile(0.9, sum by ({', '.join([*by, 'le'])}) (rate({of}[1m])))"
