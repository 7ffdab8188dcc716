"""What cannot be evaluated is refused before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest

from openbook.config import section
from openbook.core.types import Formulation
from openbook.errors import InvalidConfig
from openbook.evaluation.settings import EvaluationSettings

GOOD: dict[str, Any] = {"questions": ["a/nq.jsonl.gz"], "out": "out", "snapshot": "snapshot"}


def settings(**values: Any) -> EvaluationSettings:
    return section(EvaluationSettings, "test", **{**GOOD, **values})


def test_files_have_the_names_of_what_they_hold() -> None:
    assert settings(questions=["a/nq.jsonl.gz", Path("squad-dev.jsonl")]).names == ("nq", "squad-dev")


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


def test_a_label_may_have_a_word_of_its_own() -> None:
    asked = settings(labels=["SUPPORTS=true", "REFUTES=a=b", "NOT ENOUGH INFO"])
    assert asked.words == (("true", "SUPPORTS"), ("a=b", "REFUTES"), ("NOT ENOUGH INFO", "NOT ENOUGH INFO"))
    assert asked.generation(Formulation.TOKEN).labels == ("true", "a=b", "NOT ENOUGH INFO")
