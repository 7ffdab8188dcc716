"""Files of judgments that cannot be read are refused, with file, line and field."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openbook.config import section
from openbook.core.types import Passage, Retrieved
from openbook.errors import InvalidConfig, InvalidDocuments
from openbook.evaluation.judged import read_judged
from openbook.evaluation.rankings import Ranking, as_trec
from openbook.evaluation.retrieve import _ranking
from openbook.evaluation.run import to_ask
from openbook.evaluation.settings import EvaluationSettings, RankingSettings


def settings(**values: Any) -> RankingSettings:
    given: dict[str, Any] = {"questions": ["q.jsonl"], "out": "out", "snapshot": "snapshot"}
    return section(RankingSettings, "test", **{**given, **values})


def beir(folder: Path, queries: str, qrels: str) -> Path:
    (folder / "qrels").mkdir()
    (folder / "queries.jsonl").write_text(queries)
    (folder / "qrels" / "dev.tsv").write_text(qrels)
    return folder


GOOD = '{"_id": "1", "text": "what?"}\n'


@pytest.mark.parametrize(
    ("queries", "qrels", "problem"),
    [
        (GOOD, "1\td\tyes\n", r"dev\.tsv:1: must be query, document and a whole number with tabs .* got '1\\td\\tyes'"),
        (GOOD, "query-id\tcorpus-id\tscore\n1 0 d 1\n", r"dev\.tsv:2: must be query"),
        (GOOD, "1\td\t1\n2\td\t1\n", r"dev\.tsv: query '2' is not in queries\.jsonl"),
        (GOOD, "", "holds no question of which it is known what should be found"),
        ('{"_id": 1, "text": "what?"}\n', "1\td\t1\n", r"queries\.jsonl:1: _id must be a string .* got 1"),
        (f"{GOOD}[]\n", "1\td\t1\n", r"queries\.jsonl:2: must be an object, got '\[\]'"),
        (f"{GOOD}{{\n", "1\td\t1\n", r"queries\.jsonl:2: not JSON"),
    ],
)
def test_a_folder_that_is_not_beirs_is_named(tmp_path: Path, queries: str, qrels: str, problem: str) -> None:
    with pytest.raises(InvalidDocuments, match=problem):
        read_judged(beir(tmp_path, queries, qrels), settings(split="dev"))
    with pytest.raises(InvalidDocuments, match=r"test\.tsv: cannot be read"):
        read_judged(tmp_path, settings())


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (
            [{"provenance": [{"title": "A"}]}],
            r"kilt\.jsonl:1: output must be a list of objects with an answer, whose provenance has wikipedia_id",
        ),
        ([{"provenance": 7}], "output must be a list"),
        ("none", "output must be a list"),
    ],
)
def test_a_file_that_is_not_kilts_is_named(tmp_path: Path, output: object, problem: str) -> None:
    path = tmp_path / "kilt.jsonl"
    path.write_text(f'{{"id": "1", "input": "what?", "output": {output!r}}}\n'.replace("'", '"'))
    with pytest.raises(InvalidDocuments, match=problem):
        read_judged(path, settings())


def test_the_questions_drawn_are_those_of_evaluations_that_answer(tmp_path: Path) -> None:
    """Of which those without provenance are left out: of them it is not known what should be found."""
    pages = '{"provenance": [{"wikipedia_id": "p"}]}'
    outputs = [f'[{{"answer": "a"}}, {pages}]' if number % 3 else '[{"answer": "a"}]' for number in range(30)]
    path = tmp_path / "kilt.jsonl"
    path.write_text("".join(f'{{"id": "{i}", "input": "?", "output": {each}}}\n' for i, each in enumerate(outputs)))
    told, judged = read_judged(path, settings(limit=9))
    asked = to_ask(path, section(EvaluationSettings, "test", questions=["q"], out="o", snapshot="s", limit=9))
    assert len(asked) == 9
    assert [each.id for each in judged] == [each.id for each in asked if int(each.id) % 3]
    assert 0 < len(judged) < 9
    assert told["drawn of"] == "all questions", "or a former version's rankings would be gone on with, of others"


def test_of_more_passages_than_are_ranked_the_first_hundred_count(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"question": "?", "answers": ["here"]}\n')
    ((judged,), _) = reversed(read_judged(path, settings()))
    texts = [*["nothing"] * 100, "here"]
    passages = tuple(Passage(i, f"d{i}", "", text) for i, text in enumerate(texts))
    assert set(judged.worth((), passages).values()) == {0.0}
    assert judged.worth((), passages[1:])["mrr@100"] == 0.01
    ranked = _ranking("f", judged, Retrieved(passages, np.arange(101, 0, -1, dtype=np.float32), "s"))
    assert (ranked.found, ranked.scores) == (tuple(map(str, range(100))), tuple(range(101, 1, -1)))


def test_what_is_asked_of_nothing_is_refused() -> None:
    for values, problem in (
        ({"snapshot": None}, "name a snapshot or index servers, one of them"),
        ({"n_passages": 50}, "n_passages = 50"),
        ({"pages": "url"}, "pages = 'url'"),
        ({"questions": ["a/nq", "b/nq.jsonl"]}, "names of files must differ, got nq, nq"),
    ):
        with pytest.raises(InvalidConfig, match=problem):
            settings(**values)


def test_a_run_has_one_word_a_name_and_scores_that_fall() -> None:
    found = Ranking(file="f", id="q 1", question="?", found=("a b", "c", "d"), scores=(1.5, 1.5, 1.5), worth={})
    rows = [row.split() for row in as_trec([found])]
    assert [row[:4] for row in rows] == [["q_1", "Q0", name, str(i)] for i, name in enumerate(["a_b", "c", "d"], 1)]
    scores = [float(row[4]) for row in rows]
    assert scores[0] == 1.5
    assert scores == sorted(set(scores), reverse=True)
    assert scores == pytest.approx([1.5] * 3)
