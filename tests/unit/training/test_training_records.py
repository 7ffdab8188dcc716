"""What a person sees of a run: lines, TensorBoard, a picture; and what is left of them when the run goes on."""

import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from small_disk import files_of_at_most
from tensorboardX.proto.event_pb2 import Event

from openbook.training import records as recording
from openbook.training.records import METRICS, PICTURE, TENSORBOARD, TITLES, Records, draw, read_metrics


def scalars(step: int) -> dict[str, float]:
    moving = {"loss": 5 / (step + 1), "learning_rate": 0.1 / (step + 1), "prior_entropy": math.log(3 + step)}
    return {**moving, "distinct_passages": 4.0, "unknown": float(step)}  # one does not move, one is not known


def recorded(folder: Path, steps: range, from_step: int = 0) -> None:
    records = Records(folder, from_step)
    for step in steps:
        records.add(step, scalars(step))
    records.close()


def steps_of(folder: Path) -> list[int]:
    return [line["step"] for line in read_metrics(folder / METRICS)]


def events(folder: Path) -> list[Event]:
    """TFRecords: length, its checksum, an event, its checksum."""
    found = []
    for path in sorted((folder / TENSORBOARD).iterdir()):
        content = path.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            found.append(Event.FromString(content[12 : 12 + size]))
            content = content[16 + size :]
    return found


@pytest.mark.usefixtures("undrawn")
def test_a_line_for_every_step(tmp_path: Path) -> None:
    recorded(tmp_path, range(4))
    assert list(read_metrics(tmp_path / METRICS)) == [{"step": step, **scalars(step)} for step in range(4)]


@pytest.mark.usefixtures("undrawn")
def test_lines_are_there_while_the_run_goes_on(tmp_path: Path) -> None:
    records = Records(tmp_path, 0)
    records.add(1, scalars(1))
    assert steps_of(tmp_path) == [1]
    records.close()


@pytest.mark.usefixtures("undrawn")
def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    recorded(tmp_path, range(1, 4))
    values = {
        (event.step, value.tag): value.simple_value for event in events(tmp_path) for value in event.summary.value
    }
    wanted = {(step, name): value for step in range(1, 4) for name, value in scalars(step).items()}
    assert values.keys() == wanted.keys()
    for key, value in wanted.items():
        assert values[key] == pytest.approx(value, rel=1e-6)


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_goes_on_drops_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    recorded(tmp_path, range(7))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 7, "los')  # killed here
    recorded(tmp_path, range(4, 9), from_step=3)
    assert steps_of(tmp_path) == list(range(9))
    assert 4 in {event.step for event in events(tmp_path) if event.HasField("session_log")}, "what TensorBoard purges"


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_begins_anew_says_so_and_drops_everything(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Killed before its first checkpoint: step 0 was validated, and is again."""
    recorded(tmp_path, range(3))
    assert caplog.messages == []
    recorded(tmp_path, range(2))
    assert steps_of(tmp_path) == [0, 1]
    assert caplog.messages == [f"{tmp_path}: there is no checkpoint: the run begins anew, and its curves too"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.timeout(30)
def test_without_room_for_more_it_fails_and_waits_for_nobody(tmp_path: Path) -> None:
    """Where TensorBoard's file is the first to have none, too: lines are shorter here."""
    records = Records(tmp_path, 0)

    def add_many() -> None:
        for step in range(1000):
            records.add(step, {"loss": 1.0})

    with files_of_at_most(8192), pytest.raises(OSError, match="File too large"):
        add_many()
    records.close()


def panels(picture: Path) -> Any:
    """Rows and columns of panels with something dark in them."""
    pixels = imread(picture)[..., :3].mean(-1)
    height, width = pixels.shape
    assert width > 1000
    n_rows = round(height / 286)
    parts = [part for row in np.array_split(pixels, n_rows) for part in np.array_split(row, 2, axis=1)]
    return [bool((part < 0.5).mean() > 0.002) for part in parts]


def test_the_picture_has_a_panel_for_every_known_curve_that_moves(tmp_path: Path) -> None:
    recorded(tmp_path, range(90))
    assert panels(tmp_path / PICTURE) == [True, True, True, False]
    lines = [{"step": step, **dict.fromkeys(TITLES, 1.0 / (step + 1))} for step in range(5)]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    draw(tmp_path / METRICS, tmp_path / "all.png")
    assert panels(tmp_path / "all.png")[: len(TITLES)] == [True] * len(TITLES)


def test_without_a_curve_there_is_no_picture(tmp_path: Path) -> None:
    Records(tmp_path, 0).close()
    assert not (tmp_path / PICTURE).exists()
    assert steps_of(tmp_path) == []
    assert list(read_metrics(tmp_path / "absent")) == []


@pytest.mark.parametrize("missing", ["tensorboardX", "matplotlib"])
def test_what_is_not_installed_is_said_at_the_start_and_nothing_else_is_lost(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    recorded(tmp_path, range(4))
    assert caplog.messages == [f"{missing} is not installed: the curves are in metrics.jsonl all the same"]
    assert steps_of(tmp_path) == list(range(4))
    assert (tmp_path / TENSORBOARD).exists() == (missing != "tensorboardX")
    assert (tmp_path / PICTURE).exists() == (missing != "matplotlib")


def test_a_picture_that_cannot_be_drawn_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def draw(*_: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(recording, "draw", draw)
    recorded(tmp_path, range(4))
    assert [(each.levelno, each.getMessage()) for each in caplog.records] == [
        (logging.WARNING, f"{tmp_path / PICTURE}: not drawn: no space left")
    ]
