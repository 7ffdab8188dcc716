"""What was found for each question, where retrieval is evaluated alone: one line each, its numbers, a TREC run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from openbook.evaluation.summary import Mean
from openbook.evaluation.tables import index_name, line, percent

RANKINGS = "rankings.jsonl"

COLUMNS = {
    "documents": ("ndcg@10", "recall@5", "recall@20", "recall@100", "mrr@10", "map@100"),
    "pages": ("r_precision", "recall@5", "recall@20", "recall@100", "ndcg@10", "mrr@10"),
    "answers": ("has_answer@1", "has_answer@5", "has_answer@20", "has_answer@100", "mrr@100"),
}
"""What the table shows of each kind of judgment; everything is in the JSON file."""


class Ranking(BaseModel):
    """What was found for a question, best first, and what it is worth."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    id: str
    question: str
    found: tuple[str, ...]  # n documents, pages or passages
    scores: tuple[float, ...]  # n, each of the best passage
    worth: dict[str, float]  # by metric


@dataclass(frozen=True, slots=True)
class RankingResult:
    """The questions of one file together."""

    file: str
    judged_by: str
    n: int
    worth: Mapping[str, Mean]  # by metric


def summarise(rankings: Sequence[Ranking], plan: Mapping[str, Any]) -> list[RankingResult]:
    """Each file of the plan, in its order."""
    results = []
    for file, of_file in plan["questions"].items():
        mine = [ranking.worth for ranking in rankings if ranking.file == file]
        worth = Mean.of_each({metric: [each[metric] for each in mine] for metric in mine[0]})
        results.append(RankingResult(file, of_file["judged by"], len(mine), worth))
    return results


def as_markdown(plan: Mapping[str, Any], results: Sequence[RankingResult]) -> str:
    """A table for each kind of judgment."""
    text = [
        "# Retrieval\n",
        "Per cent, with 95 % bootstrap intervals over the questions. "
        f"{plan['n_passages']} passages are searched for each, by {_retriever(plan)}.",
    ]
    for kind, columns in COLUMNS.items():
        if of_kind := [result for result in results if result.judged_by == kind]:
            titles = ["questions", "n", *columns, "index"]
            text += [f"\n## By {kind}\n", line(titles), line(["---"] * len(titles))]
            text += [
                line(
                    [
                        each.file,
                        str(each.n),
                        *(percent(each.worth[name]) for name in columns),
                        index_name(plan["index"], "retrieved"),
                    ]
                )
                for each in of_kind
            ]
    return "\n".join([*text, ""])


def _retriever(plan: Mapping[str, Any]) -> str:
    weight = plan["bm25_weight"]
    return f"{plan['retriever']}{'' if weight is None else f' with {weight} of BM25'}"


def as_trec(rankings: Sequence[Ranking]) -> Iterator[str]:
    """The lines of a TREC run: question, Q0, document, rank, score, name of the run. White space in names becomes `_`.

    trec_eval ranks by the scores alone, as float32, so equal ones are written a little apart, in the order found.
    """
    for ranking in rankings:
        score = np.float32(np.inf)
        for place, (name, found) in enumerate(zip(ranking.found, ranking.scores, strict=True), start=1):
            score = min(np.float32(found), np.nextafter(score, np.float32(-np.inf)))
            yield f"{_word(ranking.id)} Q0 {_word(name)} {place} {score:.9g} openbook\n"


def _word(name: str) -> str:
    return "_".join(name.split()) or "_"
