import unicodedata
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.core.spelling import as_spelled, spans
from openbook.core.types import Passage

TEXT = st.text("aAbBéÉİß1.,- ", max_size=30)


def passage(text: str, title: str = "") -> Passage:
    return Passage(0, "", title, text)


def plain(text: str) -> str:
    """Without capitals, accents and spaces."""
    decomposed = unicodedata.normalize("NFD", text.lower())
    return "".join(c for c in decomposed if not c.isspace() and not unicodedata.combining(c))


@pytest.mark.parametrize(
    ("text", "given", "spelled"),
    [
        ("alexander graham bell", "It was Alexander Graham Bell.", "Alexander Graham Bell"),
        ("3, 000", "some 3,000 people", "3,000"),
        ("pre - columbian", "the pre-Columbian era", "pre-Columbian"),
        ("pele", "by Pele\u0301, who", "Pele\u0301"),
        ("pele", "by Pelé, who", "Pelé"),
        ("man", "a German, a Man", "Man"),
        ("man", "many Germans", "man"),
        ("us / canada", "(US/Canada)", "US/Canada"),
        ("new york", "New\n    York", "New York"),
        ("서가", "그 서각, 그 서가", "서가"),
        ("서가", "그 서각", "서가"),
        ("सत", "सत्य है", "सत"),
        ("שלו", "שָׁלוֹם", "שלו"),
        ("pele", "Pele\u0301s", "pele"),
        ("love", "I \u2764\ufe0fLove it", "Love"),
        ("a", "", "a"),
        ("", "A text.", ""),
        (" ", "A text.", " "),
    ],
)
def test_answers_are_spelled_as_in_the_passage(text: str, given: str, spelled: str) -> None:
    assert as_spelled(text, [passage(given)]) == spelled


def test_the_first_passage_that_has_it_counts_and_its_text_before_its_title() -> None:
    passages = [passage("nothing", "none"), passage("IT IS", "It is"), passage("it is")]
    assert as_spelled("it is", passages) == "IT IS"
    assert as_spelled("none", passages) == "none"
    assert as_spelled("it", [passage("x", "IT"), passage("It")]) == "IT"


@given(TEXT, TEXT, TEXT)
def test_only_the_spelling_changes(before: str, text: str, after: str) -> None:
    spelled = as_spelled(plain(text), [passage(f"{before} {text} {after}")])
    assert plain(spelled) == plain(text)
    if plain(text):
        assert spelled in " ".join(f"{before} {text} {after}".split())


@pytest.mark.parametrize(
    ("beginnings", "spelled", "parts"),
    [
        (["alex", "alexander", "alexander bell", "alexander bell"], "Alexander Bell", ["Alex", "ander", "Bell", ""]),
        (["3", "3,", "3, 000"], "3,000", ["3", ",", "000"]),
        (["pe", "pele"], "Pele\u0301", ["Pe", "le\u0301"]),
        (["", "é", "é!"], "é!", ["", "é", "!"]),
        (["one", "one  two"], "One\ntwo", ["One", "two"]),
        (["yes", "yes sir"], "Yes", ["Yes", ""]),
    ],
)
def test_every_token_has_its_place_in_the_answer(beginnings: list[str], spelled: str, parts: list[str]) -> None:
    assert [spelled[start:end] for start, end in spans(beginnings, spelled)] == parts


@given(st.lists(TEXT, max_size=8))
def test_places_ascend_and_hold_every_letter_once(texts: list[str]) -> None:
    whole = "".join(texts)
    beginnings = ["".join(texts[: i + 1]) for i in range(len(texts))]
    found = spans(beginnings, whole)
    places = [0, *(place for span in found for place in span)]
    assert places == sorted(places)
    assert plain("".join(whole[start:end] for start, end in found)) == plain(whole)


def test_each_letter_of_a_growing_answer_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at, normalize = [], unicodedata.normalize

    def counted(form: Literal["NFD"], letter: str) -> str:
        looked_at.append(letter)
        return normalize(form, letter)

    monkeypatch.setattr(unicodedata, "normalize", counted)
    whole = "Élan " * 20
    found = spans([whole[: end + 1].strip().lower() for end in range(len(whole))], whole)
    assert found[-1][1] == len(whole.strip())
    assert len(looked_at) <= 2 * len(whole)  # of the answer as spelled, and of its tokens
