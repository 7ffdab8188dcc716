"""The folder of a build at work: what it is made from, how far it has come, and what must not be in it."""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
from openbook.errors import InvalidConfig, StartupError
from openbook.index.building.build import LOCK
from openbook.index.disk.bm25 import FOLDER as WORDS
from openbook.index.disk.origins import is_of_origins
from openbook.index.disk.store import OFFSETS, TEXTS

NOTE = "note.json"
FAILURES = "failures.jsonl"
DUPLICATES = "duplicates.json"
SHARDS = "shards"
"""The passages once more, by the number of shards, as `write_texts` puts them."""
LEFT = "left"
"""What a build of another plan has left here, until this one has taken what embeddings it can use."""
PARTIAL = tuple(files.partial_of(Path(name)).name for name in (NOTE, WORDS, LEFT))
OF_LEFT = (TEXTS, OFFSETS, VECTORS, ROWS, NOTE)
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

    def embeds_as(self, other: "Plan") -> bool:
        """Whether a passage has the same embedding, and it is made and not given."""
        ours, theirs = ((plan.embedded_by, plan.dimension, plan.vectors) for plan in (self, other))
        return ours == theirs and not self.vectors


class Note(BaseModel):
    """How far it has come."""

    plan: Plan
    vectors: str = VECTORS  # where they are, from the folder of work
    changes: Changes | None = None
    n_encoded: int = 0  # of the file of rows; what lies behind them and is done, too, is in `ahead`
    ahead: dict[int, int] = {}  # where a step starts and where it stops

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


def check_ours(work: Path) -> None:
    """Raises InvalidConfig: something lies in the folder that no build put there."""
    names = {path.name for path in work.glob("*")} - set(OURS)
    if strangers := sorted(name for name in names if not is_of_origins(name)):
        raise InvalidConfig(f"{work} is for work in progress, and holds something else: {', '.join(strangers[:3])}")


@contextmanager
def told_if_full(work: Path) -> Iterator[None]:
    """Raises StartupError: there is no room for what the body writes."""
    try:
        yield
    except OSError as error:
        is_cut = error.errno is None and " requested and " in str(error)  # NumPy wrote less, and does not say why
        if not (is_cut or error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)):
            raise
        why = error.strerror or os.strerror(errno.ENOSPC)
        raise StartupError(f"{work}: cannot go on: {why}; with more room the same command does") from None


def resumed(work: Path, plan: Plan) -> Note | None:
    """The note of a build of the same plan that was interrupted here, if there is one."""
    note = _note(work)
    if note is None or note.plan != plan:
        return None
    is_all_there = (work / note.vectors).exists() and (work / FAILURES).exists()
    return note if is_all_there and not _can_read_more(work) else None


def set_aside(work: Path, plan: Plan) -> None:
    """Keep what a build of another plan has left, if its embeddings are this one's too, and the disk has room for both.

    Whoever has no note had not read all of his passages, and what was kept for him is kept for this one.
    """
    if (note := _note(work)) is None:
        return
    shutil.rmtree(work / LEFT, ignore_errors=True)
    if not note.plan.embeds_as(plan):
        return
    with suppress(FileNotFoundError):  # whoever was here before us was killed, and some were moved
        if shutil.disk_usage(work).free >= sum((work / name).stat().st_size for name in OF_LEFT):
            with files.new_folder(work / LEFT) as partial:
                for name in OF_LEFT:
                    (work / name).rename(partial / name)


def left(work: Path, plan: Plan) -> NDArray[np.bool_] | None:
    """Which passages in LEFT have an embedding that is this plan's too; None: nothing is there."""
    note = _note(work / LEFT)
    if note is None or not note.plan.embeds_as(plan):
        return None
    rows = np.load(work / LEFT / ROWS)
    is_there = np.ones(len(np.load(work / LEFT / VECTORS, mmap_mode="r")), np.bool_)
    for step in note.steps_left(len(rows), max(1, len(rows))):
        is_there[rows[step.start : step.stop]] = False
    return is_there


def _note(folder: Path) -> Note | None:
    with suppress(OSError, ValidationError):
        return Note.model_validate_json((folder / NOTE).read_text())
    return None


def _can_read_more(work: Path) -> bool:
    """Whether a library is there now for want of which something was left out."""
    reasons = (json.loads(line)["reason"] for line in (work / FAILURES).read_text().splitlines())
    return any(_is_there(name) for name in set(map(library_of, reasons)) if name)


def _is_there(library: str) -> bool:
    with suppress(ImportError):  # what it is a part of is missing
        return find_spec(library) is not None
    return False
