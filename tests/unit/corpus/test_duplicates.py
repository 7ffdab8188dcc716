"""Passages that repeat others: equal ones, nearly equal ones, and those that only have words in common."""

import numpy as np

from openbook.core.types import Passage
from openbook.corpus.duplicates import N_SHOWN, Duplicates, without

RNG = np.random.default_rng(0)
WORDS = [f"word{i}" for i in range(3000)]
TEXTS = [" ".join(RNG.choice(WORDS, 100)) for _ in range(30)]


def changed(text: str, n_words: int) -> str:
    words = text.split()
    for i in RNG.choice(len(words), n_words, replace=False):
        words[i] = "another"
    return " ".join(words)


def passages(*texts: str) -> list[Passage]:
    return [Passage(i, f"d{i}", "title", text) for i, text in enumerate(texts)]


def repeated(*texts: str) -> list[bool]:
    return [is_repeated for _, is_repeated in Duplicates().marked(passages(*texts))]


def test_equal_passages_repeat_the_first_and_others_do_not() -> None:
    under_test = Duplicates()
    texts = [*TEXTS, TEXTS[3], TEXTS[3].upper().replace(" ", "\n"), changed(TEXTS[4], 1), "short", "short", "shorter"]
    marked = [is_repeated for _, is_repeated in under_test.marked(passages(*texts))]
    assert marked == [False] * 30 + [True, True, True, False, True, False]
    found = under_test.found
    assert (found.n_read, found.n_equal, found.n_near) == (36, 3, 1)
    assert [(pair.document, pair.of) for pair in found.first] == [
        ("d30", "d3"),
        ("d31", "d3"),
        ("d32", "d4"),
        ("d34", "d33"),
    ]


def test_what_has_many_words_in_common_is_no_duplicate() -> None:
    backwards = " ".join(reversed(TEXTS[0].split()))
    assert repeated(TEXTS[0], backwards, changed(TEXTS[0], 12)) == [False] * 3
    others = [" ".join("another" if i % 17 == 9 else word for i, word in enumerate(text.split())) for text in TEXTS]
    assert not any(repeated(*TEXTS, *others))  # 6 words of 100, for which the index of hashes takes some for alike


def test_what_is_left_out_hides_nothing_behind_it() -> None:
    near = changed(TEXTS[0], 1)
    under_test = Duplicates()
    marked = under_test.marked(passages(TEXTS[0], near, near, TEXTS[1], TEXTS[1], near))
    assert [is_repeated for _, is_repeated in marked] == [False, True, True, False, True, True]
    assert [pair.of for pair in under_test.found.first] == ["d0", "d0", "d3", "d0"]


def test_what_stays_is_numbered_anew_and_only_the_first_are_shown() -> None:
    under_test = Duplicates()
    kept = list(without(under_test.marked(passages(*[TEXTS[0]] * 20, TEXTS[1]))))
    assert [(passage.id, passage.document_id) for passage in kept] == [(0, "d0"), (1, "d20")]
    assert len(under_test.found.first) == N_SHOWN
    assert under_test.found.n_equal == 19


def test_none_in_none_out() -> None:
    assert repeated() == []
    assert repeated("", "") == [False, True]
