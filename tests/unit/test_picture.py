"""A trace's picture."""

import re

import pytest

from openbook.tracing.picture import Span, choose, draw


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


def test_the_last_trace_is_the_one_that_began_last_whatever_others_still_do() -> None:
    spans = [
        Span("Answer", "serve", trace_id, span_id, "", "server", start_ns, 100, {"request_id": request_id}, [])
        for trace_id, span_id, start_ns, request_id in (
            ("slow", "1", 0, "a"),
            ("quick", "2", 50, "b"),
            ("slow", "3", 90, "a"),
        )
    ]
    assert {each.trace_id for each in choose(spans, None)} == {"quick"}
    assert [each.span_id for each in choose(spans, "a")] == ["1", "3"]


def test_a_trace_of_several_requests_is_as_late_as_its_last_request() -> None:
    spans = [
        Span("Answer", "serve", trace_id, request_id, "", "server", start_ns, 100, {"request_id": request_id}, [])
        for trace_id, request_id, start_ns in (("script", "a", 0), ("another", "b", 10), ("script", "c", 50))
    ]
    assert {each.trace_id for each in choose(spans, None)} == {"script"}
