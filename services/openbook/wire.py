"""Protobuf <-> core types, both directions. A message that lies about its size is an InvalidRequest, never a crash."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from openbook.core.context import NEVER, Context, is_harmless
from openbook.core.deadline import Deadline
from openbook.core.origin import FieldValue, Origin
from openbook.core.types import (
    Candidates,
    Decoding,
    Float32,
    Formulation,
    Hits,
    Passage,
    RetrieverKind,
    SearchParameters,
)
from openbook.errors import InvalidRequest
from openbook.v1 import answer_pb2, common_pb2, index_pb2

ENUMS: dict[str, tuple[type[Formulation | Decoding | RetrieverKind], Any]] = {
    "formulation": (Formulation, answer_pb2.Formulation),
    "decoding": (Decoding, answer_pb2.Decoding),
    "retriever": (RetrieverKind, answer_pb2.Retriever),
}
"""Options with names for values, in Python and in protobuf."""
FLOAT32 = np.dtype("<f4")
INT64 = np.dtype("<i8")
LENGTH_DELIMITED = 2  # protobuf's wire type
ERROR_HEADER = "openbook-error"
"""Trailing metadata of a call that we let fail: the name of the error; its gRPC code, where an index server answers.
Where there is none, gRPC or a proxy says so.
"""
OTHERS = re.compile("Method not found|http2 header with status: 40[01345]|Failed parsing HTTP/2")
"""gRPC's own words where none of our services answers, but HTTP or another one; or one that is older or newer."""


def matrix_to_wire(array: Float32) -> common_pb2.Matrix:
    """From (n, d) float32."""
    matrix = common_pb2.Matrix()
    fill_matrix(matrix, array)
    return matrix


def fill_matrix(matrix: common_pb2.Matrix, array: Float32) -> None:
    """As `matrix_to_wire`, in place."""
    matrix.rows, matrix.columns = array.shape
    matrix.data = array.astype(FLOAT32, copy=False).tobytes()


def before_vectors(vectors: Float32) -> bytes:
    """A serialized `FetchResponse` up to where the (n, d) float32 follow: so they can be sent from where they are."""
    shape = common_pb2.Matrix(rows=vectors.shape[0], columns=vectors.shape[1]).SerializeToString()
    matrix = shape + begun(common_pb2.Matrix, "data", vectors.nbytes)
    return begun(index_pb2.FetchResponse, "vectors", len(matrix) + vectors.nbytes) + matrix


def begun(message: type[Message], field: str, size: int) -> bytes:
    """Tag and size of a field of so many bytes, which follow. Protobuf takes several parts of a message for one."""
    tag = message.DESCRIPTOR.fields_by_name[field].number << 3 | LENGTH_DELIMITED
    return _varint(tag) + _varint(size)


def _varint(n: int) -> bytes:
    parts = []
    while n > 0x7F:
        parts.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*parts, n])


def matrix_from_wire(matrix: common_pb2.Matrix, data: bytes | memoryview | None = None) -> Float32:
    """To (n, d) float32, read-only and without a copy; of data that came beside the message, if it did.

    Raises:
        InvalidRequest: the data is not rows * columns numbers long.
    """
    return _array("matrix", matrix.data if data is None else data, matrix.rows, matrix.columns, FLOAT32)


def parameters_to_wire(parameters: SearchParameters) -> index_pb2.SearchParameters | None:
    """None says: as built."""
    if parameters.nprobe is parameters.ef_search is parameters.rerank_factor is None:
        return None
    return index_pb2.SearchParameters(
        nprobe=parameters.nprobe, ef_search=parameters.ef_search, rerank_factor=parameters.rerank_factor
    )


def parameters_from_wire(parameters: index_pb2.SearchParameters) -> SearchParameters:
    """Absent fields become None.

    Raises:
        InvalidRequest: a value is out of its range.
    """
    present = {field.name: value for field, value in parameters.ListFields()}
    return SearchParameters(**present)


def context_to_wire(context: Context) -> index_pb2.Context | None:
    """Without the deadline, which every call has a field for. None says: nothing is known."""
    if not (context.request_id or context.caller or context.trace or context.tenant):
        return None
    return index_pb2.Context(
        request_id=context.request_id, caller=context.caller, trace=context.trace, tenant=context.tenant
    )


def context_of_call(call: index_pb2.Call) -> Context:
    """The deadline counts from now.

    Raises:
        InvalidRequest: a text is too long, or not printable; the timeout is no number.
    """
    timeout_s = call.timeout_s
    if math.isnan(timeout_s):
        raise InvalidRequest("timeout_s must be a number of seconds, got nan")
    deadline = Deadline.after(timeout_s) if timeout_s or call.HasField("timeout_s") else NEVER
    if not call.HasField("context"):
        return Context(deadline)
    said = call.context
    return Context(deadline, said.request_id, said.caller, said.trace, said.tenant)


TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def context_of_headers(headers: Mapping[str, str | bytes], deadline: Deadline = NEVER) -> Context:
    """From HTTP headers or gRPC metadata: x-request-id, x-caller, traceparent. What is none is left out: whoever stands
    between may have added it.
    """
    found = (str(headers.get(name, "")) for name in ("x-request-id", "x-caller", "traceparent"))
    request_id, caller, trace = (text if is_harmless(text) else "" for text in found)
    return Context(deadline, request_id, caller, trace if TRACEPARENT.fullmatch(trace) else "")


def fill_hits(response: index_pb2.SearchResponse, hits: Hits) -> None:
    """From (n, k) hits, in place: a message that is put into another one is copied."""
    response.rows, response.k = hits.ids.shape
    response.ids = hits.ids.astype(INT64, copy=False).tobytes()
    response.scores = hits.scores.astype(FLOAT32, copy=False).tobytes()
    response.snapshot_id = hits.snapshot_id


def hits_from_wire(response: index_pb2.SearchResponse) -> Hits:
    """To (n, k) hits, read-only and without a copy.

    Raises:
        InvalidRequest: ids or scores are not rows * k numbers long.
    """
    return Hits(
        ids=_array("ids", response.ids, response.rows, response.k, INT64),
        scores=_array("scores", response.scores, response.rows, response.k, FLOAT32),
        snapshot_id=response.snapshot_id,
    )


def fill_candidates(response: index_pb2.SearchResponse, candidates: Candidates) -> None:
    """From (n, m) candidates, in place."""
    fill_hits(response, Hits(candidates.ids, candidates.dense, candidates.snapshot_id))
    response.bm25 = candidates.bm25.astype(FLOAT32, copy=False).tobytes()


def candidates_from_wire(response: index_pb2.SearchResponse) -> Candidates:
    """To (n, m) candidates, read-only and without a copy.

    Raises:
        InvalidRequest: ids or scores are not rows * k numbers long.
    """
    hits = hits_from_wire(response)
    bm25 = _array("bm25", response.bm25, response.rows, response.k, FLOAT32)
    return Candidates(hits.ids, hits.scores, bm25, hits.snapshot_id)


def passage_to_wire(passage: Passage) -> common_pb2.Passage:
    return common_pb2.Passage(
        id=passage.id,
        document_id=passage.document_id,
        title=passage.title,
        text=passage.text,
        lasting_id=passage.lasting_id,
        origin=_origin_to_wire(passage.origin) if passage.origin else None,
    )


def passage_from_wire(passage: common_pb2.Passage) -> Passage:
    origin = _origin_from_wire(passage.origin) if passage.HasField("origin") else None
    return Passage(passage.id, passage.document_id, passage.title, passage.text, origin)


def _origin_to_wire(origin: Origin) -> common_pb2.Origin:
    return common_pb2.Origin(
        document_digest=origin.document_digest,
        start=origin.start,
        end=origin.end,
        path=origin.path,
        url=origin.url,
        section=origin.section,
        page=origin.page,
        language=origin.language,
        date=origin.date,
        fields={name: _value_to_wire(value) for name, value in origin.fields.items()},
    )


def _origin_from_wire(origin: common_pb2.Origin) -> Origin:
    return Origin(
        document_digest=origin.document_digest,
        start=origin.start,
        end=origin.end,
        path=origin.path,
        url=origin.url,
        section=origin.section,
        page=origin.page if origin.HasField("page") else None,
        language=origin.language,
        date=origin.date,
        fields={
            name: getattr(value, kind) for name, value in origin.fields.items() if (kind := value.WhichOneof("value"))
        },
    )


def _value_to_wire(value: FieldValue) -> common_pb2.FieldValue:
    match value:
        case bool():
            return common_pb2.FieldValue(truth=value)
        case int():
            return common_pb2.FieldValue(whole=value)
        case float():
            return common_pb2.FieldValue(number=value)
        case str():
            return common_pb2.FieldValue(text=value)


def _array(name: str, data: bytes | memoryview, rows: int, columns: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    size_bytes = rows * columns * dtype.itemsize
    if len(data) != size_bytes:
        raise InvalidRequest(f"{name} of {rows} x {columns} {dtype.name} must have {size_bytes} bytes, got {len(data)}")
    return np.ndarray((rows, columns), dtype, data)
