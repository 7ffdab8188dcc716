"""The experiments over little data: what they find is what happened, and the page tells it."""

import json
import re
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any, TypeVar

import pytest
from typer.testing import CliRunner

from openbook.cli import app
from openbook.config import EncoderSettings, section
from openbook.corpus.build import build_corpus
from openbook.errors import InvalidConfig, InvalidDocuments, InvalidModel, InvalidRequest
from openbook.evaluation.kilt import read
from openbook.evaluation.record import Record
from openbook.evaluation.settings import EvaluationSettings
from openbook.evaluation.summary import Mean
from openbook.experiments import (
    abstractive,
    asking,
    compression,
    decoding,
    diversity,
    open_domain,
    passages,
    posterior,
    retrievers,
)
from openbook.experiments.command import _end
from openbook.experiments.kept import Kept, folder_of
from openbook.experiments.leaders import DATES, changed, documents, read_leaders, shipped
from openbook.experiments.memory import MemorySettings, run
from openbook.experiments.report import Expected, Heat, Report, Table

pytestmark = pytest.mark.usefixtures("loaded_once")

Asking = TypeVar("Asking", bound=EvaluationSettings)

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


def test_empty_lines_between_leaders_are_skipped(files: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "leaders.jsonl").write_text(files[0].read_text().replace("\n", "\n \n"))
    assert read_leaders(tmp_path / "leaders.jsonl") == read_leaders(files[0])


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
    page = tmp_path / "memory.html"
    options = ["--before", str(files[0]), "--after", str(files[1]), "--out", str(page)]
    done = CliRunner().invoke(app, ["experiment", "memory", *options])
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert "Who is the president of Poland?" in text
    assert "Zofia Mazur" in text
    rows = (line.split(")", 1) for line in done.stdout.splitlines() if " to " in line)
    found = {what.strip(): number.split()[1] for number, what in rows}
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
        pictures=[("a <curve>", "<svg></svg>")],
        plan={"seed": 0},
        numbers={"right": found},
    )


def test_a_table_counts_the_questions_that_its_means_are_of() -> None:
    """F1 is of answers that are texts, not of regular expressions."""

    def answer(file: str, f1: float | None) -> Kept:
        record = Record(
            file=file, id="1", question="?", answers=(), answer_regex=None, formulation=asking.SEQUENCE.formulation,
            prediction="", em=False, f1=f1, rouge_l=None, log_likelihood=0.0, answer_rank=None, prior_entropy=0.0,
            passage_ids=(),
        )  # fmt: skip
        return Kept(record=record, seconds=0.0)

    files = {"texts": [answer("texts", 0.5)] * 3, "patterns": [answer("patterns", None)] * 2}
    asked = asking.Asked({}, {(file, asking.SEQUENCE): answers for file, answers in files.items()})
    of_f1, of_em = (asked.rows([asking.SEQUENCE], worth) for worth in (lambda record: record.f1, asking.em))
    assert [row[:2] for row in of_f1] == [["texts", "3"], ["patterns", "0"], ["all", "3"]]
    assert [row[:2] for row in of_em] == [["texts", "3"], ["patterns", "2"], ["all", "5"]]


def test_a_page_says_ok_or_fail_and_shows_texts_as_texts() -> None:
    for found, word in ((0.7, "ok"), (0.69, "FAIL"), (float("nan"), "FAIL")):
        page = report(found).page()
        assert f">{word}</span>" in page
        assert report(found).is_as_expected == (word == "ok")
    assert "&lt;Title&gt;" in page
    assert "<td>&lt;1&gt;</td>" in page
    assert "a &lt;curve&gt;" in page
    assert "http" not in page


def test_a_page_is_held_to_a_former_one(tmp_path: Path) -> None:
    report(0.8).write(tmp_path / "former.html")
    assert report(0.82).against(tmp_path / "former.html").is_as_expected
    again = report(0.9).against(tmp_path / "former.html")
    assert [each.is_met for each in again.expected] == [True, False]
    assert again.expected[1].what == "right, as in former.html"
    with pytest.raises(InvalidConfig, match=r"former\.html: was made of something else: seed is 0 there and 1 here"):
        replace(report(0.8), plan={"seed": 1}).against(tmp_path / "former.html")
    of_nothing = replace(report(0.8), numbers={"right": 0.8, "right of none": nan})
    of_nothing.write(tmp_path / "nothing.html")
    assert of_nothing.against(tmp_path / "nothing.html").is_as_expected
    (tmp_path / "other.html").write_text("<p>nothing</p>")
    with pytest.raises(InvalidConfig, match=r"other\.html: is no experiment's page"):
        report(0.8).against(tmp_path / "other.html")


def test_a_page_is_held_to_one_of_another_processor(tmp_path: Path) -> None:
    """On which `auto` became another dtype: pages say so within the encoder's fingerprint."""
    asked = {"dtype": "auto", "encoder_fingerprint": "ab12"}
    for former, now in (("-bfloat16", ""), ("", "-bfloat16")):
        plans = ({"file": {**asked, "encoder_fingerprint": f"ab12{dtype}"}} for dtype in (former, now))
        of_former, of_now = (replace(report(0.8), plan=plan) for plan in plans)
        of_former.write(tmp_path / "former.html")
        assert of_now.against(tmp_path / "former.html").is_as_expected
    other = replace(report(0.8), plan={"file": {**asked, "encoder_fingerprint": "ab13"}})
    with pytest.raises(InvalidConfig, match='encoder_fingerprint is "ab12" there and "ab13" here'):
        other.against(tmp_path / "former.html")


def test_answers_are_kept_until_the_page_was_held_to_another(tmp_path: Path) -> None:
    page, other, same = (tmp_path / name for name in ("page.html", "other.html", "same.html"))
    replace(report(0.8), plan={"seed": 1}).write(other)
    report(0.8).write(same)
    folder_of(page).mkdir()
    with pytest.raises(InvalidConfig, match=r"other\.html: was made of something else"):
        _end(report(0.8), page, other, check=False)
    assert folder_of(page).exists()
    _end(report(0.8), page, same, check=False)
    assert not folder_of(page).exists()


def test_a_page_is_not_held_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its former self is what --out would replace, also by default; it is refused before anything is asked."""
    monkeypatch.chdir(tmp_path)
    report(0.8).write(Path("open-domain.html"))
    former = Path("open-domain.html").read_text()
    done = CliRunner().invoke(app, ["experiment", "open-domain", "--against", str(tmp_path / "open-domain.html")])
    assert isinstance(done.exception, InvalidConfig)
    assert str(done.exception).endswith("open-domain.html is the page that --out replaces: give another --out")
    assert Path("open-domain.html").read_text() == former


def test_what_is_no_page_is_refused_before_anything_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openbook.experiments.asking.embedded_snapshot", lambda on_progress: pytest.fail("begun"))
    monkeypatch.chdir(tmp_path)
    Path("other.html").write_text("<p>nothing</p>")
    command = ["experiment", "open-domain", "--against", "other.html"]
    with pytest.raises(InvalidConfig, match=r"^other\.html: is no experiment's page with numbers"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_shares_are_shown_with_their_intervals() -> None:
    table = Table("t", ("a", "b", "c"), [(Mean(0.25, 0.125, 0.5), Heat(0.5), Mean(float("nan"), 0, 0))])
    page = replace(report(0.8), tables=[table]).page()
    assert "<b>25.0</b> <small>12.5 to 50.0</small>" in page
    assert 'style="--p:0.500">0.50<' in page
    assert "<td>–</td>" in page


FACTS = [
    ("France", "Paris is the capital of France, a country in Europe.", "What is the capital of France?", "Paris"),
    ("Italy", "Rome is the capital of Italy, a country in Europe.", "What is the capital of Italy?", "Rome"),
    ("Poland", "Warsaw is the capital of Poland.", "What is the capital of Poland?", "Warsaw"),
    ("Marie Curie", "Marie Curie was born in Warsaw in 1867.", "Where was Marie Curie born?", "Warsaw"),
]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of four facts, questions about them, a claim about one."""
    folder = tmp_path_factory.mktemp("facts")
    documents = [{"id": title, "title": title, "text": text} for title, text, _, _ in FACTS]
    asked = [{"question": question, "answers": [answer]} for _, _, question, answer in FACTS]
    claim = {"answer": "REFUTES", "provenance": [{"title": "Italy"}]}
    claims = [{"id": "1", "input": "Paris is the capital of Italy.", "output": [claim]}]
    for name, rows in (("documents", documents), ("questions", asked), ("claims", claims)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_corpus(folder / "documents.jsonl", folder / "snapshot", EncoderSettings(), 2, "Flat")
    return folder


OPTIONS = {
    "open-domain": ["--decoding", "fast"],
    "retrievers": [],
    "passages": ["--k", "1", "--k", "2"],
    "decoding": ["--beams", "1", "--beams", "2"],
    "diversity": [],
    "posterior": ["--ask", "What is the capital of France?"],
    "compression": ["--factory", "Flat", "--factory", "SQ8"],
    "abstractive": [],
}
SAYS = {
    "open-domain": ["✓ Paris", "closed book"],
    "retrievers": ["dense, frozen", "hybrid, by rank", "var(--c0)"],
    "passages": ["Exact match by file, RAG-Token", "var(--c0)"],
    "decoding": ["Sequence, fast, 2 beams", "3 of 4"],
    "diversity": ["Distinct tri-grams"],
    "posterior": ["RAG-Token: “Paris”", 'class="heat"'],
    "compression": ["SQ8", "recall at 5 of Flat, which is exact"],
    "abstractive": ["Label accuracy", "Gold articles", "Q-BLEU-1"],
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_page_can_be_made_again(name: str, facts: Path, tmp_path: Path) -> None:
    """By its command, with the embedded models, and held to itself where it is quick."""
    page, questions = tmp_path / f"{name}.html", [str(facts / "questions.jsonl")]
    if name == "abstractive":
        questions.append(str(facts / "claims.jsonl"))
    command = ["experiment", name, *questions, "--snapshot", str(facts / "snapshot"), "--out", str(page)]
    k = [] if name == "passages" else ["--k", "2"]
    in_80 = CliRunner(env={"COLUMNS": "80"})
    done = in_80.invoke(app, [*command, *k, "--max-new-tokens", "8", *OPTIONS[name]])
    assert done.exit_code == 0, done.output
    assert not folder_of(page).exists()
    text = page.read_text()
    for said in SAYS[name]:
        assert said in text
    made = json.loads(text.partition('id="numbers">')[2].partition("</script>")[0])
    if name == "open-domain":
        assert made["plan"]["decoding"] == "fast"
    known = {
        "open-domain": {"exact match, questions, RAG-Token": 1.0, "exact match, questions, RAG-Sequence": 1.0},
        "retrievers": {"answer in the first 2, questions, BM25": 1.0},
        "compression": {"recall at 5, Flat": 1.0},
        "abstractive": {"gold article in the first 10, claims": 1.0},
    }
    assert made["numbers"].items() >= known.get(name, {}).items()
    assert max(map(len, done.stdout.splitlines())) <= max(80, len(f"{page}: written"))
    assert not re.search(r"FAIL +nan +(?! |\(0 to 1\) +distinct)", done.stdout)


def test_what_ships_can_be_asked() -> None:
    modules = (open_domain, retrievers, passages, decoding, diversity, posterior, compression, abstractive)
    files = asking.shipped(*{name for module in modules for name in module.DATA})
    assert len(files) == 5
    assert all(len(list(read(path, "title"))) >= 200 for path in files)


def settings(kind: type[Asking], facts: Path, out: Path, **values: Any) -> Asking:
    given: dict[str, Any] = {"snapshot": facts / "snapshot", "k": 2, "max_new_tokens": 8, "generator": {"max_batch": 2}}
    return section(kind, "test", **{"questions": [facts / "questions.jsonl"], "out": out, **given, **values})


def test_interrupted_it_goes_on_to_the_same_page(facts: Path, tmp_path: Path) -> None:
    whole = posterior.run(settings(posterior.Settings, facts, tmp_path / "whole.html"), "", lambda *at: None)
    asked = settings(posterior.Settings, facts, tmp_path / "page.html")

    def stopping(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        posterior.run(asked, "", stopping)
    seen: list[tuple[str, int, int]] = []
    report = posterior.run(asked, "", lambda *at: seen.append(at))
    assert seen == [("questions", 2, 4), ("questions", 4, 4)]
    assert report.page() == whole.page()


def test_a_question_that_cannot_be_read_is_named_before_one_is_asked(facts: Path, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"id": "q9", "question": "why " * 600, "answers": ["so"]}))
    files = [facts / "questions.jsonl", tmp_path / "long.jsonl"]
    asked = settings(posterior.Settings, facts, tmp_path / "page.html", questions=files)
    seen: list[tuple[str, int, int]] = []
    with pytest.raises(InvalidRequest, match=r"^long, question q9: question has 602 tokens"):
        posterior.run(asked, "", lambda *at: seen.append(at))
    assert not seen


def test_a_frozen_encoder_that_there_is_none_of_is_refused_before_a_question_is_asked(
    facts: Path, tmp_path: Path
) -> None:
    asked = settings(retrievers.Settings, facts, tmp_path / "page.html", frozen="nope")
    seen: list[tuple[str, int, int]] = []
    with pytest.raises(InvalidModel, match="model 'nope' is neither"):
        retrievers.run(asked, "", lambda *at: seen.append(at))
    assert not seen


def test_claims_are_checked_with_the_words_that_the_generator_knows(facts: Path, tmp_path: Path) -> None:
    page, claims = tmp_path / "page.html", str(facts / "claims.jsonl")
    command = ["experiment", "abstractive", claims, "--snapshot", str(facts / "snapshot"), "--out", str(page)]
    done = CliRunner().invoke(app, [*command, "--label", "SUPPORTS=Warsaw", "--label", "REFUTES=Rome"])
    assert done.exit_code == 0, done.output
    made = json.loads(page.read_text().partition('id="numbers">')[2].partition("</script>")[0])
    assert made["numbers"]["label accuracy, claims, RAG-Sequence"] == 1.0
    assert made["plan"]["labels"] == ["SUPPORTS=Warsaw", "REFUTES=Rome"]
    assert [number for number in made["numbers"] if number.startswith("label")] == [
        f"label accuracy, claims, {name}" for name in ("closed book", "RAG-Token", "RAG-Sequence")
    ]
    assert page.read_text().count("<td>two labels</td>") == 1
    assert "three labels" not in page.read_text()
    done = CliRunner().invoke(app, [*command, "--label", "SUPPORTS=Rome", "--label", "REFUTES=rome"])
    assert isinstance(done.exception, InvalidRequest)
    assert str(done.exception).startswith("claims, between questions 1 and 1: labels must differ in their tokens")


@pytest.mark.parametrize("labels", [["SUPPORT", "REFUTES"], ["true", "false"]])
def test_labels_that_no_file_is_answered_with_are_refused_before_anything_is_built(
    labels: list[str], facts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is misspelt would make texts of all claims, and its words be for nothing."""
    monkeypatch.setattr(asking, "embedded_snapshot", lambda on_progress: pytest.fail("begun"))
    monkeypatch.chdir(tmp_path)
    claims = [{"question": "Rome?", "answers": [answer]} for answer in ("SUPPORTS", "REFUTES")]
    Path("claims.jsonl").write_text("".join(json.dumps(each) + "\n" for each in claims))
    files = [str(facts / "questions.jsonl"), "claims.jsonl"]
    options = [option for label in labels for option in ("--label", f"{label}=yes {label}")]
    with pytest.raises(InvalidDocuments, match=r"labels must hold all answers of one of the files, got 2: \['"):
        CliRunner().invoke(app, ["experiment", "abstractive", *files, *options], catch_exceptions=False)


def test_all_kinds_of_index_are_known_before_one_is_built(
    facts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(compression, "build_snapshot", built)
    factories = ["Flat", "IVF{cells},Flat"]
    asked = settings(compression.Settings, facts, tmp_path / "page.html", factories=factories)
    with pytest.raises(InvalidConfig, match=r"FAISS factory 'IVF\{cells\},Flat'"):
        compression.run(asked, "", lambda *at: None)


def test_a_kind_of_index_that_so_few_passages_cannot_train_is_told_before_one_is_asked(
    facts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compression, "ask", lambda *_: pytest.fail("asked"))
    asked = settings(compression.Settings, facts, tmp_path / "page.html", factories=["Flat", "IVF{n},PQ{b}"])
    with pytest.raises(InvalidConfig, match=r"IVF\d+,PQ8"):
        compression.run(asked, "", lambda *at: None)


@pytest.mark.parametrize("name", ["open-domain", "memory"])
def test_a_page_that_cannot_be_written_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file/page.html", tmp_path / "misspelt/page.html", tmp_path):
        done = CliRunner().invoke(app, ["experiment", name, "--out", str(out)])
        assert isinstance(done.exception, InvalidConfig)
        assert str(done.exception) == f"{out}: must be a file in a folder that exists"
    assert not (tmp_path / "misspelt").exists()


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("open-domain", ["--k", "0"], "k = 0: Input should be greater than or equal to 1"),
        ("passages", ["--k", "5"], "--k must be given twice at least, got --k 5"),
        ("retrievers", ["--bm25-weight", "-1"], "weight = -1.0: Input should be greater than or equal to 0"),
        ("abstractive", [""], "cannot be read"),
    ],
)
def test_what_is_wrong_is_told_before_the_embedded_corpus_is_built(
    name: str, options: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(asking, "embedded_snapshot", built)
    monkeypatch.chdir(tmp_path)
    given = [each or str(tmp_path) for each in options]
    done = CliRunner().invoke(app, ["experiment", name, *given])
    assert isinstance(done.exception, InvalidConfig | InvalidDocuments), done.exception
    assert problem in str(done.exception)


@pytest.mark.parametrize(("name", "option"), [("passages", "--k"), ("decoding", "--beams")])
@pytest.mark.parametrize("value", ["0", "101"])
def test_of_an_option_that_is_given_several_times_a_value_out_of_its_range_is_named_with_it(
    name: str, option: str, value: str, tmp_path: Path
) -> None:
    given = [option, "1", option, value, "--out", str(tmp_path / "page.html"), str(tmp_path / "none.jsonl")]
    done = CliRunner().invoke(app, ["experiment", name, *given])
    assert f"Invalid value for '{option}':" in done.output


def test_what_ships_is_asked_of_the_embedded_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[EvaluationSettings] = []

    def run_it(settings: EvaluationSettings, *_: Any) -> Report:
        asked.append(settings)
        return Report("title", (), "command", [], [], [])

    built: list[Any] = []
    monkeypatch.setattr(asking, "embedded_snapshot", built.append)
    monkeypatch.setattr(abstractive, "run", run_it)
    assert CliRunner().invoke(app, ["experiment", "abstractive", "--out", str(tmp_path / "page.html")]).exit_code == 0
    assert len(built) == 1
    assert asked[0].snapshot == asking.SNAPSHOT


def test_a_snapshot_and_servers_exclude_each_other(facts: Path, tmp_path: Path) -> None:
    searched = ["--snapshot", str(facts / "snapshot"), "--index", "localhost:1"]
    done = CliRunner().invoke(app, ["experiment", "diversity", *searched, "--out", str(tmp_path / "page.html")])
    assert isinstance(done.exception, InvalidConfig)
    said = "openbook experiment diversity: name a snapshot or index servers, one of them"
    assert str(done.exception) == said  # no context is to be had in place of them
