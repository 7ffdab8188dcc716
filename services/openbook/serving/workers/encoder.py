"""The query encoder in this process, or behind a handle in its own deployment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from openbook.config import EncoderSettings, ServedEncoderSettings, ServingSettings
from openbook.core.context import Context
from openbook.core.deadline import Check
from openbook.core.together import all_of
from openbook.core.types import Float32, Passage
from openbook.errors import OpenbookError
from openbook.logs import setup_logging
from openbook.processes import loading
from openbook.serving.workers.batching import Batcher
from openbook.serving.workers.hop import OtherModel, answered
from openbook.serving.workers.replicas import Replicas
from openbook.serving.workers.worker import Replica, apart
from openbook.telemetry import MetricsServer
from openbook.tracing.spans import setup_tracing

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle


class EncoderModel(Protocol):
    """What runs in the worker thread."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def space(self) -> str:
        """Fingerprint of the passage encoder whose embeddings the queries are meant for."""
        ...

    @property
    def dimension(self) -> int: ...
    def padded_length(self, question: str, /) -> int:
        """Questions of equal length are computed together. Raises InvalidRequest for those too long to be read."""
        ...

    def encode_passages(self, passages: Sequence[Passage], /) -> Float32:
        """(n, d) in the space of the queries. Raises InvalidRequest where there is no encoder for that."""
        ...

    def encode_questions(self, questions: Sequence[str], check: Check, /) -> Float32:
        """(n, d), the same bits whatever else is asked. Calls `check` between its steps."""
        ...


EncoderLoader = Callable[[ServedEncoderSettings], EncoderModel]


class LocalEncoder:
    """An encoder in this process: the port `rag.ports.Encoder` over batches."""

    def __init__(self, model: EncoderModel, settings: EncoderSettings) -> None:
        self.fingerprint = model.fingerprint
        self.space = model.space
        self.dimension = model.dimension
        self._model = model
        self._batcher: Batcher[str | Passage, Float32] = Batcher(
            self._encode,
            name="encoder",
            max_batch=settings.max_batch,
            max_queue=settings.max_queue,
            key=self._length,
            kind=lambda key: "passage" if isinstance(key, Passage) else key,
        )

    async def encode(self, questions: Sequence[str], context: Context) -> Float32:
        if not questions:
            return np.empty((0, self.dimension), np.float32)
        return np.stack(await all_of(self._batcher.submit(question, context) for question in questions))

    async def encode_own(self, passages: Sequence[Passage], context: Context) -> Float32:
        return np.stack(await all_of(self._batcher.submit(passage, context) for passage in passages))

    async def aclose(self) -> None:
        """End the worker thread."""
        await self._batcher.aclose()

    def _length(self, item: str | Passage) -> int | Passage:
        """What is encoded together: questions of one length, passages alone, so that their bits depend on no other."""
        # Who asks for too much is refused here, before the queue, and spoils no batch.
        return self._model.padded_length(item) if isinstance(item, str) else item

    def _encode(self, items: Sequence[str | Passage], check: Check) -> list[Float32]:
        questions = [item for item in items if isinstance(item, str)]
        if questions:
            return list(self._model.encode_questions(questions, check))
        (passage,) = {item for item in items if isinstance(item, Passage)}
        return [self._model.encode_passages([passage])[0]] * len(items)


@dataclass(frozen=True, slots=True)
class AboutEncoder:
    """What a replica says of its encoder: `replicas.About`."""

    fingerprint: str
    space: str
    dimension: int

    @property
    def made_by(self) -> str:
        return self.fingerprint

    def may_follow(self, former: "AboutEncoder") -> bool:
        return (self.space, self.dimension) == (former.space, former.dimension)


class EncoderDeployment(Replica):
    """One replica of the encoder, `split` topology. Our errors are returned, not raised: see `hop`."""

    def __init__(self, settings: ServedEncoderSettings, load: EncoderLoader, serving: ServingSettings) -> None:
        setup_logging("encoder")
        setup_tracing("encoder")
        MetricsServer("encoder", serving.host, serving.metrics_port)
        self._settings = settings
        with loading():
            self._encoder = LocalEncoder(apart(lambda: load(settings)), settings)

    async def describe(self, settings: ServedEncoderSettings | None = None) -> AboutEncoder | None:
        """What it has; None if that was made with other settings than these."""
        if settings not in (None, self._settings):
            return None
        return AboutEncoder(self._encoder.fingerprint, self._encoder.space, self._encoder.dimension)

    async def encode(
        self, questions: Sequence[str], context: Context, made_by: str | None = None
    ) -> Float32 | OpenbookError | OtherModel:
        """As `rag.ports.Encoder.encode`, by the encoder that is named."""
        if made_by not in (None, self._encoder.fingerprint):
            return OtherModel()
        return await answered("encoder replica", context, lambda inner: self._encoder.encode(questions, inner))

    async def encode_own(
        self, passages: Sequence[Passage], context: Context, made_by: str | None = None
    ) -> Float32 | OpenbookError | OtherModel:
        """As `rag.ports.Encoder.encode_own`, by the encoder that is named."""
        if made_by not in (None, self._encoder.fingerprint):
            return OtherModel()
        return await answered("encoder replica", context, lambda inner: self._encoder.encode_own(passages, inner))


class RemoteEncoder:
    """The encoder's deployment as the port `rag.ports.Encoder`."""

    def __init__(self, handle: "DeploymentHandle", replicas: Replicas[AboutEncoder]) -> None:
        self._handle, self._replicas = handle, replicas

    @classmethod
    async def connect(cls, handle: "DeploymentHandle", settings: ServedEncoderSettings) -> "RemoteEncoder":
        """As soon as a replica with these settings answers."""
        return cls(handle, await Replicas.connect("encoder", handle, settings))

    @property
    def fingerprint(self) -> str:
        return self._replicas.about.fingerprint

    @property
    def space(self) -> str:
        return self._replicas.about.space

    @property
    def dimension(self) -> int:
        return self._replicas.about.dimension

    async def encode(self, questions: Sequence[str], context: Context) -> Float32:
        embeddings: Float32 = await self._replicas.call(
            context, lambda made_by: self._handle.encode.remote(list(questions), context, made_by)
        )
        return embeddings

    async def encode_own(self, passages: Sequence[Passage], context: Context) -> Float32:
        embeddings: Float32 = await self._replicas.call(
            context, lambda made_by: self._handle.encode_own.remote(list(passages), context, made_by)
        )
        return embeddings
