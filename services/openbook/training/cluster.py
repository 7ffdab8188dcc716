"""A run by several workers, on Ray Train: it starts them, joins them in a process group, and starts them anew when one
is lost.

What a worker does is what `--local` does. Checkpoints and curves lie in `loop.out`, which all workers see, and a run
goes on from there by itself; so Ray is told of no checkpoint, and a lost driver costs no more than a lost worker.
"""

import json
import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, UserCallback
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks import DatasetsCallback

from openbook import local_ray
from openbook.errors import InvalidConfig, OpenbookError, StartupError
from openbook.training import checkpoints
from openbook.training.records import METRICS
from openbook.training.run import CHECKPOINTS, MODEL, OnStep, Run
from openbook.training.settings import TrainingSettings, WorkersSettings
from openbook.training.world import Distributed

log = logging.getLogger(__name__)

LOG = "log.txt"
"""In the run's folder: what worker 0 warns of, and workers that were lost. Ray would pass on its own warnings too."""

POLL_S = 0.5

FLAGS = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0"}
"""Of a Ray of our own: there is one machine."""


class WorkersFailed(OpenbookError):
    """Workers ended, not by an error of ours, more often than `workers.max_failures`."""


def fit(settings: TrainingSettings, on_step: OnStep = lambda step, scalars: None, address: str | None = None) -> Path:
    """A run by `workers.n_workers`. Returns the folder of the trained models.

    On the Ray that this process is connected to, else the cluster at `address`, or at RAY_ADDRESS if none is given,
    else a Ray of our own. Nodes share the file system: a worker finds all paths where they are here. `on_step` is
    called in another thread, soon after the step, and once for each.

    Raises:
        StartupError: the cluster cannot be joined.
        WorkersFailed: workers were lost too often. The same call goes on from the last checkpoint.
        OpenbookError: as `openbook.training.run.train`, of whichever worker had one; such errors are not retried.
        InvalidConfig: this machine has not the GPUs, or `loop.device` is not that of a worker with its own GPU.
    """
    loop, workers = settings.loop, settings.workers
    if workers.use_gpu and loop.device not in ("auto", "cuda"):
        raise InvalidConfig(f"loop.device must be auto or cuda with workers.use_gpu, got {loop.device}")
    out = loop.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    # A worker sees GPUs that were not reserved for it too, and another one computes there.
    device = loop.device if loop.device != "auto" else "cuda" if workers.use_gpu else "cpu"
    settings = settings.model_copy(update={"loop": loop.model_copy(update={"out": out, "device": device})})
    with _connected(workers, address), _followed(out, on_step), _interruptible():
        trainer = _Trainer(
            _work,
            train_loop_config={"settings": settings, "folder": Path.cwd()},
            scaling_config=ScalingConfig(
                num_workers=workers.n_workers,
                use_gpu=workers.use_gpu,
                resources_per_worker={"CPU": workers.num_cpus},
            ),
            run_config=RunConfig(
                name="ray",
                storage_path=str(out),
                failure_config=FailureConfig(max_failures=workers.max_failures),
                worker_runtime_env={"env_vars": _environment(loop.n_threads)},
                callbacks=[_Failures(out)],
            ),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            raise _why(error, workers.max_failures) from None
    return out / MODEL


def _work(config: Mapping[str, Any]) -> None:
    """One worker, from whichever checkpoint there is."""
    settings, world = config["settings"], Distributed()
    os.chdir(config["folder"])  # what relative paths in the settings are relative to
    if world.rank == 0:
        notes = logging.FileHandler(settings.loop.out / LOG)
        notes.setLevel(logging.WARNING)
        logging.getLogger("openbook").addHandler(notes)
    run = Run(settings, world)
    try:
        run.train()
    finally:
        run.close()


class _Trainer(TorchTrainer):  # type: ignore[misc]
    """Starts no process beside each group of workers that would hand out Ray's datasets: a run has none."""

    def _create_default_callbacks(self) -> list[Any]:
        return [each for each in super()._create_default_callbacks() if not isinstance(each, DatasetsCallback)]


class _Failures(UserCallback):  # type: ignore[misc]
    """Lives in Ray's controller. An error of ours ends the run: the next attempt would only run into it again."""

    def __init__(self, out: Path) -> None:
        self._log = out / LOG

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        for error in worker_exceptions.values():
            if isinstance(error, OpenbookError):
                raise error
        with self._log.open("a", encoding="utf-8") as file:
            print(_described(worker_exceptions), file=file)


def _why(error: TrainingFailedError, max_failures: int) -> OpenbookError:
    failures = getattr(error, "worker_failures", None)
    if failures is not None:
        lost = f"more than workers.max_failures = {max_failures} times, last {_described(failures)}"
        return WorkersFailed(f"{lost} (see the logs of Ray Train)")
    cause = getattr(error, "controller_failure", error)
    return cause if isinstance(cause, OpenbookError) else StartupError(f"Ray Train: {cause}")


def _described(failures: Mapping[int, Exception]) -> str:
    """The first line of each."""
    return "; ".join(f"worker {i}: {type(e).__name__}: {str(e).partition(chr(10))[0]}" for i, e in failures.items())


def _environment(n_threads: int) -> dict[str, str]:
    """Of a worker. Read when torch is imported; without it, Ray sets the threads to the CPUs that are reserved."""
    return {
        "OMP_NUM_THREADS": str(n_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }


@contextmanager
def _connected(workers: WorkersSettings, address: str | None = None) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS", "local")
    if address != "local":
        with local_ray.joined(address):
            yield
        return
    num_cpus = ceil(workers.n_workers * workers.num_cpus)
    with local_ray.started(num_cpus, FLAGS, log_to_driver=False):
        n_gpus = ray.cluster_resources().get("GPU", 0)
        if workers.use_gpu and n_gpus < workers.n_workers:  # a cluster might still grow
            raise InvalidConfig(f"workers.use_gpu: {workers.n_workers} workers, and this machine has {n_gpus:.0f} GPUs")
        yield


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ray Train takes SIGINT for itself, ends its workers, and leaves the process with code 0."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


@contextmanager
def _followed(out: Path, on_step: OnStep) -> Iterator[None]:
    """Tells in a thread what the workers record and warn of."""
    is_over = threading.Event()
    told = max(map(checkpoints.step_of, checkpoints.kept(out / CHECKPOINTS)), default=-1)
    if told >= 0:
        on_step(told, {})

    def tell() -> None:
        nonlocal told
        for note in notes.new_lines():
            log.warning("%s", note)
        for line in curves.new_lines():
            scalars = json.loads(line)
            step = scalars.pop("step")
            if step > told:  # workers that go on begin a file with the steps until their checkpoint
                told = step
                on_step(step, scalars)

    def follow() -> None:
        while not is_over.wait(POLL_S):
            tell()
        tell()

    with (
        closing(_Tail(out / METRICS)) as curves,
        closing(_Tail(out / LOG)) as notes,
        ThreadPoolExecutor(1, "follow") as executor,
    ):
        following = executor.submit(follow)
        try:
            yield
        finally:
            is_over.set()
    following.result()


class _Tail:
    """What is new in a file since now, or in the one that has taken its place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Held open, so that no other file gets its number.
        self._file: BinaryIO | None = path.open("rb") if path.exists() else None
        if self._file is not None:
            self._file.seek(0, os.SEEK_END)

    def new_lines(self) -> Iterator[str]:
        """Those that are whole."""
        if self._is_another():
            self.close()
            self._file = self._path.open("rb")
        while self._file is not None:
            begin, line = self._file.tell(), self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(begin)
                return
            yield line.decode().rstrip("\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _is_another(self) -> bool:
        if not self._path.exists():
            return False
        return self._file is None or not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
