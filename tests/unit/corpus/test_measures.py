import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.corpus import measures
from openbook.corpus.measures import TokenCounts, sentence_finder
from openbook.errors import InvalidConfig


@pytest.mark.parametrize("language", ["de", "de-AT", "de_CH", "DE"])
def test_sentences_end_where_the_language_says_in_characters(language: str) -> None:
    text = "😀 Herr Dr. Müller kam z.B. am 3. Mai aus Köln. Grüße!\n\nNeue Zeile"
    ends = sentence_finder()(text, language)
    starts = [0, *ends]
    assert [text[a:b].strip() for a, b in zip(starts, ends, strict=False) if text[a:b].strip()] == [
        "😀 Herr Dr. Müller kam z.B. am 3. Mai aus Köln.",
        "Grüße!",
        "Neue Zeile",
    ]


@given(st.text("aé😀日.。! \n\t\u2028", max_size=60), st.sampled_from(["", "en", "ja", "no-such"]))
def test_ends_ascend_up_to_that_of_the_text_however_little_is_looked_at_together(text: str, language: str) -> None:
    for stretch in (3, 8192):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measures, "STRETCH", stretch)
            ends = sentence_finder()(text, language)
        assert ends == sorted(set(ends))
        assert ends[-1:] == ([len(text)] if text else [])


def test_a_long_text_has_the_sentences_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The road goes on. It is long! 東京です。" * 20
    ends = sentence_finder()(text, "en")
    assert len(ends) > 40
    monkeypatch.setattr(measures, "STRETCH", 100)
    assert sentence_finder()(text, "en") == ends


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(InvalidConfig, match=r"pip install 'openbook\[corpus\]'"):
        sentence_finder()


def test_words_are_counted_once_while_they_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "MAX_KNOWN", 2)
    asked: list[list[str]] = []

    def count(words: Sequence[str]) -> list[int]:
        asked.append(list(words))
        return [len(word) for word in words]

    counts = TokenCounts(count)
    assert counts(["a", "bb", "a", "c" * 40]) == [1, 2, 1, 40]
    assert counts(["bb", "c" * 40, "dd"]) == [2, 40, 2]
    assert counts(["a"]) == [1]
    assert asked == [["a", "bb", "c" * 40], ["c" * 40, "dd"], ["a"]]
