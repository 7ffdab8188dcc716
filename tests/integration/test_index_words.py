"""Passages found by their words: as bm25s finds them, whatever the shards, and never from two snapshots."""

import asyncio
import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bm25s
import grpc
import numpy as np
import pytest
from small_disk import files_of_at_most
from typer.testing import CliRunner

from openbook import wire
from openbook.cli import app
from openbook.config import IndexClientSettings, IndexServerSettings
from openbook.core.context import Context
from openbook.core.deadline import Deadline
from openbook.core.fusion import fuse
from openbook.core.types import Candidates, Float32, Hits, Passage, RetrievalSettings, RetrieverKind
from openbook.errors import InvalidConfig, InvalidRequest, InvalidSnapshot, ShardUnavailable
from openbook.index.building.build import add_bm25, build_snapshot
from openbook.index.client.publish import publish
from openbook.index.client.sharded import ShardedIndex
from openbook.index.disk import bm25
from openbook.index.disk.snapshot import Snapshot
from openbook.index.server.failed import Failed
from openbook.index.server.held import HeldSnapshots
from openbook.index.server.pending import Outcome, Ticket
from openbook.index.server.server import IndexServer
from openbook.index.server.threads import PART_IDS
from openbook.index.server.words import MOST_BEGUN, PART_WORDS, WordSearches
from openbook.rag.retrieving import find
from openbook.testing import ExactIndex, served
from openbook.v1 import index_pb2, index_pb2_grpc

N, D, WORDS = 300, 8, [f"word{i}" for i in range(60)]
HYBRID, BM25 = RetrieverKind.HYBRID, RetrieverKind.BM25
SETTINGS = [
    RetrievalSettings(k=5, retriever=BM25),
    RetrievalSettings(k=100, retriever=BM25, without=(0, 1, 2)),
    RetrievalSettings(k=5, retriever=HYBRID),
    RetrievalSettings(k=120, retriever=HYBRID, without=(3, 4)),
    RetrievalSettings(k=20, retriever=HYBRID, bm25_weight=0.3),
]
QUESTIONS = ["what is word1 or word2", "WORD3 word3, word59?", "the of", "word7 " * 40, "nothing of it", "wörd titel5"]


def passages(seed: int, n: int = N) -> list[Passage]:
    rng = np.random.default_rng(seed)
    draws = rng.zipf(1.3, (n, 30)) % len(WORDS)
    texts = [" ".join(WORDS[i] for i in row[: rng.integers(0, 31)]) for row in draws]
    return [Passage(i, f"doc-{i}", f"titel{i % 7}", text) for i, text in enumerate(texts)]


def vectors(n: int = N) -> Float32:
    return np.random.default_rng(0).integers(-3, 4, (n, D)).astype(np.float32)  # so that scores tie


QUERIES: Float32 = np.random.default_rng(1).integers(-3, 4, (len(QUESTIONS), D)).astype(np.float32)


def built(out: Path, seed: int = 0, n_shards: int = 2, n: int = N, words: bool = True, halves: bool = False) -> Path:
    exact = ("float32", "float16")[halves]
    build_snapshot(passages(seed, n), vectors(n), out, n_shards, "Flat", "none", "none", exact_dtype=exact)
    if words:
        add_bm25(out)
    return out


def reference(seed: int, questions: Sequence[str]) -> Float32:
    """(questions, N) bm25s's own scores."""
    index = bm25s.BM25()
    texts = [f"{p.title}. {p.text}" for p in passages(seed)]
    index.index(bm25s.tokenize(texts, stopwords="en", show_progress=False), show_progress=False)
    asked = bm25s.tokenize(list(questions), stopwords="en", return_ids=False, show_progress=False)
    return np.stack([index.get_scores_from_ids(index.get_tokens_ids(words)) for words in asked])


@pytest.mark.parametrize("n_shards", [1, 2, 4])
def test_scores_are_those_of_bm25s_and_rankings_those_of_the_twin(n_shards: int, tmp_path: Path) -> None:
    snapshot = built(tmp_path / "s", n_shards=n_shards, halves=n_shards == 4)
    twin = ExactIndex(passages(0), vectors(), Snapshot.open(snapshot).manifest.snapshot_id)
    expected = reference(0, QUESTIONS)

    async def scenario() -> None:
        with served(snapshot) as servers:
            tier = ShardedIndex([server.address for server in servers], timeout_s=60)
            everything = RetrievalSettings(k=N, retriever=HYBRID)
            found = await tier.candidates(QUESTIONS, QUERIES, everything, Context())
            for ids, scores, wanted in zip(found.ids, found.bm25, expected, strict=True):
                by_id = dict(zip(ids.tolist(), scores.tolist(), strict=True))
                np.testing.assert_allclose([by_id[i] for i in range(N)], wanted, rtol=0, atol=1e-6)
            for settings in SETTINGS:
                ours, theirs = [await find(each, QUESTIONS, QUERIES, settings, Context()) for each in (tier, twin)]
                assert ours.ids.tolist() == theirs.ids.tolist(), settings
                np.testing.assert_array_equal(ours.scores.view(np.int32), theirs.scores.view(np.int32))
                assert ours.snapshot_id == theirs.snapshot_id
            await tier.close()

    asyncio.run(scenario())


def test_shards_that_are_empty_and_a_shard_that_is_gone(tmp_path: Path) -> None:
    snapshot = built(tmp_path / "s", n_shards=7, n=5)
    twin = ExactIndex(passages(0, 5), vectors(5), Snapshot.open(snapshot).manifest.snapshot_id, n_shards=7)
    partial = RetrievalSettings(k=3, retriever=HYBRID, min_coverage=0.5)

    async def scenario() -> None:
        with served(snapshot) as servers:
            tier = ShardedIndex([server.address for server in servers], timeout_s=60)
            for settings in SETTINGS:
                ours, theirs = [await find(each, QUESTIONS, QUERIES, settings, Context()) for each in (tier, twin)]
                assert ours.ids.tolist() == theirs.ids.tolist()
            gone = int(twin._shards[0])
            servers[gone].stop(grace_s=0)
            twin.missing_shards.add(gone)
            in_time = Context(Deadline.after(60))
            ours, theirs = [await find(each, QUESTIONS, QUERIES, partial, in_time) for each in (tier, twin)]
            assert ours.ids.tolist() == theirs.ids.tolist()
            assert (ours.coverage.n_searched, ours.coverage.missing_shards) == (4, (gone,))
            with pytest.raises(ShardUnavailable):
                await find(tier, QUESTIONS, QUERIES, RetrievalSettings(k=3, retriever=BM25), in_time)
            await tier.close()

    asyncio.run(scenario())


def test_a_snapshot_without_words_says_how_to_get_them_and_servers_find_them(tmp_path: Path) -> None:
    snapshot = built(tmp_path / "s", words=False)

    async def scenario() -> None:
        with served(snapshot) as servers:
            tier = ShardedIndex([server.address for server in servers], timeout_s=60)
            for settings in SETTINGS[::2]:
                with pytest.raises(InvalidRequest, match=r"must be dense for snapshot .*openbook index bm25"):
                    await find(tier, QUESTIONS, QUERIES, settings, Context())
            done = CliRunner().invoke(app, ["index", "bm25", str(snapshot)])
            assert (done.exit_code, done.stdout) == (0, f"{snapshot}: words of {N} passages indexed\n")
            hits = await find(tier, QUESTIONS, None, SETTINGS[0], Context())
            best = reference(0, QUESTIONS).max(axis=1)
            np.testing.assert_allclose(hits.scores[:, 0], np.where(best > 0, best, -np.inf), rtol=0, atol=1e-6)
            await tier.close()

    asyncio.run(scenario())
    assert {path.name for path in snapshot.iterdir()} == {"bm25", "manifest.json", "shard-0000", "shard-0001"}
    with pytest.raises(InvalidConfig, match="bm25: exists"):
        add_bm25(snapshot)


def test_words_that_find_no_room_are_one_line_and_leave_the_snapshot_as_it_was(tmp_path: Path) -> None:
    snapshot = built(tmp_path / "s", words=False)
    before = sorted(snapshot.rglob("*"))
    with files_of_at_most(200):
        command = [sys.executable, "-m", "openbook.cli", "index", "bm25", str(snapshot)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    *_, said = done.stderr.splitlines()
    assert (done.returncode, said) == (1, f"openbook: {os.strerror(errno.ENOSPC)}")
    assert sorted(snapshot.rglob("*")) == before
    add_bm25(snapshot)


def test_damage_is_found(tmp_path: Path) -> None:
    snapshot = built(tmp_path / "s")
    held = Snapshot.open(snapshot)
    held.verify(0)
    with pytest.raises(InvalidSnapshot, match=r"is of snapshot .* not of other"):
        bm25.Bm25Index(snapshot, "other", 0, N)
    with pytest.raises(InvalidSnapshot, match=f"has {N} passages, must have {N + 1}"):
        bm25.Bm25Index(snapshot, held.manifest.snapshot_id, 1, N)
    about = snapshot / bm25.FOLDER / bm25.ABOUT
    right = about.read_text()
    about.write_text(json.dumps({**json.loads(right), "snapshot_id": "other"}))
    with pytest.raises(InvalidSnapshot, match="is of snapshot other, not of"):
        held.verify(0)
    about.write_text(right)
    data = snapshot / bm25.FOLDER / bm25.DATA
    content = data.read_bytes()
    data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(InvalidSnapshot, match=r"data.csc.index.npy: was altered: sha256"):
        held.verify(0)
    data.write_bytes(content[:-1])
    with pytest.raises(InvalidSnapshot, match=f"must have {len(content)} bytes, found {len(content) - 1}"):
        bm25.Bm25Index(snapshot, held.manifest.snapshot_id, 0, N)
    data.write_bytes(content)
    for name, problem in ((bm25.INDPTR, "is no array"), (bm25.VOCABULARY, "is no vocabulary")):
        path = snapshot / bm25.FOLDER / name
        good = path.read_bytes()
        path.write_bytes(b"?" * len(good))
        with pytest.raises(InvalidSnapshot, match=f"{name}: {problem}"):
            bm25.Bm25Index(snapshot, held.manifest.snapshot_id, 0, N)
        path.write_bytes(good)
    about.write_text(json.dumps({**json.loads(right), "format_version": 2}))
    with pytest.raises(InvalidSnapshot, match=r"about.json: format_version: Input should be 1"):
        held.verify(0)


@pytest.mark.parametrize("at_once", [1, 7, 1 << 16])
@pytest.mark.parametrize("n_words", [0, 1, 400])
def test_a_vocabulary_read_in_pieces_is_whole(
    n_words: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = {f"wörd{i}": i for i in range(n_words)} | {"": n_words}
    monkeypatch.setattr(bm25, "PIECE_CHARS", at_once)
    for separators in ((", ", ": "), (",", ":")):
        (tmp_path / "v").write_text(json.dumps(numbers, ensure_ascii=not at_once % 2, separators=separators), "utf-8")
        assert bm25._read_vocabulary(tmp_path / "v") == numbers


def test_words_are_ready_when_a_snapshot_is_prepared_if_those_before_were_asked_for(tmp_path: Path) -> None:
    folders = [built(tmp_path / name, seed, n_shards=1, words=name != "c") for seed, name in enumerate("abc")]
    with served(folders[0]) as (server,), grpc.insecure_channel(server.address) as channel:

        def words_of_prepared(folder: Path) -> bool:
            snapshot_id = Snapshot.open(folder).manifest.snapshot_id
            server._publishing.prepare(folder, snapshot_id, Deadline.never())
            prepared = server.held.find(snapshot_id)
            assert prepared is not None
            return prepared.words._words is not None

        assert not words_of_prepared(folders[1])
        server._publishing.discard(Snapshot.open(folders[1]).manifest.snapshot_id, Deadline.never())
        index_pb2_grpc.IndexServiceStub(channel).Search(index_pb2.SearchRequest(questions=["word1"], k=1))
        assert words_of_prepared(folders[1])
        assert not words_of_prepared(folders[2])


class Slow:
    """Words of a shard of one passage: a question's words are told as they are added up."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def adding_up(self, question: str) -> Iterator[Float32]:
        yield np.zeros(1, np.float32)
        for word in question.split():
            self.told.append(word)
            yield np.zeros(1, np.float32)

    def candidates(self, scores: Float32, *_: object) -> Candidates:
        return Candidates(np.zeros((1, 1), np.int64), scores[None], scores[None], "s")


class Asked:
    """What becomes of questions, by parts as they are taken."""

    def __init__(self, *questions: str, deadline: Deadline) -> None:
        self.words, self.ticket, self.outcomes = Slow(), Ticket("caller"), list[Outcome]()
        shard: Any = SimpleNamespace(words=self.words, max_k=9, max_rows=9)
        self._request, self._context = index_pb2.SearchRequest(questions=questions, k=1), Context(deadline)
        self._searches = WordSearches(HeldSnapshots("s", shard, 1, 0.0), self)  # type: ignore[arg-type]
        self.begin()

    def begin(self) -> None:
        self._searches.begin(self._request, b"", self._context, self.ticket, self.outcomes.append)

    def submit(self, caller: object, n_ids: int, parts: Iterator[None], refuse: object) -> None:
        self.n_parts, self.parts = n_ids // PART_IDS, parts


def test_a_long_question_is_done_in_parts_that_were_counted_before() -> None:
    asked = Asked("aa " * 1000, "bb", "cc " * 100, deadline=Deadline.never())
    n_taken, n_words = 0, [0]
    for _ in asked.parts:
        n_taken += 1
        n_words.append(len(asked.words.told))
    assert asked.words.told == ["aa"] * 1000 + ["bb"] + ["cc"] * 100
    assert 25 < n_taken <= asked.n_parts
    assert max(np.diff(n_words)) <= PART_WORDS
    (found,) = asked.outcomes
    assert isinstance(found, Candidates)
    assert found.ids.shape == (3, 1)


def test_few_questions_wait_in_their_middle() -> None:
    asked = Asked("aa " * 1000, deadline=Deadline.never())
    parts = [asked.parts]
    for _ in range(MOST_BEGUN):
        asked.begin()
        parts.append(asked.parts)
    for each in parts:
        next(each)
    assert len(asked.words.told) == MOST_BEGUN * PART_WORDS + 1000


def test_a_long_question_stops_at_its_deadline_and_when_nobody_waits() -> None:
    now = 0.0
    late, left = (Asked("aa " * 1000, deadline=Deadline(1.0, lambda: now)) for _ in range(2))
    for asked in (late, left):
        next(asked.parts)
    left.ticket.cancelled = True
    assert list(left.parts) == []
    now = 2.0
    assert list(late.parts) == []
    codes = [outcome.code for asked in (late, left) for outcome in asked.outcomes if isinstance(outcome, Failed)]
    assert codes == ["DEADLINE_EXCEEDED", "CANCELLED"]
    assert len(late.words.told) <= PART_WORDS + 1


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[index_pb2_grpc.IndexServiceStub]:
    settings = IndexServerSettings(snapshot=built(tmp_path_factory.mktemp("bad") / "s"), max_k=100, max_rows=4)
    with IndexServer(settings) as server, grpc.insecure_channel(server.address) as channel:
        yield index_pb2_grpc.IndexServiceStub(channel)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"k": 0}, r"k must be 1..100, got 0"),
        ({"k": 101}, r"k must be 1..100, got 101"),
        ({"questions": ["a"] * 5}, r"questions must be 1..4, got 5"),
        ({"questions": ["a" * 65_536, "b"]}, r"must have at most 65536 characters together, got 65537"),
        ({"questions": ["a", "b"], "also": [1, 2, 3]}, r"also must have 0..100 ids for each of 2 questions, got 3"),
        ({"also": [1] * 101}, r"also must have 0..100 ids for each of 1 questions, got 101"),
        ({"queries": wire.matrix_to_wire(QUERIES[:2])}, r"queries must be as many as questions, 1, got 2"),
        ({"queries": wire.matrix_to_wire(QUERIES[:1, :3])}, r"queries must have dimension 8, got 3"),
        ({"queries": wire.matrix_to_wire(QUERIES[:1] * np.float32("nan"))}, r"queries must be finite"),
        ({"queries": wire.matrix_to_wire(QUERIES[:1] * np.float32(1e37))}, r"queries must have norms up to"),
    ],
)
def test_bad_searches_are_refused_by_name(
    stub: index_pb2_grpc.IndexServiceStub, values: dict[str, object], message: str
) -> None:
    request = index_pb2.SearchRequest(**{"questions": ["word1"], "k": 1, **values})  # type: ignore[arg-type]
    with pytest.raises(grpc.RpcError, match=message) as raised:
        stub.Search(request)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
    found = wire.candidates_from_wire(stub.Search(index_pb2.SearchRequest(questions=["word1"], k=3, also=[-1, 2**40])))
    assert found.ids.shape == (1, 5)


def test_no_answer_is_of_two_snapshots_while_others_are_published(tmp_path: Path) -> None:
    """Of equal vectors and other texts: what is found, and every score, is that of the snapshot that is named."""
    folders = [built(tmp_path / name, seed) for seed, name in enumerate("abc")]
    ids = [Snapshot.open(folder).manifest.snapshot_id for folder in folders]
    asked = SETTINGS[0], SETTINGS[2], SETTINGS[4]
    n_publications = 12

    async def scenario() -> None:
        twins = [ExactIndex(passages(seed), vectors(), each) for seed, each in enumerate(ids)]
        expected = {
            (twin.snapshot_id, i): await find(twin, QUESTIONS, QUERIES, settings, Context())
            for twin in twins
            for i, settings in enumerate(asked)
        }
        n_asked, done = dict.fromkeys(ids, 0), asyncio.Event()

        async def ask(tier: ShardedIndex, i: int) -> None:
            while not done.is_set():
                found = await find(tier, QUESTIONS, QUERIES, asked[i], Context(Deadline.after(60)))
                check(found, expected[found.snapshot_id, i])
                n_asked[found.snapshot_id] += 1

        with ExitStack() as stack:
            settings = [IndexServerSettings(snapshot=folders[0], shard=shard) for shard in (0, 0, 1, 1)]
            addresses = [stack.enter_context(IndexServer(each)).address for each in settings]
            tier = ShardedIndex(addresses, timeout_s=60)
            async with asyncio.TaskGroup() as group:
                for i in range(len(asked)):
                    group.create_task(ask(tier, i))
                for number in range(1, n_publications + 1):
                    await publish(folders[number % 3], IndexClientSettings(addresses=tuple(addresses)))
                    found = await find(tier, QUESTIONS, QUERIES, asked[1], Context(Deadline.after(60)))
                    assert found.snapshot_id == ids[number % 3]
                done.set()
            await tier.close()
        assert all(n_asked.values())

    asyncio.run(scenario())


def check(found: Hits, expected: Hits) -> None:
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.scores.tolist() == expected.scores.tolist()


def test_the_twin_ranks_what_it_is_asked(tmp_path: Path) -> None:
    """Plain arithmetic over bm25s' scores and inner products, which shares nothing with `fuse`."""
    dense = QUERIES @ vectors().T
    for settings in SETTINGS[2:]:
        twin = ExactIndex(passages(0), vectors())
        found = fuse(asyncio.run(twin.candidates(QUESTIONS, QUERIES, settings, Context())), settings)
        for row, by_query, by_words in zip(found.ids.tolist(), dense, reference(0, QUESTIONS), strict=True):
            there = [i for i in range(N) if i not in settings.without]
            n = max(100, settings.k)
            places = [sorted(there, key=lambda i: (-scores[i], i))[:n] for scores in (by_query, by_words)]
            places[1] = [i for i in places[1] if by_words[i] > 0]
            union = {*places[0], *places[1]}
            if settings.bm25_weight is None:
                merit = {i: sum(1 / (61 + p.index(i)) for p in places if i in p) for i in union}
            else:
                merit = {i: float(np.float32(by_query[i] + settings.bm25_weight * by_words[i])) for i in union}
            assert [i for i in row if i >= 0] == sorted(union, key=lambda i: (-merit[i], i))[: settings.k]
