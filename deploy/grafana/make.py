"""The dashboards beside this file, by Grafana's own SDK: `python deploy/grafana/make.py` writes dashboards/*.json."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef

FOLDER = Path(__file__).parent / "dashboards"
SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
RATE = "$__rate_interval"
ASKED = 'method=~"Answer.*|Retrieve|Embed|GetPassage"'
ROLE = "* on (job, instance) group_left (role) openbook_process"
"""Gives what a process tells the name of what it is."""


class Panel(NamedTuple):
    """One picture: its lines by what they are called, `{{label}}` filled in."""

    title: str
    unit: str  # as Grafana knows it: s, reqps, percentunit, bytes, short ...
    lines: Mapping[str, str]


def rate(metric: str, *by: str, matchers: str = "") -> str:
    """A second, summed by labels."""
    return f"sum by ({', '.join(by)}) (rate({metric}{{{matchers}}}[{RATE}]))"


def mean(metric: str, *by: str) -> str:
    """Of what a histogram counts."""
    return f"{rate(metric + '_sum', *by)} / {rate(metric + '_count', *by)}"


def quantile(share: float, metric: str, *by: str, matchers: str = "") -> str:
    """Of what a histogram counts."""
    return f"histogram_quantile({share}, {rate(metric + '_bucket', *by, 'le', matchers=matchers)})"


def only(role: str, expression: str) -> str:
    """Of processes of this role: others have some of their metrics too, at 0."""
    return f'{expression} and on (instance) openbook_process{{role=~"{role}"}}'


def processes(roles: str) -> list[Panel]:
    """What those of some roles take."""
    of = ROLE + f'{{role=~"{roles}"}}'
    return [
        Panel("CPU", "short", {"{{role}} {{instance}}": f"rate(process_cpu_seconds_total[{RATE}]) {of}"}),
        Panel("Memory", "bytes", {"{{role}} {{instance}}": f"process_resident_memory_bytes {of}"}),
        Panel(
            "Open files, of those allowed",
            "percentunit",
            {"{{role}} {{instance}}": f"process_open_fds / process_max_fds {of}"},
        ),
        Panel("Started", "dateTimeFromNow", {"{{role}} {{instance}}": f"1000 * process_start_time_seconds {of}"}),
    ]


MODELS, SERVERS = "encoder|generator", "index-.*"
ENDPOINT: Mapping[str, Sequence[Panel]] = {
    "Is it well?": [
        Panel(
            "Requests",
            "reqps",
            {"{{method}} {{code}}": rate("openbook_requests_total", "method", "code", matchers=ASKED)},
        ),
        Panel(
            "Share that fails, share refused",
            "percentunit",
            {"fails": "openbook:failures:ratio1m", "refused": "openbook:refusals:ratio1m"},
        ),
        Panel(
            "How long an answer takes",
            "s",
            {
                f"{share:.0%}": quantile(share, "openbook_request_seconds", matchers='method="Answer"')
                for share in (0.5, 0.9, 0.99)
            },
        ),
        Panel(
            "Alerts",
            "short",
            {"{{alertname}}": 'sum by (alertname) (ALERTS{alertstate="firing", alertname=~"Openbook.*"})'},
        ),
    ],
    "Where the time goes": [
        Panel("99 % pass a stage in", "s", {"{{stage}}": quantile(0.99, "openbook_stage_seconds", "stage")}),
        Panel("Mean of a stage", "s", {"{{stage}}": mean("openbook_stage_seconds", "stage")}),
        Panel(
            "Questions that ended in a stage",
            "reqps",
            {"{{stage}} {{code}}": rate("openbook_stage_errors_total", "stage", "code")},
        ),
    ],
    "Admission": [
        Panel("In flight", "short", {"{{instance}}": only("ingress", "openbook_in_flight")}),
        Panel("Predicted work in flight", "short", {"{{instance}}": only("ingress", "openbook_work_in_flight")}),
        Panel("Work answered in a second", "short", {"{{instance}}": only("ingress", "openbook_work_per_second")}),
        Panel("Refused", "reqps", {"by {{by}}, for want of {{want}}": rate("openbook_refused_total", "by", "want")}),
    ],
    "Models": [
        Panel("Waiting", "short", {"{{model}} {{instance}}": "openbook_queued"}),
        Panel("How long a question waits", "s", {"{{model}}": mean("openbook_queue_seconds", "model")}),
        Panel("How long a batch takes", "s", {"{{model}}": mean("openbook_batch_seconds", "model")}),
        Panel("Questions of a batch", "short", {"{{model}}": mean("openbook_batch_size", "model")}),
        Panel(
            "Calls that failed on the way",
            "reqps",
            {"{{to}} {{error}}": rate("openbook_hop_errors_total", "to", "error")},
        ),
    ],
    "Cache": [
        Panel("Share of questions whose embedding was known", "percentunit", {"known": "openbook:cache_hits:ratio1m"}),
        Panel("Looked up", "reqps", {"{{tier}} {{outcome}}": rate("openbook_cache_lookups_total", "tier", "outcome")}),
        Panel("Redis answers", "short", {"{{tier}} {{instance}}": "openbook_cache_up"}),
        Panel("Errors", "reqps", {"{{operation}}": rate("openbook_cache_errors_total", "operation")}),
    ],
    "Processes": processes(f"ingress|{MODELS}"),
}
INDEX: Mapping[str, Sequence[Panel]] = {
    "As the endpoint sees it": [
        Panel("Servers", "short", {"shard {{shard}} {{state}}": "min by (shard, state) (openbook_shard_servers)"}),
        Panel("Silent servers", "short", {"{{instance}}": only("ingress", "openbook_index_servers_silent")}),
        Panel("90 % of searches take", "s", {"shard {{shard}}": "openbook:search_seconds:p90_1m"}),
        Panel(
            "Calls", "reqps", {"shard {{shard}} {{method}}": rate("openbook_shard_seconds_count", "shard", "method")}
        ),
        Panel(
            "Failed calls", "reqps", {"shard {{shard}} {{code}}": rate("openbook_shard_errors_total", "shard", "code")}
        ),
        Panel(
            "Second calls beside a slow one", "reqps", {"shard {{shard}}": rate("openbook_shard_hedges_total", "shard")}
        ),
        Panel(
            "Lists of servers that came to nothing",
            "reqps",
            {"{{instance}}": only("ingress", rate("openbook_index_list_errors_total", "instance"))},
        ),
    ],
    "Searches of a server": [
        Panel("99 % take", "s", {"{{instance}}": only(SERVERS, quantile(0.99, "openbook_search_seconds", "instance"))}),
        Panel("Searches", "reqps", {"{{instance}}": only(SERVERS, rate("openbook_search_seconds_count", "instance"))}),
        Panel(
            "Queries of a search", "short", {"{{instance}}": only(SERVERS, mean("openbook_search_rows", "instance"))}
        ),
        Panel("Queries that wait", "short", {"{{instance}}": "openbook_index_rows_waiting"}),
        Panel("Connections", "short", {"{{instance}}": "openbook_index_streams"}),
        Panel(
            "Refused", "reqps", {"for want of {{want}}": rate("openbook_refused_total", "want", matchers='by="index"')}
        ),
    ],
    "Snapshots": [
        Panel("Publications", "short", {"{{snapshot}} {{state}} {{instance}}": "openbook_index_snapshots"}),
        Panel("Searched", "short", {"{{instance}}": "openbook_searched_sequence"}),
        Panel("Passages", "short", {"{{instance}}": "openbook_index_passages"}),
        Panel("Shard served", "short", {"{{instance}}": "openbook_index_shard"}),
    ],
    "Processes": processes(SERVERS),
}
BOARDS = {"endpoint": ("openbook: the endpoint", ENDPOINT), "index": ("openbook: the index tier", INDEX)}


def picture(panel: Panel) -> timeseries.Panel:
    """Lines over time, three beside each other."""
    found = timeseries.Panel().title(panel.title).unit(panel.unit).datasource(SOURCE).span(8).height(7).min(0)
    found.fill_opacity(8).tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    found.legend(
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    for number, (legend, expression) in enumerate(panel.lines.items()):
        found.with_target(
            prometheus.Dataquery()
            .expr(expression)
            .legend_format(legend)
            .ref_id(chr(ord("A") + number))
            .datasource(SOURCE)
        )
    return found


def board(name: str) -> dict[str, Any]:
    """One dashboard, as Grafana imports it."""
    title, rows = BOARDS[name]
    found = dashboard.Dashboard(title).uid(f"openbook-{name}").tags(["openbook"]).refresh("30s").time("now-1h", "now")
    found.with_variable(dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus"))
    for row, panels in rows.items():
        found.with_row(dashboard.Row(row))
        for panel in panels:
            found.with_panel(picture(panel))
    value: dict[str, Any] = json.loads(json.dumps(found.build(), cls=JSONEncoder))
    return value


def text(name: str) -> str:
    """Of its file."""
    return json.dumps(board(name), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in BOARDS:
        (FOLDER / f"{each}.json").write_text(text(each), encoding="utf-8")
