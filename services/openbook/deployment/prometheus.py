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
        "openbook:answer_seconds:p90_1m": _quantile(0.9, f'{seconds}{{method="Answer"}}'),
        "openbook:search_seconds:p90_1m": _quantile(0.9, 'openbook_shard_seconds_bucket{method="Search"}', "shard"),
        "openbook:cache_hits:ratio1m": f'1 - sum(rate({of_stages}{{stage="encode"}}[1m]))'
        f' / sum(rate({of_stages}{{stage="cache"}}[1m]))',
    }


def often(ratio: str) -> str:
    """One request in twenty, and three a minute: one that fails in a quiet night wakes nobody."""
    return f"{ratio} > 0.05 and {ratio} * openbook:requests:rate1m > 0.05"


def alerts(topology: Topology) -> list[Alert]:
    """Those that hold wherever it runs; what is slow follows from the time that an answer has."""
    timeout_s = topology.answer_timeout_s
    servers = "openbook_shard_servers"
    none_answers = f'min by (shard) ({servers}{{shard!="", state="answers"}}) == 0'
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
            "0s",
            'sum(rate(openbook_refused_total{want="keys"}[1m])) > 0',
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
            f"openbook:answer_seconds:p90_1m > {timeout_s / 2:g} and {BUSY}",
            f"one answer in ten takes longer than {{{{ $value | humanizeDuration }}}}, of {timeout_s:g} s",
        ),
        Alert(
            "OpenbookReplicaLost",
            "ticket",
            "lose-a-shard",
            "1m",
            f'max by (shard) ({servers}{{state="gone"}}) > 0 unless on (shard) {none_answers}',
            "{{ $value }} servers of shard {{ $labels.shard }} do not answer",
        ),
        Alert(
            "OpenbookShardSlow",
            "ticket",
            "slow-answers",
            BEYOND_ONE_MOMENT,
            f"openbook:search_seconds:p90_1m > {timeout_s / 10:g} and on () {BUSY}",
            "one search of shard {{ $labels.shard }} in ten takes longer than {{ $value | humanizeDuration }}",
        ),
        Alert(
            "OpenbookCacheLost",
            "ticket",
            "lose-redis",
            BEYOND_ONE_MOMENT,
            # Of those that ask it: who failed once and was asked nothing since says 0 for ever.
            "count(openbook_cache_up == 0 and on (job, instance)"
            ' rate(openbook_stage_seconds_count{stage="cache"}[1m]) > 0) > 0',
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
            "30s",
            "sum(rate(openbook_index_list_errors_total[1m])) > 0",
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


def ports(topology: Topology) -> range:
    """Where a machine's processes may be read: each takes the first free one."""
    return topology.metrics_ports


def _config(topology: Topology, machines: Sequence[str], **more: Any) -> str:
    targets = [f"{machine}:{port}" for machine in machines for port in ports(topology)]
    config = {
        "global": {"scrape_interval": EVERY, "evaluation_interval": EVERY},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": topology.name, **more, "static_configs": [{"targets": targets}]}],
    }
    return to_yaml(config, about="Targets that nobody listens at are down: as many processes run as the others.")


def _quantile(share: float, of: str, *by: str) -> str:
    return f"histogram_quantile({share}, sum by ({', '.join([*by, 'le'])}) (rate({of}[1m])))"
