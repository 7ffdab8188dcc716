"""Files that are damaged, lie or attack, of every format, and the line that each must cost."""

import bz2
import gzip
import io
import lzma
import os
import re
import stat
import tarfile
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import every_format as formats
from every_format import DOCUMENTS, changed

from openbook.corpus.sources.limits import MB, Limits

TITLE, TEXT = DOCUMENTS[5]  # with a letter beyond ASCII
LATIN = TEXT.replace("bridges", "brücken").encode("latin-1")
LIMITS = Limits(
    memory_bytes=1024 * MB, document_bytes=MB, line_bytes=2 * MB, unpacked_free_bytes=12 * MB, unpacked_ratio=20
)
LONG = b"word " * MB
EPUB, DOCX = formats.epub(TITLE, TEXT), formats.docx(TITLE, TEXT)  # this one has macros
CHAPTER = "OPS/text/chapter 9.xhtml"
BEYOND = Path(__file__).resolve().with_name("beyond.txt")
"""Whose words no file may bring in."""
URL = BEYOND.as_uri().encode()
OUTSIDE = b'<p><item id="a" href="../../../../..%b"/><itemref idref="a"/></p>' % bytes(BEYOND)
SCRIPT = b"<script>document.write('haha')</script>"
ENTITY = b'<!DOCTYPE html [<!ENTITY x SYSTEM "%b">]>' % URL
ZEROS = gzip.compress(bytes(30 * MB))
ZEROS_OF_A_LINE = gzip.compress(b'{"' + b" " * 30 * MB)
LAUGHS = (
    b'<!DOCTYPE a [<!ENTITY a "ha"><!ENTITY b "' + b"&a;" * 99 + b'"><!ENTITY c "' + b"&b;" * 99 + b'">'
    b'<!ENTITY d SYSTEM "' + URL + b'">]>'
)


def cut(content: bytes, share: float = 0.7) -> bytes:
    return content[: int(len(content) * share)]


def nested(n: int, content: bytes = b"deep") -> bytes:
    for _ in range(n):
        content = formats.zipped({"a": content})
    return content


def encrypted_pdf() -> bytes:
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(formats.pdf(TITLE, TEXT))))
    writer.encrypt("secret", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def encrypted_zip() -> bytes:
    content = bytearray(formats.zipped({"a.txt": b"secret"}))
    content[6] |= 1
    content[content.index(b"PK\x01\x02") + 8] |= 1
    return bytes(content)


def zip_with_link() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, str(BEYOND))
    return out.getvalue()


def tar_with_links() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind in (("sym", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("dev", tarfile.CHRTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, str(BEYOND)
            archive.addfile(member)
        member = tarfile.TarInfo("../../up.txt")
        member.size = 9
        archive.addfile(member, io.BytesIO(b"good words"[:9]))
    return out.getvalue()


def wide(kind: str) -> bytes:
    """Some kilobytes of which every 256 rows have gigabytes."""
    import pyarrow as pa

    values = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["x" * 9 * MB]))
    return _written(pa.table({"text": values}), kind)


def _written(table: Any, kind: str) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, out)
        return out.getvalue()
    new = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream  # type: ignore[attr-defined]
    with new(out, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:  # type: ignore[attr-defined]
        writer.write_table(table)
    return out.getvalue()


def latin_column(kind: str) -> bytes:
    """Two rows, of which the first is not UTF-8."""
    import pyarrow as pa

    offsets = pa.array([0, 1, 11], pa.int32()).buffers()[1]
    column = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"\xfcgood words")])
    return _written(pa.table({"text": column}), kind)


def pdf_of(content: bytes, catalog: bytes = b"") -> bytes:
    """A page with a compressed content, and something more in the catalogue."""
    packed = zlib.compress(content, 9)
    page = formats.pdf(TITLE, "")
    start, end = page.index(b"<</Length"), page.index(b"endstream")
    page = page[:start] + b"<</Filter/FlateDecode/Length %d>>stream\n%s\n" % (len(packed), packed) + page[end:]
    return page.replace(b"/Catalog", b"/Catalog" + catalog)


def packed_often(n: int) -> bytes:
    content = b"deep"
    for _ in range(n):
        content = gzip.compress(content)
    return content


def jsonl(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


PAGES = formats.crawl(DOCUMENTS[:3], is_packed=False)
LENGTH = re.search(rb"Content-Length: \d+", PAGES[PAGES.index(b"WARC-Type: response") :])
assert LENGTH
SHORTER, LONGER = (PAGES.replace(LENGTH[0], b"Content-Length: %d" % n, 1) for n in (300, 5000))


def fetched(content: bytes, *headers: tuple[str, str]) -> bytes:
    """Between two pages."""
    page = (
        "response",
        "https://example.org/a",
        b"<html><body>good words</body></html>",
        [("Content-Type", "text/html")],
    )
    return formats.warc(page, ("response", "https://example.org/b", content, list(headers)), page)


HOSTILE: dict[str, tuple[bytes, dict[str, str]]] = {
    # name: content, and for each failure where it is (behind the name) and why
    "cut.jsonl.gz": (cut(gzip.compress(os.urandom(9) + b"\n")), {"": "EOFError: Compressed file ended before"}),
    "damaged.gz": (b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 20, {"": "error: Error -3"}),
    "cut.bz2": (cut(bz2.compress(formats.mediawiki(DOCUMENTS))), {"": "EOFError: Compressed file ended before"}),
    "cut.xz": (b"\xfd7zXZ\x00" + b"\0" * 9, {"": "LZMAError"}),
    "cut.zip": (cut(formats.zipped({"a.txt": b"a" * 99})), {"": "BadZipFile"}),
    "cut.tar": (
        formats.tarred({"a.txt": os.urandom(999)})[:800],
        {"": "unexpected end", "/a.txt": "unexpected end"},
    ),
    "cut.parquet": (cut(formats.parquet(DOCUMENTS)), {"": "ArrowInvalid: Parquet magic bytes not found"}),
    "cut.arrow": (cut(formats.TOGETHER["all.arrow"](DOCUMENTS)), {"": "ArrowInvalid: "}),
    "cut.docx": (cut(formats.docx(TITLE, TEXT)), {"": "BadZipFile"}),
    "cut.epub": (cut(formats.epub(TITLE, TEXT)), {"": "BadZipFile"}),
    "cut.pdf": (formats.pdf(TITLE, TEXT)[:60], {"": "Pdf|no text on its"}),
    "latin.txt": (LATIN, {"": "not UTF-8: invalid start byte at byte"}),
    "latin.md": (b"# x\n" + LATIN, {"": "not UTF-8: invalid start byte at byte"}),
    "latin.html": (
        b"<html><head><meta charset=utf-8><body>" + LATIN + b"</html>",
        {"": "says it were utf-8, and is not"},
    ),
    "klingon.html": (b"<html><head><meta charset=x-klingon></head><body>" + LATIN + b"</html>", {"": "not UTF-8"}),
    "latin.csv": (b"id,text\n1,\xfc\n2,good words\n3\n", {":2": "not UTF-8", ":4": r"must have 2 columns .*, got 1"}),
    "wide.tsv": ("id\ttext\n".encode("utf-16"), {"": "UTF-16; lines must be UTF-8"}),
    "nameless.csv": (b"a,b\n1,2\n", {"": "the first line must name columns, one of them text or .*; --text names"}),
    "open.csv": (b'text,n\n"' + b"never closed\n" * 99_999, {"": "line 2: not separated values: field larger than"}),
    "columns.parquet": (
        formats.parquet(DOCUMENTS).replace(b"text", b"tuxt"),
        {"": "one column must be called text or contents or content or body; --text names another"},
    ),
    "latin.jsonl": (
        jsonl('{"id": 1, "text": "good words"}').replace(b"1", b"2") + b'{"text": "\xfc"}\n[1]\n{"text": 1.5}\n{"a',
        {":2": "not UTF-8", ":3": "must be an object", ":4": r"text must be a string, got 1\.5", ":5": "not JSON"},
    ),
    "many.jsonl": (
        jsonl(*["{}"] * 15),
        {**{f":{i}": "has no text or contents or" for i in range(1, 11)}, "": "and 5 more that are no documents"},
    ),
    "surrogate.jsonl": (jsonl('{"id": 1, "text": "\\ud800"}'), {":1": "not UTF-8: surrogates not allowed"}),
    "long.jsonl": (jsonl('{"text": "' + "x" * 3 * MB + '"}', '{"text": "good words"}'), {":1": "a line of more than"}),
    "long.txt": (b"word " * MB, {"": "has more than 4194304 bytes"}),
    "longish.txt": (b"word " * (MB // 4), {"": "a document of 13107.. bytes; at most 1048576"}),
    "zeros.gz": (ZEROS, {"": "of no format that is known"}),
    "bomb.jsonl.gz": (gzip.compress(b'{"' + b" " * 30 * MB), {"": "unpacks to more than 12582912 bytes"}),
    "bomb.zip": (
        formats.zipped(dict.fromkeys(("0.jsonl", "1.jsonl"), b"{" + b" " * 9 * MB)),
        {"/0.jsonl:1": "a line of", "": "unpacks to"},
    ),
    "bomb.docx": (
        formats.zipped({"[Content_Types].xml": b"", "word/document.xml": b"<a>" + b" " * 9 * MB}),
        {"": "word/document.xml has more than 4194304 bytes"},
    ),
    "deep.zip": (nested(9), {"/a/a/a/a/a": "lies in more than 5 layers"}),
    "laughs.xml": (
        LAUGHS + formats.mediawiki(DOCUMENTS[:2]).replace(b"Long", b"&c;&d;"),
        {},
    ),
    "laughs.docx": (
        formats.zipped(
            {
                "[Content_Types].xml": b"",
                "word/document.xml": LAUGHS + b'<w:p xmlns:w="w"><w:t>&c;&d;</w:t></w:p>',
            }
        ),
        {},
    ),
    "no-package.epub": (formats.zipped({"mimetype": b"", "META-INF/container.xml": b"<a/>"}), {"": "names no package"}),
    "secret.pdf": (encrypted_pdf(), {"": "needs a password"}),
    "secret.zip": (encrypted_zip(), {"/a.txt": "RuntimeError: File .* is encrypted"}),
    "empty.pdf": (formats.pdf(TITLE, ""), {"": r"no text on its 1 pages; are they scanned\?"}),
    "empty.html": (b"<html><body></body></html>", {"": "no text found|no HTML"}),
    "extracted": (b'<doc id="1" url="u" title="t">\nx\n</doc>', {"": "run it with --json"}),
    "feed.xml": (b"<?xml version='1.0'?><rss/>", {"": "XML, and neither a MediaWiki dump nor XHTML"}),
    "cut.xml": (cut(formats.mediawiki(DOCUMENTS[:2])), {"": "XMLSyntaxError: "}),
    "letter.rtf": (rb"{\rtf1\ansi haha\par}", {"": "RTF: save it as DOCX, PDF or text"}),
    "letter.eml": (
        b"From: you\nMIME-Version: 1.0\nContent-Transfer-Encoding: base64\n\naGFoYQ==\n",
        {"": "a mail in the codes of MIME: save it as text or HTML"},
    ),
    "logo.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'><text>haha</text></svg>", {"": "SVG, a picture"}),
    "noise": (b"\x7fELF" + bytes(99), {"": "of no format that is known"}),
    "links.zip": (zip_with_link(), {"/link": "a link"}),
    "links.tar": (tar_with_links(), {"/sym": "a link", "/hard": "a link", "/dev": "no regular file"}),
    "\x1b[2Jterminal.txt": (LATIN, {"": "not UTF-8"}),
    "cut.warc": (PAGES[:-200], {"/https://example.org/2": "cut off"}),
    "cut.warc.gz": (cut(formats.crawl(DOCUMENTS)), {"": "EOFError: Compressed file ended before"}),
    "short.warc": (SHORTER, {"": r"behind record 2 is none; is its Content-Length right\?"}),
    "long.warc": (LONGER, {"": "record 2: another begins within its Content-Length"}),
    "nameless.warc": (
        PAGES.replace(LENGTH[0], b"Content-Length: many"),
        {"": "record 2: its Content-Length is no number"},
    ),
    "header.warc": (PAGES.replace(b"WARC-Date", b"x" * MB, 1), {"": "record 1: a header of more than 262144 bytes"}),
    "no-http.warc": (PAGES.replace(b"HTTP/1.1", b"\xff\0\1TP/x"[:8], 1), {"": "record 2: no response of HTTP"}),
    "bomb.warc.gz": (fetched(ZEROS_OF_A_LINE, ("Content-Encoding", "gzip")), {"": "unpacks to more than 12582912"}),
    "chunk.warc.gz": (fetched(b"7fffffff\r\ngood", ("Transfer-Encoding", "chunked")), {}),
    "encoding.warc.gz": (
        fetched(b"good", ("Content-Encoding", "br")),
        {"": "record 3: in the content encoding br, which"},
    ),
    # Of each format what is not above: cut off, a bomb, in another encoding, of one long line, nested, with macros.
    "cut.csv": (formats.table(DOCUMENTS)[:-40], {"": "line 29: a quote that never ends"}),
    "cut.tsv": (b"7\tgood words\tt\n8\tcut", {":2": r"must have 3 columns \(id, text, title\), got 2"}),
    "cut.arrows": (formats.TOGETHER["all.arrows"](DOCUMENTS)[:-900], {"": "ArrowInvalid: Expected to read"}),
    "cut.txt": ("good words of a café".encode()[:-1], {"": "not UTF-8: unexpected end of data"}),
    "cut.md": (formats.markdown(TITLE, TEXT)[:200], {}),
    "cut.html": (formats.html(TITLE, TEXT)[:300], {}),
    "bomb.bz2": (bz2.compress(b'{"' + b" " * 30 * MB), {"": "unpacks to more than 12582912 bytes"}),
    "bomb.xz": (lzma.compress(b'{"' + b" " * 30 * MB), {"": "unpacks to more than 12582912 bytes"}),
    "bomb.tar": (formats.tarred({"a.gz": gzip.compress(b'{"' + b" " * 30 * MB)}), {"": "unpacks to more than"}),
    "bomb.epub": (changed(EPUB, CHAPTER, b"<a>" + b" " * 9 * MB), {"": "chapter 9.xhtml has more than 4194304 bytes"}),
    "bomb.pdf": (pdf_of(b" " * 200 * MB), {"": "LimitReachedError"}),
    "bomb.arrow": (wide("arrow"), {"": "needs more than 1024 MB of memory"}),
    "bomb.arrows": (wide("arrows"), {"": "needs more than 1024 MB of memory"}),
    "bomb.md": (
        "\n".join(["---", *(f"{b}: &{b} [{f'*{a},' * 9}]" for a, b in pairwise("xabcdefgh"))])
        .replace("*x", "x")
        .encode()
        + b"\ntitle: *h\n---\ngood words",
        {},
    ),
    "deep.jsonl": (b'{"text":' + b"[" * 200_000 + b"\n", {":1": "not JSON: maximum recursion depth"}),
    "deep.html": (b"<!DOCTYPE html><html><body>" + b"<div>" * 50_000 + b"words", {"": "more than 255 elements"}),
    "deep.xml": (formats.mediawiki([("t", "a b " + "{{" * 9_999), ("u", "a b " + "[[" * 9_999)]), {}),
    "deep.docx": (changed(DOCX, "word/document.xml", b"<a>" * 9_999), {"": "XMLSyntaxError: Excessive depth"}),
    "deep.tar": (formats.tarred({"a": packed_often(9)}), {"/a": "lies in more than 5 layers"}),
    "deep.gz": (packed_often(9), {"": "lies in more than 5 layers"}),
    "latin.xml": (formats.mediawiki(DOCUMENTS[:1]).replace(b"Long", b"L\xfcng"), {"": "XMLSyntaxError: Invalid bytes"}),
    "latin.docx": (changed(DOCX, "word/document.xml", b"<a>\xfc</a>"), {"": "XMLSyntaxError: Invalid bytes"}),
    "latin.epub": (changed(EPUB, CHAPTER, b"<a>\xfc</a>"), {"": "XMLSyntaxError: Invalid bytes"}),
    "latin.parquet": (latin_column("parquet"), {":1": "not UTF-8: invalid start byte"}),
    "latin.arrow": (latin_column("arrow"), {":1": "not UTF-8: invalid start byte"}),
    "latin.arrows": (latin_column("arrows"), {":1": "not UTF-8: invalid start byte"}),
    "long.csv": (b"id,text\n1," + LONG + b"\n2,good words\n", {":2": "a line of more than 2097152 bytes"}),
    "long.tsv": (b"id\ttext\ttitle\n1\t" + LONG + b"\tt\n", {":2": "a line of more than 2097152 bytes"}),
    "long.md": (b"# t\n" + LONG, {"": "has more than 4194304 bytes"}),
    "long.html": (b"<html><body>" + LONG, {"": "has more than 4194304 bytes"}),
    "long.xml": (formats.mediawiki([("t", LONG.decode()), ("u", "good words again")]), {":1": "a document of 52"}),
    "long.parquet": (formats.parquet([("t", LONG.decode())]), {":1": "a document of 52"}),
    "long.arrow": (formats.TOGETHER["all.arrow"]([("t", LONG.decode())]), {":1": "a document of 52"}),
    "long.docx": (formats.docx("t", LONG.decode()), {"": "has more than 4194304 bytes"}),
    "long.epub": (formats.epub("t", LONG.decode()), {"": "has more than 4194304 bytes"}),
    "out.epub": (
        changed(EPUB, "OPS/book.opf", OUTSIDE),
        {"": r"holds no \.\./\.\./\.\./\.\./\w"},
    ),
    "script.epub": (changed(EPUB, CHAPTER, b"<html><body>" + SCRIPT + b"<p>good</p></body></html>"), {}),
    "script.html": (b"<html><body>" + SCRIPT + b"<p>good words, and some more of them</p></body></html>", {}),
    "script.md": (b"# t\n\n" + SCRIPT + b"\n\ngood words\n", {}),
    "script.pdf": (
        pdf_of(b"BT /F1 10 Tf (good words) Tj ET", b"/OpenAction<</S/JavaScript/JS(haha\\(\\))>>"),
        {},
    ),
    "script.docm": (DOCX, {}),
    "code.md": (b"---\ntitle: !!python/object/apply:os.system ['exit']\n---\ngood words", {}),
    "entity.epub": (changed(EPUB, CHAPTER, ENTITY + b"<html><body>&x; good</body></html>"), {}),
    "entity.html": (ENTITY + b"<html><body><p>&x; good words</p><iframe src='%b'></body></html>" % URL, {}),
}
