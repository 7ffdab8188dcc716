"""Questions from files: every kind of answer, and what is refused with file, line and field."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from openbook.corpus.questions import Question, read_questions
from openbook.errors import InvalidDocuments
from openbook.evaluation.kilt import records


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_every_kind_of_answer(tmp_path: Path) -> None:
    path = written(
        tmp_path / "questions.jsonl",
        {"id": 0, "question": "Who?", "answers": ["I", "", "me"], "title": "T", "context": "C", "more": [1]},
        {"question": "How tall?", "answer_regex": "1,?454", "id": None},
        {"claim": "Rome is in Italy.", "label": "SUPPORTS", "id": "c"},
    )
    questions = list(read_questions(path))
    assert questions == [
        Question("0", "Who?", ("I", "me"), title="T", context="C"),
        Question("2", "How tall?", answer_regex="1,?454"),
        Question("c", "Rome is in Italy.", ("SUPPORTS",)),
    ]
    zipped = tmp_path / "questions.jsonl.gz"
    zipped.write_bytes(gzip.compress(b"\xef\xbb\xbf\n" + path.read_bytes()))  # Windows puts such a mark first
    assert [question.text for question in read_questions(zipped)] == [question.text for question in questions]


def test_answers_are_left_out_where_nobody_needs_them(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", {"question": "Who?"}, {"question": "Where?", "answers": ["here"]})
    found = list(read_questions(path, needs_answers=False))
    assert found == [Question("1", "Who?"), Question("2", "Where?", ("here",))]
    path = written(tmp_path / "log.jsonl", "Who?")
    with pytest.raises(InvalidDocuments, match=r"log\.jsonl:1: must be an object with question$"):
        list(read_questions(path, needs_answers=False))


def test_an_id_of_too_many_digits_is_told_with_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(f'{{"question": "Who?", "answers": ["I"], "id": {"9" * 5000}}}\n')
    for read in (read_questions, records):
        with pytest.raises(InvalidDocuments) as raised:
            list(read(path))
        assert str(raised.value) == f"{path}:1: id must have at most 4300 digits, got 5000"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (["Who?"], "must be an object"),
        ({"answers": ["I"]}, "question must be a string that is not empty, got none$"),
        ({"question": " ", "answers": ["I"]}, "question must be a string that is not empty, got ' '"),
        ({"question": 1, "answers": ["I"]}, "question must be a string, got 1"),
        ({"question": "Who?"}, "one of answers, answer_regex and label is needed"),
        ({"question": "Who?", "answers": [" "]}, "is needed, and not empty"),
        ({"question": "Who?", "answers": "I"}, "answers must be a list of strings"),
        ({"question": "Who?", "answer_regex": "("}, r"answer_regex '\('"),
        ({"claim": "Rome is in Italy.", "label": None}, "label must be a string, got None$"),
        ({"question": "Who\ud800?", "answers": ["I"]}, "question: .*surrogates not allowed"),
        ({"question": "Who?", "answers": ["I", "\udfff"]}, "answers: .*surrogates not allowed"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, row: Any, problem: str) -> None:
    path = written(tmp_path / "questions.jsonl", {"question": "Who?", "answers": ["I"]}, row)
    with pytest.raises(InvalidDocuments, match=rf"questions\.jsonl:2: .*{problem}"):
        list(read_questions(path))


def test_a_file_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    for name, why in (
        ("none.jsonl", "No such file or directory"),
        ("plain.jsonl.gz", r"Not a gzipped file \(b'\{\"'\)"),
    ):
        if name.endswith(".gz"):
            written(tmp_path / name, {"question": "Who?", "answers": ["I"]})
        with pytest.raises(InvalidDocuments, match=rf"{name}: cannot be read: {why}$"):
            list(read_questions(tmp_path / name))
