"""What a run leaves behind and shows: a folder, which merges with others, tables, a page, a line of progress."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_result import logged, settings

from openbook.errors import InvalidConfig
from openbook.loadtest import folder, tables
from openbook.loadtest.histograms import read_log
from openbook.loadtest.outcomes import OK, REFUSED, Log, Reply
from openbook.loadtest.report import page
from openbook.loadtest.result import Result
from openbook.loadtest.screen import load_progress


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A folder of this name, with a run of such settings and date in it."""
    monkeypatch.setattr(folder, "page", lambda result, about: "")  # with pictures, which take their time

    def keep(name: str, date: float = 0.0, **values: Any) -> Path:
        outcomes = logged((3.0, 0.1, OK), (4.0, 0.2, REFUSED))
        folder.write(tmp_path / name, Result(settings(**values), outcomes, 0.0, date))
        return tmp_path / name

    return keep


def test_runs_of_several_machines_are_one_of_all_their_callers_from_the_first_on(kept: Callable[..., Path]) -> None:
    both = folder.merge([kept("one", 5.0, closed=2, processes=2), kept("two", 4.0, closed=3, seed=1)])
    assert (both.settings.closed, both.settings.processes, both.date, both.measured.n) == (5, 3, 4.0, 4)


def test_runs_that_count_differently_do_not_merge(kept: Callable[..., Path], tmp_path: Path) -> None:
    one = kept("one", timeout_s=10.0, duration_s=8.0, warm_up_s=2.0)
    for name, ours, theirs in (
        ("timeout_s", 10.0, 3.0),
        ("duration_s", 8.0, 9.0),
        ("warm_up_s", 2.0, 1.0),
        ("check", None, "bits"),
        ("what", "answer", "retrieve"),
        ("k", None, 2),
    ):
        other = kept(name, **{name: theirs})
        with pytest.raises(InvalidConfig, match=rf"{name}: {name} must be that of .*one, {ours}, got {theirs}"):
            folder.merge([one, other])
    with pytest.raises(InvalidConfig, match=r"closed: an open and a closed loop cannot be merged"):
        folder.merge([one, kept("closed", closed=2)])
    with pytest.raises(InvalidConfig, match=r"result\.json: is not the result of a load test: No such file"):
        folder.merge([tmp_path])


def test_each_second_and_refusals_by_themselves_are_kept(tmp_path: Path) -> None:
    latencies = [*[0.125] * 98, 0.25, 0.5]
    outcomes = logged(*((3.0, each, OK) for each in latencies), (3.0, 0.01, REFUSED))
    folder.write(tmp_path / "run", Result(settings(timeout_s=0.3), outcomes, 0.0, 0.0))
    third = list(csv.DictReader((tmp_path / "run" / "seconds.csv").read_text().splitlines()))[3]
    counts = {"second": 3, "warm_up": 0, "intended": 101, "good": 99, OK: 100, REFUSED: 1}
    seconds = {"p50_s": 0.125, "p99_s": 0.25, "max_s": 0.5}
    assert {name: pytest.approx(float(value)) for name, value in third.items()} == counts | seconds
    refused = read_log(tmp_path / "run" / "refused.hlog")
    assert (refused.get_total_count(), refused.get_max_value()) == (1, pytest.approx(10_000, rel=0.001))


def test_tables_have_each_figure_under_its_title() -> None:
    outcomes = logged((3.0, 0.1, OK), (4.0, 0.2, OK), (5.0, 0.1, OK), (6.0, 0.1, REFUSED))
    result = Result(settings(timeout_s=0.15), outcomes, 0.0, 0.0)
    assert tables.summary(result)[2:4] == [
        "offered 0.50/s  answered 0.38/s  goodput 0.25/s",
        "goodput: answered within 0.15 s, 50.00% of what was offered",
    ]
    assert [row[:4] for row in tables.status_rows(result)] == [
        (OK, "3", "75.00%", "0.38"),
        (REFUSED, "1", "25.00%", "0.12"),
    ]
    answered = next(iter(tables.latency_rows(result)))
    assert answered == ("answered", "3", "133", "100", "200", "200", "200", "200")


def test_nothing_that_an_endpoint_says_is_html_in_the_page() -> None:
    log = Log()
    log.add(3.0, 3.0, 4.0, Reply("UNKNOWN", "UNKNOWN", "<b>says the endpoint"))
    result = Result(settings(address="<b>:1"), log.outcomes(), 0.0, 0.0)
    found = page(result, folder.surroundings(0.0))
    assert found.count("&lt;b&gt;") == 3  # in the title, as an example, among the settings
    assert "<b>" not in found


def test_who_waits_for_a_run_sees_what_became_of_the_questions(capsys: pytest.CaptureFixture[str]) -> None:
    with load_progress(settings()) as on_progress:
        on_progress(10, 6, 4)
    assert "sent 10  answered 4  not 2  in flight 4" in capsys.readouterr().err
