"""The questions that the embedded reader is trained on, each with one passage of 100 words that has its answer.

    python deploy/default-model/prepare.py DATA OUT

DATA holds questions (squad-train and -more, nq-train and -more, entityquestions-train and -dev, qamr, fairytaleqa,
quoref, webquestions-train, fever) and documents (squad, nq-paragraphs, wikipedia-intros); their sources stand in
services/openbook/embedded/README.md. The index serves passages of 100 words, so that is what the reader learns to read:
100 words of the question's paragraph, cut at random around the answer. SQuAD's paragraphs are also kept whole, a
sentence of QAMR's stands among two of other questions, and questions without a paragraph have the first passage by BM25
that has an answer, if there is one among the best three. OUT/documents.jsonl.gz has all that SQuAD, Natural Questions
and EntityQuestions are about, OUT/encoder what end-to-end training begins with: the embedded passage encoder, for
questions.
"""

import gzip
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import bm25s

from openbook import experiments
from openbook.core.metrics import has_answer
from openbook.core.passages import split_words
from openbook.models.embedded import EMBEDDED
from openbook.models.encoder import load_encoder
from openbook.models.saving import save_encoder

N_WORDS = 100
MAX_WORDS = 150  # of a whole paragraph: about what the reader's 224 tokens hold
FEVER_KEPT_BACK = Path(experiments.__file__).with_name("data") / "fever-dev-kilt.jsonl.gz"
N_CLOZES = 60_000
SENTENCES = re.compile(r"(?<=[a-z0-9)\"'][.!?]) (?=[A-Z\"])")
SPANS = re.compile(  # dates and numbers, names of up to five words
    r"(?:January|February|March|April|May|June|July|August|September|October|November|December)(?: \d{1,2},)? \d{4}"
    r"|\d[\d,.]*\d|\d|[A-Z][\w'-]+(?: (?:(?:of|the|de|and|for|in) )?[A-Z][\w'-]+){0,4}"
)
ASKED_WITH = {"by": ["who", "what"], "in": ["where", "what"], "at": ["where"], "from": ["where", "who"], "of": ["what"]}
"""What asks for a name behind a preposition."""
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


def among_others(records: list[Record], rng: random.Random) -> Iterator[Record]:
    """With the sentences of two other questions about it, in any order: a sentence alone gives its answer away."""
    for record in records:
        sentences = [record["context"], *(rng.choice(records)["context"] for _ in range(2))]
        rng.shuffle(sentences)
        yield {**record, "context": " ".join(sentences)}


def clozes(documents: list[Record], rng: random.Random) -> Iterator[Record]:
    """A passage, and a sentence of it as a noisy question for one of its names, dates or numbers.

    The question word stands first, some words are lost and some change places (Lewis et al. 2019, "Unsupervised
    question answering by cloze translation", section 2.3): what is left to learn is where to look, and to copy.
    """
    for document in rng.sample(documents, len(documents)):
        passage = rng.choice(list(split_words(document["text"], N_WORDS)) or [""])
        sentence = rng.choice(SENTENCES.split(passage))
        spans = [
            span
            for span in SPANS.finditer(sentence)
            if span.start() > 0 and sentence.count(span[0]) == 1 and span[0] not in document["title"]
        ]
        if not spans or not 8 <= len(sentence.split()) <= 40:
            continue
        span = rng.choice(spans)
        before, after = sentence[: span.start()].split(), sentence[span.end() :].strip(" .,;:").split()
        around = before[-rng.randint(3, 10) :] + after[: rng.randint(3, 10)]
        words = [word for word in around if rng.random() > 0.1]
        places = sorted(range(len(words)), key=[i + rng.uniform(0, 2) for i in range(len(words))].__getitem__)
        question = " ".join([_asks_for(span[0], before[-1:], rng), *(words[i] for i in places)])
        yield {"question": question, "answers": [span[0]], "title": document["title"], "context": passage}


def _asks_for(span: str, before: list[str], rng: random.Random) -> str:
    if re.search(r"\b[12]\d{3}$", span):
        return rng.choice(["when", "in what year"] if len(span) == 4 else ["when", "on what date"])
    if span[0].isdigit():
        return rng.choice(["how many", "how much", "what number"])
    return rng.choice(ASKED_WITH.get("".join(before), ["who", "what", "which", "where"]))


def found(records: list[Record], documents: Iterable[Record]) -> Iterator[Record]:
    """With the first passage by BM25 that has an answer, of those for which one of the best three has."""
    passages = [
        (document["title"], passage) for document in documents for passage in split_words(document["text"], N_WORDS)
    ]
    index = bm25s.BM25(backend="numba")
    index.index(bm25s.tokenize([f"{title} {text}" for title, text in passages], stopwords="en"))
    asked = bm25s.tokenize([record["question"] for record in records], stopwords="en")
    for record, best in zip(records, index.retrieve(asked, k=3).documents, strict=True):
        for title, text in (passages[i] for i in best):
            if has_answer(text, record["answers"]) and not has_answer(record["question"], record["answers"]):
                yield {**record, "title": title, "context": text}
                break


def checked(claims: Iterable[Record], articles: dict[str, str], kept_back: Path) -> Iterator[Record]:
    """FEVER's claims with that passage of a gold article which has most of their words.

    Where nothing is enough to tell, of the article that the claim names. Claims that `openbook experiment abstractive`
    asks, and others about their articles, are left out.
    """
    asked = list(read(kept_back))
    ids = {record["id"] for record in asked}
    pages = {page["title"] for record in asked for output in record["output"] for page in output.get("provenance", [])}
    for claim in claims:
        words = claim["claim"].rstrip(".").split()
        spans = (
            " ".join(words[i : i + n]) for n in range(min(6, len(words)), 1, -1) for i in range(len(words) - n + 1)
        )
        titles = claim["pages"] or [next((span for span in spans if span in articles), "")]
        title = next((title for title in titles if title in articles), None)
        if title is not None and str(claim["id"]) not in ids and pages.isdisjoint(titles):
            text = max(split_words(articles[title], N_WORDS), key=lambda text: len(set(words) & set(text.split())))
            yield {"question": claim["claim"], "answers": [claim["label"].lower()], "title": title, "context": text}


def main(data: Path, out: Path) -> None:
    """Write all files."""
    rng = random.Random(0)
    out.mkdir(parents=True, exist_ok=True)
    squad = list(read(data / "questions/squad-train.jsonl.gz"))
    write(out / "squad-paragraphs.jsonl.gz", answered(r for r in squad if len(r["context"].split()) <= MAX_WORDS))
    write(out / "squad-passages.jsonl.gz", answered(around_the_answer(r, rng) for r in squad))
    nq = list(read(data / "questions/nq-train.jsonl.gz"))
    write(out / "nq-passages.jsonl.gz", answered(around_the_answer(r, rng) for r in nq))
    more = (*read(data / "questions/squad-more.jsonl.gz"), *read(data / "questions/quoref.jsonl.gz"))
    tales = list(read(data / "questions/fairytaleqa.jsonl.gz"))
    write(out / "more-passages.jsonl.gz", answered(around_the_answer(r, rng) for r in (*more, *tales)))
    write(out / "qamr-passages.jsonl.gz", answered(among_others(list(read(data / "questions/qamr.jsonl.gz")), rng)))
    intros = list(read(data / "documents/wikipedia-intros.jsonl.gz"))
    articles = {r["title"]: r["text"] for r in intros}
    asked_about = set()
    for part in ("train", "dev"):
        questions = [of_the_article(r, articles) for r in read(data / f"questions/entityquestions-{part}.jsonl.gz")]
        write(out / f"entityquestions-{part}-passages.jsonl.gz", answered(questions))
        asked_about |= {r["title"] for r in questions}
    claims = read(data / "questions/fever.jsonl.gz")
    write(out / "fever-passages.jsonl.gz", checked(claims, articles, FEVER_KEPT_BACK))
    paragraphs = [*read(data / "documents/squad.jsonl.gz"), *read(data / "documents/nq-paragraphs.jsonl.gz")]
    save_encoder(out / "encoder", load_encoder(EMBEDDED, "passage"))
    without = [r for part in ("nq-more", "webquestions-train") for r in read(data / f"questions/{part}.jsonl.gz")]
    write(out / "found-passages.jsonl.gz", found(without, [*paragraphs, *intros]))
    write(out / "documents.jsonl.gz", [*paragraphs, *(r for r in intros if r["title"] in asked_about)])
    again = [*squad, *squad, *more, *tales, *nq]
    write(out / "paragraphs-again.jsonl.gz", answered(around_the_answer(r, rng) for r in again))
    write(out / "clozes-passages.jsonl.gz", islice(clozes(intros, random.Random(0)), N_CLOZES))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
