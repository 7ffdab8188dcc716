"""Figure 3: more passages at test time: exact match of both formulations, and recall of the retrievers, against k."""

from typing import Annotated

from pydantic import Field

from openbook.core.types import Formulation, RetrieverKind
from openbook.evaluation.settings import EvaluationSettings
from openbook.experiments.asking import Asked, OnProgress, Variant, ask, em, found_at
from openbook.experiments.pictures import Axes, Series, drawn
from openbook.experiments.report import Cell, Expected, Report, Table

DATA = ("squad-dev", "entityquestions-dev")
NAMES = {Formulation.SEQUENCE: "RAG-Sequence", Formulation.TOKEN: "RAG-Token"}
RETRIEVERS = {RetrieverKind.BM25: "BM25", RetrieverKind.DENSE: "dense", RetrieverKind.HYBRID: "hybrid, by rank"}

ABOUT = (
    "Answers from the first k passages that are found for a question, for several k: the generator was trained "
    "with one number of passages and reads another. In the paper RAG-Sequence gains with every passage more, while "
    "RAG-Token is best at ten.",
    "The middle picture of the paper's figure stands beside it: how often an answer is among the first k, by "
    "retriever.",
)


class Settings(EvaluationSettings):
    """What the experiment is told."""

    ks: Annotated[tuple[Annotated[int, Field(ge=1, le=100)], ...], Field(min_length=2)] = (1, 2, 5, 10, 20)


def run(settings: Settings, command: str, on_progress: OnProgress) -> Report:
    """Ask with every k. Raises OpenbookError as `ask`; the snapshot needs an index of words."""
    ks = sorted(set(settings.ks))
    settings = settings.model_copy(update={"n_searched": ks[-1]})
    of_k = {(kind, k): Variant(f"{name}, k = {k}", kind, {"k": k}) for kind, name in NAMES.items() for k in ks}
    # Of the retrievers that nothing is read of but their ranking, one passage is: that is cheap.
    searching = {
        kind: Variant(name, Formulation.SEQUENCE, {"retriever": kind, "k": 1}) for kind, name in RETRIEVERS.items()
    }
    asked = ask(settings, [*of_k.values(), *searching.values()], on_progress)
    worth = (("Exact match", em), ("F1", lambda record: record.f1 if record.f1 is not None else em(record)))
    pictures = [
        (
            f"{name} against the passages read, all questions, per cent",
            drawn(
                Axes("passages read, k", f"{name.lower()}, per cent", log_x=True, ticks=ks),
                [Series(NAMES[kind], ks, [asked.mean(of_k[kind, k], of) for k in ks]) for kind in NAMES],
            ),
        )
        for name, of in worth
    ]
    pictures.append(("How often an answer stands in the first k passages, per cent", _recall(asked, searching, ks)))
    first, last = of_k[Formulation.SEQUENCE, ks[0]], of_k[Formulation.SEQUENCE, ks[-1]]
    rows: list[list[Cell]] = [
        [
            str(k),
            *(asked.mean(of_k[kind, k], of) for kind in NAMES for _, of in worth),
            asked.mean(of_k[Formulation.SEQUENCE, k], found_at(k)),
        ]
        for k in ks
    ]
    read = [f"{name}, {what}" for name in NAMES.values() for what, _ in worth]
    return Report(
        title="More passages",
        about=ABOUT,
        command=command,
        made_of=asked.made_of,
        expected=[
            Expected(
                f"RAG-Sequence's exact match from {ks[-1]} passages beyond {ks[0]}, upper end of the difference",
                asked.difference(last, first, em).high,
                0.0,
                1.0,
            ),
            Expected(
                f"an answer in the first {ks[-1]} more often than in the first {ks[0]}",
                asked.mean(first, found_at(ks[-1])).value - asked.mean(first, found_at(ks[0])).value,
                0.0,
                1.0,
            ),
        ],
        pictures=pictures,
        tables=[
            Table("All questions, per cent", ("k", *read, "an answer in the first k"), rows),
            *(
                Table(
                    f"Exact match by file, {NAMES[kind]}, per cent",
                    ("questions", "n", *(f"k = {k}" for k in ks)),
                    asked.rows([of_k[kind, k] for k in ks], em),
                )
                for kind in NAMES
            ),
        ],
        plan={**asked.lasting_plan, "ks": ks},
        numbers={f"exact match, {each.name}": asked.mean(each, em).value for each in of_k.values()},
    )


def _recall(asked: Asked, searching: dict[RetrieverKind, Variant], ks: list[int]) -> str:
    series = [Series(each.name, ks, [asked.mean(each, found_at(k)) for k in ks]) for each in searching.values()]
    return drawn(Axes("passages found, k", "questions, per cent", log_x=True, ticks=ks), series)
