"""`openbook evaluate` with the models that come with openbook, over a small snapshot: run, interrupted, refused."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluations import lines, stopping
from matplotlib.image import imread
from typer.testing import CliRunner

from openbook.cli import app
from openbook.config import EncoderSettings, section
from openbook.core.deadline import Deadline
from openbook.core.fingerprint import file_digest
from openbook.core.types import Formulation, Passage
from openbook.corpus.build import build_corpus
from openbook.errors import InvalidConfig, InvalidDocuments, InvalidRequest, SnapshotMismatch
from openbook.evaluation.record import PLAN, PREDICTIONS, Record
from openbook.evaluation.run import evaluate, to_ask
from openbook.evaluation.settings import EvaluationSettings
from openbook.experiments.asking import Variant, ask
from openbook.index.building.build import build_snapshot
from openbook.index.shard.shard import Shard
from openbook.models.checkpoint import load_generator
from openbook.models.encoder import TextEncoder
from openbook.testing import served

pytestmark = pytest.mark.usefixtures("loaded_once", "undrawn")

FACTS = [
    ("France", "Paris is the capital of France, a country in Europe.", "What is the capital of France?", "Paris"),
    ("Italy", "Rome is the capital of Italy, a country in Europe.", "What is the capital of Italy?", "Rome"),
    ("Poland", "Warsaw is the capital of Poland.", "What is the capital of Poland?", "Warsaw"),
    ("Marie Curie", "Marie Curie was born in Warsaw in 1867.", "In which year was Marie Curie born?", "1867"),
    ("The moon", "The moon goes around the earth.", "What does the moon go around?", "no such answer"),
]

ROUNDING = 1e-6
"""Of logarithms of probabilities about 1, which float32 and the processor's kernels leave above 0 or below."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of two shards and questions about it."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"id": f"d{i}", "title": title, "text": text} for i, (title, text, _, _) in enumerate(FACTS)]
    build_corpus(lines(folder / "documents.jsonl", rows), folder / "snapshot", EncoderSettings(), 2, "Flat")
    questions = [
        {"id": f"q{i}", "question": question, "answers": [answer], "title": title, "context": text}
        for i, (title, text, question, answer) in enumerate(FACTS)
    ]
    lines(folder / "facts.jsonl", questions)
    lines(folder / "patterns.jsonl", [{"question": "What is the capital of Poland?", "answer_regex": "w[a-z]rsaw"}])
    return folder


def settings(data: Path, out: Path, **values: Any) -> EvaluationSettings:
    given: dict[str, Any] = {
        "questions": [data / "facts.jsonl", data / "patterns.jsonl"],
        "out": out,
        "snapshot": data / "snapshot",
        "k": 2,
        "formulations": ["sequence", "token"],
        "max_new_tokens": 8,
        "generator": {"max_batch": 2},
    }
    return section(EvaluationSettings, "test", **{**given, **values})


def records(out: Path) -> list[Record]:
    return [Record.model_validate_json(line) for line in (out / PREDICTIONS).read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an evaluation that was not interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    results = evaluate(settings(data, out))
    assert [(result.file, result.formulation, result.n) for result in results] == [
        ("facts", "sequence", 5),
        ("facts", "token", 5),
        ("patterns", "sequence", 1),
        ("patterns", "token", 1),
    ]
    return out


def test_every_answer_is_recorded_with_what_it_rests_on(whole: Path) -> None:
    answered = records(whole)
    assert len(answered) == 12
    for record in answered:
        assert sorted(record.passage_ids) == [0, 1, 2, 3, 4], "searched are more than are read"
        assert record.log_likelihood <= ROUNDING
        assert -ROUNDING <= record.prior_entropy <= np.log(2) + ROUNDING
    by_id = {(record.id, record.formulation.value): record for record in answered if record.file == "facts"}
    france, moon = by_id["q0", "sequence"], by_id["q4", "sequence"]
    assert (france.question, france.answers) == ("What is the capital of France?", ("Paris",))
    assert france.passage_ids[0] == 0
    assert france.answer_rank == 1
    assert moon.answer_rank is None
    assert not moon.em
    assert by_id["q0", "token"].passage_ids == france.passage_ids
    pattern = next(record for record in answered if record.file == "patterns")
    assert (pattern.answer_regex, pattern.answers, pattern.f1) == ("w[a-z]rsaw", (), None)
    assert pattern.answer_rank is not None


def test_the_summary_is_that_of_the_records(data: Path, whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    for result in summary["results"]:
        mine = [r for r in records(whole) if (r.file, r.formulation) == (result["file"], result["formulation"])]
        assert result["n"] == len(mine)
        assert result["em"]["value"] == pytest.approx(np.mean([record.em for record in mine]))
        assert result["has_answer"]["1"]["value"] == pytest.approx(np.mean([r.has_answer_at(1) for r in mine]))
    manifest = json.loads((data / "snapshot" / "manifest.json").read_text())
    assert summary["plan"] == {
        "questions": {name: file_digest(data / f"{name}.jsonl") for name in ("facts", "patterns")},
        "limit": None,
        "seed": 0,
        "pages": "id",
        "formulations": ["sequence", "token"],
        "context": "retrieved",
        "index": {
            "snapshot_id": manifest["snapshot_id"],
            "n_passages": 5,
            "factory": "Flat",
            "recall": {str(k): 1.0 for k in (1, 5, 10, 100)},
        },
        "encoder": "embedded",
        "encoder_fingerprint": TextEncoder.load(EncoderSettings()).fingerprint,
        "generator": "embedded",
        "generator_fingerprint": load_generator("embedded").fingerprint,
        "dtype": "float32",
        "k": 2,
        "n_searched": 20,  # an exact index is searched once
        "retriever": "dense",
        "bm25_weight": None,
        "decoding": "thorough",
        "n_beams": 1,
        "max_new_tokens": 8,
        "labels": [],
        "batch": 2,
    }
    assert "Flat, 5 passages, recall@5 1.000" in (whole / "summary.md").read_text()


def test_the_picture_shows_something(whole: Path) -> None:
    picture = imread(whole / "reliability.png")[..., :3]
    height, width, _ = picture.shape
    assert min(height, width) > 300
    assert len(np.unique(picture[::8, ::8].reshape(-1, 3), axis=0)) > 20
    for rows in np.array_split(picture, 4):  # one row of pictures for each of the four results
        for panel in np.array_split(rows, 2, axis=1):
            assert 0.01 < (panel < 0.9).any(axis=2).mean() < 0.9


def test_interrupted_it_goes_on_to_the_same_predictions(data: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        evaluate(settings(data, out), stopping(after=4))
    assert len(records(out)) == 8
    with (out / PREDICTIONS).open("a") as file:  # and killed in the middle of the next batch
        file.write((whole / PREDICTIONS).read_text().splitlines(keepends=True)[8][:30])
    seen: list[tuple[str, int, int]] = []
    evaluate(settings(data, out), lambda *progress: seen.append(progress))
    assert seen == [("facts", 4, 5), ("facts", 5, 5), ("patterns", 0, 1), ("patterns", 1, 1)]
    for name in (PREDICTIONS, "summary.json", "summary.md"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()


def test_another_evaluation_does_not_go_on_with_it(data: Path, whole: Path, tmp_path: Path) -> None:
    before = (whole / PREDICTIONS).read_bytes()
    with pytest.raises(InvalidConfig, match="holds another evaluation: k is 2 there and 3 here"):
        evaluate(settings(data, whole, k=3))
    altered = lines(tmp_path / "facts.jsonl", [{"question": "Who?", "answers": ["I"]}])
    with pytest.raises(InvalidConfig, match="batch is 2 there and 3 here"):
        evaluate(settings(data, whole, generator={"max_batch": 3}))
    with pytest.raises(InvalidConfig, match="facts is"):
        evaluate(settings(data, whole, questions=[altered, data / "patterns.jsonl"]))
    assert (whole / PREDICTIONS).read_bytes() == before


def test_servers_that_run_give_the_same_answers(data: Path, whole: Path, tmp_path: Path) -> None:
    with served(data / "snapshot") as servers:
        index = {"addresses": [server.address for server in servers], "timeout_s": 60.0}
        evaluate(settings(data, tmp_path / "out", snapshot=None, index=index))
    assert (tmp_path / "out" / PREDICTIONS).read_bytes() == (whole / PREDICTIONS).read_bytes()


def test_a_replica_that_is_down_keeps_nobody_from_evaluating(data: Path, whole: Path, tmp_path: Path) -> None:
    """The others have the whole tier."""
    with served(data / "snapshot", n_replicas=2) as servers:
        index = {"addresses": [server.address for server in servers], "timeout_s": 60.0}
        servers[0].stop(grace_s=0)
        evaluate(settings(data, tmp_path / "out", snapshot=None, index=index))
    assert (tmp_path / "out" / PREDICTIONS).read_bytes() == (whole / PREDICTIONS).read_bytes()
    assert json.loads((tmp_path / "out" / PLAN).read_text()) == json.loads((whole / PLAN).read_text())


def test_what_is_read_of_a_compressed_index_is_what_is_served(data: Path, tmp_path: Path) -> None:
    """It finds better passages where it is asked for more: they rank behind what is read. Experiments ask alike."""
    vectors = np.random.default_rng(0).standard_normal((2000, 384), np.float32)
    passages = [Passage(i, f"d{i}", "", f"text {i}") for i in range(len(vectors))]
    encoder = json.loads((data / "snapshot" / "manifest.json").read_text())["encoder_fingerprint"]
    build_snapshot(passages, vectors, tmp_path / "coarse", 1, "IVF4,PQ4x4", "embedded", encoder)
    shard, queries = Shard(tmp_path / "coarse", 0), TextEncoder.load(EncoderSettings())
    encoded = queries.encode_questions([question for _, _, question, _ in FACTS])
    as_served = {k: shard.search(encoded, k, Deadline.never()).ids.tolist() for k in (2, 5, 20)}
    assert as_served[5] != [row[:5] for row in as_served[20]]
    files: dict[str, Any] = {"questions": [data / "facts.jsonl"], "snapshot": tmp_path / "coarse"}

    asked = settings(data, tmp_path / "out", **files, k=5, formulations=["token"])
    evaluate(asked)
    found = [list(record.passage_ids) for record in records(tmp_path / "out")]
    assert [row[:5] for row in found] == as_served[5]
    for row, more in zip(found, as_served[20], strict=True):
        assert row[5:] == [each for each in more if each not in row[:5]][:15]
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["n_searched"] == [5, 20]

    variants = [Variant(f"k = {k}", Formulation.TOKEN, {"k": k}) for k in (2, 5)]
    answered = ask(asked.model_copy(update={"out": tmp_path / "page.html"}), variants, lambda *at: None)
    for variant in variants:
        k = variant.changes["k"]
        assert [list(each.record.passage_ids[:k]) for each in answered.of(variant)] == as_served[k]


def test_gold_context_is_the_only_passage(data: Path, tmp_path: Path) -> None:
    gold = {"snapshot": None, "context": "gold", "formulations": ["token"]}
    (result,) = evaluate(settings(data, tmp_path / "out", questions=[data / "facts.jsonl"], **gold))
    assert [record.answer_rank for record in records(tmp_path / "out")] == [1, 1, 1, 1, None]
    assert {record.passage_ids for record in records(tmp_path / "out")} == {()}
    assert [record.prior_entropy for record in records(tmp_path / "out")] == pytest.approx([0.0] * 5, abs=ROUNDING)
    assert result.has_answer[1].value == pytest.approx(0.8)
    with pytest.raises(InvalidDocuments, match=r"patterns\.jsonl: gold context needs a context .* question 1 has none"):
        evaluate(settings(data, tmp_path / "other", **gold))


def test_a_question_of_unknown_words_is_answered_without_passages(data: Path, tmp_path: Path) -> None:
    unknown = lines(tmp_path / "unknown.jsonl", [{"question": "zzyzx?", "answers": ["x"]}])
    evaluate(settings(data, tmp_path / "out", questions=[unknown], retriever="bm25", formulations=["token"]))
    (record,) = records(tmp_path / "out")
    assert (record.answer_rank, record.passage_ids) == (None, ())


def test_retrieval_that_follows_the_answer_is_rag_token_where_it_looks_once(
    data: Path, whole: Path, tmp_path: Path
) -> None:
    def asked(follow: int) -> list[Record]:
        out = tmp_path / str(follow)
        evaluate(settings(data, out, formulations=["token"], follow=follow))
        return records(out)

    plain = [each for each in records(whole) if each.formulation is Formulation.TOKEN]
    for once, each in zip(asked(8), plain, strict=True):
        assert once.log_likelihood == pytest.approx(each.log_likelihood, abs=1e-5)
        assert once.prediction == each.prediction
        assert not once.signals  # a calibration is of plain answers
    again = asked(1)
    assert all(each.log_likelihood <= ROUNDING for each in again)
    assert any(a.log_likelihood != pytest.approx(b.log_likelihood) for a, b in zip(again, plain, strict=True))
    with pytest.raises(InvalidConfig, match="follow must be 0 but for one answer of RAG-Token"):
        settings(data, tmp_path / "no", follow=1)


def test_the_command_follows_the_answer(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--snapshot", str(data / "snapshot"), "--limit", "1", "--k", "2", "--threads", "1"]
    how = ["--formulation", "token", "--follow", "2", "--max-new-tokens", "4"]
    done = CliRunner().invoke(app, ["evaluate", str(data / "facts.jsonl"), "--out", str(out), *options, *how])
    assert done.exit_code == 0, done.output
    plan = json.loads((out / PLAN).read_text())
    assert (plan["follow"], plan["max_new_tokens"]) == (2, 4)
    assert [record.formulation for record in records(out)] == [Formulation.TOKEN]


def test_a_snapshot_of_another_encoder_is_refused(data: Path, tmp_path: Path) -> None:
    passages = [Passage(0, "d", "title", "text")]
    vectors = np.ones((1, 384), np.float32)
    build_snapshot(passages, vectors, tmp_path / "theirs", 1, "Flat", "somebody's", "other-fingerprint")
    with pytest.raises(SnapshotMismatch, match=r"query encoder 'embedded' asks for .* by encoder other-fingerprint"):
        evaluate(settings(data, tmp_path / "out", snapshot=tmp_path / "theirs"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("n_words", "given", "problem"),
    [
        (600, {}, "question has 602 tokens, and the encoder can read"),
        (230, {"snapshot": None, "context": "none"}, "question has 23[0-9] tokens, and the generator can read 224"),
    ],
)
def test_a_question_that_cannot_be_read_is_named_before_one_is_asked(
    data: Path, tmp_path: Path, n_words: int, given: dict[str, Any], problem: str
) -> None:
    """And nothing is left that would refuse the file once it is mended."""
    short = [{"id": f"q{i}", "question": "why?", "answers": ["so"]} for i in range(3)]
    long = {"id": "q9", "question": "why " * n_words, "answers": ["so"]}
    path, seen = lines(tmp_path / "long.jsonl", [*short, long]), list[tuple[str, int, int]]()
    with pytest.raises(InvalidRequest, match=f"^long, question q9: {problem}"):
        evaluate(settings(data, tmp_path / "out", questions=[path], **given), lambda *at: seen.append(at))
    assert not seen
    assert not (tmp_path / "out").exists()


def test_a_file_without_questions_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidDocuments, match="holds no questions"):
        evaluate(settings(data, tmp_path / "out", questions=[lines(tmp_path / "none.jsonl", [])]))


def test_the_command_asks_a_random_sample_and_prints_the_table(data: Path, tmp_path: Path) -> None:
    options = ["--snapshot", str(data / "snapshot"), "--k", "2", "--limit", "2", "--threads", "1"]
    asked: list[list[str]] = []
    for seed in (1, 2):
        out = tmp_path / str(seed)
        command = ["evaluate", str(data / "facts.jsonl"), "--out", str(out), "--seed", str(seed), *options]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        texts = done.stdout, (out / "summary.md").read_text()
        shown, kept = (sorted(re.findall(r"\d+\.\d+", text)) for text in texts)
        assert shown == kept
        ids = [record.id for record in records(out)]
        assert ids == sorted(ids)
        assert len(set(ids)) == 2
        assert ids == [each.id for each in to_ask(data / "facts.jsonl", settings(data, out, limit=2, seed=seed))]
        asked.append(ids)
    assert asked[0] != asked[1]
    refused = CliRunner().invoke(app, ["evaluate", str(data / "facts.jsonl"), "--out", str(tmp_path / "none")])
    assert isinstance(refused.exception, InvalidConfig)
    assert "name a snapshot or index servers" in str(refused.exception)


def test_labels_are_recorded_by_their_names_whatever_the_generator_calls_them(data: Path, tmp_path: Path) -> None:
    asked = [{"question": "What is the capital of France?", "label": "SUPPORTS"}]
    claims, labels = lines(tmp_path / "claims.jsonl", asked), ["SUPPORTS=Paris", "REFUTES=Rome"]
    evaluate(settings(data, tmp_path / "out", questions=[claims], labels=labels, formulations=["sequence"]))
    (record,) = records(tmp_path / "out")
    assert (record.prediction, record.em, record.f1) == ("SUPPORTS", True, 1.0)
    plan = json.loads((tmp_path / "out" / PLAN).read_text())
    assert (plan["labels"], plan["right"]) == (labels, "letter for letter"), "records of former versions say otherwise"
    facts = [data / "facts.jsonl"]
    with pytest.raises(InvalidDocuments, match=r"facts\.jsonl: labels must hold .*, got 2: \['SUPPORTS', 'REFUTES'\]"):
        evaluate(settings(data, tmp_path / "none", questions=facts, labels=labels))


def test_a_folder_is_said_to_be_for_rankings(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidDocuments, match=r"is a folder; BEIR's are for openbook evaluate --retrieve"):
        evaluate(settings(data, tmp_path / "out", questions=[data]))


def test_labels_are_right_letter_for_letter(data: Path, tmp_path: Path) -> None:
    """Without punctuation 1 and -1 would be one class."""
    claims = lines(tmp_path / "claims.jsonl", [{"question": "What is the capital of France?", "label": "-1"}])
    asked: dict[str, Any] = {"questions": [claims], "formulations": ["sequence"]}
    (result,) = evaluate(settings(data, tmp_path / "out", **asked, labels=["1=Paris", "-1=Rome"]))
    (record,) = records(tmp_path / "out")
    assert (record.prediction, record.em) == ("1", False)
    assert result.em.value == result.label_accuracy.value == 0.0
    with pytest.raises(InvalidDocuments, match=r"labels must hold the answer to one .*, got 2: \['1', '2'\]"):
        evaluate(settings(data, tmp_path / "none", **asked, labels=["1=Paris", "2=Rome"]))
