"""Files that are damaged, lie or attack: each costs a line that says why, and all good ones are read."""

import bz2
import gzip
import json
import lzma
import os
import re
from collections.abc import Callable
from pathlib import Path

import every_format as formats
import pytest
from every_format import read

from openbook.core.documents import Document
from openbook.corpus.read import read_passages
from openbook.corpus.sources import limits as limits_module
from openbook.corpus.sources import parsers
from openbook.corpus.sources.limits import MB, Failure, Limits
from openbook.corpus.sources.walk import Found
from openbook.errors import InvalidDocuments

IMPATIENT = Limits(timeout_s=8)  # to start takes a second, and on a busy machine some
SLEEPY = """
import csv, time
import mwparserfromhell

parse = mwparserfromhell.parse

def sleep_over_two(text, **options):
    if "two" in text:
        time.sleep(600)
    return parse(text, **options)

mwparserfromhell.parse = sleep_over_two
csv.field_size_limit = lambda limit: time.sleep(600)  # which only tables are read with
"""

DEADLY = """
from openbook.corpus.sources import records

document = records.document

def dies_of_some(opened, record, *more, **others):
    print("what a library prints is no event")
    if record.get("text") == "deadly":
        raise MemoryError
    return document(opened, record, *more, **others)

records.document = dies_of_some
"""


def test_hostile_files_cost_a_line_each_and_the_good_ones_are_read(tmp_path: Path) -> None:
    from hostile import (  # to pack them takes two seconds, which not everyone who collects tests shall wait
        BEYOND,
        HOSTILE,
        LIMITS,
    )

    folder = tmp_path / "corpus"
    for number, (name, (content, _)) in enumerate(sorted(HOSTILE.items())):
        formats.write(folder, {name: content, f"good {number:02}.txt": f"good {number}".encode()})
    (tmp_path / "outside.txt").write_text("outside words")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (folder / "link").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe.txt")
    documents, failures = read(folder, LIMITS, n_processes=2)

    links = {f"{folder}/{name}": "a link" for name in ("link", "link.txt", "loop")}
    expected = {**links, f"{folder}/pipe.txt": "no regular file"}
    for name, (_, of_file) in HOSTILE.items():
        expected |= {f"{folder}/{name}{where}": why for where, why in of_file.items()}
    found = {failure.path: failure.reason for failure in failures}
    assert found.keys() == expected.keys()
    assert [(path, found[path]) for path, why in expected.items() if not re.search(why, found[path])] == []
    assert all(str(failure).isprintable() for failure in failures)

    good = {document.text for document in documents}
    assert {f"good {number}" for number in range(len(HOSTILE))} <= good
    assert "good words" in good, "what lies behind a bad row or line"
    everything = " ".join(good)
    assert "outside" in BEYOND.read_text()
    assert "outside" not in everything
    assert "haha" not in everything
    assert sum(document.path == "cut.xml" for document in documents) == 1, "what lies before the cut"


def test_a_file_that_kills_its_parser_takes_nothing_with_it(tmp_path: Path) -> None:
    """In an archive too, whose other files are read once."""
    from hostile import wide

    large = wide("parquet")
    members = {"a.txt": b"one", "b.parquet": large, "c.txt": b"two", "d.parquet": large, "e.txt": b"x"}
    formats.write(tmp_path, {"all.zip": formats.zipped({**members, "noise": bytes(9)}), "then.txt": b"three"})
    documents, failures = read(tmp_path, Limits(memory_bytes=512 * MB))
    assert [document.text for document in documents] == ["one", "two", "x", "three"]
    names = [Path(failure.path).name for failure in failures]
    assert names == ["b.parquet", "d.parquet", "noise"]
    assert all(re.search(r"memory", failure.reason) for failure in failures[:2]), failures


def test_an_archive_that_kills_its_parser_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsers, "MOST_DEATHS", 2)
    from hostile import wide

    members = {f"{i}.parquet": wide("parquet") for i in range(4)}
    formats.write(tmp_path, {"a.zip": formats.zipped(members), "b.txt": b"good"})
    documents, failures = read(tmp_path, Limits(memory_bytes=512 * MB))
    assert [document.text for document in documents] == ["good"]
    assert [Path(failure.path).name for failure in failures] == ["0.parquet", "1.parquet", "a.zip"]
    assert "killed its parser 2 times" in failures[-1].reason


def test_a_page_that_kills_its_parser_takes_no_others_of_its_file_with_it(tmp_path: Path) -> None:
    """Failures before it and behind it are counted as those of one file."""
    texts = ["<p>one</p>", "<p>x</p>" * 600_000, "<p>two</p>"]
    pages = [json.dumps({"document_html": text, "title": "t"}) for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(["{}"] * 8 + pages + ["{}"] * 8))
    documents, failures = read(tmp_path, Limits(memory_bytes=320 * MB))
    assert [document.text for document in documents] == ["one", "two"]
    (killed,) = [each for each in failures if re.search(r"memory|died", each.reason)]
    assert killed.path == f"{tmp_path}/a.jsonl#10"
    assert len(failures) == 1 + 10 + 1
    assert failures[-1] == Failure(f"{tmp_path}/a.jsonl", "and 6 more that are no documents", 6)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("a.csv", ["text,n", *["x"] * 15, "deadly,1", "never,1"]),
        ("a.jsonl", ["{}"] * 15 + ['{"text": "deadly"}']),
    ],
)
def test_failures_before_a_death_are_counted_also_where_the_file_is_given_up(
    name: str, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a table the first death is the end; of records only where too many kill."""
    monkeypatch.setattr(parsers, "MOST_DEATHS", 1)
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(DEADLY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'python'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / name).write_text("\n".join(lines))
    documents, failures = read(tmp_path / name)
    assert documents == []
    counted = [each for each in failures if not re.search(r"memory|killed", each.reason)]
    assert sum(each.n for each in counted) == 15
    assert counted[-1].reason == "and 5 more that are no documents"
    assert any("memory" in each.reason for each in failures)


@pytest.fixture
def sleepy(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsers that are started now sleep over tables, and over articles that begin with two."""
    folder = tmp_path_factory.mktemp("sleepy")
    (folder / "sitecustomize.py").write_text(SLEEPY)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.usefixtures("sleepy")
def test_an_article_that_takes_too_long_takes_no_others_of_its_dump_with_it(tmp_path: Path) -> None:
    texts = ["one and more", "two and more", "three and more"]
    (tmp_path / "a.xml.bz2").write_bytes(bz2.compress(formats.mediawiki([("t", text) for text in texts])))
    documents, failures = read(tmp_path, IMPATIENT)
    assert [document.text.split()[0] for document in documents] == ["one", "three"]
    # Each article has a talk page and a redirect behind it.
    assert failures == [Failure(f"{tmp_path}/a.xml.bz2#4", "took more than 8 s")]


@pytest.mark.usefixtures("sleepy")
def test_a_file_that_takes_too_long_is_left_out(tmp_path: Path) -> None:
    members = {"a.txt": b"one", "b.csv": b"text\nnever read\n", "c.txt": b"two"}
    formats.write(tmp_path, {"all.tar": formats.tarred(members)})
    documents, failures = read(tmp_path, IMPATIENT)
    assert [document.text for document in documents] == ["one", "two"]
    assert [(Path(each.path).name, each.reason) for each in failures] == [("b.csv", "took more than 8 s")]


def test_a_parser_that_cannot_even_start_is_a_failure_of_its_file(tmp_path: Path) -> None:
    formats.write(tmp_path, {"a.txt": b"one", "b.txt": b"two"})
    documents, failures = read(tmp_path, Limits(memory_bytes=MB))
    assert documents == []
    # A parser may get so far as to name the file before it ends: then what is behind it in the file fails too.
    assert list(dict.fromkeys(Path(each.path).name for each in failures)) == ["a.txt", "b.txt"]
    assert all(" 1 MB" in each.reason for each in failures), failures


def test_a_parser_that_ends_at_once_is_started_no_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    formats.write(tmp_path, {"sitecustomize.py": b"import os\nos._exit(3)", "a.txt": b"words"})
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    documents, (failure,) = read(tmp_path / "a.txt")
    assert documents == []
    assert "its parser died with code 3" in failure.reason


def test_a_file_that_is_gone_costs_itself_alone_and_no_process_is_one(tmp_path: Path) -> None:
    formats.write(tmp_path, {"b.txt": b"words"})
    files = [Found(tmp_path / name, name, is_given=False) for name in ("a.txt", "b.txt")]
    failure, document = parsers.parsed(files, Limits(), n_processes=0)
    assert str(failure).startswith("a.txt: FileNotFoundError: "), failure
    assert isinstance(document, Document)
    assert document.text == "words"


def test_an_archive_of_too_many_members_or_that_is_too_large_to_copy_is_left_out(tmp_path: Path) -> None:
    members = {f"{i}.txt": b"x" for i in range(9)}
    formats.write(tmp_path, {"a.zip": formats.zipped(members), "b.tar": formats.tarred(members)})
    (tmp_path / "c.zip.gz").write_bytes(gzip.compress(formats.zipped({"a.txt": os.urandom(2000)})))
    documents, failures = read(tmp_path, Limits(n_members=5, spooled_bytes=1000))
    too_many = "an archive of more than 5 members"
    assert [each.reason for each in failures] == [too_many, too_many, "has more than 1000 bytes"]
    assert {each.path.split("/")[0] for each in documents} <= {"b.tar"}


@pytest.mark.parametrize(
    ("damaged", "texts", "says"),
    [
        (lambda tar: tar[: 1024 + 148] + b"00000000" + tar[1024 + 156 :], ["one"], "damaged at byte 1024: what lies"),
        (lambda tar: tar[: 1024 + 100], ["one"], "cut off at byte 1024"),
        (lambda tar: tar[: 3 * 1024], ["one", "two", "three"], "ends at byte 3072 without the mark of its end"),
        (lambda tar: tar[: 2 * 1024], ["one", "two"], "ends at byte 2048 without the mark of its end"),
        (lambda tar: tar[:1024] + bytes(512) + tar[1536:], ["one"], "damaged at byte 1536: what lies"),
        (lambda tar: tar + b"\n", ["one", "two", "three"], "the bytes behind the mark of its end, at byte 10240, are"),
        (lambda tar: tar + b"x" * 512, ["one", "two", "three"], "damaged at byte 10240: what lies"),
    ],
)
def test_a_tar_that_is_damaged_or_cut_says_so_behind_the_members_before(
    damaged: Callable[[bytes], bytes], texts: list[str], says: str, tmp_path: Path
) -> None:
    tar = formats.tarred({"a.txt": b"one", "b.txt": b"two", "c.txt": b"three"})
    formats.write(tmp_path, {"a.tar": damaged(tar), "b.tar": tar})
    documents, failures = read(tmp_path)
    assert [document.text for document in documents] == [*texts, "one", "two", "three"]
    ((path, reason),) = [(failure.path, failure.reason) for failure in failures]
    assert path == f"{tmp_path}/a.tar"
    assert reason.startswith(says)


def test_tars_that_were_put_one_behind_the_other_are_read_to_the_last(tmp_path: Path) -> None:
    tars = [formats.tarred({f"{text}.txt": text.encode()}) for text in ("one", "two")]
    formats.write(tmp_path, {"a.tar": b"".join(tars) + bytes(7)})
    documents, failures = read(tmp_path)
    assert ([document.text for document in documents], failures) == (["one", "two"], [])


@pytest.mark.parametrize("name", ["a.jsonl.bz2", "a.jsonl.xz"])
def test_of_several_compressed_streams_all_are_read_or_it_is_said(name: str, tmp_path: Path) -> None:
    compress: Callable[[bytes], bytes] = bz2.compress if name.endswith("bz2") else lzma.compress
    first, second = (compress(f'{{"text": "{text}"}}\n'.encode()) for text in ("one", "two"))
    formats.write(tmp_path, {name: first + bytes(8) + second + bytes(70000)})
    documents, failures = read(tmp_path)
    assert ([document.text for document in documents], failures) == (["one", "two"], [])
    for behind in (b"X" + second[1:], second[:2], bytes(4) + b"no stream"):
        formats.write(tmp_path, {name: first + behind})
        (failure,) = read(tmp_path)[1]
        assert failure.path == f"{tmp_path}/{name}"


def test_a_library_that_is_not_there_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pypdf.py").write_text("raise ModuleNotFoundError('no pypdf', name='pypdf')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "a.pdf").write_bytes(formats.pdf(*formats.DOCUMENTS[5]))
    with pytest.raises(InvalidDocuments, match=r"a\.pdf: needs pypdf: pip install 'openbook\[corpus\]'$"):
        list(read_passages(tmp_path / "a.pdf"))


def test_the_first_failure_is_the_end_where_nobody_is_told(tmp_path: Path) -> None:
    formats.write(tmp_path, {"a.txt": b"one", "b.txt": b"\xff", "c.txt": b"two"})
    seen = []
    with pytest.raises(InvalidDocuments, match=r"b\.txt: not UTF-8"):
        seen.extend(passage.text for passage in read_passages(tmp_path))
    assert seen == ["one"] or seen == []


def test_a_failure_is_one_line_whatever_a_name_holds() -> None:
    assert str(Failure("a\x1b[2J\nb", "c")) == "a [2J b: c"
    assert len(limits_module.one_line("x" * 999)) == 200
    assert json.loads(json.dumps(str(Failure("é", "ü")))) == "é: ü"
