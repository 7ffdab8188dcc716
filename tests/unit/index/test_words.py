"""The index of words, made in little memory, is what bm25s makes of all words at once."""

import tracemalloc
from pathlib import Path
from typing import Any
from unicodedata import normalize

import bm25s
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.core.types import Passage
from openbook.errors import InvalidConfig
from openbook.index.building.words import RUN, _of_words, write_bm25
from openbook.index.disk.bm25 import FILES, words

WORDS = [*["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "the", "of", "42", "wörd"], "x" * 300]
texts = st.lists(st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join), min_size=1, max_size=40)


def passages(contents: list[str]) -> list[Passage]:
    return [Passage(i, f"d{i}", ("Alpha", "")[i % 2], text) for i, text in enumerate(contents)]


def by_bm25s(of: list[str]) -> Any:
    return bm25s.tokenize(of, stopwords="en", return_ids=False, show_progress=False)


SEEN = st.characters(exclude_categories=["Cs", "Cf"])


@given(
    text=st.text(SEEN) | st.lists(st.sampled_from([*WORDS, "İstanbul", "The", "don't", "I", "été", "_"])).map(" ".join)
)
def test_words_are_those_of_bm25s(text: str) -> None:
    assert [words(text)] == by_bm25s([normalize("NFC", text.lower())])


def test_accents_may_be_signs_of_their_own() -> None:
    for text in ("Café Ångström", "Việt Nam", "한국어 문서"):
        assert words(normalize("NFD", text)) == words(text) == text.lower().split()


def test_what_nobody_sees_parts_no_words_but_where_words_are_told_apart_by_it() -> None:
    assert words("get_\u200bitem re\u2060ad na\u00adme\u200ds \ufeffalpha") == ["get_item", "read", "names", "alpha"]
    assert words("\u0645\u06cc\u200c\u062e\u0648\u0627") == words("\u0645\u06cc\u062e\u0648\u0627")
    assert words("\u0e2a\u0e27\u0e22\u200b\u0e21\u0e32\u0e01") == ["\u0e2a\u0e27\u0e22", "\u0e21\u0e32\u0e01"]


@given(contents=texts, at_once=st.integers(1, 60), texts_at_once=st.integers(1, 7))
def test_bits_are_those_of_bm25s_however_little_memory(
    contents: list[str], at_once: int, texts_at_once: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("words")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("openbook.index.building.words.TEXTS_AT_ONCE", texts_at_once)
        write_bm25(folder / "parts", passages(contents), "s", at_once=at_once)
    write_bm25(folder / "whole", passages(contents), "s")
    for name in (*FILES, "about.json"):
        assert (folder / "parts/bm25" / name).read_bytes() == (folder / "whole/bm25" / name).read_bytes(), name
    tokens = by_bm25s([f"{passage.title}. {passage.text}" for passage in passages(contents)])
    assert tokens[0][0] == "alpha"
    theirs = bm25s.BM25()
    theirs.index(tokens, show_progress=False)
    ours = bm25s.BM25.load(folder / "parts/bm25")
    assert set(ours.vocab_dict) == set(theirs.vocab_dict)
    for word in set(theirs.vocab_dict) - {""}:
        expected = theirs.get_scores([word])
        np.testing.assert_array_equal(ours.get_scores([word]).view(np.int32), expected.view(np.int32))


def test_a_few_words_of_a_run_need_no_memory_for_all(tmp_path: Path) -> None:
    run = np.zeros(200_000, RUN)
    run["word"] = np.arange(len(run))
    np.save(tmp_path / "run.npy", run)
    tracemalloc.start()
    try:
        found = _of_words(tmp_path / "run.npy", 7, 9)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found["word"].tolist() == [7, 8]
    assert peak < run.nbytes / 10


def test_passages_without_a_word_are_found_by_none(tmp_path: Path) -> None:
    write_bm25(tmp_path, [Passage(0, "d", "", "the of"), Passage(1, "d", "", "")], "s")
    assert not bm25s.BM25.load(tmp_path / "bm25").scores["data"].size
    with pytest.raises(InvalidConfig, match="exists"):
        write_bm25(tmp_path, [], "s")
