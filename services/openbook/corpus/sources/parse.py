"""A file to documents, whatever it is: layers of archives and compression are taken off, and what is inside parsed."""

import re
import stat
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from tarfile import (  # type: ignore[attr-defined]
    BLOCKSIZE,
    EmptyHeaderError,
    EOFHeaderError,
    InvalidHeaderError,
    TarFile,
    TruncatedHeaderError,
)
from typing import Any, Self

from openbook.core.documents import Document
from openbook.corpus.sources import columns, office, opened, pdf, plain, records, tables, warc, web, wiki
from openbook.corpus.sources.limits import Failed, Failure, Spent, one_line
from openbook.corpus.sources.opened import Opened
from openbook.corpus.sources.recognise import Format, recognise

_LIBRARIES = ("lxml", "lxml_html_clean", "markdown_it", "mwparserfromhell", "pyarrow", "pypdf", "trafilatura", "warcio")
_NEEDS = re.compile(r"needs ([\w.]+): pip install 'openbook\[corpus\]'")


@dataclass(frozen=True, slots=True)
class Leaf:
    """Said before and after a file in which no others are, and what cannot be opened at all, so that who follows one
    that kills its parser knows where to go on.
    """

    number: int  # from 1, in the order of the file
    path: str | None  # None: it is done
    has_records: bool = False  # each an event, and each could be passed over too


Event = Document | Failure | Leaf | None
"""None says only that there is progress."""

_PARSERS: dict[Format, Callable[[Opened], Iterator[Document | Failure | None]]] = {
    Format.PDF: pdf.read,
    Format.PARQUET: columns.read_parquet,
    Format.ARROW_FILE: columns.read_arrow_file,
    Format.ARROW_STREAM: columns.read_arrow_stream,
    Format.MEDIAWIKI: wiki.read,
    Format.HTML: web.read,
    Format.JSON_LINES: records.read,
    Format.TABLE: tables.read,
    Format.MARKDOWN: plain.read_markdown,
    Format.TEXT: plain.read_text,
}
_BY_RECORD = (Format.MEDIAWIKI, Format.JSON_LINES)
"""Whose readers know `Opened.n_passed`: articles and pages are parsed by libraries that may die of one of millions."""
_BESIDE_BEIR = ("queries.jsonl", "queries.jsonl.gz", "qrels")
PASSED_OVER_BYTES = 1 << 25
"""Between two events, where nobody reads what is passed over."""
_COMPRESSED = {Format.GZIP: ".gz", Format.BZIP2: ".bz2", Format.XZ: ".xz"}


def is_hidden(path: str) -> bool:
    """Whether a path is of those that nobody means: `.git`, `.DS_Store`, `__MACOSX` of an archive."""
    return any((part.startswith(".") and part not in (".", "..")) or part == "__MACOSX" for part in path.split("/"))


def is_beside_beir(path: str, paths: Collection[str]) -> bool:
    """Whether BEIR has it beside its corpus: questions, and which documents answer them."""
    parts = path.split("/")
    corpora = ("/".join([*parts[:i], "corpus.jsonl"]) for i, part in enumerate(parts) if part in _BESIDE_BEIR)
    return any(corpus in paths or f"{corpus}.gz" in paths for corpus in corpora)


class _Tar(TarFile):
    """One that may go on behind the mark of its end, as those do that were put one behind the other."""

    mark_ends = -1


class _Member(tarfile.TarInfo):
    """One of a tar. Where one must begin and none does, `tarfile` would end as if there were no more."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        return super().frombuf(buf if buf.strip(b"\0") else buf[: len(buf) // BLOCKSIZE * BLOCKSIZE], encoding, errors)

    @classmethod
    def fromtarfile(cls, tarfile: _Tar) -> Self:  # type: ignore[override]
        try:
            return super().fromtarfile(tarfile)
        except InvalidHeaderError:
            raise Failed(f"damaged at byte {tarfile.offset}: what lies behind is left out") from None
        except TruncatedHeaderError:
            if tarfile.offset == tarfile.mark_ends:
                raise Failed(f"the bytes behind the mark of its end, at byte {tarfile.offset}, are left out") from None
            raise Failed(f"cut off at byte {tarfile.offset}") from None
        except EOFHeaderError:
            tarfile.mark_ends = tarfile.offset + BLOCKSIZE
            raise
        except EmptyHeaderError:
            if tarfile.offset == tarfile.mark_ends:
                raise
            raise Failed(f"ends at byte {tarfile.offset} without the mark of its end: is that all of it?") from None


class Parse:
    """The parsing of one file; the first `skip` leaves of it are passed over, and `n_passed` records of the next."""

    def __init__(self, skip: int = 0, n_passed: int = 0) -> None:
        self._skip = skip
        self._n_passed = n_passed
        self._n_leaves = 0

    def events(self, file: Opened) -> Iterator[Event]:
        """Everything in a file. Its failures, and those of what is in it, are events.

        Raises:
            MemoryError: a leaf needs more than there is.
        """
        try:
            yield from self._inside(file)
        except Spent as error:
            if file.n_layers:
                raise  # all of the file shares one budget: it ends here, with one line
            yield from self._failure(file.path, error)
        except MemoryError:
            raise
        except Exception as error:  # parsers meet what their authors never thought of
            yield from self._failure(file.path, error)

    def _inside(self, file: Opened) -> Iterator[Event]:
        if not (head := file.head()):
            return
        format = recognise(head, file.name, file.names)
        if format in _COMPRESSED:
            unpacked = opened.COMPRESSED[_COMPRESSED[format]](file.file)
            yield from self.events(file.inside(unpacked, file.path))
        elif format is Format.TAR:
            yield from self._tar(file)
        elif format is Format.WARC:
            yield from self._warc(file)
        elif format is Format.ZIP:
            with (yield from file.seekable()) as content, zipfile.ZipFile(content) as archive:
                names = set(archive.namelist())
                if office.is_docx(names):
                    yield from self._leaf(file, lambda file: office.read_docx(file, archive))
                elif office.is_epub(names):
                    yield from self._leaf(file, lambda file: office.read_epub(file, archive))
                else:
                    office.check_no_other(names)
                    yield from self._zip(file, archive, names)
        else:
            yield from self._leaf(file, _PARSERS[format], has_records=format in _BY_RECORD)

    def _leaf(
        self, file: Opened, read: Callable[[Opened], Iterator[Document | Failure | None]], has_records: bool = False
    ) -> Iterator[Event]:
        if (number := self._next()) is None:
            yield None
            return
        yield Leaf(number, file.path, has_records)
        try:
            yield from read(replace(file, n_passed=self._n_passed if number == self._skip + 1 else 0))
        except (Spent, MemoryError):
            raise
        except Exception as error:
            yield Failure(file.path, reason(error))
        yield Leaf(number, None)

    def _next(self) -> int | None:
        """The number of the leaf that begins, unless it is passed over."""
        self._n_leaves += 1
        return self._n_leaves if self._n_leaves > self._skip else None

    def _failure(self, path: str, error: Exception) -> Iterator[Event]:
        if (number := self._next()) is None:
            yield None
            return
        yield Leaf(number, path)
        yield Failure(path, reason(error))
        yield Leaf(number, None)

    def _zip(self, file: Opened, archive: zipfile.ZipFile, names: set[str]) -> Iterator[Event]:
        members = archive.infolist()
        _check_number(file, len(members))
        for member in members:
            path = f"{file.path}/{member.filename}"
            if member.is_dir() or is_hidden(member.filename) or is_beside_beir(member.filename, names):
                continue
            if stat.S_ISLNK(member.external_attr >> 16):
                yield from self._failure(path, Failed("a link"))
            else:
                try:
                    content = archive.open(member)
                except (zipfile.BadZipFile, UnicodeDecodeError, RuntimeError) as error:  # damaged, encrypted, too new
                    yield from self._failure(path, error)
                    continue
                yield from self.events(file.inside(content, path))

    def _tar(self, file: Opened) -> Iterator[Event]:
        with _Tar.open(fileobj=file.file, mode="r|", tarinfo=_Member, ignore_zeros=True) as archive:
            for number, member in enumerate(archive, start=1):
                _check_number(file, number)
                archive.members = []  # type: ignore[attr-defined]  # else it keeps all that it has seen
                if not (member.isdir() or is_hidden(member.name)):
                    yield from self._member(file, archive, member)
                yield from _passed_over(archive)

    def _member(self, file: Opened, archive: TarFile, member: tarfile.TarInfo) -> Iterator[Event]:
        path = opened.as_text(f"{file.path}/{member.name}")
        content = archive.extractfile(member) if member.isreg() else None
        if content is None:
            is_link = member.issym() or member.islnk()
            yield from self._failure(path, Failed("a link" if is_link else "no regular file"))
        else:
            yield from self.events(file.inside(content, path))

    def _warc(self, file: Opened) -> Iterator[Event]:
        for record in warc.read(file):
            if isinstance(record, Failed):
                yield from self._failure(file.path, record)
            elif record is None:
                yield None
            else:
                inside = file.inside(record.content, f"{file.path}/{record.name}")
                yield from self.events(replace(inside, crawled=record.crawled))


def _passed_over(archive: Any) -> Iterator[None]:
    """Go on to the next member of a tar in steps: what nobody reads of a large one may take minutes to unpack."""
    while archive.offset - (at := archive.fileobj.tell()) > PASSED_OVER_BYTES:
        if archive.fileobj.seek(at + PASSED_OVER_BYTES) < at + PASSED_OVER_BYTES:  # cut off, as `tarfile` will say
            return
        yield None


def _check_number(file: Opened, n_members: int) -> None:
    if n_members > file.limits.n_members:
        raise Failed(f"an archive of more than {file.limits.n_members} members")


def reason(error: BaseException) -> str:
    """Why something cannot be read, in one line."""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _LIBRARIES:
        return f"needs {error.name}: pip install 'openbook[corpus]'"
    said = one_line(str(error))
    return said if isinstance(error, Failed) else f"{type(error).__name__}: {said}".removesuffix(": ")


def library_of(reason: str) -> str | None:
    """The library for want of which something could not be read, if that was why."""
    found = _NEEDS.fullmatch(reason)
    return found and found[1]
