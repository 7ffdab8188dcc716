"""One stream of calls: they are read in a thread of their own, and answered in whatever order they are done."""

import logging
import threading
from collections.abc import Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import grpc

from openbook import wire
from openbook.core.context import MAX_CHARS, Context
from openbook.errors import OpenbookError, Overloaded, ShardUnavailable
from openbook.index.server.coalesce import Later, Ticket, finish
from openbook.telemetry import requests
from openbook.v1 import index_pb2

log = logging.getLogger(__name__)

MAX_UNSENT = 1024
"""Calls of one stream that were begun and whose replies the client has not taken; no more are read until it has."""

MakeReply = Callable[[], index_pb2.Reply]
"""Makes the reply, its number not yet set; raises what went wrong. Runs in the sending thread."""
Asked = tuple[index_pb2.Call, bytes | memoryview]
"""A call, and the numbers of its queries, which may have come beside it."""
Begin = Callable[[Asked, Context, Ticket, Callable[[MakeReply], Later]], None]
"""Starts the work of a call. The function given hears how to answer it, once, from any thread. Raises OpenbookError."""


class Sender(Protocol):
    """Sends replies of one connection from whatever thread made them, without waiting."""

    def put(self, reply: index_pb2.Reply) -> bool:
        """Have it sent by the next `flush`, or say that it must be sent by who may wait."""

    def flush(self) -> None:
        """Send what was put. Does not raise."""


class CallStream:
    """The calls of one stream.

    Args:
        calls: as they come.
        begin: starts the work of one.
        begun: called after each of them.
        sender: for replies that need not go through `replies`.
    """

    def __init__(
        self,
        calls: Iterator[Asked],
        begin: Begin,
        begun: Callable[[], None],
        sender: Sender | None = None,
    ) -> None:
        self._calls = calls
        self._begin = begin
        self._begun = begun
        self._sender = sender
        self._unfinished: dict[int, Ticket] = {}
        self._due: SimpleQueue[tuple[int, Ticket, Callable[[], index_pb2.Reply]] | None] = SimpleQueue()
        self._places: SimpleQueue[None] = SimpleQueue()  # a semaphore of C, where `threading` has one of Python
        for _ in range(MAX_UNSENT):
            self._places.put(None)
        self._over = False

    def replies(self) -> Iterator[index_pb2.Reply]:
        """Those still to be sent, until the client ended its side and has every answer, the connection broke, or `end`
        was called.
        """
        threading.Thread(target=self._read, name="exchange", daemon=True).start()
        try:
            while not self._over or self._unfinished:
                item = self._due.get()
                if item is None:
                    self._over = True
                    continue
                self._places.put(None)
                number, ticket, make = item
                if self._unfinished.get(number) is ticket:  # or it was cancelled
                    reply = make()
                    del item, make, self._unfinished[number]
                    yield reply
        finally:
            self._cancel_all()
            self._places.put(None)  # the reader may wait for one

    def end(self) -> None:
        """Begin no more calls, answer those that were."""
        self._due.put(None)

    def _read(self) -> None:
        try:
            for asked in self._calls:
                call = asked[0]
                kind = call.WhichOneof("request")
                if kind == "cancel":
                    self._cancel(call.number)
                    continue
                self._places.get()
                self._start(asked, (kind or "call").capitalize())
                self._begun()
                if self._over:
                    break
        except (grpc.RpcError, OSError):  # the connection is gone, and with it whoever waited
            self._cancel_all()
        finally:
            self._due.put(None)

    def _start(self, asked: Asked, method: str) -> None:
        call = asked[0]
        number, ticket, request_id = call.number, Ticket(), call.context.request_id
        self._unfinished[number] = ticket  # a client that uses a number twice gets one answer

        def answer(how: MakeReply) -> Later:
            make: Callable[[], index_pb2.Reply] = partial(_reply, number, method, request_id, how)
            if self._sender is not None and self._unfinished.get(number) is ticket:
                reply = make()
                if self._sender.put(reply):
                    self._places.put(None)
                    self._unfinished.pop(number, None)
                    if self._over:
                        self._due.put(None)  # whoever waits for the last answer looks again
                    return self._sender.flush
                make = lambda: reply  # noqa: E731
            self._due.put((number, ticket, make))
            return None

        try:
            if self._over:
                raise ShardUnavailable("this server is stopping")
            self._begin(asked, wire.context_of_call(call), ticket, answer)
        except Exception as error:
            finish(answer(failing(error)))

    def _cancel(self, number: int) -> None:
        ticket = self._unfinished.pop(number, None)
        if ticket is not None:
            ticket.cancelled = True

    def _cancel_all(self) -> None:
        self._over = True
        for number in list(self._unfinished):
            self._cancel(number)


def failing(error: Exception) -> MakeReply:
    """The answer that is an error."""

    def answer() -> index_pb2.Reply:
        raise error

    return answer


def explain(method: str, request_id: str, error: Exception) -> tuple[str, str]:
    """The gRPC code and the message of what went wrong; what nobody foresaw goes into the log as a whole."""
    if isinstance(error, OpenbookError):
        # A flood of calls must not become a flood of lines.
        level = logging.DEBUG if isinstance(error, Overloaded) else logging.INFO
        log.log(level, "%s failed, request id %a: %s: %s", method, request_id[:MAX_CHARS], error.grpc_code, error)
        return error.grpc_code, str(error)
    log.error("%s failed, request id %a", method, request_id[:MAX_CHARS], exc_info=error)
    return "INTERNAL", f"internal error in {method}; the server's log says more"


def _reply(number: int, method: str, request_id: str, make: MakeReply) -> index_pb2.Reply:
    try:
        reply = make()
    except Exception as error:
        code, message = explain(method, request_id, error)
        reply = index_pb2.Reply(failure=index_pb2.Failure(code=code, message=message))
    else:
        log.debug("%s answered, request id %s", method, request_id)
    requests(method, reply.failure.code or "OK").inc()
    reply.number = number
    return reply
