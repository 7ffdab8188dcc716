"""Replacing the memory (Lewis et al. 2020, section 4.5): the answers change with what is published, and nothing else.

Two snapshots of who leads which country, at two dates, are published to the same running index servers, one after the
other and back again. The same questions, about offices that changed hands, are asked of each, by the same models.
"""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from openbook.config import (
    EncoderSettings,
    GeneratorSettings,
    IndexClientSettings,
    IndexServerSettings,
    Positive,
    Section,
)
from openbook.core.types import Formulation
from openbook.corpus.build import build_corpus
from openbook.corpus.questions import Question, drawn
from openbook.errors import InvalidDocuments
from openbook.evaluation.score import is_right
from openbook.evaluation.settings import EvaluationSettings
from openbook.evaluation.summary import Mean
from openbook.evaluation.system import PATIENCE_S, System, opened
from openbook.experiments.asking import OnProgress
from openbook.experiments.leaders import DATES, Changed, changed, documents, read_leaders, shipped
from openbook.experiments.report import Cell, Expected, Report, Table, digest
from openbook.index.client.publish import publish
from openbook.index.disk.snapshot import Snapshot
from openbook.index.server.server import IndexServer

N_SHARDS = 2
PAPER = ("70 %", "4 %", "12 %", "68 %")
MATCHED, MISMATCHED = (0.70, 1.0), (0.0, 0.05)
"""Where accuracies are expected."""


class MemorySettings(Section):
    """What the experiment is told."""

    before: Path = shipped(DATES[0])  # leaders at the first date: see `openbook.experiments.leaders`
    after: Path = shipped(DATES[1])  # and at the second
    limit: Positive | None = None  # of the offices that changed hands, so many, drawn with the seed
    seed: Annotated[int, Field(ge=0)] = 0
    encoder: EncoderSettings = EncoderSettings()
    generator: GeneratorSettings = GeneratorSettings()
    k: Annotated[int, Field(ge=1, le=100)] = 5
    formulation: Formulation = Formulation.SEQUENCE
    n_beams: Positive = 1


@dataclass(frozen=True, slots=True)
class Asked:
    """What one memory said."""

    memory: str
    snapshot_id: str
    answers: list[str]  # of each question


def run(settings: MemorySettings, command: str, on_progress: OnProgress = lambda stage, done, total: None) -> Report:
    """Build both snapshots, serve the first, ask, publish the second, ask, publish the first again, ask.

    Raises:
        InvalidDocuments: a file cannot be read, or no office changed hands between them.
        OpenbookError: as `build_corpus`, `opened` and `publish`.
    """
    before, after = read_leaders(settings.before), read_leaders(settings.after)
    offices = changed(before, after)
    if not offices:
        raise InvalidDocuments(f"no office changes hands between {settings.before} and {settings.after}")
    offices = drawn(offices, settings.limit, settings.seed)
    with tempfile.TemporaryDirectory(prefix="openbook-memory-") as folder:
        work = Path(folder)
        snapshots = []
        for name, leaders in (("before", before), ("after", after)):
            lines = (json.dumps(document, ensure_ascii=False) for document in documents(leaders))
            (work / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
            build_corpus(work / f"{name}.jsonl", work / name, settings.encoder, N_SHARDS, "Flat", bm25=False,
                         on_progress=on_progress)  # fmt: skip
            snapshots.append(work / name)
        asked, system = asyncio.run(_ask_all(settings, work, snapshots, offices, on_progress))
    return _report(settings, command, offices, asked, system)


async def _ask_all(
    settings: MemorySettings, work: Path, snapshots: Sequence[Path], offices: Sequence[Changed], on_progress: OnProgress
) -> tuple[list[Asked], dict[str, str]]:
    """What each memory says, in the order of their publications: the first, the second, the first again."""
    questions = [Question(str(number), each.question, each.before.answers) for number, each in enumerate(offices)]
    listed = work / "questions.jsonl"
    listed.write_text("".join(json.dumps({"question": each.text, "answers": ["?"]}) + "\n" for each in questions))
    with ExitStack() as stack:
        servers = [
            stack.enter_context(IndexServer(IndexServerSettings(snapshot=snapshots[0], shard=shard)))
            for shard in range(N_SHARDS)
        ]
        index = IndexClientSettings(addresses=tuple(each.address for each in servers), timeout_s=PATIENCE_S)
        evaluation = EvaluationSettings(
            questions=(listed,),
            out=work,
            index=index,
            encoder=settings.encoder,
            generator=settings.generator,
            k=settings.k,
            formulations=(settings.formulation,),
            n_beams=settings.n_beams,
        )
        async with opened(evaluation) as system:
            asked: list[Asked] = []
            for name, snapshot in zip(("before", "after", "before, again"), [*snapshots, snapshots[0]], strict=True):
                if asked:
                    await publish(snapshot, index)
                asked.append(await _ask(system, name, snapshot, questions, settings, on_progress))
            described = {key: str(value) for key, value in system.describe().items()}
    return asked, described


async def _ask(
    system: System,
    memory: str,
    snapshot: Path,
    questions: Sequence[Question],
    settings: MemorySettings,
    on_progress: OnProgress,
) -> Asked:
    """Every passage that is read is of this snapshot, or `Library.find` raises."""
    assert system.library is not None
    held = Snapshot.open(snapshot).manifest.snapshot_id
    library, answers = replace(system.library, snapshot_id=held), list[str]()
    of_memory = replace(system, library=library)
    size = settings.generator.max_batch
    for start in range(0, len(questions), size):
        on_progress(f"ask {memory}", start, len(questions))
        batch = questions[start : start + size]
        generated = await of_memory.answer(batch, await of_memory.find(batch), settings.formulation)
        answers += [each.text for each in generated]
    on_progress(f"ask {memory}", len(questions), len(questions))
    return Asked(memory, held, answers)


ABOUT = (
    "Two snapshots of who leads which country, of two dates. {} offices changed hands between them; each is asked for "
    "by title and country. The first snapshot is served, then the second is published to the same servers, then the "
    "first again, while models and processes stay. Right is the leader's name or surname, case and punctuation apart.",
    "What changes is the memory alone. The paper did this with Wikipedia of 2016 and of 2018 and 82 leaders; its "
    "numbers stand beside ours, which are of another model and of other passages.",
)
TOLD = ("encoder", "encoder_fingerprint", "generator", "generator_fingerprint", "dtype", "k", "n_beams")


def _report(
    settings: MemorySettings,
    command: str,
    offices: Sequence[Changed],
    asked: Sequence[Asked],
    system: dict[str, str],
) -> Report:
    first, second, again = asked
    right = {"before": [each.before.answers for each in offices], "after": [each.after.answers for each in offices]}
    cells = {
        (memory.memory, date): _accuracy(memory.answers, right[date]) for memory in (first, second) for date in right
    }
    rows: list[list[Cell]] = [
        [f"the memory {memory}", f"leaders {date}", mean, paper]
        for ((memory, date), mean), paper in zip(cells.items(), PAPER, strict=True)
    ]
    expected = [
        Expected(f"memory {memory}, leaders {date}", mean.value, *(MATCHED if memory == date else MISMATCHED))
        for (memory, date), mean in cells.items()
    ]
    n_back = sum(one == other for one, other in zip(first.answers, again.answers, strict=True))
    expected.append(Expected("answers as at first, the first published again", n_back / len(offices), 1, 1))
    said = [
        [each.question, each.before.name, first.answers[i], each.after.name, second.answers[i]]
        for i, each in enumerate(offices)
    ]
    return Report(
        title="Replacing the memory",
        about=[paragraph.format(len(offices)) for paragraph in ABOUT],
        command=command,
        made_of=[
            ("leaders before", digest(settings.before)),
            ("leaders after", digest(settings.after)),
            ("limit, seed", f"{settings.limit}, {settings.seed}"),
            ("snapshots, as published", ", ".join(each.snapshot_id for each in asked)),
            *((name, system[name]) for name in TOLD),
            ("formulation", settings.formulation),
            ("intervals", "95 %, bootstrap over the questions"),
        ],
        expected=expected,
        tables=[
            Table("Accuracy", ("asked of", "right are", "accuracy", "in the paper"), rows),
            Table("All questions and answers", ("question", "before", "said", "after", "said"), said, hidden=True),
        ],
    )


def _accuracy(said: Sequence[str], right: Sequence[tuple[str, ...]]) -> Mean:
    return Mean.of([float(is_right(text, Question("", "", each))) for text, each in zip(said, right, strict=True)])
