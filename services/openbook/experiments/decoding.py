"""Section 2.5: thorough against fast decoding of RAG-Sequence, and RAG-Token, greedy and with beams."""

from statistics import median
from typing import Annotated

from pydantic import Field

from openbook.core.types import Decoding, Formulation
from openbook.evaluation.settings import EvaluationSettings
from openbook.evaluation.summary import Mean
from openbook.experiments.asking import Asked, OnProgress, Variant, ask, em
from openbook.experiments.pictures import Axes, Series, drawn
from openbook.experiments.report import Cell, Expected, Report, Table

DATA = ("squad-dev", "entityquestions-dev")
ROUNDING = 1e-3
"""Nats: what is added up in another order."""
WAYS = {
    "Sequence, thorough": (Formulation.SEQUENCE, Decoding.THOROUGH),
    "Sequence, fast": (Formulation.SEQUENCE, Decoding.FAST),
    "Token": (Formulation.TOKEN, Decoding.THOROUGH),
}

ABOUT = (
    "RAG-Sequence searches for an answer under each passage alone. Thorough decoding then asks every passage for "
    "the probability of every candidate; fast decoding takes it as 0 where the passage did not propose the "
    "candidate itself. RAG-Token is one search over the mixture. All are given the same passages; log p(y|x) is the "
    "model's own, exact for whatever answer was found, so thorough decoding can only find as probable an answer or "
    "a more probable one.",
    "Time is of generation alone, one process, in batches, the ways in turn on every batch; the median, per question.",
)


class Settings(EvaluationSettings):
    """What the experiment is told."""

    beams: tuple[Annotated[int, Field(ge=1, le=32)], ...] = (1, 4)  # 1 is greedy


def run(settings: Settings, command: str, on_progress: OnProgress) -> Report:
    """Ask in every way. Raises OpenbookError as `ask`."""
    variants = {
        (way, beams): Variant(_name(way, beams), formulation, {"decoding": decoding, "n_beams": beams})
        for beams in dict.fromkeys(settings.beams)
        for way, (formulation, decoding) in WAYS.items()
    }
    asked = ask(settings, list(variants.values()), on_progress)
    thorough = {beams: each for (way, beams), each in variants.items() if way == "Sequence, thorough"}
    rows = [_row(asked, each, thorough[beams]) for (_, beams), each in variants.items()]
    return Report(
        title="Thorough, fast, and token by token",
        about=ABOUT,
        command=command,
        made_of=asked.made_of,
        expected=[
            Expected(
                f"{_name('answers', beams)}: share where thorough's is at least as probable as fast's",
                _as_probable(asked, each, variants["Sequence, fast", beams]).value,
                1.0,
                1.0,
            )
            for beams, each in thorough.items()
        ],
        pictures=[
            (
                "Exact match, per cent, against the time a question takes",
                drawn(
                    Axes("ms per question", "exact match, per cent", joined=False),
                    [Series(each.name, [_ms(asked, each)], [asked.mean(each, em)]) for each in variants.values()],
                ),
            )
        ],
        tables=[
            Table(
                "All questions",
                ("", "exact match", "F1", "mean log p(y|x)", "ms per question", "as thorough's", "different answers"),
                rows,
                about="As thorough's: with as many beams. Different answers: of all that were given, to all questions.",
            ),
            Table(
                "Exact match by file, per cent",
                ("questions", "n", *(each.name for each in variants.values())),
                asked.rows(list(variants.values()), em),
            ),
        ],
        plan={**asked.lasting_plan, "beams": settings.beams},
        numbers={f"exact match, {each.name}": asked.mean(each, em).value for each in variants.values()},
    )


def _name(way: str, beams: int) -> str:
    return f"{way}, {'greedy' if beams == 1 else f'{beams} beams'}"


def _row(asked: Asked, variant: Variant, thorough: Variant) -> list[Cell]:
    records = [each.record for each in asked.of(variant)]
    pairs = zip(records, asked.of(thorough), strict=True)
    same = Mean.of_shares([float(one.prediction == other.record.prediction) for one, other in pairs])
    log_likelihood = sum(each.log_likelihood for each in records) / len(records)
    different = len({each.prediction for each in records})
    return [
        variant.name,
        asked.mean(variant, em),
        asked.mean(variant, lambda record: record.f1),
        f"{log_likelihood:.3f}",
        f"{_ms(asked, variant):.0f}",
        same,
        f"{different} of {len(records)}",
    ]


def _ms(asked: Asked, variant: Variant) -> float:
    return 1000 * median(each.seconds for each in asked.of(variant))


def _as_probable(asked: Asked, thorough: Variant, fast: Variant) -> Mean:
    pairs = zip(asked.of(thorough), asked.of(fast), strict=True)
    return Mean.of([float(a.record.log_likelihood >= b.record.log_likelihood - ROUNDING) for a, b in pairs])
