"""The gRPC face of one shard: checks, deadlines and errors; the work is the shard's."""

import logging
from collections.abc import Callable
from typing import NoReturn, TypeVar

import grpc

from openbook import wire
from openbook.core.deadline import Deadline
from openbook.errors import InvalidRequest, OpenbookError, SnapshotMismatch
from openbook.index.shard import Shard
from openbook.telemetry import REQUESTS
from openbook.v1 import index_pb2, index_pb2_grpc

log = logging.getLogger(__name__)

Response = TypeVar("Response")


class IndexService(index_pb2_grpc.IndexServiceServicer):
    """Serves one shard. See index.proto for what the calls do and which codes they fail with."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def Search(self, request: index_pb2.SearchRequest, context: grpc.ServicerContext) -> index_pb2.SearchResponse:  # noqa: N802
        def search(deadline: Deadline) -> index_pb2.SearchResponse:
            self._check_snapshot(request.snapshot_id)
            return wire.hits_to_wire(self._shard.search(wire.matrix_from_wire(request.queries), request.k, deadline))

        return _answer("Search", context, search)

    def Fetch(self, request: index_pb2.FetchRequest, context: grpc.ServicerContext) -> index_pb2.FetchResponse:  # noqa: N802
        def fetch(deadline: Deadline) -> index_pb2.FetchResponse:
            self._check_snapshot(request.snapshot_id)
            if len(request.ids) > self._shard.max_rows:
                raise InvalidRequest(f"ids must be at most {self._shard.max_rows}, got {len(request.ids)}")
            passages = self._shard.fetch(request.ids)
            return index_pb2.FetchResponse(
                passages=map(wire.passage_to_wire, passages),
                vectors=wire.matrix_to_wire(self._shard.fetch_vectors(request.ids)) if request.with_vectors else None,
                snapshot_id=self._shard.manifest.snapshot_id,
            )

        return _answer("Fetch", context, fetch)

    def Info(self, request: index_pb2.InfoRequest, context: grpc.ServicerContext) -> index_pb2.InfoResponse:  # noqa: N802
        return _answer("Info", context, lambda deadline: self._info())

    def _info(self) -> index_pb2.InfoResponse:
        shard, manifest = self._shard, self._shard.manifest
        return index_pb2.InfoResponse(
            snapshot_id=manifest.snapshot_id,
            shard=shard.number,
            n_shards=len(manifest.shards),
            n_passages=shard.n_passages,
            first_id=shard.first_id,
            dimension=manifest.dimension,
            encoder=manifest.encoder,
            encoder_fingerprint=manifest.encoder_fingerprint,
            factory=manifest.factory,
            max_k=shard.max_k,
            max_rows=shard.max_rows,
        )

    def _check_snapshot(self, snapshot_id: str) -> None:
        ours = self._shard.manifest.snapshot_id
        if snapshot_id not in ("", ours):
            raise SnapshotMismatch(f"this server holds snapshot {ours}, got a request for {snapshot_id[:64]}")


def _answer(method: str, context: grpc.ServicerContext, work: Callable[[Deadline], Response]) -> Response:
    """Do the work in time, or end the call with the code of what went wrong."""
    remaining_s: float | None = context.time_remaining()
    deadline = Deadline.never() if remaining_s is None else Deadline.after(remaining_s)
    try:
        deadline.check(f"{method} began")
        response = work(deadline)
    except OpenbookError as error:
        _abort(method, context, error.grpc_code, str(error))
    except Exception:
        log.exception("%s failed", method)
        _abort(method, context, "INTERNAL", f"internal error in {method}; the server's log says more")
    REQUESTS.labels(method, "OK").inc()
    return response


def _abort(method: str, context: grpc.ServicerContext, code: str, message: str) -> NoReturn:
    REQUESTS.labels(method, code).inc()
    context.abort(grpc.StatusCode[code], message)
    raise AssertionError("abort raises")
