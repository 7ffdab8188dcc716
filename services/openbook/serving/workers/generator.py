"""The generator in this process, or behind a handle in its own deployment."""

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from openbook.config import GeneratorSettings, ServingSettings
from openbook.core.confidence import Calibration
from openbook.core.context import Context
from openbook.core.deadline import Check, go_on
from openbook.core.types import Generation, GenerationSettings, PartSettings, Passage, Retrieved, Token
from openbook.errors import OpenbookError
from openbook.logs import as_ours, setup_logging
from openbook.processes import loading
from openbook.rag.ports import BegunByAnother, Maker
from openbook.serving.workers.batching import Asked, Batcher
from openbook.serving.workers.hop import OtherModel, answered
from openbook.serving.workers.replicas import Replicas
from openbook.serving.workers.worker import Replica, apart
from openbook.telemetry import MetricsServer
from openbook.tracing.spans import setup_tracing, span

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger(__name__)

WARM_UP_S = 3.0
WARM_UP = (1, 4)
WARM_UP_QUESTION = "which of them was there first, and where is it told?"
WARM_UP_PASSAGES = Retrieved(
    tuple(Passage(i, str(i), "Title", f"{i} of the words that passages have " * 14) for i in range(5)),
    np.linspace(10, 9, 5, dtype=np.float32),
    "warm-up",
)


class GeneratorModel(Protocol):
    """What runs in the worker thread."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def generates_by(self) -> str:
        """As `rag.ports.Generator.generates_by`."""
        ...

    @property
    def calibration(self) -> Calibration: ...
    def generate(
        self, questions: Sequence[str], retrieved: Sequence[Retrieved], settings: GenerationSettings, check: Check, /
    ) -> list[Generation]:
        """One generation a question, all under the same settings. Calls `check` between its steps."""
        ...

    def stream(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, check: Check, /
    ) -> Iterator[Token | Generation]:
        """Tokens as they are decided, the generation last. Calls `check` between its steps."""
        ...


GeneratorLoader = Callable[[GeneratorSettings], GeneratorModel]


@dataclass(frozen=True, slots=True)
class _Task:
    question: str
    retrieved: Retrieved
    settings: GenerationSettings

    @property
    def work(self) -> int:
        return _work(self.settings, len(self.retrieved.passages))


def _work(settings: GenerationSettings, n_passages: int) -> int:
    """As it was counted when the question came in, of the passages that were found; of a part as far as it goes."""
    if isinstance(settings, PartSettings):
        n_tokens = min(settings.max_new_tokens, len(settings.begun) + settings.n_more)
        settings = replace(settings, max_new_tokens=n_tokens, min_new_tokens=0)
    return max(1, settings.work(n_passages))


def _goes_by_steps(settings: GenerationSettings) -> bool:
    """Whether a stream of it has more than one step, which would hold up whatever it ran between."""
    return settings.one_by_one and settings.n_answers == 1


def _kind(settings: GenerationSettings) -> GenerationSettings:
    """Without what is of one question alone: settings that never come back would leave the pace no place for others."""
    labels = tuple(f"label {n}" for n in range(len(settings.labels)))
    kind = replace(settings, seed=0, labels=labels)
    return replace(kind, begun=(), begun_by="") if isinstance(kind, PartSettings) else kind


class LocalGenerator:
    """A generator in this process: the port `rag.ports.Generator` over batches of equal settings."""

    def __init__(self, model: GeneratorModel, settings: GeneratorSettings) -> None:
        self.fingerprint, self.generates_by, self.calibration = model.fingerprint, model.generates_by, model.calibration
        self._model = model
        self._place: Asked | None = None  # that is kept for who asks
        self._batcher: Batcher[_Task, Generation] = Batcher(
            self._generate,
            name="generator",
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            key=lambda task: task.settings,
            kind=_kind,
            work=lambda task: task.work,
            max_work=settings.max_tokens_in_flight,
        )
        self.load = self._batcher.load

    @contextmanager
    def place(
        self, settings: GenerationSettings, n_passages: int, context: Context, is_stream: bool = False
    ) -> Iterator[Self]:
        is_stream = is_stream and _goes_by_steps(settings)
        with self._batcher.place(context, settings, _work(settings, n_passages), is_stream) as kept:
            placed = copy(self)
            placed._place = kept
            yield placed

    async def generate(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> Generation:
        return await self._batcher.submit(_Task(question, retrieved, settings), context, self._place)

    async def stream(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> AsyncIterator[Token | Generation]:
        task = _Task(question, retrieved, settings)
        if not _goes_by_steps(settings):
            yield await self._batcher.submit(task, context, self._place)
            return
        steps = partial(self._model.stream, question, retrieved, settings)
        parts = self._batcher.stream(steps, context, settings, task.work, self._place)
        async with aclosing(parts):  # type: ignore[type-var]  # an async generator
            async for part in parts:
                yield part

    def warm_up(self) -> None:
        """Answer questions of the usual kind, for a few seconds, before any is asked: the first caller finds everything
        laid out, and how long questions take is known from the start.
        """
        task, begun, took = _Task(WARM_UP_QUESTION, WARM_UP_PASSAGES, GenerationSettings()), monotonic(), []
        apart(partial(self._generate, [task], go_on))  # slower than all that follow, so nothing is learned from it
        for n in WARM_UP:
            if monotonic() - begun < WARM_UP_S:
                seconds = apart(partial(self._seconds, [task] * n))
                self._batcher.learn([task] * n, seconds)
                took.append(f"{n} in {seconds:.2f} s")
        measured = f"; questions at once: {', '.join(took)}" if took else ""
        log.info("generator: warmed up in %.1f s%s", monotonic() - begun, measured)

    async def aclose(self) -> None:
        """End the worker thread."""
        await self._batcher.aclose()

    def _seconds(self, tasks: Sequence[_Task]) -> float:
        """What they take of this thread's time: while warming up it has to wait for whatever else is to be done."""
        begun = thread_time()
        self._generate(tasks, go_on)
        return thread_time() - begun

    def _generate(self, tasks: Sequence[_Task], check: Check) -> list[Generation]:
        questions, retrieved = [task.question for task in tasks], [task.retrieved for task in tasks]
        return self._model.generate(questions, retrieved, tasks[0].settings, check)


@dataclass(frozen=True, slots=True)
class AboutGenerator(Maker):
    """What a replica says of its generator: `replicas.About`."""

    @property
    def made_by(self) -> str:
        return self.generates_by

    def may_follow(self, former: "AboutGenerator") -> bool:
        return True


class GeneratorDeployment(Replica):
    """One replica of the generator, `split` topology. Our errors are returned, not raised: see `hop`."""

    def __init__(self, settings: GeneratorSettings, load: GeneratorLoader, serving: ServingSettings) -> None:
        setup_logging("generator")
        setup_tracing("generator")
        MetricsServer("generator", serving.host, serving.metrics_port)
        self._settings = settings
        with loading():
            self._generator = LocalGenerator(apart(lambda: load(settings)), settings)
            self._generator.warm_up()

    async def describe(self, settings: GeneratorSettings | None = None) -> AboutGenerator | None:
        """What it has; None if that was made with other settings than these."""
        if settings not in (None, self._settings):
            return None
        return AboutGenerator.of(self._generator)

    async def generate(
        self,
        question: str,
        retrieved: Retrieved,
        settings: GenerationSettings,
        context: Context,
        made_by: str | None = None,
    ) -> Generation | OpenbookError | OtherModel:
        """As `rag.ports.Generator.generate`, by the generator that is named."""
        if made_by not in (None, self._generator.generates_by):
            return OtherModel()
        return await answered(
            "generator replica", context, lambda inner: self._generator.generate(question, retrieved, settings, inner)
        )

    async def stream(
        self,
        question: str,
        retrieved: Retrieved,
        settings: GenerationSettings,
        context: Context,
        made_by: str | None = None,
    ) -> AsyncIterator[Token | Generation | OpenbookError | OtherModel]:
        """As `rag.ports.Generator.stream`, by the generator that is named; an error is the last thing it yields."""
        if made_by not in (None, self._generator.generates_by):
            yield OtherModel()
            return
        try:
            with span("generator replica", context, "server") as inner:
                parts = self._generator.stream(question, retrieved, settings, inner)
                async with aclosing(parts):  # type: ignore[type-var]  # an async generator
                    async for part in parts:
                        yield part
        except Exception as error:
            yield as_ours(error, context.request_id)


class RemoteGenerator:
    """The generator's deployment as the port `rag.ports.Generator`."""

    def __init__(self, handle: "DeploymentHandle", replicas: Replicas[AboutGenerator]) -> None:
        self._handle, self._replicas = handle, replicas

    @classmethod
    async def connect(cls, handle: "DeploymentHandle", settings: GeneratorSettings) -> "RemoteGenerator":
        """As soon as a replica with these settings answers."""
        return cls(handle, await Replicas.connect("generator", handle, settings))

    @property
    def fingerprint(self) -> str:
        return self._replicas.about.fingerprint

    @property
    def generates_by(self) -> str:
        return self._replicas.about.generates_by

    @property
    def calibration(self) -> Calibration:
        return self._replicas.about.calibration

    def place(
        self, settings: GenerationSettings, n_passages: int, context: Context, is_stream: bool = False
    ) -> AbstractContextManager[Self]:
        """None: the replicas' queues are not known here."""
        return nullcontext(self)

    async def generate(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> Generation:
        def send(made_by: str) -> Any:
            if isinstance(settings, PartSettings) and settings.begun_by not in ("", made_by):
                raise BegunByAnother(f"{settings.begun_by} began the answer, and {made_by} has come in its place")
            return self._handle.generate.remote(question, retrieved, settings, context, made_by)

        generation: Generation = await self._replicas.call(context, send)
        return generation

    def stream(
        self, question: str, retrieved: Retrieved, settings: GenerationSettings, context: Context
    ) -> AsyncIterator[Maker | Token | Generation]:
        streaming = self._handle.options(stream=True).stream
        return self._replicas.stream(
            context, lambda made_by: streaming.remote(question, retrieved, settings, context, made_by)
        )
