"""Builds that encode less than all: a corpus of which little changed, and embeddings that exist already."""

import errno
import json
import os
import re
from collections.abc import Sequence
from functools import partialmethod
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_encoders as tiny
from typer.testing import CliRunner

from openbook.cli import app
from openbook.config import EncoderSettings
from openbook.core.splitting import Splitting
from openbook.corpus import build as corpus_build
from openbook.corpus import former, work
from openbook.corpus.build import build_corpus
from openbook.corpus.former import Changes, Former
from openbook.errors import InvalidConfig, InvalidDocuments, InvalidSnapshot
from openbook.index.disk.snapshot import Manifest, Snapshot
from openbook.models.encoder import TextEncoder

RNG = np.random.default_rng(0)
DOCUMENTS = {f"d{i}": " ".join(RNG.choice(tiny.WORDS[:30], 4 + 5 * i)) for i in range(8)}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> EncoderSettings:
    folder = tiny.saved(tmp_path_factory.mktemp("encoder"), tiny.bert_model(), tiny.bert_tokenizer())
    return EncoderSettings(model=folder, n_threads=1)


def written(path: Path, documents: dict[str, str]) -> Path:
    rows = [{"id": name, "title": f"About {name}", "text": text} for name, text in documents.items()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build(
    documents: Path, out: Path, encoder: EncoderSettings, **options: Any
) -> tuple[Manifest, list[Changes], list[int]]:
    """And what was told: of changes, and of how many passages were to be encoded."""
    changes: list[Changes] = []
    totals: list[int] = []
    manifest = build_corpus(
        documents,
        out,
        encoder,
        n_shards=2,
        factory="Flat",
        splitting=Splitting(20),
        on_changes=changes.append,
        on_progress=lambda stage, done, total: totals.append(total) if stage == "encode" else None,
        **options,
    )
    return manifest, changes, totals


def files_of(snapshot: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(snapshot)): path.read_bytes()
        for path in snapshot.rglob("*")
        if path.is_file() and path.name not in ("manifest.json", "about.json")  # these name the snapshot
    }


@pytest.mark.parametrize("exact_dtype", ["float32", "float16"])
def test_what_a_former_snapshot_has_is_not_encoded_again_and_the_bytes_are_those_of_a_fresh_build(
    exact_dtype: str, encoder: EncoderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(former, "ROWS_AT_ONCE", 2)
    build(written(tmp_path / "before", DOCUMENTS), tmp_path / "former", encoder, exact_dtype=exact_dtype)
    now = {name: text for name, text in DOCUMENTS.items() if name != "d5"}  # with which its second shard begins
    now["d7"] += " and one moon more"
    now = {"new": "the river nile", **now, "moved": DOCUMENTS["d5"]}
    documents = written(tmp_path / "now", now)
    fresh, told, totals = build(documents, tmp_path / "fresh", encoder, exact_dtype=exact_dtype)
    assert not told
    again, (changes,), totals_again = build(
        documents, tmp_path / "again", encoder, former=tmp_path / "former", exact_dtype=exact_dtype
    )
    assert (changes.added.n, changes.added.first) == (2, ("new", "moved"))
    assert (changes.changed.n, changes.changed.first) == (1, ("d7",))
    assert (changes.removed.n, changes.removed.first) == (1, ("d5",))
    assert changes.n_as_before == 6
    assert (totals[0], totals_again[0]) == (fresh.n_passages, fresh.n_passages - changes.n_kept)
    assert 0 < totals_again[0] <= 5
    assert again.snapshot_id == fresh.snapshot_id
    assert files_of(tmp_path / "again") == files_of(tmp_path / "fresh")


def test_a_document_in_parts_is_as_before_wherever_its_parts_lie_if_they_keep_their_order(
    encoder: EncoderSettings, tmp_path: Path
) -> None:
    """Where several files, or lines that are far from each other, have one id."""
    folder = tmp_path / "documents"
    folder.mkdir()
    written(folder / "a.jsonl", DOCUMENTS)
    written(folder / "b.jsonl", {"d0": "the other part", "d1": "another", "d7": "and the other part"})
    build(folder, tmp_path / "former", encoder)
    written(folder / "a.jsonl", {**DOCUMENTS, "d1": "another", "new": "the river nile"})
    written(folder / "b.jsonl", {"d0": "the other part", "d1": DOCUMENTS["d1"], "d7": "another part"})
    _, (changes,), _ = build(folder, tmp_path / "again", encoder, former=tmp_path / "former")
    assert (changes.added.first, changes.changed.first, changes.removed.n) == (("new",), ("d1", "d7"), 0)


def test_the_words_of_a_former_snapshot_are_verified_once(
    encoder: EncoderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, *_ = build(written(tmp_path / "documents", DOCUMENTS), tmp_path / "former", encoder)
    verified: list[Path] = []
    monkeypatch.setattr("openbook.index.disk.snapshot.verify_bm25", lambda folder, *_: verified.append(folder))
    assert (len(manifest.shards), manifest.embedded_by is None) == (2, False)
    Former(tmp_path / "former", manifest.embedded_by or "", "float32")
    assert verified == [tmp_path / "former"]


def test_a_change_is_told_on_the_command_line_also_where_a_build_goes_on(
    encoder: EncoderSettings, tmp_path: Path
) -> None:
    documents = written(tmp_path / "documents", DOCUMENTS)
    command = ["build", str(documents), "--threads", "1", "--words", "20", "--encoder", encoder.model, "--out"]
    assert CliRunner().invoke(app, [*command, str(tmp_path / "former")]).exit_code == 0
    written(documents, {**DOCUMENTS, **{f"new{i}": f"moon {i}" for i in range(7)}})

    interrupted(("encode", 0), documents, tmp_path / "out", encoder, former=tmp_path / "former")
    done = CliRunner().invoke(app, [*command, str(tmp_path / "out"), "--from", str(tmp_path / "former")])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[:4] == [
        "documents added: 7 (new0, new1, new2, new3, new4, ...)",
        "documents changed: 0",
        "documents removed: 0",
        "documents as before: 8",
    ]


def interrupted(at: tuple[str, int], documents: Path, out: Path, encoder: EncoderSettings, **options: Any) -> None:
    """A build that ends where so much of a stage is done."""

    def interrupt(stage: str, done: int, total: int) -> None:
        if (stage, done) == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_corpus(
            documents, out, encoder, 2, "Flat", **{"splitting": Splitting(20), "on_progress": interrupt, **options}
        )


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passages are encoded."""
    monkeypatch.setattr(corpus_build, "ROWS_PER_STEP", 1)


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("n_killed_while_read", [0, 1, 2])
def test_a_build_that_was_interrupted_encodes_nothing_again_that_is_in_another_corpus_too(
    encoder: EncoderSettings, tmp_path: Path, n_killed_while_read: int
) -> None:
    documents, out = written(tmp_path / "documents", DOCUMENTS), tmp_path / "out"
    interrupted(("encode", 4), documents, out, encoder)
    _, _, totals = build(documents, tmp_path / "before", encoder)
    written(documents, {"new": "the moon", **DOCUMENTS})
    for _ in range(n_killed_while_read):
        interrupted(("read", 0), documents, out, encoder)
    interrupted(("encode", 2), documents, out, encoder)
    written(documents, {"newer": "the earth and the moon", "new": "the moon", **DOCUMENTS})
    _, _, left = build(documents, out, encoder)
    build(documents, tmp_path / "fresh", encoder)
    assert left[0] == totals[0] + 2 - 4 - 2
    assert files_of(out) == files_of(tmp_path / "fresh")
    assert not out.with_name("out.work").exists()


@pytest.mark.usefixtures("one_by_one")
def test_it_takes_what_a_former_snapshot_has_and_what_an_interrupted_build_has(
    encoder: EncoderSettings, tmp_path: Path
) -> None:
    few = written(tmp_path / "few", {name: DOCUMENTS[name] for name in ("d6", "d7")})
    build(few, tmp_path / "former", encoder)
    documents, out = written(tmp_path / "documents", {"moon": "the moon", **DOCUMENTS}), tmp_path / "out"
    interrupted(("encode", 3), documents, out, encoder)
    _, (changes,), left = build(documents, out, encoder, former=tmp_path / "former")
    build(documents, tmp_path / "fresh", encoder)
    assert 0 < changes.n_kept <= changes.n_passages - left[0] <= changes.n_kept + 3
    assert files_of(out) == files_of(tmp_path / "fresh")


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("at", [("encode", 0), ("encode", 1)])
def test_vectors_that_were_rounded_get_into_no_others(
    encoder: EncoderSettings, tmp_path: Path, at: tuple[str, int]
) -> None:
    documents, out = written(tmp_path / "documents", {"moon": "the moon", **DOCUMENTS}), tmp_path / "out"
    build(written(tmp_path / "before", DOCUMENTS), tmp_path / "former", encoder, exact_dtype="float16")
    interrupted(at, documents, out, encoder, former=tmp_path / "former", exact_dtype="float16")
    written(documents, {"newer": "the earth", "moon": "the moon", **DOCUMENTS})
    interrupted(("encode", 1), documents, out, encoder, exact_dtype="float16")  # which takes them over
    _, _, left = build(documents, out, encoder)
    manifest, _, _ = build(documents, tmp_path / "fresh", encoder)
    assert left[0] == manifest.n_passages
    assert files_of(out) == files_of(tmp_path / "fresh")


def test_what_cannot_be_removed_when_the_snapshot_stands_is_left_to_the_next_build(
    encoder: EncoderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, out, rmdir = written(tmp_path / "documents", DOCUMENTS), tmp_path / "out", os.rmdir
    left = ["out.documents", "out.work"]

    def of_nfs(folder: str | Path, **options: Any) -> None:
        """Where open files keep a name until they are closed."""
        if Path(folder).name in left:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        rmdir(folder, **options)

    command = ["build", documents.as_uri(), "--threads", "1", "--words", "20", "--encoder", encoder.model, "--out"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", of_nfs)
        done = CliRunner().invoke(app, [*command, str(out)])
        assert done.exit_code == 0, done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["documents", "out", *left]
    assert "out: exists" in str(CliRunner().invoke(app, [*command, str(out)]).exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["documents", "out"]


def test_a_snapshot_that_another_build_made_meanwhile_is_found_before_anything_is_read(
    encoder: EncoderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents, out, stages = written(tmp_path / "documents", DOCUMENTS), tmp_path / "out", set[str]()
    digest = corpus_build.corpus_digest
    monkeypatch.setattr(corpus_build, "corpus_digest", lambda root: (out.mkdir(), digest(root))[1])
    with pytest.raises(InvalidConfig, match="out: exists"):
        build_corpus(documents, out, encoder, 2, "Flat", on_progress=lambda stage, *_: stages.add(stage))
    assert not stages


class Killed(BaseException):
    """As if."""


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("n_moved", range(len(work.OF_LEFT)))
@pytest.mark.parametrize("goes_back", [False, True])
def test_who_is_killed_while_he_sets_something_aside_loses_nothing(
    encoder: EncoderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_moved: int, goes_back: bool
) -> None:
    documents, out = written(tmp_path / "documents", DOCUMENTS), tmp_path / "out"
    interrupted(("encode", 4), documents, out, encoder)
    moves, rename = iter(range(n_moved)), Path.rename

    def rename_or_die(path: Path, to: Path) -> Path:
        if work.LEFT in to.parts and next(moves, None) is None:
            raise Killed
        return rename(path, to)

    written(documents, {"new": "the moon", **DOCUMENTS})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename_or_die)
        with pytest.raises(Killed):
            build(documents, out, encoder)
    if goes_back:
        written(documents, DOCUMENTS)
    manifest, _, told = build(documents, out, encoder)
    build(documents, tmp_path / "fresh", encoder)
    assert files_of(out) == files_of(tmp_path / "fresh")
    assert len(told) - 1 == manifest.n_passages - 4, "one by one, after what was there before"


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("why", ["another encoder", "no room", "vectors are given"])
def test_what_was_interrupted_is_forgotten_where_it_is_of_no_use(
    encoder: EncoderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    documents, out = written(tmp_path / "documents", DOCUMENTS), tmp_path / "out"
    interrupted(("encode", 4), documents, out, encoder)
    written(documents, {"new": "the moon", **DOCUMENTS})
    options: dict[str, Any] = {}
    if why == "another encoder":
        encoder = encoder.model_copy(update={"dtype": "bfloat16"})
    elif why == "no room":
        monkeypatch.setattr(work.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    else:
        build(documents, tmp_path / "other", encoder)
        options["vectors"] = tmp_path / "vectors.npy"
        shards = sorted((tmp_path / "other").glob("*/vectors.npy"))
        np.save(options["vectors"], np.concatenate([np.load(shard) for shard in shards]))
    _, _, left = build(documents, out, encoder, **options)
    _, _, whole = build(documents, tmp_path / "fresh", encoder)
    assert left[0] == (0 if options else whole[0])
    assert files_of(out) == files_of(tmp_path / "fresh")


def test_duplicates_are_reported_or_dropped(
    encoder: EncoderSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("read_text", "write_text"):  # the locale need not know all characters
        monkeypatch.setattr(Path, each, partialmethod(getattr(Path, each), encoding="ascii"))
    documents = written(tmp_path / "documents", {**DOCUMENTS, "żwin": DOCUMENTS["d1"]})
    command = ["build", str(documents), "--threads", "1", "--words", "20", "--encoder", encoder.model]
    passages = {}
    for what in ("report", "drop"):
        out = tmp_path / what
        done = CliRunner().invoke(app, [*command, "--out", str(out), "--duplicates", what])
        assert done.exit_code == 0, done.output
        passages[what] = Snapshot.open(out).manifest.n_passages
        assert done.stdout.splitlines()[:2] == [
            f"passages that repeat one before them: 1 equal, 0 nearly so, of {passages['report']}",
            f"  żwin repeats d1: {DOCUMENTS['d1'][:80]}",
        ]
    assert passages["drop"] == passages["report"] - 1
    with pytest.raises(InvalidConfig, match="duplicates must be keep, report, drop, got 'all'"):
        build(documents, tmp_path / "out", encoder, duplicates="all")
    with pytest.raises(InvalidConfig, match="duplicates cannot be dropped where vectors are given"):
        build(documents, tmp_path / "out", encoder, duplicates="drop", vectors=documents)


def test_a_report_says_what_was_made_and_loads_nothing(encoder: EncoderSettings, tmp_path: Path) -> None:
    documents = written(tmp_path / "documents", {**DOCUMENTS, "<b>": DOCUMENTS["d1"], "twin": DOCUMENTS["d1"]})
    with documents.open("a") as file:
        file.write("no JSON\n")
    command = ["build", str(documents), "--threads", "1", "--words", "20", "--encoder", encoder.model, "--out"]
    out = str(tmp_path / "out")
    for place, why in (
        ("none/report", "must be a file in a folder that exists"),
        ("r" * 250, "name too long"),
        ("out", "--report must be another file than the snapshot's folder, got "),
    ):
        refused = CliRunner().invoke(app, [*command, out, "--report", str(tmp_path / place)])
        assert why in str(refused.exception)
        assert not (tmp_path / "out").exists(), "refused before hours of work"
    report = tmp_path / "report.html"
    done = CliRunner().invoke(app, [*command, out, "--report", str(report)])
    assert done.exit_code == 0, done.output
    page = report.read_text()
    manifest = Snapshot.open(tmp_path / "out").manifest
    cells = re.findall(r"<td>(.*?)</td>", page)
    facts = dict(pairwise(cells))
    assert (facts["documents"], facts["passages"]) == ("10", str(manifest.n_passages))
    assert facts["snapshot"] == manifest.snapshot_id
    assert facts["passages whose text has stood before"].startswith("2 (")
    assert f"{documents}:11" in facts
    assert cells[cells.index(DOCUMENTS["d1"]) :][:3] == [DOCUMENTS["d1"], "d1", "3"]
    counts = [int(n) for n in re.findall(r"words: (\d+) passages", page)]
    assert sum(counts) == manifest.n_passages
    assert not re.search(r"<script|<b>|src=|href=|url\(", page)


def test_embeddings_of_another_build_are_not_taken_over(encoder: EncoderSettings, tmp_path: Path) -> None:
    documents = written(tmp_path / "documents", DOCUMENTS)
    build(documents, tmp_path / "half", encoder, exact_dtype="float16")
    with pytest.raises(InvalidConfig, match="has vectors in float16, which are not those of a build in float32"):
        build(documents, tmp_path / "out", encoder, former=tmp_path / "half")
    with pytest.raises(
        InvalidConfig, match=r"must be those of \w+-bfloat16, padded by 8, cpu, found those of \w+, padded"
    ):
        build(documents, tmp_path / "out", encoder.model_copy(update={"dtype": "bfloat16"}), former=tmp_path / "half")
    vectors = tmp_path / "half" / "shard-0000" / "vectors.npy"
    vectors.write_bytes(vectors.read_bytes()[:-1] + b"?")
    with pytest.raises(InvalidSnapshot, match="was altered"):
        build(documents, tmp_path / "out", encoder, former=tmp_path / "half", exact_dtype="float16")
    assert not (tmp_path / "out.work").exists()


def vectors_of(snapshot: Path) -> Any:
    shards: Sequence[Path] = sorted(snapshot.glob("shard-*"))
    return np.concatenate([np.load(shard / "vectors.npy") for shard in shards])


@pytest.mark.parametrize("exact_dtype", ["float32", "float16"])
def test_given_vectors_make_the_same_snapshot_without_encoding(
    exact_dtype: str, encoder: EncoderSettings, tmp_path: Path
) -> None:
    documents = written(tmp_path / "documents", DOCUMENTS)
    fresh, _, _ = build(documents, tmp_path / "fresh", encoder, exact_dtype=exact_dtype)
    np.save(tmp_path / "vectors.npy", vectors_of(tmp_path / "fresh"))
    manifest, _, totals = build(
        documents, tmp_path / "out", encoder, vectors=tmp_path / "vectors.npy", exact_dtype=exact_dtype
    )
    assert totals == [0]
    assert manifest.embedded_by is None, "other passages' may be anything"
    assert fresh.embedded_by is not None
    assert (manifest.exact_dtype, manifest.max_norm) == (fresh.exact_dtype, fresh.max_norm)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")
    for shard in range(2):
        Snapshot.open(tmp_path / "out").verify(shard)
    with pytest.raises(InvalidConfig, match="found those of an encoder that it does not name"):
        build(documents, tmp_path / "again", encoder, former=tmp_path / "out", exact_dtype=exact_dtype)


def test_vectors_of_something_else_are_refused_by_the_passage(encoder: EncoderSettings, tmp_path: Path) -> None:
    documents = written(tmp_path / "documents", DOCUMENTS)
    build(documents, tmp_path / "fresh", encoder)
    vectors = vectors_of(tmp_path / "fresh")
    path = tmp_path / "vectors.npy"

    def refused(vectors: Any, says: str) -> None:
        np.save(path, vectors)
        with pytest.raises(InvalidDocuments, match=says):
            build(documents, tmp_path / "out", encoder, vectors=path)

    refused(vectors[1:], rf"holds {len(vectors) - 1} vectors for {len(vectors)} passages")
    swapped = vectors.copy()
    swapped[[3, 4]] = vectors[[4, 3]]
    refused(
        swapped, r"row 3 is not the vector of passage 3 \(document 'd3', title 'About d3'\) by this encoder: it must"
    )
    refused(np.roll(vectors, 1, axis=0), rf"of {len(vectors)} that were encoded anew, {len(vectors)} differ")
    swapped[3, 0] = np.nan
    refused(swapped, "row 3 is not the vector")
    np.save(path, vectors + 0.001 * np.random.default_rng(0).standard_normal(vectors.shape).astype(np.float32))
    build(documents, tmp_path / "out", encoder, vectors=path)
    with pytest.raises(InvalidConfig, match="from files or from a former snapshot, got both"):
        build(documents, tmp_path / "both", encoder, vectors=path, former=tmp_path / "fresh")


def test_given_vectors_in_pieces_survive_an_interruption(encoder: EncoderSettings, tmp_path: Path) -> None:
    documents = written(tmp_path / "documents", DOCUMENTS)
    build(documents, tmp_path / "fresh", encoder)
    folder = tmp_path / "vectors"
    folder.mkdir()
    for number, part in enumerate(np.array_split(vectors_of(tmp_path / "fresh"), 3)):
        np.save(folder / f"{number}.npy", part)

    interrupted(("encode", 0), documents, tmp_path / "out", encoder, vectors=folder)
    assert (tmp_path / "out.work" / "note.json").exists()
    build(documents, tmp_path / "out", encoder, vectors=folder)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")


def test_a_dtype_in_which_no_vectors_are_kept_is_refused_before_any_work(
    encoder: EncoderSettings, tmp_path: Path
) -> None:
    documents = written(tmp_path / "documents", DOCUMENTS)
    with pytest.raises(InvalidConfig, match="exact dtype must be float32 or float16, got 'float8'"):
        build(documents, tmp_path / "out", encoder, exact_dtype="float8")
    assert not (tmp_path / "out.work").exists()


def test_the_embedding_of_a_passage_is_the_manifests(encoder: EncoderSettings, tmp_path: Path) -> None:
    documents = written(tmp_path / "documents", DOCUMENTS)
    manifest, _, _ = build(documents, tmp_path / "out", encoder, exact_dtype="float16")
    loaded = TextEncoder.load(encoder, "passage")
    assert manifest.embedded_by == loaded.embeds_passages_by
    assert manifest.exact_dtype == "float16"
    assert (tmp_path / "out" / "shard-0000" / "vectors.npy").stat().st_size == 128 + 6 * 2 * 16
