"""A context is harmless in logs and headers, and its deadline crosses to other processes as the seconds left."""

import pickle
from math import inf

import pytest

from openbook import wire
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.errors import InvalidRequest
from openbook.testing import ManualClock
from openbook.v1 import index_pb2

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("field", ["request_id", "caller", "trace", "tenant"])
@pytest.mark.parametrize("text", ["x" * 129, "two\nlines", "\x1b[2J", "é"])
def test_a_text_that_would_do_harm_is_refused_by_name(field: str, text: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{field} must have at most 128 printable ASCII characters, got '"):
        Context(**{field: text})


def test_what_crosses_to_another_process_is_what_is_left() -> None:
    clock = ManualClock(1000.0)  # as another machine's may stand
    there = pickle.loads(pickle.dumps(Context(Deadline.after(60.0, clock), "id", "who", TRACE)))  # noqa: S301  # ours
    assert 0.0 < there.deadline.remaining_s() <= 60.0
    assert (there.request_id, there.caller, there.trace) == ("id", "who", TRACE)
    never = pickle.loads(pickle.dumps(Context()))  # noqa: S301  # ours
    assert never.deadline.remaining_s() == inf


@pytest.mark.parametrize("context", [Context(), Context(request_id="id"), Context(caller="who", trace=TRACE)])
def test_a_call_carries_it(context: Context) -> None:
    assert wire.context_of_call(index_pb2.Call(context=wire.context_to_wire(context))) == context


def test_headers_that_are_none_are_left_out() -> None:
    good = {"x-request-id": "id", "x-caller": "who", "traceparent": TRACE}
    assert wire.context_of_headers(good) == Context(request_id="id", caller="who", trace=TRACE)
    bad = {"x-request-id": "x" * 129, "x-caller": "two\nlines", "traceparent": "00-xyz"}
    assert wire.context_of_headers(bad) == Context()
