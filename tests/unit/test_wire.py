from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from openbook import wire
from openbook.core.origin import Origin
from openbook.core.types import AS_BUILT, Float32, Hits, Passage, SearchParameters
from openbook.errors import InvalidRequest
from openbook.index.server.reply import Fetched, Reply
from openbook.v1 import common_pb2, index_pb2

SHAPES = hnp.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=5)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(hnp.arrays(np.float32, SHAPES))
def test_a_matrix_comes_back_to_the_bit(array: Float32) -> None:
    back = wire.matrix_from_wire(common_pb2.Matrix.FromString(wire.matrix_to_wire(array).SerializeToString()))
    assert back.shape == array.shape
    assert back.dtype == np.float32
    assert back.tobytes() == array.tobytes()


@given(st.integers(0, 300), st.integers(1, 300), st.integers(0, 2**64 - 1), st.lists(TEXT, max_size=3))
def test_a_fetch_that_is_sent_in_parts_is_one_reply(rows: int, columns: int, number: int, texts: list[str]) -> None:
    vectors = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    parts = [index_pb2.FetchResponse(passages=[common_pb2.Passage(text=text)]).SerializeToString() for text in texts]
    parts.append(index_pb2.FetchResponse(snapshot_id="s").SerializeToString())
    reply = Reply(index_pb2.Reply(number=number), Fetched(parts, vectors))
    found = index_pb2.Reply.FromString(b"".join(reply.parts()))  # before `whole` puts them into it
    assert (found.number, found.fetch.snapshot_id) == (number, "s")
    assert [each.text for each in found.fetch.passages] == texts
    np.testing.assert_array_equal(wire.matrix_from_wire(found.fetch.vectors), vectors)
    assert found == reply.whole()


@given(SHAPES.flatmap(lambda shape: st.tuples(hnp.arrays(np.int64, shape), hnp.arrays(np.float32, shape))))
def test_hits_come_back_to_the_bit(pair: tuple[np.ndarray, Float32]) -> None:
    wire.fill_hits(response := index_pb2.SearchResponse(), Hits(*pair, "s1"))
    back = wire.hits_from_wire(response)
    assert (back.ids.tobytes(), back.scores.tobytes()) == (pair[0].tobytes(), pair[1].tobytes())
    assert back.ids.shape == back.scores.shape == pair[0].shape
    assert [back.ids.dtype.name, back.scores.dtype.name, back.snapshot_id] == ["int64", "float32", "s1"]


WHOLE = st.integers(0, 2**32 - 1)
VALUE = TEXT | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
# With every field that there is: what one has that is not named here, its type says.
OF_TYPE: dict[str, Any] = {each.name: ... for each in fields(Origin)}
LIMITED = {"start": WHOLE, "end": WHOLE, "page": st.none() | st.integers(1, 9), "fields": st.dictionaries(TEXT, VALUE)}
ORIGINS = st.builds(Origin, **OF_TYPE | LIMITED)


@given(st.builds(Passage, st.integers(0, 2**63 - 1), TEXT, TEXT, TEXT, st.none() | ORIGINS))
def test_a_passage_comes_back(passage: Passage) -> None:
    back = wire.passage_from_wire(wire.passage_to_wire(passage))
    assert back == passage
    assert back.lasting_id == passage.lasting_id
    if passage.origin and back.origin:
        kinds = {name: type(value) for name, value in passage.origin.fields.items()}
        assert {name: type(value) for name, value in back.origin.fields.items()} == kinds


def test_numbers_are_little_endian_in_row_major_order() -> None:
    matrix = wire.matrix_to_wire(np.asfortranarray([[1, 2], [3, 4]], np.float32))
    assert matrix.data.hex() == "0000803f000000400000404000008040"


@pytest.mark.parametrize(("rows", "columns", "size"), [(2, 3, 23), (2, 3, 25), (2**32 - 1, 2**32 - 1, 24), (0, 0, 4)])
def test_a_matrix_that_lies_about_its_size_is_refused(rows: int, columns: int, size: int) -> None:
    with pytest.raises(InvalidRequest, match=f"matrix of {rows} x {columns} .* {rows * columns * 4} bytes, got {size}"):
        wire.matrix_from_wire(common_pb2.Matrix(rows=rows, columns=columns, data=bytes(size)))


@pytest.mark.parametrize(("ids", "scores", "name"), [(8, 4, "scores"), (4, 8, "ids")])
def test_hits_that_lie_about_their_size_are_refused(ids: int, scores: int, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        wire.hits_from_wire(index_pb2.SearchResponse(rows=1, k=2, ids=bytes(ids * 2), scores=bytes(scores)))


WIDE = st.none() | st.integers(1, 1 << 20)


@given(st.builds(SearchParameters, nprobe=WIDE, ef_search=WIDE, rerank_factor=WIDE))
def test_search_parameters_come_back_with_their_gaps(parameters: SearchParameters) -> None:
    sent = wire.parameters_to_wire(parameters)
    assert (sent is None) == (parameters == AS_BUILT)
    if sent is not None:
        assert wire.parameters_from_wire(index_pb2.SearchParameters.FromString(sent.SerializeToString())) == parameters


def test_search_parameters_out_of_range_are_named() -> None:
    with pytest.raises(InvalidRequest, match=r"nprobe must be 1\.\.1048576, got 0"):
        wire.parameters_from_wire(index_pb2.SearchParameters(nprobe=0))
