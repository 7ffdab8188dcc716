"""What became of each question: columns of numbers, which are collected, joined, cut and kept in a file."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from openbook.core.types import Float64, Int64
from openbook.errors import InvalidDocuments

OK, HANG, NOT_SENT, REFUSED, BROKEN = "OK", "HANG", "NOT_SENT", "RESOURCE_EXHAUSTED", "DATA_LOSS"
"""Statuses are names of gRPC codes, and two of our own. DATA_LOSS is a reply that is none."""

NAN = float("nan")


class Reply(NamedTuple):
    """How one question ended, as its sender saw it."""

    status: str  # OK, or the name of a gRPC code
    seen: str  # as it came: the same, or HTTP's status
    message: str = ""
    first: float = NAN  # monotonic time of the first token
    about: int = 0  # what a reply that is checked must be equal for: question and snapshot; 0 is not checked
    digest: int = 0  # of what must be equal
    done: float = NAN  # monotonic time of its end, where that is not when the sender returns it


class Label(NamedTuple):
    """One way in which questions ended."""

    status: str
    seen: str
    example: str  # the first message


@dataclass(frozen=True, slots=True)
class Outcomes:
    """n questions by intended time. Times are seconds from the beginning of the run."""

    labels: tuple[Label, ...]
    label: Int64  # (n,) which of them
    intended_s: Float64  # (n,)
    sent_s: Float64  # (n,) NaN: not sent
    done_s: Float64  # (n,)
    first_s: Float64  # (n,) NaN: no first token
    about: NDArray[np.uint64]  # (n,)
    digest: NDArray[np.uint64]  # (n,)

    def __len__(self) -> int:
        return len(self.label)

    @property
    def latency_s(self) -> Float64:
        """(n,) from the intended start, whenever it was sent."""
        return self.done_s - self.intended_s

    def among(self, *statuses: str) -> NDArray[np.bool_]:
        """(n,) which of them ended so."""
        return np.isin(self.label, [i for i, label in enumerate(self.labels) if label.status in statuses])

    def where(self, rows: NDArray[np.bool_] | slice) -> "Outcomes":
        """Those of the mask, or of the slice."""
        return Outcomes(self.labels, *(getattr(self, name)[rows] for name in COLUMNS))

    def by_second(self, n: int) -> "Iterator[tuple[int, Outcomes]]":
        """Those of the first n seconds, with the numbers of their seconds."""
        edges = np.searchsorted(self.intended_s, np.arange(n + 1)).tolist()
        for second, (start, stop) in enumerate(pairwise(edges)):
            yield second, self.where(slice(start, stop))

    def save(self, path: Path) -> None:
        """To a file of NumPy's, without pickle. Raises OSError."""
        with path.open("wb") as file:
            columns: dict[str, Any] = {name: getattr(self, name) for name in COLUMNS}
            np.savez_compressed(file, labels=np.array(self.labels or np.empty((0, 3), str)), **columns)


COLUMNS = ("label", "intended_s", "sent_s", "done_s", "first_s", "about", "digest")


def load(path: Path) -> Outcomes:
    """What `save` wrote.

    Raises:
        InvalidDocuments: the file is not there, or holds something else.
    """
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            labels = tuple(Label(*map(str, row)) for row in file["labels"])
            return Outcomes(labels, *(file[name] for name in COLUMNS))
    except Exception as error:  # of damage zipfile, zlib and NumPy make errors of a dozen classes
        raise InvalidDocuments(f"{path}: holds no outcomes of a load test: {error}") from None


def join(parts: Sequence[Outcomes]) -> Outcomes:
    """Those of all parts, as if one had seen them all."""
    log = Log()
    moved = [np.array([log.number(*label) for label in part.labels], np.int64) for part in parts]
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS[1:]}
    label = np.concatenate([of[part.label] for of, part in zip(moved, parts, strict=True)])
    return _by_time(Outcomes(tuple(log.labels), label, **columns))


@dataclass(slots=True)
class Log:
    """Collects outcomes one by one."""

    begun: float = 0.0  # the monotonic time that times count from
    labels: list[Label] = field(default_factory=list)
    n_begun: int = 0  # counted by who sends
    n_done: int = 0
    n_ok: int = 0
    _numbers: dict[tuple[str, str], int] = field(default_factory=dict)
    _label: "array[int]" = field(default_factory=lambda: array("q"))
    _times: "array[float]" = field(default_factory=lambda: array("d"))
    _digests: "array[int]" = field(default_factory=lambda: array("Q"))

    def add(self, intended_s: float, sent: float, done: float, reply: Reply) -> None:
        """One question, intended this long after the beginning: as the schedule says it, so that no rounding moves
        it out of the time that is measured. Sent and done are monotonic times."""
        self.n_done += 1
        self.n_ok += reply.status == OK
        self._label.append(self.number(reply.status, reply.seen, reply.message))
        self._times.extend((intended_s, sent - self.begun, done - self.begun, reply.first - self.begun))
        self._digests.extend((reply.about, reply.digest))

    def number(self, status: str, seen: str, message: str) -> int:
        """Of the label."""
        found = self._numbers.setdefault((status, seen), len(self.labels))
        if found == len(self.labels):
            self.labels.append(Label(status, seen, message))
        return found

    def outcomes(self) -> Outcomes:
        """What was collected so far."""
        times = np.array(self._times, np.float64).reshape(-1, 4)
        digests = np.array(self._digests, np.uint64).reshape(-1, 2)
        return _by_time(Outcomes(tuple(self.labels), np.array(self._label, np.int64), *times.T, *digests.T))


def _by_time(outcomes: Outcomes) -> Outcomes:
    order = np.argsort(outcomes.intended_s, kind="stable")
    return Outcomes(outcomes.labels, *(getattr(outcomes, name)[order] for name in COLUMNS))
