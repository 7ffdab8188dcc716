"""Files that are damaged, lie or attack: each costs a line that says why, and all good ones are read."""

import bz2
import gzip
import io
import json
import os
import re
import stat
import tarfile
import zipfile
from pathlib import Path

import every_format as formats
import pytest
from every_format import DOCUMENTS, read

from openbook.corpus.read import read_passages
from openbook.corpus.sources import limits as limits_module
from openbook.corpus.sources import parsers
from openbook.corpus.sources.limits import MB, Failure, Limits
from openbook.errors import InvalidDocuments

TITLE, TEXT = DOCUMENTS[5]  # with a letter beyond ASCII
LATIN = TEXT.replace("bridges", "brücken").encode("latin-1")
LIMITS = Limits(
    memory_bytes=1024 * MB, document_bytes=MB, line_bytes=2 * MB, unpacked_free_bytes=12 * MB, unpacked_ratio=20
)
ZEROS = gzip.compress(bytes(30 * MB))
LAUGHS = (
    b'<!DOCTYPE a [<!ENTITY a "ha"><!ENTITY b "' + b"&a;" * 99 + b'"><!ENTITY c "' + b"&b;" * 99 + b'">'
    b'<!ENTITY d SYSTEM "file:///etc/hostname">]>'
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
        archive.writestr(link, "/etc/hostname")
    return out.getvalue()


def tar_with_links() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind in (("sym", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE), ("dev", tarfile.CHRTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/hostname"
            archive.addfile(member)
        member = tarfile.TarInfo("../../up.txt")
        member.size = 9
        archive.addfile(member, io.BytesIO(b"good words"[:9]))
    return out.getvalue()


def wide_parquet() -> bytes:
    """A kilobyte of which every 256 rows have gigabytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["x" * 9 * MB]))
    out = io.BytesIO()
    pq.write_table(pa.table({"text": values}), out)
    return out.getvalue()


def jsonl(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


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
    "klingon.html": (b"<html><head><meta charset=x-klingon></html>", {"": "in an encoding that nobody knows: x-kl"}),
    "latin.csv": (b"id,text\n1,\xfc\n2,good words\n3\n", {":2": "not UTF-8", ":4": r"must have 2 columns .*, got 1"}),
    "wide.tsv": ("id\ttext\n".encode("utf-16"), {"": "UTF-16; lines must be UTF-8"}),
    "nameless.csv": (b"a,b\n1,2\n", {"": "the first line must name columns, one of them text or contents"}),
    "open.csv": (b'text,n\n"' + b"never closed\n" * 99_999, {"": "line 2: not separated values: field larger than"}),
    "columns.parquet": (
        formats.parquet(DOCUMENTS).replace(b"text", b"tuxt"),
        {"": "one column must be called text or contents"},
    ),
    "latin.jsonl": (
        jsonl('{"id": 1, "text": "good words"}').replace(b"1", b"2") + b'{"text": "\xfc"}\n[1]\n{"text": 1.5}\n{"a',
        {":2": "not UTF-8", ":3": "must be an object", ":4": r"text must be a string, got 1\.5", ":5": "not JSON"},
    ),
    "many.jsonl": (
        jsonl(*["{}"] * 15),
        {**{f":{i}": "text must be a string, got None" for i in range(1, 11)}, "": "and 5 more that are no documents"},
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
    "noise": (b"\x7fELF" + bytes(99), {"": "of no format that is known"}),
    "links.zip": (zip_with_link(), {"/link": "a link"}),
    "links.tar": (tar_with_links(), {"/sym": "a link", "/hard": "a link", "/dev": "no regular file"}),
    "\x1b[2Jterminal.txt": (LATIN, {"": "not UTF-8"}),
}


def test_hostile_files_cost_a_line_each_and_the_good_ones_are_read(tmp_path: Path) -> None:
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
    assert "outside" not in everything
    assert "haha" not in everything
    assert Path("/etc/hostname").read_text().strip() not in everything
    assert sum(document.path == "cut.xml" for document in documents) == 1, "what lies before the cut"


def test_a_file_that_kills_its_parser_takes_nothing_with_it(tmp_path: Path) -> None:
    """In an archive too, whose other files are read once."""
    wide = wide_parquet()
    members = {"a.txt": b"one", "b.parquet": wide, "c.txt": b"two", "d.parquet": wide, "e.txt": b"x"}
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
    members = {f"{i}.parquet": wide_parquet() for i in range(4)}
    formats.write(tmp_path, {"a.zip": formats.zipped(members), "b.txt": b"good"})
    documents, failures = read(tmp_path, Limits(memory_bytes=512 * MB))
    assert [document.text for document in documents] == ["good"]
    assert [Path(failure.path).name for failure in failures] == ["0.parquet", "1.parquet", "a.zip"]
    assert "killed its parser 2 times" in failures[-1].reason


def test_a_file_that_takes_too_long_is_left_out(tmp_path: Path) -> None:
    slow = gzip.compress(bytes(10 * MB)) * 3000  # which is a line of 30 GB
    formats.write(tmp_path, {"all.tar": formats.tarred({"a.txt": b"one", "b.jsonl": slow, "c.txt": b"two"})})
    patient = Limits(timeout_s=8, unpacked_ratio=10_000)
    documents, failures = read(tmp_path, patient)
    assert [document.text for document in documents] == ["one", "two"]
    assert [(Path(each.path).name, each.reason) for each in failures] == [("b.jsonl", "took more than 8 s")]


def test_a_parser_that_cannot_even_start_is_a_failure_of_its_file(tmp_path: Path) -> None:
    formats.write(tmp_path, {"a.txt": b"one", "b.txt": b"two"})
    documents, failures = read(tmp_path, Limits(memory_bytes=MB))
    assert documents == []
    # A parser may get so far as to name the file before it ends: then what is behind it in the file fails too.
    assert list(dict.fromkeys(Path(each.path).name for each in failures)) == ["a.txt", "b.txt"]
    assert all(" 1 MB" in each.reason for each in failures), failures


def test_an_archive_of_too_many_members_is_left_out(tmp_path: Path) -> None:
    members = {f"{i}.txt": b"x" for i in range(9)}
    formats.write(tmp_path, {"a.zip": formats.zipped(members), "b.tar": formats.tarred(members)})
    documents, failures = read(tmp_path, Limits(n_members=5))
    assert [each.reason for each in failures] == ["an archive of more than 5 members"] * 2
    assert {each.path.split("/")[0] for each in documents} <= {"b.tar"}


def test_a_library_that_is_not_there_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pypdf.py").write_text("raise ModuleNotFoundError('no pypdf', name='pypdf')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "a.pdf").write_bytes(formats.pdf(TITLE, TEXT))
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
