from queue import SimpleQueue
from threading import Event
from typing import Any, cast

import grpc
import pytest

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
