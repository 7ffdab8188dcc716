"""A file that is being parsed, on disk or inside of others."""

import bz2
import gzip
import io
import lzma
import os
import stat
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from openbook.core.documents import Document, canonical
from openbook.core.origin import Field
from openbook.corpus.sources.encodings import UTF_16
from openbook.corpus.sources.limits import HEAD, Budget, Failed, Limits, counted
from openbook.corpus.sources.recognise import NAMES, Names


class _Streams(io.RawIOBase):
    """What streams hold that stand one behind the other, zeros between them. `bz2` and `lzma` would end without a word
    where what follows a stream is none.
    """

    def __init__(self, file: IO[bytes], begin: Callable[[], bz2.BZ2Decompressor | lzma.LZMADecompressor]) -> None:
        self._file = file
        self._begin = begin
        self._stream = begin()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = b""
        while not piece:
            given = b""
            if self._stream.eof:
                given = self._stream.unused_data.lstrip(b"\0")
                while not given and (read := self._file.read(HEAD)):
                    given = read.lstrip(b"\0")
                if not given:
                    return 0
                self._stream = self._begin()
            elif self._stream.needs_input and not (given := self._file.read(HEAD)):
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            piece = self._stream.decompress(given, len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


COMPRESSED: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": gzip.open,
    ".bz2": lambda file: _Streams(file, bz2.BZ2Decompressor),
    ".xz": lambda file: _Streams(file, lzma.LZMADecompressor),
}

MAX_ID_CHARS = 1 << 14
"""Crawled pages have their addresses in it, which are as long as servers take them."""
MAX_TITLE_CHARS = 1 << 12


@dataclass(frozen=True, slots=True)
class Crawled:
    """What a web archive knows of a file, for want of what the file says itself."""

    url: str = ""
    date: str = ""
    ending: str = ""  # that names of its media type have
    charset: str = ""


@dataclass(frozen=True)
class Opened:
    """A file with its content still unread."""

    path: str  # within the corpus
    file: "io.BufferedReader[Any]"
    limits: Limits
    budget: Budget
    n_layers: int = 0  # of archives and compression around it
    fields: tuple[Field, ...] = ()  # that the user declared for his documents
    names: Names = NAMES  # of the others
    crawled: Crawled = Crawled()
    n_passed: int = 0  # records at its beginning that are not parsed: each is None

    def inside(self, file: IO[bytes], path: str) -> "Opened":
        """What came out of it, one layer deeper."""
        if self.n_layers == self.limits.n_layers:
            raise Failed(f"lies in more than {self.limits.n_layers} layers of archives and compression")
        path = as_text(path)
        crawled = self.crawled if path == self.path else replace(self.crawled, ending="", charset="")
        return replace(self, path=path, file=counted(file, self.budget), n_layers=self.n_layers + 1, crawled=crawled)

    @property
    def name(self) -> str:
        """Its own name, without the ending of its compression."""
        name = self.path.rstrip("/").rsplit("/", 1)[-1].removesuffix(self.crawled.ending) + self.crawled.ending
        stem, ending = os.path.splitext(name)
        return stem if ending.lower() in COMPRESSED else name

    @property
    def stem(self) -> str:
        """A title for want of another."""
        return os.path.splitext(self.name)[0]

    def head(self) -> bytes:
        """How it begins, without reading on: 64 KiB, or all."""
        return self.file.peek(HEAD)

    def whole(self) -> bytes:
        """All of it, of which there may be as much as of a document with four times its bytes in markup.

        Raises:
            Failed: it is larger.
        """
        most = self.limits.document_bytes * 4
        content = self.file.read(most + 1)
        if len(content) > most:
            raise Failed(f"has more than {most} bytes")
        return content

    def lines(self) -> Iterator[tuple[int, bytes | Failed]]:
        """Its lines, numbered from 1, ends included. One that is too long is a failure, and not held in memory.

        Raises:
            Failed: it is in UTF-16, where lines end otherwise.
        """
        if self.head()[:2] in UTF_16:
            raise Failed("UTF-16; lines must be UTF-8")
        most = self.limits.line_bytes
        number = 0
        while line := self.file.readline(most + 1):
            number += 1
            if len(line) <= most:
                yield number, line
                continue
            while line and not line.endswith(b"\n"):
                line = self.file.readline(HEAD)
            yield number, Failed(f"a line of more than {most} bytes")

    def seekable(self) -> Generator[None, None, AbstractContextManager[IO[bytes]]]:
        """It, in a file in which a parser can jump about: itself if it lies on disk, else a copy without a name, made
        in steps. The copy goes at the end of the `with` that it is read in.

        Raises:
            Failed: it is too large for a copy.
        """
        if not self.n_layers:
            return nullcontext(self.file)  # who opened it closes it
        copy = tempfile.TemporaryFile()  # noqa: SIM115 who asked reads it
        try:
            while piece := self.file.read(1 << 20):
                if copy.tell() + len(piece) > self.limits.spooled_bytes:
                    raise Failed(f"has more than {self.limits.spooled_bytes} bytes")
                copy.write(piece)
                yield None
            copy.seek(0)
        except BaseException:  # also of who asks for no more
            copy.close()
            raise
        return copy

    def document(self, id: str, title: str, text: str, **known: Any) -> Document:
        """A document of this file, in canonical form; what else is known of it as `Document` has it.

        Raises:
            Failed: it or its id is too long, or it holds half a character, which nothing behind us could store.
        """
        # Each of its passages has both again. So long a title is none: a paragraph that its markup calls one.
        title = title[:MAX_TITLE_CHARS]
        if len(id) > MAX_ID_CHARS:
            raise Failed(f"id must have at most {MAX_ID_CHARS} characters, got {len(id)}")
        try:
            known = {**known, **{name: known.get(name) or getattr(self.crawled, name) for name in ("url", "date")}}
            about = (known["url"], *known.get("fields", {}).values(), *dict(known.get("sections", ())).values())
            size_bytes = len("".join([id, title, text, *map(str, about)]).encode())
        except UnicodeEncodeError as error:
            raise Failed(f"not UTF-8: {error.reason}") from None
        if size_bytes > self.limits.document_bytes:
            raise Failed(f"a document of {size_bytes} bytes; at most {self.limits.document_bytes}")
        return canonical(Document(id, title, text, self.path, **known))


def as_text(path: str) -> str:
    """A path that can be written as UTF-8: names in archives are of any bytes."""
    return path.encode(errors="replace").decode()


def open_regular(
    path: Path, name: str, limits: Limits, follow: bool, fields: tuple[Field, ...] = (), names: Names = NAMES
) -> Opened:
    """A file on disk; no pipe that would keep us waiting. Through a link only where the user named it.

    Raises:
        Failed: it is no regular file.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW))
    file = io.BufferedReader(io.FileIO(descriptor), HEAD)
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        file.close()
        raise Failed("no regular file")
    return Opened(name, file, limits, Budget(limits, found.st_size), fields=fields, names=names)
