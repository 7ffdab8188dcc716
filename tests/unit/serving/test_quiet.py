"""What of Serve's log is left out, and that everything else stays."""

import logging
from types import SimpleNamespace

import pytest
from ray.serve.exceptions import RequestCancelledError

from openbook.errors import Overloaded
from openbook.serving.endpoint.bodies import middlewares
from openbook.serving.endpoint.quiet import is_news


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("of a closed stream"), True),
        (KeyError("x"), True),
        (SimpleNamespace(original_exception=KeyError("x")), True),
        (RuntimeError("async generator ignored GeneratorExit"), False),
        (GeneratorExit(), False),
        (RequestCancelledError("id"), False),
        (Overloaded("full"), False),
        (SimpleNamespace(original_exception=Overloaded("full")), False),
    ],
)
def test_only_what_is_no_news_is_left_out(error: BaseException, told: bool) -> None:
    record = logging.LogRecord("ray.serve", logging.ERROR, "", 0, "failed", None, (type(error), error, None))
    assert is_news(record) == told
    assert is_news(logging.LogRecord("ray.serve", logging.ERROR, "", 0, "failed", None, None))


def test_one_node_is_told_of_no_others() -> None:
    said = "HTTPOptions.host='127.0.0.1' won't accept connections from HAProxy on other nodes; cross-node routing fails"
    assert not is_news(logging.LogRecord("ray.serve", logging.WARNING, "", 0, said, None, None))


def test_every_process_of_serves_that_meets_callers_leaves_it_out() -> None:
    """Proxies as well, in which nothing else of ours runs."""
    middlewares()
    assert all(is_news in logging.getLogger(name).filters for name in ("ray.serve", "asyncio"))
