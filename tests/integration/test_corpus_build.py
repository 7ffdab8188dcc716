"""`openbook build` with the real encoder: what comes out, and what an interruption costs."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_encoders
from small_disk import files_of_at_most
from typer.testing import CliRunner

from openbook.cli import app
from openbook.config import EncoderSettings
from openbook.core.fingerprint import text_digest
from openbook.core.types import Float32, Passage
from openbook.corpus import build as corpus_build
from openbook.corpus import encode as corpus_encode
from openbook.corpus.build import build_corpus
from openbook.corpus.encode import Worker, encode
from openbook.corpus.sources.limits import Failure
from openbook.corpus.sources.recognise import Names
from openbook.errors import (
    InvalidConfig,
    InvalidDocuments,
    InvalidModel,
    InvalidRequest,
    SnapshotMismatch,
    StartupError,
)
from openbook.evaluation.settings import EvaluationSettings
from openbook.index.disk.arrays import new_array
from openbook.index.disk.snapshot import Manifest, Snapshot
from openbook.index.disk.store import PassageReader
from openbook.models.encoder import TextEncoder

pytestmark = pytest.mark.usefixtures("loaded_once")

MODEL: Any = SimpleNamespace(dtype="float32")  # of a process in which nothing is computed
TEXTS = [
    f"Document {i} tells about {subject}." for i, subject in enumerate(("rivers", "music", "planets", "bread", "law"))
]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    return written(tmp_path)


def written(folder: Path) -> Path:
    path = folder / "documents.jsonl"
    rows = [{"id": f"d{i}", "title": f"Title {i}", "text": text} for i, text in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build(
    documents: Path, out: Path, on_progress: Callable[[str, int, int], None] = lambda *_: None, n_processes: int = 1
) -> Manifest:
    encoder = EncoderSettings(n_threads=n_processes)
    return build_corpus(documents, out, encoder, n_shards=2, factory="Flat", on_progress=on_progress)


def test_a_snapshot_holds_the_passages_and_their_embeddings(documents: Path, tmp_path: Path) -> None:
    manifest = build(documents, tmp_path / "out")
    snapshot = Snapshot.open(tmp_path / "out")
    assert snapshot.manifest == manifest
    encoder = TextEncoder.load(EncoderSettings(), role="passage")
    assert (manifest.encoder, manifest.encoder_fingerprint) == ("embedded", encoder.fingerprint)
    for shard, entry in enumerate(manifest.shards):
        snapshot.verify(shard)
        passages = PassageReader(snapshot.shard_folder(shard), entry.first_id)
        assert [p.text for p in passages] == TEXTS[entry.first_id : entry.first_id + entry.n_passages]
        vectors = np.load(snapshot.shard_folder(shard) / "vectors.npy")
        np.testing.assert_allclose(vectors, encoder.encode_passages(list(passages)), atol=1e-5)


def test_it_says_how_much_is_read_though_nobody_knows_how_much_there_is(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_build, "READ_BETWEEN", 2)
    seen: list[tuple[str, int, int]] = []
    build(documents, tmp_path / "out", lambda *progress: seen.append(progress))
    assert [progress for progress in seen if progress[0] == "read"] == [
        ("read", 0, 0),
        ("read", 2, 0),
        ("read", 4, 0),
        ("read", 5, 5),
    ]
    assert [name for name, *_ in seen[:5]] == [*["read"] * 4, "encode"]


def test_a_disk_without_room_is_one_line_and_the_build_goes_on_when_there_is(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "out.work"
    with files_of_at_most(2000), pytest.raises(StartupError, match=rf"^{work}/vectors\.npy: 7680 bytes are needed: F"):
        build(documents, tmp_path / "out")
    assert not (work / "vectors.npy").exists()

    def full(folder: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(corpus_build, "write_bm25", full)
        with pytest.raises(StartupError, match=f"^{work}: cannot go on: No space left on device; "):
            build(documents, tmp_path / "out")
    build(documents, tmp_path / "out")


def test_an_array_to_be_encoded_has_all_its_room_from_the_beginning(tmp_path: Path) -> None:
    """A store where the disk turned out to be full would kill the process without a word."""
    array = new_array(tmp_path / "a.npy", np.float32, (1000, 384))
    found = (tmp_path / "a.npy").stat()
    assert 512 * found.st_blocks >= found.st_size > array.nbytes
    assert not array.any()


def test_recall_is_measured_with_questions_of_a_file(documents: Path, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    texts = ["What tells about rivers?", "Which one is about law?", "What about bread?"]
    questions.write_text("".join(json.dumps({"question": text, "answers": ["it"]}) + "\n" for text in texts))
    command = ["build", str(documents), "--out", str(tmp_path / "out"), "--factory", "HNSW32", "--threads", "1"]
    done = CliRunner().invoke(app, [*command, "--queries", str(questions)])
    assert done.exit_code == 0, done.output
    recall = Snapshot.open(tmp_path / "out").manifest.recall
    assert recall is not None
    assert (recall.queries, recall.n_queries, recall.at_10) == ("given", 3, 1.0)


def test_fields_are_named_and_declared_on_the_command_line_and_every_span_is_its_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = "".join(f"{i},{2000 + i},{text}\n" for i, text in enumerate(TEXTS))
    (tmp_path / "a.csv").write_text(f"Key,Year,Words\n{rows}")
    command = ["build", str(tmp_path / "a.csv"), "--out", str(tmp_path / "out"), "--words", "3", "--threads", "1"]
    done = CliRunner().invoke(
        app, [*command, "--field", "year:int", "--field", "yaer", "--text", "Words", "--id", "Key"]
    )
    assert done.exit_code == 0, done.output
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "no document has a field yaer: is it spelled as in the documents?"
    ]
    snapshot = Snapshot.open(tmp_path / "out")
    passages = PassageReader(snapshot.shard_folder(0), 0, snapshot.manifest.fields)
    assert len(passages) > len(TEXTS)
    for passage in passages:
        text, origin = " ".join(TEXTS[int(passage.document_id)].split()), passage.origin
        assert origin is not None
        assert (origin.path, origin.fields) == ("a.csv", {"year": 2000 + int(passage.document_id)})
        assert (text[origin.start : origin.end], text_digest(text)) == (passage.text, origin.document_digest)


def test_tokens_sentences_and_an_overlap_are_chosen_on_the_command_line(documents: Path, tmp_path: Path) -> None:
    text = " ".join(TEXTS)
    documents.write_text(json.dumps({"id": "d", "title": "T", "text": text, "language": "en"}) + "\n")
    command = ["build", str(documents), "--out", str(tmp_path / "out"), "--threads", "1", "--tokens", "16"]
    done = CliRunner().invoke(app, [*command, "--at", "sentences", "--overlap", "8"])
    assert done.exit_code == 0, done.output
    snapshot = Snapshot.open(tmp_path / "out")
    found = list(PassageReader(snapshot.shard_folder(0), 0, snapshot.manifest.fields))
    assert [passage.text for passage in found] == [f"{one} {other}" for one, other in pairwise(TEXTS)]
    assert all(p.origin and text[p.origin.start : p.origin.end] == p.text for p in found)
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "other"), "--words", "100"])
    assert isinstance(done.exception, InvalidConfig)
    assert "got 100 words and 16 tokens" in str(done.exception)


def test_a_scan_is_chosen_on_the_command_line(documents: Path, tmp_path: Path) -> None:
    command = ["build", str(documents), "--out", str(tmp_path / "out"), "--scan", "int8", "--threads", "1"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert [shard.has_scan for shard in Snapshot.open(tmp_path / "out").manifest.shards] == [True]


def test_cores_that_nobody_names_are_those_that_there_are_for_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which `threads` finds: those of the machine may be of many containers."""
    asked: list[int] = []

    def build_only(documents: Path, out: Path, encoder: EncoderSettings, **_: object) -> None:
        asked.append(encoder.n_threads)
        raise InvalidConfig("enough")

    def evaluate_only(settings: EvaluationSettings, _: object) -> None:
        asked.extend((settings.encoder.n_threads, settings.generator.n_threads))

    monkeypatch.setattr(corpus_build, "build_corpus", build_only)
    monkeypatch.setattr("openbook.evaluation.run.evaluate", evaluate_only)
    for command in (["build", "embedded"], ["evaluate", "questions", "--closed-book"]):
        for threads in ([], ["--threads", "3"]):
            CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out"), *threads])
    assert asked == [0, 3, 0, 0, 3, 3]


def test_questions_that_say_nothing_of_recall_are_refused_before_anything_is_encoded(
    documents: Path, tmp_path: Path
) -> None:
    def refused(queries: Path, query_encoder: str | None = None) -> None:
        build_corpus(
            documents,
            tmp_path / "out",
            EncoderSettings(),
            n_shards=1,
            factory="Flat",
            queries=queries,
            query_encoder=query_encoder,
        )

    questions = tmp_path / "questions.jsonl"
    with pytest.raises(InvalidDocuments, match=r"questions\.jsonl: cannot be read"):
        refused(questions)
    questions.write_text("")
    with pytest.raises(InvalidDocuments, match=r"questions\.jsonl: holds no questions"):
        refused(questions)
    lines = [{"question": "who?"}, {"question": "long " * 300}]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(InvalidRequest, match=r"questions\.jsonl, question 2: question has .* can read 256$"):
        refused(questions)
    other = tiny_encoders.saved(tmp_path / "other", tiny_encoders.bert_model(), tiny_encoders.bert_tokenizer())
    with pytest.raises(SnapshotMismatch, match=r"query encoder '.*other' asks for .*, but this corpus has"):
        refused(questions, str(other))
    assert not (tmp_path / "out.work").exists()


def test_recall_is_measured_with_questions_whose_answers_nobody_knows(documents: Path, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(json.dumps({"question": "who invented the telephone?"}) + "\n")
    settings = EncoderSettings(n_threads=1)
    build_corpus(documents, out := tmp_path / "out", settings, 1, "HNSW4", queries=tmp_path / "log.jsonl")
    recall = Snapshot.open(out).manifest.recall
    assert recall is not None
    assert (recall.n_queries, recall.queries) == (1, "given")


def test_interrupted_it_goes_on_where_it_stopped(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_build, "ROWS_PER_STEP", 2)
    whole = build(documents, tmp_path / "whole")

    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(documents, tmp_path / "out", interrupt)
    assert not (tmp_path / "out").exists()
    seen: list[tuple[str, int]] = []
    resumed = build(documents, tmp_path / "out", lambda stage, done, total: seen.append((stage, done)))
    assert seen[:2] == [("encode", 4), ("encode", 5)], "the first four rows are not encoded again"
    assert resumed.snapshot_id == whole.snapshot_id
    assert "words" not in dict(seen), "nor are words counted again"
    for path in (tmp_path / "whole/bm25").iterdir():
        assert (tmp_path / "out/bm25" / path.name).read_bytes() == path.read_bytes()
    assert not (tmp_path / "out.work").exists()


def content(snapshot: Path) -> dict[str, object]:
    """Every file, but for the time when it was built."""
    files = {str(path.relative_to(snapshot)): path.read_bytes() for path in snapshot.rglob("*") if path.is_file()}
    manifest = json.loads(files.pop("manifest.json"))
    del manifest["created_at"]
    return {**files, "manifest": manifest}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, object]]:
    """What a build of so many shards holds that nothing happened to."""
    folder = tmp_path_factory.mktemp("fresh")
    documents, encoder = written(folder), EncoderSettings(n_threads=1)
    for n_shards in (2, 3):
        build_corpus(documents, folder / str(n_shards), encoder, n_shards, "Flat")
    return {n_shards: content(folder / str(n_shards)) for n_shards in (2, 3)}


@pytest.mark.parametrize("stage", ["words", "texts", "encode", "write", "index"])
@pytest.mark.parametrize("n_shards", [2, 3])
def test_interrupted_anywhere_it_goes_on_with_as_many_shards_or_others(
    documents: Path, tmp_path: Path, stage: str, n_shards: int, fresh: dict[int, dict[str, object]]
) -> None:
    def interrupt(name: str, done: int, total: int) -> None:
        if name == stage and done:
            raise KeyboardInterrupt

    encoder = EncoderSettings(n_threads=1)
    with pytest.raises(KeyboardInterrupt):
        build_corpus(documents, tmp_path / "out", encoder, 2, "Flat", on_progress=interrupt)
    build_corpus(documents, tmp_path / "out", encoder, n_shards, "Flat")
    assert content(tmp_path / "out") == fresh[n_shards]
    assert not (tmp_path / "out.work").exists()


KILLED_WHILE_WRITTEN = """
import os, sys
from pathlib import Path
from openbook.config import EncoderSettings
from openbook.corpus import build

def kill(stage, done, total):
    if stage == "write":
        os.kill(os.getpid(), 9)

documents, out = map(Path, sys.argv[1:])
build.build_corpus(documents, out, EncoderSettings(n_threads=1), 2, "Flat", on_progress=kill)
"""


def test_killed_when_some_shards_were_moved_it_goes_on(
    documents: Path, tmp_path: Path, fresh: dict[int, dict[str, object]]
) -> None:
    command = [sys.executable, "-c", KILLED_WHILE_WRITTEN, str(documents), str(tmp_path / "out")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "out.work/shards/2").iterdir()] == ["shard-0001"]
    build(documents, tmp_path / "out")
    assert content(tmp_path / "out") == fresh[2]


def test_several_processes_encode_the_same_bits_and_go_on_where_one_stopped(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_build, "ROWS_PER_STEP", 1)
    monkeypatch.setattr(corpus_encode, "ROWS_PER_PROCESS", 1)
    alone = build(documents, tmp_path / "alone")

    def interrupt(stage: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(documents, tmp_path / "out", interrupt)
    seen: list[int] = []
    together = build(documents, tmp_path / "out", lambda stage, done, total: seen.append(done), n_processes=2)
    assert together.snapshot_id == alone.snapshot_id
    assert (seen[0], sorted(seen[:5]), seen[4]) == (1, seen[:5], 5)


@pytest.mark.parametrize(("gpus", "sizes"), [(False, [2, 2, 1]), (True, [4, 1])])
def test_gpus_elsewhere_get_more_passages_at_a_time(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: bool, sizes: list[int]
) -> None:
    class Others:
        on_gpu = gpus

        def embeds_passages_by(self, space: str) -> str:
            return f"{space}, there"

        def encode(self, blocks: Iterable[tuple[range, Sequence[Passage]]]) -> Iterator[tuple[range, Float32]]:
            for step, passages in blocks:
                seen.append(len(passages))
                yield step, np.ones((len(passages), 384), np.float32)

    seen: list[int] = []
    monkeypatch.setattr(corpus_build, "ROWS_PER_STEP", 2)
    monkeypatch.setattr(corpus_build, "GPU_ROWS_PER_STEP", 4)
    build_corpus(documents, tmp_path / "out", EncoderSettings(n_threads=1), 1, "Flat", elsewhere=Others())
    assert seen == sizes


def test_a_process_that_ends_early_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(corpus_encode, "ROWS_PER_PROCESS", 4)
    has_failed, write = Event(), Worker.write

    def failing(worker: Worker, step: range) -> None:
        with ExitStack() as stack:
            stack.callback(has_failed.set)
            write(worker, step)

    monkeypatch.setattr(Worker, "write", failing)
    monkeypatch.setattr(corpus_encode, "_write", lambda folder, step, model: has_failed.wait(60))
    steps = [range(4), range(4, 8)]
    with pytest.raises(StartupError, match=r"encodes passages (0\.\.3|4\.\.7) ended with code 1"):
        encode(tmp_path, steps, EncoderSettings(n_threads=2), MODEL, lambda rows: None)


def test_what_is_done_beside_them_ends_when_a_process_that_encodes_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(corpus_encode, "ROWS_PER_PROCESS", 4)

    def beside(check: Callable[[], None]) -> None:
        while True:
            check()

    with pytest.raises(StartupError, match="ended with code 1"):
        encode(tmp_path, [range(8)], EncoderSettings(n_threads=2), MODEL, lambda rows: None, beside)


def test_a_folder_is_built_and_what_is_bad_in_it_is_listed(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i}.txt").write_text(text)
    (folder / "2.csv").write_bytes(b"text,n\n\xff,1\nOf tables.,2\n")
    (folder / "link").symlink_to(tmp_path)
    command = ["build", str(folder), "--out", str(tmp_path / "out"), "--threads", "1"]
    stopped = CliRunner().invoke(app, [*command, "--strict"])
    assert isinstance(stopped.exception, InvalidDocuments)
    assert "2.csv:2: not UTF-8" in str(stopped.exception)
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    listed = [line for line in done.stderr.splitlines() if line.startswith("left out: ")]
    assert [line.removeprefix(f"left out: {folder}/").split(":")[0] for line in listed[:2]] == ["2.csv", "link"]
    assert listed[2:] == ["left out: 2 in all"]
    passages = PassageReader(Snapshot.open(tmp_path / "out").shard_folder(0))
    assert [passage.document_id for passage in passages] == ["0.txt", "1.txt", "2.csv#3", "2.txt", "3.txt", "4.txt"]
    within = CliRunner().invoke(app, ["build", str(folder), "--out", str(folder / "out")])
    assert "lies in" in str(within.exception)


def test_what_was_left_out_is_told_again_by_a_build_that_goes_on(documents: Path, tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "encode":
            raise KeyboardInterrupt

    def tell(failure: Failure) -> None:
        told.append(str(failure))

    def build(on_progress: Callable[[str, int, int], None]) -> None:
        settings = EncoderSettings(n_threads=1)
        build_corpus(documents, tmp_path / "out", settings, 1, "Flat", on_progress=on_progress, on_failure=tell)

    told: list[str] = []
    with documents.open("a") as file:
        file.write("no JSON\n")
    with pytest.raises(KeyboardInterrupt):
        build(interrupt)
    build(lambda *_: None)
    assert told[0].startswith(f"{documents}:6: not JSON")
    assert told == [told[0]] * 2
    documents.write_text("no JSON\n" * 13)
    with pytest.raises(InvalidDocuments, match=r"jsonl: holds no words that could be read; failures: 13$"):
        build_corpus(documents, tmp_path / "2", EncoderSettings(n_threads=1), 1, "Flat", on_failure=tell)


def test_work_in_progress_on_other_documents_or_columns_is_not_gone_on_with(documents: Path, tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "encode":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(documents, tmp_path / "out", interrupt)
    documents.write_text(json.dumps({"id": "x", "title": "X", "text": "something else"}) + "\n")
    assert build(documents, tmp_path / "out").n_passages == 1
    with pytest.raises(KeyboardInterrupt):
        build(documents, tmp_path / "named", interrupt)
    build_corpus(documents, tmp_path / "named", EncoderSettings(n_threads=1), 1, "Flat", names=Names.of(title="id"))
    assert [passage.title for passage in PassageReader(tmp_path / "named" / "shard-0000")] == ["x"]


def test_one_build_of_a_target_at_a_time_and_no_work_in_progress_beside_what_is_done(
    documents: Path, tmp_path: Path
) -> None:
    def another(stage: str, done: int, total: int) -> None:
        if stage == "encode":
            with pytest.raises(InvalidConfig, match=r"out\.work: another process is at work here"):
                build(documents, tmp_path / "out")

    work = tmp_path / "out.work"
    build(documents, tmp_path / "out", another)
    work.mkdir()
    (work / "note.json").touch()  # as if killed after all but the last step
    with pytest.raises(InvalidConfig, match="out: exists"):
        build(documents, tmp_path / "out")
    assert not work.exists()


def test_a_folder_that_holds_something_else_is_left_alone(documents: Path, tmp_path: Path) -> None:
    (tmp_path / "out.work").mkdir()
    (tmp_path / "out.work" / "mine").write_text("precious")
    with pytest.raises(InvalidConfig, match=r"out\.work is for work in progress, and holds something else: mine"):
        build(documents, tmp_path / "out")
    assert (tmp_path / "out.work" / "mine").read_text() == "precious"


def test_bad_input_is_named_and_leaves_nothing_behind(documents: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(InvalidConfig, match="taken: exists"):
        build(documents, tmp_path / "taken")
    with pytest.raises(InvalidDocuments, match=r"none\.jsonl: no such file"):
        build(tmp_path / "none.jsonl", tmp_path / "out")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(InvalidDocuments, match=r"empty\.jsonl: holds no words"):
        build(empty, tmp_path / "out")
    assert not (tmp_path / "out.work").exists()
    with pytest.raises(InvalidModel, match="no-such/encoder"):
        build_corpus(documents, tmp_path / "out", EncoderSettings(model="no-such/encoder"), n_shards=1, factory="Flat")
    with pytest.raises(InvalidConfig, match="Flatt"):
        build_corpus(documents, tmp_path / "out", EncoderSettings(), n_shards=1, factory="Flatt")
    with pytest.raises(InvalidConfig, match="n_shards must be at least 1, got 0"):
        build_corpus(documents, tmp_path / "out", EncoderSettings(), n_shards=0, factory="Flat")
    assert not (tmp_path / "out").exists()
