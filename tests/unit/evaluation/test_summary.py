"""From records to numbers and tables."""

import json
from math import isnan, log
from typing import Any

import pytest

from openbook.core.types import Formulation
from openbook.evaluation.record import Record
from openbook.evaluation.summary import as_json, summarise
from openbook.evaluation.tables import as_markdown

PLAN: dict[str, Any] = {
    "k": 5,
    "context": "retrieved",
    "n_beams": 1,
    "labels": [],
    "index": {"factory": "IVF256,SQ8", "n_passages": 9342, "recall": {"1": 0.9, "5": 0.987}},
}


def answered(confidence: float, em: bool, rank: int | None, **fields: Any) -> Record:
    values: dict[str, Any] = {
        "file": "squad", "id": "1", "question": "q", "answers": ("a b",), "answer_regex": None,
        "formulation": Formulation.SEQUENCE, "prediction": "a b" if em else "c", "em": em, "f1": float(em),
        "rouge_l": float(em), "log_likelihood": log(confidence), "answer_rank": rank, "prior_entropy": 1.0,
        "passage_ids": (),
    }  # fmt: skip
    return Record(**{**values, **fields})


RECORDS = [
    answered(0.9, True, 1),
    answered(0.8, True, 3),
    answered(0.6, False, 7),
    answered(0.2, False, None),
]


def test_numbers_of_one_file() -> None:
    (result,) = summarise(RECORDS, k=5)
    assert (result.file, result.formulation, result.n) == ("squad", "sequence", 4)
    assert result.em.value == result.f1.value == 0.5
    assert result.em.low <= 0.5 <= result.em.high
    assert {k: mean.value for k, mean in result.has_answer.items()} == {1: 0.25, 5: 0.5, 20: 0.75}
    assert result.auroc == 1.0
    assert result.mean_probability == pytest.approx(0.625)
    assert result.calibration_error == pytest.approx((0.1 + 0.2 + 0.6 + 0.2) / 4)
    assert result.bleu_1 == pytest.approx(4 / 6 * 2.718281828 ** (1 - 8 / 6))
    assert result.label_accuracy.value == 0.5
    assert isnan(result.distinct_3), "no answer has three words"


def test_wrong_answers_by_where_the_answer_was() -> None:
    by_place = summarise(RECORDS, k=5)[0].by_place
    assert {place: (group.n, group.wrong) for place, group in by_place.items()} == {
        "read": (2, 0.0),
        "found, not read": (1, 1.0),
        "not found": (1, 1.0),
    }
    assert isnan(by_place["read"].median_probability_wrong)
    assert by_place["found, not read"].median_probability_wrong == pytest.approx(0.6)
    assert (by_place["found, not read"].surely_wrong, by_place["not found"].surely_wrong) == (1.0, 0.0)
    assert [group.n for group in summarise(RECORDS, k=7)[0].by_place.values()] == [3, 0, 1]


def test_a_threshold_trades_answers_for_precision() -> None:
    cuts = summarise(RECORDS, k=5)[0].cuts
    assert [(cut.answered, cut.right) for cut in cuts] == [(1.0, 0.5), (0.75, pytest.approx(2 / 3)), *[(0.5, 1.0)],
                                                          (0.25, 1.0), (0.25, 1.0)]  # fmt: skip
    assert [cut.threshold for cut in cuts] == pytest.approx([log(x) for x in (0.2, 0.6, 0.8, 0.9, 0.9)])


def test_sentences_and_labels_have_their_own_table() -> None:
    sentences = [answered(0.5, False, 1, prediction=text) for text in ("a b c", "A b c!", "a b d")]
    (result,) = summarise(sentences, k=5)
    assert result.distinct_3 == pytest.approx(2 / 3)
    for labels, accuracy in ((["x", "y"], "0.0 (0.0–0.0)"), ([], "–")):
        text = as_markdown({**PLAN, "labels": labels}, [result])
        assert f"| squad | sequence | 0.0 (0.0–0.0) | {result.bleu_1:.3f} | 0.667 | {accuracy} |" in text


def test_files_and_formulations_stand_apart() -> None:
    other = answered(0.5, True, 2, formulation=Formulation.TOKEN)
    regex = answered(0.5, True, 2, file="trec", answers=(), answer_regex="a", f1=None, rouge_l=None)
    results = summarise([*RECORDS, other, regex], k=5)
    assert [(r.file, r.formulation, r.n) for r in results] == [
        ("squad", "sequence", 4),
        ("squad", "token", 1),
        ("trec", "sequence", 1),
    ]
    assert isnan(results[2].f1.value)
    assert isnan(results[1].auroc)
    text = json.dumps(as_json(results), allow_nan=False)
    assert json.loads(text)[2]["f1"] == {"value": None, "low": None, "high": None}
    assert json.loads(text)[0]["has_answer"]["5"]["value"] == 0.5


def test_tables_name_the_conditions_beside_the_numbers() -> None:
    text = as_markdown(PLAN, summarise(RECORDS, k=5))
    (line,) = (line for line in text.splitlines() if "IVF256" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["squad", "sequence", "4"]
    assert cells[3].startswith("50.0 (")
    assert cells[-3:] == ["IVF256,SQ8, 9,342 passages, recall@5 0.987", "5", "greedy"]
    for lines in text.split("\n\n"):
        rows = [row for row in lines.splitlines() if row.startswith("|")]
        n_cells = {row.replace("\\|", "").count("|") for row in rows}
        assert len(n_cells) <= 1, "every row of a table has as many cells"


def test_every_number_stands_under_its_title() -> None:
    records = [
        answered(0.9, True, 1, f1=0.75, page_rank=1, r_precision=1.0),
        answered(0.8, True, 3, page_rank=7, r_precision=0.5),
        answered(0.6, False, 7, f1=0.5, rouge_l=0.25, prediction="a b c d"),
        answered(0.2, False, None),
    ]
    text = as_markdown({**PLAN, "labels": ["x", "y"]}, summarise(records, k=5))
    for titles, row in (
        (
            "n | EM | F1 | answer in top 1 | answer in top 5 | answer in top 20 | index | k | decoding",
            "4 | 50.0 (0.0–100.0) | 56.2 (18.8–87.5) | 25.0 (0.0–75.0) | 50.0 (0.0–100.0) | 75.0 (25.0–100.0) | "
            "IVF256,SQ8, 9,342 passages, recall@5 0.987 | 5 | one of 2 labels",
        ),
        (
            "ROUGE-L | BLEU-1 | distinct tri-grams | label accuracy",
            "56.2 (12.5–100.0) | 0.667 | 1.000 | 50.0 (0.0–100.0)",
        ),
        (
            "page in top 1 | page in top 10 | R-precision | KILT-EM | KILT-F1",
            "50.0 (0.0–100.0) | 100.0 (100.0–100.0) | 75.0 (50.0–100.0) | 50.0 (0.0–100.0) | 37.5 (0.0–75.0)",
        ),
        (r"mean p(y\|x) | right | calibration error | AUROC", "0.625 | 0.500 | 0.275 | 1.000"),
        (
            r"answer | n | wrong | median p(y\|x) of the wrong | wrong, and at least half sure",
            "read | 2 | 0.000 | – | 0.000 |\n| squad | sequence | found, not read | 1 | 1.000 | 0.600 | 1.000 |\n"
            "| squad | sequence | not found | 1 | 1.000 | 0.200 | 0.000",
        ),
        (
            r"log-likelihood at least | p(y\|x) at least | answered | right of those",
            "-1.61 | 0.200 | 1.000 | 0.500 |\n| squad | sequence | -0.51 | 0.600 | 0.750 | 0.667",
        ),
    ):
        dashes = " | ".join(["---"] * (titles.replace("\\|", "").count("|") + 3))
        head = f"| questions | formulation | {titles} |\n| {dashes} |\n"
        assert f"{head}| squad | sequence | {row} |" in text


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"n_beams": 4}, "4 beams"),
        ({"labels": ["yes", "no"]}, "one of 2 labels"),
        ({"index": None, "context": "gold"}, "none: gold context"),
        ({"index": None, "context": "none"}, "none: closed book"),
        ({"index": {"factory": "Flat", "n_passages": 7, "recall": None}}, "Flat, 7 passages, recall not measured"),
    ],
)
def test_conditions(change: dict[str, Any], shown: str) -> None:
    assert f"| {shown} |" in as_markdown({**PLAN, **change}, summarise(RECORDS, k=5))


def test_answers_count_for_kilt_where_all_of_a_set_of_pages_came_first() -> None:
    pages = [
        answered(0.9, True, 1, page_rank=1, r_precision=1.0),
        answered(0.9, True, 1, page_rank=7, r_precision=0.0),
        answered(0.9, False, None, page_rank=None, r_precision=0.0),
    ]
    (result,) = summarise([*pages, answered(0.9, True, 1)], k=5)
    assert result.em.value == 0.75
    assert result.r_precision.value == result.kilt_em.value == result.kilt_f1.value == pytest.approx(1 / 3)
    assert {k: mean.value for k, mean in result.has_page.items()} == pytest.approx({1: 1 / 3, 10: 2 / 3})
    assert "KILT-EM" in as_markdown(PLAN, [result])
    (without,) = summarise(RECORDS, k=5)
    assert isnan(without.r_precision.value)
    assert "KILT-EM" not in as_markdown(PLAN, [without])
