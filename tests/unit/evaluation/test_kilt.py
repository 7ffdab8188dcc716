"""Questions out of KILT's files: answers, and the pages that support them."""

import os
from pathlib import Path

import pytest

from openbook.core.types import Passage
from openbook.errors import InvalidDocuments
from openbook.evaluation.kilt import page_of, provenance_of, read

KILT = """
{"id": "a", "input": "Who?", "output": [{"answer": "Ann", "provenance": [
 {"wikipedia_id": 1, "title": "A"}, {"wikipedia_id": " 2", "title": "B "}]},
 {"provenance": [{"wikipedia_id": "3", "title": "C"}]}]}
{"id": "b", "input": "Where?", "output": [{"answer": "Rome"}, {"answer": "Roma"}]}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "kilt.jsonl"
    path.write_text(text.replace("\n ", " "))
    return path


def test_answers_and_pages_are_read(tmp_path: Path) -> None:
    first, second = read(written(tmp_path, KILT), "id")
    assert (first.id, first.text, first.answers) == ("a", "Who?", ("Ann",))
    assert provenance_of(first) == (frozenset("12"), frozenset("3"))
    assert (second.answers, provenance_of(second)) == (("Rome", "Roma"), ())
    by_title, _ = read(written(tmp_path, KILT), "title")
    assert provenance_of(by_title) == (frozenset("AB"), frozenset("C"))
    passage = Passage(7, "1", "A", "text")
    assert (page_of(passage, "id"), page_of(passage, "title")) == ("1", "A")


def test_answers_are_read_once_each_and_pages_where_they_are_asked_for(tmp_path: Path) -> None:
    """Not every file calls its pages in both ways."""
    twice = ", ".join(['{"answer": "A", "provenance": [{"title": "T"}]}'] * 2)
    nothing = '{"answer": " "}, {"answer": null}'
    path = written(tmp_path, f'{{"input": "Who?", "output": [{twice}, {nothing}, {{"answer": "B"}}]}}\n')
    (question,) = read(path, None)
    assert (question.text, question.answers, provenance_of(question)) == ("Who?", ("A", "B"), ())
    with pytest.raises(InvalidDocuments, match="provenance has wikipedia_id"):
        list(read(path, "id"))


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """It would be empty when it is read for the second time: "holds no questions"."""
    content = written(tmp_path, KILT).read_bytes()
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    with pytest.raises(InvalidDocuments, match=rf"^/dev/fd/{reading}: is a pipe, and .* read more than once"):
        list(read(Path(f"/dev/fd/{reading}"), "id"))
    os.close(reading)


@pytest.mark.parametrize("id", ["", ', "id": null'])
def test_a_question_without_an_id_is_called_by_its_line(id: str, tmp_path: Path) -> None:
    line = f'{{"input": "Who?", "output": []{id}}}\n'
    assert [each.id for each in read(written(tmp_path, line * 2), "id")] == ["1", "2"]


def test_other_files_are_read_as_ever(tmp_path: Path) -> None:
    (question,) = read(written(tmp_path, '{"question": "Who?", "answers": ["Ann"]}\n'), "id")
    assert (question.text, question.answers, provenance_of(question)) == ("Who?", ("Ann",), ())


@pytest.mark.parametrize(
    "line",
    [
        '{"input": "Who?", "output": [{"answer": 7}]}',
        '{"input": "Who?", "output": [{"answer": "A", "provenance": [{}]}]}',
        '{"input": "Who?", "output": 3}',
        '{"input": "", "output": []}',
    ],
)
def test_what_is_not_kilts_is_named(line: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidDocuments, match=r"kilt\.jsonl:1: (output|input) must be"):
        list(read(written(tmp_path, line + "\n"), "id"))


@pytest.mark.parametrize(
    "line",
    [
        r'{"input": "Who\ud800?", "output": []}',
        r'{"input": "Who?", "output": [], "id": "\ud800"}',
        r'{"question": "Who?", "answers": ["Ann"], "id": "\ud800"}',
        r'{"input": "Who?", "output": [{"answer": "\ud800"}]}',
    ],
)
def test_half_a_character_is_named(line: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidDocuments, match=r"kilt\.jsonl:1: .*surrogates not allowed"):
        list(read(written(tmp_path, line + "\n"), "id"))
