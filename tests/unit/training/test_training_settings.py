"""What `openbook train` reads: values that go together, or are refused with what they would have to be."""

from pathlib import Path
from typing import Any

import pytest
import tiny_training as tiny
import yaml
from pydantic import ValidationError

from openbook.training.settings import TrainingSettings

CONFIGURATIONS = Path(__file__).parents[3] / "deploy/default-model"


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"loop": {"micro_batch_size": 3}}, "micro_batch_size must be a divisor of batch_size = 8, got 3"),
        ({"workers": {"n_workers": 4}}, "n_workers must divide the 2 micro-batches of a batch, got 4"),
        ({"retrieval": {"snapshot": None}}, r"dense needs index\.addresses or a snapshot, one of them"),
        ({"retrieval": {"index": {"addresses": ["a:1"]}}}, r"dense needs index\.addresses or a snapshot, one of them"),
        ({"retrieval": {"kind": "bm25", "snapshot": None}}, "bm25 needs a snapshot"),
        ({"models": {"train_query_encoder": False, "train_generator": False}}, "nothing is trained"),
        ({"models": {"train_generator": False}, "retrieval": {"kind": "given"}}, "nothing is trained"),
        ({"optimizer": {"learning_rates": {"*": -1}}}, "greater than or equal to 0"),
        ({"optimizer": {"learning_rate": float("nan")}}, "learning_rate"),
        ({"optimizer": {"betas": (0.9, 1.0)}}, "less than 1"),
        (
            {"models": {"saved_dtype": "float16"}, "retrieval": {"kind": "bm25"}, "biencoder": {}},
            "saved_dtype must be float32 for a bi-encoder, got float16",
        ),
        (
            {"models": {"train_query_encoder": False}, "retrieval": {"kind": "bm25"}, "biencoder": {}},
            r"models\.train_query_encoder must be true for the one tower .*, got false",
        ),
        (
            {"loop": {"micro_batch_size": 1}, "retrieval": {"kind": "bm25"}, "biencoder": {"n_negatives": 0}},
            r"biencoder\.n_negatives must be at least 1 with loop\.micro_batch_size = 1, .*, got 0",
        ),
        ({"loop": {"n_threads": 3_000_000_000}}, "equal to 1024"),
        ({"workers": {"num_cpus": float("inf")}}, "finite"),
        ({"loop": {"seed": -1}}, "greater than or equal to 0"),
        ({"loop": {"n_stepz": 1}}, "n_stepz"),
        ({"task": {"train": []}}, "task.train"),
    ],
)
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        tiny.settings(**sections)


@pytest.mark.parametrize(
    ("sections", "trains"),
    [
        ({}, True),
        ({"models": {"train_query_encoder": False}}, False),
        *(({"retrieval": {"kind": kind}}, False) for kind in ("bm25", "given", "none")),
    ],
)
def test_only_a_dense_prior_trains_the_query_encoder(sections: dict[str, Any], trains: bool) -> None:
    assert tiny.settings(**sections).trains_query_encoder == trains


def test_a_bi_encoder_of_two_towers_may_train_that_of_passages_alone() -> None:
    given = {"models": {"train_query_encoder": False}, "retrieval": {"kind": "bm25"}}
    assert tiny.settings(**given, biencoder={"passage_encoder": "other"}).biencoder is not None


def test_a_bi_encoder_has_no_generator_to_train() -> None:
    given: dict[str, Any] = {"models": {"train_generator": False}, "retrieval": {"kind": "bm25"}, "biencoder": {}}
    assert tiny.settings(**given).biencoder is not None


@pytest.mark.parametrize("path", sorted(CONFIGURATIONS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_configurations_of_the_default_model_are_valid(path: Path) -> None:
    TrainingSettings.model_validate(yaml.safe_load(path.read_text()))
