"""What cannot be evaluated is refused before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from openbook.cli import app
from openbook.config import section
from openbook.core.types import Decoding, Formulation, GenerationSettings, RetrievalSettings, RetrieverKind
from openbook.errors import InvalidConfig, InvalidRequest
from openbook.evaluation.settings import EvaluationSettings

GOOD: dict[str, Any] = {"questions": ["a/nq.jsonl.gz"], "out": "out", "snapshot": "snapshot"}


def settings(**values: Any) -> EvaluationSettings:
    return section(EvaluationSettings, "test", **{**GOOD, **values})


def test_files_have_the_names_of_what_they_hold() -> None:
    files = ["a/nq.jsonl.gz", Path("squad-dev.jsonl"), "a/.nq.jsonl"]
    assert settings(questions=files).names == ("nq", "squad-dev", ".nq")
    for here in (".", "a/.."):
        assert settings(questions=[here]).names == (Path.cwd().name.partition(".")[0],)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"snapshot": None}, "name a snapshot or index servers"),
        ({"index": {"addresses": ["localhost:1"]}}, "name a snapshot or index servers"),
        ({"context": "gold"}, "gold context needs neither"),
        ({"context": "none"}, "the closed book needs neither"),
        (
            {"follow": 2, "formulations": ["token"], "retriever": "bm25"},
            "follow must be 0 with the retriever bm25",
        ),
        ({"bm25_weight": -1}, "bm25_weight = -1"),
        ({"bm25_weight": 0.2}, "bm25_weight is for the retriever hybrid alone, got 0.2 with dense"),
        ({"bm25_weight": 0.2, "retriever": "bm25"}, "got 0.2 with bm25"),
        ({"questions": []}, "questions"),
        ({"questions": ["a/nq.jsonl", "b/nq.jsonl.gz"]}, "names of files must differ, got nq, nq"),
        ({"formulations": ["token", "token"]}, "formulations must differ"),
        ({"k": 0}, "k = 0"),
        ({"k": 101}, "k = 101"),
        ({"n_beams": 33}, "n_beams must be 1..32, got 33"),
        ({"limit": 0}, "limit = 0"),
        ({"labels": ["yes", "yes"]}, "labels must be"),
        ({"labels": ["SUPPORTS=true", "REFUTES=true"]}, "labels must be"),
        ({"labels": ["SUPPORTS=", "REFUTES=false"]}, "labels must be"),
        ({"generator": {"dtype": "int8"}}, "generator.dtype = 'int8'"),
    ],
)
def test_what_cannot_be_run_is_named(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        settings(**values)
    assert problem in str(refused.value)
    assert "error," not in str(refused.value)  # pydantic's word for ours


def test_all_that_is_asked_for_is_searched_and_decoded_by() -> None:
    asked = settings(
        retriever="hybrid", bm25_weight=0.2, decoding="fast", n_beams=3, max_new_tokens=9, labels=["yes", "no"]
    )
    assert asked.retrieval(7) == RetrievalSettings(k=7, retriever=RetrieverKind.HYBRID, bm25_weight=0.2)
    assert asked.generation(Formulation.TOKEN) == GenerationSettings(
        Formulation.TOKEN, Decoding.FAST, n_beams=3, max_new_tokens=9, labels=("yes", "no")
    )


def test_a_label_may_have_a_word_of_its_own() -> None:
    asked = settings(labels=["SUPPORTS=true", "REFUTES=a=b", "NOT ENOUGH INFO"])
    assert asked.words == (("true", "SUPPORTS"), ("a=b", "REFUTES"), ("NOT ENOUGH INFO", "NOT ENOUGH INFO"))
    assert asked.generation(Formulation.TOKEN).labels == ("true", "a=b", "NOT ENOUGH INFO")


@pytest.mark.parametrize(
    ("options", "models"),
    [
        (["--snapshot", "s"], ("mine", "of passages", "my-rag")),
        (["--snapshot", "s", "--encoder", "other", "--generator", "another"], ("other", "", "another")),
        (["--closed-book"], ("mine", "of passages", "my-rag")),
    ],
)
def test_models_are_those_of_the_settings_unless_options_say_others(
    options: list[str], models: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[EvaluationSettings] = []
    monkeypatch.setattr("openbook.evaluation.run.evaluate", lambda settings, _: asked.append(settings))
    (tmp_path / "openbook.yaml").write_text(
        "encoder: {model: mine, passage_model: of passages}\ngenerator: {model: my-rag}\nindex: {addresses: ['a:1']}\n"
    )
    always = ["--config", str(tmp_path / "openbook.yaml"), "--out", str(tmp_path / "out")]
    CliRunner().invoke(app, ["evaluate", "nq.jsonl", *always, *options])
    (found,) = asked
    assert (found.encoder.model, found.encoder.passage_model, found.generator.model) == models
    assert not found.index.addresses  # which are those of `up`


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--retrieve", "--label", "yes"], "--retrieve has no use for --label"),
        (["--passages", "200"], "an evaluation without --retrieve has no use for --passages"),
        (["--gold", "--retriever", "bm25"], "--gold has no use for --retriever"),
        (["--closed-book", "--k", "5"], "--closed-book has no use for --k"),
    ],
)
def test_options_without_use_are_refused(options: list[str], told: str, tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["evaluate", "nq.jsonl", "--out", str(tmp_path / "out"), *options])
    assert (type(refused.exception), str(refused.exception)) == (InvalidRequest, told)
