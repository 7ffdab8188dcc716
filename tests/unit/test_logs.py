"""Lines of the log: what stands in them, and what does not unless it is asked for."""

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from openbook.core.context import Context
from openbook.errors import InvalidConfig, InvalidRequest
from openbook.logs import Lasting, about, as_ours, setup_logging

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger("openbook")
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    root.propagate = True


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_json_lines_have_what_one_looks_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENBOOK_LOG_FORMAT", "json")
    log = setup_logging("index-3").getChild("somewhere")
    log.warning("so\n%s", "it is", extra=about(Context(request_id="r", trace=TRACE), code="OK"))
    log.info("nothing known")
    first, second = map(json.loads, lines(capsys))
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "WARNING",
        "process": "index-3",
        "logger": "openbook.somewhere",
        "message": "so\nit is",
        "request_id": "r",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "code": "OK",
    }
    assert second.keys() == {"time", "level", "process", "logger", "message"}


def test_a_line_for_people_tells_its_moment(capsys: pytest.CaptureFixture[str]) -> None:
    """It may be read days later, and on another machine."""
    before = datetime.now(UTC)
    setup_logging("up").info("so it is")
    (line,) = lines(capsys)
    when, _, rest = line.partition(" ")
    assert abs(datetime.fromisoformat(when) - before) < timedelta(minutes=1)
    assert rest.split() == ["up", "INFO", "so", "it", "is"]


def test_what_lasts_is_told_when_it_begins_changes_and_is_over(capsys: pytest.CaptureFixture[str]) -> None:
    lasting = Lasting(setup_logging("up"), "it works again")
    lasting.ended()
    for _ in range(2):
        for problem in ("gone", "gone", "frozen"):
            lasting.met(problem)
        for _ in range(2):
            lasting.ended()
    assert [line.partition("WARNING ")[2] for line in lines(capsys)] == ["gone", "frozen", "it works again"] * 2


@pytest.mark.parametrize("form", ["text", "json"])
def test_of_an_error_that_nobody_foresaw_the_message_is_withheld(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENBOOK_LOG_FORMAT", form)
    setup_logging("ingress")

    def told() -> str:
        with pytest.raises(ValueError, match="tokenise") as raised:
            raise ValueError("cannot tokenise: " + "who is ill?") from KeyError("ill")
        assert str(as_ours(raised.value, "r")) == "internal error, request id r"
        return "\n".join(lines(capsys))

    withheld = told()
    assert "test_logs.py" in withheld
    assert "ValueError" in withheld
    assert "tokenise: who" not in withheld
    monkeypatch.setenv("OPENBOOK_LOG_QUESTIONS", "1")
    assert "tokenise: who is ill?" in told()
    ours = InvalidRequest("k must be 1..100")
    assert as_ours(ours, "r") is ours
    assert lines(capsys) == []


@pytest.mark.parametrize("variable", ["OPENBOOK_LOG_LEVEL", "OPENBOOK_LOG_FORMAT"])
def test_what_there_is_not_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "loud")
    with pytest.raises(InvalidConfig, match=f"{variable} must be one of .*, got '(loud|LOUD)'"):
        setup_logging("up")
