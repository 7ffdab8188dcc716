"""The threads that calls run in. Who is silent holds none of them for long, and who asks for much gets his share."""

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from time import monotonic
from typing import Any, ParamSpec, TypeVar

import grpc

from openbook.core.turns import Turns
from openbook.errors import Overloaded, StartupError
from openbook.index.server.exchange import CallStream
from openbook.telemetry import refused

P = ParamSpec("P")
T = TypeVar("T")

SPARED_S = 0.02
"""In which a message that was sent with its call arrives, however busy the process is."""
PART_IDS = 32
"""Fetched at once: some tenths of a millisecond in which no other thread can do much."""
END = object()


class Threads(ThreadPoolExecutor):
    """All of which are there from the start: what needs one never has to wait until it can be made."""

    def __init__(self, n_threads: int, name: str) -> None:
        super().__init__(n_threads, thread_name_prefix=name)
        self.n_threads = n_threads

    def start(self) -> None:
        """Start them. Raises StartupError where there may not be so many."""
        everyone = threading.Barrier(self.n_threads + 1)
        try:
            for _ in range(self.n_threads):
                super().submit(everyone.wait)
        except RuntimeError as error:
            everyone.abort()
            raise StartupError(f"cannot start {self.n_threads} threads: {error}") from None
        everyone.wait()


class CallThreads(Threads):
    """Of gRPC's calls. Where none is free for one that came, who waits longest for his client is cancelled.

    Args:
        n_threads: in all.
        n_spared: of those who wait, the latest, whose clients may be about to speak; as may all for SPARED_S.
    """

    def __init__(self, n_threads: int, n_spared: int) -> None:
        super().__init__(n_threads, "index")
        self._n_spared = n_spared
        self._lock = threading.Lock()
        self._n_calls = 0  # begun and not ended, or waiting for a thread
        self._leaving: set[int] = set()  # threads of those of them that were cancelled
        self._waiting: dict[object, tuple[float, grpc.ServicerContext, int]] = {}  # since when, the longest first
        self._working: Counter[Hashable] = Counter()  # calls of each caller that hold a thread until they are answered

    @property
    def n_working(self) -> int:
        """Calls that hold a thread until they are answered, but no streams of them, which may be idle."""
        with self._lock:
            return sum(n for caller, n in self._working.items() if not isinstance(caller, CallStream))

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        with self._lock:
            self._n_calls += 1
            self._make_room()
        return super().submit(self._call, work, *args, **kwargs)

    @contextmanager
    def waiting(self, call: object, context: grpc.ServicerContext) -> Iterator[None]:
        """While a call waits for its client, who may be silent for ever."""
        with self._lock:
            self._waiting[call] = monotonic(), context, get_ident()
            self._make_room()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(call, None)

    def heard(self, call: object) -> None:
        """Its client spoke, though its thread may not have noticed yet."""
        with self._lock:
            self._waiting.pop(call, None)

    @contextmanager
    def working(self, caller: Hashable) -> Iterator[None]:
        """While a call of a caller holds a thread. One caller may hold as many as he leaves free.

        Raises:
            Overloaded: he holds so many.
        """
        with self._lock:
            n_held = self._working[caller]
            if n_held and n_held >= self.n_threads - self._working.total() - len(self._waiting):
                refused("index", "threads").inc()
                raise Overloaded(f"{n_held} calls of this connection are under way, and there is no thread for more")
            self._working[caller] += 1
        try:
            yield
        finally:
            with self._lock:
                self._working[caller] -= 1
                if not self._working[caller]:
                    del self._working[caller]

    def cancel_waiting(self, since: float) -> None:
        """Those who have waited since then or longer, and those who are in the way of others."""
        with self._lock:
            for call in [call for call, (began, *_) in self._waiting.items() if began <= since]:
                self._cancel(call)
            self._make_room()

    def _make_room(self) -> None:
        spared = monotonic() - SPARED_S
        while len(self._waiting) > self._n_spared and self._n_calls - len(self._leaving) > self.n_threads:
            longest, (began, *_) = next(iter(self._waiting.items()))
            if began > spared:
                break
            self._cancel(longest)

    def _cancel(self, call: object) -> None:
        _, context, thread = self._waiting.pop(call)
        self._leaving.add(thread)
        context.cancel()  # which wakes its thread

    def _call(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return work(*args, **kwargs)
        finally:
            with self._lock:
                self._n_calls -= 1
                self._leaving.discard(get_ident())


class Patience(grpc.ServerInterceptor):
    """Has calls wait for their messages where they can be cancelled, and read them in their own threads.

    Calls that are answered with a stream are not served: each would take a thread. That is `Health.Watch`, whose
    clients are to go on without it.

    Args:
        threads: which calls run in.
        apart: methods that wait as they like.
    """

    def __init__(self, threads: CallThreads, *apart: str) -> None:
        self._threads = threads
        self._apart = apart

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = continuation(handler_call_details)
        if handler is None or handler_call_details.method in self._apart:
            return handler
        call = object()  # and not its context, which would hold itself

        def heard(message: bytes) -> bytes:
            """In gRPC's own thread, long before that of the call if there are many."""
            self._threads.heard(call)
            return message

        if handler.unary_unary:

            def one(messages: Iterator[bytes], context: grpc.ServicerContext) -> Any:
                request = self._next(call, messages, context, handler.request_deserializer)
                if request is None:
                    context.abort(grpc.StatusCode.UNIMPLEMENTED, "a call must send one message, got none")
                return handler.unary_unary(request, context)

            return grpc.stream_unary_rpc_method_handler(one, heard, handler.response_serializer)
        if handler.stream_stream:

            def many(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Any]:
                requests = iter(lambda: self._next(call, messages, context, handler.request_deserializer), None)
                for response in handler.stream_stream(requests, context):
                    with self._threads.waiting(call, context):  # until the client has room for it
                        yield response

            return grpc.stream_stream_rpc_method_handler(many, heard, handler.response_serializer)
        return None

    def _next(
        self, call: object, messages: Iterator[bytes], context: grpc.ServicerContext, read: Callable[[bytes], T]
    ) -> T | None:
        """The client's next message; none when there are no more."""
        gone = False
        with self._threads.waiting(call, context):
            try:
                message = next(messages, None)
            except grpc.RpcError as error:
                error.__traceback__ = None  # gRPC keeps it, and it would keep all that stands here
                gone = True
        if gone:
            context.abort(grpc.StatusCode.CANCELLED, "no message came")
        try:
            return None if message is None else read(message)
        except Exception:  # whatever is no message
            context.abort(grpc.StatusCode.INTERNAL, "a message cannot be read")
            raise


@dataclass(eq=False, slots=True)
class _Fetch:
    n_left: int  # ids, and one for the end
    parts: Iterator[None]
    refuse: Callable[[Overloaded], None]


class Fetches:
    """Fetches in one thread, by turns: nearly all that fetching does holds Python's lock.

    Args:
        max_ids: of all fetches that wait.
    """

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._turns: Turns[_Fetch] = Turns(max_ids)
        self._lock = threading.Lock()
        self._thread = Threads(1, "fetch")

    def start(self) -> None:
        """Raises StartupError."""
        self._thread.start()

    @property
    def n_parts(self) -> int:
        """That wait."""
        return self._turns.size // PART_IDS

    def submit(self, caller: Hashable, n_ids: int, parts: Iterator[None], refuse: Callable[[Overloaded], None]) -> None:
        """Have it done part by part, each of PART_IDS and when it is its turn; or refuse it, or those of another caller
        who has far more waiting.
        """
        fetch = _Fetch(n_ids + 1, parts, refuse)
        with self._lock:
            lost = self._turns.put(caller, fetch, fetch.n_left)
            n_waiting = self._turns.size
        for each in lost:
            refused("index", "ids").inc()
            each.refuse(Overloaded(f"at most {self._max_ids} ids may wait to be fetched, {n_waiting} do"))
        self._thread.submit(self._run)

    def stop(self) -> None:
        """Do those that wait, and end the threads."""
        self._thread.shutdown()

    def _run(self) -> None:
        """Parts, whosever turn it is, until there is one fetch less."""
        while True:
            with self._lock:
                fetch = next(iter(self._turns.in_order(PART_IDS)), None)
                if fetch is None:
                    return  # some were refused
                n_ids = min(PART_IDS, fetch.n_left - 1)
                fetch.n_left -= n_ids
                self._turns.give(fetch, n_ids)
            if next(fetch.parts, END) is END:
                with self._lock:
                    self._turns.give(fetch)
                return
