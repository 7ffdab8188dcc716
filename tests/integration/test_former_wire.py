"""Versions beside each other: what a former one says on the wire still means the same, and its clients are answered.

`wire/` has the descriptors of former versions' protos. A release adds its own: the command stands in CONTRIBUTING.md.
Snapshots of former formats: tests/unit/index/test_origins.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import small_snapshot
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from small_snapshot import VECTORS
from wire_compatibility import broken

from openbook.config import IndexServerSettings
from openbook.index.server.server import IndexServer
from openbook.v1 import answer_pb2, common_pb2, index_pb2

FORMER = sorted(Path(__file__).with_name("wire").glob("*.binpb"))
SERVICE = "openbook.v1.IndexService"


def read(path: Path) -> FileDescriptorSet:
    return FileDescriptorSet.FromString(path.read_bytes())


def present() -> FileDescriptorSet:
    found = FileDescriptorSet()
    for each in (common_pb2, index_pb2, answer_pb2):
        each.DESCRIPTOR.CopyToProto(found.file.add())
    return found


@pytest.fixture(params=FORMER, ids=lambda path: path.stem)
def former(request: pytest.FixtureRequest) -> FileDescriptorSet:
    return read(request.param)


def test_what_a_former_version_says_means_the_same(former: FileDescriptorSet) -> None:
    assert broken(former, present()) == []


def changed(**values: Any) -> FileDescriptorSet:
    """The present protos with another `k` of SearchRequest."""
    found = present()
    (file,) = (file for file in found.file if file.name.endswith("index.proto"))
    (message,) = (each for each in file.message_type if each.name == "SearchRequest")
    (field,) = (each for each in message.field if each.name == "k")
    for name, value in values.items():
        setattr(field, name, value)
    return found


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"name": "n_wanted"}, "openbook.v1.SearchRequest.k = 2 was"),
        ({"type": FieldDescriptorProto.TYPE_STRING}, "openbook.v1.SearchRequest.k = 2 was"),
        ({"label": FieldDescriptorProto.LABEL_REPEATED}, "openbook.v1.SearchRequest.k = 2 was"),
        ({"number": 99}, "openbook.v1.SearchRequest.k = 2 is gone, and its number is not reserved"),
    ],
)
def test_a_field_that_would_be_misread_is_named(values: dict[str, Any], says: str) -> None:
    (found,) = broken(present(), changed(**values))
    assert found.startswith(says)


def test_a_field_goes_if_its_number_is_reserved() -> None:
    later = changed(number=99)
    for file in later.file:
        for message in file.message_type:
            if message.name == "SearchRequest":
                message.reserved_range.add(start=2, end=3)
    assert broken(present(), later) == []
    assert broken(present(), FileDescriptorSet(file=later.file[:1])), "messages and calls that are gone are named"


class FormerClient:
    """Calls as a former version makes them: by its own descriptors alone."""

    def __init__(self, files: FileDescriptorSet, channel: grpc.Channel) -> None:
        self._pool = DescriptorPool()
        for file in files.file:
            self._pool.Add(file)  # type: ignore[no-untyped-call]
        self._channel = channel

    def message(self, name: str, **values: Any) -> Any:
        return GetMessageClass(self._pool.FindMessageTypeByName(f"openbook.v1.{name}"))(**values)

    def call(self, name: str, request: Any) -> Any:
        reply = GetMessageClass(self._pool.FindServiceByName(SERVICE).methods_by_name[name].output_type)
        method = f"/{SERVICE}/{name}"
        if name == "Exchange":
            stream = self._channel.stream_stream(method, type(request).SerializeToString, reply.FromString)
            (answer,) = stream(iter([request]), timeout=60)
            return answer
        unary = self._channel.unary_unary(method, type(request).SerializeToString, reply.FromString)
        return unary(request, timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IndexServer]:
    snapshot = small_snapshot.build(tmp_path_factory.mktemp("former"))
    with IndexServer(IndexServerSettings(snapshot=snapshot)) as server:
        yield server


def test_a_client_of_a_former_version_is_answered(former: FileDescriptorSet, server: IndexServer) -> None:
    scores = VECTORS[:1] @ VECTORS.T
    best = np.lexsort((np.arange(len(VECTORS)), -scores[0]))[:3]
    with grpc.insecure_channel(server.address) as channel:
        client = FormerClient(former, channel)
        info = client.call("Info", client.message("InfoRequest"))
        assert (info.n_passages, info.snapshot_id) == (len(VECTORS), server.shard.manifest.snapshot_id)
        queries = client.message("Matrix", rows=1, columns=VECTORS.shape[1], data=VECTORS[:1].tobytes())
        search = client.message("SearchRequest", queries=queries, k=3, snapshot_id=info.snapshot_id)
        found = client.call("Search", search)
        assert found.ids == best.tobytes()
        assert np.frombuffer(found.scores, np.float32).tolist() == scores[0, best].tolist()
        fetch = client.message("FetchRequest", ids=best.tolist(), snapshot_id=info.snapshot_id)
        passages = client.call("Fetch", fetch).passages
        assert [each.title for each in passages] == [f"title {i}" for i in best]
        reply = client.call("Exchange", client.message("Call", number=7, search=search, timeout_s=60))
        assert (reply.number, reply.search.ids) == (7, best.tobytes())
