"""What is asked: questions of a file, or about the embedded corpus."""

import json
from importlib import resources
from pathlib import Path

from openbook.corpus.read import lines
from openbook.errors import InvalidDocuments

FIRST = ("who invented the telephone?", "Where was Marie Curie born?", "Which NFL team won Super Bowl 50?")


def read(path: Path | None) -> list[str]:
    """The questions of a file, in its order: JSON lines with `question`, `claim` or `input`, or else one a line;
    also gzipped.

    With no file, one about each of the embedded corpus's articles.

    Raises:
        InvalidDocuments: the file cannot be read, has no question, or a line is none; names file and line.
    """
    if path is None:
        return embedded()
    is_json = path.name.removesuffix(".gz").endswith((".jsonl", ".json"))
    stripped = ((number, line.strip()) for number, line in lines(path))
    found = [_question(path, number, line) if is_json else line for number, line in stripped if line]
    if not found:
        raise InvalidDocuments(f"{path}: must hold a question, got none")
    return found


def embedded() -> list[str]:
    """About 3,000 questions that the embedded corpus is about, those of the demo first."""
    corpus = Path(str(resources.files("openbook") / "embedded" / "corpus" / "documents.jsonl.gz"))
    return [*FIRST, *(f"who or what is {json.loads(line)['title']}?" for _, line in lines(corpus))]


def _question(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
        question = record.get("question") or record.get("claim") or record.get("input")
        question.encode()  # JSON's escapes can spell half a character
        if not question.strip():
            raise ValueError
    except (ValueError, RecursionError, AttributeError):
        raise InvalidDocuments(f"{path}:{number}: must be an object with a text `question`, got {line[:80]}") from None
    assert isinstance(question, str)
    return question
