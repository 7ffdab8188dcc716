"""The hot path: many calls on one long-lived stream, each with its own fate."""

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from types import TracebackType

import grpc
import numpy as np
import pytest
from same_hits import same
from small_snapshot import VECTORS, D, N, build

from openbook import wire
from openbook.config import IndexServerSettings
from openbook.core.deadline import Deadline
from openbook.core.types import Float32, Hits, SearchParameters
from openbook.index.server.server import IndexServer
from openbook.index.server.switching import MUCH
from openbook.index.shard import engine
from openbook.testing import served
from openbook.v1 import common_pb2, index_pb2, index_pb2_grpc

QUERIES = np.random.default_rng(1).integers(-3, 4, (100, D)).astype(np.float32)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def server(snapshot: Path) -> Iterator[IndexServer]:
    with served(snapshot) as servers:
        yield servers[0]


class Stream:
    """One Exchange; replies in the order they come."""

    def __init__(self, server: IndexServer) -> None:
        self._calls: SimpleQueue[index_pb2.Call | None] = SimpleQueue()
        self._channel = grpc.insecure_channel(server.address)
        stub = index_pb2_grpc.IndexServiceStub(self._channel)
        self._replies = stub.Exchange(iter(self._calls.get, None), timeout=60)

    def send(self, number: int, **call: object) -> None:
        self._calls.put(index_pb2.Call(number=number, **call))  # type: ignore[arg-type]

    def search(self, number: int, queries: Float32, timeout_s: float | None = None, k: int = 3) -> None:
        request = index_pb2.SearchRequest(queries=wire.matrix_to_wire(queries), k=k)
        self.send(number, search=request, timeout_s=timeout_s)

    def end(self) -> None:
        self._calls.put(None)

    def __iter__(self) -> Iterator[index_pb2.Reply]:
        return iter(self._replies)

    def __next__(self) -> index_pb2.Reply:
        return next(self._replies)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()
        self._channel.close()


def test_a_hundred_searches_in_flight_are_few_for_faiss_and_answered_as_one_by_one(
    server: IndexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    search_checked = server.shard.search_checked

    def noted(queries: Float32, k: int, parameters: SearchParameters, deadline: Deadline) -> Hits:
        sizes.append(len(queries))
        return search_checked(queries, k, parameters, deadline)

    with monkeypatch.context() as patch, Stream(server) as stream:
        patch.setattr(server.shard, "search_checked", noted)
        with engine._Turn(Deadline.never(), 0):  # so that they wait, and are searched together
            for number, query in enumerate(QUERIES):
                stream.search(number, query[None])
            stream.search(100, QUERIES)
            stream.send(101, fetch=index_pb2.FetchRequest(ids=[1]))
            assert next(stream).number == 101  # by now the searches were read
            stream.end()
        replies = {reply.number: reply.search for reply in stream}
    assert sum(sizes) == 200
    assert len(sizes) <= 2  # what was there when the first came, and all that came while it stood at the lock
    assert sorted(replies) == list(range(101))
    for number, query in enumerate(QUERIES):
        same(wire.hits_from_wire(replies[number]), server.shard.search(query[None], 3, Deadline.never()))
    same(wire.hits_from_wire(replies[100]), server.shard.search(QUERIES, 3, Deadline.never()))
    assert {reply.current_snapshot_id for reply in replies.values()} == {server.shard.manifest.snapshot_id}


def test_a_stream_is_under_way_while_a_call_of_it_is(server: IndexServer) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(Stream(server)) for _ in range(MUCH)]
        for stream in streams:
            stream.search(0, QUERIES[:1])
            assert next(stream).search.rows == 1
        assert server.n_under_way() == 0
        with engine._Turn(Deadline.never(), 0):
            streams[0].search(1, QUERIES[:1])
            streams[0].send(2, fetch=index_pb2.FetchRequest(ids=[1]))
            assert next(streams[0]).number == 2  # by now the search was read
            assert server.n_under_way() == 1
        assert next(streams[0]).number == 1


def test_what_fails_is_one_call(server: IndexServer) -> None:
    bad = common_pb2.Matrix(rows=2, columns=D, data=bytes(16))
    with Stream(server) as stream:
        stream.send(1, search=index_pb2.SearchRequest(queries=bad, k=3))
        stream.search(2, QUERIES[:1], k=0)
        stream.send(3, fetch=index_pb2.FetchRequest(ids=[N]))
        stream.send(4, fetch=index_pb2.FetchRequest(ids=[1], snapshot_id="other"))
        stream.send(5)
        stream.search(6, QUERIES[:1], timeout_s=0.0)
        stream.send(7, fetch=index_pb2.FetchRequest(ids=[7, 3], with_vectors=True))
        stream.search(8, QUERIES[:1])
        stream.end()
        replies = {reply.number: reply for reply in stream}
    failures = {number: (reply.failure.code, reply.failure.message) for number, reply in replies.items()}
    assert [failures[number][0] for number in range(1, 9)] == [
        "INVALID_ARGUMENT",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "FAILED_PRECONDITION",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "",
        "",
    ]
    assert failures[1][1] == "matrix of 2 x 4 float32 must have 32 bytes, got 16"
    assert [passage.id for passage in replies[7].fetch.passages] == [7, 3]
    np.testing.assert_array_equal(wire.matrix_from_wire(replies[7].fetch.vectors), VECTORS[[7, 3]])
    assert replies[8].search.rows == 1
    assert [each.n_using for each in server.held._entries.values()] == [0], "else it would never be let go of"


def test_a_full_queue_refuses_and_the_others_are_served(snapshot: Path) -> None:
    settings = IndexServerSettings(snapshot=snapshot, max_queued_rows=5)
    with IndexServer(settings) as server, Stream(server) as stream:
        with engine._Turn(Deadline.never(), 0):  # nobody's turn comes: two pairs have a place, the first may be inside
            for number in range(6):
                stream.search(number, QUERIES[:2], k=1 if number == 0 else 3)
            refused = [next(stream) for _ in range(3)]
        stream.search(6, QUERIES[:2])
        stream.end()
        others = list(stream)
    assert {reply.failure.code for reply in refused} == {"RESOURCE_EXHAUSTED"}
    assert "at most 5 query rows may wait, 4 do" in refused[0].failure.message
    assert sorted(reply.number for reply in (*refused, *others)) == list(range(7))
    assert sum(reply.search.rows == 2 for reply in others) >= 2


def test_a_cancelled_call_is_not_answered(server: IndexServer) -> None:
    with Stream(server) as stream:
        with engine._Turn(Deadline.never(), 0):
            for number in range(4):
                stream.search(number, QUERIES[:1])
            for number in (1, 2):
                stream.send(number, cancel=True)
            stream.send(5, fetch=index_pb2.FetchRequest(ids=[1]))
            assert next(stream).number == 5  # by now the cancels were read
        stream.end()
        assert sorted(reply.number for reply in stream) == [0, 3]


def test_a_server_that_stops_answers_what_it_began_and_ends_its_streams(snapshot: Path) -> None:
    with IndexServer(IndexServerSettings(snapshot=snapshot)) as server, Stream(server) as stream:
        stream.search(1, QUERIES[:1])
        assert next(stream).number == 1
        server.stop(grace_s=60)
        with pytest.raises(grpc.RpcError) as caught:
            next(stream)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_connection_that_breaks_leaves_nothing_behind(snapshot: Path) -> None:
    with IndexServer(IndexServerSettings(snapshot=snapshot, max_streams=1)) as server:
        for _ in range(10):
            with admitted(server) as stream:
                stream._channel.close()


def admitted(server: IndexServer) -> Stream:
    """A stream that was answered, as soon as there is a place for it."""
    give_up = monotonic() + 60
    while True:
        stream = Stream(server)
        stream.search(1, QUERIES[:1])
        try:
            assert next(stream).search.rows == 1
        except grpc.RpcError as error:
            stream.__exit__(None, None, None)
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or monotonic() > give_up:
                raise
        else:
            return stream


def test_too_many_streams_are_refused(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openbook.index.server.streams.IDLE_S", math.inf)
    settings = IndexServerSettings(snapshot=snapshot, max_streams=1)
    with IndexServer(settings) as server, Stream(server) as stream:
        stream.search(1, QUERIES[:1])
        assert next(stream).number == 1
        with Stream(server) as second, pytest.raises(grpc.RpcError) as caught:
            next(second)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
