"""One index server over the wire: what it refuses, what it says, and that it goes on serving."""

import ctypes
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from small_snapshot import VECTORS, D, N, build

from openbook import wire
from openbook.config import MAX_ROWS, IndexServerSettings
from openbook.errors import InvalidSnapshot, PortInUse, StartupError
from openbook.index.server.server import IndexServer
from openbook.testing import served
from openbook.v1 import common_pb2, index_pb2, index_pb2_grpc

QUERY = common_pb2.Matrix(rows=1, columns=D, data=np.ones(D, "<f4").tobytes())


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("built"), n_shards=2)


@pytest.fixture(scope="module")
def server(snapshot: Path) -> Iterator[IndexServer]:
    """The second of two shards: passages 20..39."""
    with served(snapshot) as servers:
        yield servers[1]


@pytest.fixture
def stub(server: IndexServer) -> Iterator[index_pb2_grpc.IndexServiceStub]:
    """Whatever a test asked, the server still answers afterwards."""
    with grpc.insecure_channel(server.address) as channel:
        stub = index_pb2_grpc.IndexServiceStub(channel)
        yield stub
        hits = wire.hits_from_wire(stub.Search(index_pb2.SearchRequest(queries=QUERY, k=3)))
        assert hits.ids.shape == (1, 3)


def refusal(call: Any, request: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=60)
    error: Any = caught.value
    return error.code().name, error.details()


def matrix(*rows: list[float]) -> common_pb2.Matrix:
    return wire.matrix_to_wire(np.array(rows, np.float32))


def test_a_server_takes_as_many_rows_as_may_be_set(snapshot: Path) -> None:
    server = IndexServer(IndexServerSettings(snapshot=snapshot, max_rows=MAX_ROWS))
    with server, grpc.insecure_channel(server.address) as channel:
        info = index_pb2_grpc.IndexServiceStub(channel).Info(index_pb2.InfoRequest(), timeout=60)
    assert info.max_rows == MAX_ROWS


@pytest.mark.parametrize(
    ("queries", "k", "message"),
    [
        (QUERY, 0, "k must be 1..1000, got 0"),
        (QUERY, 10_000_000, "k must be 1..1000, got 10000000"),
        (matrix([1, 2, 3]), 1, "queries must have dimension 4, got 3"),
        (matrix([1, 2, 3, float("nan")]), 1, "queries must be finite, got NaN or infinity in row 0"),
        (matrix([1, 2, 3, 4], [1, 2, 3, float("inf")]), 1, "queries must be finite, got NaN or infinity in row 1"),
        (matrix([3e38, 3e38, 3e38, 3e38]), 1, "queries must have norms up to"),
        (common_pb2.Matrix(), 1, "queries must have 1..1024 rows, got an array of shape (0, 0)"),
        (common_pb2.Matrix(rows=0, columns=4), 1, "queries must have 1..1024 rows, got an array of shape (0, 4)"),
        (wire.matrix_to_wire(np.ones((1025, D), np.float32)), 1, "1..1024 rows, got an array of shape (1025, 4)"),
        (common_pb2.Matrix(rows=2, columns=D, data=bytes(16)), 1, "matrix of 2 x 4 float32 must have 32 bytes, got 16"),
        (common_pb2.Matrix(rows=2**32 - 1, columns=2**32 - 1), 1, "bytes, got 0"),
        (common_pb2.Matrix(rows=2**32 - 1, columns=0), 1, "1..1024 rows"),
    ],
)
def test_what_cannot_be_searched_for(
    stub: index_pb2_grpc.IndexServiceStub, queries: common_pb2.Matrix, k: int, message: str
) -> None:
    code, details = refusal(stub.Search, index_pb2.SearchRequest(queries=queries, k=k))
    assert code == "INVALID_ARGUMENT"
    assert message in details


def test_what_cannot_be_fetched(stub: index_pb2_grpc.IndexServiceStub) -> None:
    for unknown in (19, 40, -1, 2**62):
        code, details = refusal(stub.Fetch, index_pb2.FetchRequest(ids=[20, unknown]))
        assert (code, details) == ("NOT_FOUND", f"passage id must be 20..39 in this shard, got {unknown}")
    code, details = refusal(stub.Fetch, index_pb2.FetchRequest(lasting_ids=["x" * 32]))
    assert (code, details) == ("INVALID_ARGUMENT", f"a lasting id must have 32 hexadecimal digits, got '{'x' * 32}'")
    assert not stub.Fetch(index_pb2.FetchRequest(lasting_ids=["0" * 32])).passages
    code, details = refusal(stub.Fetch, index_pb2.FetchRequest(ids=[20] * 1025))
    assert (code, details) == ("INVALID_ARGUMENT", "ids must be at most 1024, got 1025")


def test_another_snapshot_is_refused(stub: index_pb2_grpc.IndexServiceStub, server: IndexServer) -> None:
    for call, request in (
        (stub.Search, index_pb2.SearchRequest(queries=QUERY, k=1, snapshot_id="other" * 1000)),
        (stub.Fetch, index_pb2.FetchRequest(ids=[20], snapshot_id="other")),
    ):
        code, details = refusal(call, request)
        assert code == "FAILED_PRECONDITION"
        assert f"holds snapshot {server.shard.manifest.snapshot_id}, got a request for other" in details
        assert len(details) < 200


def test_passages_come_with_vectors_only_if_asked(stub: index_pb2_grpc.IndexServiceStub) -> None:
    bare = stub.Fetch(index_pb2.FetchRequest(ids=[31, 20]))
    assert [passage.text for passage in bare.passages] == ["text 31", "text 20"]
    assert not bare.HasField("vectors")
    full = stub.Fetch(index_pb2.FetchRequest(ids=[31, 20], with_vectors=True))
    np.testing.assert_array_equal(wire.matrix_from_wire(full.vectors), VECTORS[[31, 20]])


def test_it_says_what_it_holds(stub: index_pb2_grpc.IndexServiceStub, server: IndexServer) -> None:
    about: dict[str, Any] = {
        "snapshot_id": server.shard.manifest.snapshot_id,
        "n_shards": 2,
        "n_passages": 20,
        "first_id": 20,
        "dimension": D,
        "encoder": "encoder",
        "encoder_fingerprint": "fingerprint",
        "factory": "Flat",
    }
    exact = dict.fromkeys((1, 5, 10, 100), 1.0)
    created_at = server.shard.manifest.created_at
    held = [index_pb2.HeldSnapshot(sequence=1, n_passages_total=N, created_at=created_at, recall=exact, **about)]
    frames = server._service.frames
    expected = index_pb2.InfoResponse(shard=1, max_k=1000, max_rows=1024, held=held, frames=frames, **about)
    assert stub.Info(index_pb2.InfoRequest()) == expected


def test_a_defect_is_logged_and_not_told(
    stub: index_pb2_grpc.IndexServiceStub,
    server: IndexServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("secret")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        patch.setattr(server.shard, "fetch", broken)
        code, details = refusal(stub.Fetch, index_pb2.FetchRequest(ids=[20]))
    assert (code, details) == ("INTERNAL", "internal error in Fetch; the server's log says more")
    assert "ZeroDivisionError: secret" in caplog.text


def test_health_and_reflection(server: IndexServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "openbook.v1.IndexService"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert "openbook.v1.IndexService" in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_a_used_port_is_named(snapshot: Path, server: IndexServer) -> None:
    second = IndexServer(IndexServerSettings(snapshot=snapshot, port=server.port))
    with pytest.raises(PortInUse, match=f"127.0.0.1:{server.port}: another process"):
        second.start()
    second.stop()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        third = IndexServer(IndexServerSettings(snapshot=snapshot, port=port))
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}"):
            third.start()
        third.stop()


@pytest.mark.parametrize(("host", "why"), [("192.0.2.1", "Cannot assign"), ("0.0.0..0", ".*label empty")])
def test_an_address_that_is_not_ours(host: str, why: str, snapshot: Path) -> None:
    server = IndexServer(IndexServerSettings(snapshot=snapshot, host=host))
    with pytest.raises(StartupError, match=rf"{re.escape(host)}:0: cannot listen: {why}"):
        server.start()
    server.stop()


def test_a_damaged_shard_is_never_served(snapshot: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", snapshot, copy], check=True)
    path = copy / "shard-0000" / "vectors.npy"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InvalidSnapshot, match=f"{path}: must have"):
        IndexServer(IndexServerSettings(snapshot=copy))


RUN = (
    "import sys; from openbook.config import IndexServerSettings; from openbook.index.server.server import run;"
    "run(IndexServerSettings(snapshot=sys.argv[1]))"
)


def to_another_thread(process: "subprocess.Popen[str]", number: int) -> None:
    """Than its main one: the system may choose any."""
    others = [int(each) for each in os.listdir(f"/proc/{process.pid}/task") if int(each) != process.pid]
    assert ctypes.CDLL(None).tgkill(process.pid, others[-1], number) == 0


@pytest.mark.parametrize(
    ("told", "number"),
    [
        (subprocess.Popen.send_signal, signal.SIGTERM),
        (subprocess.Popen.send_signal, signal.SIGINT),
        (to_another_thread, signal.SIGTERM),
    ],
)
def test_a_process_serves_until_it_is_told_to_stop(
    snapshot: Path, told: "Callable[[subprocess.Popen[str], int], None]", number: int
) -> None:
    with subprocess.Popen([sys.executable, "-c", RUN, snapshot], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            with grpc.insecure_channel(process.stdout.readline().strip()) as channel:
                info = index_pb2_grpc.IndexServiceStub(channel).Info(index_pb2.InfoRequest(), timeout=60)
            told(process, number)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()
    assert info.n_passages == 20
