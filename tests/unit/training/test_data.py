"""Questions of files as examples, for every task."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tiny_training import jsonl

from openbook.errors import InvalidConfig, InvalidDocuments
from openbook.training.data import Example, examples_digest, most_frequent_match, read_examples, read_validation
from openbook.training.settings import TaskSettings

FEVER = {"SUPPORTS": "yes", "REFUTES": "no", "NOT ENOUGH INFO": "unknown"}


def task(*files: dict[str, Any], **values: Any) -> TaskSettings:
    return TaskSettings.model_validate({"train": files, **values})


def read(path: Path, **values: Any) -> list[tuple[str, str]]:
    return [(example.text, example.target) for example in read_examples(task({"path": path}, **values), seed=0)]


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    return jsonl(
        tmp_path / "answers.jsonl",
        {"question": "Who?", "answers": ["I", "me", "", "myself"]},
        {"question": "Where?", "answers": ["here"]},
    )


@pytest.fixture
def claims(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "claims.jsonl", *({"claim": f"That is {label}.", "label": label} for label in FEVER))


@pytest.mark.parametrize("kind", ["question_answering", "abstractive"])
def test_every_answer_is_an_example(answers: Path, kind: str) -> None:
    assert read(answers, kind=kind) == [("Who?", "I"), ("Who?", "me"), ("Who?", "myself"), ("Where?", "here")]
    assert read(answers, kind=kind, max_answers=2) == [("Who?", "I"), ("Who?", "me"), ("Where?", "here")]


def test_from_the_answer_to_the_question(answers: Path) -> None:
    assert read(answers, kind="question_generation", max_answers=1) == [("I", "Who?"), ("here", "Where?")]


def test_classes_have_words_and_others_are_left_out(claims: Path) -> None:
    three = [("That is SUPPORTS.", "yes"), ("That is REFUTES.", "no"), ("That is NOT ENOUGH INFO.", "unknown")]
    assert read(claims, kind="classification", labels=FEVER) == three
    two = {label: FEVER[label] for label in ("SUPPORTS", "REFUTES")}
    assert read(claims, kind="classification", labels=two) == three[:2]
    with pytest.raises(InvalidDocuments, match=r"claims\.jsonl: not one example for classification"):
        read(claims, kind="classification", labels={"other": "other"})


def test_files_of_kilt_are_learned_from(tmp_path: Path) -> None:
    """Those of their questions that have an answer."""
    path = jsonl(
        tmp_path / "kilt.jsonl",
        {"id": "a", "input": "Who?", "output": [{"answer": "I", "provenance": [{"title": "T"}]}, {"answer": "me"}]},
        {"id": "b", "input": "That is so.", "output": [{"answer": "SUPPORTS"}]},
        {"id": "c", "input": "Nobody knows?", "output": [{"provenance": [{"title": "T"}]}]},
    )
    assert read(path) == [("Who?", "I"), ("Who?", "me"), ("That is so.", "SUPPORTS")]
    assert read(path, kind="classification", labels=FEVER) == [("That is so.", "yes")]
    found = read_validation(task({"path": path}, validation=[{"path": path}]), 5)
    assert [example.question.id for example in found] == ["a", "b"]


def test_the_most_frequent_match_of_a_regular_expression_is_the_answer(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "patterns.jsonl",
        {"question": "How tall?", "answer_regex": r"1,?454( feet)?"},
        {"question": "Where?", "answers": ["here"]},
        *({"question": f"Number {i}?", "answer_regex": f"number {i}"} for i in range(40)),
        {"question": "Nowhere?", "answer_regex": "nothing matches"},
    )
    asked: list[int] = []

    def search(questions: Sequence[str]) -> list[list[str]]:
        asked.append(len(questions))
        return [
            ["It is 1454 feet, 1454 FEET tall.", "1,454 ft", f"the {question.rstrip('?')}"] for question in questions
        ]

    examples = read_examples(task({"path": path, "repeat": 2}), 0, search)
    wanted = [("How tall?", "1454 feet"), ("Where?", "here"), *((f"Number {i}?", f"Number {i}") for i in range(40))]
    assert [(example.text, example.target) for example in examples] == wanted * 2
    assert sum(asked) == 42
    assert max(asked) <= 16
    with pytest.raises(InvalidConfig, match=r"patterns\.jsonl: answers by regular expression need passages to match"):
        read_examples(task({"path": path}), 0)


@pytest.mark.parametrize(
    ("pattern", "texts", "match"),
    [
        ("b+", ["ab abb", "ABB b"], "b"),  # twice; "bb" and "BB" once each
        ("B{2}", ["ab abb", "a bb"], "bb"),
        ("^x", ["y\nx"], "x"),
        ("x*", ["y"], ""),
        (" *y", ["  y"], "y"),
        ("z", [], ""),
    ],
)
def test_what_matches_most_often(pattern: str, texts: list[str], match: str) -> None:
    assert most_frequent_match(pattern, texts) == match


def test_files_are_repeated_and_limited_by_seed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "many.jsonl", *({"question": f"{i}", "answers": ["x", "y"]} for i in range(50)))

    def texts(seed: int, **file: Any) -> list[str]:
        return [example.text for example in read_examples(task({"path": path, **file}), seed)]

    assert texts(0, repeat=3) == texts(0) * 3
    some = texts(0, limit=10)
    assert len(some) == 20
    assert len(set(some)) == 10
    assert some == sorted(some, key=int), "in the order of the file"
    assert some == texts(0, limit=10) != texts(1, limit=10)
    assert texts(0, limit=50) == texts(1, limit=60) == texts(0)


def test_several_files_follow_each_other_and_an_empty_one_adds_nothing(answers: Path, tmp_path: Path) -> None:
    other = jsonl(tmp_path / "other.jsonl", {"question": "When?", "answers": ["now"]})
    empty = jsonl(tmp_path / "empty.jsonl")
    found = read_examples(task({"path": other}, {"path": empty}, {"path": answers}, max_answers=1), 0)
    assert [example.text for example in found] == ["When?", "Who?", "Where?"]
    with pytest.raises(InvalidDocuments, match=r"empty\.jsonl: not one example for question_answering"):
        read_examples(task({"path": empty}), 0)


def test_lines_that_are_no_questions_are_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "bad.jsonl", {"question": "Who?", "answers": ["I"]}, {"question": "Where?"})
    with pytest.raises(InvalidDocuments, match=r"bad\.jsonl:2: one of answers, answer_regex and label is needed"):
        read(path)
    with pytest.raises(InvalidDocuments, match=r"absent\.jsonl: cannot be read"):
        read(tmp_path / "absent.jsonl")


def test_validation_takes_as_many_of_each_file_and_always_the_same(tmp_path: Path, answers: Path) -> None:
    many = jsonl(tmp_path / "many.jsonl", *({"question": f"{i}", "answers": ["x", "y"]} for i in range(50)))
    asked = task({"path": many}, validation=[{"path": many}, {"path": answers}])
    found = read_validation(asked, 9)
    assert [
        len([e for e in found if (e.text in ("Who?", "Where?")) == of_answers]) for of_answers in (False, True)
    ] == [5, 2]
    assert {example.target for example in found} == {"x", "I", "here"}
    assert found == read_validation(asked, 9)
    assert read_validation(task({"path": many}), 9) == []


def test_a_regular_expression_is_validated_without_a_target(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "patterns.jsonl", {"question": "How tall?", "answer_regex": "1,?454"})
    (example,) = read_validation(task({"path": path}, validation=[{"path": path}]), 5)
    assert (example.target, example.question.answer_regex) == ("", "1,?454")


def test_examples_are_identified_by_all_that_is_read_and_written(answers: Path) -> None:
    examples = read_examples(task({"path": answers}), 0)

    def changed(**fields: str) -> list[Example]:
        first = examples[0]
        question = type(first.question)("1", "Who?", title=fields.pop("title", ""), context=fields.pop("context", ""))
        return [Example(fields.get("text", first.text), fields.get("target", first.target), question), *examples[1:]]

    others = [changed(**{field: "other"}) for field in ("text", "target", "title", "context")]
    assert len({examples_digest(each) for each in (examples, examples[::-1], examples[1:], *others)}) == 7
    assert examples_digest(examples) == examples_digest(changed())


@pytest.mark.parametrize(("kind", "labels"), [("classification", {}), ("question_answering", FEVER)])
def test_labels_are_for_classification(kind: str, labels: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="labels are for classification, and needed there"):
        task({"path": "x"}, kind=kind, labels=labels)
