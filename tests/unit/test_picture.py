"""A trace's picture."""

import re

import pytest

from openbook.tracing.picture import Span, draw


@pytest.mark.parametrize(
    ("took_ns", "told"),
    [
        (1_234_000_000, "1,234 ms"),
        (99_600_000, "100 ms"),
        (99_400_000, "99 ms"),
        (1_500, "0.0015 ms"),
        (100, "0.0001 ms"),
        (40, "0 ms"),
    ],
)
def test_times_are_told_without_exponents(took_ns: int, told: str) -> None:
    picture = draw([Span("Search", "index", "1", "2", "", "server", 0, took_ns, {}, [])])
    assert f">{told}</text>" in picture
    assert not re.search(r"e[+-]\d+ ms", picture)
