"""Passages for a run: exact search in memory, BM25, the question's own passage, none."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_training as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.config import IndexClientSettings
from openbook.core.topk import canonical_scores, top_k
from openbook.core.types import NO_HIT, Float32, Passage
from openbook.corpus.questions import Question
from openbook.errors import DeadlineExceeded, Overloaded, ShardUnavailable, SnapshotMismatch
from openbook.index.building.build import build_snapshot
from openbook.index.client import opening
from openbook.training.bm25 import Bm25
from openbook.training.data import Example
from openbook.training.opening import open_retriever
from openbook.training.retrieval import (
    EMPTY,
    Found,
    Given,
    LiveIndex,
    MemoryIndex,
    Nothing,
    SnapshotTexts,
    texts_by,
)
from openbook.training.settings import RetrieverSettings

CPU = torch.device("cpu")


def built(out: Path, vectors: Float32, n_shards: int = 1) -> Path:
    build_snapshot(tiny.passages(len(vectors)), vectors, out, n_shards, "Flat", "tiny", tiny.SPACE)
    return out


def asked(n: int) -> list[Example]:
    return [Example(f"question {i}", "", Question(str(i), f"question {i}")) for i in range(n)]


def exactly(queries: Float32, vectors: Float32, k: int) -> tuple[Any, Any]:
    scores = np.stack([canonical_scores(query, vectors) for query in queries])
    return top_k(np.tile(np.arange(len(vectors)), (len(queries), 1)), scores, k)


def check(found: Found, queries: Float32, vectors: Float32, k: int) -> None:
    ids, scores = exactly(queries, vectors, k)
    assert found.ids.tolist() == ids.tolist()
    assert found.scores.tobytes() == scores.tobytes()
    assert [found.ids.dtype, found.scores.dtype] == [np.int64, np.float32]
    real, passages = ids != NO_HIT, tiny.passages(len(vectors))
    assert found.vectors is not None
    assert found.vectors.dtype == np.float32
    assert found.vectors[real].tobytes() == vectors[ids[real]].tobytes()
    assert not found.vectors[~real].any()
    wanted = [[passages[i] if i != NO_HIT else EMPTY for i in row] for row in ids.tolist()]
    assert found.passages == wanted


@pytest.mark.parametrize("n_shards", [1, 3])
@pytest.mark.parametrize("k", [1, 5, 40, 60])
def test_memory_gives_the_best_by_score_and_id_to_the_bit(tmp_path: Path, n_shards: int, k: int) -> None:
    vectors, queries = tiny.vectors(40), tiny.vectors(6, seed=2) * 20
    index = MemoryIndex(built(tmp_path / "s", vectors, n_shards), CPU)
    check(index.find(asked(6), queries, k), queries, vectors, k)
    assert index.identity["space"] == tiny.SPACE
    index.close()


@settings(max_examples=20)
@given(st.integers(0, 1000), st.integers(1, 12), st.sampled_from([1.0, 1e-3, 1e6]))
def test_memory_loses_no_passage_to_ties_or_rounding(
    tmp_path_factory: pytest.TempPathFactory, seed: int, k: int, size: float
) -> None:
    """Vectors of few values, many of them equal, and some that differ by a bit or so."""
    random = np.random.default_rng(seed)
    vectors = random.integers(-1, 2, (60, 4)).astype(np.float32) / np.float32(3) * np.float32(size)
    vectors[::5] *= np.float32(1 + 1e-7)
    queries = random.integers(-2, 3, (3, 4)).astype(np.float32) / np.float32(7)
    index = MemoryIndex(built(tmp_path_factory.mktemp("ties") / "s", vectors), CPU)
    check(index.find(asked(3), queries, k), queries, vectors, k)


def test_the_texts_of_all_shards(tmp_path: Path) -> None:
    texts = SnapshotTexts(built(tmp_path / "s", tiny.vectors(11), n_shards=3))
    assert [texts[i] for i in range(len(texts))] == tiny.passages(11)
    assert texts[NO_HIT] == EMPTY


def test_another_space_is_refused(tmp_path: Path) -> None:
    snapshot = built(tmp_path / "s", tiny.vectors(5))
    dense = RetrieverSettings(snapshot=snapshot)
    open_retriever(dense, tiny.asks_for(), CPU).close()
    other, longer = tiny.asks_for("other"), tiny.asks_for(dimension=99)
    with pytest.raises(SnapshotMismatch, match=r"tiny asks for .* by encoder other, but snapshot .* encoder wikipedia"):
        open_retriever(dense, other, CPU)
    with pytest.raises(SnapshotMismatch, match=r"tiny asks for passages of dimension 99 by encoder wikipedia, but"):
        open_retriever(dense, longer, CPU)
    open_retriever(RetrieverSettings(kind="bm25", snapshot=snapshot), other, CPU).close()


def test_the_questions_own_passage_or_none() -> None:
    question = Question("q", "who?", title="T", context="C")
    for kind, passage in (("given", Passage(0, "q", "T", "C")), ("none", EMPTY)):
        retriever = open_retriever(RetrieverSettings(kind=kind), None, CPU)
        assert isinstance(retriever, Given if kind == "given" else Nothing)
        found = retriever.find([Example("who?", "I", question)] * 2, None, k=7)
        assert found.passages == [[passage]] * 2
        assert found.scores.tolist() == [[0.0]] * 2
        assert (found.ids != NO_HIT).all()
        assert found.vectors is None
        assert retriever.identity == {}


TEXTS = ["cat dog bird", "the cat and the dog", "a bird", "cat cat cat fish", "fish", "dog fish cat"]


@pytest.fixture
def bm25(tmp_path: Path) -> Bm25:
    passages = [Passage(i, "", "", text) for i, text in enumerate(TEXTS)]
    build_snapshot(passages, tiny.vectors(len(TEXTS)), tmp_path / "s", 2, "Flat", "tiny", tiny.SPACE)
    return Bm25(tmp_path / "s")


def by_hand(question: str) -> list[float]:
    """Lucene's BM25 with k1 = 1.5 and b = 0.75, over the words that are not stop words."""
    documents = [[word for word in text.split() if word not in ("the", "and", "a")] for text in TEXTS]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for words in documents:
        total = 0.0
        for word in question.split():
            n = sum(word in each for each in documents)
            idf = math.log(1 + (len(documents) - n + 0.5) / (n + 0.5))
            tf = words.count(word)
            total += idf * tf / (tf + 1.5 * (1 - 0.75 + 0.75 * len(words) / mean))
        scores.append(total)
    return scores


@pytest.mark.parametrize("question", ["cat", "fish dog", "bird bird cat", "Cat, the fish?"])
@pytest.mark.parametrize("k", [1, 3, 6, 9])
def test_bm25_ranks_as_the_formula_says(bm25: Bm25, question: str, k: int) -> None:
    scores = by_hand(question.lower().replace(",", "").replace("?", "").replace("the ", ""))
    order = sorted((i for i, score in enumerate(scores) if score > 0), key=lambda i: (-round(scores[i], 5), i))[:k]
    found = bm25.find([Example(question, "", Question("", question))], None, k)
    assert found.ids.tolist() == [order + [NO_HIT] * (k - len(order))]
    assert found.scores[0, : len(order)] == pytest.approx([scores[i] for i in order], rel=1e-5)
    assert np.isneginf(found.scores[0, len(order) :]).all()
    assert [passage.text for passage in found.passages[0][: len(order)]] == [TEXTS[i] for i in order]
    assert found.passages[0][len(order) :] == [EMPTY] * (k - len(order))
    assert found.vectors is None


def test_a_question_without_a_word_of_the_corpus_is_read_with_the_first_passage(bm25: Bm25) -> None:
    """The generator has to read something, and a prior over nothing would not be a number."""
    questions = ["zebra", "the a", "", "cat"]
    found = bm25.find([Example(text, "", Question("", text)) for text in questions], None, 3)
    assert found.ids[:3].tolist() == [[0, NO_HIT, NO_HIT]] * 3
    assert found.scores[:3].tolist() == [[0.0, -np.inf, -np.inf]] * 3
    assert (found.ids[3] != NO_HIT).all()


def test_what_regular_expressions_are_matched_in(bm25: Bm25) -> None:
    search = texts_by(lambda examples: bm25.find(examples, None, 2))
    assert search(["bird", "zebra"]) == [["a bird", "cat dog bird"], ["cat dog bird", ""]]


@pytest.mark.parametrize("problem", [ShardUnavailable, DeadlineExceeded, Overloaded])
def test_a_tier_that_is_gone_late_or_busy_is_asked_again(problem: type[Exception], monkeypatch: Any) -> None:
    class Opened:
        snapshot_id, encoder_fingerprint = "s", tiny.SPACE

        async def close(self) -> None:
            pass

    problems = [problem("not now")]

    async def open_index(*_: Any) -> Opened:
        if problems:
            raise problems.pop()
        return Opened()

    monkeypatch.setattr(opening, "open_index", open_index)
    index = LiveIndex(IndexClientSettings(addresses=("a:1",)), 60, tiny.asks_for())
    index.close()
    assert index.identity == {"snapshot": "s", "space": tiny.SPACE}


def test_a_tier_that_does_not_close_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    class Opened:
        snapshot_id, encoder_fingerprint = "s", tiny.SPACE

        async def close(self) -> None:
            raise OSError("gone")

    async def open_index(*_: Any) -> Opened:
        return Opened()

    monkeypatch.setattr(opening, "open_index", open_index)
    index = LiveIndex(IndexClientSettings(addresses=("a:1",)), 60, tiny.asks_for())
    with pytest.raises(OSError, match="gone"):
        index.close()
    assert not index._thread.is_alive()
