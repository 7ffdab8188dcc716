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
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO

import ray
from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError, UserCallback
from ray.train.torch import TorchTrainer

from openbook.errors import InvalidConfig, OpenbookError, StartupError
from openbook.training import checkpoints
from openbook.training.records import METRICS
from openbook.training.run import CHECKPOINTS, MODEL, OnStep, Run
from openbook.training.settings import TrainingSettings, WorkersSettings
from openbook.training.world import Distributed

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80_000_000
"""Of a Ray of our own: nothing but settings passes through it."""

POLL_S = 0.5

FLAGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # there is one machine
}
"""Of a Ray of our own."""


class WorkersFailed(OpenbookError):
    """Workers ended, not by an error of ours, more often than `workers.max_failures`."""


def fit(settings: TrainingSettings, on_step: OnStep = lambda step, scalars: None) -> Path:
    """A run by `workers.n_workers`. Returns the folder of the trained models.

    On the Ray that this process is connected to, else the cluster that RAY_ADDRESS names, else a Ray of our own.
    `on_step` is called in another thread, soon after the step, and once for each.

    Raises:
        WorkersFailed: workers were lost too often. The same call goes on from the last checkpoint.
        OpenbookError: as `openbook.training.run.train`, of whichever worker had one; such errors are not retried.
        InvalidConfig: this machine has not the GPUs.
    """
    loop, workers = settings.loop, settings.workers
    out = loop.out.absolute()
    # Ray hides what it has not reserved for a worker.
    device = loop.device if loop.device != "auto" else "cuda" if workers.use_gpu else "cpu"
    settings = settings.model_copy(update={"loop": loop.model_copy(update={"out": out, "device": device})})
    with _connected(workers), _followed(out, on_step), _interruptible():
        trainer = TorchTrainer(
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
                callbacks=[_Failures()],
                logging_config=LoggingConfig(log_level="CRITICAL"),  # we say it in one line
            ),
        )
        try:
            trainer.fit()
        except TrainingFailedError as error:
            raise _why(error, workers.max_failures) from error
    return out / MODEL


def _work(config: Mapping[str, Any]) -> None:
    """One worker, from whichever checkpoint there is."""
    os.chdir(config["folder"])  # what relative paths in the settings are relative to
    logging.getLogger().setLevel(logging.WARNING)
    run = Run(config["settings"], Distributed())
    try:
        run.train()
    finally:
        run.close()


class _Failures(UserCallback):  # type: ignore[misc]
    """Lives in Ray's controller. An error of ours ends the run: the next attempt would only run into it again."""

    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        for error in worker_exceptions.values():
            if isinstance(error, OpenbookError):
                raise error
        log.warning("%s", _described(worker_exceptions))


def _why(error: TrainingFailedError, max_failures: int) -> OpenbookError:
    failures = getattr(error, "worker_failures", None)
    if failures is not None:
        return WorkersFailed(f"more than workers.max_failures = {max_failures} times, last {_described(failures)}")
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
def _connected(workers: WorkersSettings) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS", "local")
    try:
        ray.init(address=address, logging_level=logging.WARNING, **(_of_our_own(workers) if address == "local" else {}))
    except Exception as error:  # Ray raises no class of its own
        ray.shutdown()
        raise StartupError(f"Ray does not start: {error}") from None
    try:
        n_gpus = ray.cluster_resources().get("GPU", 0)
        if address == "local" and workers.use_gpu and n_gpus < workers.n_workers:
            raise InvalidConfig(f"workers.use_gpu: {workers.n_workers} workers, and this machine has {n_gpus:.0f} GPUs")
        yield
    finally:
        ray.shutdown()


def _of_our_own(workers: WorkersSettings) -> dict[str, Any]:
    for name, value in FLAGS.items():
        os.environ.setdefault(name, value)

    def hush() -> None:
        # Ray Train asks the dashboard, which we leave out, every second, and warns that it is not there.
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)

    return {
        "num_cpus": ceil(workers.n_workers * workers.num_cpus),
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
        "runtime_env": {"worker_process_setup_hook": hush},  # a function within one travels without this module
    }


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
    """Tells in a thread what the workers record."""
    is_over, curves = threading.Event(), _Curves(out)

    def follow() -> None:
        while not is_over.wait(POLL_S):
            curves.tell(on_step)
        curves.tell(on_step)

    with ThreadPoolExecutor(1, "follow") as executor:
        following = executor.submit(follow)
        try:
            yield
        finally:
            is_over.set()
    following.result()


class _Curves:
    """What is new in `metrics.jsonl`: steps that no former run has told of, each once.

    Workers that go on begin another file, with the steps until their checkpoint.
    """

    def __init__(self, out: Path) -> None:
        self._path = out / METRICS
        self._file: BinaryIO | None = None
        found = checkpoints.latest(out / CHECKPOINTS)
        self._told = checkpoints.step_of(found) if found else -1
        if self._is_another():  # of a former run; held open, so that no other file gets its number
            self._file = self._path.open("rb")
            self._file.seek(0, os.SEEK_END)

    def tell(self, on_step: OnStep) -> None:
        if self._is_another():
            self._file = self._path.open("rb")
        while self._file is not None:
            begin, line = self._file.tell(), self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(begin)  # the rest will come
                return
            scalars = json.loads(line)
            step = scalars.pop("step")
            if step > self._told:
                self._told = step
                on_step(step, scalars)

    def _is_another(self) -> bool:
        if not self._path.exists():
            return False
        return self._file is None or not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
