"""The folder of a build at work: what it is made from, how far it has come, and what must not be in it."""

import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from openbook import files
from openbook.core.origin import Field
from openbook.core.splitting import Splitting
from openbook.corpus.duplicates import What
from openbook.corpus.encode import ROWS, VECTORS
from openbook.corpus.former import Changes
from openbook.corpus.sources.parse import library_of
from openbook.corpus.sources.recognise import NAMES, Names
from openbook.errors import InvalidConfig
from openbook.index.building.build import LOCK, undisturbed
from openbook.index.disk.bm25 import FOLDER as WORDS
from openbook.index.disk.origins import is_of_origins
from openbook.index.disk.snapshot import MANIFEST
from openbook.index.disk.store import OFFSETS, TEXTS

NOTE = "note.json"
FAILURES = "failures.jsonl"
DUPLICATES = "duplicates.json"
SHARDS = "shards"
"""The passages once more, by the number of shards, as `write_texts` puts them."""
LEFT = "left"
"""What a build of another plan has left here, until this one has taken what embeddings it can use."""
PARTIAL = tuple(files.partial_of(Path(name)).name for name in (NOTE, WORDS))
OF_LEFT = (TEXTS, OFFSETS, VECTORS, ROWS, NOTE)  # the note last: without it the others say nothing
OURS = (*OF_LEFT, WORDS, SHARDS, FAILURES, DUPLICATES, LEFT, LOCK, *PARTIAL)
"""All that lies in a folder of work in progress, which is removed when it is done or out of date."""


class Plan(BaseModel, frozen=True):
    """What work in progress is made from; nothing else may go on with it."""

    documents_digest: str
    splitting: Splitting
    fields: tuple[Field, ...]
    embedded_by: str
    dimension: int
    vectors: list[list[str | int]] | None  # as `vectors.described` tells
    former: str | None  # snapshot id
    duplicates: What
    names: Names = NAMES


class Note(BaseModel):
    """How far it has come."""

    plan: Plan
    vectors: str = VECTORS  # where they are, from the folder of work
    changes: Changes | None = None
    n_encoded: int = 0  # of the file of rows; what lies behind them and is done, too, is in `ahead`
    ahead: dict[int, int] = {}  # where a step starts and where it stops
    rounded_to: str | None = None  # some embeddings are of a snapshot whose exact vectors had this dtype

    def serves(self, plan: Plan, exact_dtype: str) -> bool:
        """Whether that plan makes the same embedding of a passage, and does make it."""
        ours, theirs = ((each.embedded_by, each.dimension, each.vectors) for each in (self.plan, plan))
        return ours == theirs and not plan.vectors and self.rounded_to in (None, exact_dtype)

    def steps_left(self, n_rows: int, n_together: int) -> list[range]:
        """What there is to encode, whatever the size of the steps before."""
        steps, start = list[range](), self.n_encoded
        for done_from, done_to in [*sorted(self.ahead.items()), (n_rows, n_rows)]:
            steps += [range(at, min(at + n_together, done_from)) for at in range(start, done_from, n_together)]
            start = done_to
        return steps

    def add(self, step: range) -> None:
        """This one is encoded."""
        self.ahead[step.start] = step.stop
        while self.n_encoded in self.ahead:
            self.n_encoded = self.ahead.pop(self.n_encoded)

    @property
    def n_done(self) -> int:
        """How many rows are encoded."""
        return self.n_encoded + sum(stop - start for start, stop in self.ahead.items())

    def write(self, work: Path) -> None:
        """Put it into the folder of work, in place of the one before."""
        files.write(work / NOTE, self.model_dump_json())


def folder_of(out: Path) -> Path:
    """Where a build of this snapshot is at work."""
    return files.beside(out, "{}.work")


def remove_if_done(out: Path) -> None:
    """Remove the folder of a build that was killed when its snapshot stood.

    Raises:
        InvalidConfig: as `check_ours`, or that build is still at work there.
    """
    work = folder_of(out)
    check_ours(work)
    if not (out / MANIFEST).exists():
        return
    if work.exists():
        with undisturbed(work):  # who comes after us finds the snapshot; NFS removes no folder with an open lock
            pass
        shutil.rmtree(work, ignore_errors=True)
    (out / LOCK).unlink(missing_ok=True)


def check_ours(work: Path) -> None:
    """Raises InvalidConfig: something lies in the folder that no build put there."""
    names = {path.name for path in work.glob("*")} - set(OURS)
    if strangers := sorted(name for name in names if not is_of_origins(name)):
        raise InvalidConfig(f"{work} is for work in progress, and holds something else: {', '.join(strangers[:3])}")


def told_if_full(work: Path) -> AbstractContextManager[None]:
    """As `files.told_if_full`; what another build had left there goes."""

    def make_room() -> str:
        if not (work / LEFT).exists():
            return files.MORE_ROOM
        shutil.rmtree(work / LEFT)
        return "what another build had left there is removed: the same command may"

    return files.told_if_full(work, make_room)


@contextmanager
def removed_if_useless(work: Path) -> Iterator[None]:
    """Where we are `undisturbed`: the folder goes if the body fails before there is anything that the next can use."""
    try:
        yield
    except BaseException:
        if not ((work / NOTE).exists() or (work / LEFT).exists()):
            shutil.rmtree(work, ignore_errors=True)
        raise


def resumed(work: Path, plan: Plan, exact_dtype: str) -> Note | None:
    """The note of a build of the same plan that was interrupted here, if there is one."""
    note = _note(work)
    if note is None or note.plan != plan or note.rounded_to not in (None, exact_dtype):
        return None
    is_all_there = all((work / name).exists() for name in (TEXTS, OFFSETS, note.vectors, ROWS, FAILURES))
    return note if is_all_there and not _can_read_more(work) else None


def set_aside(work: Path, plan: Plan, exact_dtype: str) -> None:
    """Keep what a build of another plan has left, if its embeddings are this one's too, and the disk has room for both.

    Whoever has no note had not read all of his passages, and what was kept for him is kept for this one. Killed in
    between, it is done by the next.
    """
    if (note := _note(work)) is None:
        return
    if _note(work / LEFT):  # he has taken what he can use
        shutil.rmtree(work / LEFT)
    places = [folder / name for folder in (work, work / LEFT) for name in OF_LEFT]
    sizes = [path.stat().st_size for path in places if path.exists()]
    if not note.serves(plan, exact_dtype) or shutil.disk_usage(work).free < sum(sizes):
        shutil.rmtree(work / LEFT, ignore_errors=True)
        return
    (work / LEFT).mkdir(exist_ok=True)
    for name in OF_LEFT:
        with suppress(FileNotFoundError):
            (work / name).rename(work / LEFT / name)
    files.sync(work / LEFT)


def left(work: Path, plan: Plan, exact_dtype: str) -> tuple[Note, NDArray[np.bool_]] | None:
    """The note in LEFT, and which of its passages have an embedding that is this plan's too; None: nothing is there."""
    note = _note(work / LEFT)
    if not (note and note.serves(plan, exact_dtype) and all((work / LEFT / name).exists() for name in OF_LEFT)):
        return None
    rows = np.load(work / LEFT / ROWS)
    is_there = np.ones(len(np.load(work / LEFT / VECTORS, mmap_mode="r")), np.bool_)
    for step in note.steps_left(len(rows), max(1, len(rows))):
        is_there[rows[step.start : step.stop]] = False
    return note, is_there


def _note(folder: Path) -> Note | None:
    with suppress(OSError, ValidationError):
        return Note.model_validate_json((folder / NOTE).read_bytes())
    return None


def _can_read_more(work: Path) -> bool:
    """Whether a library is there now for want of which something was left out."""
    reasons = (json.loads(line)["reason"] for line in (work / FAILURES).read_text().splitlines())
    return any(_is_there(name) for name in set(map(library_of, reasons)) if name)


def _is_there(library: str) -> bool:
    with suppress(ImportError):  # what it is a part of is missing
        return find_spec(library) is not None
    return False
