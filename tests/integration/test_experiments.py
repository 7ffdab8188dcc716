"""The experiments over little data: what they find is what happened, and the page tells it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from openbook.cli import app
from openbook.errors import InvalidDocuments
from openbook.experiments.leaders import DATES, changed, documents, read_leaders, shipped
from openbook.experiments.memory import MemorySettings, run
from openbook.experiments.report import Expected, Report, Table

BEFORE = [
    ("Poland", "President Anna KOWALSKA (since 3 May 2010)", "Prime Minister Jan NOWAK (since 1 May 2009)"),
    ("Gambia, The", "King JAN III (since 3 May 2010); note - he is old", ""),
    ("Peru", "President Martin DE LA CRUZ (since 1 May 2009)", "President Martin DE LA CRUZ (since 1 May 2009)"),
    ("Chad", "Military council", "Prime Minister Ali ABDI (since 2009)"),
]
AFTER = [
    ("Poland", "President Zofia MAZUR (since 3 May 2020)", "Jan NOWAK (since 1 May 2009)"),
    ("Gambia, The", "King PETER (since 3 May 2020)", ""),
    ("Peru", "President Rosa QUISPE (since 2020)", "Prime Minister Jose PEREZ (since 2020)"),
    ("Chad", "President Idris DEBY (since 2020)", "Moussa FAKI (since 2020)"),
]


def lines(path: Path, rows: list[tuple[str, str, str]]) -> Path:
    fields = ("country", "chief_of_state", "head_of_government")
    path.write_text("".join(json.dumps(dict(zip(fields, row, strict=True))) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("leaders")
    return lines(folder / "before.jsonl", BEFORE), lines(folder / "after.jsonl", AFTER)


def test_leaders_are_read_out_of_the_words_of_the_factbook(files: tuple[Path, Path]) -> None:
    before, after = map(read_leaders, files)
    peru = before["Peru", "chief_of_state"]
    assert (peru.title, peru.name, peru.surname) == ("President", "Martin De La Cruz", "De La Cruz")
    assert peru.answers == ("Martin De La Cruz", "De La Cruz", "President Martin De La Cruz")
    assert ("Chad", "chief_of_state") not in before
    assert [(each.question, each.before.surname, each.after.surname) for each in changed(before, after)] == [
        ("Who is the prime minister of Chad?", "Abdi", "Faki"),
        ("Who is the president of Peru?", "De La Cruz", "Quispe"),
        ("Who is the president of Poland?", "Kowalska", "Mazur"),
        ("Who is the king of The Gambia?", "Jan III", "Peter"),
    ]
    (poland,) = (each for each in documents(before) if each["id"] == "Poland")
    assert poland["text"] == (
        "Anna Kowalska has been the President of Poland since 3 May 2010. "
        "Jan Nowak has been the Prime Minister of Poland since 1 May 2009."
    )


def test_what_ships_has_leaders_who_changed() -> None:
    before, after = (read_leaders(shipped(date)) for date in DATES)
    offices = changed(before, after)
    assert len(offices) > 100
    for each in offices:
        assert each.before.surname != each.after.surname
        assert not {"since", "note"} & {*each.before.name.lower().split(), *each.after.name.lower().split()}
    asked = {each.question: (each.before.name, each.after.name) for each in offices}
    assert asked["Who is the president of Algeria?"] == ("Abdelaziz Bouteflika", "Abdelmadjid Tebboune")


@pytest.mark.parametrize("content", ["", "no JSON\n", "[]\n", '{"country": 3}\n', '{"country": "Chad"}\n'])
def test_what_names_no_leaders_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "leaders.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidDocuments, match=r"leaders\.jsonl"):
        read_leaders(path)


def test_answers_follow_the_memory(files: tuple[Path, Path], tmp_path: Path) -> None:
    """By the command, with the embedded models."""
    page = tmp_path / "pages" / "memory.html"
    options = ["--before", str(files[0]), "--after", str(files[1]), "--out", str(page)]
    done = CliRunner().invoke(app, ["experiment", "memory", *options])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "Who is the president of Poland?" in text
    assert "Zofia Mazur" in text
    found = {line.split("  ")[-1].strip(): line.split()[1] for line in done.stdout.splitlines() if " to " in line}
    assert found["answers as at first, the first published again"] == "1"
    assert float(found["memory before, leaders before"]) >= 0.5
    assert float(found["memory before, leaders after"]) == 0.0


def test_nobody_who_changed_is_no_experiment(files: tuple[Path, Path]) -> None:
    with pytest.raises(InvalidDocuments, match="no office changes hands between"):
        run(MemorySettings(before=files[0], after=files[0]), "")


def report(found: float) -> Report:
    return Report(
        title="<Title>",
        about=["what & why"],
        command="openbook experiment memory --limit '3'",
        made_of=[("seed", "0")],
        expected=[Expected("right", found, 0.7, 1)],
        tables=[Table("all", ("a", "b"), [("<1>", "2")], hidden=True)],
        pictures=[("a curve", "data:image/png;base64,AAAA")],
    )


def test_a_page_says_ok_or_fail_and_shows_texts_as_texts() -> None:
    for found, word in ((0.7, "ok"), (0.69, "FAIL"), (float("nan"), "FAIL")):
        page = report(found).page()
        assert f">{word}</span>" in page
        assert report(found).is_as_expected == (word == "ok")
    assert "&lt;Title&gt;" in page
    assert "<td>&lt;1&gt;</td>" in page
    assert "http" not in page
