"""Logging: one line an event, for people or as JSON, found by its request id; without what users ask.

OPENBOOK_LOG_LEVEL, OPENBOOK_LOG_FORMAT and OPENBOOK_LOG_QUESTIONS say how.
"""

import json
import logging
import os
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from openbook.core.context import Context
from openbook.errors import InvalidConfig, OpenbookError

log = logging.getLogger(__name__)

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
FORMATS = ("text", "json")
FIELDS = "openbook_fields"
"""The attribute of a record that has what `about` gave."""


def setup_logging(role: str) -> logging.Logger:
    """Log to standard error, every line marked with the process's role, from OPENBOOK_LOG_LEVEL (INFO) upwards.

    Raises:
        InvalidConfig: there is no such level, or no such format.
    """
    level = _chosen("OPENBOOK_LOG_LEVEL", LEVELS, "INFO", str.upper)
    kind = _chosen("OPENBOOK_LOG_FORMAT", FORMATS, "text", str.lower)
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s {role:<12} %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%S%z")
    handler.setFormatter(JsonFormatter(role) if kind == "json" else text)
    root = logging.getLogger("openbook")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
    return root


class Lasting:
    """A state that may last: logged when it begins, when there is something else to say of it, and when it is over;
    not as often as it is met.
    """

    def __init__(self, log: logging.Logger, over: str, level: int = logging.WARNING) -> None:
        self._log, self._over, self._level = log, over, level
        self._said = ""

    def met(self, message: str) -> None:
        """It is so, whether or not it was."""
        if message != self._said:
            self._said = message
            self._log.log(self._level, "%s", message)

    def ended(self) -> None:
        """It is not so, whether or not it was."""
        if self._said:
            self._said = ""
            self._log.log(self._level, "%s", self._over)


def about(context: Context, **fields: Any) -> Mapping[str, Any]:
    """The `extra` of a log line on behalf of somebody: by these fields JSON lines are found."""
    known = {"request_id": context.request_id, "trace_id": context.trace[3:35], "caller": context.caller}
    return with_fields(**known, **fields)


def with_fields(**fields: Any) -> Mapping[str, Any]:
    """As `about`, where there is no context. Empty ones are left out."""
    return {FIELDS: {name: value for name, value in fields.items() if value != ""}}


def shows_questions() -> bool:
    """Whether what users ask may stand in the log: only with OPENBOOK_LOG_QUESTIONS=1."""
    return os.environ.get("OPENBOOK_LOG_QUESTIONS") == "1"


def as_ours(error: Exception, request_id: str) -> OpenbookError:
    """An error as it may leave this process: ours as they are, of others no more than the id to look for in the log.

    Their messages may quote the question, where they were raised does not: without OPENBOOK_LOG_QUESTIONS=1 only that
    is logged.
    """
    if isinstance(error, OpenbookError):
        return error
    if shows_questions():
        found = "".join(traceback.format_exception(error)).rstrip()
    else:
        frames = "".join(traceback.format_tb(error.__traceback__))
        found = f"{frames}{type(error).__qualname__}: withheld, OPENBOOK_LOG_QUESTIONS=1 shows it"
    log.error("internal error, request id %s\n%s", request_id, found, extra=about(Context(request_id=request_id)))
    return OpenbookError(f"internal error, request id {request_id}")


class JsonFormatter(logging.Formatter):
    """A line of JSON a record: time in UTC, level, process, logger, message, and the fields of `about`."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._role,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _chosen(variable: str, choices: tuple[str, ...], default: str, normal: Any) -> str:
    value: str = normal(os.environ.get(variable, default))
    if value not in choices:
        raise InvalidConfig(f"{variable} must be one of {', '.join(choices)}, got {value!r}")
    return value
