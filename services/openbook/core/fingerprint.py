"""Digests that identify texts, files, settings, snapshots and models: SHA-256 in lower-case hex."""

import hashlib
import json
from pathlib import Path
from typing import Any


def text_digest(text: str) -> str:
    """Digest of a text's UTF-8 bytes. Nothing is normalised: texts that differ in any character differ here."""
    return hashlib.sha256(text.encode()).hexdigest()


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
        return hashlib.file_digest(file, "sha256").hexdigest()
