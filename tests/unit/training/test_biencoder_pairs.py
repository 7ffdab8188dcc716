"""Questions with their passages: what BM25 finds, judged by whether it holds an answer."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_training as tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.core import tokens
from openbook.core.types import Passage
from openbook.corpus.questions import Question
from openbook.errors import InvalidDocuments
from openbook.index.building.build import build_snapshot
from openbook.training.bm25 import Bm25
from openbook.training.data import Example
from openbook.training.pairs import QUESTIONS_AT_ONCE, Pair, mined, pairs_digest, pool

FACTS = [
    ("Bell", "alexander graham bell invented the telephone"),
    ("Telephone", "the telephone is a telephone"),
    ("Curie", "marie curie was born in warsaw"),
    ("Curie again", "marie curie was born"),
    ("Moon", "the moon of the earth"),
]


def bm25(folder: Path, facts: list[tuple[str, str]]) -> Bm25:
    passages = [Passage(i, f"d{i}", title, text) for i, (title, text) in enumerate(facts)]
    build_snapshot(passages, tiny.vectors(len(facts)), folder / "snapshot", 1, "Flat", "tiny", tiny.SPACE)
    return Bm25(folder / "snapshot")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Bm25:
    return bm25(tmp_path_factory.mktemp("facts"), FACTS)


@pytest.fixture(scope="module")
def random_texts(tmp_path_factory: pytest.TempPathFactory) -> Bm25:
    return bm25(tmp_path_factory.mktemp("random"), [("", text) for text in tiny.texts(40, 5)])


def asked(text: str, *answers: str, **fields: str) -> Example:
    return Example(text, answers[0] if answers else "", Question("q", text, answers, **fields))


def test_the_positive_is_the_best_that_answers_and_negatives_are_the_best_that_do_not(facts: Bm25) -> None:
    (pair,) = mined([asked("who invented the telephone", "Graham Bell")], facts, 5, 3)
    assert pair.positive.title == "Bell"
    assert [passage.title for passage in pair.negatives] == ["Telephone"]  # the others share no word that counts


def test_a_context_of_its_own_is_the_positive_and_no_negative(facts: Bm25) -> None:
    example = asked("where was marie curie born", "paris", title="A title", context=FACTS[2][1])
    (pair,) = mined([example], facts, 5, 5)
    assert (pair.positive.title, pair.positive.text) == ("A title", FACTS[2][1])
    assert [passage.title for passage in pair.negatives] == ["Curie again"]


def test_regular_expressions_are_answers(facts: Bm25) -> None:
    (pair,) = mined([asked("where was marie curie born", answer_regex="w[a-z]rsaw")], facts, 5, 1)
    assert (pair.positive.title, pair.negatives[0].title) == ("Curie", "Curie again")


def test_questions_that_nothing_answers_are_left_out(facts: Bm25, caplog: pytest.LogCaptureFixture) -> None:
    examples = [asked("who invented the telephone", "edison"), asked("what is the moon of", "earth")]
    (pair,) = mined(examples, facts, 5, 1)
    assert pair.example is examples[1]
    assert "1 of 2 questions are left out" in caplog.text
    with pytest.raises(InvalidDocuments, match="none of 1 questions has a context, or an answer in the best 5"):
        mined(examples[:1], facts, 5, 1)


def test_of_many_questions_none_is_lost(facts: Bm25) -> None:
    assert len(mined([asked("where was marie curie born", "warsaw")] * (QUESTIONS_AT_ONCE + 1), facts, 5, 0)) == 65


def test_no_negatives_where_none_are_wanted_or_none_are_within_the_depth(facts: Bm25) -> None:
    example = asked("where was marie curie born", "warsaw")
    assert mined([example], facts, 5, 0)[0].negatives == ()
    assert mined([example], facts, 1, 9)[0].negatives == ()


words = st.sampled_from(tiny.WORDS[:8])
questions = st.builds(
    lambda text, answer: Example(" ".join(text), answer, Question("q", " ".join(text), (answer,))),
    st.lists(words, min_size=1, max_size=4),
    words,
)


@settings(max_examples=40)
@given(st.lists(questions, min_size=1, max_size=5), st.integers(1, 40), st.integers(0, 4))
def test_pairs_of_random_questions(random_texts: Bm25, examples: list[Example], depth: int, n: int) -> None:
    expected = []
    for example in examples:
        found = [p for p in random_texts.find([example], None, depth).passages[0] if p.id >= 0]
        right = [p for p in found if example.target in p.text.split()]
        if right:
            expected.append(Pair(example, right[0], tuple(p for p in found if p not in right)[:n]))
    if not expected:
        with pytest.raises(InvalidDocuments):
            mined(examples, random_texts, depth, n)
        return
    pairs = mined(examples, random_texts, depth, n)
    assert pairs == expected

    passages, left_out = pool(pairs, tiny.passages(3))
    assert passages[: len(pairs)] == [pair.positive for pair in pairs]
    assert len(passages) == sum(1 + len(pair.negatives) for pair in pairs) + 3
    for i, pair in enumerate(pairs):
        answers = [pair.example.target in passage.text.split() for passage in passages]
        np.testing.assert_array_equal(left_out[i], [answer and j != i for j, answer in enumerate(answers)])


def test_answers_are_taken_apart_once_for_all_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are: more than are kept of texts that were taken apart."""
    n_times, taken_apart = Counter[str](), tokens.tokens

    def counted(text: str) -> Iterator[str]:
        n_times[text] += 1
        return taken_apart(text)

    monkeypatch.setattr(tokens, "tokens", counted)
    answers = [[f"alias {number} of {i}" for number in range(600)] for i in range(2)]
    pairs = [Pair(asked("who", *names), Passage(i, "", "", f"{i}: {names[-1]}"), ()) for i, names in enumerate(answers)]
    _, left_out = pool(pairs, [Passage(9, "", "", "so alias 7 of 1")])
    assert left_out.tolist() == [[False, False, False], [False, False, True]]
    assert len(n_times) == 2 * 600 + 3
    assert set(n_times.values()) == {1}


@pytest.mark.parametrize(
    "change",
    [
        lambda pairs: pairs[::-1],
        lambda pairs: pairs[:1],
        lambda pairs: [pairs[0], Pair(pairs[1].example, pairs[1].positive, pairs[1].negatives[:0])],
        lambda pairs: [pairs[0], Pair(pairs[1].example, pairs[0].positive, pairs[1].negatives)],
        lambda pairs: [pairs[0], replace(pairs[1], positive=replace(pairs[1].positive, title="other"))],
    ],
)
def test_the_digest_tells_pairs_apart(facts: Bm25, change: Callable[[list[Pair]], list[Pair]]) -> None:
    examples = [asked("what is the moon of", "earth"), asked("where was marie curie born", "warsaw")]
    pairs = mined(examples, facts, 5, 1)
    assert pairs[1].negatives
    assert pairs_digest(pairs) == pairs_digest(mined(examples, facts, 5, 1)) != pairs_digest(change(pairs))
