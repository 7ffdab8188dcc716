"""Several configurations of one system, asked the same questions in turn: what most experiments have in common."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from openbook.config import EncoderSettings
from openbook.core.fingerprint import json_digest
from openbook.core.types import Formulation, Retrieved
from openbook.corpus.build import build_corpus, embedded_documents
from openbook.corpus.questions import Question
from openbook.evaluation.record import Record, RecordLog
from openbook.evaluation.run import Batch, answer, batches_of, in_batches, plan, to_ask
from openbook.evaluation.settings import EvaluationSettings
from openbook.evaluation.summary import Mean
from openbook.evaluation.system import System, opened
from openbook.experiments.kept import ANSWERS, Kept, folder_of
from openbook.experiments.report import Cell

SNAPSHOT = Path("var/demo/snapshot")
"""Of the embedded corpus, where `openbook demo` keeps it too."""
OPEN_DOMAIN = ("squad-dev", "entityquestions-dev", "webquestions-test", "curatedtrec-test")
"""Samples that ship with openbook."""

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, eq=False)  # by identity: so it is a key
class Variant:
    """One configuration: how passages are marginalised out, and what differs from the settings of all."""

    name: str
    formulation: Formulation
    changes: Mapping[str, Any] = field(default_factory=dict)  # fields of `EvaluationSettings`
    lacks: str | None = None  # questions with this answer do not count


SEQUENCE = Variant("RAG-Sequence", Formulation.SEQUENCE)
TOKEN = Variant("RAG-Token", Formulation.TOKEN)
CLOSED_BOOK = Variant("closed book", Formulation.SEQUENCE, {"context": "none"})
"""The same generator, and a passage without words."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What all variants answered to all questions."""

    plan: Mapping[str, Any]  # see `openbook.evaluation.run.plan`
    answers: Mapping[tuple[str, Variant], Sequence[Kept]]  # by file

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files of questions, in their order."""
        return tuple(dict.fromkeys(file for file, _ in self.answers))

    def of(self, variant: Variant, file: str | None = None) -> list[Kept]:
        """Of one file, or of all in their order."""
        files = self.files if file is None else (file,)
        return [each for name in files for each in self.answers[name, variant]]

    def mean(self, variant: Variant, worth: Callable[[Record], float | None], file: str | None = None) -> Mean:
        """Over the questions of which it is known."""
        return Mean.of_shares(self.values(variant, worth, file))

    def values(self, variant: Variant, worth: Callable[[Record], float | None], file: str | None = None) -> list[float]:
        """Of the questions of which it is known."""
        counted = (each.record for each in self.of(variant, file) if variant.lacks not in each.record.answers)
        return [value for value in map(worth, counted) if value is not None]

    def difference(self, one: Variant, other: Variant, worth: Callable[[Record], float]) -> Mean:
        """Over all questions, one minus the other of the same question."""
        return difference(self.of(one), self.of(other), worth)

    @property
    def variants(self) -> tuple[Variant, ...]:
        """In their order."""
        return tuple(dict.fromkeys(variant for _, variant in self.answers))

    def rows(self, variants: Sequence[Variant], worth: Callable[[Record], float | None]) -> list[list[Cell]]:
        """Of a table: a file, how many of its questions count, the mean of each variant; last all files together."""
        files: list[str | None] = [*self.files, *([None] if len(self.files) > 1 else [])]
        return [
            [
                file or "all",
                str(len(self.values(variants[0], worth, file))),
                *(self.mean(variant, worth, file) for variant in variants),
            ]
            for file in files
        ]

    def joined(self, other: "Asked") -> "Asked":
        """With the answers of other variants to the same questions."""
        return replace(self, answers={**self.answers, **other.answers})

    @property
    def made_of(self) -> list[tuple[str, str]]:
        """The plan in words, for a page."""
        index = self.plan["index"] or {}
        rows = [(file, f"sha256 {found}") for file, found in self.plan["questions"].items()]
        models = ("encoder", "encoder_fingerprint", "generator", "generator_fingerprint", "dtype")
        told = ("limit", "seed", *models, "retriever", "k", "n_beams", "decoding", "max_new_tokens")
        differ = {name for each in self.variants for name in each.changes}
        rows += [(name.replace("_", " "), str(self.plan[name])) for name in told if name not in differ]
        rows += [(f"index: {name}".replace("_", " "), str(value)) for name, value in index.items()]
        return [*rows, ("intervals", "95 %: Wilson's of shares, bootstrap over the questions of other means")]

    @property
    def lasting_plan(self) -> dict[str, Any]:
        """What the numbers depend on wherever it runs: no bits of one machine's vectors."""
        index = {key: value for key, value in self.plan["index"].items() if key in ("n_passages", "factory")}
        return {**self.plan, "index": index}


def difference(ones: Sequence[Kept], others: Sequence[Kept], worth: Callable[[Record], float]) -> Mean:
    """Over answers to the same questions, one minus the other."""
    return Mean.of([worth(a.record) - worth(b.record) for a, b in zip(ones, others, strict=True)])


def ask(
    settings: EvaluationSettings,
    variants: Sequence[Variant],
    on_progress: OnProgress,
    texts: Sequence[str] = (),
    apart: bool = False,
) -> Asked:
    """Every question of every file to every variant; those that search alike share what was found.

    With `texts` these are asked instead, whose answers nobody knows. `apart` keeps what an answer is made of. What is
    answered lies in a folder beside the page, `settings.out`: interrupted, the same call goes on after the last batch.

    Raises:
        InvalidConfig: another process asks for the same page.
        OpenbookError: as `openbook.evaluation.run.evaluate`.
    """
    files = {name: to_ask(path, settings) for path, name in zip(settings.questions, settings.names, strict=True)}
    if texts:
        files = {"asked": [Question(str(number), text) for number, text in enumerate(texts)]}
    batches = [
        batch for file, asked in files.items() for batch in batches_of(asked, file, settings.generator.max_batch)
    ]
    return asyncio.run(_ask(settings, variants, batches, on_progress, list(texts), apart))


async def _ask(
    settings: EvaluationSettings,
    variants: Sequence[Variant],
    batches: Sequence[Batch[Question]],
    on_progress: OnProgress,
    texts: Sequence[str],
    apart: bool,
) -> Asked:
    async with opened(settings) as system:
        systems = [replace(system, settings=settings.model_copy(update=dict(each.changes))) for each in variants]
        for batch in batches:
            for each in {_search(each): each for each in systems}.values():
                each.check(batch.file, batch.questions)

        async def answers(batch: Batch[Question]) -> list[Kept]:
            found = await _found(systems, batch.questions)
            return [
                Kept.of(each, apart)
                for variant, changed, of_variant in zip(variants, systems, found, strict=True)
                for each in await answer(changed, batch.file, batch.questions, of_variant, variant.formulation)
            ]

        made_of = plan(settings, system)
        ways = [[each.name, each.formulation, dict(each.changes)] for each in variants]
        asked = {**made_of, "batch": settings.generator.max_batch, "variants": ways, "texts": texts, "apart": apart}
        folder = folder_of(settings.out)
        with RecordLog.alone(folder):
            log = RecordLog(folder / json_digest(asked)[:16], asked, Kept, ANSWERS)
            kept = iter(await in_batches(log, batches, len(variants), answers, on_progress))
    by_variant: dict[tuple[str, Variant], list[Kept]] = {}
    for batch in batches:  # as they were written
        for variant in variants:
            by_variant.setdefault((batch.file, variant), []).extend(islice(kept, len(batch.questions)))
    return Asked(made_of, by_variant)


async def _found(systems: Sequence[System], questions: Sequence[Question]) -> list[list[Retrieved]]:
    """For each system; those that search alike, so that one ranking begins with the other, read from one."""
    found: dict[tuple[Any, ...], list[Retrieved]] = {}
    for each in systems:
        if (key := _search(each)) not in found:
            k = max(other.settings.k for other in systems if _search(other) == key)
            widest = replace(each, settings=each.settings.model_copy(update={"k": k}))
            found[key] = await widest.find(questions)
    return [found[_search(each)] for each in systems]


def _search(system: System) -> tuple[Any, ...]:
    settings = system.settings
    return settings.context, settings.retriever, settings.bm25_weight, None if system.ranks_alike else settings.k


def shipped(*names: str) -> list[Path]:
    """Files of questions that come with openbook, see `experiments/data/README.md`."""
    folder = Path(str(resources.files("openbook") / "experiments/data"))
    return [folder / f"{name}.jsonl.gz" for name in names]


def embedded_snapshot(on_progress: OnProgress) -> None:
    """Build the embedded corpus at `SNAPSHOT`, unless it stands. Raises OpenbookError as `build_corpus`."""
    if not SNAPSHOT.exists():
        build_corpus(embedded_documents(), SNAPSHOT, EncoderSettings(dtype="auto"), 2, "Flat", on_progress=on_progress)


def em(record: Record) -> float:
    """Whether it is right."""
    return float(record.em)


def found_at(k: int) -> Callable[[Record], float]:
    """Whether one of the first k passages holds an answer."""
    return lambda record: float(record.has_answer_at(k))
