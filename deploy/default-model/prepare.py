"""The questions that the embedded reader is trained on, each with one passage of 100 words that has its answer.

    python deploy/default-model/prepare.py DATA OUT

DATA holds questions (squad-train, nq-train, entityquestions-train and -dev) and documents (squad, nq-paragraphs,
wikipedia-intros); their sources stand in services/openbook/embedded/README.md. The index serves passages of 100 words,
so that is what the reader learns to read: 100 words of the question's paragraph, cut at random around the answer.
SQuAD's paragraphs are also kept whole. OUT/documents.jsonl.gz has all that these questions are about, OUT/encoder what
end-to-end training begins with: the embedded passage encoder, for questions.
"""

import gzip
import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from openbook.core.metrics import has_answer
from openbook.core.passages import split_words
from openbook.models.embedded import EMBEDDED
from openbook.models.encoder import load_encoder
from openbook.models.saving import save_encoder

N_WORDS = 100
MAX_WORDS = 150  # of a whole paragraph: about what the reader's 224 tokens hold
Record = dict[str, Any]


def read(path: Path) -> Iterator[Record]:
    """The lines of a file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def write(path: Path, records: Iterable[Record]) -> None:
    """One line each."""
    n_written = 0
    with gzip.GzipFile(path, "wb", mtime=0) as file:  # no time in it: equal data, equal bytes
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            n_written += 1
    print(f"{path}: {n_written} lines")


def answered(records: Iterable[Record]) -> Iterator[Record]:
    """Those that have an answer in their context."""
    return (record for record in records if has_answer(record["context"], record["answers"]))


def around_the_answer(record: Record, rng: random.Random) -> Record:
    """With 100 words of the context, among them the first occurrence of an answer."""
    words = record["context"].split()
    at = min((record["context"].find(a) for a in record["answers"] if a in record["context"]), default=0)
    before = len(record["context"][:at].split())
    latest = max(0, min(before, len(words) - N_WORDS))
    earliest = max(0, min(latest, before + 12 - N_WORDS))  # an answer has about a dozen words at most
    start = rng.randint(earliest, latest)
    return {**record, "context": " ".join(words[start : start + N_WORDS])}


def of_the_article(record: Record, articles: dict[str, str]) -> Record:
    """With that passage of the article which has the answer."""
    passages = list(split_words(articles.get(record["title"], ""), N_WORDS))
    return {**record, "context": next((p for p in passages if has_answer(p, record["answers"])), "")}


def main(data: Path, out: Path) -> None:
    """Write all files."""
    rng = random.Random(0)
    out.mkdir(parents=True, exist_ok=True)
    squad = list(read(data / "questions/squad-train.jsonl.gz"))
    write(out / "squad-paragraphs.jsonl.gz", answered(r for r in squad if len(r["context"].split()) <= MAX_WORDS))
    write(out / "squad-passages.jsonl.gz", answered(around_the_answer(r, rng) for r in squad))
    nq = read(data / "questions/nq-train.jsonl.gz")
    write(out / "nq-passages.jsonl.gz", answered(around_the_answer(r, rng) for r in nq))
    intros = list(read(data / "documents/wikipedia-intros.jsonl.gz"))
    articles = {r["title"]: r["text"] for r in intros}
    asked_about = set()
    for part in ("train", "dev"):
        questions = [of_the_article(r, articles) for r in read(data / f"questions/entityquestions-{part}.jsonl.gz")]
        write(out / f"entityquestions-{part}-passages.jsonl.gz", answered(questions))
        asked_about |= {r["title"] for r in questions}
    paragraphs = [*read(data / "documents/squad.jsonl.gz"), *read(data / "documents/nq-paragraphs.jsonl.gz")]
    save_encoder(out / "encoder", load_encoder(EMBEDDED, "passage"))
    write(out / "documents.jsonl.gz", [*paragraphs, *(r for r in intros if r["title"] in asked_about)])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
