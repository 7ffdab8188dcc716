"""Fields that users declare, and the places of passages in their documents."""

import datetime
from dataclasses import fields
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.core.documents import Document
from openbook.core.fingerprint import text_digest
from openbook.core.origin import Field, FieldType, Origin, check_fields, lasting_id, position_of
from openbook.core.passages import joined, split
from openbook.core.splitting import Splitting
from openbook.errors import InvalidConfig, UnknownPassage


@pytest.mark.parametrize(
    ("type", "given", "value"),
    [
        ("string", "Zürich", "Zürich"),
        ("string", 7, "7"),
        ("string", datetime.date(1998, 5, 17), "1998-05-17"),
        ("int", " 42 ", 42),
        ("int", 42.0, 42),
        ("int", Decimal(42), 42),
        ("float", "1e3", 1000.0),
        ("float", Decimal("1.5"), 1.5),
        ("bool", "Yes", True),
        ("bool", 0, False),
        ("date", "1998-05", "1998-05"),
        ("date", 1998, "1998"),
        ("date", "2024-02-29 24:00Z", "2024-02-29 24:00Z"),
        ("date", datetime.datetime(1998, 5, 17, 8, 30), "1998-05-17T08:30:00"),
        ("int", "", None),
        ("int", None, None),
    ],
)
def test_values_of_tables_and_records_become_those_of_the_field(type: str, given: object, value: object) -> None:
    found = Field("x", FieldType(type)).value(given)
    assert found == value
    assert found.__class__ is value.__class__


@pytest.mark.parametrize(
    ("type", "given"),
    [
        ("string", True),
        ("string", ["a"]),
        ("int", "1.5"),
        ("int", 1.5),
        ("int", True),
        ("int", float("inf")),
        ("int", 2**63),
        ("float", "nan"),
        ("float", []),
        ("bool", "maybe"),
        ("date", "17 May 1998"),
        ("date", "１９９８"),
        ("date", "2024-13"),
        ("date", "2023-02-29"),
        ("date", "0000-00-00"),
        ("date", "2024-02-29T08:61"),
        ("date", "2024-02-29T25:00"),
        ("date", "2024-02T08:30"),
    ],
)
def test_a_value_of_another_type_is_refused(type: str, given: object) -> None:
    with pytest.raises(ValueError, match=f"x must be {type}, got "):
        Field("x", FieldType(type)).value(given)


def test_a_value_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="x must have at most 4096 characters, got 4097"):
        Field("x", FieldType.STRING).value("a" * 4097)


def test_fields_are_declared_by_name_and_type() -> None:
    assert Field.parse("Year:int") == Field("year", FieldType.INT)
    assert Field.parse("author") == Field("author", FieldType.STRING)
    assert Field.parse("dc:creator:string") == Field("dc:creator", FieldType.STRING)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ("year:number", "a type of string, int, float, bool, date, got 'year:number'"),
        (":int", "name must have 1..100 printable characters, got ''"),
        ("x" * 101, "name must have 1..100"),
        ("url:string", "url, language, date, section are read anyway"),
    ],
)
def test_what_cannot_be_declared(declared: str, message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        Field.parse(declared)


def test_each_field_once_and_not_too_many() -> None:
    with pytest.raises(InvalidConfig, match="declared once, got a more often"):
        check_fields((Field("a", FieldType.INT), Field("a", FieldType.STRING)))
    with pytest.raises(InvalidConfig, match="at most 100, got 101"):
        check_fields(tuple(Field(str(i), FieldType.INT) for i in range(101)))


@given(st.text(), st.integers(1, 4), st.booleans())
def test_every_span_is_its_text(text: str, n_words: int, is_passage: bool) -> None:
    document = Document("id", "title", text, is_passage=is_passage)
    whole = joined(document)
    pieces = list(split(document, Splitting(n_words)))
    assert all(whole[origin.start : origin.end] == piece for piece, origin in pieces)
    assert {origin.document_digest for _, origin in pieces} <= {text_digest(whole)}
    assert " ".join(piece for piece, _ in pieces) == whole


BOTH = sorted({each.name for each in fields(Document)} & {each.name for each in fields(Origin)})
OF_TYPE: dict[str, Any] = dict.fromkeys(BOTH, ...)


@given(st.builds(Document, **OF_TYPE, text=st.just("one two")))
def test_a_passage_keeps_all_that_its_document_states(document: Document) -> None:
    for _, origin in split(document, Splitting(1)):
        assert [getattr(origin, name) for name in BOTH] == [getattr(document, name) for name in BOTH]


LINES = st.lists(st.text("ab \t", max_size=8), min_size=1, max_size=8)


@given(LINES, st.integers(1, 3))
def test_a_passage_has_the_section_and_the_page_in_which_it_begins(lines: list[str], n_words: int) -> None:
    """Every line is one of both; who has no words is passed over."""
    starts = [sum(len(line) + 1 for line in lines[:i]) for i in range(len(lines))]
    sections = tuple((start, f"{i}") for i, start in enumerate(starts))
    document = Document("id", "title", "\n".join(lines), sections=sections, pages=tuple(starts))
    line_of = [i for i, line in enumerate(lines) for _ in line.split()]
    expected = [line_of[i] for i in range(0, len(line_of), n_words)]
    found = [(int(origin.section), (origin.page or 0) - 1) for _, origin in split(document, Splitting(n_words))]
    assert found == [(i, i) for i in expected]


def test_a_lasting_id_is_what_it_was() -> None:
    assert lasting_id("d", Origin(document_digest="", start=1, end=4), "one") == "e81f504f49520de2016ff3aabd25b35c"


def test_a_position_has_64_bits() -> None:
    assert position_of(str(2**63 - 1)) == 2**63 - 1
    with pytest.raises(UnknownPassage):
        position_of(str(2**63))
