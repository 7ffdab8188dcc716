"""Who searches for the calls of a stream."""

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import get_ident

import pytest

from openbook.core.context import Context
from openbook.index.server.exchange import Answer, Asked, CallStream, Peer
from openbook.index.server.pending import Ticket
from openbook.index.server.reply import Reply
from openbook.v1 import index_pb2


class Stream:
    """One whose calls are what is put into `calls`; those that wait are answered by who calls `_go`."""

    def __init__(self, has_more: Callable[[], bool] | None = None) -> None:
        self.calls: SimpleQueue[index_pb2.Call | None] = SimpleQueue()
        self.went: SimpleQueue[tuple[bool, bool]] = SimpleQueue()
        """Whether in a thread apart, and whether the sending thread said so."""
        self._waiting: SimpleQueue[Answer] = SimpleQueue()
        self._sending_thread = get_ident()
        stream = CallStream(self._read(), self._begin, self._go, Peer("", ""), lambda: None, has_more)
        self.replies = stream.replies()

    def search(self, number: int) -> None:
        self.calls.put(index_pb2.Call(number=number, search=index_pb2.SearchRequest(k=1), timeout_s=60))

    def end(self) -> None:
        self.calls.put(None)

    def _read(self) -> Iterator[Asked]:
        for call in iter(self.calls.get, None):
            yield call, b""

    def _begin(self, asked: Asked, context: Context, ticket: Ticket, answer: Answer) -> None:
        self._waiting.put(answer)

    def _go(self, in_thread: bool) -> None:
        self.went.put((in_thread, get_ident() == self._sending_thread))
        while self._waiting.qsize():
            self._waiting.get()(_empty, 0, "OK")


def _empty() -> Reply:
    return Reply(index_pb2.Reply())


def test_the_sending_thread_searches_while_it_has_nothing_to_send_and_a_thread_apart_while_it_has() -> None:
    stream = Stream()
    stream.search(1)
    assert next(stream.replies).message.number == 1  # which has now to be sent, until somebody asks for more
    assert stream.went.get() == (False, True)
    stream.search(2)
    assert stream.went.get() == (True, False)
    stream.end()
    assert [reply.message.number for reply in stream.replies] == [2]


@pytest.mark.parametrize("has_more", [False, True])
def test_who_knows_whether_more_has_come_searches_himself_if_it_has_not(has_more: bool) -> None:
    stream = Stream(lambda: has_more)
    stream.search(1)
    assert next(stream.replies).message.number == 1
    assert stream.went.get() == (has_more, False)
    stream.end()
    assert list(stream.replies) == []


def test_what_waits_is_searched_for_though_the_sending_thread_has_gone() -> None:
    """Or it would keep its snapshot, and its place in the queue, until somebody else asks for something."""
    stream = Stream()
    stream.search(1)
    next(stream.replies)
    assert stream.went.get() == (False, True)
    stream.replies.close()
    stream.end()
    assert stream.went.get() == (True, False)
