"""Figure 2: p(z|x,y_<=t), which passage each token of an answer rests on; exactly, by Bayes' rule."""

from collections.abc import Sequence
from itertools import chain
from math import log

import numpy as np

from openbook.core.types import Float64
from openbook.evaluation.settings import EvaluationSettings
from openbook.evaluation.summary import Mean
from openbook.experiments.asking import SEQUENCE, TOKEN, OnProgress, Variant, ask
from openbook.experiments.kept import Apart, Kept
from openbook.experiments.pictures import Axes, Series, drawn
from openbook.experiments.report import Cell, Expected, Heat, Report, Table

DATA = ("squad-dev", "entityquestions-dev")
VARIANTS = (TOKEN, SEQUENCE)
N_SHOWN = 3
LAST_TOKEN = 8
ROUNDING = 1e-6

ABOUT = (
    "Each passage gives each token of an answer a probability of its own. By Bayes' rule that says how much of the "
    "token rests on which passage. RAG-Token draws a passage anew for every token, so its posterior may wander from "
    "passage to passage within an answer; RAG-Sequence draws one for the whole answer, and its posterior gathers "
    "token by token.",
    "The heat maps show it for some answers: a row a passage, a column a token, and beside them the prior p(z|x) of "
    "retrieval and the posterior p(z|x,y) of the whole answer. The tables say what it comes to over all questions: "
    "how much weight moves to passages that hold an answer string.",
)


class Settings(EvaluationSettings):
    """What the experiment is told."""

    shown: tuple[str, ...] = ()  # questions for the heat maps; else the right answers with the most tokens


def run(settings: Settings, command: str, on_progress: OnProgress) -> Report:
    """Ask, and take the answers apart. Raises OpenbookError as `ask`."""
    asked = ask(settings, VARIANTS, on_progress, apart=True)
    if settings.shown:
        of_texts = ask(settings, VARIANTS, on_progress, settings.shown, apart=True)
        shown = list(zip(*(of_texts.of(each) for each in VARIANTS), strict=True))
    else:
        shown = _longest([asked.of(each) for each in VARIANTS])
    answers = {each: asked.of(each) for each in VARIANTS}
    moved = {each: _moved(answers[each]) for each in VARIANTS}
    rows: list[list[Cell]] = [
        [each.name, str(len(prior)), Mean.of(prior), Mean.of(posterior), _entropy(answers[each], "prior"),
         _entropy(answers[each], "posterior")]
        for each, (prior, posterior) in moved.items()
    ]  # fmt: skip
    return Report(
        title="Which passage each word rests on",
        about=ABOUT,
        command=command,
        made_of=asked.made_of,
        expected=[
            Expected("posteriors of a token add up to 1: the largest error",
                     max(_error_of_sums(of_all) for of_all in answers.values()), 0.0, ROUNDING),
            Expected("the answer's posterior is made of its tokens': the largest error",
                     max(_error_of_answers(each, of_all) for each, of_all in answers.items()), 0.0, ROUNDING),
            *(
                Expected(f"{each.name}: weight of passages with an answer, posterior beyond prior, upper end",
                         Mean.of([b - a for a, b in zip(*both, strict=True)]).high, 0.0, 1.0)
                for each, both in moved.items()
            ),
        ],
        pictures=[("Weight of the passage that weighs most, per cent, by token of the answer", _curve(answers))],
        tables=[
            *chain.from_iterable(
                (_heat(each, one) for each, one in zip(VARIANTS, of_question, strict=True)) for of_question in shown
            ),
            Table(
                "Questions of which some passages read hold an answer, and some do not",
                ("", "n", "prior of passages with an answer, per cent", "posterior of the same",
                 "entropy of the prior, nats", "of the posterior"),
                rows,
            ),
        ],
        plan=asked.lasting_plan,
        numbers={f"posterior of passages with an answer, {each.name}": Mean.of(after).value
                 for each, (_, after) in moved.items()},
    )  # fmt: skip


def _apart(kept: Kept) -> Apart:
    assert kept.apart is not None
    return kept.apart


def _longest(answers: Sequence[Sequence[Kept]]) -> list[tuple[Kept, ...]]:
    right = [of_all for of_all in zip(*answers, strict=True) if all(each.record.em for each in of_all)]
    return sorted(right, key=lambda of_all: -len(_apart(of_all[0]).tokens))[:N_SHOWN]


def _heat(variant: Variant, kept: Kept) -> Table:
    apart, record = _apart(kept), kept.record
    tokens = [token.strip() or "(end)" for token in apart.tokens]
    rows: list[list[Cell]] = [
        [title, Heat(prior), *map(Heat, of_passage), Heat(posterior)]
        for title, prior, of_passage, posterior in zip(
            apart.titles, apart.prior, _by_token(kept).T.tolist(), apart.posterior, strict=True
        )
    ]
    return Table(
        record.question,
        ("passage", "prior", *tokens, "posterior"),
        rows,
        about=f"{variant.name}: “{record.prediction}”, p(y|x) {record.probability:.3f}",
    )


def _moved(answers: Sequence[Kept]) -> tuple[list[float], list[float]]:
    """Prior and posterior weight of the passages with an answer, where some of those read have one, and some not."""
    before, after = [], []
    for each in map(_apart, answers):
        holds = np.array(each.hold_answer)
        if holds.any() and not holds.all():
            before.append(float(np.array(each.prior)[holds].sum()))
            after.append(float(np.array(each.posterior)[holds].sum()))
    return before, after


def _entropy(answers: Sequence[Kept], what: str) -> str:
    weights = [getattr(_apart(each), what) for each in answers]
    return f"{np.mean([-sum(p * log(p) for p in each if p) for each in weights]):.3f}"


def _by_token(kept: Kept) -> Float64:
    """(t, k) p(z|x,y_<=t)"""
    return np.array(_apart(kept).by_token)


def _error_of_sums(answers: Sequence[Kept]) -> float:
    return max(float(np.abs(_by_token(each).sum(axis=1) - 1).max()) for each in answers)


def _error_of_answers(variant: Variant, answers: Sequence[Kept]) -> float:
    """RAG-Sequence: the last token's is the answer's. RAG-Token: their mean is."""
    wholes = (
        (_by_token(each).mean(axis=0) if variant is TOKEN else _by_token(each)[-1], _apart(each).posterior)
        for each in answers
    )
    return max(float(np.abs(of_tokens - np.array(of_answer)).max()) for of_tokens, of_answer in wholes)


def _curve(answers: dict[Variant, list[Kept]]) -> str:
    """At 0 it is the prior's."""
    series = []
    for variant, of_all in answers.items():
        peaks = [[max(_apart(each).prior), *_by_token(each).max(axis=1).tolist()] for each in of_all]
        at = [t for t in range(LAST_TOKEN + 1) if sum(len(each) > t for each in peaks) > 1]
        series.append(Series(variant.name, at, [Mean.of([each[t] for each in peaks if len(each) > t]) for t in at]))
    ticks = range(LAST_TOKEN + 1)
    return drawn(Axes("tokens of the answer so far; 0 is the prior", "weight, per cent", ticks=ticks), series)
