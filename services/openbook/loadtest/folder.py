"""A run as a folder: all figures, every outcome, histograms, seconds, a page to read; and several runs as one."""

import csv
import json
import logging
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from pydantic import ValidationError

from openbook import __version__, files
from openbook.errors import InvalidConfig, reason
from openbook.loadtest import outcomes
from openbook.loadtest.histograms import histogram, write_log
from openbook.loadtest.knee import Knee
from openbook.loadtest.outcomes import OK, REFUSED
from openbook.loadtest.report import knee_page, page
from openbook.loadtest.result import Result
from openbook.loadtest.settings import LoadSettings
from openbook.processes import processor

log = logging.getLogger(__name__)

RESULT, OUTCOMES, SECONDS, REPORT = "result.json", "outcomes.npz", "seconds.csv", "report.html"
ALIKE = (
    *("duration_s", "warm_up_s", "timeout_s", "check"),
    *("what", "k", "formulation", "decoding", "n_beams", "max_new_tokens"),
)
"""Settings without which runs do not count, or do not ask for, the same."""


def check_free(folder: Path) -> None:
    """Before a run, whose figures would have nowhere to go. Raises InvalidConfig."""
    try:
        if folder.exists():
            raise InvalidConfig(f"{folder}: is there already: name a new folder")
        with TemporaryDirectory(dir=next(each for each in folder.absolute().parents if each.exists())):
            pass
    except OSError as error:
        raise InvalidConfig(f"{folder}: cannot be made: {error.strerror}") from None


def write(folder: Path, result: Result) -> None:
    """All of a run into a new folder, which is there whole or not at all. Raises InvalidConfig, OSError."""
    check_free(folder)
    with files.new_folder(folder) as partial:
        _fill(partial, result)


def write_knee(folder: Path, knee: Knee) -> None:
    """A search for the knee into a new folder, each of its steps as a run of its own. Raises as `write`."""
    check_free(folder)
    steps = [
        {"rate": step.settings.rate, "missed": missed, **step.measured.model_dump()}
        for step, missed in zip(knee.steps, knee.missed, strict=True)
    ]
    started = knee.steps[0].date
    about = {**surroundings(started), "knee": knee.rate, "above": knee.above, "ended": knee.ended, "steps": steps}
    with files.new_folder(folder) as partial:
        _write_json(partial / "knee.json", about)
        _write(partial / REPORT, knee_page(knee, about))
        for number, step in enumerate(knee.steps, start=1):
            (partial / f"step-{number:02}").mkdir()
            _fill(partial / f"step-{number:02}", step)


def _fill(folder: Path, result: Result) -> None:
    about = {**surroundings(result.date), **result.as_json()}
    _write_json(folder / RESULT, about)
    _write(folder / REPORT, page(result, about))
    _write(folder / SECONDS, _csv(result))
    result.outcomes.save(folder / OUTCOMES)
    counted = result.counted
    answered, refused = (counted.where(counted.among(status)) for status in (OK, REFUSED))
    streamed = answered.where(~np.isnan(answered.first_s))
    for name, some, until in (
        ("answered", answered, "done_s"),
        ("refused", refused, "done_s"),
        ("first-token", streamed, "first_s"),
    ):
        if len(some):
            of_each = some.by_second(int(some.intended_s[-1]) + 1)
            found = ((second, histogram(getattr(of, until) - of.intended_s)) for second, of in of_each if len(of))
            write_log(folder / f"{name}.hlog", result.date, found)


def _write_json(path: Path, value: Any) -> None:
    _write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _write(path: Path, text: str) -> None:
    # A file's name may hold what UTF-8 does not; so escaped, JSON reads it as it was.
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def read(folder: Path) -> Result:
    """What `write` wrote.

    Raises:
        InvalidConfig, InvalidDocuments: the folder holds no run.
    """
    try:
        about = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        settings = LoadSettings.model_validate(about["settings"])
        date = datetime.fromisoformat(about["date"]).timestamp()
    except (OSError, ValueError, LookupError, TypeError, ValidationError) as error:
        raise InvalidConfig(f"{folder / RESULT}: is not the result of a load test: {reason(error)}") from None
    return Result(settings, outcomes.load(folder / OUTCOMES), float("nan"), date)


def merge(folders: Sequence[Path]) -> Result:
    """Runs at the same time, from several machines, as one run: rates add up.

    Raises:
        InvalidConfig, InvalidDocuments: a folder holds no run or is given twice, or runs differ in what their
            figures count.
    """
    for number, folder in enumerate(folders):
        if folder.resolve() in {each.resolve() for each in folders[:number]}:
            raise InvalidConfig(f"{folder}: is given twice")
    runs = [read(folder) for folder in folders]
    first = runs[0].settings
    seeds: set[int] = set()
    for folder, each in zip(folders, runs, strict=True):
        if (seed := each.settings.seed) in seeds:
            log.warning("%s: has the seed of another run, %d: each machine needs its own", folder, seed)
        seeds.add(seed)
        for name in ALIKE:
            ours, theirs = getattr(first, name), getattr(each.settings, name)
            if ours != theirs:
                raise InvalidConfig(f"{folder}: {name} must be that of {folders[0]}, {ours}, got {theirs}")
        if (first.closed is None) != (each.settings.closed is None):
            raise InvalidConfig(f"{folder}: an open and a closed loop cannot be merged")
    totals: dict[str, Any] = {
        "rate": sum(each.settings.rate for each in runs),
        "closed": None if first.closed is None else sum(each.settings.closed or 0 for each in runs),
        "processes": sum(each.settings.processes for each in runs),
    }
    joined = outcomes.join([each.outcomes for each in runs])
    return Result(first.model_copy(update=totals), joined, float("nan"), min(each.date for each in runs))


def surroundings(date: float) -> dict[str, Any]:
    """When, where and by which command."""
    return {
        "openbook": __version__,
        "date": datetime.fromtimestamp(date, UTC).isoformat(timespec="milliseconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": {
            "system": platform.platform(),
            "processor": processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        },
    }


def _csv(result: Result) -> str:
    statuses = sorted({status for second in result.seconds for status in second.counts})
    text = StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["second", "warm_up", "intended", "good", *statuses, "p50_s", "p99_s", "max_s"])
    for each in result.seconds:
        counts = [each.counts.get(status, 0) for status in statuses]
        is_warm_up = int(each.second < result.settings.warm_up_s)
        rows.writerow([each.second, is_warm_up, sum(counts), each.n_good, *counts, each.p50_s, each.p99_s, each.max_s])
    return text.getvalue()
