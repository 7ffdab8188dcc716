"""A whole run: models, data and index put together, resumed, recorded and saved, by one worker or several."""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import DPRQuestionEncoder

from openbook.corpus.questions import Question
from openbook.errors import InvalidRequest
from openbook.models.checkpoint import device_of, load_generator
from openbook.models.encoder import load_encoder
from openbook.models.formats import RagFormat
from openbook.models.saving import save_encoder, save_generator, save_rag
from openbook.training import checkpoints
from openbook.training.data import Example, digest, read_examples, read_validation
from openbook.training.loop import Loop
from openbook.training.loss import Prepared, RagLoss
from openbook.training.records import Records
from openbook.training.retrieval import Retriever, open_retriever
from openbook.training.settings import TrainingSettings
from openbook.training.validation import Validation
from openbook.training.world import Alone, World

log = logging.getLogger(__name__)

OnStep = Callable[[int, Mapping[str, float]], None]
"""Called with the step and its numbers, by name."""

CHECKPOINTS = "checkpoints"
MODEL = "model"

NOT_IN_THE_PLAN = {"out", "device", "n_threads", "checkpoint_every", "n_checkpoints", "validate_every", "n_validation"}
"""Settings of the loop that change no result."""


class Run:
    """One worker's part of a run: the same objects in each of them.

    Raises:
        InvalidConfig, InvalidDocuments, InvalidModel, InvalidSnapshot, ShardUnavailable: what the settings name cannot
            be used.
    """

    def __init__(self, settings: TrainingSettings, world: World | None = None) -> None:
        torch.set_num_threads(settings.loop.n_threads)
        self.settings, self.world = settings, world or Alone()
        device = torch.device(device_of(settings.loop.device))
        self.encoder = load_encoder(settings.models.query_encoder)
        self.generator = load_generator(settings.models.generator)
        self._space = self.encoder.space
        self.retriever: Retriever = open_retriever(settings.retrieval, self._space, device)
        self.objective = RagLoss(self.encoder, self.generator, self.retriever, settings).to(device)
        seed = settings.loop.seed
        examples = self._usable(read_examples(settings.task, seed, self._texts))
        self.plan = self._plan(examples)
        self.loop: Loop[Example, Prepared] = Loop(
            self.objective, examples, settings.loop, settings.optimizer, settings.models.frozen, self.world
        )
        asked = self._usable(read_validation(settings.task, settings.loop.n_validation))
        self.validation = Validation(self.objective, self.generator, asked, settings, self.world) if asked else None

    def train(self, on_step: OnStep = lambda step, scalars: None) -> Path:
        """Go on from the last checkpoint, if there is one, to the last step. Returns the folder of the trained models.

        Raises:
            InvalidConfig: the checkpoint is one of another plan.
            TrainingDiverged: the loss is not a number any more.
            ShardUnavailable, SnapshotMismatch: a step could not retrieve.
        """
        loop, out = self.loop, self.settings.loop.out
        found = checkpoints.latest(out / CHECKPOINTS)
        if found is not None:
            checkpoints.restore(found, loop, self.plan)
        records = Records(out, loop.step) if self.world.rank == 0 else None
        try:
            if loop.step == 0:
                self._record(records, 0, self._validate(), on_step)
            for report in loop.run():
                is_last = report.step == self.settings.loop.n_steps
                scalars = report.scalars()
                if is_last or report.step % self.settings.loop.validate_every == 0:
                    scalars |= self._validate()
                self._record(records, report.step, scalars, on_step)
                if is_last or report.step % self.settings.loop.checkpoint_every == 0:
                    self._keep()
        finally:
            if records is not None:
                records.close()
        if self.world.rank == 0:
            self._save()
        return out / MODEL

    def close(self) -> None:
        """Let go of the index and of what runs in the background."""
        self.loop.close()
        self.retriever.close()

    def _usable(self, examples: list[Example]) -> list[Example]:
        """Without those that are too long, which are found now and not in the middle of the run."""
        usable, refusals = [], []
        for example in examples:
            try:
                self.objective.check(example)
                usable.append(example)
            except InvalidRequest as error:
                refusals.append(f"{example.question.id}: {error}")
        if refusals:
            log.warning("%d of %d examples are left out, first %s", len(refusals), len(examples), refusals[0])
        return usable

    def _plan(self, examples: Sequence[Example]) -> dict[str, str]:
        settings = self.settings
        return {
            **self.objective.identity,
            "query encoder": self.encoder.fingerprint,
            "examples": digest(examples),
            "task": settings.task.kind,
            "retrieval": f"{settings.retrieval.kind}, k = {settings.retrieval.k}",
            "models": settings.models.model_dump_json(exclude={"query_encoder", "generator"}),
            "optimizer": settings.optimizer.model_dump_json(),
            "loop": settings.loop.model_dump_json(exclude=NOT_IN_THE_PLAN),
        }

    def _texts(self, questions: Sequence[str]) -> list[list[str]]:
        examples = [Example(text, "", Question("", text)) for text in questions]
        return [[p.text for p in passages] for passages in self.objective.retrieve(examples, REGEX_PASSAGES).passages]

    def _validate(self) -> dict[str, float]:
        measured = self.validation() if self.validation else {}
        return {f"validation/{name}": value for name, value in measured.items()}

    def _record(
        self,
        records: Records | None,
        step: int,
        scalars: Mapping[str, float],
        on_step: OnStep,
    ) -> None:
        if records is not None and scalars:
            records.add(step, scalars)
        on_step(step, scalars)

    def _keep(self) -> None:
        if self.world.rank == 0:
            folder = self.settings.loop.out / CHECKPOINTS
            checkpoints.save(folder / checkpoints.name_of(self.loop.step), self.loop, self.plan)
            checkpoints.prune(folder, self.settings.loop.n_checkpoints)

    def _save(self) -> None:
        """In RAG's layout where it can hold both models, else each in a folder of its own."""
        out, models = self.settings.loop.out / MODEL, self.settings.models
        shutil.rmtree(out, ignore_errors=True)
        encoder = replace(self.encoder, declared_space=self._space)
        if isinstance(encoder.model, DPRQuestionEncoder) and isinstance(self.generator.input_format, RagFormat):
            save_rag(out, encoder, self.generator, models.formulation)
            return
        if self.settings.trains_query_encoder:
            save_encoder(out / "query_encoder", encoder)
        save_generator(out / "generator", self.generator, getattr(torch, models.saved_dtype))


REGEX_PASSAGES = 100
"""That a regular expression's answer is looked for in. The paper took 1,000."""


def train(settings: TrainingSettings, on_step: OnStep = lambda step, scalars: None) -> Path:
    """A run in this process, without Ray. Returns the folder of the trained models. Raises as `Run` and `Run.train`."""
    run = Run(settings)
    try:
        return run.train(on_step)
    finally:
        run.close()
