"""The gRPC face of one shard: checks, deadlines and errors; the work is the shard's."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import grpc

from openbook import wire
from openbook.core.context import NEVER, Context
from openbook.core.deadline import Deadline
from openbook.core.types import AS_BUILT, Hits
from openbook.errors import InvalidRequest, Overloaded
from openbook.index.server.coalesce import Coalescer, Later, Outcome, PendingSearch, Ticket, finish
from openbook.index.server.exchange import Asked, CallStream, MakeReply, Sender, explain, failing
from openbook.index.server.held import HeldSnapshots
from openbook.index.shard.shard import Shard
from openbook.telemetry import requests
from openbook.v1 import index_pb2, index_pb2_grpc

Response = TypeVar("Response")


class IndexService(index_pb2_grpc.IndexServiceServicer):
    """Serves the snapshots held of one shard. See index.proto for what the calls do and which codes they fail with."""

    def __init__(
        self, held: HeldSnapshots[Shard], searches: Coalescer, fetches: Executor, max_fetches: int, max_streams: int
    ) -> None:
        self._held = held
        self._searches = searches
        self._fetches = fetches
        self._fetch_places = threading.BoundedSemaphore(max_fetches)
        self._max_streams = max_streams
        self._streams: set[CallStream] = set()
        self.frames: index_pb2.Frames | None = None
        """How to reach this server without gRPC."""
        self._stopping = False

    def Search(self, request: index_pb2.SearchRequest, context: grpc.ServicerContext) -> index_pb2.SearchResponse:  # noqa: N802
        def search(asked: Context) -> index_pb2.SearchResponse:
            outcome: Future[Outcome] = Future()
            ticket = Ticket()
            context.add_callback(lambda: setattr(ticket, "cancelled", True))
            self._begin_search(request, request.queries.data, asked, ticket, outcome.set_result)
            self._searches.go()
            return self._search_response(outcome.result())

        return respond("Search", context, search)

    def Fetch(self, request: index_pb2.FetchRequest, context: grpc.ServicerContext) -> index_pb2.FetchResponse:  # noqa: N802
        return respond("Fetch", context, lambda _: self._fetch(request))

    def Info(self, request: index_pb2.InfoRequest, context: grpc.ServicerContext) -> index_pb2.InfoResponse:  # noqa: N802
        def asked(_: Context) -> index_pb2.InfoResponse:
            response = info(self._held)
            if self.frames is not None:
                response.frames.CopyFrom(self.frames)
            return response

        return respond("Info", context, asked)

    def Exchange(  # noqa: N802
        self, request_iterator: Iterator[index_pb2.Call], context: grpc.ServicerContext
    ) -> Iterator[index_pb2.Reply]:
        try:
            calls = ((call, call.search.queries.data) for call in request_iterator)
            with self.admit(calls) as stream:
                yield from stream.replies()
        except Overloaded as error:
            abort("Exchange", context, error.grpc_code, str(error))
        if self._stopping:
            abort("Exchange", context, "UNAVAILABLE", "this server is stopping")

    @contextmanager
    def admit(
        self,
        calls: Iterator[Asked],
        has_more: Callable[[], bool] = lambda: True,
        sender: Sender | None = None,
    ) -> Iterator[CallStream]:
        """A stream of calls, gRPC's or another: see `CallStream`.

        Whoever reads it may search by himself when it has no more of them.

        Raises:
            Overloaded: there are too many streams already.
        """
        if len(self._streams) >= self._max_streams:
            raise Overloaded(f"at most {self._max_streams} streams at once")
        stream = CallStream(calls, self._begin, lambda: self._searches.go(has_more()), sender)
        self._streams.add(stream)
        if self._stopping:
            stream.end()
        try:
            yield stream
        finally:
            self._streams.discard(stream)

    def end_streams(self) -> None:
        """Let every stream end once what was begun on it is answered: by themselves they would never."""
        self._stopping = True
        for stream in list(self._streams):
            stream.end()

    def _begin(self, asked: Asked, context: Context, ticket: Ticket, done: Callable[[MakeReply], Later]) -> None:
        """Start one call of a stream."""
        call, data = asked
        kind = call.WhichOneof("request")
        if kind == "search":
            self._begin_search(call.search, data, context, ticket, lambda outcome: done(lambda: self._found(outcome)))
        elif kind == "fetch":
            self._begin_fetch(call.fetch, context, ticket, done)
        else:
            raise InvalidRequest("a call must be a search, a fetch or a cancel, got none of them")

    def _begin_search(
        self,
        request: index_pb2.SearchRequest,
        data: bytes | memoryview,
        context: Context,
        ticket: Ticket,
        done: Callable[[Outcome], Later],
    ) -> None:
        queries = wire.matrix_from_wire(request.queries, data)
        parameters = wire.parameters_from_wire(request.parameters) if request.HasField("parameters") else AS_BUILT
        context.deadline.check("the search began")
        snapshot_id, shard = self._held.acquire(request.snapshot_id)

        def release(outcome: Outcome) -> Later:
            self._held.release(snapshot_id)
            return done(outcome)

        try:
            checked = shard.check(queries, request.k, parameters)
            self._searches.submit(PendingSearch(shard, checked, request.k, parameters, context, release, ticket))
        except BaseException:
            self._held.release(snapshot_id)
            raise

    def _found(self, outcome: Outcome) -> index_pb2.Reply:
        return index_pb2.Reply(search=self._search_response(outcome))

    def _search_response(self, outcome: Outcome) -> index_pb2.SearchResponse:
        if not isinstance(outcome, Hits):
            raise outcome
        response = wire.hits_to_wire(outcome)
        response.current_snapshot_id = self._held.current_id
        return response

    def _begin_fetch(
        self, request: index_pb2.FetchRequest, context: Context, ticket: Ticket, done: Callable[[MakeReply], Later]
    ) -> None:
        if not self._fetch_places.acquire(blocking=False):
            raise Overloaded("too many fetches wait: try again later")

        def work() -> None:
            try:
                context.deadline.check("the fetch began")
                response = index_pb2.FetchResponse() if ticket.cancelled else self._fetch(request)
                finish(done(lambda: index_pb2.Reply(fetch=response)))
            except Exception as error:
                finish(done(failing(error)))
            finally:
                self._fetch_places.release()

        self._fetches.submit(work)

    def _fetch(self, request: index_pb2.FetchRequest) -> index_pb2.FetchResponse:
        snapshot_id, shard = self._held.acquire(request.snapshot_id)
        try:
            if len(request.ids) > shard.max_rows:
                raise InvalidRequest(f"ids must be at most {shard.max_rows}, got {len(request.ids)}")
            passages = shard.fetch(request.ids)
            return index_pb2.FetchResponse(
                passages=map(wire.passage_to_wire, passages),
                vectors=wire.matrix_to_wire(shard.fetch_vectors(request.ids)) if request.with_vectors else None,
                snapshot_id=snapshot_id,
            )
        finally:
            self._held.release(snapshot_id)


def info(held: HeldSnapshots[Shard]) -> index_pb2.InfoResponse:
    """What this server holds, and its limits."""
    shard = held.current
    return index_pb2.InfoResponse(
        snapshot_id=shard.manifest.snapshot_id,
        shard=shard.number,
        n_shards=len(shard.manifest.shards),
        n_passages=shard.n_passages,
        first_id=shard.first_id,
        dimension=shard.manifest.dimension,
        encoder=shard.manifest.encoder,
        encoder_fingerprint=shard.manifest.encoder_fingerprint,
        factory=shard.manifest.factory,
        max_k=shard.max_k,
        max_rows=shard.max_rows,
        held=[_held_snapshot(sequence, each) for sequence, each in held.held()],
    )


def _held_snapshot(sequence: int, shard: Shard) -> index_pb2.HeldSnapshot:
    manifest = shard.manifest
    return index_pb2.HeldSnapshot(
        snapshot_id=manifest.snapshot_id,
        sequence=sequence,
        n_shards=len(manifest.shards),
        n_passages=shard.n_passages,
        first_id=shard.first_id,
        dimension=manifest.dimension,
        encoder=manifest.encoder,
        encoder_fingerprint=manifest.encoder_fingerprint,
        factory=manifest.factory,
        n_passages_total=manifest.n_passages,
        created_at=manifest.created_at,
        recall=manifest.recall.by_k() if manifest.recall else {},
    )


def respond(method: str, context: grpc.ServicerContext, work: Callable[[Context], Response]) -> Response:
    """Do the work in time, or end the call with the code of what went wrong."""
    remaining_s: float | None = context.time_remaining()
    headers = dict(context.invocation_metadata())
    try:
        asked = wire.context_of_headers(headers, NEVER if remaining_s is None else Deadline.after(remaining_s))
        asked.deadline.check(f"{method} began")
        response = work(asked)
    except Exception as error:
        abort(method, context, *explain(method, str(headers.get("x-request-id", "")), error))
    requests(method, "OK").inc()
    return response


def abort(method: str, context: grpc.ServicerContext, code: str, message: str) -> NoReturn:
    requests(method, code).inc()
    context.abort(grpc.StatusCode[code], message)
    raise AssertionError("abort raises")
