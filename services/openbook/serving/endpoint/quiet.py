"""What Serve logs and is no news: errors of ours, which are answers; callers who go away; that there is one node."""

import logging

from ray.serve.exceptions import RequestCancelledError

from openbook.errors import OpenbookError

OF_A_CLOSED_STREAM = "async generator ignored GeneratorExit"
"""What Serve's Python proxy makes of a caller who goes away in the middle of a stream."""

OF_ONE_NODE = "won't accept connections from HAProxy on other nodes"
"""What Serve's controller says of an endpoint on loopback, which has no other nodes."""


def quieten() -> None:
    """Leave it out of this process's log. May be called again."""
    for name in ("ray.serve", "asyncio"):
        logging.getLogger(name).addFilter(is_news)


def is_news(record: logging.LogRecord) -> bool:
    """Whether a record is worth a line."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, GeneratorExit | RequestCancelledError) or str(error) == OF_A_CLOSED_STREAM:
        return False
    if OF_ONE_NODE in record.getMessage():
        return False
    # Errors of ours are answers, or were logged when they became ours.
    return not isinstance(getattr(error, "original_exception", error), OpenbookError)
