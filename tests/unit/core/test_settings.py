"""Settings are refused when they are made, by name and limit."""

import re

import pytest

from openbook.config import AnswerDefaults
from openbook.core.types import Formulation, GenerationSettings, RetrievalSettings
from openbook.errors import InvalidRequest


@pytest.mark.parametrize("min_coverage", [0.0, -1.0, 1.1, float("nan")])
def test_coverage_out_of_range(min_coverage: float) -> None:
    with pytest.raises(InvalidRequest, match=f"min_coverage must be above 0, at most 1, got {min_coverage}"):
        RetrievalSettings(min_coverage=min_coverage)


def test_a_search_parameter_out_of_range() -> None:
    with pytest.raises(InvalidRequest, match=r"ef_search must be 1\.\.1048576, got 0"):
        RetrievalSettings(ef_search=0)


@pytest.mark.parametrize(
    ("k", "settings", "work"),
    [
        (100, GenerationSettings(), 100 * (300 + 4 * 32)),
        (5, GenerationSettings(n_beams=32, max_new_tokens=512), 5 * (300 + 32 * 512)),
        (100, GenerationSettings(n_beams=32, max_new_tokens=512, temperature=1.0), 100 * (300 + 512)),
        (5, GenerationSettings(n_beams=32, temperature=1.0, labels=("yes", "no", "?")), 5 * (300 + 3 * 32)),
    ],
)
def test_work_that_is_permitted_by_default(k: int, settings: GenerationSettings, work: int) -> None:
    assert settings.work(k, AnswerDefaults().max_work) == work


@pytest.mark.parametrize(
    ("k", "settings", "name", "got"),
    [
        (100, GenerationSettings(n_beams=32, max_new_tokens=512), "n_beams", "100 x (300 + 32 x 512) = 1668400"),
        (400, GenerationSettings(temperature=1.0), "samples", "400 x (300 + 1 x 32) = 132800"),
        (
            100,
            GenerationSettings(labels=tuple("abcdefghijklmnopqrstuvwxyz")),
            "labels",
            "100 x (300 + 26 x 32) = 113200",
        ),
    ],
)
def test_too_much_work_is_refused_by_all_that_it_is_made_of(
    k: int, settings: GenerationSettings, name: str, got: str
) -> None:
    message = f"k x (context tokens + {name} x max_new_tokens) must be at most max_work = 100000, got {got}"
    with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}$"):
        settings.work(k, AnswerDefaults().max_work)


def test_the_last_look_may_be_for_less_than_the_tokens_between_two() -> None:
    looks = [GenerationSettings(Formulation.TOKEN, n_beams=1, max_new_tokens=n, follow=2).n_looks for n in (4, 5)]
    assert looks == [2, 3]


def test_a_label_longer_than_an_answer_can_be_of_use_is_refused_by_its_length() -> None:
    assert GenerationSettings(labels=("b", "a" * 1000)).labels
    with pytest.raises(InvalidRequest, match=r"labels must have at most 1000 characters each, got 1001 in 'a{50}' "):
        GenerationSettings(labels=("b", "a" * 1001))
