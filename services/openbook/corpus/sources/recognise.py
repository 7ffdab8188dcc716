"""What a file is: by how it begins, and by its name only where a beginning says nothing."""

import csv
import os
import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from openbook.core.json_text import LongNumber, read_json
from openbook.corpus.sources.encodings import UTF_16, decoded
from openbook.corpus.sources.limits import Failed
from openbook.errors import InvalidConfig


class Format(StrEnum):
    """A format that can be read, or that wraps others."""

    GZIP = "gzip"
    BZIP2 = "bzip2"
    XZ = "xz"
    ZIP = "zip"  # also DOCX and EPUB, which only their members tell
    TAR = "tar"
    WARC = "WARC"
    PDF = "PDF"
    PARQUET = "Parquet"
    ARROW_FILE = "Arrow file"
    ARROW_STREAM = "Arrow stream"
    MEDIAWIKI = "MediaWiki XML"
    HTML = "HTML"
    JSON_LINES = "JSON lines"
    TABLE = "table"
    MARKDOWN = "Markdown"
    TEXT = "text"


_MAGIC = {
    Format.GZIP: rb"\x1f\x8b",
    Format.BZIP2: rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
    Format.XZ: rb"\xfd7zXZ\x00",
    Format.ZIP: rb"PK(\x03\x04|\x05\x06)",
    Format.WARC: rb"WARC/[01]\.",
    Format.TAR: rb".{257}ustar(\x00|  \x00)",
    Format.PDF: rb"(\xef\xbb\xbf|\s*)%PDF-",
    Format.PARQUET: rb"PAR1",
    Format.ARROW_FILE: rb"ARROW1\x00\x00",
    Format.ARROW_STREAM: rb"\xff\xff\xff\xff.{3}\x00",
}
_BY_NAME = {
    ".jsonl": Format.JSON_LINES,
    ".ndjson": Format.JSON_LINES,
    ".json": Format.JSON_LINES,
    ".csv": Format.TABLE,
    ".tsv": Format.TABLE,
    ".html": Format.HTML,
    ".htm": Format.HTML,
    ".xhtml": Format.HTML,
    ".md": Format.MARKDOWN,
    ".markdown": Format.MARKDOWN,
    ".txt": Format.TEXT,
}
_PDF_BEHIND = re.compile(rb"(?!\s*[{<]).{,1018}[\r\n\0]%PDF-", re.DOTALL)
"""Behind what mail and servers put before it, but not where a text speaks of it."""
_HTML = re.compile(rb"<(!doctype\s+html|html|head|body)[\s>]", re.IGNORECASE)
_BEFORE = rb"(?>\s+|<!--.*?-->|<\?.*?\?>)*"
_MEDIAWIKI = re.compile(_BEFORE + rb"<mediawiki[\s>]", re.DOTALL)
_HTML_ALONE = re.compile(_BEFORE + _HTML.pattern, re.DOTALL | re.IGNORECASE)
"""Where it is no text that speaks of it."""
_ONE_JSON = re.compile(rb'\[\s*\{|\{\s*\n\s*"')
"""How an array of objects begins, and an object over several lines."""
_RTF = re.compile(rb"\{\\rtf\d")
_SVG = re.compile(rb"(?>\s+|<!--.*?-->|<!doctype\s+svg[^>]*>)*<svg[\s>]", re.DOTALL | re.IGNORECASE)
_MAIL = re.compile(rb"(From \S.*\n)?([!-9;-~]+:.*\n([ \t].*\n)*)+")
_LATER_MAIL = re.compile(rb"\n(?=From \S)")
_CODED = re.compile(
    rb"^content-(type:\s*(multipart/|text/html)|transfer-encoding:\s*(base64|quoted-printable))",
    re.MULTILINE | re.IGNORECASE,
)
DELIMITERS = ",\t;|"


@dataclass(frozen=True, slots=True)
class Names:
    """What tables and records call the fields of a document: the first that is there."""

    text: tuple[str, ...] = ("text", "contents", "content", "body")
    title: tuple[str, ...] = ("title", "wikipedia_title", "name")
    id: tuple[str, ...] = ("id", "_id", "docid", "document_id")

    @classmethod
    def of(cls, **given: str | None) -> "Names":
        """What the user names, in place of ours; of tables in lower case, as they are read.

        Raises:
            InvalidConfig: a name is empty.
        """
        for field, name in given.items():
            if name is not None and not name.strip():
                raise InvalidConfig(f"the name of the column for the {field} must not be empty, got {name!r}")
        found = {field: (name, name.lower()) for field, name in given.items() if name is not None}
        return cls(**{field: tuple(dict.fromkeys(names)) for field, names in found.items()})

    def texts(self) -> str:
        """How a text may be called, and where none is, what to do."""
        return " or ".join(self.text) + ("" if self.text != NAMES.text else "; --text names another")

    def check(self, columns: Collection[str]) -> None:
        """Raises Failed: the user names a column for title or id that a table, whose columns these are, has not."""
        for field, names, ours in (("title", self.title, NAMES.title), ("id", self.id, NAMES.id)):
            if names != ours and not set(names) & set(columns):
                raise Failed(f"the column for the {field} must be called {names[0]}, got {', '.join(columns):.200}")


NAMES = Names()


def recognise(head: bytes, name: str, names: Names = NAMES) -> Format:
    """The format of a file that begins like this.

    Raises:
        Failed: it is none that can be read.
    """
    for format, magic in _MAGIC.items():
        if re.match(magic, head, re.DOTALL):
            return format
    by_name = _BY_NAME.get(os.path.splitext(name)[1].lower())
    if not by_name and _PDF_BEHIND.match(head):
        return Format.PDF
    if is_utf_16 := head[:2] in UTF_16:
        head = head.decode("utf-16", "ignore").encode(errors="ignore")
    begin = head[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
    check_no_codes(begin)
    if begin.startswith(b"<") and (found := _markup(begin, name, is_text=by_name in (Format.MARKDOWN, Format.TEXT))):
        return found
    if by_name:
        if by_name is Format.JSON_LINES and _ONE_JSON.match(begin):
            each = ".[]" if begin.startswith(b"[") else "."
            said = "one JSON text over the file; JSON lines have an object a line"
            raise Failed(f"{said}: jq -c '{each}' FILE > FILE.jsonl")
        return by_name
    if b"\0" in head[:4096] and not is_utf_16:
        raise Failed("of no format that is known")
    if _SVG.match(begin):
        raise Failed("SVG, a picture")
    return _text(head, names)


def check_no_codes(content: bytes) -> None:
    """Refuse what would be a text, but of codes, also in one mail of many. Raises Failed."""
    if _RTF.match(content):
        raise Failed("RTF: save it as DOCX, PDF or text")
    later = _LATER_MAIL.finditer(content) if content.startswith(b"From ") else ()
    for start in (0, *(each.end() for each in later)):
        mail = _MAIL.match(content, start)
        if mail and b"\nmime-version:" in b"\n" + mail[0].lower() and _CODED.search(mail[0]):
            raise Failed("a mail in the codes of MIME: save it as text or HTML")


def _markup(begin: bytes, name: str, is_text: bool) -> Format | None:
    if _MEDIAWIKI.match(begin):
        return Format.MEDIAWIKI
    if _HTML_ALONE.match(begin) if is_text else _HTML.search(begin):
        return Format.HTML
    if begin.startswith(b"<doc id="):
        raise Failed("WikiExtractor's output must be JSON: run it with --json")
    if begin.startswith(b"<?xml") and not name.lower().endswith(".xhtml"):
        raise Failed("XML, and neither a MediaWiki dump nor XHTML")
    return None


def _text(head: bytes, names: Names) -> Format:
    begin = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    first, is_more, _ = begin.partition(b"\n")
    if first.startswith(b"{") and (not is_more or _is_json(first)):  # where nothing is behind it, it may go on
        return Format.JSON_LINES
    with suppress(Failed):
        if delimiter_of(decoded(first), names):
            return Format.TABLE
    if re.match(rb"#{1,6}\s|---\r?\n", begin):
        return Format.MARKDOWN
    return Format.TEXT


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(read_json(line), dict)
    except LongNumber:
        return True
    except (ValueError, RecursionError):
        return False


def delimiter_of(header: str, names: Names) -> str | None:
    """What separates the columns of a table whose first line names them, a text among them."""
    for delimiter in DELIMITERS:
        columns = columns_of(header, delimiter)
        if len(columns) > 1 and any(name in names.text for name in columns):
            return delimiter
    return None


def columns_of(header: str, delimiter: str) -> list[str]:
    """The names in the first line of a table, in lower case."""
    try:
        row = next(csv.reader([header], delimiter=delimiter), [])
    except csv.Error:
        return []
    return [name.strip().lower() for name in row]
