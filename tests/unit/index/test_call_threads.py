from contextlib import ExitStack
from queue import SimpleQueue
from threading import Event
from typing import Any, cast

import grpc
import pytest

from openbook.errors import Overloaded
from openbook.index.server.threads import CallThreads


class Context:
    """Of a call whose client is silent, and whose thread takes its time to end."""

    def __init__(self) -> None:
        self.begun, self.cancelled, self.may_end = Event(), Event(), Event()

    def cancel(self) -> None:
        self.cancelled.set()


def test_of_those_who_wait_none_more_is_cancelled_than_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though one who was cancelled has yet to leave his thread."""
    monkeypatch.setattr("openbook.index.server.threads.SPARED_S", 0.0)
    threads = CallThreads(2, n_spared=0)
    left: SimpleQueue[Context] = SimpleQueue()

    def silent(context: Context) -> None:
        with threads.waiting(context, cast("grpc.ServicerContext", context)):
            context.begun.set()
            context.cancelled.wait()
        left.put(context)
        context.may_end.wait()

    calls = [Context() for _ in range(3)]
    futures: list[Any] = []
    try:
        for call in calls[:2]:
            futures.append(threads.submit(silent, call))
            call.begun.wait()
        futures.append(threads.submit(silent, calls[2]))
        assert left.get() is calls[0]
        threads.cancel_waiting(since=0.0)
        assert not calls[1].cancelled.is_set()
        calls[0].may_end.set()
        calls[2].begun.wait()  # in the thread that is free now
        threads.cancel_waiting(since=0.0)
        assert not calls[1].cancelled.is_set()
    finally:
        for call in calls:
            call.cancelled.set()
            call.may_end.set()
        threads.shutdown()
    for future in futures:
        future.result()


def test_who_has_waited_for_a_moment_only_is_not_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """His message may be here already, and this process too busy to have read it."""
    monkeypatch.setattr("openbook.index.server.threads.SPARED_S", 60.0)
    threads, call = CallThreads(1, n_spared=0), Context()
    with threads.waiting(call, cast("grpc.ServicerContext", call)):
        threads._n_calls = 2
        threads.cancel_waiting(since=0.0)
    assert not call.cancelled.is_set()


def test_the_latest_who_wait_are_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openbook.index.server.threads.SPARED_S", 0.0)
    threads, calls = CallThreads(2, n_spared=1), [Context() for _ in range(2)]
    threads._n_calls = 9
    with ExitStack() as waiting:
        for call in calls:
            waiting.enter_context(threads.waiting(call, cast("grpc.ServicerContext", call)))
        threads.cancel_waiting(since=0.0)
    assert [call.cancelled.is_set() for call in calls] == [True, False]


def test_a_caller_leaves_free_as_many_threads_as_he_holds_and_those_who_wait_hold_one_too() -> None:
    threads, waits = CallThreads(4, n_spared=4), Context()
    with threads.waiting(waits, cast("grpc.ServicerContext", waits)), threads.working("a"):
        with threads.working("a"):
            pass
        refused = pytest.raises(Overloaded, match="1 calls of this connection")
        with threads.working("b"), refused, threads.working("b"):
            pass
