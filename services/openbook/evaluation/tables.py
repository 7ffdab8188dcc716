"""The numbers of an evaluation as Markdown, with the conditions beside every exact match."""

from collections.abc import Iterator, Mapping, Sequence
from math import exp, isnan
from typing import Any

from openbook.evaluation.summary import HAS_ANSWER_AT, HAS_PAGE_AT, Mean, Result

Rows = Sequence[Sequence[str]]


def as_markdown(plan: Mapping[str, Any], results: Sequence[Result]) -> str:
    """How good, how worded, from which pages, how far to trust p(y|x), when it is wrong, what a threshold buys."""
    return "\n".join(
        [
            "# Evaluation\n",
            "Per cent, with 95 % bootstrap intervals over the questions.\n",
            *_table(["n", "EM", "F1", *(f"answer in top {k}" for k in HAS_ANSWER_AT), "index", "k", "decoding"]),
            *_rows(results, [[_quality(result, plan)] for result in results]),
            "\n## Answers that are sentences, and labels\n",
            *_table(["ROUGE-L", "BLEU-1", "distinct tri-grams", "label accuracy"]),
            *_rows(results, [[_wording(result, plan)] for result in results]),
            *_of_pages([result for result in results if not isnan(result.r_precision.value)]),
            "\n## How far p(y|x) can be trusted\n",
            *_table(["mean p(y\\|x)", "right", "calibration error", "AUROC"]),
            *_rows(results, [[_trust(result)] for result in results]),
            "\n## Where the answer was, and how often it was wrong\n",
            "It always answers, also when nothing that it has read holds an answer.\n",
            *_table(["answer", "n", "wrong", "median p(y\\|x) of the wrong", "wrong, and at least half sure"]),
            *_rows(results, [_places(result) for result in results]),
            "\n## Answering only when sure\n",
            *_table(["log-likelihood at least", "p(y\\|x) at least", "answered", "right of those"]),
            *_rows(results, [_cuts(result) for result in results]),
            "",
        ]
    )


def _table(titles: Sequence[str]) -> list[str]:
    titles = ["questions", "formulation", *titles]
    return [line(titles), line(["---"] * len(titles))]


def _rows(results: Sequence[Result], cells: Sequence[Rows]) -> Iterator[str]:
    for result, rows in zip(results, cells, strict=True):
        yield from (line([result.file, result.formulation, *row]) for row in rows)


def line(cells: Sequence[str]) -> str:
    """Of a table."""
    return f"| {' | '.join(cells)} |"


def _quality(result: Result, plan: Mapping[str, Any]) -> list[str]:
    means = [result.em, result.f1, *result.has_answer.values()]
    decoding = "greedy" if plan["n_beams"] == 1 else f"{plan['n_beams']} beams"
    if plan["labels"]:
        decoding = f"one of {len(plan['labels'])} labels"
    return [str(result.n), *map(percent, means), index_name(plan["index"], plan["context"]), str(plan["k"]), decoding]


def _wording(result: Result, plan: Mapping[str, Any]) -> list[str]:
    accuracy = percent(result.label_accuracy) if plan["labels"] else "–"
    return [percent(result.rouge_l), _number(result.bleu_1), _number(result.distinct_3), accuracy]


def _of_pages(results: Sequence[Result]) -> Iterator[str]:
    if results:
        yield "\n## The pages that answer, and answers that rest on them\n"
        titles = [f"page in top {k}" for k in HAS_PAGE_AT]
        yield from _table([*titles, "R-precision", "KILT-EM", "KILT-F1"])
        for each in results:
            means = [*each.has_page.values(), each.r_precision, each.kilt_em, each.kilt_f1]
            yield line([each.file, each.formulation, *map(percent, means)])


def _trust(result: Result) -> list[str]:
    return [_number(x) for x in (result.mean_probability, result.em.value, result.calibration_error, result.auroc)]


def _places(result: Result) -> Rows:
    return [
        [place, str(group.n), *map(_number, (group.wrong, group.median_probability_wrong, group.surely_wrong))]
        for place, group in result.by_place.items()
    ]


def _cuts(result: Result) -> Rows:
    return [
        [f"{cut.threshold:.2f}", *map(_number, (exp(cut.threshold), cut.answered, cut.right))] for cut in result.cuts
    ]


def percent(mean: Mean) -> str:
    """With its interval."""
    if isnan(mean.value):
        return "–"
    return f"{100 * mean.value:.1f} ({100 * mean.low:.1f}–{100 * mean.high:.1f})"


def _number(value: float) -> str:
    return "–" if isnan(value) else f"{value:.3f}"


def index_name(index: Mapping[str, Any] | None, context: str) -> str:
    """Its kind, its size and its recall, which other numbers depend on; without one, what was read in its place."""
    if index is None:
        return "none: closed book" if context == "none" else "none: gold context"
    recall = f"recall@5 {index['recall']['5']:.3f}" if index["recall"] else "recall not measured"
    return f"{index['factory']}, {index['n_passages']:,} passages, {recall}"
