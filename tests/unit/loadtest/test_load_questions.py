"""Questions of files, and about the embedded corpus; what the senders make of replies."""

import asyncio
import errno
import gzip
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openbook.errors import InvalidDocuments
from openbook.loadtest.http_sender import HttpSender, _failed, events
from openbook.loadtest.outcomes import NOT_SENT
from openbook.loadtest.questions import FIRST, read
from openbook.loadtest.senders import who_asks
from openbook.loadtest.settings import LoadSettings


def test_one_a_line(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("\ufeffwho?\n\n  where? \r\n", encoding="utf-8")
    assert read(tmp_path / "q.txt") == ["who?", "where?"]


def test_json_lines_as_evaluation_reads_them_and_without_answers(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "q.jsonl.gz", "wt") as file:
        file.write('{"question": "who?", "answers": ["he"]}\n{"claim": "It is."}\n{"input": "where?", "output": []}\n')
    assert read(tmp_path / "q.jsonl.gz") == ["who?", "It is.", "where?"]


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", "{}", '{"question": 3}', '{"question": "\\ud800"}'),
        *('{"question": ""}', '{"claim": ""}', '{"input": ""}', '{"question": " \\n"}'),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "q.jsonl").write_text(f'{{"question": "who?"}}\n{line}\n')
    with pytest.raises(InvalidDocuments, match=r"q\.jsonl:2: must be an object with a text `question`"):
        read(tmp_path / "q.jsonl")


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("\n")
    with pytest.raises(InvalidDocuments, match=r"q\.txt: must hold a question"):
        read(tmp_path / "q.txt")


def test_the_embedded_corpus_is_asked_about() -> None:
    found = read(None)
    assert tuple(found[: len(FIRST)]) == FIRST
    assert len(found) > 3000
    assert "who or what is Montana?" in found


@given(data=st.data())
def test_events_are_the_same_in_whatever_pieces_they_come(data: st.DataObject) -> None:
    whole = b'event: token\ndata: {"text": "a"}\n\nevent: answer\ndata: {}\n\n'
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    ends = [0, *cuts, len(whole)]

    async def chunks() -> AsyncIterator[bytes]:
        for start, end in pairwise(ends):
            yield whole[start:end]

    async def collected() -> list[tuple[str, bytes]]:
        return [each async for each in events(chunks())]

    assert asyncio.run(collected()) == [("token", b'{"text": "a"}'), ("answer", b"{}")]


@pytest.mark.parametrize(
    ("seen", "body", "status"),
    [
        ("429", b"no", "RESOURCE_EXHAUSTED"),
        ("503", b"no", "UNAVAILABLE"),
        ("503", b'{"code": "FAILED_PRECONDITION", "detail": "m"}', "FAILED_PRECONDITION"),
        ("500", b'{"code": "OK", "detail": "m"}', "INTERNAL"),
        ("200, then error", b'{"code": "DEADLINE_EXCEEDED", "detail": "m"}', "DEADLINE_EXCEEDED"),
        ("418", b'{"code": []}', "UNKNOWN"),
    ],
)
def test_http_statuses_have_names_of_grpc_and_stay_visible(seen: str, body: bytes, status: str) -> None:
    found = _failed(seen, body)
    assert (found.status, found.seen) == (status, seen)


def test_a_machine_without_files_left_does_not_blame_the_endpoint() -> None:
    class Session:
        def post(self, *asked: object, **more: object) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    settings = LoadSettings(address="http://a:1")
    found = asyncio.run(HttpSender(Session(), settings, ["who?"]).send(0))
    assert (found.status, found.message) == (NOT_SENT, "[Errno 24] Too many open files")


@pytest.mark.parametrize("address", ["a", "a:b", "a:1/path", "ftp://a:1", "http://a", "http://a:1?x=1", ""])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="must be host:port"):
        LoadSettings(address=address)


@pytest.mark.parametrize(
    ("address", "expected", "is_http"),
    [
        ("a:1", "a:1", False),
        ("grpc://a:1", "a:1", False),
        ("[::1]:9", "[::1]:9", False),
        ("http://a:1/", "http://a:1", True),
    ],
)
def test_an_address_tells_the_protocol(address: str, expected: str, is_http: bool) -> None:
    found = LoadSettings(address=address)
    assert (found.address, found.is_http) == (expected, is_http)


def test_who_asks_is_said_with_a_key_that_stands_in_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LoadSettings(address="a:1", caller="me")
    monkeypatch.delenv("OPENBOOK_API_KEY", raising=False)
    assert who_asks(settings) == {"x-caller": "me"}
    monkeypatch.setenv("OPENBOOK_API_KEY", "ob_x\n")  # as files end
    assert who_asks(settings) == {"x-caller": "me", "authorization": "Bearer ob_x"}
    assert "ob_x" not in settings.model_dump_json()
