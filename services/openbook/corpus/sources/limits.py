"""What a file may cost, and the readers that hold it to that."""

import io
from dataclasses import dataclass
from typing import IO, Any, Protocol

from openbook.errors import InvalidDocuments

MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What parsing one file of a corpus may cost; beyond it the file, or what is left of it, is a failure."""

    memory_bytes: int = 4096 * MB  # address space of the process that parses
    timeout_s: float = 60.0  # without a document or any other step
    document_bytes: int = 32 * MB  # of text, in UTF-8; also of one value of a table
    line_bytes: int = 64 * MB
    unpacked_bytes: int = 1 << 40  # of archives and compressed files, all layers together
    unpacked_ratio: int = 250  # the same, to the size of the file
    unpacked_free_bytes: int = 256 * MB  # below which no ratio is looked at
    spooled_bytes: int = 8 << 30  # of a member that must lie on disk, for its parser jumps about in it
    n_members: int = 1_000_000  # of an archive
    n_layers: int = 5  # an archive in a gzipped archive has three
    n_named: int = 10  # bad records of a file that are named; the rest are counted


class Failed(Exception):
    """A file or a record that cannot be read; the message says why in one line."""


class Spent(Failed):
    """The whole file has unpacked to more than it may."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What was left out of a corpus."""

    path: str
    """Within the folder that was given; inside an archive `archive.zip/member`. `:line` for a record."""

    reason: str
    n: int = 1
    """Records that it stands for."""

    def __str__(self) -> str:
        return f"{one_line(self.path, 500)}: {self.reason}"


class OnFailure(Protocol):
    """Called with each failure, in the order of the corpus."""

    def __call__(self, failure: Failure, /) -> None: ...


def raise_it(failure: Failure) -> None:
    """The first failure is the end."""
    raise InvalidDocuments(str(failure))


def one_line(text: str, most: int = 200) -> str:
    """A text of strangers, fit for a line of a terminal: nothing that moves its cursor."""
    shown = "".join(c if c.isprintable() else " " for c in text[: 4 * most]).split()
    line = " ".join(shown)
    return line if len(line) <= most else line[: most - 3] + "..."


class Budget:
    """Bytes that may still come out of a file's archives and compression."""

    def __init__(self, limits: Limits, size_bytes: int) -> None:
        allowed = max(limits.unpacked_free_bytes, limits.unpacked_ratio * size_bytes)
        self._left = self._all = min(limits.unpacked_bytes, allowed)

    def spend(self, n_bytes: int) -> None:
        self._left -= n_bytes
        if self._left < 0:
            raise Spent(f"unpacks to more than {self._all} bytes, which is all that a file of its size may hold")


class _Counted(io.RawIOBase):
    def __init__(self, file: IO[bytes], budget: Budget) -> None:
        self._file = file
        self._budget = budget

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        got = 0
        while got < len(buffer) and (piece := self._file.read(len(buffer) - got)):
            self._budget.spend(len(piece))
            buffer[got : got + len(piece)] = piece
            got += len(piece)
        return got

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


HEAD = 1 << 16


def counted(file: IO[bytes], budget: Budget) -> "io.BufferedReader[Any]":
    """What comes out of an archive or of compression; it cannot seek. `peek` shows as much as `HEAD`, if there is."""
    return io.BufferedReader(_Counted(file, budget), HEAD)
