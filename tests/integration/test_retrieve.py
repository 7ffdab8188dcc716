"""`openbook evaluate --retrieve` over a small snapshot: three kinds of judgments, interrupted, held to trec_eval."""

import asyncio
import json
import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import ir_measures
import pytest
from evaluations import lines, stopping
from ir_measures import AP, RR, R, nDCG
from typer.testing import CliRunner

from openbook.cli import app
from openbook.config import EncoderSettings, IndexServerSettings, section
from openbook.core.fingerprint import file_digest
from openbook.core.splitting import Splitting
from openbook.core.types import RetrievalSettings, RetrieverKind
from openbook.corpus.build import build_corpus
from openbook.corpus.questions import Question
from openbook.errors import InvalidConfig, InvalidDocuments, InvalidRequest, SnapshotMismatch
from openbook.evaluation.rankings import RANKINGS, Ranking
from openbook.evaluation.retrieve import evaluate_retrieval
from openbook.evaluation.settings import RankingSettings
from openbook.evaluation.system import opened_library
from openbook.index.server.server import IndexServer
from openbook.models.encoder import TextEncoder
from openbook.testing import served

pytestmark = pytest.mark.usefixtures("loaded_once")

DOCUMENTS = {
    "france": ("France", "Paris is the capital of France, a country in Europe. " * 3),  # of several passages
    "italy": ("Italy", "Rome is the capital of Italy, a country in Europe."),
    "poland": ("Poland", "Warsaw is the capital of Poland."),
    "polska": ("Poland", "Warsaw is the capital of Poland."),  # scores as the one before
    "curie": ("Marie Curie", "Marie Curie was born in Warsaw in 1867."),
    "moon": ("The moon", "The moon goes around the earth."),
}
QUERIES = {
    "q1": ("What is the capital of France?", {"france": 2, "italy": 1}),
    "q2": ("What is the capital of Poland?", {"polska": 1}),
    "q3": ("Who was born in Warsaw?", {"curie": 3, "poland": 1, "moon": 0}),
    "moon": ("What goes around the earth?", {"moon": 1, "curie": 1}),  # a document of its own
    "q5": ("What does nobody know?", {"italy": 0}),
}
KILT = [
    ("k1", "Where was Marie Curie born?", [[("curie", "Marie Curie"), ("poland", "Poland")], [("moon", "The moon")]]),
    ("k2", "What is the capital of Italy?", [[("italy", "Italy")]]),
    ("k3", "What is not known?", []),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus in BEIR's layout, its snapshot of two shards, and questions of the three kinds."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "beir" / "qrels").mkdir(parents=True)
    rows = [{"_id": id, "title": title, "text": text, "metadata": {}} for id, (title, text) in DOCUMENTS.items()]
    corpus = lines(folder / "beir" / "corpus.jsonl", rows)
    build_corpus(corpus, folder / "snapshot", EncoderSettings(), 2, "Flat", splitting=Splitting(12))
    asked = [{"_id": id, "text": text} for id, (text, _) in QUERIES.items()]
    lines(folder / "beir" / "queries.jsonl", [*asked, {"_id": "train-1", "text": "of another split"}])
    rows = [f"{id}\t{document}\t{gain}\n" for id, (_, gains) in QUERIES.items() for document, gain in gains.items()]
    (folder / "beir" / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(rows))
    lines(
        folder / "kilt.jsonl",
        [
            {"id": id, "input": text, "output": [{"answer": "a"}, *map(provenance, sets)]}
            for id, text, sets in KILT
        ],
    )  # fmt: skip
    lines(
        folder / "answers.jsonl",
        [
            {"id": "a1", "question": "What is the capital of France?", "answers": ["Paris"]},
            {"id": "a2", "question": "What is the capital of Poland?", "answer_regex": "w[a-z]rsaw"},
            {"id": "a3", "question": "What is the capital of Italy?", "answers": ["no such answer"]},
        ],
    )
    return folder


def provenance(pages: list[tuple[str, str]]) -> dict[str, Any]:
    return {"provenance": [{"wikipedia_id": id, "title": title} for id, title in pages]}


def settings(data: Path, out: Path, *names: str, **values: Any) -> RankingSettings:
    files = [data / name for name in names or ("beir", "kilt.jsonl", "answers.jsonl")]
    given = {"questions": files, "out": out, "snapshot": data / "snapshot", "batch": 2}
    return section(RankingSettings, "test", **{**given, **values})


def rankings(out: Path) -> list[Ranking]:
    return [Ranking.model_validate_json(line) for line in (out / RANKINGS).read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an evaluation that was not interrupted."""
    out = tmp_path_factory.mktemp("whole") / "out"
    results = evaluate_retrieval(settings(data, out))
    assert [(result.file, result.judged_by, result.n) for result in results] == [
        ("beir", "documents", 5),
        ("kilt", "pages", 2),
        ("answers", "answers", 3),
    ]
    return out


def test_the_run_is_worth_to_trec_eval_what_the_summary_says(whole: Path) -> None:
    run = list(ir_measures.read_trec_run(str(whole / "beir.trec")))
    judgments = {id: gains for id, (_, gains) in QUERIES.items()}
    (beir, *_) = json.loads((whole / "summary.json").read_text())["results"]
    measures = {"ndcg@10": nDCG @ 10, "recall@5": R @ 5, "recall@1": R @ 1, "mrr@10": RR @ 10, "map@100": AP @ 100}
    theirs = ir_measures.calc_aggregate(list(measures.values()), judgments, run)
    for name, measure in measures.items():
        assert beir["worth"][name]["value"] == pytest.approx(theirs[measure]), name
        assert beir["worth"][name]["low"] <= theirs[measure] <= beir["worth"][name]["high"]
    scores = [row.score for row in run if row.query_id == "q2"]
    assert scores == sorted(set(scores), reverse=True), "equal scores are parted, for trec_eval sorts by them alone"


def test_the_plan_says_what_rankings_depend_on(data: Path, whole: Path) -> None:
    manifest = json.loads((data / "snapshot" / "manifest.json").read_text())
    plan = json.loads((whole / "summary.json").read_text())["plan"]
    beir = {"queries": data / "beir" / "queries.jsonl", "qrels": data / "beir" / "qrels" / "test.tsv"}
    assert plan == {
        "questions": {
            "beir": {"judged by": "documents", **{name: file_digest(path) for name, path in beir.items()}},
            "kilt": {"judged by": "pages", "questions": file_digest(data / "kilt.jsonl")},
            "answers": {"judged by": "answers", "questions": file_digest(data / "answers.jsonl")},
        },
        "limit": None,
        "seed": 0,
        "pages": "id",
        "n_passages": 100,
        "retriever": "dense",
        "bm25_weight": None,
        "index": {
            "snapshot_id": manifest["snapshot_id"],
            "n_passages": 8,
            "factory": "Flat",
            "recall": {str(k): 1.0 for k in (1, 5, 10, 100)},
        },
        "encoder": "embedded",
        "encoder_fingerprint": TextEncoder.load(EncoderSettings()).fingerprint,
        "dtype": "float32",
    }


def test_what_another_snapshot_finds_is_not_evaluated(data: Path, tmp_path: Path) -> None:
    """Published while it asked."""

    async def asked() -> None:
        async with opened_library(settings(data, tmp_path)) as library:
            former = replace(library, snapshot_id="former")
            await former.find([Question("q", "What is the capital of France?")], RetrievalSettings(k=1))

    with pytest.raises(SnapshotMismatch, match=r"evaluated is snapshot former, and now \w+ is published"):
        asyncio.run(asked())


def test_documents_are_ranked_by_their_best_passage_and_none_finds_itself(whole: Path) -> None:
    by_id = {ranking.id: ranking for ranking in rankings(whole) if ranking.file == "beir"}
    assert sorted(by_id["q1"].found) == sorted(DOCUMENTS), "each once, however many passages it has"
    assert by_id["q1"].found[0] == "france"
    assert by_id["q1"].worth["recall@1"] == 0.5
    assert sorted(by_id["moon"].found) == sorted({*DOCUMENTS} - {"moon"})
    assert set(by_id["q5"].worth.values()) == {0.0}
    assert by_id["q2"].found[:2] == ("poland", "polska"), "ties by passage id"
    assert by_id["q2"].worth["mrr@10"] == 0.5


def test_pages_are_judged_as_kilt_does_by_id_or_title(data: Path, whole: Path, tmp_path: Path) -> None:
    (by_id,) = [ranking for ranking in rankings(whole) if ranking.id == "k1"]
    assert by_id.found[0] == "curie"
    assert by_id.worth["recall@100"] == 1.0
    assert by_id.worth["recall@1"] == 0.0, "one of two pages is no evidence"
    (result,) = evaluate_retrieval(settings(data, tmp_path / "out", "kilt.jsonl", pages="title"))
    (by_title, italy) = rankings(tmp_path / "out")
    assert sorted(by_title.found) == sorted({title for title, _ in DOCUMENTS.values()}), "two documents are one page"
    assert by_title.worth["recall@100"] == italy.worth["r_precision"] == 1.0
    assert result.worth["r_precision"].value >= 0.5
    assert "Marie_Curie" in (tmp_path / "out" / "kilt.trec").read_text()


def test_where_only_answers_are_known_passages_that_hold_one_count(whole: Path) -> None:
    paris, warsaw, nothing = (ranking for ranking in rankings(whole) if ranking.file == "answers")
    assert (paris.worth["has_answer@1"], warsaw.worth["has_answer@1"]) == (1.0, 1.0)
    assert set(nothing.worth.values()) == {0.0}
    text = (whole / "summary.md").read_text()
    assert "| answers | 3 | 66.7 (" in text
    assert text.count("| Flat, 8 passages, recall@5 1.000 |") == 3


def test_interrupted_it_goes_on_to_the_same_rankings(data: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        evaluate_retrieval(settings(data, out), stopping(after=4))
    assert len(rankings(out)) == 4
    with (out / RANKINGS).open("a") as file:  # and killed in the middle of the next batch
        file.write((whole / RANKINGS).read_text().splitlines(keepends=True)[4][:30])
    seen: list[tuple[str, int, int]] = []
    evaluate_retrieval(settings(data, out), lambda *progress: seen.append(progress))
    assert seen[0] == ("beir", 4, 5)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole.iterdir())
    for path in whole.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    with pytest.raises(InvalidConfig, match="holds another evaluation: pages is"):
        evaluate_retrieval(settings(data, out, pages="title"))


def test_the_command_searches_servers_and_prints_the_table(data: Path, tmp_path: Path) -> None:
    with served(data / "snapshot") as servers:
        at = [option for server in servers for option in ("--index", server.address)]
        options = ["--retrieve", "--limit", "2", "--threads", "1", "--out", str(tmp_path / "out"), *at]
        done = CliRunner().invoke(app, ["evaluate", str(data / "answers.jsonl"), *options])
    assert done.exit_code == 0, done.output
    texts = done.stdout, (tmp_path / "out" / "summary.md").read_text()
    shown, kept = (sorted(re.findall(r"\d+\.\d+", text)) for text in texts)
    assert shown == kept
    assert len(rankings(tmp_path / "out")) == 2
    refused = CliRunner().invoke(app, ["evaluate", "q.jsonl", "--retrieve", "--gold", "--out", str(tmp_path / "none")])
    assert isinstance(refused.exception, InvalidRequest)


@pytest.mark.parametrize("retriever", RetrieverKind)
def test_servers_that_take_few_questions_at_once_find_what_others_find(
    data: Path, tmp_path: Path, retriever: RetrieverKind
) -> None:
    def found(at: list[IndexServer], out: Path) -> list[tuple[Any, ...]]:
        index = {"addresses": [server.address for server in at], "timeout_s": 60.0}
        asked = {"snapshot": None, "index": index, "retriever": retriever, "batch": 64}
        evaluate_retrieval(settings(data, out, "beir", **asked))
        return [(ranking.found, ranking.scores, ranking.worth) for ranking in rankings(out)]

    few = (IndexServerSettings(snapshot=data / "snapshot", shard=i, max_rows=2, max_streams=8) for i in range(2))
    with served(data / "snapshot") as many, ExitStack() as stack:
        of_few = found([stack.enter_context(IndexServer(each)) for each in few], tmp_path / "few")
        assert of_few == found(many, tmp_path / "many")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--retriever", "bm25"], "by bm25."),
        (["--retriever", "hybrid"], "by hybrid."),
        (["--retriever", "hybrid", "--bm25-weight", "0.5"], "by hybrid with 0.5 of BM25."),
    ],
)
def test_other_retrievers_rank_in_their_own_order(data: Path, tmp_path: Path, asked: list[str], told: str) -> None:
    out = tmp_path / "out"
    options = ["--retrieve", "--threads", "1", "--out", str(out), "--snapshot", str(data / "snapshot"), *asked]
    done = CliRunner().invoke(app, ["evaluate", str(data / "beir"), str(data / "answers.jsonl"), *options])
    assert done.exit_code == 0, done.output
    assert f"100 passages are searched for each, {told}" in " ".join(done.stdout.split())
    by_id = {ranking.id: ranking for ranking in rankings(out)}
    assert by_id["a2"].worth["has_answer@1"] == 1.0
    assert by_id["q3"].found[0] == "curie"
    run = [line.split() for line in (out / "beir.trec").read_text().splitlines() if line.startswith("q3 ")]
    assert [row[2] for row in run] == list(by_id["q3"].found)
    scores = [float(row[4]) for row in run]
    assert scores == sorted(scores, reverse=True)


def test_long_questions_are_found_as_short_ones_are(data: Path, tmp_path: Path) -> None:
    asked = [f"What is the capital of {country}?" for country in ("France", "Poland", "Italy")]
    found = []
    for name, n_spaces in (("short", 0), ("long", 30_000)):  # a server takes two of the long ones in one call
        texts = [text.replace(" ", " " * (n_spaces + 1), 1) for text in asked]
        rows = [{"id": str(i), "question": text, "answers": ["Paris"]} for i, text in enumerate(texts)]
        path, out = lines(tmp_path / f"{name}.jsonl", rows), tmp_path / name
        evaluate_retrieval(settings(data, out, questions=[path], retriever=RetrieverKind.HYBRID, batch=64))
        found.append([(ranking.found, ranking.scores, ranking.worth) for ranking in rankings(out)])
    assert found[0] == found[1]


def test_what_cannot_be_searched_for_is_named(data: Path, tmp_path: Path) -> None:
    path = lines(tmp_path / "long.jsonl", [{"id": "q9", "question": "why " * 600, "answers": ["so"]}])
    with pytest.raises(InvalidRequest, match=r"^long, question q9: question has 602 tokens"):
        evaluate_retrieval(settings(data, tmp_path / "out", questions=[path]))
    path = lines(tmp_path / "long.jsonl", [{"id": "q9", "question": "?" * 65_537, "answers": ["so"]}])
    with pytest.raises(InvalidRequest, match=r"^long, question q9: question must have at most 65536 characters, got"):
        evaluate_retrieval(settings(data, tmp_path / "out", questions=[path], retriever=RetrieverKind.BM25))
    assert not (tmp_path / "out").exists()
    none = lines(tmp_path / "kilt.jsonl", [{"id": "k", "input": "what?", "output": [{"answer": "a"}]}])
    with pytest.raises(InvalidDocuments, match=r"kilt\.jsonl: holds no question of which it is known"):
        evaluate_retrieval(settings(data, tmp_path / "out", questions=[none]))
