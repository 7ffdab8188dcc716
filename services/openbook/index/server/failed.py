"""What went wrong with a call, as it is told. An error that is kept keeps, by its traceback, all that was at hand where
it was raised: a connection, and every reply that it has not taken."""

import logging
from typing import NamedTuple

from openbook.core.context import MAX_CHARS
from openbook.errors import DeadlineExceeded, OpenbookError, Overloaded
from openbook.logs import with_fields
from openbook.v1 import index_pb2

log = logging.getLogger(__name__)


class Failed(NamedTuple):
    """The gRPC code, and a message."""

    code: str
    message: str

    def reply(self) -> index_pb2.Reply:
        """To a call of a stream, its number not yet set."""
        return index_pb2.Reply(failure=index_pb2.Failure(code=self.code, message=self.message))


CANCELLED = Failed("CANCELLED", "nobody waits for it")


def explain(method: str, request_id: str, error: Exception) -> Failed:
    """What is told of an error; one that nobody foresaw goes into the log as a whole."""
    if isinstance(error, OpenbookError):
        # A flood of calls must not become a flood of lines.
        level = logging.DEBUG if isinstance(error, Overloaded | DeadlineExceeded) else logging.INFO
        text = f"{method} failed, request id {request_id[:MAX_CHARS]!a}: {error.grpc_code}: {error}"
        fields = with_fields(request_id=request_id[:MAX_CHARS], method=method, code=error.grpc_code)
        log.log(level, "%s", text, extra=fields)
        return Failed(error.grpc_code, str(error))
    fields = with_fields(request_id=request_id[:MAX_CHARS], method=method, code="INTERNAL")
    log.error("%s failed, request id %a", method, request_id[:MAX_CHARS], exc_info=error, extra=fields)
    return Failed("INTERNAL", f"internal error in {method}; the server's log says more")
