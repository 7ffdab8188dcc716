"""Questions for which it is known what should be found, and what a search for them is worth.

Three kinds: a folder in BEIR's layout (queries.jsonl, qrels/<split>.tsv; corpus.jsonl is what the snapshot is built
from), a file of KILT's (`input`, `output` with `provenance`), and `openbook.corpus.questions`, where answers are known
and nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openbook.core import ranking as rank
from openbook.core.fingerprint import file_digest
from openbook.core.types import Passage
from openbook.corpus.questions import Question
from openbook.corpus.read import lines
from openbook.errors import InvalidDocuments
from openbook.evaluation.kilt import Pages, WithPages, page_of, provenance_of, read, records, text_of
from openbook.evaluation.score import answering
from openbook.evaluation.settings import N_RANKED, RankingSettings

CUTS = (1, 5, 10, 20, N_RANKED)
HAS_ANSWER_AT = (1, 5, 20, N_RANKED)

Values = dict[str, float]
"""Metric to value, such as `recall@5` to 0.5."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A question, what the passages found for it are called in its ranking, and what that ranking is worth.

    Passages of one name count once, at the best of their ranks; those without a name are left out.
    """

    question: Question
    name: Callable[[Passage], str | None]
    worth: Callable[[Sequence[str], Sequence[Passage]], Values]  # of the names and of all passages found, best first

    @property
    def id(self) -> str:
        """The question's."""
        return self.question.id


def read_judged(path: Path, settings: RankingSettings) -> tuple[dict[str, Any], list[Judged]]:
    """The kind and digests of what is read, and its questions that are asked, in its order.

    Raises:
        InvalidDocuments: something cannot be read, or nothing that is asked is judged; names file, line and field.
    """
    about: dict[str, Any] = {}
    if path.is_dir():
        kind, judged = "documents", settings.draw(list(_beir(path, settings.split)))
        files = {"queries": path / "queries.jsonl", "qrels": _qrels(path, settings.split)}
    else:
        questions = settings.draw(list(read(path, settings.pages)))
        if any(isinstance(each, WithPages) for each in questions):
            # Those without provenance are left out: of them it is not known what should be found.
            kind, judged = "pages", [_of_pages(each, settings.pages) for each in questions if provenance_of(each)]
            if settings.limit:
                about["drawn of"] = "all questions"  # rankings of former versions are of others
        else:
            kind, judged = "answers", [_of_answers(each) for each in questions]
        files = {"questions": path}
    if not judged:
        drawn = f" among the {settings.limit} that are drawn" if settings.limit else ""
        raise InvalidDocuments(f"{path}: holds no question of which it is known what should be found{drawn}")
    return {"judged by": kind, **about, **{name: file_digest(file) for name, file in files.items()}}, judged


def _beir(folder: Path, split: str) -> Iterator[Judged]:
    qrels, queries = _qrels(folder, split), folder / "queries.jsonl"
    judgments = _read_qrels(qrels)
    for number, record in records(queries):
        where = f"{queries}:{number}"
        of_question = judgments.pop(query := text_of(record, "_id", where), None)
        if of_question is not None:
            yield _of_documents(Question(query, text_of(record, "text", where)), of_question)
    if judgments:
        raise InvalidDocuments(f"{qrels}: query {next(iter(judgments))!r} is not in {queries.name}")


def _qrels(folder: Path, split: str) -> Path:
    return folder / "qrels" / f"{split}.tsv"


def _read_qrels(path: Path) -> dict[str, dict[str, int]]:
    judgments: dict[str, dict[str, int]] = {}
    for number, line in lines(path):
        cells = line.rstrip("\r\n").split("\t")
        if cells == [""] or (number == 1 and cells[-1] == "score"):
            continue
        try:
            query, document, relevance = cells
            judgments.setdefault(query, {})[document] = int(relevance)
        except ValueError:
            raise InvalidDocuments(
                f"{path}:{number}: must be query, document and a whole number with tabs between, got {line.rstrip()!r}"
            ) from None
    return judgments


def _of_documents(question: Question, judgments: rank.Judgments) -> Judged:
    # A question may be a document of the corpus too (ArguAna): as in BEIR it does not find itself.
    return Judged(
        question,
        name=lambda passage: passage.document_id if passage.document_id != question.id else None,
        worth=lambda names, _: {
            **_by_judgments(names, judgments),
            "r_precision": rank.r_precision(names, judgments),
            **{f"precision@{k}": rank.precision(names, judgments, k) for k in CUTS},
            **{f"recall@{k}": rank.recall(names, judgments, k) for k in CUTS},
        },
    )


def _by_judgments(names: Sequence[str], judgments: rank.Judgments) -> Values:
    return {
        **{f"ndcg@{k}": rank.ndcg(names, judgments, k) for k in CUTS},
        **{f"mrr@{k}": rank.reciprocal_rank(names, judgments, k) for k in CUTS},
        **{f"success@{k}": rank.success(names, judgments, k) for k in CUTS},
        f"map@{N_RANKED}": rank.average_precision(names, judgments, N_RANKED),
    }


def _of_pages(question: Question, pages: Pages) -> Judged:
    sets = provenance_of(question)
    judgments = dict.fromkeys(sorted(set().union(*sets)), 1)
    return Judged(
        question,
        name=lambda passage: page_of(passage, pages),
        worth=lambda names, _: {
            **_by_judgments(names, judgments),
            "r_precision": rank.kilt_r_precision(names, sets),
            **{f"recall@{k}": rank.kilt_recall(names, sets, k) for k in CUTS},
        },
    )


def _of_answers(question: Question) -> Judged:
    def worth(_: Sequence[str], passages: Sequence[Passage]) -> Values:
        has_answer = answering(question)
        holding = (at for at, each in enumerate(passages[:N_RANKED], start=1) if has_answer(each.text))
        first = next(holding, None)
        return {
            **{f"has_answer@{k}": float(first is not None and first <= k) for k in HAS_ANSWER_AT},
            f"mrr@{N_RANKED}": 1.0 / first if first else 0.0,
        }

    return Judged(question, name=lambda passage: str(passage.id), worth=worth)
