"""Documents, which have the same characters whatever file they came from."""

import unicodedata
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.core.documents import Document, canonical

LINES = st.lists(st.text("ab \u0301\u00e1\u00ad\x00\x85\x92\u1100\u1161", max_size=6), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("read", "kept"),
    [
        ("cafe\u0301", "caf\u00e9"),
        ("co\u00adop", "coop"),
        ("nul\x00 and \x7f", "nul and "),
        ("it\x92s \x93so\x94\x81", "it\u2019s \u201cso\u201d"),
        ("a\tb\nc\x1cd\x85e", "a\tb\nc\x1cd\x85e"),  # white space, at which words end
        ("\u0645\u06cc\u200c\u062e \u200d \u200e", "\u0645\u06cc\u200c\u062e \u200d \u200e"),  # they change words
        ("\ufb01 \u00b2", "\ufb01 \u00b2"),  # compatible, not the same
    ],
)
def test_the_same_text_has_the_same_characters(read: str, kept: str) -> None:
    assert canonical(Document("i\xad", read, read)) == Document("i\xad", kept, kept)


@given(LINES)
def test_sections_and_pages_begin_where_they_did(lines: list[str]) -> None:
    def begins(lines: list[str]) -> list[int]:
        return [0, *accumulate(len(line) + 1 for line in lines[:-1])]

    def document(lines: list[str]) -> Document:
        sections = tuple(zip(begins(lines), lines, strict=True))
        return Document("id", "title", "\n".join(lines), sections=sections, pages=tuple(begins(lines)))

    found = canonical(document(lines))
    assert found == document([canonical(Document("", "", line)).text for line in lines])
    assert found.text == canonical(Document("", "", "\n".join(lines))).text
    assert unicodedata.is_normalized("NFC", found.text)
    assert canonical(found) == found


def test_names_of_sections_too_where_the_text_is_canonical() -> None:
    read, kept = (Document("id", "title", "text", sections=((0, name),)) for name in ("e\u0301", "\u00e9"))
    assert canonical(read) == kept


def test_a_passage_stays_as_it_is() -> None:
    passage = Document("id", "e\u0301", "e\u0301\xad", is_passage=True)
    assert canonical(passage) is passage
