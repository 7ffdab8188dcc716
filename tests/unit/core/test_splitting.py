"""Where passages begin and end, for any text and any setting."""

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.core.documents import Document
from openbook.core.origin import Origin
from openbook.core.passages import in_document, joined, split
from openbook.core.splitting import Splitting, word_begins
from openbook.core.types import Passage
from openbook.errors import InvalidConfig


def count_tokens(words: Sequence[str]) -> list[int]:
    """Two characters are a token; a combining accent is none."""
    return [-(-len(word.replace("\u0301", "")) // 2) for word in words]


def find_sentences(text: str, language: str) -> list[int]:
    assert language == "de"
    return [found.end() for found in re.finditer(r"\.\s*|\n\n", text)]


def document(lines: Sequence[str]) -> Document:
    """Each line a section."""
    starts = [sum(len(line) + 1 for line in lines[:i]) for i in range(len(lines))]
    sections = tuple((start, f"{i}") for i, start in enumerate(starts))
    return Document("id", "title", "\n".join(lines), language="de", sections=sections)


def passages(document: Document, splitting: Splitting) -> list[tuple[str, Origin]]:
    return list(split(document, splitting, count_tokens, find_sentences))


def size(text: str, splitting: Splitting) -> int:
    words = text.split()
    return len(words) if splitting.unit == "words" else sum(max(n, 1) for n in count_tokens(words))


SIZES = st.integers(1, 9)
SPLITTINGS = SIZES.flatmap(
    lambda size: st.builds(
        Splitting,
        st.just(size),
        st.sampled_from(["words", "tokens"]),
        st.sampled_from(["words", "sentences", "headings"]),
        st.integers(0, size - 1),
    )
)
TEXTS = st.lists(st.text("abé. \t日\u0301", max_size=30), min_size=1, max_size=5).map(document)


@given(TEXTS, SPLITTINGS)
def test_passages_are_what_their_spans_say_and_none_is_too_long_or_within_another(
    document: Document, splitting: Splitting
) -> None:
    whole, found = joined(document), passages(document, splitting)
    assert all(whole[origin.start : origin.end] == text and text for text, origin in found)
    assert all(size(text, splitting) <= splitting.size for text, _ in found)
    for (_, one), (_, other) in pairwise(found):
        assert one.start < other.start <= one.end + 1
        assert one.end < other.end
    assert "".join(whole.split()) == "".join(
        whole[max(origin.start, before) : origin.end].replace(" ", "")
        for before, (_, origin) in zip([0, *(origin.end for _, origin in found)], found, strict=False)
    )


@given(TEXTS, SPLITTINGS)
def test_a_passage_begins_again_with_no_more_than_the_overlap(document: Document, splitting: Splitting) -> None:
    whole, found = joined(document), passages(document, splitting)
    for (text, one), (_, other) in pairwise(found):
        again = whole[other.start : one.end]
        assert text.endswith(again)
        assert size(again, splitting) <= splitting.overlap
    if not splitting.overlap and splitting.unit == "words":
        assert " ".join(text for text, _ in found) == whole


@given(TEXTS, SIZES, st.integers(0, 8))
def test_at_words_all_of_the_overlap_comes_again(document: Document, size: int, overlap: int) -> None:
    found = [text.split() for text, _ in split(document, Splitting(size, overlap=min(overlap, size - 1)))]
    for one, other in pairwise(found):
        assert len(one) == size
        assert one[size - min(overlap, size - 1) :] == other[: min(overlap, size - 1)]


@given(TEXTS, SPLITTINGS)
def test_at_headings_no_passage_holds_text_of_two_sections(document: Document, splitting: Splitting) -> None:
    lines = [" ".join(line.split()) for line in document.text.split("\n")]
    found = passages(document, splitting)
    if splitting.at == "headings":
        assert all(text in lines[int(origin.section)] for text, origin in found)
        assert {int(origin.section) for _, origin in found} == {i for i, line in enumerate(lines) if line}


@given(st.lists(st.lists(st.just("w"), max_size=12), max_size=12), SIZES, st.integers(0, 8))
def test_a_sentence_that_fits_stays_whole(sentences: list[list[str]], size: int, overlap: int) -> None:
    """And what comes again are whole sentences, unless one that does not fit was cut."""
    words = [[f"{i}-{j}" for j in range(len(sentence))] + [f"{i}."] for i, sentence in enumerate(sentences)]
    text = " ".join(word for sentence in words for word in sentence)
    overlap = min(overlap, size - 1)
    splitting = Splitting(size, at="sentences", overlap=overlap)
    found = passages(Document("id", "title", text, language="de"), splitting)
    pieces = [text.split() for text, _ in found]
    for sentence in words:
        if len(sentence) <= size:
            assert any(" ".join(sentence) in " ".join(piece) for piece in pieces)
    ends = set(word_begins([" ".join(sentence) for sentence in words]))
    for (_, one), (_, other) in pairwise(found):
        if one.end + 1 in ends:
            assert other.start in ends


def test_sentences_and_their_overlap_by_example() -> None:
    text = "One two. Three four five. Six. Seven eight nine ten eleven twelve. End."
    found = passages(Document("id", "title", text, language="de"), Splitting(5, at="sentences", overlap=2))
    assert [text for text, _ in found] == [
        "One two. Three four five.",
        "Six.",
        "Seven eight nine ten eleven",
        "ten eleven twelve. End.",
    ]


@pytest.mark.parametrize(
    ("text", "size", "overlap", "expected"),
    [
        # with its overlap the last sentence would not fit
        ("a b c 1. a b c d 2. a b c d e 3.", 9, 5, ["a b c 1. a b c d 2.", "a b c d e 3."]),
        # nor does it without one
        ("a 1. 2. a b c d 3.", 4, 2, ["a 1. 2.", "2. a b c", "b c d 3."]),
        # headings have no full stop
        ("One two. A heading\nThree four five six.", 4, 0, ["One two. A heading", "Three four five six."]),
    ],
)
def test_sentences_that_do_not_fit_behind_an_overlap_and_headings(
    text: str, size: int, overlap: int, expected: list[str]
) -> None:
    sections = ((0, ""), (text.index("\n") + 1, "A heading")) if "\n" in text else ()
    whole = Document("id", "title", text, language="de", sections=sections)
    assert [text for text, _ in passages(whole, Splitting(size, at="sentences", overlap=overlap))] == expected


def test_a_text_without_spaces_is_cut_where_it_has_too_many_tokens_and_at_sentences_if_it_may() -> None:
    text = "一二三四五六七八九十." * 2 + "一二三四五."
    found = passages(Document("id", "title", text, language="de"), Splitting(9, "tokens", "sentences"))
    assert [text for text, _ in found] == ["一二三四五六七八九十.", "一二三四五六七八九十.一二三四五."]
    found = passages(Document("id", "title", text), Splitting(5, "tokens"))
    assert [len(text) for text, _ in found] == [8, 8, 8, 4]
    found = passages(Document("id", "title", text), Splitting(8, "tokens", overlap=4))
    assert [(origin.start, origin.end) for _, origin in found] == [(0, 16), (8, 24), (16, 28)]


def test_what_has_just_as_many_tokens_as_fit_is_not_cut() -> None:
    for text, size, expected in (("aa " + "b" * 18, 9, ["aa", "b" * 18]), ("a" * 40, 4, ["a" * 8] * 5)):
        found = passages(Document("id", "title", text), Splitting(size, "tokens"))
        assert [text for text, _ in found] == expected


def test_passages_around_another_are_found_with_an_overlap() -> None:
    document = Document("id", "title", " ".join(f"w{i}" for i in range(20)))
    found = [
        Passage(i, "id", "title", text, origin)
        for i, (text, origin) in enumerate(split(document, Splitting(6, overlap=4)))
    ]
    before, after = in_document(found, 3)
    assert [*before, found[3], *after] == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((100, 200), "measured in words or in tokens, got 100 words and 200 tokens"),
        ((0, None), "words per passage must be at least 1, got 0"),
        ((None, -1), "tokens per passage must be at least 1, got -1"),
        ((None, None, "pages"), "end at words, sentences, headings, got 'pages'"),
        ((None, 64, "words", 64), "less than the 64 tokens of a passage, got 64"),
        ((50, None, "words", -1), "at least 0 and less than the 50 words of a passage, got -1"),
    ],
)
def test_what_cannot_be_asked_for_is_named(given: tuple[int | None, int | None], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        Splitting.of(*given)


def test_the_paper_splits_at_a_hundred_words() -> None:
    assert Splitting.of(None, None) == Splitting() == Splitting(100, "words", "words", 0)
    with pytest.raises(ValueError, match="needs `count_tokens`"):
        list(split(Document("id", "title", "a"), Splitting(1, "tokens")))
