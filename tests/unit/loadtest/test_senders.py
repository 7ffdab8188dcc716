"""What a load test asks for."""

from typing import Any

import pytest

from openbook.loadtest.senders import options
from openbook.loadtest.settings import LoadSettings


@pytest.mark.parametrize(
    ("what", "said", "asked"),
    [
        ("stream", {}, {"formulation": "token", "n_beams": 1}),
        ("stream", {"formulation": "sequence"}, {"formulation": "sequence", "n_beams": 1}),
        ("stream", {"n_beams": 4, "k": 3}, {"formulation": "token", "n_beams": 4, "k": 3}),
        ("answer", {"n_beams": 4}, {"n_beams": 4}),
        ("retrieve", {"n_beams": 4, "k": 3}, {"k": 3}),
    ],
)
def test_what_is_said_is_asked_and_streams_are_greedy_where_nothing_is(
    what: str, said: dict[str, Any], asked: dict[str, Any]
) -> None:
    settings = LoadSettings.model_validate({"address": "a:1", "timeout_s": 2.0, "what": what, **said})
    assert options(settings) == {"timeout_s": 2.0, **asked}
