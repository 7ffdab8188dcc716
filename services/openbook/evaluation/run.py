"""`openbook evaluate`: every question of some files to the system, every answer written down, then summed up.

The folder `out` holds plan.json (what is asked of what), predictions.jsonl (one `Record` a line), and at the end
summary.json, summary.md and reliability.png. Interrupted, it goes on after the last whole batch, and only with the
very same plan: the predictions are then those of a run that was never interrupted.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
from pydantic import BaseModel

from openbook.core import metrics
from openbook.core.confidence import signals
from openbook.core.fingerprint import file_digest
from openbook.core.ranking import kilt_r_precision
from openbook.core.types import Formulation, Generation, Retrieved, shown
from openbook.corpus.questions import Question
from openbook.errors import InvalidDocuments, InvalidRequest
from openbook.evaluation.judged import Judged
from openbook.evaluation.kilt import page_of, provenance_of, read
from openbook.evaluation.record import Log, Record, RecordLog, write_json
from openbook.evaluation.score import answering, is_right
from openbook.evaluation.settings import EvaluationSettings
from openbook.evaluation.summary import Result, as_json, summarise
from openbook.evaluation.system import System, opened
from openbook.evaluation.tables import as_markdown

OnProgress = Callable[[str, int, int], None]
"""Called with the file's name, how many of its questions are done and how many there are."""

Q = TypeVar("Q", Question, Judged)
R = TypeVar("R", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Batch(Generic[Q]):
    """Questions of one file that are answered together."""

    file: str
    questions: Sequence[Q]
    n_before: int  # of the file
    n_of_file: int


def evaluate(settings: EvaluationSettings, on_progress: OnProgress = lambda stage, done, total: None) -> list[Result]:
    """Ask, score, write everything to `settings.out`; one result for each file and formulation.

    Raises:
        InvalidConfig: `out` holds another evaluation.
        InvalidDocuments: a file of questions cannot be read, or holds none; gold context is asked for and not there; or
            no label is an answer in it.
        InvalidRequest: a question is too long for a model; names file and question. Nothing was asked.
        InvalidModel, InvalidSnapshot, ShardUnavailable, SnapshotMismatch: as `openbook.evaluation.system.opened`.
    """
    from openbook.evaluation.pictures import draw

    batches = [
        batch
        for path, name in zip(settings.questions, settings.names, strict=True)
        for batch in batches_of(to_ask(path, settings), name, settings.generator.max_batch)
    ]
    made_of, records = asyncio.run(_ask(settings, batches, on_progress))
    results = summarise(records, settings.k)
    write_json(settings.out / "summary.json", {"plan": made_of, "results": as_json(results)})
    (settings.out / "summary.md").write_text(as_markdown(made_of, results), encoding="utf-8")
    draw(records, settings.out / "reliability.png")
    return results


async def _ask(
    settings: EvaluationSettings, batches: Sequence[Batch[Question]], on_progress: OnProgress
) -> tuple[dict[str, Any], list[Record]]:
    async with opened(settings) as system:
        for batch in batches:
            system.check(batch.file, batch.questions)
        # Records lie by batch, then by formulation: batches of another size would end in other places.
        made_of = {**plan(settings, system), "batch": settings.generator.max_batch}

        async def answers(batch: Batch[Question]) -> list[Record]:
            found = await system.find(batch.questions)
            return [
                each.record
                for formulation in settings.formulations
                for each in await answer(system, batch.file, batch.questions, found, formulation)
            ]

        with Log.alone(settings.out):
            log = Log(settings.out, made_of)
            return made_of, await in_batches(log, batches, len(settings.formulations), answers, on_progress)


async def in_batches(
    log: RecordLog[R],
    batches: Sequence[Batch[Q]],
    n_each: int,
    answers: Callable[[Batch[Q]], Awaitable[Sequence[R]]],
    on_progress: OnProgress,
) -> list[R]:
    """Answers what is not in the log yet, `n_each` records a question; gives all of the log.

    Raises:
        InvalidRequest: as `answers`; names file and questions.
    """
    n_done = log.keep([len(batch.questions) * n_each for batch in batches])
    for batch in batches[n_done:]:
        on_progress(batch.file, batch.n_before, batch.n_of_file)
        try:
            log.append(await answers(batch))
        except InvalidRequest as error:
            first, last = batch.questions[0].id, batch.questions[-1].id
            raise InvalidRequest(f"{batch.file}, between questions {first} and {last}: {error}") from None
        on_progress(batch.file, batch.n_before + len(batch.questions), batch.n_of_file)
    return log.read()


def plan(settings: EvaluationSettings, system: System) -> dict[str, Any]:
    """All that answers depend on, of JSON."""
    digests = {name: file_digest(path) for name, path in zip(settings.names, settings.questions, strict=True)}
    asked: dict[str, Any] = {"limit": settings.limit, "seed": settings.seed, "pages": settings.pages}
    if settings.labels:
        asked["right"] = "letter for letter"  # records of former versions say otherwise
    return {"questions": digests, **asked, "formulations": list(settings.formulations), **system.describe()}


@dataclass(frozen=True, slots=True)
class Answered:
    """A question, what was found for it and generated from it, and what that is worth."""

    question: Question
    found: Retrieved
    generation: Generation
    record: Record
    seconds: float  # its part of the time in which its batch was generated


async def answer(
    system: System, file: str, questions: Sequence[Question], found: Sequence[Retrieved], formulation: Formulation
) -> list[Answered]:
    """One batch, from what was found for each, under one formulation. Raises InvalidRequest as `System.answer`."""
    begun = perf_counter()
    generated = await system.answer(questions, found, formulation)
    seconds = (perf_counter() - begun) / len(questions)
    return [
        Answered(*each, _record(file, *each, formulation, system.settings), seconds)
        for each in zip(questions, found, generated, strict=True)
    ]


def _first(holds: Iterable[bool]) -> int | None:
    """The rank, from 1, of the first that does."""
    return next((rank for rank, each in enumerate(holds, start=1) if each), None)


def _record(
    file: str,
    question: Question,
    found: Retrieved,
    generation: Generation,
    formulation: Formulation,
    settings: EvaluationSettings,
) -> Record:
    to_calibrate = not (generation.classification or settings.follow)
    prediction = dict(settings.words).get(generation.text, generation.text)
    pages = [page_of(each, settings.pages) for each in found.passages]
    wanted = frozenset[str]().union(*(sets := provenance_of(question)))
    return Record(
        file=file,
        id=question.id,
        question=question.text,
        answers=question.answers,
        answer_regex=question.answer_regex,
        formulation=formulation,
        prediction=prediction,
        em=is_right(prediction, question, is_label=bool(settings.labels)),
        f1=metrics.f1(prediction, question.answers) if question.answers else None,
        rouge_l=metrics.rouge_l(prediction, question.answers) if question.answers else None,
        log_likelihood=generation.log_likelihood,
        answer_rank=_first(map(answering(question), (each.text for each in found.passages))),
        prior_entropy=float((np.exp(generation.log_prior) * -generation.log_prior).sum()),
        passage_ids=tuple(passage.id for passage in found.passages) if found.snapshot_id else (),
        page_rank=_first(page in wanted for page in pages),
        r_precision=kilt_r_precision(list(dict.fromkeys(pages)), sets) if wanted else None,
        signals=signals(generation, found.passages[: settings.k]) if to_calibrate else (),
    )


def to_ask(path: Path, settings: EvaluationSettings) -> list[Question]:
    """The questions to ask, in the order of the file. Raises InvalidDocuments as `evaluate`."""
    if path.is_dir():
        raise InvalidDocuments(f"{path}: cannot be read: it is a folder; BEIR's are for openbook evaluate --retrieve")
    questions = list(read(path, settings.pages))
    if not questions:
        raise InvalidDocuments(f"{path}: holds no questions")
    if bare := [each.id for each in questions if not each.answers and each.answer_regex is None]:
        raise InvalidDocuments(f"{path}: question {bare[0]} has no answer")
    labels = [label for _, label in settings.words]
    if labels and not any(is_right(label, each, is_label=True) for label in labels for each in questions):
        raise InvalidDocuments(f"{path}: labels must hold the answer to one of its questions, got {shown(labels)}")
    questions = settings.draw(questions)
    if settings.context == "gold" and (bare := [question.id for question in questions if not question.context]):
        raise InvalidDocuments(f"{path}: gold context needs a context for every question, question {bare[0]} has none")
    return questions


def batches_of(questions: Sequence[Q], file: str, size: int) -> Iterator[Batch[Q]]:
    """The questions of a file, so many together."""
    for start in range(0, len(questions), size):
        yield Batch(file, questions[start : start + size], start, len(questions))
