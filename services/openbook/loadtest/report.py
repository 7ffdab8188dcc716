"""A run as one page of HTML with its pictures in it: nothing is loaded from anywhere."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from openbook.loadtest import pictures
from openbook.loadtest.knee import Knee
from openbook.loadtest.result import Result
from openbook.loadtest.tables import knee_rows, latency_rows, status_rows, summary

HEAD = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>openbook loadtest</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body { font: 15px/1.5 sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .15em .8em; text-align: right }
td:first-child, th:first-child { text-align: left } tr:nth-child(even) { background: #f3f6f8 }
svg { width: 100%; height: auto } pre { overflow-x: auto; background: #f3f6f8; padding: .5em }
</style></head><body>
"""


def page(result: Result, about: Mapping[str, Any]) -> str:
    """Of one run. `about`: when, where and by which command."""
    return "".join(
        [
            HEAD,
            f"<h1>Load test of {escape(result.settings.address)}</h1>",
            _paragraphs(summary(result)),
            _table(("outcome", "n", "share", "a second", "seen as", "example"), status_rows(result)),
            _table(("milliseconds", "n", "mean", "p50", "p90", "p99", "p99.9", "max"), latency_rows(result)),
            pictures.by_percentile(result),
            pictures.over_time(result),
            _settings(result, about),
            "</body></html>\n",
        ]
    )


def knee_page(knee: Knee, about: Mapping[str, Any]) -> str:
    """Of a search for the knee."""
    titles = ("intended", "offered", "goodput", "share", "p50 ms", "p99 ms", "")
    return "".join(
        [
            HEAD,
            "<h1>Knee</h1>",
            _paragraphs([knee_summary(knee)]),
            _table(titles, knee_rows(knee)),
            pictures.of_knee(knee),
            _settings(knee.steps[0], about),
            "</body></html>\n",
        ]
    )


def knee_summary(knee: Knee) -> str:
    """The knee in a sentence."""
    held = "no rate tried held" if knee.rate is None else f"{knee.rate:g} a second held"
    missed = "no rate tried missed a limit" if knee.above is None else f"{knee.above:g} did not"
    return f"Knee: {held}; {missed}. Ended: {knee.ended}."


def _paragraphs(lines: Iterable[str]) -> str:
    return "<p>" + "<br>".join(map(escape, lines)) + "</p>"


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _settings(result: Result, about: Mapping[str, Any]) -> str:
    machine = ", ".join(f"{name} {value}" for name, value in about["machine"].items())
    lines = [f"{about['date']}, openbook {about['openbook']}", machine, about["command"]]
    rows = [
        (name, str(value))
        for name, value in result.settings.model_dump(mode="json").items()
        if value is not None and not (name == "rate" and result.settings.closed)
    ]
    return f"<h2>How</h2><pre>{escape(chr(10).join(lines))}</pre>" + _table(("setting", ""), rows)
