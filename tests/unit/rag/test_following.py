"""Retrieval that follows the answer, held to its formula: passages found again, exact marginals over their union."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.cache.memory import MemoryCache
from openbook.config import AnswerDefaults
from openbook.core.context import Context
from openbook.core.marginal import answer_log_posterior, log_prior, next_log_marginal, token_log_posterior
from openbook.core.types import (
    Coverage,
    Float32,
    Float64,
    Formulation,
    Generation,
    GenerationSettings,
    OwnPassage,
    PartSettings,
    Passage,
    ReplySettings,
    RetrievalSettings,
    Retrieved,
    RetrieverKind,
    Token,
)
from openbook.errors import InvalidRequest
from openbook.rag.answer import Answer, Retrieval
from openbook.rag.following import Found, followed
from openbook.rag.pipeline import Pipeline
from openbook.rag.ports import BegunByAnother
from openbook.testing import EchoGenerator, ExactIndex, HashEncoder, ManualClock

WORDS = ["", "alpha", "beta", "gamma", "delta", "epsilon"]  # token 0 ends an answer
PASSAGES = [
    Passage(i, f"d{i}", WORDS[1 + i % 5], " ".join(WORDS[1 + (i * j) % 5] for j in range(6))) for i in range(12)
]
ENCODER = HashEncoder(16)
VECTORS = ENCODER.encode_passages(PASSAGES)
TOKENS = ReplySettings(tokens=True)
ONCE = GenerationSettings(formulation=Formulation.TOKEN, n_beams=1, max_new_tokens=8)


def log_p(passage: Passage, begun: Sequence[int]) -> Float64:
    """(6,) what a passage makes of the next token."""
    values = np.random.default_rng([passage.id + 10, *begun]).standard_normal(len(WORDS)) * 2
    values[0] -= 2
    return np.asarray(values - np.logaddexp.reduce(values))


class TableGenerator(EchoGenerator):
    """Greedy RAG-Token over `log_p`, in parts if it is asked to."""

    fingerprint = generates_by = "table"

    async def generate(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> Generation:
        assert settings.follow == 0
        prior = log_prior(retrieved.scores)
        begun, n = (settings.begun, settings.n_more) if isinstance(settings, PartSettings) else ((), 99)
        ids, columns, end = list(begun), [], min(len(begun) + n, settings.max_new_tokens)
        while len(ids) < end and 0 not in ids:
            ids.append(int(next_log_marginal(prior, self._given(retrieved, ids)).argmax()))
        columns = [self._given(retrieved, ids[:t])[:, y] for t, y in enumerate(ids)]
        likelihood = np.stack(columns, -1)
        posterior, of_tokens = token_log_posterior(prior, likelihood), next_log_marginal(prior, likelihood)
        rows = zip(ids, of_tokens.tolist(), map(tuple, posterior.tolist()), strict=True)
        tokens = tuple(Token(f" {WORDS[y]}", *row, 0, 0) for y, *row in rows)
        of_answer = answer_log_posterior(posterior, np.ones(len(ids)))
        text = " ".join(WORDS[y] for y in ids if y)
        return Generation(text, tuple(ids), float(of_tokens.sum()), prior, of_answer, tokens, ended=0 in ids)

    def _given(self, retrieved: Retrieved, begun: Sequence[int]) -> Float64:
        return np.stack([log_p(passage, begun) for passage in retrieved.passages])

    async def stream(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> AsyncIterator[Token | Generation]:
        yield await self.generate(question, retrieved, settings, context)


def pipeline(index: ExactIndex | None = None) -> Pipeline:
    index = index or ExactIndex(PASSAGES, VECTORS)
    return Pipeline(ENCODER, index, index, TableGenerator(), MemoryCache(100), AnswerDefaults(), ManualClock())


def asked(question: str, settings: GenerationSettings, k: int = 2, own: Sequence[OwnPassage] = ()) -> Answer:
    retrieval = RetrievalSettings(k=k)
    return asyncio.run(pipeline().answer(question, retrieval, settings, Context(request_id="id"), TOKENS, own))


def test_an_answer_lacks_each_shard_that_any_of_its_looks_lacked() -> None:
    seen = iter([Coverage(50, 100, (1,)), Coverage(70, 100, (0, 2)), *[Coverage(100, 100)] * 9])

    async def look(text: str) -> Found:
        return Found(ENCODER.encode_questions([text])[0], tuple(PASSAGES[:2]), VECTORS[:2], "s", next(seen))

    async def generate(retrieved: Retrieved, settings: GenerationSettings) -> Generation:
        return await TableGenerator().generate("who", retrieved, settings, Context())

    read, generation = asyncio.run(followed("who", replace(ONCE, follow=1), look, generate))
    assert len(generation.tokens) > 1
    assert read.coverage == Coverage(50, 100, (0, 1, 2))


def by_formula(question: str, k: int, follow: int, n: int) -> tuple[list[int], list[float], list[dict[int, float]]]:
    """Tokens, log p(y_t|x,y_<t) and p(z|x,y_<=t), one token after the other."""
    ids: list[int] = []
    union: list[int] = []
    log_likelihood, posteriors = [], []
    query: Float32 = VECTORS[0]
    while len(ids) < n and 0 not in ids:
        if len(ids) % follow == 0:
            text = " ".join([question, *(WORDS[y] for y in ids)]).strip()
            query = ENCODER.encode_questions([text])[0]
            best = np.argsort(-(VECTORS.astype(np.float64) @ query.astype(np.float64)), kind="stable")[:k]
            union += [int(i) for i in best if i not in union]
        scores = VECTORS[union].astype(np.float64) @ query.astype(np.float64)
        prior = np.exp(scores - np.logaddexp.reduce(scores))
        joint = prior[:, None] * np.exp([log_p(PASSAGES[i], ids) for i in union])
        y = int(joint.sum(0).argmax())
        ids.append(y)
        log_likelihood.append(float(np.log(joint[:, y].sum())))
        posteriors.append(dict(zip(union, joint[:, y] / joint[:, y].sum(), strict=True)))
    return ids, log_likelihood, posteriors


questions = st.lists(st.sampled_from([*WORDS[1:], "who"]), min_size=1, max_size=4).map(" ".join)


@given(question=questions, k=st.integers(1, 4), follow=st.integers(1, 9), n=st.integers(1, 9))
def test_the_answer_is_that_of_the_formula(question: str, k: int, follow: int, n: int) -> None:
    answer = asked(question, replace(ONCE, follow=follow, max_new_tokens=n), k)
    ids, log_likelihood, posteriors = by_formula(question, k, follow, n)
    assert [token.text for token in answer.tokens] == [f" {WORDS[y]}" for y in ids]
    found = [evidence.passage.id for evidence in answer.evidence]
    assert set(found) == set(posteriors[-1])
    np.testing.assert_allclose([token.log_likelihood for token in answer.tokens], log_likelihood, atol=1e-6)
    assert answer.log_likelihood == pytest.approx(sum(log_likelihood), abs=1e-6)
    for token, expected in zip(answer.tokens, posteriors, strict=True):
        np.testing.assert_allclose(np.exp(token.log_posterior), [expected.get(i, 0.0) for i in found], atol=1e-6)
    whole = np.exp([evidence.log_posterior for evidence in answer.evidence])
    np.testing.assert_allclose(whole, np.mean([[p.get(i, 0.0) for i in found] for p in posteriors], 0), atol=1e-6)
    assert sum(whole) == pytest.approx(1)


@given(question=questions, k=st.integers(1, 4), more=st.integers(0, 3))
def test_looked_for_once_it_is_rag_token_to_the_bit(question: str, k: int, more: int) -> None:
    plain, once = asked(question, ONCE, k), asked(question, replace(ONCE, follow=8 + more), k)
    assert replace(once, timings={}) == replace(plain, timings={})


def test_a_caller_s_own_passages_are_read_from_the_first_token_on() -> None:
    own = [OwnPassage("alpha beta", "Alpha")]
    answer = asked("who alpha", replace(ONCE, follow=1), own=own)
    (place,) = [i for i, evidence in enumerate(answer.evidence) if evidence.passage.id == -1]
    assert len(answer.evidence) > 3
    assert all(np.isfinite(token.log_posterior[place]) for token in answer.tokens)


def test_where_all_that_could_be_found_is_left_out_a_caller_s_own_are_read() -> None:
    retrieval = RetrievalSettings(k=1, without=tuple(range(len(PASSAGES))))
    own = [OwnPassage("alpha beta", "Alpha")]
    answer = asyncio.run(pipeline().answer("who", retrieval, replace(ONCE, follow=1), Context(), TOKENS, own))
    assert [evidence.passage.id for evidence in answer.evidence] == [-1]


def test_a_stream_tells_the_passages_when_they_are_all_known() -> None:
    async def scenario() -> list[object]:
        settings = replace(ONCE, follow=2)
        parts = pipeline().stream("who beta", RetrievalSettings(k=2), settings, Context(request_id="id"), TOKENS)
        return [part async for part in parts]

    first, *tokens, last = asyncio.run(scenario())
    answer = asked("who beta", replace(ONCE, follow=2))
    assert isinstance(first, Retrieval)
    assert [each.passage.id for each in first.evidence] == [each.passage.id for each in answer.evidence]
    assert tuple(tokens) == answer.tokens
    assert isinstance(last, Answer)
    assert last.text == answer.text


def test_of_an_answer_too_long_to_be_read_the_last_words_are() -> None:
    read: list[str] = []

    class EightWords(HashEncoder):
        async def encode(self, questions: Sequence[str], context: Context) -> Float32:
            for question in questions:
                if len(question.split()) > 8:
                    raise InvalidRequest(f"question has {len(question.split())} words, and the encoder can read 8")
            read.extend(questions)
            return await super().encode(questions, context)

    class Endless(TableGenerator):
        def _given(self, retrieved: Retrieved, begun: Sequence[int]) -> Float64:
            given = super()._given(retrieved, begun)
            given[:, 0] = -99
            return given

    index, encoder, question = ExactIndex(PASSAGES, VECTORS), EightWords(16), "who is alpha beta"
    rag = Pipeline(encoder, index, index, Endless(), MemoryCache(100), AnswerDefaults(), ManualClock())
    settings = replace(ONCE, follow=2, max_new_tokens=10)
    answer = asyncio.run(rag.answer(question, RetrievalSettings(k=2), settings, Context(), TOKENS))
    words = answer.text.split()
    assert len(words) == 10
    looks = [words[:0], words[:2], words[:4], words[3:6], words[4:8]]
    assert read == [" ".join([question, *each]) for each in looks]


def test_of_a_long_answer_without_spaces_the_last_characters_are_read() -> None:
    answer, looks = "東京は日本の首都である", list[str]()

    async def look(text: str) -> Found:
        looks.append(text)
        if len(text) > len("who 首都である"):
            raise InvalidRequest("question is too long for the encoder")
        return Found(ENCODER.encode_questions([text])[0], tuple(PASSAGES[:2]), VECTORS[:2], "s", Coverage(2, 2))

    async def generate(retrieved: Retrieved, settings: GenerationSettings) -> Generation:
        return replace(await TableGenerator().generate("who", retrieved, settings, Context()), text=answer)

    asyncio.run(followed("who", replace(ONCE, follow=1, max_new_tokens=2), look, generate))
    assert looks == ["who", f"who {answer}", "who 首都である"]


def test_an_answer_is_from_one_snapshot_whatever_is_published_meanwhile() -> None:
    class Published(ExactIndex):
        n_searches = 0

        async def search(self, *args: object) -> object:  # type: ignore[override]
            self.n_searches += 1
            if self.n_searches == 3:
                self.snapshot_id = "published meanwhile"
            return await super().search(*args)  # type: ignore[arg-type]

    index, settings = Published(PASSAGES, VECTORS), replace(ONCE, follow=1)
    answer = asyncio.run(pipeline(index).answer("who gamma", RetrievalSettings(k=2), settings, Context(), TOKENS))
    expected = asked("who gamma", settings)
    assert len(expected.tokens) >= 3
    assert index.n_searches == 3 + len(expected.tokens)
    assert answer.snapshot_id == "published meanwhile"
    assert (answer.text, answer.log_likelihood) == (expected.text, expected.log_likelihood)


def test_once_it_has_ended_an_answer_cannot_be_lost() -> None:
    class Gone(ExactIndex):
        n_left = 0

        async def search(self, *args: object) -> object:  # type: ignore[override]
            self.n_left -= 1
            self.missing_shards = {0} if self.n_left < 0 else set()
            return await super().search(*args)  # type: ignore[arg-type]

    index, settings = Gone(PASSAGES, VECTORS), replace(ONCE, follow=1)
    expected = asked("who epsilon", settings)
    assert 1 < len(expected.tokens) < settings.max_new_tokens
    index.n_left = len(expected.tokens)
    found = asyncio.run(pipeline(index).answer("who epsilon", RetrievalSettings(k=2), settings, Context(), TOKENS))
    assert (found.text, index.n_left) == (expected.text, 0)


class Replaced(TableGenerator):
    """When its first answer goes on another one comes, which knows the first three tokens alone."""

    n_tokens = len(WORDS)

    async def generate(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> Generation:
        assert isinstance(settings, PartSettings)
        if settings.begun:
            self.fingerprint, self.generates_by, self.n_tokens = "another", "another-float32", 3
        if settings.begun_by not in ("", self.generates_by):
            raise BegunByAnother(f"{settings.begun_by} is gone")
        return await super().generate(question, retrieved, settings, context)

    def _given(self, retrieved: Retrieved, begun: Sequence[int]) -> Float64:
        return super()._given(retrieved, begun)[:, : self.n_tokens]


@pytest.mark.parametrize("question", ["who", "who delta epsilon"])
def test_an_answer_is_of_one_generator_whichever_comes_meanwhile(question: str) -> None:
    def told(generator: Replaced) -> Answer:
        index = ExactIndex(PASSAGES, VECTORS)
        rag = Pipeline(ENCODER, index, index, generator, MemoryCache(9), AnswerDefaults(), ManualClock())
        how = replace(ONCE, follow=1)
        return asyncio.run(rag.answer(question, RetrievalSettings(k=2), how, Context(request_id="id"), TOKENS))

    generator = Replaced()
    found = told(generator)
    assert len(found.tokens) > 1
    assert found.generator_fingerprint == "another"
    assert replace(found, timings={}, cached=True) == replace(told(generator), timings={}, cached=True)


def test_all_queries_of_an_answer_are_of_one_encoder() -> None:
    encoders, texts = iter(["former", *["next"] * 9]), []

    async def look(text: str) -> Found:
        texts.append(text)
        query = ENCODER.encode_questions([text])[0]
        return Found(query, tuple(PASSAGES[:2]), VECTORS[:2], "s", Coverage(2, 2), next(encoders))

    async def generate(retrieved: Retrieved, settings: GenerationSettings) -> Generation:
        return await TableGenerator().generate("who", retrieved, settings, Context())

    read, _ = asyncio.run(followed("who", replace(ONCE, follow=1, max_new_tokens=2), look, generate))
    assert (texts[:3:2], len(texts)) == (["who", "who"], 4)
    assert read.encoder_fingerprint == "next"


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_beams": 2},
        {"formulation": Formulation.SEQUENCE},
        {"labels": ("a", "b")},
        {"temperature": 1.0, "n_answers": 2},
        {"follow": 513},
    ],
)
def test_what_cannot_be_followed_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"follow must be 0( but for one answer|\.\.512)"):
        replace(ONCE, **{"follow": 4, **wrong})  # type: ignore[arg-type]


def test_what_has_no_query_or_takes_too_much_is_refused() -> None:
    def ask(settings: GenerationSettings, reply: ReplySettings = TOKENS, **retrieval: object) -> None:
        asyncio.run(pipeline().answer("who", RetrievalSettings(**retrieval), settings, Context(), reply))  # type: ignore[arg-type]

    with pytest.raises(InvalidRequest, match="looked for again are scored by query alone: retriever must be dense"):
        ask(replace(ONCE, follow=1), retriever=RetrieverKind.BM25)
    with pytest.raises(InvalidRequest, match=r"must be at most max_work = 100000, got 320 x \(300 \+ 1 x 64\)"):
        ask(replace(ONCE, follow=1, max_new_tokens=64))
    with pytest.raises(InvalidRequest, match="a passage to answer from: none is found but those that without"):
        ask(replace(ONCE, follow=1), without=tuple(range(len(PASSAGES))))
    with pytest.raises(InvalidRequest, match="labels and answers with follow have none"):
        ask(replace(ONCE, follow=1), ReplySettings(min_confidence=0.5))
