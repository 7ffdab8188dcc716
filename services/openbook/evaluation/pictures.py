"""Confidence against correctness, drawn. Needs matplotlib, so import this where it is needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from openbook import files
from openbook.core import metrics
from openbook.errors import InvalidConfig
from openbook.evaluation.record import Record
from openbook.evaluation.summary import grouped

if TYPE_CHECKING:
    from openbook.evaluation.calibrate import Judged

RIGHT, SURE = "#2a6f97", "#c9d6df"
ROW_INCHES = 4.4


def check_place(path: Path) -> None:
    """Before long work. Raises InvalidConfig: no picture can be written there, or none of this kind."""
    files.check_place(path)
    kinds = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise InvalidConfig(f"{path}: must end with one of .{', .'.join(kinds)}")


def draw(records: Sequence[Record], path: Path) -> None:
    """A row for each file and formulation: how often it is right when it is so sure, and what a threshold would buy."""
    groups = grouped(records)
    figure = Figure(figsize=(11, ROW_INCHES * len(groups)), layout="constrained")
    FigureCanvasAgg(figure)  # a canvas of our own: pyplot would keep a window's state for the whole process
    rows = figure.subplots(len(groups), 2, squeeze=False)
    for (left, right), ((file, formulation), of_group) in zip(rows, groups.items(), strict=True):
        name = f"{file}, RAG-{formulation.title()}, {len(of_group)} questions"
        confidence, correct = [r.probability for r in of_group], [float(r.em) for r in of_group]
        _reliability(left, confidence, correct, name)
        _risk(right, confidence, correct, name)
    figure.savefig(path, dpi=110)


def draw_calibration(judged: Sequence["Judged"], path: Path) -> None:
    """A row for each formulation: how often answers are right when they are so probable, and when so confident."""
    judged = [each for each in judged if len(each.right)]
    figure = Figure(figsize=(11, ROW_INCHES * len(judged)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(judged), 2, squeeze=False)
    for (left, right), each in zip(rows, judged, strict=True):
        name = f"RAG-{each.formulation.title()}, {len(each.right)} questions that nothing was fitted to"
        _reliability(left, each.before, each.right, name)
        _reliability(right, each.after, each.right, name, "confidence")
    figure.savefig(path, dpi=110)


def _reliability(
    axes: Axes, confidence: ArrayLike, correct: ArrayLike, name: str, what: str = "how sure it is: p(y|x)"
) -> None:
    bins = metrics.reliability(confidence, correct)
    width = bins.edges[1] - bins.edges[0]
    shares = bins.counts / bins.counts.sum()
    axes.bar(bins.edges[:-1], shares, width, align="edge", color=SURE, edgecolor="white", label="share of all answers")
    axes.plot([0, 1], [0, 1], "--", color="grey", label="as sure as it is right")
    axes.plot(bins.confidence, bins.accuracy, "-", color=RIGHT, label="how often it is right")
    axes.scatter(bins.confidence, bins.accuracy, 15 + 400 * shares, color=RIGHT, clip_on=False, zorder=3)
    score = metrics.auroc(confidence, correct)
    axes.set(
        title=f"Is it right as often as it is sure?\n{name}\n"
        f"calibration error {bins.expected_error:.3f}, AUROC {score:.3f}",
        xlabel=what,
        ylabel="share",
        xlim=(0, 1),
        ylim=(0, 1.02),
    )
    axes.legend(loc="best", fontsize="small")


def _risk(axes: Axes, confidence: Sequence[float], correct: Sequence[float], name: str) -> None:
    curve = metrics.risk_coverage(confidence, correct)
    ideal = np.clip(1 - np.mean(correct) / curve.coverage, 0, None)
    axes.plot(curve.coverage, curve.risk, color=RIGHT, label="surest answers first")
    axes.plot(curve.coverage, ideal, ":", color="grey", label="if it knew which are right")
    axes.axhline(1 - float(np.mean(correct)), linestyle="--", color="grey", label="if sureness said nothing")
    axes.set(
        title=f"Answering only when sure: how often is it wrong?\n{name}",
        xlabel="share of questions answered",
        ylabel="share of those answered that is wrong",
        xlim=(0, 1),
        ylim=(0, 1.02),
    )
    axes.legend(loc="best", fontsize="small")
