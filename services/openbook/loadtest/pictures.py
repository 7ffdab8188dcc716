"""Latency by percentile, outcomes and latencies over time, rates tried: as SVG. Needs matplotlib: import it late."""

from collections.abc import Callable
from io import StringIO

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from openbook.core.types import Float64
from openbook.loadtest.knee import Knee
from openbook.loadtest.outcomes import HANG, OK, REFUSED
from openbook.loadtest.result import Result

COLOURS = {OK: "#2a6f97", REFUSED: "#e9c46a", HANG: "#9d0208"}
OTHERS = ("#e76f51", "#6a4c93", "#8d99ae", "#264653", "#f4a261", "#606c38")
SHARES = (0.5, 0.9, 0.99, 0.999, 0.9999)
N_POINTS = 400


def by_percentile(result: Result) -> str:
    """How long which share took, with the rare on the right as wide as the frequent."""

    def draw(axes: Axes) -> None:
        counted = result.counted
        answered, refused = counted.where(counted.among(OK)), counted.where(counted.among(REFUSED))
        first_s = answered.first_s - answered.intended_s
        lines = (
            ("answered", answered.latency_s, COLOURS[OK]),
            ("first token", first_s[~np.isnan(first_s)], "#76c893"),
            ("refused", refused.latency_s, COLOURS[REFUSED]),
        )
        for name, latency_s, colour in lines:
            if len(latency_s):
                axes.plot(*_tail(latency_s), drawstyle="steps-post", label=f"{name}, {len(latency_s)}", color=colour)
        axes.set_xscale("log")
        ticks = [1 / (1 - share) for share in SHARES if share <= 0.9 or (1 - share) * len(counted) >= 1]
        axes.set_xticks(ticks, [f"p{100 * (1 - 1 / tick):.5g}" for tick in ticks])
        axes.minorticks_off()
        kind = "from sending: a closed loop" if result.settings.closed else "from the intended start"
        axes.set(title=f"Latency by percentile, {kind}", xlabel="percentile", ylabel="seconds")
        axes.set_ylim(bottom=0)
        _legend(axes)

    return _svg(draw)


def over_time(result: Result) -> str:
    """How the questions of each second ended, and how long its answers took."""

    def outcomes(axes: Axes) -> None:
        statuses = sorted({status for each in seconds for status in each.counts}, key=lambda name: (name != OK, name))
        bottom = np.zeros(len(seconds))
        others = iter(OTHERS * len(statuses))
        for status in statuses:
            counts = np.array([each.counts.get(status, 0) for each in seconds])
            colour = COLOURS.get(status) or next(others)
            axes.stairs(bottom + counts, baseline=bottom, fill=True, label=status, color=colour)
            bottom += counts
        axes.set(title="Outcomes of the questions of each second", ylabel="questions", xlim=(0, len(seconds)))

    def latencies(axes: Axes) -> None:
        at = np.arange(len(seconds)) + 0.5
        for name, colour in (("max", "#c9d6df"), ("p99", "#e76f51"), ("p50", COLOURS[OK])):
            values = [getattr(each, f"{name}_s") for each in seconds]
            axes.plot(at, [np.nan if v is None else v for v in values], ".-", label=name, color=colour)
        axes.set(title="Latency of the answers of each second", xlabel="seconds into the run", ylabel="seconds")
        axes.set(xlim=(0, len(seconds)))
        axes.set_ylim(bottom=0)

    def with_warm_up(draw: Callable[[Axes], None]) -> Callable[[Axes], None]:
        def drawn(axes: Axes) -> None:
            draw(axes)
            if result.settings.warm_up_s:
                axes.axvspan(0, result.settings.warm_up_s, color="grey", alpha=0.2, label="warm-up, not counted")
            _legend(axes)

        return drawn

    seconds = result.seconds
    return _svg(with_warm_up(outcomes), with_warm_up(latencies))


def of_knee(knee: Knee) -> str:
    """What each rate got."""
    steps = sorted((each.measured for each in knee.steps), key=lambda found: found.offered_rate)
    offered = [each.offered_rate for each in steps]

    def goodput(axes: Axes) -> None:
        axes.plot(offered, offered, "--", color="grey", label="offered")
        axes.plot(offered, [each.goodput_rate for each in steps], "o-", color=COLOURS[OK], label="goodput")
        axes.set(title="Goodput by offered rate", ylabel="a second")
        _legend(axes)

    def latency(axes: Axes) -> None:
        for name in ("p50_s", "p99_s"):
            values = [getattr(each.latency, name) if each.latency else np.nan for each in steps]
            axes.plot(offered, values, "o-", label=name.removesuffix("_s"))
        axes.set(title="Latency by offered rate", xlabel="questions offered a second", ylabel="seconds")
        _legend(axes)

    return _svg(goodput, latency)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")  # beside the lines, not on them


def _tail(latency_s: Float64) -> tuple[Float64, Float64]:
    """1/(1 - share) and latency at so many shares, the rarer the closer."""
    n = len(latency_s)
    counts = np.unique(np.ceil(n - np.geomspace(n, 1, N_POINTS)).astype(np.int64))  # of those before it: 0 to n - 1
    return n / (n - counts), np.sort(latency_s)[counts]


def _svg(*draws: Callable[[Axes], None]) -> str:
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "openbook", "font.family": "sans-serif"}):
        figure = Figure(figsize=(9, 3.4 * len(draws)), layout="constrained")
        FigureCanvasSVG(figure)  # a canvas of our own: pyplot would keep a window's state for the whole process
        for draw, (axes,) in zip(draws, figure.subplots(len(draws), 1, squeeze=False), strict=True):
            draw(axes)
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return "".join(text.getvalue().partition("<svg")[1:])  # without what XML has before it
