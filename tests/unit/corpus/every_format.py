"""The same documents, written in every format that can be read; and a reader that takes down the failures."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

from openbook.core.documents import Document
from openbook.corpus.read import read_documents
from openbook.corpus.sources.limits import Failure, Limits

Documents = list[tuple[str, str]]
"""Titles and texts; each paragraph of a text is a line."""

_TOPICS = ["rivers", "music", "planets", "bread", "law", "bridges", "café", "glass", "winter", "maps"]
DOCUMENTS: Documents = [
    (
        f"About {topic}",
        f"Long before anybody wrote a book about {topic}, people knew much of it; they told it to each other, and to "
        f"those who came later.\nIn {1800 + number} the first society for {topic} was founded, and by the end of that "
        f"century it had more than {number + 3} hundred members in every large town of the country.\nToday {topic} is "
        'taught in schools: "nobody", as they say, should leave without it. Most do, and are happy.',
    )
    for number, topic in enumerate(_TOPICS)
]


def _records(documents: Documents) -> list[dict[str, str]]:
    return [{"id": f"d{i}", "title": title, "text": text} for i, (title, text) in enumerate(documents)]


def json_lines(documents: Documents) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in _records(documents)).encode()


def _beir(documents: Documents) -> bytes:
    rows = [{"_id": r["id"], "title": r["title"], "text": r["text"], "metadata": {}} for r in _records(documents)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _kilt(documents: Documents) -> bytes:
    rows = [
        {
            "_id": r["id"],
            "wikipedia_id": r["id"],
            "wikipedia_title": r["title"],
            "text": [f"{r['title']}\n", *(f"{line}\n" for line in r["text"].split("\n"))],
            "anchors": [],
        }
        for r in _records(documents)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _wikiextractor(documents: Documents) -> bytes:
    rows = [{"id": r["id"], "revid": "7", "url": "https://w?curid=1", **r} for r in _records(documents)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def table(documents: Documents, delimiter: str = ",") -> bytes:
    out = io.StringIO(newline="")
    rows = csv.DictWriter(out, ["title", "text", "id", "year"], delimiter=delimiter)
    rows.writeheader()
    rows.writerows({**record, "year": 1999} for record in _records(documents))
    return out.getvalue().encode()


def _arrow_table(documents: Documents) -> object:
    import pyarrow as pa

    records = _records(documents)
    return pa.table({**{name: [r[name] for r in records] for name in records[0]}, "n": list(range(len(records)))})


def parquet(documents: Documents) -> bytes:
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(_arrow_table(documents), out, row_group_size=3)
    return out.getvalue()


def _arrow(documents: Documents, kind: str) -> bytes:
    import pyarrow as pa

    out = io.BytesIO()
    table = _arrow_table(documents)
    with (pa.ipc.new_file if kind == "file" else pa.ipc.new_stream)(out, table.schema) as writer:  # type: ignore[attr-defined]
        writer.write_table(table, max_chunksize=4)
    return out.getvalue()


def mediawiki(documents: Documents) -> bytes:
    def page(number: int, title: str, text: str, namespace: int = 0, redirect: str = "") -> str:
        return (
            f"<page><title>{escape(title)}</title><ns>{namespace}</ns><id>{number}</id>{redirect}<revision><id>9</id>"
            f'<text bytes="1" xml:space="preserve">{escape(text)}</text></revision></page>'
        )

    pages = [
        page(i, title, wikitext(text))
        + page(90 + i, f"Talk:{title}", "no article", 1)
        + page(70 + i, "R", "x", 0, "<redirect title='A'/>")
        for i, (title, text) in enumerate(documents)
    ]
    return (
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="de"><siteinfo><namespaces>'
        '<namespace key="0"/><namespace key="6">Datei</namespace></namespaces></siteinfo>'
        + "".join(pages)
        + "</mediawiki>"
    ).encode()


def wikitext(text: str) -> str:
    first, *others = text.split("\n")
    words = first.split(" ", 2)
    marked = f"'''{words[0]}''' [[Long ago|{words[1]}]] {words[2]}<ref>{{{{cite|a book}}}}</ref>"
    return "\n\n".join(
        ["{{Infobox|a=b}}[[Datei:Photo.jpg|thumb|A [[photo]] of it]]" + marked, *others, "__NOTOC__[[Category:Things]]"]
    )


def text(title: str, text: str) -> bytes:
    return text.encode()


def markdown(title: str, text: str) -> bytes:
    first, second, *others = text.split("\n")
    words = first.split(" ", 2)
    marked = f"**{words[0]}** [{words[1]}](https://example.org/a_b) {words[2]}"
    return "\n\n".join([f"# {title}", marked, f"<!-- hidden -->\n\n> {second}", *others]).encode()


def html(title: str, text: str) -> bytes:
    paragraphs = "".join(f"<p>{escape(line)}</p>\n" for line in text.split("\n"))
    return (
        f'<!DOCTYPE html><html><head><meta charset="utf-8"><title>{escape(title)}</title><script>var a = "no";</script>'
        f'</head><body><nav><a href="/">Home</a> <a href="/b">Imprint</a></nav><article>{paragraphs}</article>'
        "<footer><a href='/c'>Cookies</a></footer></body></html>"
    ).encode()


def pdf(title: str, text: str) -> bytes:
    def shown(text: str) -> bytes:
        return text.encode("cp1252").replace(b"\\", b"\\\\").replace(b"(", b"\\(").replace(b")", b"\\)")

    lines: list[str] = []
    for paragraph in text.split("\n"):
        for word in paragraph.split(" "):
            if lines and len(lines[-1]) + len(word) < 80 and word is not paragraph:
                lines[-1] += f" {word}"
            else:
                lines.append(word)
    content = b"BT /F1 10 Tf 12 TL 50 800 Td " + b"".join(b"(%s) Tj T* " % shown(line) for line in lines) + b"ET"
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 595 842]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(content), content),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>",
        b"<</Title(%s)>>" % shown(title),
    ]
    out = b"%PDF-1.4\n"
    places = []
    for number, each in enumerate(objects, start=1):
        places.append(len(out))
        out += b"%d 0 obj%s endobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return (
        out
        + b"xref\n0 7\n0000000000 65535 f \n%strailer<</Size 7/Root 1 0 R/Info 6 0 R>>\nstartxref\n%d\n%%%%EOF"
        % (
            table,
            len(out),
        )
    )


_CORE = '<cp:coreProperties xmlns:cp="c" xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>{}</dc:title></cp:coreProperties>'


def docx(title: str, text: str) -> bytes:
    def run(text: str) -> str:
        return f'<w:r><w:t xml:space="preserve">{escape(text)}</w:t></w:r>'

    paragraphs = "".join(
        f"<w:p>{run(line[:9])}<w:del><w:r><w:delText>gone</w:delText></w:r></w:del>{run(line[9:])}</w:p>"
        for line in text.split("\n")
    )
    return zipped(
        {
            "[Content_Types].xml": b"<Types/>",
            "docProps/core.xml": _CORE.format(escape(title)).encode(),
            "word/document.xml": f'<w:document xmlns:w="w"><w:body>{paragraphs}</w:body></w:document>'.encode(),
            "word/vbaProject.bin": b"macros",
        }
    )


def epub(title: str, text: str) -> bytes:
    chapters = [f"<p>{escape(line[:7])}<b>{escape(line[7:])}</b></p>" for line in text.split("\n")]
    page = '<html xmlns="http://www.w3.org/1999/xhtml"><head><title>no</title></head><body>{}</body></html>'
    spine = "".join(f'<itemref idref="c{i}"/>' for i in range(len(chapters)))
    items = "".join(f'<item id="c{i}" href="text/chapter%20{9 - i}.xhtml"/>' for i in range(len(chapters)))
    return zipped(
        {
            "mimetype": b"application/epub+zip",
            "META-INF/container.xml": b'<a xmlns="c"><rootfiles><rootfile full-path="OPS/book.opf"/></rootfiles></a>',
            "OPS/book.opf": (
                '<package xmlns="o" xmlns:dc="http://purl.org/dc/elements/1.1/"><metadata>'
                f"<dc:title>{escape(title)}</dc:title></metadata><manifest>{items}</manifest><spine>{spine}</spine></package>"
            ).encode(),
            **{f"OPS/text/chapter {9 - i}.xhtml": page.format(each).encode() for i, each in enumerate(chapters)},
        }
    )


def warc(*records: tuple[str, str, bytes, list[tuple[str, str]]], is_packed: bool = True) -> bytes:
    """Of type, address, content and headers; a response's may name a `status`."""
    from warcio.statusandheaders import StatusAndHeaders
    from warcio.warcwriter import WARCWriter

    out = io.BytesIO()
    writer = WARCWriter(out, gzip=is_packed)
    writer.write_record(writer.create_warcinfo_record("a.warc", {"software": "none"}))
    for kind, uri, content, given in records:
        headers = dict(given)
        status = headers.pop("status", "200 OK")
        is_response = kind == "response"
        record = writer.create_warc_record(
            uri,
            kind,
            payload=io.BytesIO(content),
            length=len(content),
            warc_content_type="" if is_response else headers.get("Content-Type", ""),
            warc_headers_dict={"WARC-Date": "2024-05-17T08:30:00Z"},
            http_headers=StatusAndHeaders(status, list(headers.items()), protocol="HTTP/1.1") if is_response else None,
        )
        writer.write_record(record)
    return out.getvalue()


def crawl(documents: Documents, is_packed: bool = True) -> bytes:
    page = [("Content-Type", "text/html; charset=utf-8")]
    pages = [("response", f"https://example.org/{i}", html(*each), page) for i, each in enumerate(documents)]
    return warc(*pages, is_packed=is_packed)


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


def changed(archive: bytes, member: str, content: bytes) -> bytes:
    """A zip with something else in it."""
    with zipfile.ZipFile(io.BytesIO(archive)) as read:
        return zipped({name: read.read(name) for name in read.namelist()} | {member: content})


def tarred(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


TOGETHER: dict[str, Callable[[Documents], bytes]] = {
    "all.jsonl": json_lines,
    "wiki_00": _wikiextractor,
    "corpus.jsonl": _beir,
    "kilt_knowledgesource.json": _kilt,
    "all.csv": table,
    "all.tsv": lambda documents: table(documents, "\t"),
    "semicolons": lambda documents: b"\xef\xbb\xbf" + table(documents, ";"),
    "all.parquet": parquet,
    "all.arrow": lambda documents: _arrow(documents, "file"),
    "all.arrows": lambda documents: _arrow(documents, "stream"),
    "pages-articles.xml": mediawiki,
    "pages-articles.xml.bz2": lambda documents: bz2.compress(mediawiki(documents)),
    "all.csv.gz": lambda documents: gzip.compress(table(documents)),
    "all.jsonl.xz": lambda documents: lzma.compress(json_lines(documents)),
    "crawl.warc": lambda documents: crawl(documents, is_packed=False),
    "crawl.warc.gz": crawl,
    "all.parquet.gz": lambda documents: gzip.compress(parquet(documents)),
}
"""All documents in one file. The names say nothing that the content does not."""

EACH: dict[str, Callable[[str, str], bytes]] = {
    ".txt": text,
    ".md": markdown,
    ".html": html,
    ".pdf": pdf,
    ".docx": docx,
    ".epub": epub,
}
"""A document a file."""


def files(ending: str, documents: Documents) -> dict[str, bytes]:
    """A folder of one file a document, in the order of their names; each is called by its title."""
    return {f"{i}/{title}{ending}": EACH[ending](title, text) for i, (title, text) in enumerate(documents)}


def write(folder: Path, members: dict[str, bytes]) -> Path:
    for name, content in members.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def read(path: Path, limits: Limits | None = None, n_processes: int = 1) -> tuple[list[Document], list[Failure]]:
    failures: list[Failure] = []
    documents = list(read_documents(path, failures.append, limits or Limits(), n_processes))
    return documents, failures
