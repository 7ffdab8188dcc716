"""Crawls of the web: which records are documents, what is known of them, and what damage costs."""

import gzip
import io
import os
import re
import zlib
from pathlib import Path

import every_format as formats
import pytest
from every_format import DOCUMENTS, read, warc
from hypothesis import given, settings
from hypothesis import strategies as st

from openbook.core.documents import Document
from openbook.corpus.sources.limits import MB, Budget, Failure, Limits
from openbook.corpus.sources.opened import Opened
from openbook.corpus.sources.parse import Leaf, Parse

TYPE = [("Content-Type", "text/html")]
PAGE = b"<html><head><title>T</title></head><body><p>good words of a page</p></body></html>"
WORDS = "good words of a page"


def opened(content: bytes, limits: Limits | None = None) -> Opened:
    limits = limits or Limits()
    file = io.BufferedReader(io.BytesIO(content))  # type: ignore[arg-type]
    return Opened("a.warc", file, limits, Budget(limits, len(content)))


def parse(content: bytes) -> list[Document | Failure]:
    return [event for event in Parse().events(opened(content)) if isinstance(event, Document | Failure)]


def texts(content: bytes) -> list[str]:
    found = parse(content)
    assert all(isinstance(each, Document) for each in found), found
    return [each.text for each in found if isinstance(each, Document)]


def response(content: bytes, *headers: tuple[str, str], uri: str = "https://example.org/a") -> bytes:
    return warc(("response", uri, content, list(headers)))


def test_a_page_is_called_by_its_address_and_states_more_than_its_record_does() -> None:
    head = b'<link rel="canonical" href="https://example.org/own"><meta name="date" content="1998-05-17"></head>'
    own = PAGE.replace(b"</head>", head)
    pages = [("response", f"https://example.org/{name}?q=1", page, TYPE) for name, page in (("a", PAGE), ("b", own))]
    assert [
        (each.id, each.path, each.url, each.date) for each in parse(warc(*pages)) if isinstance(each, Document)
    ] == [
        (path := "a.warc/https://example.org/a?q=1", path, "https://example.org/a?q=1", "2024-05-17T08:30:00Z"),
        (path := "a.warc/https://example.org/b?q=1", path, "https://example.org/own", "1998-05-17"),
    ]


def test_only_pages_that_were_found_are_read() -> None:
    records = [
        ("response", "https://example.org/none", b"no", [*TYPE, ("status", "404 Not Found")]),
        ("request", "https://example.org/a", b"", []),
        ("metadata", "https://example.org/a", b"no", [("Content-Type", "text/plain")]),
        ("response", "dns:example.org", b"no", []),
        ("response", "https://example.org/moved", b"", [*TYPE, ("status", "301 Moved"), ("Location", "/")]),
        ("response", "https://example.org/empty", b"", TYPE),
        *(
            ("response", "https://example.org/x", os.urandom(99), [("Content-Type", media)])
            for media in ("image/png", "Video/mp4", "text/css; charset=utf-8", "application/x-javascript", "font/woff")
        ),
        ("response", "https://example.org/last", PAGE, TYPE),
    ]
    assert texts(warc(*records)) == [WORDS]


def test_whatever_a_server_sent_is_read_as_a_file_would_be(tmp_path: Path) -> None:
    title, text = DOCUMENTS[0]
    bodies = [formats.EACH[ending](title, text) for ending in (".html", ".pdf", ".docx")]
    records = [("resource", f"https://example.org/{i}", body, []) for i, body in enumerate(bodies)]
    archive = formats.zipped({"b.txt": text.encode(), "c.md": formats.markdown(title, text)})
    records.append(("response", "https://example.org/all", archive, [("Content-Type", "application/zip")]))
    (tmp_path / "a.warc").write_bytes(warc(*records))
    found, failures = read(tmp_path)
    assert failures == []
    assert [" ".join(each.text.split()) for each in found] == [" ".join(text.split())] * 5
    assert found[3].path == "a.warc/https://example.org/all/b.txt"


def test_a_wet_file_is_plain_text_whatever_its_pages_were_called() -> None:
    text = b"text,title\n# <b> of a page\n"
    record = ("conversion", "https://example.org/page.html", text, [("Content-Type", "text/plain")])
    assert texts(warc(record)) == [text.decode()]


@pytest.mark.parametrize("media", ["text/html", "application/xhtml+xml"])
def test_a_media_type_says_what_a_fragment_is_and_its_charset(media: str) -> None:
    fragment = "<b></b><p>Ein Käse für alle Leute</p>".encode("latin-1")
    assert texts(response(fragment, ("Content-Type", f"{media}; charset=ISO-8859-1"))) == ["Ein Käse für alle Leute"]


@pytest.mark.parametrize("charset", ["utf-8", "latin-1"])
def test_a_text_that_is_no_utf_8_is_in_the_charset_that_its_server_names(charset: str) -> None:
    said = ("Content-Type", "text/plain; charset=ISO-8859-1")
    assert texts(response("café".encode(charset), said)) == ["café"]


def test_a_text_of_dos_may_end_with_the_sign_of_its_end() -> None:
    assert texts(response(b"caf\x82\r\n\x1a", ("Content-Type", "text/plain; charset=ibm866"))) == ["cafВ\r\n"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x80PNG\x01\x02 words", "not UTF-8: invalid start byte at byte 0"),
        ("Käse, déjà".encode()[:-1], "not UTF-8: unexpected end of data at byte 11"),
    ],
)
def test_what_is_no_text_or_cut_off_is_none_in_the_charset_of_its_server(content: bytes, reason: str) -> None:
    (failure,) = parse(response(content, ("Content-Type", "text/plain; charset=ISO-8859-1")))
    assert isinstance(failure, Failure)
    assert failure.reason == reason


@pytest.mark.parametrize(
    ("of_server", "of_page", "written"),
    [
        ("UTF-8", "iso-8859-1", "utf-8"),
        ("iso-8859-1", "utf-8", "latin-1"),
        ("utf-16le", "", "utf-16le"),
        ("windows-1251", "windows-1251", "utf-16"),  # with its mark, which says more than both
        ("x-klingon", "iso-8859-1", "latin-1"),
        ("x-klingon", "", "utf-8"),
        ("hex", "", "utf-8"),  # Python's, and no text's
        ("undefined", "utf-8", "utf-8"),  # Python's, and fails for whatever is there
        ("utf-8", "windows-1252", "windows-1252"),
        ("utf-7", "x-klingon", "utf-8"),
        ("", "x-klingon", "utf-8"),
    ],
)
def test_a_server_knows_better_than_a_page_in_which_charset_it_is(of_server: str, of_page: str, written: str) -> None:
    """As for browsers, if it is one that exists and that it is in."""
    meta = f"<meta charset={of_page}>" if of_page else ""
    page = f"<html><head>{meta}<title>T</title></head><body><p>Café</p></body></html>"
    assert texts(response(page.encode(written), ("Content-Type", f"text/html; charset={of_server}"))) == ["Café"]


def by_hand(uri: str, http: bytes, kind: bytes = b"response") -> bytes:
    about = b"WARC/1.0\r\nWARC-Type: %s\r\nWARC-Target-URI: %s\r\nContent-Length: %d\r\n\r\n"
    return about % (kind, uri.encode(), len(http)) + http + b"\r\n\r\n"


OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n"


def test_addresses_and_kinds_are_read_as_crawlers_have_written_them() -> None:
    pages = [by_hand("<https://example.org/wget>", OK + PAGE, b"Response"), by_hand("", PAGE, b"resource")]
    pages += [by_hand("http://example.org/a", OK + PAGE), by_hand("http://example.org/a", OK + PAGE, b"revisit")]
    paths = [each.path for each in parse(b"".join(pages))]
    assert paths == ["a.warc/https://example.org/wget", "a.warc/2", "a.warc/http://example.org/a"]


def test_a_text_in_which_a_record_seems_to_begin_is_read_to_its_end() -> None:
    text = "A record begins so:\nWARC/1.0\nand then it says more."
    record = ("conversion", "https://example.org/a", text.encode(), [("Content-Type", "text/plain")])
    assert texts(warc(record, is_packed=False)) == [text]


@pytest.mark.parametrize("said", ["charset=windows-1251", "Charset = 'windows-1251'"])
def test_a_charset_is_read_as_servers_write_it(said: str) -> None:
    assert texts(response("мир".encode("cp1251"), ("Content-Type", f"text/plain; {said}"))) == ["мир"]


CHUNKED = b"5\r\n" + PAGE[:5] + b"\r\n%x\r\n" % (len(PAGE) - 5) + PAGE[5:] + b"\r\n0\r\n\r\n"
PACKED = gzip.compress(PAGE)


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (PACKED, [("Content-Encoding", "gzip")]),
        (PACKED, [("Content-Encoding", "X-GZip")]),
        (PAGE, [("Content-Encoding", "Identity")]),
        (zlib.compress(PAGE), [("Content-Encoding", "deflate")]),
        (CHUNKED, [("Transfer-Encoding", "Chunked")]),
        (
            b"%x\r\n%s\r\n0\r\n\r\n" % (len(PACKED), PACKED),
            [("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked")],
        ),
        (PAGE, [("Content-Encoding", "gzip"), ("Transfer-Encoding", "chunked")]),  # taken off, and still said
    ],
    ids=["gzip", "gzip by its former name", "nothing", "deflate", "chunked", "gzip in chunks", "taken off before"],
)
def test_what_a_page_was_sent_in_is_taken_off(content: bytes, headers: list[tuple[str, str]]) -> None:
    assert texts(response(content, *TYPE, *headers)) == [WORDS]


@pytest.mark.parametrize("wbits", [15, -15], ids=["with a sum", "without"])
def test_a_deflated_page_that_is_cut_off_or_damaged_is_said_to_be(wbits: int) -> None:
    page = PAGE.replace(b"</p>", b" <b>%s</b></p>" % os.urandom(99_999).hex().encode())
    packing = zlib.compressobj(wbits=wbits)
    packed = packing.compress(page) + packing.flush()
    (whole,) = texts(response(packed, *TYPE, ("Content-Encoding", "deflate")))
    assert whole.startswith(WORDS)
    half = len(packed) // 2
    damaged = packed[:half] + bytes(99) + packed[half + 99 :]
    for bad in (packed[:half], damaged) if wbits > 0 else (packed[:half],):
        (failure,) = parse(response(bad, *TYPE, ("Content-Encoding", "deflate")))
        assert failure == Failure("a.warc/https://example.org/a", "deflated, and cut off or damaged")


def test_a_parser_that_goes_on_passes_over_the_records_before() -> None:
    content = formats.crawl(DOCUMENTS[:5])
    everything = list(Parse().events(opened(content)))
    for skip in range(6):
        events = list(Parse(skip).events(opened(content)))
        assert [each for each in events if each] == [each for each in everything if each][3 * skip :]
    assert [each.number for each in everything if isinstance(each, Leaf)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("is_packed", [True, False])
def test_what_lies_before_a_cut_is_in_and_the_cut_costs_a_line(is_packed: bool) -> None:
    content = formats.crawl(DOCUMENTS[:4], is_packed)
    whole = [each.text for each in parse(content) if isinstance(each, Document)]
    n_before = 0
    for end in range(300, len(content), 29):
        found = parse(content[:end])
        documents = [each.text for each in found if isinstance(each, Document)]
        failures = [each for each in found if isinstance(each, Failure)]
        assert documents == whole[: len(documents)], end
        assert len(failures) <= 1, (end, failures)
        assert len(documents) >= n_before
        n_before = len(documents)
    assert n_before == 3 or is_packed, "all but the one that is cut"


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=40), st.data())
def test_damage_costs_a_record_or_two(damage: bytes, data: st.DataObject) -> None:
    content = formats.crawl(DOCUMENTS[:4], is_packed=False)
    at = data.draw(st.integers(9, len(content) - len(damage)))
    found = parse(content[:at] + damage + content[at + len(damage) :])
    assert sum(isinstance(each, Document) for each in found) >= 2
    assert sum(isinstance(each, Failure) for each in found) <= 3


def test_a_record_that_kills_its_parser_takes_no_other_with_it(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(
        pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), ["x" * 9 * MB])}), out
    )
    page = ("response", "https://example.org/a", PAGE, TYPE)
    (tmp_path / "a.warc.gz").write_bytes(warc(page, ("resource", "https://example.org/b", out.getvalue(), []), page))
    documents, failures = read(tmp_path, Limits(memory_bytes=512 * MB))
    assert [each.text for each in documents] == [WORDS] * 2
    assert [(each.path.removeprefix(f"{tmp_path}/"), bool(re.search("memory", each.reason))) for each in failures] == [
        ("a.warc.gz/https://example.org/b", True)
    ]


def test_what_is_passed_over_of_a_long_record_is_progress() -> None:
    short, long = (
        len(list(Parse().events(opened(warc(("response", "https://example.org/a", film, said), is_packed=False)))))
        for said in ([("Content-Type", "video/mp4")],)
        for film in (b"", bytes(65 * MB))
    )
    assert long == short + 2


def test_a_crawl_has_as_many_records_as_it_likes(tmp_path: Path) -> None:
    (tmp_path / "a.warc").write_bytes(warc(*[("response", "https://example.org/a", PAGE, TYPE)] * 9))
    documents, failures = read(tmp_path, Limits(n_members=5))
    assert (len(documents), failures) == (9, [])
