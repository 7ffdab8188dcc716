"""A whole run: what is trained put together, resumed, recorded and saved, by one worker or several."""

import filecmp
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from openbook import files
from openbook.errors import InvalidConfig, StartupError
from openbook.models.gpu import told_if_gpu_full
from openbook.training import checkpoints
from openbook.training.loop import Loop, Objective, TrainingDiverged
from openbook.training.records import Records
from openbook.training.settings import TrainingSettings
from openbook.training.stopping import held_back
from openbook.training.world import Alone, World

log = logging.getLogger(__name__)

OnStep = Callable[[int, Mapping[str, float]], None]
"""Called with the step and its numbers, by name; first, with none, with the step that a run goes on from."""

CHECKPOINTS = "checkpoints"
MODEL = "model"
LOCK = "lock"

FULL = "a GPU's memory is full (docs/train.md says what takes less)"

LOCK_TIMEOUT_S = 60.0
"""After a kill, until the last worker of the former run has ended too."""

NOT_IN_THE_PLAN = {"out", "device", "n_threads", "checkpoint_every", "n_checkpoints", "validate_every", "n_validation"}
"""Settings of the loop that change no result. Of RAG's `gradient_checkpointing` is one more: see `_plan`."""


class Job(Protocol):
    """What is trained: the same on every worker.

    Raises, when it is made:
        InvalidConfig, InvalidDocuments, InvalidModel, InvalidSnapshot, ShardUnavailable: what the settings name cannot
            be used.
    """

    @property
    def objective(self) -> Objective[Any, Any]:
        """Its loss, on its device."""
        ...

    @property
    def examples(self) -> Sequence[Any]:
        """What the objective prepares micro-batches of."""
        ...

    @property
    def plan(self) -> Mapping[str, str]:
        """Data and models that it began with; settings need not be in it."""
        ...

    def validate(self) -> Mapping[str, float]:
        """How good the weights of now are, over all workers, by name."""
        ...

    def save(self, folder: Path) -> None:
        """Write the trained models into a folder that is not there."""
        ...

    def close(self) -> None:
        """Let go of the index."""
        ...


def job_of(settings: TrainingSettings, world: World) -> Job:
    """What the settings ask to train. Raises as `Job`."""
    if settings.biencoder is not None:
        from openbook.training.biencoder import BiEncoderJob

        return BiEncoderJob(settings, settings.biencoder, world)
    from openbook.training.rag import RagJob

    return RagJob(settings, world)


class Run:
    """One worker's part of a run: the same objects in each of them. Raises as `Job`, and StartupError as `train`."""

    def __init__(self, settings: TrainingSettings, world: World | None = None) -> None:
        torch.set_num_threads(settings.loop.n_threads)
        self.settings, self.world = settings, world or Alone()
        with told_if_gpu_full(StartupError, FULL), ExitStack() as undo:
            self.job = job_of(settings, self.world)
            undo.callback(self.job.close)
            self.plan = {**self.job.plan, **_plan(settings)}
            self._check_same_for_all()
            objective, examples, frozen = self.job.objective, self.job.examples, settings.models.frozen
            self.loop: Loop[Any, Any] = Loop(objective, examples, settings.loop, settings.optimizer, frozen, self.world)
            undo.pop_all()

    def train(self, on_step: OnStep = lambda step, scalars: None) -> Path:
        """Go on from the last whole checkpoint, if there is one, to the end. Returns the folder of the trained models.

        Raises:
            InvalidConfig: the checkpoint is one of another plan, or another run is at work in its folder.
            InvalidCheckpoint: there are checkpoints, and none of them is whole.
            TrainingDiverged: the loss, the gradient or a query is not a number any more.
            ShardUnavailable, Overloaded, SnapshotMismatch: a step could not retrieve.
            StartupError: the disk is full, or a GPU's memory.
            KeyboardInterrupt, SystemExit: as `held_back`, after a step and its checkpoint; only in the main thread.
        """
        out = self.settings.loop.out
        out.mkdir(parents=True, exist_ok=True)
        lock = files.locked(out / LOCK, LOCK_TIMEOUT_S) if self.world.rank == 0 else nullcontext()
        with files.told_if_full(out), told_if_gpu_full(StartupError, FULL), lock:
            # Chosen by one: a worker that saw another one, or none, would train on from other weights than the rest.
            found = self.world.of_first(checkpoints.latest(out / CHECKPOINTS) if self.world.rank == 0 else None)
            if found is not None:
                checkpoints.restore(found, self.loop, self.plan)
                on_step(self.loop.step, {})
            self._steps(on_step)
            if self.world.rank == 0:
                self._save()
        return out / MODEL

    def close(self) -> None:
        """Let go of the index and of what runs in the background."""
        self.job.close()  # first: in the background a step may wait for shards
        self.loop.close()

    def _steps(self, on_step: OnStep) -> None:
        loop = self.loop
        records = Records(self.settings.loop.out, loop.step) if self.world.rank == 0 else None
        try:
            if loop.step == 0:
                self._record(records, 0, self._validate(), on_step)
            with held_back("this step and its checkpoint") as signals:
                for report in loop.run():
                    is_last = report.step == self.settings.loop.n_steps
                    scalars = report.scalars()
                    if is_last or report.step % self.settings.loop.validate_every == 0:
                        scalars |= self._validate()
                    self._record(records, report.step, scalars, on_step)
                    is_due = is_last or report.step % self.settings.loop.checkpoint_every == 0
                    if is_due:
                        self._keep()
                    if signals:
                        if not is_due:
                            self._keep()
                        log.warning("stopped after step %d: the same command goes on from there", report.step)
                        break
        except TrainingDiverged as error:
            raise TrainingDiverged(f"after step {loop.step}: {error}") from None
        finally:
            if records is not None:
                records.close()

    def _check_same_for_all(self) -> None:
        """Raises InvalidConfig: this worker sees other files, or another snapshot, than worker 0."""
        for name, value in self.world.of_first(self.plan).items():
            if self.plan[name] != value:
                raise InvalidConfig(f"{name}: worker 0 has {value!r}, worker {self.world.rank} has {self.plan[name]!r}")

    def _validate(self) -> dict[str, float]:
        return {f"validation/{name}": value for name, value in self.job.validate().items()}

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
            folder = self.settings.loop.out / CHECKPOINTS / checkpoints.name_of(self.loop.step)
            checkpoints.save(folder, self.loop, self.plan)
            checkpoints.prune(folder, self.settings.loop.n_checkpoints)

    def _save(self) -> None:
        """A model that stands there is replaced once the new one is whole; where it is the same one, its files are, and
        what was put beside them since stays (`confidence.json`).
        """
        folder = self.settings.loop.out / MODEL
        partial = files.partial_of(folder)
        shutil.rmtree(partial, ignore_errors=True)
        self.job.save(partial)
        if _has_weights(folder, partial):
            for path in [path for path in partial.rglob("*") if path.is_file()]:
                place = folder / path.relative_to(partial)
                place.parent.mkdir(parents=True, exist_ok=True)
                path.replace(place)
            shutil.rmtree(partial)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            files.put(partial, folder)


def _has_weights(folder: Path, model: Path) -> bool:
    """Whether those of a model are there, to the bit."""
    pairs = [(path, folder / path.relative_to(model)) for path in model.rglob("*.safetensors")]
    return all(there.exists() and filecmp.cmp(path, there, shallow=False) for path, there in pairs)


def _plan(settings: TrainingSettings) -> dict[str, str]:
    # A bi-encoder draws its random numbers in other portions with it.
    left_out = NOT_IN_THE_PLAN | (set() if settings.biencoder else {"gradient_checkpointing"})
    return {
        "task": settings.task.model_dump_json(include={"kind", "labels"}),
        "retrieval": f"{settings.retrieval.kind}, k = {settings.retrieval.k}",
        "models": settings.models.model_dump_json(exclude={"query_encoder", "generator"}),
        "optimizer": settings.optimizer.model_dump_json(),
        "loop": settings.loop.model_dump_json(exclude=left_out),
    }


def train(settings: TrainingSettings, on_step: OnStep = lambda step, scalars: None) -> Path:
    """A run in this process, without Ray. Returns the folder of the trained models. Raises as `Run` and `Run.train`."""
    run = Run(settings)
    try:
        return run.train(on_step)
    finally:
        run.close()
