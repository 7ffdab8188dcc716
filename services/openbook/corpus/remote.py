"""Documents that lie elsewhere, brought beside the snapshot that is built of them, for as long as it is."""

import functools
import json
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from urllib.parse import unquote

from openbook import files
from openbook.corpus.sources.limits import Failure, OnFailure
from openbook.corpus.sources.parse import is_hidden
from openbook.corpus.work import remove_if_done
from openbook.errors import InvalidConfig, InvalidDocuments, InvalidSnapshot, ShardUnavailable
from openbook.index.building.build import check_new
from openbook.index.disk.snapshot import MANIFEST
from openbook.index.remote.place import PIECE_BYTES, Listed, Place
from openbook.index.remote.transfer import OnBytes, Transfer, transfer_all

N_FILES = 8  # at once
N_TRIES = 3  # to fetch a file that changes meanwhile
N_ASKED = 4  # times again, whether it has changed or its server tells versions at random
MAX_NAME_BYTES = 240  # of a file or a folder; while it is written it has a longer name
LOCK = ".lock"
JOURNAL = ".fetched.jsonl"
"""The URL, then a line for each file that was begun, and one when it is whole."""


@contextmanager
def fetched(
    url: str,
    out: Path,
    on_failure: OnFailure,
    on_bytes: OnBytes = lambda done, total: None,
    piece_bytes: int = PIECE_BYTES,
) -> Iterator[Path]:
    """The file or the folder under a URL as it is here, in `<out>.documents`, which goes when the body is done.

    Where the body fails it stays: the next one fetches what is new or was changed since, and the rest of a file. What
    can have no place here is told to `on_failure`.

    Raises:
        InvalidRequest: no URL that is read; see `Place`.
        InvalidConfig: `out` exists, that folder holds something else, or another process is at work there.
        InvalidDocuments: nothing is there, it cannot be read or changes again and again, or the disk is too small,
            which is known before.
    """
    out = out.absolute()  # what is said of it names it
    folder = files.beside(out, "{}.documents")
    if folder.exists() and not _is_ours(folder):
        raise InvalidConfig(f"{folder} is for documents that are fetched, and holds something else")
    if folder.exists() and (out / MANIFEST).exists():  # a build was killed when it was as good as done
        with files.locked(folder / LOCK, timeout_s=0):
            remove_if_done(out)
            _remove(folder)
    check_new(out)
    folder.mkdir(parents=True, exist_ok=True)
    with files.locked(folder / LOCK, timeout_s=0):
        try:
            place, names, only = _found(url)
            for name in sorted(names):
                if problem := _problem(name, names):
                    if only:
                        raise InvalidDocuments(f"{url}: {problem}")
                    on_failure(Failure(name, problem))
                    del names[name]
            _Fetch(place, folder, url, piece_bytes).all(names, on_bytes)
        except (InvalidSnapshot, ShardUnavailable) as error:
            raise InvalidDocuments(str(error)) from None
        except OSError as error:
            raise InvalidDocuments(f"{folder}: cannot be written: {error.strerror}") from None
        yield folder / only
        _remove(folder)


def _is_ours(folder: Path) -> bool:
    """Whether documents were fetched there, or nothing is there yet."""
    names = {each.name for each in folder.iterdir()}
    return JOURNAL in names or names <= {LOCK, files.partial_of(folder / JOURNAL).name}


def _remove(folder: Path) -> None:
    with suppress(OSError):  # NFS keeps a name for files that are open: the next one removes it
        _clear(folder)
        shutil.rmtree(folder)


def _clear(folder: Path) -> None:
    """Remove all but the journal, which says that the folder is ours to whoever comes when we are killed."""
    for each in folder.iterdir():
        if each.name not in (LOCK, JOURNAL):
            shutil.rmtree(each) if each.is_dir() else each.unlink(missing_ok=True)


def _found(url: str) -> tuple[Place, dict[str, Listed], str]:
    """What lies there, by the names that it has here, below a place; and the name of a file that is all of it."""
    scheme, _, rest = url.partition("://")
    if scheme in ("http", "https"):
        host, _, path = rest.partition("/")
        name = unquote(path.partition("?")[0]).rpartition("/")[2].lstrip(".") or "index.html"
        place = Place(f"{scheme}://{host}", follows=True)
        return place, {name: place.about(path)}, name
    place = Place(url)
    found = {name: each for name, each in place.listing().items() if not is_hidden(name)}
    if "" not in found:
        return place, found, ""
    folder, _, name = place.url.rpartition("/")
    return Place(folder), {name: replace(found[""], path=name)}, name


def _problem(name: str, names: Collection[str]) -> str | None:
    """Why something that lies there can have no place here; object stores have names that no disk has."""
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        return "its name is no path"
    if any(len(os.fsencode(part)) > MAX_NAME_BYTES for part in parts):
        return f"a name must have at most {MAX_NAME_BYTES} bytes between slashes"
    if any("/".join(parts[:n]) in names for n in range(1, len(parts))):
        return "lies in what is a file itself"
    return None


class _Fetch:
    """Of what lies under one URL into one folder."""

    def __init__(self, place: Place, folder: Path, url: str, piece_bytes: int) -> None:
        self._place = place
        self._folder = folder
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._known = self._read(url)

    def all(self, names: Mapping[str, Listed], on_bytes: OnBytes) -> None:
        """Bring what is not here, and remove what is there no more."""
        for here in [each for each in self._folder.rglob("*") if each.is_file()]:
            name = here.relative_to(self._folder).as_posix()
            if not is_hidden(name) and name not in names:
                here.unlink()
        for name in names:
            if (self._folder / name).is_dir():  # what lay below it when another run was interrupted lies there no more
                shutil.rmtree(self._folder / name)
        missing = {name: listed for name, listed in names.items() if not self._is_here(name, listed)}
        total = sum(listed.size_bytes or 0 for listed in missing.values())
        begun = sum(self._begun(name, listed) for name, listed in missing.items())
        transfer_all(self._folder, missing.items(), self._file, total, begun, on_bytes, N_FILES)

    def _read(self, url: str) -> dict[str, tuple[Listed, bool]]:
        """What the journal says of each file, and whether it is whole. Of another URL all is thrown away."""
        journal = self._folder / JOURNAL
        lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
        if not lines or lines[0] != json.dumps(url):
            files.write(journal, json.dumps(url) + "\n")
            _clear(self._folder)
        known = {}
        for line in lines[1:]:
            with suppress(ValueError):  # torn when somebody was killed
                name, listed, is_whole = json.loads(line)
                known[name] = Listed(**listed), is_whole
        return known

    def _note(self, name: str, listed: Listed, is_whole: bool) -> None:
        line = json.dumps([name, asdict(listed), is_whole])
        with self._lock, (self._folder / JOURNAL).open("a", encoding="utf-8") as journal:
            journal.write(f"\n{line}")  # what was torn before ends here

    def _is_here(self, name: str, listed: Listed) -> bool:
        return bool(listed.version) and self._known.get(name) == (listed, True) and (self._folder / name).exists()

    def _begun(self, name: str, listed: Listed) -> int:
        """How much of a file is here and need not be fetched again."""
        partial = files.partial_of(self._folder / name)
        if not (listed.version and listed.size_bytes and self._known.get(name) == (listed, False) and partial.exists()):
            return 0
        # The piece that was written last may not have reached the disk before the power was cut.
        n_pieces = min(partial.stat().st_size, listed.size_bytes) // self._piece_bytes
        return max(0, n_pieces - 1) * self._piece_bytes

    def _file(self, file: tuple[str, Listed], transfer: Transfer) -> None:
        name, listed = file
        for n_before in range(N_TRIES):
            shorter = None
            try:
                self._fetch(name, listed, transfer, goes_on=not n_before)
            except InvalidSnapshot as error:  # it ended too soon: perhaps it is another one by now
                shorter = error
            if (now := transfer.read(functools.partial(self._now, listed))) == listed:
                if shorter:
                    raise shorter
                files.put(files.partial_of(self._folder / name), self._folder / name)
                self._note(name, listed, is_whole=True)
                return
            listed = now
        raise InvalidDocuments(f"{self._place.at(listed.path)}: has changed {N_TRIES} times while it was fetched")

    def _now(self, listed: Listed) -> Listed:
        """The file as it lies there by now: what came is no longer than it was known to be, and pieces may be of two
        versions.

        A server that says one thing and another, as mirrors behind one name may, says nothing of it: then as it was.
        """
        if listed.size_bytes is None:
            return listed
        found = {self._place.about(listed.path)}
        if listed not in found:
            found |= {self._place.about(listed.path) for _ in range(N_ASKED)}
        return found.pop() if len(found) == 1 else listed

    def _fetch(self, name: str, listed: Listed, transfer: Transfer, goes_on: bool) -> None:
        """Bring a file, or where it `goes_on` the rest of it, beside its place."""
        here = self._folder / name
        here.parent.mkdir(parents=True, exist_ok=True)
        partial, begun = files.partial_of(here), self._begun(name, listed) if goes_on else 0
        if not begun:
            partial.unlink(missing_ok=True)  # before the note: what another version left is not this one's beginning
        self._note(name, listed, is_whole=False)
        if listed.size_bytes is None:
            pieces = self._place.stream(listed.path, self._piece_bytes)
        else:
            pieces = self._place.pieces(listed.path, begun, listed.size_bytes, self._piece_bytes)
        with partial.open("r+b" if begun else "wb") as out:
            out.truncate(begun)
            out.seek(begun)
            transfer.count(begun)
            for piece in transfer.pieces(pieces):
                out.write(piece)
                out.flush()
                os.fdatasync(out.fileno())
                transfer.count(len(piece))
