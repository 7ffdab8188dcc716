"""Digests that identify texts, files, settings, snapshots and models: SHA-256 in lower-case hex."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20


def bytes_digest(data: bytes) -> str:
    """Digest of bytes."""
    return hashlib.sha256(data).hexdigest()


def text_digest(text: str) -> str:
    """Digest of a text's UTF-8 bytes. Nothing is normalised: texts that differ in any character differ here."""
    return bytes_digest(text.encode())


def json_digest(value: Any) -> str:
    """Digest of a JSON value, whatever the order of its keys.

    Raises:
        ValueError, TypeError: the value holds NaN, an infinity or something that JSON does not know.
    """
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text_digest(canonical)


def file_digest(path: Path) -> str:
    """Digest of a file's bytes, read in chunks. Raises OSError where the file cannot be read."""
    with path.open("rb") as file:
        return _stream_digest(iter(lambda: file.read(CHUNK_BYTES), b""))


def files_digest(files: Mapping[str, Path]) -> str:
    """Digest of several files under the names they are known by, wherever they lie and in whatever order they come."""
    return json_digest({name: file_digest(path) for name, path in files.items()})


def _stream_digest(chunks: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
