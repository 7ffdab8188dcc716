"""The gRPC face of one shard: checks, deadlines and errors; the work is the shard's."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NoReturn, TypeVar
from urllib.parse import unquote

import grpc
import numpy as np

from openbook import wire
from openbook.core.context import NEVER, Context
from openbook.core.deadline import Deadline
from openbook.core.origin import is_lasting_id
from openbook.core.types import AS_BUILT, Candidates, Float32, Hits, Passage
from openbook.errors import InvalidRequest, Overloaded, SnapshotMismatch
from openbook.index.server.coalesce import Coalescer, finish
from openbook.index.server.exchange import CANDIDATE_BYTES, HIT_BYTES, Answer, Asked, CallStream, Peer, Sender
from openbook.index.server.failed import CANCELLED, Failed, explain
from openbook.index.server.held import HeldSnapshots
from openbook.index.server.info import info
from openbook.index.server.pending import Later, Outcome, PendingSearch, Ticket
from openbook.index.server.reply import Fetched, Reply
from openbook.index.server.streams import OpenStreams
from openbook.index.server.threads import PART_IDS, CallThreads, Fetches
from openbook.index.server.words import WordSearches
from openbook.index.shard.shard import Shard
from openbook.telemetry import requests
from openbook.tracing.spans import span_of_call
from openbook.v1 import index_pb2, index_pb2_grpc

Response = TypeVar("Response")
T = TypeVar("T")


class IndexService(index_pb2_grpc.IndexServiceServicer):
    """Serves the snapshots held of one shard. See index.proto for what the calls do and which codes they fail with."""

    def __init__(
        self,
        held: HeldSnapshots[Shard],
        searches: Coalescer,
        fetches: Fetches,
        threads: CallThreads,
        streams: OpenStreams,
    ) -> None:
        self._held = held
        self._searches = searches
        self._fetches = fetches
        self._words = WordSearches(held, fetches)
        self._threads = threads
        self._streams = streams
        self.frames: index_pb2.Frames | None = None
        """How to reach this server without gRPC."""
        self._stopping = False

    def Search(self, request: index_pb2.SearchRequest, context: grpc.ServicerContext) -> index_pb2.SearchResponse:  # noqa: N802
        def search(asked: Context) -> index_pb2.SearchResponse | Failed:
            def begin(ticket: Ticket, done: Callable[[Outcome], None]) -> None:
                self._begin_search(request, request.queries.data, asked, ticket, done)
                self._searches.go()

            outcome = self._outcome(context, begin)
            if isinstance(outcome, Failed):
                return outcome
            self._fill(response := index_pb2.SearchResponse(), outcome)
            return response

        return respond("Search", context, search)

    def Fetch(self, request: index_pb2.FetchRequest, context: grpc.ServicerContext) -> index_pb2.FetchResponse:  # noqa: N802
        def fetch(asked: Context) -> index_pb2.FetchResponse | Failed:
            def begin(ticket: Ticket, done: Callable[[Failed | Fetched], None]) -> None:
                self._begin_fetch(request, asked, ticket, done)

            found = self._outcome(context, begin)
            if isinstance(found, Failed):
                return found
            found.fill(response := index_pb2.FetchResponse())
            return response

        return respond("Fetch", context, fetch)

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
        failed = None
        try:
            calls = ((call, call.search.queries.data) for call in request_iterator)
            stream = self.admit(calls, _peer(context.peer()), context.cancel)
            try:
                with self._threads.working(stream):
                    yield from (reply.whole() for reply in stream.replies())
            finally:
                self.leave(stream)
        except Overloaded as error:
            failed = Failed(error.grpc_code, str(error))
        if self._stopping:
            failed = Failed("UNAVAILABLE", "this server is stopping")
        if failed:
            abort("Exchange", context, *failed)

    def admit(
        self,
        calls: Iterator[Asked],
        peer: Peer,
        break_off: Callable[[], object],
        has_more: Callable[[], bool] | None = None,
        sender: Sender | None = None,
    ) -> CallStream:
        """A stream of calls until it takes its `leave`, gRPC's or another: see `CallStream`.

        Raises:
            Overloaded: as `OpenStreams.admit`.
        """
        stream = CallStream(calls, self._begin, self._searches.go, peer, break_off, has_more, sender)
        self._streams.admit(stream)
        if self._stopping:
            stream.end()
        return stream

    def leave(self, stream: CallStream) -> None:
        """It is over."""
        self._streams.leave(stream)

    def end_streams(self) -> None:
        """Let every stream end once what was begun on it is answered: by themselves they would never."""
        self._stopping = True
        for stream in self._streams:
            stream.end()

    def _outcome(self, context: grpc.ServicerContext, begin: Callable[[Ticket, Callable[[T], None]], None]) -> T:
        """What becomes of something that is begun for one call of gRPC's. Raises Overloaded."""
        outcome: Future[T] = Future()
        ticket = Ticket(context.peer())
        context.add_callback(lambda: setattr(ticket, "cancelled", True))
        with self._threads.working(ticket.caller):
            begin(ticket, outcome.set_result)
            return outcome.result()

    def _begin(self, asked: Asked, context: Context, ticket: Ticket, answer: Answer) -> None:
        """Start one call of a stream."""
        call, data = asked
        kind = call.WhichOneof("request")
        if call.HasField("shard") and call.shard != (ours := self._held.current.number):
            raise SnapshotMismatch(f"this server holds shard {ours}, got a request for shard {call.shard}")

        def found(outcome: Outcome) -> Later:
            if isinstance(outcome, Failed):
                return answer(lambda: Reply(outcome.reply()), 0, outcome.code)

            def reply() -> Reply:
                self._fill((message := index_pb2.Reply()).search, outcome)
                return Reply(message)

            return answer(reply, (HIT_BYTES if isinstance(outcome, Hits) else CANDIDATE_BYTES) * outcome.ids.size, "OK")

        def fetched(outcome: Failed | Fetched) -> Later:
            if isinstance(outcome, Failed):
                return answer(lambda: Reply(outcome.reply()), 0, outcome.code)
            return answer(lambda: Reply(index_pb2.Reply(), outcome), outcome.size_bytes, "OK")

        if kind == "search":
            self._begin_search(call.search, data, context, ticket, found)
        elif kind == "fetch":
            self._begin_fetch(call.fetch, context, ticket, fetched)
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
        if request.questions:
            return self._words.begin(request, data, context, ticket, done)
        queries = wire.matrix_from_wire(request.queries, data)
        parameters = wire.parameters_from_wire(request.parameters) if request.HasField("parameters") else AS_BUILT
        context.deadline.check("the search began")
        snapshot_id, shard = self._held.acquire(request.snapshot_id)

        def release(outcome: Outcome) -> Later:
            self._held.release(snapshot_id)
            return done(outcome)

        try:
            checked = shard.check(queries, request.k, parameters)
            width = 1.0 if parameters is AS_BUILT else shard.width(parameters)
            self._searches.submit(PendingSearch(shard, checked, request.k, parameters, context, release, ticket, width))
        except BaseException:
            self._held.release(snapshot_id)
            raise

    def _fill(self, response: index_pb2.SearchResponse, found: Hits | Candidates) -> None:
        if isinstance(found, Hits):
            wire.fill_hits(response, found)
        else:
            wire.fill_candidates(response, found)
        response.current_snapshot_id, response.current_sequence = self._held.published

    def _begin_fetch(
        self,
        request: index_pb2.FetchRequest,
        context: Context,
        ticket: Ticket,
        done: Callable[[Failed | Fetched], Later],
    ) -> None:
        found, n_ids = Fetched(), len(request.ids) + len(request.lasting_ids)

        def parts() -> Iterator[None]:
            outcome: Failed | Fetched = found
            try:
                context.deadline.check("the fetch began")
                snapshot_id, shard = self._held.acquire(request.snapshot_id)
                try:
                    found.vectors = _empty(request, shard)
                    found.parts.append(_part((), snapshot_id))
                    for start in range(0, n_ids, PART_IDS):
                        if start:
                            yield
                            context.deadline.check("the fetch was done")
                        if ticket.cancelled:
                            break
                        end = start + PART_IDS
                        first, last = (max(0, at - len(request.lasting_ids)) for at in (start, end))
                        ids = request.ids[first:last]
                        passages = shard.find(request.lasting_ids[start:end])
                        found.parts.append(_part([*passages, *shard.fetch(ids)]))
                        if found.vectors is not None:
                            found.vectors[first:last] = shard.fetch_vectors(ids)
                finally:
                    self._held.release(snapshot_id)
            except Exception as error:
                outcome = explain("Fetch", context.request_id, error)
            finish(done(CANCELLED if ticket.cancelled else outcome))

        def refuse(error: Overloaded) -> None:
            finish(done(explain("Fetch", context.request_id, error)))

        self._fetches.submit(ticket.caller, n_ids, parts(), refuse)


def _peer(name: str) -> Peer:
    """As gRPC names it, ipv4:127.0.0.1:7000 or ipv6:%5B::1%5D:7000."""
    address = unquote(name).partition(":")[2]
    return Peer(address.rpartition(":")[0].strip("[]"), name)


def _empty(request: index_pb2.FetchRequest, shard: Shard) -> Float32 | None:
    """Where the vectors will be, if they are wanted. Raises InvalidRequest for ids that are too many or none."""
    if (n_ids := len(request.ids) + len(request.lasting_ids)) > shard.max_rows:
        raise InvalidRequest(f"ids must be at most {shard.max_rows}, got {n_ids}")
    for each in request.lasting_ids:
        if not is_lasting_id(each):
            raise InvalidRequest(f"a lasting id must have 32 hexadecimal digits, got {each[:100]!r}")
    if not request.with_vectors:
        return None
    return np.empty((len(request.ids), shard.manifest.dimension), wire.FLOAT32)


def _part(passages: Sequence[Passage], snapshot_id: str = "") -> bytes:
    """Of a serialized response."""
    response = index_pb2.FetchResponse(passages=map(wire.passage_to_wire, passages), snapshot_id=snapshot_id)
    return response.SerializeToString()


def respond(method: str, context: grpc.ServicerContext, work: Callable[[Context], Response | Failed]) -> Response:
    """Do the work in time, or end the call with the code of what went wrong."""
    remaining_s: float | None = context.time_remaining()
    headers = dict(context.invocation_metadata())
    response: Response | Failed
    try:
        asked = wire.context_of_headers(headers, NEVER if remaining_s is None else Deadline.after(remaining_s))
        with span_of_call(method, asked) as inner:
            inner.deadline.check(f"{method} began")
            response = work(inner)
    except Exception as error:
        response = explain(method, str(headers.get("x-request-id", "")), error)
    if isinstance(response, Failed):
        abort(method, context, *response)
    requests(method, "OK").inc()
    return response


def abort(method: str, context: grpc.ServicerContext, code: str, message: str) -> NoReturn:
    requests(method, code).inc()
    context.set_trailing_metadata(((wire.ERROR_HEADER, code),))
    context.abort(grpc.StatusCode[code], message)
