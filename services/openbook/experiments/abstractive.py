"""Table 2: abstractive answers, generated questions, claims checked: over KILT's files, or any others."""

from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

from openbook.core.answerability import q_bleu_1
from openbook.core.metrics import bleu_1, label_accuracy
from openbook.core.types import shown
from openbook.errors import InvalidDocuments
from openbook.evaluation.record import Record
from openbook.evaluation.run import to_ask
from openbook.evaluation.settings import EvaluationSettings
from openbook.evaluation.summary import HAS_PAGE_AT, Mean
from openbook.experiments.asking import CLOSED_BOOK, SEQUENCE, TOKEN, Asked, OnProgress, Variant, ask
from openbook.experiments.report import Cell, Expected, Report, Table, share

DATA = ("fever-dev-kilt", "squad-dev")
VARIANTS = (CLOSED_BOOK, TOKEN, SEQUENCE)
NOT_ENOUGH = "NOT ENOUGH INFO"
LABELS = ("SUPPORTS", "REFUTES", NOT_ENOUGH)
LEAST_FOUND = 0.5
"""Of claims whose gold articles are in the snapshot; the paper found 71 % at 1, and 90 % at 10."""

ABOUT = (
    "Files whose answers are all labels, FEVER's if no others are given, are claims to be checked: the answer is the "
    f"most probable label, of all, and without {NOT_ENOUGH} for claims that can be decided. A gold article is found "
    "if a passage of it is among the first 1, or 10. All other files are texts to be written: answers in sentences "
    "(MS MARCO) are judged by BLEU-1 and ROUGE-L, generated questions (Jeopardy) by BLEU-1 and Q-BLEU-1, which asks "
    "whether the question can be answered.",
    "The files that ship are a sample of FEVER's claims and one of SQuAD. The embedded reader learned FEVER's labels "
    "beside questions with short answers, and no sentences: what passages bring it is the difference to the closed "
    "book. Bring MS MARCO, Jeopardy and a model trained on them for the rest of the table.",
)
PAPER = (
    ("state of the art then", "–", "–", "49.8", "49.9", "76.8", "92.2"),
    ("BART, closed book", "15.1", "19.7", "38.2", "41.6", "64.0", "81.1"),
    (TOKEN.name, "17.3", "22.2", "40.1", "41.5", "72.5", "89.5"),
    (SEQUENCE.name, "14.7", "21.4", "40.8", "44.2", "72.5", "89.5"),
)


class Settings(EvaluationSettings):
    """What the experiment is told."""

    labels: tuple[str, ...] = LABELS


def run(settings: Settings, command: str, on_progress: OnProgress) -> Report:
    """Ask every file in its own way. Raises OpenbookError as `ask`."""
    texts, claims = [], []
    ways = _ways(settings)
    of_claims = with_claims(settings)
    for path in settings.questions:
        of_file = settings.model_copy(update={"questions": (path,), "labels": ()})
        if path in of_claims:
            claims.append(ask(of_file, [each for way in ways.values() for each in way], on_progress))
        else:
            texts.append(ask(of_file, VARIANTS, on_progress))
    everything = [*claims, *texts]
    knowing = [each for each in everything if _knows_pages(each)]
    return Report(
        title="Abstractive answers, questions, claims",
        about=ABOUT,
        command=command,
        made_of=list(dict.fromkeys(row for each in everything for row in each.made_of)),
        expected=[
            Expected(
                f"{each.files[0]}: a gold article in the first {HAS_PAGE_AT[-1]}",
                _mean(each, _page_at(HAS_PAGE_AT[-1])).value,
                LEAST_FOUND,
                1.0,
            )
            for each in knowing
        ],
        tables=[
            *_if_any(
                "Label accuracy, per cent",
                ("claims", "of", "n", *(each.name for each in VARIANTS)),
                [_checked(each, f"{of} labels", way) for each in claims for of, way in ways.items()],
                f"Fewer labels: claims that can be decided, and no {NOT_ENOUGH} to choose." if len(ways) > 1 else "",
            ),
            *_if_any(
                "Gold articles, per cent of the questions that have one",
                ("questions", *(f"among the first {k}" for k in HAS_PAGE_AT), "R-precision"),
                [
                    [each.files[0], *(_mean(each, _page_at(k)) for k in HAS_PAGE_AT), _mean(each, _r_precision)]
                    for each in knowing
                ],
                "In the paper 71 and 90 of FEVER's claims, out of all of Wikipedia.",
            ),
            *_if_any(
                "What was written, per cent",
                ("questions", "by", "BLEU-1", "ROUGE-L", "Q-BLEU-1"),
                [_written(each, one) for each in texts for one in VARIANTS],
                "Q-BLEU-1 means something where questions are written.",
            ),
            Table(
                "The paper's Table 2",
                ("", "Jeopardy B-1", "QB-1", "MS MARCO R-L", "B-1", "FEVER 3-way", "2-way"),
                PAPER,
            ),
        ],
        plan={
            **{each.files[0]: each.lasting_plan for each in everything},
            **({"labels": list(settings.labels)} if settings.labels != LABELS else {}),
        },
        numbers={
            **{f"label accuracy, {each.files[0]}, {one.name}": each.mean(one, _label).value
               for each in claims for way in ways.values() for one in way},
            **{f"gold article in the first {k}, {each.files[0]}": _mean(each, _page_at(k)).value
               for each in knowing for k in HAS_PAGE_AT},
            **{f"ROUGE-L, {each.files[0]}, {one.name}": each.mean(one, _rouge_l).value
               for each in texts for one in VARIANTS},
        },
    )  # fmt: skip


def with_claims(settings: Settings) -> list[Path]:
    """Files whose answers are all labels.

    Raises:
        InvalidDocuments: labels were given, and there is no such file; or as `to_ask`.
    """
    labels = [label for _, label in settings.words]
    without = settings.model_copy(update={"labels": ()})  # some files are asked without
    found = [
        path
        for path in settings.questions
        if all(each.answers and set(each.answers) <= set(labels) for each in to_ask(path, without))
    ]
    if "labels" in settings.model_fields_set and not found:
        raise InvalidDocuments(f"labels must hold all answers of one of the files, got {shown(labels)}")
    return found


def _ways(settings: Settings) -> dict[str, list[Variant]]:
    """By how many labels there are to choose from: all, and those of claims that can be decided, if they are fewer."""
    decided = tuple(each for each in settings.labels if each.partition("=")[0] != NOT_ENOUGH)
    of_all = [Variant(each.name, each.formulation, {**each.changes, "labels": settings.labels}) for each in VARIANTS]
    if decided in (settings.labels, ()):
        return {_count(settings.labels): of_all}
    n = _count(decided)
    of_decided = [
        Variant(f"{each.name}, of {n}", each.formulation, {**each.changes, "labels": decided}, lacks=NOT_ENOUGH)
        for each in VARIANTS
    ]
    return {_count(settings.labels): of_all, n: of_decided}


def _count(labels: Sequence[str]) -> str:
    return {2: "two", 3: "three"}.get(len(labels), str(len(labels)))


def _if_any(name: str, titles: Sequence[str], rows: list[list[Cell]], about: str = "") -> list[Table]:
    return [Table(name, titles, rows, about=about)] if rows else []


def _checked(asked: Asked, of: str, ways: Sequence[Variant]) -> list[Cell]:
    n = len(asked.values(ways[0], _label))
    return [asked.files[0], of, str(n), *(asked.mean(each, _label) for each in ways)]


def _written(asked: Asked, variant: Variant) -> list[Cell]:
    records = [each.record for each in asked.of(variant) if each.record.answers]
    of_all = bleu_1([each.prediction for each in records], [each.answers for each in records])
    return [
        asked.files[0], variant.name, share(of_all), asked.mean(variant, _rouge_l), asked.mean(variant, _q_bleu_1)
    ]  # fmt: skip


def _mean(asked: Asked, worth: Callable[[Record], float | None]) -> Mean:
    """Of what does not depend on the answer."""
    return asked.mean(asked.variants[-1], worth)


def _knows_pages(asked: Asked) -> bool:
    return any(each.record.r_precision is not None for each in asked.of(asked.variants[-1]))


def _label(record: Record) -> float | None:
    return float(label_accuracy(record.prediction, record.answers))


def _page_at(k: int) -> Callable[[Record], float | None]:
    return lambda record: None if record.r_precision is None else float((record.page_rank or inf) <= k)


def _r_precision(record: Record) -> float | None:
    return record.r_precision


def _rouge_l(record: Record) -> float | None:
    return record.rouge_l


def _q_bleu_1(record: Record) -> float | None:
    return q_bleu_1(record.prediction, record.answers) if record.answers else None
