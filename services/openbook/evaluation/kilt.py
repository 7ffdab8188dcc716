"""Questions of KILT's files (Petroni et al. 2021): answers and the pages that support them; or of any other file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from openbook.core.json_text import LongNumber, read_json
from openbook.core.types import Passage
from openbook.corpus.questions import Question, check_whole, id_of, read_questions
from openbook.corpus.read import lines
from openbook.errors import InvalidDocuments

Pages = Literal["id", "title"]
"""What KILT's pages are called by: they are a snapshot's documents of this id, or of this title."""
KEYS = {"id": "wikipedia_id", "title": "title"}


@dataclass(frozen=True, slots=True)
class WithPages(Question):
    """A question of which it is known where its answer stands."""

    provenance: tuple[frozenset[str], ...] = ()  # sets of pages that support an answer together, none of them empty


def read(path: Path, pages: Pages | None) -> Iterator[WithPages | Question]:
    """The questions of a file of either kind, in its order. Of KILT's some may have no answer, or no provenance;
    with `pages` None it is not read.

    Raises:
        InvalidDocuments: the file cannot be read, or a line is not a question; names file, line and field.
    """
    first = next(records(path), None)
    if path.is_fifo():  # as the shell's <(...): once more, it is empty
        raise InvalidDocuments(f"{path}: is a pipe, and questions are read more than once: write them to a file first")
    if first is None or "input" not in first[1]:
        yield from read_questions(path)
        return
    for number, record in records(path):
        where, outputs, key = f"{path}:{number}", record.get("output", []), KEYS[pages] if pages else None
        try:
            answers = [output["answer"] for output in outputs if (output.get("answer") or "").strip()]
            told = [output.get("provenance", ()) if key else () for output in outputs]
            sets = [{str(page[key]).strip() for page in each} for each in told]
        except (AttributeError, KeyError, TypeError):
            wanted = "a list of objects with an answer" + (f", whose provenance has {key}" if key else "")
            raise InvalidDocuments(f"{where}: output must be {wanted}, got {outputs!r:.200}") from None
        _check_whole("".join(answers), "output", where)
        provenance = tuple(frozenset(each) for each in sets if each)
        name, text = id_of(record, number), text_of(record, "input", where)
        _check_whole(name, "id", where)
        yield WithPages(name, text, tuple(dict.fromkeys(answers)), provenance=provenance)


def provenance_of(question: Question) -> tuple[frozenset[str], ...]:
    """None where no page is known."""
    return question.provenance if isinstance(question, WithPages) else ()


def page_of(passage: Passage, pages: Pages) -> str:
    """What the page of a passage is called."""
    return passage.document_id if pages == "id" else passage.title


def records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines with their lines' numbers, from 1. Raises InvalidDocuments."""
    for number, line in lines(path):
        if line.strip():
            try:
                record = read_json(line)
            except LongNumber as error:
                raise InvalidDocuments(f"{path}:{number}: {error}") from None
            except (ValueError, RecursionError) as error:
                raise InvalidDocuments(f"{path}:{number}: not JSON: {error}") from None
            if not isinstance(record, dict):
                raise InvalidDocuments(f"{path}:{number}: must be an object, got {line.strip()!r:.80}")
            yield number, record


def text_of(record: dict[str, Any], field: str, where: str) -> str:
    """A field that must be there. Raises InvalidDocuments."""
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise InvalidDocuments(f"{where}: {field} must be a string that is not empty, got {value!r:.80}")
    _check_whole(value, field, where)
    return value


def _check_whole(text: str, field: str, where: str) -> None:
    try:
        check_whole(text, field)
    except ValueError as error:
        raise InvalidDocuments(f"{where}: {error}") from None
