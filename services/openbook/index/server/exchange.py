"""One stream of calls: they are read in a thread of their own, and answered in whatever order they are done."""

import logging
import math
import threading
from collections.abc import Callable, Iterator
from enum import Enum, auto
from functools import partial
from itertools import count
from queue import SimpleQueue
from time import monotonic, sleep
from typing import NamedTuple, Protocol

import grpc

from openbook import wire
from openbook.core.context import Context
from openbook.errors import Overloaded
from openbook.index.server.coalesce import finish
from openbook.index.server.failed import explain
from openbook.index.server.pending import Later, Ticket
from openbook.index.server.reply import Reply
from openbook.index.server.room import Room
from openbook.telemetry import requests
from openbook.tracing.ports import Recording, Value
from openbook.tracing.spans import is_traced, span_of_call
from openbook.v1 import index_pb2

log = logging.getLogger(__name__)

REFUSED_S = 2e-3
"""In which no more is read of a stream after a call of it had no place: to refuse a flood costs what others need."""
LARGE_BYTES = 1 << 16
"""A larger reply is made by the stream's own thread, not by the one that searches or fetches for everybody."""
HIT_BYTES, CANDIDATE_BYTES = 12, 16
PASSAGE_BYTES, VECTOR_BYTES = 1 << 10, 1 << 12  # about, until they are fetched

MakeReply = Callable[[], Reply]
"""Makes the reply, its number not yet set. Runs in the sending thread."""
Answer = Callable[[MakeReply, int, str], Later]
"""Hears how to answer a call, how many bytes that are, and with which code; once, from any thread."""
Asked = tuple[index_pb2.Call, bytes | memoryview]
"""A call, and the numbers of its queries, which may have come beside it."""
Begin = Callable[[Asked, Context, Ticket, Answer], None]
"""Starts the work of a call. Raises OpenbookError."""


class Peer(NamedTuple):
    """Who is at the other end."""

    machine: str
    connection: str


class Sender(Protocol):
    """Sends replies of one connection from whatever thread made them."""

    def put(self, reply: Reply) -> bool:
        """Have it sent by the next `flush`, or say that it must be sent by who may wait."""

    def flush(self) -> bool:
        """Send what was put, without waiting; or say that somebody must `send` the rest. Does not raise."""

    def send(self, *replies: Reply) -> None:
        """Wait until they are sent, and what was put before. Raises OSError: the connection is gone."""


class _Signal(Enum):
    OVER = auto()  # no more calls are begun
    SEARCH = auto()  # some wait to be searched for
    UNSENT = auto()  # the sender has replies left over


class CallStream:
    """The calls of one stream.

    Args:
        calls: as they come.
        begin: starts the work of one.
        go: sees to it that those who wait are searched for: in a thread apart, or by who calls it.
        peer: who makes them.
        break_off: ends the connection, or its part of it, at once and whatever is under way. From any thread.
        has_more: whether a call has come and not been read. Where that is unknown, who reads searches for nobody.
        sender: for replies that need not go through `replies`.
    """

    _callers = count()

    def __init__(
        self,
        calls: Iterator[Asked],
        begin: Begin,
        go: Callable[[bool], None],
        peer: Peer,
        break_off: Callable[[], object],
        has_more: Callable[[], bool] | None = None,
        sender: Sender | None = None,
    ) -> None:
        self.peer = peer
        self.break_off = break_off
        self._calls = calls
        self._begin = begin
        self._go = go
        self._has_more = has_more
        self._sender = sender
        self._caller = next(self._callers)  # and not the stream, which would live as long as its turns are remembered
        self._unfinished: dict[int, Ticket] = {}
        self._due: SimpleQueue[tuple[int, Ticket, MakeReply] | _Signal] = SimpleQueue()
        self._room = Room()
        self._over = False
        self._used_at = monotonic()
        self._sending_since = math.inf

    @property
    def n_under_way(self) -> int:
        """Calls that were begun and not answered."""
        return len(self._unfinished)

    @property
    def idle_since(self) -> float:
        """When the last call was answered; infinity while one is under way, or its reply."""
        return math.inf if self._unfinished or self._sending_since < math.inf else self._used_at

    @property
    def unread_since(self) -> float:
        """When a reply was sent that the client has not taken; infinity if there is none, or a sender sees to it."""
        return math.inf if self._sender else self._sending_since

    def replies(self) -> Iterator[Reply]:
        """Those still to be sent, until the client ended its side and has every answer, the connection broke, or `end`
        was called.

        Raises:
            Overloaded: there is no thread for it.
        """
        try:
            threading.Thread(target=self._read, name="exchange", daemon=True).start()
        except RuntimeError as error:
            raise Overloaded(f"there is no thread for one more stream: {error}") from None
        try:
            while not self._over or self._unfinished:
                item = self._due.get()
                if item is _Signal.OVER:
                    self._over = True
                elif item is _Signal.SEARCH:
                    self._go(False)
                elif item is _Signal.UNSENT:
                    if self._sender is not None:
                        self._sending_since = monotonic()
                        self._sender.send()
                        self._used_at, self._sending_since = monotonic(), math.inf
                else:
                    number, ticket, make = item
                    if self._unfinished.get(number) is ticket:  # or it was cancelled
                        self._sending_since = monotonic()
                        self._unfinished.pop(number, None)
                        yield make()
                    self._answered(ticket)
                    self._sending_since = math.inf
                    del make
                del item
        finally:
            self._cancel_all()
            self._room.open()  # the reader may wait for it

    def end(self) -> None:
        """Begin no more calls, answer those that were."""
        self._due.put(_Signal.OVER)

    def _read(self) -> None:
        try:
            for asked in self._calls:
                if self._over:
                    break
                call = asked[0]
                kind = call.WhichOneof("request")
                if kind == "cancel":
                    self._cancel(call.number)
                    continue
                self._start(asked, kind or "call")
                if kind == "search":
                    self._search()
                self._room.wait()
        except (grpc.RpcError, OSError) as error:  # the connection is gone, and with it whoever waited
            error.__traceback__ = None  # gRPC keeps it, and it would keep this stream
            self._cancel_all()
        finally:
            self._due.put(_Signal.OVER)
            self._go(True)  # nobody may be left to take the signal that some wait

    def _search(self) -> None:
        """Have it searched for who waits: by this thread if it has nothing to read, else by the one that sends."""
        if self._has_more is not None:
            self._go(self._has_more())
        elif self._sending_since < math.inf or self._due.qsize():
            self._go(True)
        else:  # a thread apart would have to wake it, which costs a twentieth of a call
            self._due.put(_Signal.SEARCH)

    def _start(self, asked: Asked, kind: str) -> None:
        call, method = asked[0], kind.capitalize()
        number, request_id = call.number, call.context.request_id
        ticket = Ticket(self._caller, False, _expected_bytes(call, kind))
        self._room.change(1, ticket.size_bytes)
        self._unfinished[number] = ticket  # a client that uses a number twice gets one answer

        recorded: Recording | None = None

        def answer(how: MakeReply, size_bytes: int, code: str) -> Later:
            if recorded is not None:
                recorded.end(code)
            make: MakeReply = partial(_reply, number, method, request_id, how)
            is_small = size_bytes <= LARGE_BYTES
            if self._sender is not None and is_small and self._unfinished.get(number) is ticket:
                reply = make()
                if self._sender.put(reply):
                    self._unfinished.pop(number, None)
                    self._answered(ticket)
                    if self._over:
                        self._due.put(_Signal.OVER)  # whoever waits for the last answer looks again
                    return self._flush
                make = lambda: reply  # noqa: E731
            self._room.change(0, size_bytes - ticket.size_bytes)
            ticket.size_bytes = size_bytes
            self._due.put((number, ticket, make))
            return None

        try:
            context = wire.context_of_call(call)
            if context.trace:
                recorded = span_of_call(method, context)
                context = recorded.context
                if is_traced(context):
                    recorded.note(**_asked_for(call))
            self._begin(asked, context, ticket, answer)
        except Exception as error:
            failed = explain(method, request_id, error)
        else:
            return
        finish(answer(lambda: Reply(failed.reply()), 0, failed.code))
        if failed.code == Overloaded.grpc_code:
            sleep(REFUSED_S)

    def _flush(self) -> None:
        if self._sender is not None and not self._sender.flush():
            self._due.put(_Signal.UNSENT)

    def _answered(self, ticket: Ticket) -> None:
        self._room.change(-1, -ticket.size_bytes)
        self._used_at = monotonic()

    def _cancel(self, number: int) -> None:
        ticket = self._unfinished.pop(number, None)
        if ticket is not None:
            ticket.cancelled = True

    def _cancel_all(self) -> None:
        self._over = True
        for number in list(self._unfinished):
            self._cancel(number)


def _expected_bytes(call: index_pb2.Call, kind: str) -> int:
    """Of the reply: of hits exactly, of passages about."""
    if kind == "search":
        search = call.search
        if questions := search.questions:
            return CANDIDATE_BYTES * (len(questions) * search.k + len(search.also))
        return HIT_BYTES * search.queries.rows * search.k
    n_passages = len(call.fetch.ids) + len(call.fetch.lasting_ids)
    return n_passages * (PASSAGE_BYTES + VECTOR_BYTES * call.fetch.with_vectors)


def _asked_for(call: index_pb2.Call) -> dict[str, Value]:
    """What a trace says of a call."""
    if call.HasField("search"):
        rows = len(call.search.questions) or call.search.queries.rows
        return {"snapshot": call.search.snapshot_id, "k": call.search.k, "rows": rows}
    return {"snapshot": call.fetch.snapshot_id, "ids": len(call.fetch.ids)}


def _reply(number: int, method: str, request_id: str, make: MakeReply) -> Reply:
    try:
        reply = make()
    except Exception as error:
        reply = Reply(explain(method, request_id, error).reply())
    code = reply.message.failure.code or "OK"
    if code == "OK":
        log.debug("%s answered, request id %s", method, request_id)
    requests(method, code).inc()
    reply.message.number = number
    return reply
