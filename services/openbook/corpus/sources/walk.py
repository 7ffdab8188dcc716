"""The files of a corpus in their order: a file, or all of a folder. Nothing outside of it, whatever links say."""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openbook.core.fingerprint import file_digest
from openbook.corpus.sources.limits import Failed, Failure, Limits, one_line
from openbook.corpus.sources.opened import open_regular
from openbook.corpus.sources.parse import is_beside_beir, is_hidden


@dataclass(frozen=True, slots=True)
class Found:
    """A file to parse."""

    path: Path
    name: str
    """Its path within the corpus."""

    is_given: bool
    """The user named it, so that it may be a link."""


def found(root: Path) -> Iterator[Found | Failure]:
    """A file, or those of a folder and the folders in it, by name; what is no file is a failure."""
    if not root.is_dir():
        yield Found(root, _shown(root.name), is_given=True)
        return
    waiting = [_entries(root, "")]
    while waiting:
        item = next(waiting[-1], None)
        if item is None:
            waiting.pop()
        elif isinstance(item, Failure):
            yield item
        elif item[0].is_dir(follow_symlinks=False):
            waiting.append(_entries(Path(item[0].path), item[1]))
        elif item[0].is_symlink():
            yield Failure(item[1], "a link; only what lies in the folder itself is read")
        else:
            yield Found(Path(item[0].path), item[1], is_given=False)


def _entries(folder: Path, name: str) -> Iterator[tuple[os.DirEntry[str], str] | Failure]:
    try:
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        yield Failure(name or ".", one_line(str(error.strerror)))
        return
    names = {entry.name for entry in ordered}
    for entry in ordered:
        if not is_hidden(entry.name) and not is_beside_beir(entry.name, names):
            yield entry, f"{name}/{_shown(entry.name)}".removeprefix("/")


def _shown(name: str) -> str:
    return os.fsencode(name).decode(errors="replace")


def corpus_digest(root: Path) -> str:
    """Digest of all that would be parsed: names and bytes. Raises OSError where the file itself cannot be read."""
    if not root.is_dir():
        return hashlib.sha256(json.dumps([file_digest(root), _shown(root.name)]).encode()).hexdigest()
    digest = hashlib.sha256()
    for item in found(root):
        digest.update(json.dumps([item.reason, item.path] if isinstance(item, Failure) else _digests(item)).encode())
    return digest.hexdigest()


def _digests(item: Found) -> list[str]:
    try:
        with open_regular(item.path, item.name, Limits(), follow=False).file as file:
            return [hashlib.file_digest(file, "sha256").hexdigest(), item.name]
    except (OSError, Failed) as error:
        return [str(error), item.name]
