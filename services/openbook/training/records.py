"""What a person sees of a run: a line of numbers for every step, TensorBoard, and one picture at the end."""

import json
import logging
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from time import time
from typing import Any

import numpy as np

from openbook import files

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
PICTURE = "curves.png"
TENSORBOARD = "tensorboard"

TITLES = {
    "loss": "loss per example, nats",
    "learning_rate": "learning rate",
    "validation/log_likelihood": "validation: log p(y|x)",
    "validation/exact_match": "validation: exact match",
    "validation/has_answer": "validation: an answer among the k passages",
    "prior_entropy": "entropy of the prior, nats",
    "distinct_passages": "distinct passages per example",
    "accuracy": "questions whose passage comes first in their batch",
    "validation/reciprocal_rank": "validation: mean reciprocal rank of the passage",
    "validation/agreement": "validation: passages as the frozen retriever finds them",
}
"""What the picture shows, and in which words."""


class Records:
    """The curves of a run, in its folder. A run that goes on drops what came after its checkpoint.

    Without tensorboardX or matplotlib, or where no picture can be drawn, there are the lines, and a warning.
    """

    def __init__(self, folder: Path, step: int) -> None:
        # Both now: at the end of a run it is late to learn what is missing.
        tensorboard, self._plots = _imported("tensorboardX"), _imported("matplotlib")
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS
        former = list(read_metrics(self._path))
        if former and not step:
            log.warning("%s: there is no checkpoint: the run begins anew, and its curves too", folder)
        kept = [line for line in former if line["step"] <= step] if step else []
        files.write(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self._path.open("a", encoding="utf-8")
        self._tensorboard = _TensorBoard(folder / TENSORBOARD, step + 1 if step else 0) if tensorboard else None

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Numbers of one step, by name."""
        self._file.write(json.dumps({"step": step, **scalars}) + "\n")
        self._file.flush()
        if self._tensorboard:
            self._tensorboard.add(step, scalars)

    def close(self) -> None:
        """Write what is not written yet, and draw the picture."""
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()
        if self._plots:
            picture = self._path.with_name(PICTURE)
            try:
                draw(self._path, picture)
            except Exception as error:  # whatever it is: the models are not saved yet
                log.warning("%s: not drawn: %s", picture, error)


class _TensorBoard:
    """Not tensorboardX's own SummaryWriter: a thread writes for that, and where it cannot, for want of room, the run
    waits for it for ever.
    """

    def __init__(self, folder: Path, purge_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        folder.mkdir(exist_ok=True)
        self._file = EventsWriter(str(folder / "events"))
        begun = SessionLog(status=SessionLog.START)  # what is there from this step on does not count
        self._write(Event(step=purge_step, session_log=begun))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._write(self._event(step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time()
        self._file.write_event(event)
        self._file.flush()


def _imported(name: str) -> Any:
    """The package, or None where it is not installed, which the log says."""
    try:
        return import_module(name)
    except ImportError:
        log.warning("%s is not installed: the curves are in %s all the same", name, METRICS)
        return None


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run. One that a killed run did not finish is left out."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def draw(metrics: Path, picture: Path) -> None:
    """The curves as one picture, a panel for each that the run has and that ever moves."""
    from matplotlib.figure import Figure

    lines = list(read_metrics(metrics))
    curves = {name: [(line["step"], line[name]) for line in lines if name in line] for name in TITLES}
    panels = [(title, curves[name]) for name, title in TITLES.items() if len({value for _, value in curves[name]}) > 1]
    if not panels:
        return
    n_rows = -(-len(panels) // 2)
    figure = Figure(figsize=(11, 2.6 * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, 2, squeeze=False).flatten()
    for axis, (title, curve) in zip(axes, panels, strict=False):
        steps, values = zip(*curve, strict=True)
        if len(curve) > SMOOTHED:
            axis.plot(steps, values, color="0.8")
            axis.plot(steps, _smoothed(values), color="tab:blue")
        else:
            axis.plot(steps, values, color="tab:blue", marker="o", markersize=3)
        axis.set_title(title, fontsize=10, loc="left")
        axis.grid(alpha=0.25)
    for axis in axes[len(panels) :]:
        axis.remove()
    for axis in axes[max(0, len(panels) - 2) : len(panels)]:
        axis.set_xlabel("step")
    figure.savefig(picture, dpi=110)


SMOOTHED = 60
"""Curves of more points get a running mean."""


def _smoothed(values: tuple[float, ...]) -> np.ndarray:
    """The mean of each value and its neighbours, a twentieth of the curve on either side."""
    window = np.ones(2 * (len(values) // 20) + 1)
    smooth: np.ndarray = np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
    return smooth
