"""WARC: what a crawl of the web has fetched, record by record. Those of pages are files; others are passed over."""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from openbook.corpus.sources import stated
from openbook.corpus.sources.limits import HEAD, MB, Failed, Spent
from openbook.corpus.sources.opened import Crawled, Opened

HEADER_BYTES = 1 << 18
_START = re.compile(rb"WARC/[01]\.\d+[ \t]*\r?\n")
_LENGTH = re.compile(r"[0-9]{1,18}")
_NO_TEXT = re.compile(
    r"(image|video|audio|font)/|text/(css|(java|ecma)script)|application/((x-)?(java|ecma)script|(x-)?font-|wasm)"
)
_CHARSET = re.compile(r"charset\s*=\s*[\"']?\s*([\w.:-]+)", re.IGNORECASE)
_ENDINGS = {"text/html": ".html", "application/xhtml+xml": ".xhtml"}


@dataclass(frozen=True, slots=True)
class Record:
    """A file that was fetched, or what was made of one."""

    name: str
    crawled: Crawled
    content: IO[bytes]


class _Block(io.RawIOBase):
    """The bytes of a record: as many as it says, or less where another begins before."""

    def __init__(self, file: "io.BufferedReader[Any]", n_bytes: int) -> None:
        self._file = file
        self._left = n_bytes
        self._line = b""
        self._after_blank = False
        self.next = b""
        """How a record begins that lies within this one."""
        self.is_broken = False
        """An error has been raised by what lies below: there is no more."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._line:
            self._line = self._read()
        piece, self._line = self._line[: len(buffer)], self._line[len(buffer) :]
        buffer[: len(piece)] = piece
        return len(piece)

    def pass_over(self) -> Iterator[None]:
        """Read on to its end, also when it is closed."""
        n_bytes = 0
        while not self.is_broken and (line := self._read()):
            n_bytes += len(line)
            if n_bytes > 1 << 25:
                n_bytes = 0
                yield None

    def _read(self) -> bytes:
        if self.next or not self._left:
            return b""
        try:
            line = self._file.readline(min(self._left, HEAD))
            if not line:
                raise Failed("cut off")
        except Exception:
            self.is_broken = True
            raise
        if self._after_blank and _START.fullmatch(line):
            self.next = line
            return b""
        self._after_blank = not line.strip()
        self._left -= len(line)
        return line


class _Content(io.BufferedReader):
    """Of which a chunk that says it had gigabytes reserves no memory for them."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(MB if size is None or size < 0 else min(size, MB))


class _Inflated:
    """What a reader of warcio's inflates, which would end without a word where that is cut off or damaged."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def read(self, size: int) -> bytes:
        piece: bytes = self._reader.read(size)
        if not piece and self._reader.num_read and not getattr(self._reader.decompressor, "eof", True):
            raise Failed("deflated, and cut off or damaged")
        return piece

    def close(self) -> None:
        self._reader.close()


def read(opened: Opened) -> Iterator[Record | Failed | None]:
    """Those with a text to expect, each to be read before the next is asked for; None for others. One that is damaged
    is a failure, and the next is looked for.

    Raises:
        Failed: it is cut off.
    """
    from warcio.statusandheaders import StatusAndHeadersParser

    parser = StatusAndHeadersParser([], verify=False)
    number, line, is_lost = 0, b"", False
    while line := line or opened.file.readline(HEAD):
        if not _START.fullmatch(line):
            if line.strip() and not is_lost:
                is_lost = True
                yield Failed(f"behind record {number} is none; is its Content-Length right?")
            line = b""
            yield None
            continue
        number, line, is_lost = number + 1, b"", False
        try:
            about = parser.parse(io.BytesIO(b"WARC\r\n" + _header(opened.file)))
            if not _LENGTH.fullmatch(length := about.get_header("Content-Length", "")):
                raise Failed("its Content-Length is no number")
        except Spent:
            raise
        except Failed as error:
            is_lost = True
            yield Failed(f"record {number}: {error}")
            continue
        block = _Block(opened.file, int(length))
        try:
            yield _record(parser, about, block, number)
        except Failed as error:
            if block.is_broken:
                raise
            yield Failed(f"record {number}: {error}")
        yield from block.pass_over()
        if block.is_broken:  # who read it has said so
            return
        if line := block.next:
            yield Failed(f"record {number}: another begins within its Content-Length")


def _header(file: IO[bytes]) -> bytes:
    """Its lines up to an empty one."""
    lines, left = list[bytes](), HEADER_BYTES
    while (line := file.readline(left + 1)).strip():
        left -= len(line)
        if left < 0:
            raise Failed(f"a header of more than {HEADER_BYTES} bytes")
        lines.append(line)
    if not line:
        raise Failed("cut off in its header")
    return b"".join(lines)


def _record(parser: Any, about: Any, block: _Block, number: int) -> Record | None:
    kind = about.get_header("WARC-Type", "").lower()
    uri = about.get_header("WARC-Target-URI", "").removeprefix("<").removesuffix(">")  # as Wget has written it
    content: Any = _Content(block, HEAD)
    if kind == "response" and uri.startswith(("http:", "https:")):
        http = parser.parse(io.BytesIO(_header(content) or b"\r\n"))
        if not http.protocol.startswith("HTTP/"):
            raise Failed("no response of HTTP")
        if http.statusline.split(" ")[0] != "200":
            return None
        content = _unwrapped(http, content)
        media = http.get_header("Content-Type", "")
    elif kind in ("resource", "conversion"):
        media = about.get_header("Content-Type", "")
    else:
        return None
    media_type = media.partition(";")[0].strip().lower()
    if _NO_TEXT.match(media_type):
        return None
    is_text = kind == "conversion" and media_type == "text/plain"  # of a page that may be called .html
    charset = _CHARSET.search(media)
    crawled = Crawled(
        url=stated.url(uri),
        date=stated.date(about.get_header("WARC-Date")),
        ending=".txt" if is_text else _ENDINGS.get(media_type, ""),
        charset=charset[1] if charset else "",
    )
    return Record(uri or f"{number}", crawled, content)


def _unwrapped(http: Any, content: Any) -> Any:
    """Without the encoding of its transfer, and its content's. Gzip is known by how it begins, as in other files: many
    crawlers have taken it off, and say that it were there.
    """
    from warcio.bufferedreaders import BufferedReader, ChunkedDataReader

    if http.get_header("Transfer-Encoding", "").lower() == "chunked":
        content = ChunkedDataReader(content)
    encoding = http.get_header("Content-Encoding", "").lower()
    if encoding == "deflate":
        return _Inflated(BufferedReader(content, decomp_type=encoding))
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise Failed(f"in the content encoding {encoding:.40}, which is not known")
    return content
