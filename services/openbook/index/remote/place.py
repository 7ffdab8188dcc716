"""A snapshot's folder under a URL: which may be read, and how, piece by piece."""

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from openbook.errors import InvalidConfig, InvalidRequest, InvalidSnapshot, ShardUnavailable

T = TypeVar("T")

SCHEMES = {"file": "", "http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs"}
"""What may be read, and the package that fsspec needs for it. No other: fsspec knows schemes that run commands."""
PIECE_BYTES = 8 << 20  # read by one request; what is lost where a connection breaks
PAUSES_S = (0.2, 1.0, 5.0)  # before a piece is asked for again

_FOR_GOOD = (PermissionError, NotImplementedError, IsADirectoryError)

# No escapes, no user or password, no query, no chain of fsspec's: what is compared is what is read.
_URL = re.compile(r"[a-z0-9]+://[\w.~/:=+,-]+")


def is_url(text: str) -> bool:
    """Whether it means a place elsewhere, and no path."""
    return "://" in text


def is_within(url: str, prefixes: Sequence[str]) -> bool:
    """Whether a URL is one of these or lies below one."""
    return any(f"{url}/".startswith(f"{prefix.rstrip('/')}/") for prefix in prefixes)


@dataclass(frozen=True)
class Place:
    """A folder under a URL.

    Raises:
        InvalidRequest: no URL of a folder, or a scheme that is not read; names them.
    """

    url: str

    def __post_init__(self) -> None:
        scheme = self.url.partition("://")[0]
        if scheme not in SCHEMES:
            raise InvalidRequest(f"url must begin with {', '.join(f'{each}://' for each in SCHEMES)}")
        if not _URL.fullmatch(self.url) or "::" in self.url or ".." in self.url.split("/"):
            raise InvalidRequest(
                "url must be that of a folder, of letters, digits and ._-~/:=+, alone: without .., user, escapes, query"
            )
        object.__setattr__(self, "url", self.url.rstrip("/"))

    @cached_property
    def _files(self) -> Any:
        """fsspec's file system. A web server that sends us on elsewhere is not followed."""
        scheme = self.url.partition("://")[0]
        try:
            import fsspec

            return fsspec.filesystem(scheme, **({"allow_redirects": False} if scheme.startswith("http") else {}))
        except ImportError:
            names = " and ".join(filter(None, ("fsspec", SCHEMES[scheme])))
            raise InvalidConfig(f"{scheme}:// needs {names}: pip install 'openbook[remote]'") from None

    def at(self, path: str) -> str:
        """The URL of a file of the folder."""
        return f"{self.url}/{path}"

    def read(self, path: str, max_bytes: int) -> bytes | None:
        """A small file; None if there is none.

        Raises:
            InvalidSnapshot: it is larger.
            ShardUnavailable: it cannot be read.
        """

        def whole() -> bytes | None:
            try:
                size: int | None = self._files.info(self.at(path))["size"]
            except FileNotFoundError:
                return None
            if size is None or size > max_bytes:
                raise InvalidSnapshot(f"{self.at(path)}: must have at most {max_bytes} bytes, found {size}")
            return b"".join(self.pieces(path, 0, size))

        return self._again(path, whole)

    def pieces(self, path: str, start: int, size: int, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """The bytes of a file from `start` to `size`, asked for again where a connection breaks.

        Raises:
            InvalidSnapshot: there is no such file, or it ends early.
            ShardUnavailable: it cannot be read, after some tries.
        """
        while start < size:
            end = min(size, start + piece_bytes)

            def piece(start: int = start, end: int = end) -> bytes:
                with self._files.open(
                    self.at(path), "rb", block_size=piece_bytes, cache_type="none", size=size
                ) as file:
                    file.seek(start)
                    found: bytes = file.read(end - start)
                if not found:
                    raise InvalidSnapshot(f"{self.at(path)}: must have {size} bytes, ends after {start}")
                return found

            found = self._again(path, piece)
            yield found
            start += len(found)

    def digest(self, path: str, size: int) -> str | None:
        """SHA-256 of a file as it lies there, all of which is read; None if there is none of this size."""

        def found() -> int | None:
            with suppress(FileNotFoundError):
                size: int | None = self._files.info(self.at(path))["size"]
                return size
            return None

        if self._again(path, found) != size:
            return None
        sha256 = hashlib.sha256()
        for piece in self.pieces(path, 0, size):
            sha256.update(piece)
        return sha256.hexdigest()

    def put(self, file: Path, path: str) -> None:
        """Copy a file there. Raises ShardUnavailable: it cannot be written."""

        def put() -> None:
            if self.url.startswith("file:"):
                self._files.makedirs(self.at(path).rpartition("/")[0], exist_ok=True)
            self._files.invalidate_cache()
            self._files.put_file(str(file), self.at(path))

        self._again(path, put)

    def _again(self, path: str, work: Callable[[], T]) -> T:
        """What it gives, tried again: each library below has errors of its own for what may pass."""
        for pause_s in (*PAUSES_S, None):
            try:
                return work()
            except (InvalidSnapshot, InvalidConfig):
                raise
            except Exception as error:
                status = getattr(error, "status", 0)  # of HTTP
                if isinstance(error, FileNotFoundError) or status == 404:
                    raise InvalidSnapshot(f"{self.at(path)}: is not there") from None
                for_good = isinstance(error, _FOR_GOOD) or 400 <= status < 500 or "range requests" in str(error)
                if pause_s is None or for_good:
                    raise ShardUnavailable(f"{self.at(path)}: {str(error) or type(error).__name__}") from None
                time.sleep(pause_s)
        raise AssertionError("the last try returns or raises")
