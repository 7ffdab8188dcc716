"""The same documents from every format, and a folder in the order of its names."""

import bz2
import csv
import gzip
import io
import json
import os
import re
import tarfile
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import every_format as formats
import pytest
from every_format import DOCUMENTS, EACH, TOGETHER, read
from hypothesis import given
from hypothesis import strategies as st

from openbook.core.documents import Document, canonical
from openbook.corpus.read import read_documents, read_passages
from openbook.corpus.sources import parse as parse_module
from openbook.corpus.sources.columns import ROWS_AT_ONCE
from openbook.corpus.sources.limits import MB, Budget, Failure, Limits, Spent
from openbook.corpus.sources.opened import Opened
from openbook.corpus.sources.parse import Event, Parse
from openbook.corpus.sources.recognise import Names, recognise
from openbook.corpus.sources.walk import Found, corpus_digest, found
from openbook.errors import InvalidConfig, InvalidDocuments

EXPECTED = [(title, " ".join(text.split())) for title, text in DOCUMENTS]


def parse(content: bytes, name: str) -> list[Document | Failure]:
    """Here, without a process."""
    return [event for event in events(content, name) if isinstance(event, Document | Failure)]


def events(content: bytes, name: str, *passed: int) -> list[Event]:
    """All that is told on the way."""
    limits = Limits()
    file = io.BufferedReader(io.BytesIO(content))  # type: ignore[arg-type]
    return list(Parse(*passed).events(Opened(name, file, limits, Budget(limits, len(content)))))


def parse_one(content: bytes, name: str) -> Document:
    (found,) = parse(content, name)
    assert isinstance(found, Document), found
    return found


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    """In one folder: each is a file or a folder, and they are read one after the other."""
    parts = {
        **{name: {name: write(DOCUMENTS)} for name, write in TOGETHER.items()},
        **{ending: formats.files(ending, DOCUMENTS) for ending in EACH},
        "zip": {"all.zip": formats.zipped(formats.files(".md", DOCUMENTS))},
        "tar": {"all.tar": formats.tarred(formats.files(".pdf", DOCUMENTS))},
    }
    for number, members in enumerate(parts.values()):
        formats.write(tmp_path / f"{number:02}", members)
    documents, failures = read(tmp_path)
    assert failures == []
    for number, part in enumerate(parts):
        of_part = [document for document in documents if document.path.startswith(f"{number:02}/")]
        assert [(each.title, " ".join(each.text.split())) for each in of_part] == EXPECTED, part
    again, _ = read(tmp_path, n_processes=2)
    assert again == documents


@pytest.mark.parametrize("name", sorted((TOGETHER | EACH).keys() - {".pdf", "all.parquet.gz"}))
def test_every_format_gives_the_same_characters(name: str) -> None:
    """Of Unicode's forms, hints for line breaks, and control characters that were marks of Windows."""
    title, text = DOCUMENTS[6]
    written = [(title.replace("é", "e\u0301"), text.replace("é", "e\u0301").replace("nobody", "no\xadbody\x92s"))]
    content = TOGETHER[name](written) if name in TOGETHER else EACH[name](*written[0])
    found = parse_one(content, f"{title}{name}")
    assert (found.title, " ".join(found.text.split())) == (title, " ".join(text.replace("nobody", "nobody’s").split()))


@pytest.mark.parametrize("name", TOGETHER)
def test_a_file_is_recognised_by_its_content(name: str) -> None:
    head = TOGETHER[name](DOCUMENTS)[: 1 << 16]
    assert recognise(head, "nameless") == recognise(head, name)


@pytest.mark.parametrize("ending", sorted(set(EACH) - {".txt"}))
def test_a_document_is_recognised_by_its_content(ending: str) -> None:
    head = EACH[ending](*DOCUMENTS[0])[: 1 << 16]
    assert recognise(head, "nameless") == recognise(head, f"a{ending}")


@pytest.mark.parametrize(
    ("endings", "format"),
    [
        (".jsonl .ndjson .json", "JSON lines"),
        (".csv .tsv", "table"),
        (".html .htm .xhtml", "HTML"),
        (".md .markdown", "Markdown"),
        (".txt", "text"),
    ],
)
def test_a_file_whose_beginning_says_nothing_is_what_its_name_says(endings: str, format: str) -> None:
    for ending in endings.split():
        for begin in (b"words", b"# words"):
            assert recognise(begin, f"a{ending}") == recognise(begin, f"A{ending.upper()}") == format, ending
    assert recognise(b"<?xml version='1.0'?><p>words", "A.XHTML") == "HTML"


@pytest.mark.parametrize(
    ("begin", "format"),
    [
        (bz2.compress(b"words", 1), "bzip2"),
        (bz2.compress(b""), "bzip2"),
        (formats.zipped({}), "zip"),
        (bytes(257) + b"ustar  \0", "tar"),  # GNU's
        (b"WARC/0.18\r\n", "WARC"),
        (b"###### Six\n", "Markdown"),
        (b"---\r\ntitle: T\r\n---\r\n", "Markdown"),
    ],
)
def test_a_beginning_says_what_a_file_is(begin: bytes, format: str) -> None:
    assert recognise(begin, "a") == format


def test_a_number_that_is_too_long_makes_no_text_of_json_lines() -> None:
    assert recognise(b'{"id": %s, "text": "words"}\n{' % (b"9" * 5000), "a") == "JSON lines"


@pytest.mark.parametrize("ending", sorted(EACH))
def test_a_document_without_a_title_is_called_by_its_file(ending: str) -> None:
    assert parse_one(EACH[ending]("", DOCUMENTS[0][1]), f"alps/Modane{ending}").title == "Modane"


@pytest.mark.parametrize("name", ["Modane.TXT.GZ", ".Modane.gz", ".Modane", "a.warc/https://example.org/Modane/"])
def test_the_name_of_a_file_is_that_of_what_is_in_it(name: str) -> None:
    assert parse_one(gzip.compress(b"words"), name).title.removeprefix(".").removesuffix(".gz") == "Modane"


def test_a_text_with_ustar_where_archives_have_it_is_a_text() -> None:
    text = f"# Sponsors\n\n{'a' * 243}Exustar and others."
    assert text.index("ustar") == 257
    assert recognise(text.encode(), "a.md") == "Markdown"


def test_a_text_that_speaks_of_pdf_is_none() -> None:
    said = "A file of PDF begins with %PDF-1.7, and ends with %%EOF."
    assert recognise(said.encode(), "a") == "text"
    assert recognise(json.dumps({"text": said}).encode(), "a") == "JSON lines"
    assert recognise(b'{"text":\n%PDF-', "a.json") == "JSON lines"
    assert recognise(f"<html><body><pre>\n%PDF-1.7</pre>{said}".encode(), "a") == "HTML"
    for name, format in (("a.txt", "text"), ("a.md", "Markdown"), ("A.TXT", "text")):
        assert recognise(b"So it begins:\n%PDF-1.7\n", name) == format
    for before in (b"", b"\xef\xbb\xbf", b" \n", b"HTTP/1.1 200 OK\r\n\r\n", b"Subject: words\n\n", bytes(128)):
        for name in ("a", "a.pdf", "a.bin"):
            assert recognise(before + formats.pdf("T", "words"), name) == "PDF"


@pytest.mark.parametrize(("name", "format"), [("a.txt", "text"), ("README.md", "Markdown")])
def test_a_text_that_begins_with_a_tag_and_speaks_of_html_is_none(name: str, format: str) -> None:
    for begin in ("<!-- toc -->\n# Pages\n", '<p align="center">Pages</p>\n\n'):
        said = "The title goes into <head> of `<html>`, or into that of <mediawiki>."
        assert recognise(f"{begin}{said}".encode(), name) == format
    for before in ("", "<!-- saved -->\n", "<?xml version='1.0'?>\n<!-- a -->"):
        for page in ("<!DOCTYPE html>", "<HTML lang=en>", "<body>"):
            assert recognise(f"{before}{page}<p>words".encode(), name) == "HTML"


def test_a_document_knows_where_it_came_from(tmp_path: Path) -> None:
    inner = formats.zipped({"b/c.txt": b"third", "__MACOSX/._c.txt": b"hidden"})
    formats.write(tmp_path, {"a.txt": b"first", "b.zip": formats.zipped({"x.txt": b"second", "y.zip": inner})})
    formats.write(tmp_path, {"c.csv": b"text\tn\nfourth\t1\n", ".git/config": b"hidden", "empty.txt": b""})
    documents, failures = read(tmp_path)
    assert failures == []
    assert [(each.path, each.id, each.title, each.text) for each in documents] == [
        ("a.txt", "a.txt", "a", "first"),
        ("b.zip/x.txt", "b.zip/x.txt", "x", "second"),
        ("b.zip/y.zip/b/c.txt", "b.zip/y.zip/b/c.txt", "c", "third"),
        ("c.csv", "c.csv#2", "", "fourth"),
    ]


def test_a_folder_is_read_in_the_order_of_its_names_and_its_digest_is_of_names_and_bytes(tmp_path: Path) -> None:
    names = ["B.txt", "a/z.txt", "a.txt", "b/a/c.txt", "é.txt"]
    for name in reversed(names):
        formats.write(tmp_path / "one", {name: name.encode()})
    for name in names:
        formats.write(tmp_path / "two", {name: name.encode()})
    documents, _ = read(tmp_path / "one")
    assert [each.path for each in documents] == ["B.txt", "a/z.txt", "a.txt", "b/a/c.txt", "é.txt"]
    assert corpus_digest(tmp_path / "one") == corpus_digest(tmp_path / "two")
    (tmp_path / "two" / "b" / "a" / "c.txt").write_bytes(b"as long ..")
    changed = corpus_digest(tmp_path / "two")
    assert corpus_digest(tmp_path / "one") != changed
    os.mkfifo(tmp_path / "two" / "pipe")
    assert corpus_digest(tmp_path / "two") != changed, "what cannot be read is told too"
    (tmp_path / "one" / "a.txt").rename(tmp_path / "one" / "c.txt")
    (tmp_path / "one" / "b" / "a" / "c.txt").write_bytes(b"as long ..")
    assert (before := corpus_digest(tmp_path / "one")) != changed
    (tmp_path / "one" / "B.txt").rename(tmp_path / "one" / "A.txt")
    assert corpus_digest(tmp_path / "one") != before, "titles depend on names, also where their order stays"


def test_a_passage_that_comes_already_split_is_taken_as_it_is(tmp_path: Path) -> None:
    row = " ".join(["word"] * 150)
    (tmp_path / "a.tsv").write_text(f"id\ttext\ttitle\n1\t{row}\tT\n")  # DPR's columns, in DPR's order
    (tmp_path / "b.tsv").write_text(f"id\ttitle\ttext\n1\tT\t{row}\n")
    assert [len(passage.text.split()) for passage in read_passages(tmp_path)] == [150, 100, 50]
    found = parse_one("id\ttext\ttitle\n1\tcafe\u0301  no\xadbody\tCafe\u0301\n".encode(), "a.tsv")
    assert (found.title, found.text, found.is_passage) == ("Cafe\u0301", "cafe\u0301  no\xadbody", True)


@pytest.mark.parametrize("is_zip", [False, True])
@pytest.mark.parametrize("folder", ["", "scifact/"])
def test_what_beir_has_beside_its_corpus_is_no_document(is_zip: bool, folder: str, tmp_path: Path) -> None:
    members = {
        "corpus.jsonl": b'{"_id": "d1", "title": "", "text": "one"}',
        "queries.jsonl": b'{"_id": "q1", "text": "a question"}',
        "qrels/test.tsv": b"query-id\tcorpus-id\tscore\nq1\td1\t1\n",
    }
    members = {f"{folder}{name}": content for name, content in members.items()} | {
        "z/queries.jsonl": b'{"text": "two"}'
    }
    formats.write(tmp_path, {"all.zip": formats.zipped(members)} if is_zip else members)
    documents, failures = read(tmp_path)
    assert [each.text for each in documents] == ["one", "two"]
    assert failures == []


def test_names_tell_what_nobody_means_and_what_is_beside_a_corpus_of_beir() -> None:
    names = ["./a.txt", "../a.txt", "a/.git/config", "__MACOSX/a.txt"]
    assert [parse_module.is_hidden(name) for name in names] == [False, False, True, True]
    for corpus in ("x/corpus.jsonl", "x/corpus.jsonl.gz"):
        for name in ("x/queries.jsonl", "x/queries.jsonl.gz", "x/qrels/test.tsv"):
            assert parse_module.is_beside_beir(name, [corpus])
            assert not parse_module.is_beside_beir(name, ["corpus.jsonl"])


def test_the_digest_of_a_single_file_is_of_its_name_too(tmp_path: Path) -> None:
    """Titles, ids and the format depend on it."""
    (tmp_path / "a.txt").write_bytes(b"words")
    before = corpus_digest(tmp_path / "a.txt")
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    assert corpus_digest(tmp_path / "b.txt") != before
    (tmp_path / "a.txt").write_bytes(b"swords"[:5])
    assert corpus_digest(tmp_path / "a.txt") != before


def test_a_name_that_is_no_text_is_shown_as_one_and_a_folder_that_cannot_be_listed_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir, file = os.scandir, tmp_path / "a" / os.fsdecode(b"\xff.txt")
    file.parent.mkdir()
    file.write_bytes(b"words")
    (tmp_path / "b").mkdir()

    def refused(path: Path) -> Any:
        if path == tmp_path / "b":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    (tmp_path / "link").symlink_to(file)
    assert list(found(tmp_path / "link")) == [Found(tmp_path / "link", "link", is_given=True)]
    (tmp_path / "link").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", refused)
        there = list(found(tmp_path))
    assert there == [Found(file, "a/\ufffd.txt", is_given=False), Failure("b", "Permission denied")]
    monkeypatch.setattr(os, "scandir", lambda path: refused(tmp_path / "b"))
    assert list(found(tmp_path)) == [Failure(".", "Permission denied")]


# --- what is text, and what is not


def test_a_table_keeps_its_rows_and_an_image_what_stands_for_it_in_markdown() -> None:
    table = "| a | b |\n|---|---|\n| 1 | *2* |"
    text = f"---\ntitle: From above\n---\n# Not this\n\n{table}\n\n![a cat](c.png) `x_y`\n\n    code\n"
    document = parse_one(text.encode(), "a.md")
    assert document.title == "From above"
    assert document.text.split() == "Not this a | b 1 | 2 a cat x_y code".split()  # noqa: SIM905


def test_lines_of_markdown_stay_lines_and_code_is_text() -> None:
    text = "# T\n\none\ntwo  \nthree\n\n```\nfour\n```\n"
    assert parse_one(text.encode(), "a.md").text == "one\ntwo\nthree\n\nfour\n"


def test_html_of_a_markdown_file_is_the_text_that_a_browser_shows() -> None:
    page = (
        "<p align=center>\n<b>Open</b> &amp; shut</p>\n\n<!-- no -->\n\n<table><tr><td>one</td>\n\n<td>two</td></table>"
    )
    document = parse_one(f"{page}\n\nwords\n<style>no</style>\n".encode(), "a.md")
    assert document.text.split() == ["Open", "&", "shut", "one", "two", "words"]
    begun = "zero\n\n<html>\n<head>\n<title>no</title>\n</head>\n\n<body>one\n\n</body>\ntwo\n\n<td>three\n\nfour"
    assert parse_one(begun.encode(), "a.md").text.split() == ["zero", "one", "two", "three", "four"]
    for empty in ("<!-- a -->", "<!DOCTYPE a>", "<?php a ?>", "[a]: b", "</div>", "```\n```"):
        assert parse(f"---\ntitle: T\n---\n{empty}\n".encode(), "a.md") == [Failure("a.md", "no text found")], empty
    assert parse(b"# T\n", "a.md") == [Failure("a.md", "no text found")]


@pytest.mark.parametrize(
    ("front", "shown"),
    [
        ("title: T", ""),
        ("", ""),
        ("a: [", ""),
        ("date: 2024-13-45", ""),
        ("A note between rules.", "A note between rules."),
        ("- a\n- b", "a b"),
        ("> **Note** this", "Note this"),
    ],
)
def test_words_between_two_rules_are_text_unless_they_are_front_matter(front: str, shown: str) -> None:
    text = f"---\n{front}\n---\n\nMore.\n"
    for written in (text, text.replace("\n", "\r\n"), text.replace("---\n\n", "--- \n\n")):
        assert parse_one(written.encode(), "a.md").text.split() == [*shown.split(), "More."]


def test_a_page_says_in_which_encoding_it_is() -> None:
    page = "<html><head><meta charset='{}'><title>Café</title></head><body><p>Ein Käse für alle</p></body></html>"
    for encoding in ("latin-1", "utf-8", "utf-16", "windows-1252"):
        document = parse_one(page.format(encoding).encode(encoding), "a")
        assert (document.title, document.text) == ("Café", "Ein Käse für alle"), encoding


@pytest.mark.parametrize(
    ("says", "written", "text"),
    [
        ("iso-8859-1", b"caf\xe9 \x80 \x85 \x81\x9d", "café € …"),  # two that nobody sees
        ("windows-1252", b"caf\xe9 \x80 \x85 \x8d\x8f\x90", "café € …"),
        ("gb2312", "朱镕基 1″".encode("gbk"), "朱镕基 1″"),
        ("x-gbk", "朱镕基".encode("gbk"), "朱镕基"),
        ("GBK", "镕 €".encode("gb18030"), "镕 €"),
        ("Shift_JIS", "① 髙島屋".encode("cp932"), "① 髙島屋"),
        ("x-sjis", "① 髙島屋".encode("cp932"), "① 髙島屋"),
        ("euc-kr", "똠방각하".encode("cp949"), "똠방각하"),
        ("ks_c_5601-1987", "똠방각하".encode("cp949"), "똠방각하"),
        ("big5", "香港嘅茶餐廳".encode("big5hkscs"), "香港嘅茶餐廳"),
        ("windows-1252", b"\x9f", "Ÿ"),
        ("windows-949", "똠방각하".encode("cp949"), "똠방각하"),
        ("x-x-big5", "香港嘅茶餐廳".encode("big5hkscs"), "香港嘅茶餐廳"),
        ("windows-874", "ไทย €".encode("cp874"), "ไทย €"),
        ("dos-874", "ไทย €".encode("cp874"), "ไทย €"),
        ("x-euc-jp", "日本".encode("euc_jp"), "日本"),
        ("x-cp1258", "đ €".encode("cp1258"), "đ €"),
        ("iso-8859-8-i", "שלום".encode("iso8859-8"), "שלום"),
        ("x-cp1251", "мир".encode("cp1251"), "мир"),
        ("utf-16", "Käse".encode(), "Käse"),
        ("utf-16le", "Käse".encode(), "Käse"),
    ],
)
def test_a_page_is_read_in_the_encoding_that_browsers_take_it_for(says: str, written: bytes, text: str) -> None:
    page = b"<html><head><meta charset=%s><title>T</title></head><body><p>%s</p></body>" % (says.encode(), written)
    assert parse_one(page, "a").text == text


@pytest.mark.parametrize(
    "said",
    [
        "<script charset='windows-1251' src='a.js'></script><meta charset='utf-8'>",
        "<meta name='description' content='what charset=windows-1251 was'><meta charset=utf-8>",
        "<meta name='charset=windows-1251'><META Data-x CHARSET = 'UTF-8'>",
        "<!-- <meta charset='windows-1251'> --><meta charset='utf-8'>",
        "<!-- once: <?xml version='1.0' encoding='windows-1251'?> -->",
        "<meta content='text/html; charset=utf-8' http-equiv=Content-Type><meta charset='windows-1251'>",
        "<meta http-equiv='Content-Type' content='text/html;charset=utf-8'/>",
        "<form accept-charset='windows-1251'></form>",
    ],
)
def test_what_else_has_a_charset_says_nothing_of_the_page(said: str) -> None:
    page = f"<html><head>{said}<title>T</title></head><body><p>Мир и café</p></body></html>"
    assert "Мир и café" in parse_one(page.encode(), "a").text


def test_a_page_of_xml_says_its_charset_in_its_first_line() -> None:
    page = "<?xml version='1.0' encoding='windows-1251'?><html><body><p>Мир</p></body></html>"
    assert parse_one(page.encode("cp1251"), "a.xhtml").text == "Мир"
    late = f"<html><head>{' ' * 3000}<meta charset=windows-1251></head><body><p>Мир"
    assert parse_one(late.encode("cp1251"), "a").text == "Мир"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be"])
def test_a_byte_order_mark_says_in_which_encoding_a_text_is(encoding: str) -> None:
    assert parse_one("\ufeffMir мир".encode(encoding), "a.txt").text == "Mir мир"


def test_a_short_page_comes_without_its_frame() -> None:
    text = "Modane is a commune in the Savoie department."
    assert parse_one(formats.html("Modane", text), "a").text == text
    nameless = f"<html><body><p>{text}</p></body></html>".encode()
    assert parse_one(nameless, "alps/Modane.html").title == "Modane", "of its file, where it has none"


def test_characters_that_nobody_sees_stay_in_a_page_but_for_hints_where_lines_may_break() -> None:
    sentence = "\u0645\u06cc\u200c\u062e \u200b is \u0915\u094d\u200d, 1\u20602\u200e and no &zwnj; or &amp; of it."
    text = " ".join([sentence] * 20)
    page = formats.html("Persian", text).decode()
    coded = page.replace("\u200c", "&zwnj;").replace("\u200b", "&#8203;").replace("\u2060", "&#x2060;")
    for written in (page, coded, page.replace("of it", "of\u00ad it"), coded.replace("of it", "o&shy;f&#1;&#12 it")):
        assert parse_one(written.encode(), "a").text == text


def test_what_is_left_of_a_page_is_what_can_be_seen() -> None:
    sentence = "Some sentence about rivers and towns. " * 20
    page = formats.html("T", f"{sentence}\n\u200b\nSign \U00012001 of AT&T.")
    coded = page.decode().replace("\U00012001", "&#x12000; &#x12001; &rlm;x").encode()
    assert parse_one(page, "a").text == f"{sentence.strip()}\nSign \U00012001 of AT&T."
    assert parse_one(coded, "a").text == f"{sentence.strip()}\nSign \U00012000 \U00012001 \u200fx of AT&T."
    for empty in ("<!DOCTYPE html><br>&#1;", "<html><body><p>&#8203;</p></body></html>"):
        assert parse(empty.encode(), "a.html") == [Failure("a.html", "no text found")], empty


def test_apostrophes_of_a_wiki_that_are_written_as_entities_are_text() -> None:
    code = "'''#Alien''' has 5&#39;&#39; and __NOTOC__ &#95;&#95;TOC&#95;&#95;"
    text = f"<revision><text>{code.replace('&', '&amp;')}</text></revision>"
    page = f"<page><title>T</title><ns>0</ns><id>1</id>{text}</page>"
    dump = f'<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/">{page}</mediawiki>'
    assert parse_one(dump.encode(), "a.xml").text == "#Alien has 5'' and  __TOC__"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        *((f"<{tag}>no</{tag}>", "") for tag in ("ref", "References", "gallery", "timeline", "score", "imagemap")),
        *((f"[[{name}:no.jpg|no]]", "") for name in ("File", "image", "Category", " Datei", "kategorie")),
        ("[[File:a|[[File:b]]]]", ""),
        ("[[Imagery]]", "Imagery"),
        ("<math>f''(x) < \\frac{{a}}{{b}} & c</math>", "\\(f''(x) < \\frac{{a}}{{b}} & c\\)"),
        ("<math display='block'> E  = m </math>", "\\[E = m\\]"),
        ("<math/><ref><math>x</math></ref>", ""),
    ],
)
def test_of_wikitext_what_readers_see_is_read(written: str, read: str) -> None:
    dump = formats.mediawiki([("T", f"the text before {written} it")]).decode()
    dump = dump.replace("</namespaces>", '<namespace key="14"> Kategorie </namespace></namespaces>')
    assert parse_one(dump.encode(), "a").text.rstrip() == f"the text before {read} it"


def test_blocks_of_a_page_without_an_article_are_told_apart() -> None:
    from lxml import html

    from openbook.corpus.sources.web import headings, text_of

    page = "<body>a<div>b<i>c</i><script>d</script>e</div><!-- f -->g<ul><li>h<li>i</ul><br>j</body>"
    assert text_of(html.fromstring(page)).split("\n") == ["a", "bce", "g", "h", "i", "j"]
    assert headings(html.fromstring("<body><h1>a <b>b</b></h1><h6>c</h6></body>")) == [(1, "a b"), (6, "c")]


def test_a_chapter_of_an_epub_has_the_characters_that_its_entities_name() -> None:
    doctype = '<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.1//EN" "http://www.w3.org/TR/xhtml11/DTD/xhtml11.dtd">'
    body = "<h2>Un caf&eacute;&nbsp;<b>noir</b></h2><p>caf&eacute;&nbsp;noir, R&amp;eacute;, &unknown;</p>"
    chapter = f'{doctype}<html xmlns="http://www.w3.org/1999/xhtml"><body>{body}</body></html>'
    book = formats.changed(formats.epub("T", ""), "OPS/text/chapter 9.xhtml", chapter.encode())
    document = parse_one(book, "a.epub")
    assert document.text.split("\n") == ["Un café noir", "café noir, R&eacute;, &unknown;"]
    assert [name for _, name in document.sections] == ["Un café noir"]


def test_a_table_of_a_docx_is_text_and_what_was_deleted_is_not() -> None:
    cell = "<w:tc><w:p><w:r><w:t>{}</w:t></w:r></w:p></w:tc>"
    table = f"<w:tbl><w:tr>{cell.format('x')}{cell.format('y')}</w:tr></w:tbl>"
    body = f'<w:document xmlns:w="w"><w:body>{table}<w:p><w:del><w:t>z</w:t></w:del></w:p></w:body></w:document>'
    content = formats.zipped({"[Content_Types].xml": b"<Types/>", "word/document.xml": body.encode()})
    assert "".join(parse_one(content, "a.docx").text.split()).replace("z", "") == "|x|y"


def test_what_was_moved_in_a_docx_stands_where_it_was_moved_to() -> None:
    run = "<w:r><w:t>moved</w:t></w:r>"
    lines = f"<w:p><w:moveFrom>{run}</w:moveFrom></w:p><w:p><w:r><w:t>to</w:t></w:r><w:moveTo>{run}</w:moveTo></w:p>"
    body = f'<w:document xmlns:w="w"><w:body>{lines}</w:body></w:document>'
    content = formats.zipped({"[Content_Types].xml": b"<Types/>", "word/document.xml": body.encode()})
    assert parse_one(content, "a.docx").text.split() == ["tomoved"]


def test_a_hyphen_of_a_docx_at_which_no_line_ends_is_one() -> None:
    run = "<w:r><w:t>F</w:t><w:noBreakHyphen/><w:t>16</w:t><w:softHyphen/><w:t>s</w:t></w:r>"
    body = f'<w:document xmlns:w="w"><w:body><w:p>{run}</w:p></w:body></w:document>'
    content = formats.zipped({"[Content_Types].xml": b"<Types/>", "word/document.xml": body.encode()})
    assert parse_one(content, "a.docx").text.strip() == "F-16s"


def test_tabs_and_breaks_of_a_docx_are_white_space_and_what_old_readers_see_is_left_out() -> None:
    run = '<w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br w:type="page"/><w:t>c</w:t><w:cr/><w:t>d</w:t></w:r>'
    drawn = "<AlternateContent><Choice><w:t>e</w:t></Choice><Fallback><w:t>e</w:t></Fallback></AlternateContent>"
    members = {"[Content_Types].xml": b"<Types/>"}
    for name, content in (("document", f"{run}{drawn}"), ("footnotes", "<w:t>f</w:t>"), ("endnotes", "<w:t>g</w:t>")):
        members[f"word/{name}.xml"] = f'<w:all xmlns:w="w"><w:p>{content}</w:p></w:all>'.encode()
    assert parse_one(formats.zipped(members), "a.docx").text == "\na\tb\nc\nde\nf\ng"


def test_notes_of_a_docx_follow_its_text_in_no_section() -> None:
    heading = '<w:p><w:pPr><w:pStyle w:val="Heading1"/></w:pPr><w:r><w:t>Life</w:t></w:r></w:p>'
    body = f'<w:document xmlns:w="w"><w:body>{heading}<w:p><w:r><w:t>born</w:t></w:r></w:p></w:body></w:document>'
    line = '<w:footnote w:type="separator"><w:p><w:r><w:separator/></w:r></w:p></w:footnote>'
    note = '<w:footnote w:id="1"><w:p><w:r><w:footnoteRef/></w:r><w:r><w:t> in Ulm</w:t></w:r></w:p></w:footnote>'
    notes = f'<w:footnotes xmlns:w="w">{line}{note}</w:footnotes>'
    members = {"[Content_Types].xml": b"<Types/>", "word/document.xml": body.encode()}
    document = parse_one(formats.zipped({**members, "word/footnotes.xml": notes.encode()}), "a.docx")
    assert document.text.split() == ["Life", "born", "in", "Ulm"]
    *_, (at, name) = document.sections
    assert (document.text[at:].split(), name) == (["in", "Ulm"], "")


@pytest.mark.parametrize(
    ("members", "why"),
    [
        (["[Content_Types].xml", "xl/workbook.xml", "xl/a.xml"], "a workbook of Excel: save its tables as CSV"),
        (["[Content_Types].xml", "ppt/presentation.xml"], "slides of PowerPoint: save them as PDF"),
        (
            ["mimetype", "content.xml", "META-INF/manifest.xml"],
            "a document of LibreOffice: save it as DOCX, PDF or CSV",
        ),
    ],
)
def test_documents_of_other_programs_cost_one_line_that_says_what_to_do(members: list[str], why: str) -> None:
    assert parse(formats.zipped(dict.fromkeys(members, b"<a/>")), "a") == [Failure("a", why)]


MAIL = "Received: by host\r\n\tfor you\r\nMIME-Version: 1.0\r\n{}\r\n\r\nGood words, =C3=BC.\r\n"
CODED = (
    "Content-Type: multipart/alternative; boundary=x",
    "Content-Type: text/plain\r\nContent-Transfer-Encoding: quoted-printable",
    "content-transfer-encoding: BASE64",
    "Content-Type: text/html; charset=utf-8",
)


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        (r"{\rtf1\ansi good words\par}", "RTF: save it as DOCX, PDF or text"),
        *((MAIL.format(each), "a mail in the codes of MIME: save it as text or HTML") for each in CODED),
        (MAIL.format(CODED[0]).replace(": ", ":"), "a mail in the codes of MIME"),
        ("From you Mon Jan  1 00:00:00 2024\n" + MAIL.format(CODED[0]), "a mail in the codes of MIME: save it"),
        ("From you Mon\nTo: me\n\nwords\n\n" * 9999 + "From you Tue\n" + MAIL.format(CODED[0]), "a mail in the codes"),
        ("<svg xmlns='http://www.w3.org/2000/svg'><path d='M0 0'/></svg>", "SVG, a picture"),
        ("<!-- made by hand -->\n<!DOCTYPE svg PUBLIC 'a' 'b'>\n<svg>", "SVG, a picture"),
    ],
)
def test_codes_that_a_program_is_to_read_are_no_text(begin: str, why: str) -> None:
    (failure,) = parse(begin.encode(), "a")
    assert isinstance(failure, Failure)
    assert failure.reason.startswith(why)


def test_many_mails_are_looked_at_to_the_last_whatever_stands_before_them() -> None:
    mails = "From you Mon\nTo: me\n\nwords\n\n" * 999 + "From you Tue\n" + MAIL.format(CODED[0])
    for content in (f"\n{mails}".encode(), mails.encode("utf-8-sig"), mails.encode("utf-16")):
        assert parse(content, "a.mbox") == [Failure("a.mbox", "a mail in the codes of MIME: save it as text or HTML")]


def test_a_mail_of_plain_text_and_what_speaks_of_codes_are_texts() -> None:
    plain = MAIL.format("Content-Type: text/plain; charset=us-ascii\r\nContent-Transfer-Encoding: 7bit")
    spoken = f"About mail\n\n{MAIL.format(CODED[0])}"
    for text in (plain, spoken, "A document of RTF begins with {\\rtf1.", "An <svg> is a picture."):
        assert recognise(text.encode(), "a") == "text"
    assert recognise(b"<svg><path/></svg>\n\n# A logo, then words\n", "a.md") == "Markdown"


@pytest.mark.parametrize(
    ("content", "each"),
    [
        (b'[{"text": "one"}, {"text": "two"}]', ".[]"),
        (b'\xef\xbb\xbf[\r\n  {\r\n    "text": "one"\r\n  }\r\n]', ".[]"),
        (b'{\n  "text": "one"\n}\n', "."),
    ],
)
def test_json_that_is_no_lines_costs_one_line_that_says_what_to_do(content: bytes, each: str) -> None:
    why = "one JSON text over the file; JSON lines have an object a line: jq -c '{}' FILE > FILE.jsonl"
    assert parse(content, "a.json") == [Failure("a.json", why.format(each))]


def test_of_an_article_with_its_history_the_newest_revision_is_read() -> None:
    dump = formats.mediawiki([("t", "some old words")]).decode()
    revision = dump[dump.index("<revision>") : dump.index("</revision>") + len("</revision>")]
    newest = "<revision><timestamp>2024-05-17T08:30:00Z</timestamp><text>new words</text></revision>"
    found = parse_one(dump.replace(revision, revision + newest, 1).encode(), "a")
    assert (found.text, found.date) == ("new words", "2024-05-17T08:30:00Z")
    assert parse(dump.replace(revision, "", 1).encode(), "a") == [], "without one it is no article"


def test_a_pdf_that_is_encrypted_without_a_password_is_read() -> None:
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(formats.pdf("Title", "some text"))))
    writer.encrypt(user_password="", owner_password="secret", algorithm="AES-256")
    out = io.BytesIO()
    writer.write(out)
    assert parse_one(out.getvalue(), "a.pdf").text.split() == ["some", "text"]


def test_a_page_of_a_pdf_that_cannot_be_read_costs_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from pypdf import PageObject, PdfWriter

    writer, out = PdfWriter(), io.BytesIO()
    for text in ("one", "two", "three"):
        writer.append(io.BytesIO(formats.pdf("T", text)))
    writer.write(out)
    extract, error = PageObject.extract_text, Exception("bad\nfont")

    def extracted(page: PageObject) -> str:
        if (text := extract(page)).strip() == "two":
            raise error
        return text

    monkeypatch.setattr(PageObject, "extract_text", extracted)
    failure, document = parse(out.getvalue(), "a.pdf")
    assert failure == Failure("a.pdf", "page 2: Exception: bad font")
    assert isinstance(document, Document)
    assert document.text.split() == ["one", "three"]
    assert [document.text[at:].split() for at in document.pages] == [["one", "three"], ["three"], ["three"]]
    error = MemoryError()
    with pytest.raises(MemoryError):
        parse(out.getvalue(), "a.pdf")


def test_half_a_character_of_a_pdf_costs_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from pypdf import PageObject

    monkeypatch.setattr(PageObject, "extract_text", lambda page: "x\ud835\udc00y \ud800z")
    assert parse_one(formats.pdf("T", "words"), "a.pdf").text == "x\U0001d400y \ufffdz"


def test_a_member_of_a_zip_whose_name_is_damaged_costs_no_others() -> None:
    content = formats.zipped({"ü.txt": b"one", "b.txt": b"two"}).replace("ü".encode(), b"\xff\xff", 1)
    failure, document = parse(content, "a.zip")
    assert isinstance(failure, Failure)
    assert (failure.path, failure.reason[:18]) == ("a.zip/ü.txt", "UnicodeDecodeError")
    assert isinstance(document, Document)
    assert document.text == "two"


def test_a_name_of_any_bytes_is_text_where_its_file_is_left_out() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        link = tarfile.TarInfo("\udcff.txt")
        link.type = tarfile.SYMTYPE
        archive.addfile(link)
    assert parse(out.getvalue(), "a.tar") == [Failure("a.tar/?.txt", "a link")]


def test_folders_and_hidden_members_of_a_tar_cost_nothing() -> None:
    out = io.BytesIO(formats.tarred({"./a.txt": b"words", "./.DS_Store": b"no"}))
    with tarfile.open(fileobj=out, mode="a") as archive:
        folder = tarfile.TarInfo("./sub")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
    assert parse_one(out.getvalue(), "a.tar").text == "words"


# --- tables

FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)


@given(st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=5), st.sampled_from(",\t;|"), st.booleans())
def test_a_table_that_was_written_is_read(rows: list[tuple[str, str]], delimiter: str, is_quoted: bool) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL if is_quoted else csv.QUOTE_MINIMAL)
    writer.writerow(["title", "text", "id"])
    writer.writerows([title, text, f"d{i}"] for i, (title, text) in enumerate(rows))
    expected = [canonical(Document(f"d{i}", title, text, "table")) for i, (title, text) in enumerate(rows)]
    assert parse(out.getvalue().encode(), "table") == expected


def test_a_line_end_within_a_value_that_is_not_quoted_costs_its_row() -> None:
    found = parse(b'id,text\n1,one\n2,t\rwo\n3,three\n4,"fo\r\nur"\n5,"fi\nve",\rx\n6,six\r\n', "a.csv")
    assert [each.text for each in found if isinstance(each, Document)] == ["one", "three", "fo\r\nur", "six"]
    why = "a line end within a value that is not quoted"
    assert [each for each in found if isinstance(each, Failure)] == [Failure(f"a.csv:{n}", why) for n in (3, 7)]


def test_lines_of_a_row_that_are_no_text_cost_that_row_alone() -> None:
    failure, document = parse(b'id,text\n1,"x\n\xff\n\xff\n"\n2,two\n', "a.csv")
    assert failure == Failure("a.csv:2", "not UTF-8: invalid start byte at byte 0")
    assert isinstance(document, Document)
    assert document.text == "two"


def test_a_row_of_another_length_or_of_no_text_costs_itself_alone_and_a_line_of_names_of_none_the_table() -> None:
    found = parse(b"text,n\none,1\ntwo,2,3\n\xff\nfour,4\n", "a.csv")
    assert [each.text for each in found if isinstance(each, Document)] == ["one", "four"]
    assert [(each.path, each.reason) for each in found if isinstance(each, Failure)] == [
        ("a.csv:3", "must have 2 columns (text, n), got 3"),
        ("a.csv:4", "not UTF-8: invalid start byte at byte 0"),
    ]
    (failure,) = parse(b"text,\x1b[2J" + b"n" * 9999 + b"\none\n", "a.csv")
    assert isinstance(failure, Failure)
    assert re.fullmatch(r"must have 2 columns \(text, \[2jn+\.\.\.\), got 1", failure.reason), failure
    assert len(failure.reason) < 250
    assert parse(b"text,\xff\nwords,1\n", "a.csv") == [Failure("a.csv", "not UTF-8: invalid start byte at byte 5")]


def test_a_batch_of_rows_is_read_to_its_end_however_many_are_taken_at_once() -> None:
    import pyarrow as pa
    import pyarrow.feather

    texts, out = [f"word{i}" for i in range(ROWS_AT_ONCE + 1)], io.BytesIO()
    no_dates = pa.array([1 << 50] * len(texts), pa.timestamp("s"))  # which nobody reads
    pa.feather.write_feather(pa.table({"Text": texts, "n": no_dates}), out)
    assert [each.text for each in parse(out.getvalue(), "a") if isinstance(each, Document)] == texts


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_the_user_says_what_text_title_and_id_are_called(kind: str, tmp_path: Path) -> None:
    row = {"Key": "k1", "Headline": "a title", "text": "no words", "Full text": "some words", "id": "no id"}
    path = tmp_path / f"a.{kind}"
    if kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, row)
            writer.writeheader()
            writer.writerow(row)
    elif kind == "parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({name: [value] for name, value in row.items()}), path)
    else:
        path.write_text(json.dumps(row))
    names = Names.of(text="Full text", title="Headline", id="Key")
    (found,) = read_passages(tmp_path, names=names)
    assert (found.document_id, found.title, found.text) == ("k1", "a title", "some words")
    with pytest.raises(InvalidDocuments, match="missing"):
        list(read_passages(tmp_path, names=Names.of(text="missing", title=None)))
    with pytest.raises(InvalidConfig, match="the column for the text must not be empty, got ' '"):
        Names.of(text=" ")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("column", ["title", "id"])
def test_a_table_without_a_column_that_the_user_names_is_refused_by_its_name(
    column: str, kind: str, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = tmp_path / f"a.{kind}"
    if kind == "csv":
        table.write_text("text,name\nwords,Bell\n")
    else:
        pq.write_table(pa.table({"text": ["words"], "name": ["Bell"]}), table)
    assert [each.title for each in read_passages(table, names=Names.of(title="Name"))] == ["Bell"]
    with pytest.raises(InvalidDocuments, match=f"the column for the {column} must be called Nosuch, got text, name"):
        list(read_passages(table, names=Names.of(**{column: "Nosuch"})))


def test_a_table_with_two_columns_for_one_thing_is_refused_by_their_name(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table([["words"], [""]], names=["text", "Text"]), tmp_path / "a")
    for table in (b"text,title,Text\nwords,T,\n", (tmp_path / "a").read_bytes()):
        assert parse(table, "a") == [Failure("a", "more than one column is called text")]
    assert parse_one(b"text,,n,n,\nwords,,1,2,\n", "a.csv").text == "words"


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_date_that_python_does_not_have_costs_its_row(kind: str, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.feather
    import pyarrow.parquet as pq

    table = pa.table({"text": ["one", "two", "three"], "date": pa.array([0, 10**7, 365], pa.date32())})
    write = pq.write_table if kind == "parquet" else pa.feather.write_feather
    write(table, tmp_path / "a")
    found = parse((tmp_path / "a").read_bytes(), "a")
    documents = [(each.text, each.date) for each in found if isinstance(each, Document)]
    assert documents == [("one", "1970-01-01"), ("three", "1971-01-01")]
    assert [(each.path, each.reason) for each in found if isinstance(each, Failure)] == [
        ("a:2", "date value out of range")
    ]


def test_a_table_of_texts_alone_is_read_and_one_that_names_no_text_is_none() -> None:
    found = parse(b'Text\none\n"two, three"\n', "a.csv")
    assert [each.text for each in found if isinstance(each, Document)] == ["one", "two, three"]
    for table in (
        b"query-id\tcorpus-id\tscore\nq1\td1\t1\n",  # three columns, as DPR's
        b"q1\td1\t1\nq2\td2\t1\n",
        b"1\tone\n2\ttwo\n",  # numbered, as DPR's
    ):
        (failure,) = parse(table, "a.tsv")
        assert isinstance(failure, Failure)
        assert failure.reason.startswith("the first line must name columns")


@given(st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=5))
def test_json_lines_that_were_written_are_read(rows: list[tuple[str, str]]) -> None:
    lines = [json.dumps({"title": title, "text": text, "id": i}) for i, (title, text) in enumerate(rows)]
    expected = [canonical(Document(str(i), title, text, "a")) for i, (title, text) in enumerate(rows)]
    assert parse("\r\n".join(lines).encode(), "a") == expected


@given(st.binary(max_size=200), st.sampled_from(sorted(EACH)))
def test_whatever_bytes_come_they_are_documents_or_failures(content: bytes, ending: str) -> None:
    head = EACH[ending](*DOCUMENTS[0])
    for each in (content, content + head, head[: len(content)] + content + head[2 * len(content) :]):
        assert len(parse(each, "a")) <= 12 + each.count(b"\n") + each.count(b"\r")


def test_what_is_passed_over_in_silence_is_progress() -> None:
    """Who follows a long file knows by it that the parser does not hang."""
    lines = events(b'{"text": "words"}\n' + b"{}\n" * 99, "a.jsonl", 0, 90)
    assert [type(each) for each in lines[1:-1]] == [type(None)] * 90 + [Failure] * 10
    pages = events(formats.mediawiki(DOCUMENTS), "dump", 0, 4)
    assert pages[1:7] == [None] * 6  # the second article is passed over, of the third its talk page is none
    members = dict.fromkeys(["a.txt", "b.gz", "c.txt"], b"\x1f\x8b\x08") | {"d.txt": b"words"}
    for archive in (formats.tarred(members), formats.zipped(members)):
        later = events(archive, "all", 3)
        assert later[:3] == [None] * 3
        assert [event.text for event in later if isinstance(event, Document)] == ["words"]


def test_what_is_left_of_a_large_member_and_a_copy_of_one_are_made_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parse_module, "PASSED_OVER_BYTES", MB)
    members = {".hidden": bytes(5 * MB), "a.npy": b"\x93NUMPY" + bytes(5 * MB), "b.txt": b"words"}
    found = events(gzip.compress(formats.tarred(members), 1), "all.tar.gz")
    assert found.count(None) >= 8
    assert [event.text for event in found if isinstance(event, Document)] == ["words"]
    copies: list[IO[bytes]] = []

    def copied() -> Iterator[None]:
        limits, file = Limits(), io.BufferedReader(io.BytesIO(bytes(3 * MB)))  # type: ignore[arg-type]
        copies.append((yield from Opened("a", file, limits, Budget(limits, 0), n_layers=1).seekable()))

    assert list(copied()) == [None] * 3
    with copies[0] as copy:
        assert copy.read() == bytes(3 * MB)
    assert copy.closed


def test_a_copy_of_a_member_is_closed_once_it_is_read_or_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not when the garbage collector comes to it: here all are kept."""
    made: list[IO[bytes]] = []

    def temporary() -> IO[bytes]:
        made.append(io.BytesIO())
        return made[-1]

    monkeypatch.setattr("openbook.corpus.sources.opened.tempfile.TemporaryFile", temporary)
    for name in ("all.parquet", "all.arrow", ".pdf", ".docx"):
        content = TOGETHER[name](DOCUMENTS) if name in TOGETHER else EACH[name](*DOCUMENTS[0])
        assert any(isinstance(each, Document) for each in parse(gzip.compress(content, 1), "a.gz"))
        parse(gzip.compress(content[: len(content) // 2], 1), "a.gz")  # what is damaged
        limits = Limits(spooled_bytes=1)
        file = io.BufferedReader(io.BytesIO(content))  # type: ignore[arg-type]
        (failed,) = (
            each
            for each in Parse().events(Opened("a", file, limits, Budget(limits, 0), n_layers=1))
            if isinstance(each, Failure)
        )
        assert failed.reason == "has more than 1 bytes"
    assert [each.closed for each in made] == [True] * 12


@pytest.mark.parametrize(
    ("content", "name", "limit", "most"),
    [
        (b"words", "a.txt", "document_bytes", len("a.txt" + "a" + "words")),
        (b"<html><body>words".ljust(80), "a.html", "document_bytes", 20),  # and of its markup four times as much
        (b'{"text": "words"}\n', "a.jsonl", "line_bytes", 18),
        (gzip.compress(b"words", mtime=0), "a.gz", "n_layers", 1),
        (gzip.compress(b"words", mtime=0), "a.gz", "unpacked_bytes", 5),
        (formats.zipped({"a.txt": b"words"}), "a.zip", "n_members", 1),
        (formats.tarred({"a.txt": b"words"}), "a.tar", "n_members", 1),
    ],
)
def test_what_is_as_large_as_it_may_be_is_read(content: bytes, name: str, limit: str, most: int) -> None:
    def failures(limits: Limits) -> list[str]:
        opened = Opened(name, io.BufferedReader(io.BytesIO(content)), limits, Budget(limits, len(content)))  # type: ignore[arg-type]
        return [event.reason for event in Parse().events(opened) if isinstance(event, Failure)]

    assert failures(replace(Limits(), **{limit: most})) == []
    assert len(failures(replace(Limits(), **{limit: most - 1}))) == 1


def test_no_file_unpacks_to_more_than_its_size_allows_or_than_any_may() -> None:
    with pytest.raises(Spent, match="unpacks to more than 9 bytes"):
        Budget(Limits(unpacked_bytes=9), MB).spend(10)
    of_its_size = Budget(Limits(unpacked_free_bytes=1, unpacked_ratio=3), 5)
    of_its_size.spend(15)
    with pytest.raises(Spent, match="unpacks to more than 15 bytes"):
        of_its_size.spend(1)


# --- size


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Neither here nor in the process that parses, which may not have as much as the file has."""
    record = json.dumps({"id": "a", "title": "b", "text": "words and words " * 400}) + "\n"
    (tmp_path / "a.jsonl").write_text(record * 15_000)
    limits = Limits(memory_bytes=90 * MB)
    assert os.path.getsize(tmp_path / "a.jsonl") > limits.memory_bytes
    tracemalloc.start()
    try:
        n_documents = sum(1 for _ in read_documents(tmp_path / "a.jsonl", pytest.fail, limits, 1))  # type: ignore[arg-type]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert n_documents == 15_000
    assert peak < 8 * MB
