"""Curves and points as SVG that takes its colours from the page it stands in. Needs matplotlib: import it late."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from openbook.evaluation.summary import Mean

INK, SOFT, LINE = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0a000{i}" for i in range(6))
COLOURS = {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)"} | {
    colour: f"var(--c{i})" for i, colour in enumerate(SERIES)
}
"""What is drawn with, and what the page's style knows it as."""
MOST_BANDS = 3
"""With more curves than these, intervals would hide one another: the tables have them."""
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "openbook",  # equal data, equal bytes
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "axes.grid": True,
    "grid.color": LINE,
    "legend.frameon": False,
    "legend.fontsize": 10,
}


@dataclass(frozen=True, slots=True)
class Series:
    """Shares against numbers, under one name."""

    name: str
    xs: Sequence[float]
    means: Sequence[Mean]
    labels: Sequence[str] = ()  # beside each point, in place of a legend


@dataclass(frozen=True, slots=True)
class Axes:
    """What is drawn in, and how."""

    x: str
    y: str
    log_x: bool = False
    joined: bool = True  # as curves with bands, else as points with whiskers
    ticks: Sequence[float] = ()


def drawn(axes: Axes, series: Sequence[Series]) -> str:
    """An SVG element, in per cent."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        plot = figure.subplots()
        for i, each in enumerate(series):
            colour, marker = SERIES[i % len(SERIES)], "osD^vP"[i % 6]
            values, low, high = ([100 * getattr(m, part) for m in each.means] for part in ("value", "low", "high"))
            if axes.joined:
                if len(series) <= MOST_BANDS:
                    plot.fill_between(each.xs, low, high, color=colour, alpha=0.12, linewidth=0)
                plot.plot(each.xs, values, marker=marker, markersize=4, color=colour, label=each.name)
            else:
                plot.vlines(each.xs, low, high, color=colour, alpha=0.5)
                plot.plot(each.xs, values, marker, markersize=6, color=colour, label=each.name)
            for x, y, label in zip(each.xs, values, each.labels, strict=False):
                plot.annotate(
                    label, (x, y), (6, 4 if i % 2 else -13), textcoords="offset points", fontsize=9, color=INK
                )
        plot.set(xlabel=axes.x, ylabel=axes.y)
        if axes.log_x:
            plot.set_xscale("log")
            plot.xaxis.set_minor_locator(NullLocator())
        plot.margins(x=0.12)
        if axes.ticks:
            left, right = plot.get_xlim()
            ticks = [tick for tick in axes.ticks if left <= tick <= right]
            plot.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            plot.set_xlim(left, right)
        plot.set_ylim(bottom=0, top=min(104.0, max(1.05 * plot.get_ylim()[1], 1.0)))
        if len(series) > 1 and not series[0].labels:
            plot.legend(loc="best" if axes.joined else "lower right")
        out = StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, name in COLOURS.items():
        svg = svg.replace(colour, name)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r">\s+<", "><", svg.replace("\n", " "))
