"""The journey of one question, with fakes that work: in milliseconds, without servers or models."""

import asyncio
import math
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Never, Self

import numpy as np
import pytest

from openbook.cache.codec import GenerationCodec
from openbook.cache.memory import MemoryCache
from openbook.config import AnswerDefaults
from openbook.core.confidence import SIGNALS, Calibration, Curve
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.fingerprint import text_digest
from openbook.core.types import (
    Classification,
    Coverage,
    Float32,
    Formulation,
    Generation,
    GenerationSettings,
    Hits,
    OwnPassage,
    Passage,
    ReplySettings,
    RetrievalSettings,
    Retrieved,
    RetrieverKind,
    Token,
)
from openbook.errors import DeadlineExceeded, InvalidRequest, Overloaded, ShardUnavailable
from openbook.rag.answer import Answer, Retrieval
from openbook.rag.cached import size_bytes
from openbook.rag.finding import Finder
from openbook.rag.pipeline import Pipeline
from openbook.rag.ports import Generator, Maker
from openbook.rag.retrieving import find
from openbook.rag.stopwatch import Stopwatch
from openbook.testing import EchoGenerator, ExactIndex, HashEncoder, ManualClock

PASSAGES = [
    Passage(0, "bell", "Telephone", "Bell patented the telephone in 1876"),
    Passage(1, "curie", "Marie Curie", "Curie was born in Warsaw"),
    Passage(2, "moon", "Moon", "the Moon goes around the Earth"),
]
OWN = (OwnPassage("a telephone"), OwnPassage("another telephone"))
GREEDY_TOKEN = GenerationSettings(formulation=Formulation.TOKEN, n_beams=1)


class CountingEncoder(HashEncoder):
    """Knows what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def encode(self, questions: Sequence[str], context: Context) -> Float32:
        self.asked.extend(questions)
        return await super().encode(questions, context)


def pipeline(encoder: HashEncoder | None = None, clock: ManualClock | None = None) -> Pipeline:
    encoder = encoder or HashEncoder()
    index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
    defaults = AnswerDefaults(k=2, max_k=10, max_question_chars=50)
    return Pipeline(encoder, index, index, EchoGenerator(), MemoryCache(100), defaults, clock or ManualClock())


def asked(k: int | None) -> RetrievalSettings:
    return RetrievalSettings(k=2 if k is None else k)


def answer(question: str, k: int | None = None, settings: GenerationSettings = GenerationSettings()) -> Answer:  # noqa: B008
    return asyncio.run(pipeline().answer(question, asked(k), settings, Context(request_id="id")))


def test_the_answer_rests_on_the_best_passages_and_says_what_made_it() -> None:
    found = answer("who patented the telephone", k=3)
    assert found.text == "Bell patented the telephone in 1876"
    assert found.evidence[0].passage.id == 0
    scores = [e.score for e in found.evidence]
    assert scores == sorted(scores, reverse=True)
    np.testing.assert_allclose(np.exp([e.log_prior for e in found.evidence]).sum(), 1)
    weights = np.exp(np.array(scores, dtype=np.float64))
    np.testing.assert_allclose(np.exp([e.log_prior for e in found.evidence]), weights / weights.sum(), rtol=1e-6)
    assert (found.request_id, found.generator_fingerprint, found.encoder_fingerprint) == ("id", "echo", "hash-64")
    assert found.snapshot_id
    assert set(found.timings) == {"cache", "encode", "search", "fetch", "generate", "total"}


def test_k_passages_are_found_and_all_of_them_if_there_are_fewer() -> None:
    assert len(answer("telephone", k=2).evidence) == 2
    assert len(answer("telephone", k=10).evidence) == 3


@pytest.mark.parametrize(
    ("question", "k", "message"),
    [
        ("", None, r"question must have 1\.\.50 characters, got none"),
        (" \n\t", None, r"question must have 1\.\.50 characters, got none"),
        ("x" * 51, None, r"question must have 1\.\.50 characters, got 51"),
        ("who \ud800?", None, r"question must be UTF-8 text, got '\\ud800' at 4"),
        ("who?", 0, r"k must be 1\.\.10, got 0"),
        ("who?", -1, r"k must be 1\.\.10, got -1"),
        ("who?", 10_000_000, r"k must be 1\.\.10, got 10000000"),
    ],
)
def test_a_bad_request_is_refused_by_name(question: str, k: int | None, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        answer(question, k)


def test_the_same_question_is_encoded_once_and_answered_alike() -> None:
    async def scenario() -> None:
        encoder = CountingEncoder()
        rag = pipeline(encoder)
        first = await rag.answer("who patented it", asked(None), GREEDY_TOKEN, Context(request_id="a"))
        await rag.aclose()
        second = await rag.answer("  who patented it ", asked(None), GREEDY_TOKEN, Context(request_id="b"))
        assert encoder.asked == ["who patented it"]
        assert (first.cached, second.cached) == (False, True)
        assert first.evidence == second.evidence
        assert "encode" not in second.timings

    asyncio.run(scenario())


def test_a_thousand_equal_questions_at_once_are_encoded_once_and_looked_up_once() -> None:
    class CountingCache(MemoryCache[Float32]):
        n_reads = 0

        async def get_many(self, keys: Sequence[str]) -> list[Float32 | None]:
            self.n_reads += 1
            return await super().get_many(keys)

    async def scenario() -> None:
        encoder, cache = CountingEncoder(), CountingCache(10)
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        rag = Pipeline(encoder, index, index, EchoGenerator(), cache, AnswerDefaults(), ManualClock())
        found = await asyncio.gather(*(rag.retrieve("telephone", asked(1), Context()) for _ in range(1000)))
        assert (encoder.asked, cache.n_reads) == (["telephone"], 1)
        assert len({each.evidence for each in found}) == 1

    asyncio.run(scenario())


def test_a_question_that_the_generator_would_refuse_is_neither_encoded_nor_searched_for() -> None:
    class Full(EchoGenerator):
        def place(
            self, settings: GenerationSettings, n_passages: int, context: Context, is_stream: bool = False
        ) -> Never:
            raise Overloaded(f"no room for {n_passages} passages, stream: {is_stream}")

    async def scenario() -> None:
        encoder = CountingEncoder()
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        rag = Pipeline(encoder, index, index, Full(), MemoryCache(10), AnswerDefaults(), ManualClock())
        asking = "telephone", asked(2), GREEDY_TOKEN, Context()
        with pytest.raises(Overloaded, match="2 passages, stream: False"):
            await rag.answer(*asking, own=OWN)
        with pytest.raises(Overloaded, match="1 passages, stream: True"):
            await anext(rag.stream(*asking))
        assert encoder.asked == []
        kept = MemoryCache[Generation](10)
        rag = Pipeline(encoder, index, index, Full(), MemoryCache(10), AnswerDefaults(), ManualClock(), answers=kept)
        assert (await rag.answer(*asking)).text  # an answer may be kept, and there is room for what is

    asyncio.run(scenario())


def test_the_answer_is_made_in_the_place_that_was_kept_while_its_passages_were_found() -> None:
    log: list[str] = []

    class Places(EchoGenerator):
        @contextmanager
        def place(
            self, settings: GenerationSettings, n_passages: int, context: Context, is_stream: bool = False
        ) -> Iterator[EchoGenerator]:
            log.append("place")
            yield Placed()
            log.append("over")

    class Placed(EchoGenerator):
        async def generate(
            self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
        ) -> Generation:
            log.append("generate")
            return await super().generate(question, retrieved, settings, context)

    class Logged(HashEncoder):
        async def encode(self, questions: Sequence[str], context: Context) -> Float32:
            log.append("encode")
            return await super().encode(questions, context)

    async def scenario() -> None:
        encoder = Logged()
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        rag = Pipeline(encoder, index, index, Places(), MemoryCache(10), AnswerDefaults(), ManualClock())
        await rag.answer("telephone", asked(2), GREEDY_TOKEN, Context())
        assert [each async for each in rag.stream("telegraph", asked(2), GREEDY_TOKEN, Context())]

    asyncio.run(scenario())
    assert log == ["place", "encode", "generate", "over"] * 2


def test_the_generator_is_asked_before_about_no_more_passages_than_there_will_be() -> None:
    told: list[int] = []

    class Told(EchoGenerator):
        def place(
            self, settings: GenerationSettings, n_passages: int, context: Context, is_stream: bool = False
        ) -> AbstractContextManager[Self]:
            told.append(n_passages)
            return super().place(settings, n_passages, context, is_stream)

    async def scenario() -> None:
        encoder = HashEncoder()
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        rag = Pipeline(encoder, index, index, Told(), MemoryCache(10), AnswerDefaults(), ManualClock())
        for retrieval in (
            asked(2),
            asked(100),
            asked(100),
            RetrievalSettings(k=1),
            RetrievalSettings(k=2, without=(1,)),
            RetrievalSettings(k=3, without=(1, 1)),  # one is left out
            RetrievalSettings(k=2, retriever=RetrieverKind.BM25),
        ):
            await rag.answer("telephone", retrieval, GREEDY_TOKEN, Context())
        for k in (0, 2):
            await rag.answer("telephone", RetrievalSettings(k=k), GREEDY_TOKEN, Context(), own=OWN)
        vectors = encoder.encode_passages(PASSAGES[:1])
        vars(index).update(vars(ExactIndex(PASSAGES[:1], vectors, snapshot_id="published")))
        for _ in range(2):
            await rag.answer("telephone", asked(100), GREEDY_TOKEN, Context())

    asyncio.run(scenario())
    assert told == [1, 2, 3, 1, 1, 2, 1, 2, 4, 3, 1]


def test_an_answer_is_generated_once_for_all_that_it_depends_on() -> None:
    class Counting(EchoGenerator):
        asked = 0

        async def generate(
            self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
        ) -> Generation:
            self.asked += 1
            return await super().generate(question, retrieved, settings, context)

    async def scenario() -> None:
        encoder, generator = HashEncoder(), Counting()
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES), n_shards=3)
        answers = MemoryCache[Generation](10)
        rag = Pipeline(
            encoder, index, index, generator, MemoryCache(10), AnswerDefaults(), ManualClock(), answers=answers
        )
        partial = RetrievalSettings(k=2, min_coverage=0.1)

        async def ask(
            question: str = "telephone", settings: GenerationSettings = GREEDY_TOKEN, **retrieval: Any
        ) -> Answer:
            return await rag.answer(question, replace(partial, **retrieval), settings, Context())

        first = (await asyncio.gather(*(ask() for _ in range(100))))[0]
        await rag.aclose()
        again = await ask()
        assert (again.text, again.evidence, again.log_likelihood) == (first.text, first.evidence, first.log_likelihood)
        assert generator.asked == 1
        seen = 1
        for change in (
            ask("telephones"),
            ask(settings=replace(GREEDY_TOKEN, max_new_tokens=3)),
            ask(settings=replace(GREEDY_TOKEN, temperature=1.0, seed=1)),
            ask(settings=replace(GREEDY_TOKEN, temperature=1.0, seed=2)),
            ask(retriever=HYBRID, bm25_weight=0.5),  # the same passages, with other scores
        ):
            await change
            seen += 1
            assert generator.asked == seen
        index.snapshot_id = "published"
        assert (await ask()).snapshot_id == "published"
        index.missing_shards.add(0)
        assert not (await ask()).complete
        assert generator.asked == seen + 2
        for title in ("one", "ONE"):  # of one embedding
            await rag.answer("who", RetrievalSettings(k=0), GREEDY_TOKEN, Context(), own=[OwnPassage("it", title)])
        assert generator.asked == seen + 4

    asyncio.run(scenario())


def test_an_answer_of_more_than_its_share_of_memory_is_not_kept() -> None:
    async def scenario() -> None:
        encoder, kept = HashEncoder(), MemoryCache[Generation](10)
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        rag = Pipeline(encoder, index, index, EchoGenerator(), MemoryCache(1), AnswerDefaults(), ManualClock(), kept)
        n_kept = []
        for n_answers in (1, 32):
            several = replace(GREEDY_TOKEN, temperature=1.0, n_answers=n_answers)
            assert (await rag.answer("telephone", asked(3), several, Context())).text
            await rag.aclose()
            n_kept.append(len(kept._entries))
        assert n_kept == [1, 1]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("k", "n_tokens", "n_answers", "n_labels"),
    [(1, 1, 1, 0), (1, 200, 1, 0), (5, 32, 1, 0), (100, 16, 1, 0), (1, 1, 32, 0), (5, 64, 8, 0), (5, 8, 1, 256)],
)
def test_what_an_answer_takes_is_known_without_packing_it(k: int, n_tokens: int, n_answers: int, n_labels: int) -> None:
    def log_p(*shape: int) -> Any:
        return -np.random.default_rng(0).random(shape)

    def token(t: int) -> Token:
        return Token(" words", -1 / (t + 1), tuple(log_p(k).tolist()), 300 + 6 * t, 306 + 6 * t)

    tokens, ids = tuple(map(token, range(n_tokens))), tuple(range(1000, 1000 + n_tokens))
    labels = tuple(f"{label:80}" for label in range(n_labels))
    chosen = Classification(labels, log_p(n_labels), log_p(n_labels), log_p(k), log_p(n_labels, k))
    one = Generation(" words" * n_tokens, ids, -1.0, log_p(k), log_p(k), tokens, chosen if labels else None)
    generation = replace(one, others=(replace(one, classification=None),) * (n_answers - 1))

    packed = GenerationCodec().pack(generation)
    tracemalloc.start()
    unpacked = GenerationCodec().unpack(packed)
    size_in_memory, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert max(size_in_memory, len(packed)) <= size_bytes(unpacked) <= 5 * size_in_memory


def test_a_generation_of_other_passages_is_none() -> None:
    class LyingCache(MemoryCache[Generation]):
        async def get_many(self, keys: Sequence[str]) -> list[Generation | None]:
            return [Generation("a lie", (), 0.0, np.zeros(7), np.zeros(7)) for _ in keys]

    async def scenario() -> None:
        encoder = HashEncoder()
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        rag = Pipeline(
            encoder, index, index, EchoGenerator(), MemoryCache(1), AnswerDefaults(), ManualClock(), LyingCache(1)
        )
        assert (await rag.answer("telephone", asked(1), GREEDY_TOKEN, Context())).text != "a lie"

    asyncio.run(scenario())


def test_an_entry_of_another_shape_is_not_an_embedding() -> None:
    class LyingCache(MemoryCache):
        async def get_many(self, keys: Sequence[str]) -> list[Float32 | None]:
            return [np.zeros(7, np.float32) for _ in keys]

    async def scenario() -> None:
        encoder = CountingEncoder()
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        rag = Pipeline(encoder, index, index, EchoGenerator(), LyingCache(1), AnswerDefaults(), ManualClock())
        found = await rag.retrieve("telephone", asked(1), Context(request_id="id"))
        assert not found.cached
        assert encoder.asked == ["telephone"]

    asyncio.run(scenario())


def test_passages_whose_shard_went_between_search_and_fetch_are_done_without() -> None:
    searches: list[float] = []

    class Failing(ExactIndex):
        async def search(self, queries: Float32, settings: RetrievalSettings, context: Context) -> Hits:
            searches.append(settings.min_coverage)
            return await super().search(queries, settings, context)

        async def fetch(self, ids: Sequence[int], snapshot_id: str, context: Context) -> list[Passage]:
            self.missing_shards.add(0)
            return await super().fetch(ids, snapshot_id, context)

    async def scenario(min_coverage: float) -> Retrieval:
        encoder = HashEncoder()
        index = Failing(PASSAGES, encoder.encode_passages(PASSAGES), n_shards=3)
        rag = Pipeline(encoder, index, index, EchoGenerator(), MemoryCache(1), AnswerDefaults(), ManualClock())
        return await rag.retrieve("telephone", RetrievalSettings(k=1, min_coverage=min_coverage), Context())

    found = asyncio.run(scenario(0.6))
    assert found.evidence[0].passage.id != 0
    assert (found.complete, found.coverage) == (False, Coverage(2, 3, (0,)))
    for min_coverage in (0.7, 1.0):
        with pytest.raises(ShardUnavailable):
            asyncio.run(scenario(min_coverage))
    assert searches == [0.6, 0.6, 0.7, 0.7, 1.0], "where all must be there it is in vain to search again"


def test_a_stream_is_the_passages_then_tokens_then_the_answer() -> None:
    async def scenario() -> None:
        items = [
            item async for item in pipeline().stream("telephone", asked(None), GREEDY_TOKEN, Context(request_id="id"))
        ]
        first, *tokens, last = items
        assert isinstance(first, Retrieval)
        assert isinstance(last, Answer)
        assert "".join(token.text for token in tokens if isinstance(token, Token)) == last.text
        assert [e.passage for e in first.evidence] == [e.passage for e in last.evidence]
        assert all(e.log_posterior == e.log_prior for e in first.evidence)

    asyncio.run(scenario())


def test_closing_a_stream_closes_the_generator_behind_it() -> None:
    closed: list[str] = []

    class Endless(EchoGenerator):
        async def stream(
            self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
        ) -> AsyncIterator[Token | Generation]:
            try:
                while True:
                    yield Token("again", 0.0, (0.0,))
            finally:
                closed.append(question)

    async def scenario() -> None:
        encoder = HashEncoder()
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        rag = Pipeline(encoder, index, index, Endless(), MemoryCache(1), AnswerDefaults(), ManualClock())
        events = rag.stream("telephone", asked(1), GREEDY_TOKEN, Context(request_id="id"))
        await anext(events)
        await anext(events)
        await events.aclose()  # type: ignore[attr-defined]
        assert closed == ["telephone"]

    asyncio.run(scenario())


def test_nothing_is_done_for_a_question_whose_time_is_over() -> None:
    clock = ManualClock()
    deadline = Deadline.after(1.0, clock)
    clock.advance(1.0)
    with pytest.raises(DeadlineExceeded, match="deadline passed before encode"):
        asyncio.run(pipeline(clock=clock).answer("telephone", asked(None), GREEDY_TOKEN, Context(deadline)))


def test_timings_are_read_off_the_clock() -> None:
    clock = ManualClock()

    class SlowEncoder(HashEncoder):
        async def encode(self, questions: Sequence[str], context: Context) -> Float32:
            clock.advance(0.25)
            return await super().encode(questions, context)

    found = asyncio.run(
        pipeline(SlowEncoder(), clock).answer("telephone", asked(None), GREEDY_TOKEN, Context(request_id="id"))
    )
    assert found.timings["encode"] == 0.25
    assert found.timings["total"] == 0.25
    watch = Stopwatch(clock, Context())
    for seconds in (0.25, 0.5):
        with watch.stage("search"):
            clock.advance(seconds)
    assert watch.read() == {"search": 0.75, "total": 0.75}


# --- what if: other evidence


def of_index(passages: Sequence[Passage], retrieval: RetrievalSettings, own: Sequence[OwnPassage] = ()) -> Answer:
    """The answer of an index that holds just these passages."""
    encoder = HashEncoder()
    index = ExactIndex(passages, encoder.encode_passages(passages), n_shards=2)
    rag = Pipeline(encoder, index, index, EchoGenerator(), MemoryCache(9), AnswerDefaults(max_k=10), ManualClock())
    question = "was the telephone patented by Bell, who was born there?"
    return asyncio.run(
        rag.answer(question, retrieval, GenerationSettings(), Context(), ReplySettings(tokens=True), own)
    )


def rests_on(found: Answer) -> list[tuple[str, str, float, float, float]]:
    return [(e.passage.title, e.passage.text, e.score, e.log_prior, e.log_posterior) for e in found.evidence]


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("without", [(0,), (1,), (2, 0), (1, 1, 7)])
def test_without_passages_is_an_index_that_never_had_them(k: int, without: tuple[int, ...]) -> None:
    found = of_index(PASSAGES, RetrievalSettings(k=k, without=without))
    left = [passage for passage in PASSAGES if passage.id not in without]
    wanted = of_index([replace(passage, id=i) for i, passage in enumerate(left)], RetrievalSettings(k=k))
    assert rests_on(found) == rests_on(wanted)
    assert (found.text, found.log_likelihood, found.tokens) == (wanted.text, wanted.log_likelihood, wanted.tokens)


def test_passages_of_without_that_are_named_twice_count_once() -> None:
    many = [replace(PASSAGES[0], id=i) for i in range(20)]
    assert len(of_index(many, RetrievalSettings(k=9, without=(1, 1))).evidence) == 9


class Strict(ExactIndex):
    """Reranks less than is asked for."""

    async def search(self, queries: Float32, settings: RetrievalSettings, context: Context) -> Hits:
        found = await super().search(queries, settings, context)
        if settings.rerank_factor:
            raise InvalidRequest(f"k * rerank_factor must be at most 9, got {settings.k} * {settings.rerank_factor}")
        return found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 999, "without": (1, 2, 2)}, "k must be 1..1000, got 1001 (k and the passages of without are 999 and 2)"),
        ({"k": 1001}, "k must be 1..1000, got 1001"),
        (
            {"k": 8, "without": (1,), "rerank_factor": 5},
            "k * rerank_factor must be at most 9, got 9 * 5 (k and the passages of without are 8 and 1)",
        ),
    ],
)
def test_who_leaves_passages_out_is_told_why_more_than_k_are_searched_for(
    settings: dict[str, Any], message: str
) -> None:
    vectors = HashEncoder().encode_passages(PASSAGES)
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(find(Strict(PASSAGES, vectors), [""], vectors[:1], RetrievalSettings(**settings), Context()))
    assert str(refused.value) == message


@pytest.mark.parametrize("given", [[0], [2, 1], [0, 1, 2]])
def test_own_passages_are_read_as_if_the_index_had_them(given: list[int]) -> None:
    own = [OwnPassage(PASSAGES[i].text, PASSAGES[i].title, PASSAGES[i].document_id) for i in given]
    left = [passage for i, passage in enumerate(PASSAGES) if i not in given]
    k = len(left)
    found = of_index([replace(passage, id=i) for i, passage in enumerate(left)], RetrievalSettings(k=k), own)
    wanted = of_index(PASSAGES, RetrievalSettings(k=3))
    assert rests_on(found) == rests_on(wanted)
    assert (found.text, found.tokens, found.citations) == (wanted.text, wanted.tokens, wanted.citations)
    ids = {e.passage.document_id: e.passage.id for e in found.evidence}
    assert [ids[each.document_id] for each in own] == [-1 - number for number in range(len(own))]


def test_own_passages_alone_are_searched_for_nowhere() -> None:
    found = of_index(PASSAGES, RetrievalSettings(k=0), [OwnPassage("Meucci invented the telephone")])
    assert (found.text, found.snapshot_id, found.coverage) == ("Meucci invented the telephone", "", Coverage(0, 0))
    assert found.complete
    assert [e.log_posterior for e in found.evidence] == [0.0]
    assert "search" not in found.timings


def test_a_title_of_white_space_is_none() -> None:
    found = of_index(PASSAGES, RetrievalSettings(k=0), [OwnPassage("x", " \n", "\t"), OwnPassage("y", " Y ", " y ")])
    told = [(each.passage.title, each.passage.document_id) for each in found.evidence]
    assert sorted(told) == [("", ""), ("Y", "y")]


def test_as_many_own_passages_as_may_be_given_are_read() -> None:
    assert len(of_index(PASSAGES, RetrievalSettings(k=3), [OwnPassage(f"x {i}") for i in range(20)]).evidence) == 23


def test_own_passages_are_work_too_and_who_only_looks_for_passages_has_the_same_limits() -> None:
    encoder = HashEncoder()
    index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
    rag = Pipeline(encoder, index, index, EchoGenerator(), MemoryCache(9), AnswerDefaults(max_k=10, max_work=6_000))
    with pytest.raises(InvalidRequest, match=r"max_work = .*got 21 x"):
        rag.work(asked(1), GREEDY_TOKEN, n_own=20)
    with pytest.raises(InvalidRequest, match=r"k must be 1\.\.10, got 11"):
        asyncio.run(rag.retrieve("telephone", asked(11), Context()))


@pytest.mark.parametrize(
    ("retrieval", "own", "message"),
    [
        ({"k": 0}, [], r"k must be 1\.\.10, got 0"),
        ({"k": 9, "without": (1, 2)}, [], "k and the passages of without must be at most 10, got 9 and 2"),
        ({"without": (-1,)}, [], r"without must be 0\.\."),
        ({"without": tuple(range(101))}, [], r"passages of without must be 0\.\.100, got 101"),
        ({"without": (0, 1, 2, 2)}, [], "there must be a passage to answer from: without leaves out 3, all of them"),
        ({}, [OwnPassage("x")] * 21, "passages must be at most 20, got 21"),
        ({}, [OwnPassage("x"), OwnPassage(" ")], r"passages\[1\]\.text must have 1\.\.10000 characters, got none"),
        ({}, [OwnPassage("x", title="\ud800")], r"passages\[0\]\.title must be UTF-8 text"),
        ({}, [OwnPassage("x" * 10_001)], r"passages\[0\]\.text must have 1\.\.10000 characters, got 10001"),
    ],
)
def test_bad_evidence_is_refused_by_name(retrieval: dict[str, Any], own: list[OwnPassage], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        of_index(PASSAGES, RetrievalSettings(**retrieval), own)


# --- what is told of an answer


class Unsure(EchoGenerator):
    """Gives its answers a probability of a half."""

    async def generate(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> Generation:
        found = await super().generate(question, retrieved, settings, context)
        return replace(found, log_likelihood=math.log(0.5))


def told(**values: Any) -> Answer:
    generation = GenerationSettings(n_answers=values.pop("n_answers", 1))
    encoder = HashEncoder()
    index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
    rag = Pipeline(encoder, index, index, Unsure(), MemoryCache(9), AnswerDefaults(), ManualClock())
    return asyncio.run(rag.answer("telephone", asked(2), generation, Context(), ReplySettings(**values)))


def test_tokens_citations_and_further_answers_come_if_asked_for() -> None:
    bare = told()
    assert (bare.tokens, bare.citations, bare.answers, bare.abstained) == ((), (), (), False)
    full = told(tokens=True, n_answers=3)
    assert full.text == bare.text
    assert [full.text[token.start : token.end] for token in full.tokens] == full.text.split()
    assert [(each.start, each.end) for each in full.citations] == [(0, len(full.text))]
    assert [each.text for each in full.answers] == [full.text] * 3
    assert full.answers[0].tokens == full.tokens
    assert np.exp(full.answers[2].log_posterior).sum() == pytest.approx(1)


def test_an_answer_less_probable_than_asked_for_is_held_back_with_what_would_have_been_said() -> None:
    assert not told(min_probability=0.5).abstained
    held = told(min_probability=0.51, tokens=True)
    assert (held.text, held.tokens, held.citations, held.abstained) == ("", (), (), True)
    assert [each.text for each in held.answers] == [told().text]
    assert held.answers[0].tokens
    assert held.log_likelihood == math.log(0.5)
    with pytest.raises(InvalidRequest, match=r"min_probability must be 0\.0\.\.1\.0, got 1\.5"):
        told(min_probability=1.5)


class Judged(EchoGenerator):
    """Is right in 6 of 10 of its answers."""

    calibration: ClassVar[Calibration] = {Formulation.SEQUENCE: Curve((0.0,) * len(SIGNALS), 0.0, (0.0,), (0.6,))}


def test_an_answer_less_surely_right_than_asked_for_is_held_back_where_that_is_known() -> None:
    encoder = HashEncoder()
    index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))

    def told(generator: Generator, formulation: Formulation, **values: Any) -> Answer:
        rag = Pipeline(encoder, index, index, generator, MemoryCache(9), AnswerDefaults(), ManualClock())
        how = GenerationSettings(formulation, labels=tuple(values.pop("labels", ())), max_new_tokens=1)
        return asyncio.run(rag.answer("telephone", asked(2), how, Context(), ReplySettings(**values)))

    as_sure = told(Judged(), Formulation.SEQUENCE, min_confidence=0.6)
    assert (as_sure.confidence, as_sure.abstained, as_sure.cut) == (0.6, False, True)
    held = told(Judged(), Formulation.SEQUENCE, min_confidence=0.61)
    assert (held.cut, held.answers[0].cut) == (False, True)
    assert (held.text, held.abstained, held.confidence, len(held.answers)) == ("", True, 0.6, 1)
    assert told(Judged(), Formulation.TOKEN).confidence is None
    for generator, formulation, labels, known in [
        (Judged(), Formulation.TOKEN, (), "sequence"),
        (Judged(), Formulation.SEQUENCE, ("a", "b"), "sequence"),
        (EchoGenerator(), Formulation.SEQUENCE, (), "no formulation"),
    ]:
        with pytest.raises(InvalidRequest, match=rf"min_confidence must be 0 .*, got 0\.5: .* is known for {known}"):
            told(generator, formulation, labels=labels, min_confidence=0.5)


def test_a_generator_without_calibration_that_comes_meanwhile_says_so() -> None:
    class Replaced(Judged):
        def generate(self, *asked_for: Any) -> Any:
            Replaced.calibration = {}
            return super().generate(*asked_for)

    encoder = HashEncoder()
    index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
    rag = Pipeline(encoder, index, index, Replaced(), MemoryCache(9), AnswerDefaults(), ManualClock())
    how = GenerationSettings(Formulation.SEQUENCE)
    with pytest.raises(InvalidRequest, match=r"min_confidence must be 0 .*, got 0\.5"):
        asyncio.run(rag.answer("telephone", asked(2), how, Context(), ReplySettings(min_confidence=0.5)))


@pytest.mark.parametrize("min_probability", [0.0, 0.4, 0.6])
@pytest.mark.parametrize("how", [GREEDY_TOKEN, GenerationSettings()])
def test_a_stream_tells_the_tokens_of_every_answer_but_of_none_that_is_held_back(
    how: GenerationSettings, min_probability: float
) -> None:
    async def scenario() -> tuple[list[object], Answer]:
        encoder = HashEncoder()
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        rag = Pipeline(encoder, index, index, Unsure(), MemoryCache(9), AnswerDefaults(), ManualClock())
        reply = ReplySettings(min_probability=min_probability)
        _, *tokens, last = [item async for item in rag.stream("telephone", asked(2), how, Context(), reply)]
        assert isinstance(last, Answer)
        return tokens, last

    tokens, last = asyncio.run(scenario())
    assert "".join(token.text for token in tokens if isinstance(token, Token)) == last.text
    assert last.abstained == (min_probability > 0.5) == (not tokens)


def test_of_one_generator_in_two_dtypes_neither_is_told_what_the_other_answered() -> None:
    class Rounding(EchoGenerator):
        def __init__(self, dtype: str) -> None:
            self.generates_by = f"{self.fingerprint}-{dtype}"
            self.n = 0

        async def generate(
            self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
        ) -> Generation:
            self.n += 1
            return await super().generate(question, retrieved, settings, context)

    async def scenario() -> None:
        encoder, answers = HashEncoder(), MemoryCache[Generation](10)
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        for dtype, n in (("float32", 1), ("bfloat16", 1), ("float32", 0)):
            generator = Rounding(dtype)
            rag = Pipeline(encoder, index, index, generator, MemoryCache(10), AnswerDefaults(), answers=answers)
            found = await rag.answer("who", asked(2), GREEDY_TOKEN, Context())
            assert (generator.n, found.generator_fingerprint) == (n, "echo")
            await rag.aclose()

    asyncio.run(scenario())


def test_what_one_tenant_asked_is_no_hit_for_another_nor_company_on_the_way() -> None:
    """Neither in the caches nor while it is computed: either would tell what was asked."""

    class Counting(EchoGenerator):
        n = 0

        async def generate(
            self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
        ) -> Generation:
            self.n += 1
            await asyncio.sleep(0)
            return await super().generate(question, retrieved, settings, context)

    async def scenario() -> None:
        encoder, generator = CountingEncoder(), Counting()
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        embeddings, answers = MemoryCache[Float32](100), MemoryCache[Generation](100)
        rag = Pipeline(encoder, index, index, generator, embeddings, AnswerDefaults(), answers=answers)
        contexts = [Context(tenant=tenant) for tenant in ("", "", "acme", "acme", "other")]
        contexts.append(Context(caller="whose turn with the generator is another"))
        for n in (3, 0):  # the first of each tenant, all at once; then all out of the caches
            before = len(encoder.asked), generator.n
            found = await asyncio.gather(*(rag.answer("who", asked(2), GREEDY_TOKEN, each) for each in contexts))
            await rag.aclose()
            assert (len(encoder.asked) - before[0], generator.n - before[1]) == (n, n + (n > 0))
            assert [each.cached for each in found] == [n == 0] * len(contexts)

    asyncio.run(scenario())


def test_without_tenants_the_keys_of_the_caches_are_what_they_were() -> None:
    async def scenario() -> None:
        seen: list[str] = []

        class Seeing(MemoryCache[Float32]):
            async def get_many(self, keys: Sequence[str]) -> list[Float32 | None]:
                seen.extend(keys)
                return await super().get_many(keys)

        encoder = HashEncoder()
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        rag = Pipeline(encoder, index, index, EchoGenerator(), Seeing(100), AnswerDefaults())
        for tenant in ("", "acme"):
            await rag.retrieve("who", asked(1), Context(tenant=tenant))
        plain = f"hash-64:{text_digest('who')}"
        assert seen == [plain, f"acme:{plain}"]
        await rag.aclose()

    asyncio.run(scenario())


# --- other retrievers

HYBRID, BM25 = RetrieverKind.HYBRID, RetrieverKind.BM25
TALK = "who patented the telephone in Warsaw"


def found_by(question: str = TALK, **settings: Any) -> tuple[Answer, list[str], Float32, Float32]:
    """The answer, what was encoded, and both scores of every passage by their definitions."""

    async def scenario() -> tuple[Answer, list[str], Float32, Float32]:
        encoder = CountingEncoder()
        vectors = encoder.encode_passages(PASSAGES)
        index = ExactIndex(PASSAGES, vectors, n_shards=3)
        rag = Pipeline(encoder, index, index, EchoGenerator(), MemoryCache(9), AnswerDefaults(), ManualClock())
        retrieval = RetrievalSettings(**{"k": 3, **settings})
        answer = await rag.answer(question, retrieval, GenerationSettings(), Context())
        query = HashEncoder().encode_questions([question])
        candidates = await index.candidates([question], query, retrieval, Context())
        return answer, encoder.asked, candidates.dense[0], candidates.bm25[0]

    return asyncio.run(scenario())


def check_prior(found: Answer, scores: Float32) -> None:
    """Softmax of these passages' scores, over what was found."""
    kept = np.array([scores[e.passage.id] for e in found.evidence], np.float64)
    np.testing.assert_allclose([e.score for e in found.evidence], kept, rtol=1e-6)
    weights = np.exp(kept)
    np.testing.assert_allclose(np.exp([e.log_prior for e in found.evidence]), weights / weights.sum(), rtol=1e-6)


def test_by_words_the_prior_is_that_of_bm25_and_nothing_is_encoded() -> None:
    found, encoded, _, bm25 = found_by(retriever=BM25)
    assert (encoded, found.cached) == ([], False)
    assert [e.passage.id for e in found.evidence] == [0, 1]  # the moon's has no word of it
    check_prior(found, bm25)
    assert set(found.timings) == {"search", "fetch", "generate", "total"}


def test_by_rank_the_prior_is_that_of_the_dense_scores() -> None:
    found, encoded, dense, _ = found_by(retriever=HYBRID)
    assert encoded == [TALK]
    assert len(found.evidence) == 3
    check_prior(found, dense)


def test_by_weight_the_prior_is_that_of_the_sum() -> None:
    found, _, dense, bm25 = found_by(retriever=HYBRID, bm25_weight=0.5)
    check_prior(found, (dense + 0.5 * bm25).astype(np.float32))
    only_dense, by_query = found_by(retriever=HYBRID, bm25_weight=0.0)[0], found_by()[0]
    assert rests_on(only_dense) == rests_on(by_query)


@pytest.mark.parametrize("how", [{"retriever": BM25}, {"retriever": HYBRID}, {"retriever": HYBRID, "bm25_weight": 1}])
def test_without_a_passage_others_take_its_place(how: dict[str, Any]) -> None:
    best = found_by(k=1, **how)[0].evidence[0].passage.id
    (left,) = found_by(k=1, without=(best,), **how)[0].evidence
    assert left.passage.id == found_by(k=2, **how)[0].evidence[1].passage.id


def test_own_passages_join_those_found_by_rank_and_are_nothing_to_words() -> None:
    own = [OwnPassage("Meucci invented the telephone")]
    found = of_index(PASSAGES, RetrievalSettings(k=2, retriever=HYBRID), own)
    assert sorted(e.passage.id for e in found.evidence)[0] == -1
    np.testing.assert_allclose(np.exp([e.log_prior for e in found.evidence]).sum(), 1)
    message = "retriever must be dense, or hybrid without bm25_weight, got "
    with pytest.raises(InvalidRequest, match=f"{message}bm25"):
        of_index(PASSAGES, RetrievalSettings(k=2, retriever=BM25), own)
    with pytest.raises(InvalidRequest, match=f"{message}hybrid with bm25_weight 0.5"):
        of_index(PASSAGES, RetrievalSettings(k=2, retriever=HYBRID, bm25_weight=0.5), own)


def test_a_question_of_no_word_of_the_index_has_no_passage_by_words() -> None:
    with pytest.raises(InvalidRequest, match="must be a passage to answer from: none has a word of the question"):
        found_by("xyzzy?", retriever=BM25)
    assert found_by("xyzzy?", retriever=HYBRID)[0].evidence


def test_an_answer_names_the_models_that_made_it_whichever_come_meanwhile() -> None:
    class Former(Judged):
        def __init__(self) -> None:
            self.fingerprint = "former"

    encoder, generator = HashEncoder(), Former()

    class Slow(MemoryCache[Generation]):
        async def get_many(self, keys: Sequence[str]) -> list[Generation | None]:
            found = await super().get_many(keys)
            if found[0]:
                encoder.fingerprint = generator.fingerprint = "later"
                Former.calibration = {}
            return found

    async def scenario() -> None:
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        rag = Pipeline(encoder, index, index, generator, MemoryCache(9), AnswerDefaults(), answers=Slow(9))
        for _ in range(2):
            found = await rag.answer("telephone", asked(2), GenerationSettings(), Context())
            made_by = found.encoder_fingerprint, found.generator_fingerprint, found.confidence
            assert made_by == ("hash-64", "former", 0.6)
            await rag.aclose()
        assert generator.fingerprint == "later"

    asyncio.run(scenario())


def test_what_a_generator_that_came_meanwhile_made_is_named_as_its_own_and_not_kept() -> None:
    class Replaced(EchoGenerator):
        generates_by = fingerprint = "former"

        async def generate(self, *asked_for: Any) -> Generation:
            self.generates_by = self.fingerprint = "later"
            return await super().generate(*asked_for)

    async def scenario() -> None:
        encoder, kept = HashEncoder(), MemoryCache[Generation](9)
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        rag = Pipeline(encoder, index, index, Replaced(), MemoryCache(9), AnswerDefaults(), answers=kept)
        found = await rag.answer("telephone", asked(2), GenerationSettings(), Context())
        await rag.aclose()
        assert (found.generator_fingerprint, len(kept._entries)) == ("later", 0)

    asyncio.run(scenario())


def test_what_made_a_stream_is_what_it_says_of_itself() -> None:
    class Replaced(EchoGenerator):
        async def stream(self, *asked_for: Any) -> AsyncIterator[Any]:
            yield Maker("later", "later", {})
            async for item in super().stream(*asked_for):
                yield item

    async def scenario() -> None:
        encoder = HashEncoder()
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        rag = Pipeline(encoder, index, index, Replaced(), MemoryCache(9), AnswerDefaults())
        *_, last = [item async for item in rag.stream("telephone", asked(1), GREEDY_TOKEN, Context())]
        assert isinstance(last, Answer)
        assert last.generator_fingerprint == "later"

    asyncio.run(scenario())


def test_passages_that_were_looked_for_name_the_encoder_of_their_query_whichever_comes_meanwhile() -> None:
    encoder = HashEncoder()

    class Published(ExactIndex):
        async def search(self, queries: Float32, settings: RetrievalSettings, context: Context) -> Hits:
            encoder.fingerprint = "later"
            return await super().search(queries, settings, context)

    index = Published(PASSAGES, encoder.encode_passages(PASSAGES))
    finder = Finder(encoder, index, index, MemoryCache(9), AnswerDefaults(), ManualClock())
    found = asyncio.run(finder.look("telephone", asked(1), Stopwatch(ManualClock(), Context())))
    assert found.encoder_fingerprint == "hash-64"


def test_a_pipeline_that_is_closed_has_written_both_caches() -> None:
    class Slow(MemoryCache[Any]):
        async def put_many(self, entries: Sequence[tuple[str, Any]]) -> None:
            for _ in range(9):
                await asyncio.sleep(0)
            await super().put_many(entries)

    async def scenario() -> None:
        encoder, queries, answers = HashEncoder(), Slow(9), Slow(9)
        index = ExactIndex(PASSAGES, encoder.encode_passages(PASSAGES))
        rag = Pipeline(encoder, index, index, EchoGenerator(), queries, AnswerDefaults(), answers=answers)
        await rag.answer("telephone", asked(2), GREEDY_TOKEN, Context())
        await rag.aclose()
        assert len(queries._entries) == len(answers._entries) == 1

    asyncio.run(scenario())
