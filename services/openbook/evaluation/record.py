"""One line for each answer, and what an interrupted evaluation needs to go on as if nothing had happened."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from math import exp
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from openbook import files
from openbook.core.types import Formulation
from openbook.errors import InvalidConfig, reason

PREDICTIONS, PLAN, LOCK = "predictions.jsonl", "plan.json", "lock"

R = TypeVar("R", bound=BaseModel)


class Record(BaseModel):
    """An answer and what it is worth. Logs are natural."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    id: str
    question: str
    answers: tuple[str, ...]
    answer_regex: str | None
    formulation: Formulation
    prediction: str
    em: bool
    f1: float | None  # None where the answers are a regular expression
    rouge_l: float | None
    log_likelihood: float  # log p(y|x)
    answer_rank: int | None  # of the first passage that holds an answer, from 1; None: none of those searched
    prior_entropy: float  # of p(z|x) over the passages read, in nats
    passage_ids: tuple[int, ...]  # those read, then others searched for, best first; none of a question's own passage
    page_rank: int | None = None  # of the first passage of a page that answers, from 1
    r_precision: float | None = None  # of the pages found, as KILT has it; None where no page is known
    signals: tuple[float, ...] = ()  # `core.confidence.SIGNALS`; none of labels, of `follow`, and of a former version

    @property
    def probability(self) -> float:
        """p(y|x)"""
        return min(1.0, exp(self.log_likelihood))

    def has_answer_at(self, k: int) -> bool:
        """Whether one of the first k passages holds an answer."""
        return self.answer_rank is not None and self.answer_rank <= k


class RecordLog(Generic[R]):
    """The records of one evaluation, in a file of its folder, with the plan that they belong to.

    Raises:
        InvalidConfig: the folder holds something else, or records of another plan; names the first difference.
    """

    def __init__(self, folder: Path, plan: dict[str, Any], kind: type[R], name: str) -> None:
        self._kind, self._path = kind, folder / name
        folder.mkdir(parents=True, exist_ok=True)
        # One that failed before its first answer has nothing that another plan would spoil.
        if self._path.exists() and self._path.stat().st_size == 0:
            write_json(folder / PLAN, plan)
        elif (folder / PLAN).exists():
            if difference := next(differences(read_plan(folder), json.loads(json.dumps(plan))), None):
                raise InvalidConfig(f"{folder}: holds another evaluation: {difference}: name another folder")
        elif self._path.exists():
            raise InvalidConfig(f"{folder}: holds {name} without a {PLAN}: name another folder")
        else:
            write_json(folder / PLAN, plan)
        self._path.touch()

    @staticmethod
    def alone(folder: Path) -> AbstractContextManager[None]:
        """To be the only one who writes there: two would count what both asked. Raises InvalidConfig: one does."""
        folder.mkdir(parents=True, exist_ok=True)
        return files.locked(folder / LOCK, timeout_s=0)

    def keep(self, sizes: Sequence[int]) -> int:
        """How many batches of these sizes are already there, one after the other. What follows them is cut off."""
        with self._path.open("rb") as file:
            ends = [0]
            for line in file:
                if line.endswith(b"\n"):
                    ends.append(ends[-1] + len(line))
        n_batches, n_lines = 0, 0
        for size in sizes:
            if n_lines + size > len(ends) - 1:
                break
            n_batches, n_lines = n_batches + 1, n_lines + size
        os.truncate(self._path, ends[n_lines])
        return n_batches

    def append(self, records: Sequence[R]) -> None:
        """One batch."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{record.model_dump_json()}\n" for record in records))

    def read(self) -> list[R]:
        """All of them. Raises InvalidConfig as `read_records`."""
        return read_records(self._path, self._kind)


class Log(RecordLog[Record]):
    """The answers of one evaluation."""

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        super().__init__(folder, plan, Record, PREDICTIONS)


def read_records(path: Path, kind: type[R]) -> list[R]:
    """All of a file. Raises InvalidConfig: it cannot be read, or a line is none; names file and line."""
    try:
        with path.open("rb") as file:  # a line may be cut inside a character
            return [_record(line, kind, f"{path}:{number}") for number, line in enumerate(file, start=1)]
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be read: {error.strerror}") from None


def _record(line: bytes, kind: type[R], where: str) -> R:
    try:
        return kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        why = f"{field}: {first['msg']}" if field else first["msg"]
        raise InvalidConfig(f"{where}: is not a record of this evaluation: {why}") from None


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all, whenever it is interrupted."""
    files.write(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_plan(folder: Path) -> dict[str, Any]:
    """What the evaluation in a folder was made from. Raises InvalidConfig where there is none."""
    path = folder / PLAN
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(plan, dict):
            raise ValueError("must map keys to values")
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{path}: is not the plan of an evaluation: {reason(error)}") from None
    return plan


def differences(then: Any, now: Any, name: str = "plan") -> Iterator[str]:
    """What differs between two values of JSON, in words, and where. Of a model its fingerprint counts, not its name."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in then | now:
            digest = f"{key}_fingerprint"
            if digest in then and then[digest] == now.get(digest):
                continue
            yield from differences(then.get(key), now.get(key), key)
    elif then != now:
        there, here = ("none" if value is None else json.dumps(value) for value in (then, now))
        yield f"{name} is {there} there and {here} here"
