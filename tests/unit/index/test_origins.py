"""Where passages come from, on disk: it comes back, is found by lasting ids, and its absence is no error."""

import zipfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.core.fingerprint import text_digest
from openbook.core.origin import Field, FieldType, Origin
from openbook.core.types import Passage
from openbook.errors import InvalidDocuments, InvalidSnapshot
from openbook.index.building.build import build_snapshot
from openbook.index.disk import origins
from openbook.index.disk.origins import (
    LASTING,
    LASTING_POSITIONS,
    PLACES,
    STRINGS,
    check_origins,
    is_of_origins,
    origin_files,
)
from openbook.index.disk.snapshot import Snapshot
from openbook.index.disk.store import PassageReader, write_passages
from openbook.index.shard.shard import Shard

FORMAT_1, FORMAT_2 = (Path(__file__).with_name(f"format_{n}.zip") for n in (1, 2))
FIELDS = tuple(Field(f"a {type}", type) for type in FieldType)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = {
    "a string": TEXTS.filter(bool),
    "a int": st.integers(1 - 2**63, 2**63 - 1),
    "a float": st.floats(allow_nan=False, allow_infinity=False),
    "a bool": st.booleans(),
    "a date": st.sampled_from(["1998", "1998-05-17"]),
}
# With every field that there is: what one has that is not named here, its type says.
OF_TYPE: dict[str, Any] = {each.name: ... for each in fields(Origin)}
LIMITED: dict[str, Any] = {
    "document_digest": TEXTS.map(text_digest),
    "start": st.integers(0, 9),
    "end": st.integers(100, 2**31 - 1),
    "page": st.none() | st.integers(1, 9),
    "fields": st.fixed_dictionaries({}, optional=VALUES),
}
ORIGINS = st.builds(Origin, **OF_TYPE | LIMITED)


def passage(i: int, **about: Any) -> Passage:
    """Two of a document."""
    text = f"text {i}"
    origin = Origin(document_digest=text_digest(f"doc {i // 2}"), start=8 * (i % 2), end=8 * (i % 2) + 6, **about)
    return Passage(i, f"doc-{i // 2}", "title", text, origin)


@given(st.lists(st.tuples(TEXTS, TEXTS, ORIGINS), max_size=6), st.sampled_from([1, 100]), st.sampled_from([1, 3, 100]))
def test_origins_come_back_and_are_found_whatever_is_in_them(
    tmp_path_factory: pytest.TempPathFactory, given: list[tuple[str, str, Origin]], remembered: int, at_once: int
) -> None:
    folder = tmp_path_factory.mktemp("origins")
    passages = [Passage(5 + i, name, "title", text, origin) for i, (name, text, origin) in enumerate(given)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(origins, "REMEMBERED", remembered)
        patch.setattr(origins, "SORTED_AT_ONCE", at_once)
        assert write_passages(folder, passages, 5, FIELDS) == len(passages)
    assert {path.name for path in folder.iterdir()} == {"passages.bin", "offsets.npy", *origin_files(FIELDS)}
    check_origins(folder, FIELDS, len(passages))
    reader = PassageReader(folder, 5, FIELDS)
    assert list(reader) == passages
    for each in passages:
        position = reader.find(each.lasting_id)
        assert position is not None
        assert reader[position].lasting_id == each.lasting_id
        assert reader.find(each.lasting_id[:16] + "0" * 16) is None  # which begins like it, and is another's
    assert reader.find("0" * 32) is None


def test_what_is_true_comes_back_as_true_and_not_as_1(tmp_path: Path) -> None:
    write_passages(tmp_path, [passage(0, fields={"a bool": True})], fields=FIELDS)
    origin = PassageReader(tmp_path, 0, FIELDS)[0].origin
    assert origin is not None
    assert origin.fields["a bool"] is True


def test_passages_of_one_document_share_its_row(tmp_path: Path) -> None:
    write_passages(tmp_path, [passage(i) for i in range(6)], fields=())
    assert len(np.load(tmp_path / "documents.npy")) == 3


@given(ORIGINS, ORIGINS)
def test_passages_that_differ_in_one_field_alone_come_back(
    tmp_path_factory: pytest.TempPathFactory, one: Origin, other: Origin
) -> None:
    folder = tmp_path_factory.mktemp("origins")
    differing = [each for name in OF_TYPE for each in (one, replace(one, **{name: getattr(other, name)}))]
    # Each begins behind the one before, as those of one document do, which share a row.
    passages = [Passage(i, "d", "t", "x", replace(origin, start=i)) for i, origin in enumerate(differing)]
    write_passages(folder, passages, fields=FIELDS)
    assert list(PassageReader(folder, 0, FIELDS)) == passages


def test_a_reader_that_asks_for_no_origins_needs_none(tmp_path: Path) -> None:
    write_passages(tmp_path, [passage(0)], fields=())
    (tmp_path / PLACES).unlink()
    assert PassageReader(tmp_path)[0] == replace(passage(0), origin=None)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Passage(0, "d", "t", "x"), "passage 0: must know its origin"),
        (
            replace(passage(0), origin=Origin(document_digest="0" * 64, start=5, end=4)),
            "span must be within .* got 5..4",
        ),
        (replace(passage(0), origin=Origin(document_digest="abc", start=0, end=4)), "digest must be .* got 'abc'"),
        (passage(0, section="\ud800"), "passage 0: not UTF-8 text"),
    ],
)
def test_what_is_no_origin_is_not_written(tmp_path: Path, bad: Passage, message: str) -> None:
    with pytest.raises(InvalidDocuments, match=message):
        write_passages(tmp_path, [bad], fields=())


def test_lasting_ids_survive_a_rebuild_and_never_name_another_text() -> None:
    before = passage(3)
    assert replace(before, id=77, title="changed").lasting_id == before.lasting_id
    assert len({replace(before, document_id="other").lasting_id, replace(before, text="texT 3").lasting_id}) == 2
    assert before.lasting_id not in {replace(before, text="other").lasting_id, passage(1).lasting_id}
    assert Passage(0, "d", "t", "x").lasting_id == ""


@pytest.mark.parametrize("n_shards", [1, 3])
def test_a_snapshot_knows_where_its_passages_come_from(tmp_path: Path, n_shards: int) -> None:
    passages = [passage(i, path=f"{i}.md") for i in range(5)]
    vectors = np.eye(5, dtype=np.float32)
    fields = [Field("year", FieldType.INT)]
    build_snapshot(passages, vectors, tmp_path / "s", n_shards, "Flat", "e", "f", fields=fields)
    manifest = Snapshot.open(tmp_path / "s").manifest
    assert (manifest.format_version, manifest.fields) == (2, tuple(fields))
    shards = [Shard(tmp_path / "s", number) for number in range(n_shards)]
    assert [
        each for shard in shards for each in shard.fetch(range(shard.first_id, shard.first_id + shard.n_passages))
    ] == passages
    assert [each for shard in shards for each in shard.find([passages[3].lasting_id, "0" * 32])] == [passages[3]]


@pytest.mark.parametrize(
    ("name", "column"),
    [(PLACES, "document"), (PLACES, "section"), ("documents.npy", "path"), ("documents.npy", "url")],
)
def test_a_row_that_names_nothing_is_found(tmp_path: Path, name: str, column: str) -> None:
    write_passages(tmp_path, [passage(i) for i in range(4)], fields=())
    rows = np.load(tmp_path / name)
    rows[column][1] = 99
    np.save(tmp_path / name, rows)
    with pytest.raises(InvalidSnapshot, match=rf"{name}: rows must be 0\.\.\d, found 0\.\.99"):
        check_origins(tmp_path, (), 4)
    # Nor does it end the passages for who reads one after the other without having checked.
    with pytest.raises(InvalidSnapshot, match=rf"^{tmp_path}: the origin at \d names what is not there"):
        list(PassageReader(tmp_path, 0, ()))


def test_what_no_row_can_be_is_found_in_every_column(tmp_path: Path) -> None:
    fields = (Field("a string", FieldType.STRING),)
    write_passages(tmp_path, [passage(i) for i in range(4)], fields=fields)
    for name in set(origin_files(fields)) - {STRINGS}:
        whole = np.load(tmp_path / name)
        for column in set(whole.dtype.names or [...]) - {"digest"}:  # which may be any
            rows = whole.copy()
            rows[column][0] = np.array(-1).astype(rows[column].dtype)
            np.save(tmp_path / name, rows)
            with pytest.raises(InvalidSnapshot, match=name):
                check_origins(tmp_path, fields, 4)
        np.save(tmp_path / name, whole)
    check_origins(tmp_path, fields, 4)


@pytest.mark.parametrize(
    ("name", "column", "value"),
    [
        (PLACES, "end", 0),  # before where it begins
        (PLACES, "page", -1),
        ("field-0000.npy", ..., 99),
        (LASTING_POSITIONS, ..., 4),
        (LASTING, ..., 0),
    ],
)
def test_whatever_else_no_fetch_could_be_right_with_is_found(
    tmp_path: Path, name: str, column: Any, value: int
) -> None:
    fields = (Field("a string", FieldType.STRING),)
    write_passages(tmp_path, [passage(i) for i in range(4)], fields=fields)
    check_origins(tmp_path, fields, 4)
    rows = np.load(tmp_path / name)
    rows[column][-1] = value
    np.save(tmp_path / name, rows)
    with pytest.raises(InvalidSnapshot, match=f"{name}: (rows must be|must ascend)"):
        check_origins(tmp_path, fields, 4)


def test_origins_are_looked_at_where_a_shard_is_verified(tmp_path: Path) -> None:
    build_snapshot([passage(0)], np.eye(1, dtype=np.float32), tmp_path / "s", 1, "Flat", "e", "f", fields=())
    snapshot, content = Snapshot.open(tmp_path / "s"), tmp_path / "s" / "shard-0000"
    snapshot.verify(0)
    rows = np.load(content / PLACES)
    rows["document"] = 99
    np.save(content / PLACES, rows)
    with pytest.raises(InvalidSnapshot, match=rf"{PLACES}: rows must be 0\.\.0, found 99"):
        snapshot._check_content(content, snapshot.shard(0))


def test_a_lasting_id_of_no_passage_is_told(tmp_path: Path) -> None:
    write_passages(tmp_path, [passage(0)], fields=())
    np.save(tmp_path / LASTING_POSITIONS, np.array([99], np.int32))
    with pytest.raises(InvalidSnapshot, match=rf"{LASTING_POSITIONS}: rows must be 0\.\.0, found 99"):
        PassageReader(tmp_path, 0, ()).find(passage(0).lasting_id)


def test_texts_that_are_cut_off_are_found(tmp_path: Path) -> None:
    write_passages(tmp_path, [passage(i, path="a/path") for i in range(4)], fields=())
    (tmp_path / STRINGS).write_bytes(b"a/")
    with pytest.raises(InvalidSnapshot, match=r"its 2 bytes do not belong to strings\.npy"):
        check_origins(tmp_path, (), 4)


def test_names_of_files() -> None:
    assert all(map(is_of_origins, origin_files(FIELDS)))
    assert not any(map(is_of_origins, ("vectors.npy", "field-1.npy", "../places.npy", "places.npy\n")))


# --- former formats, and the present one, which will be one


def test_a_snapshot_of_format_1_is_still_read(tmp_path: Path) -> None:
    """Built by the last version that wrote it: six passages of three documents, two shards."""
    with zipfile.ZipFile(FORMAT_1) as archive:
        archive.extractall(tmp_path)
    snapshot = Snapshot.open(tmp_path)
    assert (snapshot.manifest.format_version, snapshot.manifest.fields) == (1, None)
    assert snapshot.manifest.snapshot_id == "a451c1efcf5c3bea9c4fd98db5aa5596"
    shards = [Shard(tmp_path, number) for number in range(2)]  # verified
    found = [shard.fetch([shard.first_id, shard.first_id + 2]) for shard in shards]
    assert found[1] == [Passage(i, f"doc-{i // 2}", f"Title {i // 2}", f"text {i} of Zürich") for i in (3, 5)]
    assert shards[0].find(["0" * 32]) == []
    shards[0].self_test()


def test_a_snapshot_of_format_2_is_still_read(tmp_path: Path) -> None:
    """Built on 23 November 2026: as that of format 1, with origins, a field and words."""
    with zipfile.ZipFile(FORMAT_2) as archive:
        archive.extractall(tmp_path)
    snapshot = Snapshot.open(tmp_path)
    assert (snapshot.manifest.format_version, snapshot.manifest.fields) == (2, (Field("year", FieldType.INT),))
    assert snapshot.manifest.snapshot_id == "22975724ddd6dd92859520f839641b21"
    first, second = (Shard(tmp_path, number) for number in range(2))  # verified
    about = Origin(
        document_digest=text_digest("doc 2"), start=0, end=17, path="doc-2.md", page=5, fields={"year": 1994}
    )
    assert second.fetch([4]) == [Passage(4, "doc-2", "Title 2", "text 4 of Zürich", about)]
    assert first.find(["99799d96a8ac6681e43609afe50d3bf4"]) == first.fetch([1])
    *_, scores = second.words.adding_up("Zürich")
    found = second.words.candidates(scores, None, 3, np.empty(0, np.int64))
    assert found.ids.tolist() == [[3, 4, 5]]
    assert np.all(found.bm25 > 0)
    second.self_test()
