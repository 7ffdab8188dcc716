"""A folder under a URL, of a snapshot or of documents: which may be read, and how, piece by piece."""

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from openbook.errors import InvalidConfig, InvalidRequest, InvalidSnapshot, ShardUnavailable

T = TypeVar("T")

SCHEMES = {"file": "", "http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs"}
"""What may be read, and the package that fsspec needs for it. No other: fsspec knows schemes that run commands."""
PIECE_BYTES = 8 << 20  # read by one request; what is lost where a connection breaks
PAUSES_S = (0.2, 1.0, 5.0)  # before a piece is asked for again
SILENCE_S = 60.0  # of a web server, after which it is asked again; what it sends may take as long as it likes

VERSIONS = ("ETag", "etag", "generation", "LastModified", "Last-Modified", "mtime")
"""What fsspec's file systems call what changes with a file's bytes, the surest first."""

_FOR_GOOD = (NotImplementedError, IsADirectoryError)
_FORBIDDEN = "Forbidden: "  # gcsfs has no other sign of it
_PASSING = (408, 429)  # of HTTP: too slow, too many

# No escapes, no user or password, no query, no chain of fsspec's: what is compared is what is read.
_URL = re.compile(r"[a-z0-9]+://[\w.~/:=+,-]+")


def is_url(text: str) -> bool:
    """Whether it means a place elsewhere, and no path."""
    return "://" in text


def is_within(url: str, prefixes: Sequence[str]) -> bool:
    """Whether a URL is one of these or lies below one."""
    return any(f"{url}/".startswith(f"{prefix.rstrip('/')}/") for prefix in prefixes)


class Refused(ShardUnavailable):
    """It may not be read. Object stores say so also of what is not there, to who may not list."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A file that lies somewhere. Other bytes have another version; without one nobody knows."""

    path: str
    """From its place's URL."""

    size_bytes: int | None
    """None: it can only be read from its beginning."""

    version: str


@dataclass(frozen=True)
class Place:
    """A folder under a URL. A web server that sends us on elsewhere is followed only where `follows` says so.

    Raises:
        InvalidRequest: no URL of a folder, or a scheme that is not read; names them.
    """

    url: str
    follows: bool = False

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
        """fsspec's file system."""
        scheme = self.url.partition("://")[0]
        try:
            import fsspec

            if not scheme.startswith("http"):
                return fsspec.filesystem(scheme)
            import aiohttp

            silence = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
            as_they_are = {"Accept-Encoding": "identity"}  # of what is compressed there are other ranges, or none
            client = {"timeout": silence, "headers": as_they_are}
            return fsspec.filesystem(scheme, allow_redirects=self.follows, client_kwargs=client)
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
            ShardUnavailable: it cannot be read; `Refused`, if it must not be.
        """
        if (about := self._found(path)) is None:
            return None
        size: int | None = about["size"]
        if size is None or size > max_bytes:
            raise InvalidSnapshot(f"{self.at(path)}: must have at most {max_bytes} bytes, found {size}")
        return b"".join(self.pieces(path, 0, size))

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

    def stream(self, path: str, piece_bytes: int = PIECE_BYTES) -> Iterator[bytes]:
        """The bytes of a file whose size nobody knows, in one request. Raises as `pieces`."""
        file = self._again(path, lambda: self._files.open(self.at(path), "rb", block_size=0))
        with file:
            while piece := self._again(path, lambda: file.read(piece_bytes), tries=1):
                yield piece

    def listing(self) -> dict[str, Listed]:
        """All that lies there, by its path; the path of a file whose URL this is, is empty. Not of web servers, and not
        those objects that stand for a folder: their names end in a slash.

        Raises:
            InvalidSnapshot: nothing is there.
            ShardUnavailable: it cannot be read.
        """
        listed = self._again("", lambda: self._files.find(self.url, detail=True))
        found = {key: about for key, about in listed.items() if not key.endswith("/")}
        if not found:
            raise InvalidSnapshot(f"{self.url}: is not there")
        start = len(self._files._strip_protocol(self.url))
        return {path: self._listed(path, found[key]) for key in found for path in [key[start:].removeprefix("/")]}

    def about(self, path: str) -> Listed:
        """A file that lies there, as it is by now. Raises as `listing`."""
        self._files.invalidate_cache()
        listed = self._listed(path, self._again(path, lambda: self._info(path)))
        if listed.size_bytes is None or not self.url.startswith("http"):
            return listed
        try:
            next(self.pieces(path, 1, min(listed.size_bytes, 2)), None)
        except ShardUnavailable:  # a web server that knows no ranges, and only shows it
            return replace(listed, size_bytes=None)
        return listed

    def _found(self, path: str) -> Any:
        """What fsspec knows of a file; None: there is none. Raises ShardUnavailable."""

        def found() -> Any:
            with suppress(FileNotFoundError):
                return self._info(path)
            return None

        return self._again(path, found)

    def _info(self, path: str) -> Any:
        """What fsspec knows of a file. It says that there is none whatever came of asking a web server."""
        try:
            return self._files.info(self.at(path))
        except FileNotFoundError as error:
            cause = error.__cause__
            if cause is None or isinstance(cause, FileNotFoundError) or getattr(cause, "status", 0) == 404:
                raise
            raise cause from None

    def _listed(self, path: str, about: Mapping[str, Any]) -> Listed:
        versions = (about.get(name) for name in VERSIONS)
        size = about.get("size") if about.get("partial", True) else None
        return Listed(path, size, str(next(filter(None, versions), "")))

    def digest(self, path: str, size: int) -> str | None:
        """SHA-256 of a file as it lies there, all of which is read; None if there is none of this size."""
        about = self._found(path)
        if about is None or about["size"] != size:
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

    def _again(self, path: str, work: Callable[[], T], tries: int = len(PAUSES_S) + 1) -> T:
        """What it gives, tried again: each library below has errors of its own for what may pass."""
        for pause_s in (*PAUSES_S[: tries - 1], None):
            try:
                return work()
            except (InvalidSnapshot, InvalidConfig):
                raise
            except Exception as error:
                status = getattr(error, "status", 0)  # of HTTP
                if isinstance(error, FileNotFoundError) or status == 404:
                    raise InvalidSnapshot(f"{self.at(path)}: is not there") from None
                refused = status == 403 or isinstance(error, PermissionError) or str(error).startswith(_FORBIDDEN)
                wrong = 400 <= status < 500 and status not in _PASSING
                for_good = refused or wrong or isinstance(error, _FOR_GOOD) or "range requests" in str(error)
                if pause_s is None or for_good:
                    silent = str(error.__cause__ or "")  # fsspec's timeouts say nothing themselves
                    why = str(error) or silent or type(error).__name__
                    raise (Refused if refused else ShardUnavailable)(f"{self.at(path)}: {why}") from None
                time.sleep(pause_s)
        raise AssertionError("the last try returns or raises")
