"""`openbook build --ray`: passages encoded by tasks of a Ray cluster, as many at once as it has room for.

Ray only executes. Passages reach it, and embeddings come back, through its object store; which of them are done, only
the build knows, which goes on from its own note, here or there.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import RayError

from openbook import local_ray
from openbook.config import EncoderSettings
from openbook.core.types import Float32, Passage
from openbook.corpus.encode import alone
from openbook.errors import InvalidModel, OpenbookError, StartupError
from openbook.models.encoder import TextEncoder
from openbook.models.gpu import told_if_gpu_full

log = logging.getLogger(__name__)

MOST_RETRIES = 5
"""Of a task whose process or node died."""

TASKS_FOR_EACH_PLACE = 2
"""One is computed, the next one's passages are on their way."""


class Encoded(NamedTuple):
    """What a task gives back."""

    space: str
    embedded_by: str
    computed_by: str  # what else bits depend on
    embeddings: Float32  # (n, d)


@contextmanager
def encoders(address: str, settings: EncoderSettings) -> Iterator["RayEncoders"]:
    """Those of the cluster at an address. Raises StartupError: it cannot be joined."""
    with local_ray.joined(address):
        yield RayEncoders(settings)


class RayEncoders:
    """`openbook.corpus.encode.Elsewhere` on the Ray that this process is connected to.

    Args:
        settings: of the encoder. Each task has `num_cpus` and `num_gpus` of it, and computes on a GPU if it has any.
    """

    def __init__(self, settings: EncoderSettings) -> None:
        here = Path(settings.model)  # in Ray's processes a path is relative to something else
        changes = {"model": str(here.absolute())} if here.exists() else {}
        if settings.device == "auto":
            changes["device"] = "cuda" if settings.num_gpus else "cpu"
        settings = settings.model_copy(update=changes)
        self.on_gpu = settings.device != "cpu"
        self._settings = alone(settings).model_dump_json()
        self._shares = {"CPU": settings.num_cpus, "GPU": settings.num_gpus}
        reserved = {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus}
        # Ray would end a process with a share of a GPU after each task (max_calls 1), and its model with it. This one
        # stays on the GPU of its first task, whichever Ray reserves for the next: CUDA looks at what it may see once.
        self._encode = ray.remote(max_retries=MOST_RETRIES, max_calls=0, **reserved)(encode)
        self._first: Encoded | None = None
        self._warned_of = set[str]()

    def embeds_passages_by(self, space: str) -> str:
        """See `Elsewhere`."""
        if not self._room():
            log.warning("no node of the Ray cluster has %s for a task now; waiting for one", self._shares)
        self._first = self._result(self._encode.remote(self._settings, []))
        if self._first.space != space:
            raise InvalidModel(f"the encoder must be {space}, as here, found {self._first.space} on Ray's nodes")
        return self._first.embedded_by

    def encode(self, blocks: Iterable[tuple[range, Sequence[Passage]]]) -> Iterator[tuple[range, Float32]]:
        """See `Elsewhere`."""
        unread, at_work = iter(blocks), dict[Any, range]()
        while True:
            most = TASKS_FOR_EACH_PLACE * max(1, self._room())
            while len(at_work) < most and (block := next(unread, None)):
                at_work[self._encode.remote(self._settings, block[1])] = block[0]
            if not at_work:
                return
            (done,), _ = ray.wait(list(at_work))
            yield at_work.pop(done), self._result(done).embeddings

    def _room(self) -> int:
        """How many tasks the cluster can have at once."""
        there = ray.cluster_resources()
        return int(min((there.get(name, 0) / share for name, share in self._shares.items() if share), default=1))

    def _result(self, task: Any) -> Encoded:
        try:
            found: Encoded | OpenbookError = ray.get(task)
        except RayError as error:
            raise StartupError(f"passages could not be encoded on Ray: {error}") from None
        if isinstance(found, OpenbookError):
            raise found
        first = self._first or found
        if (found.space, found.embedded_by) != (first.space, first.embedded_by):
            raise InvalidModel(
                f"all of Ray's nodes must embed passages alike, found {first.embedded_by} and {found.embedded_by}"
            )
        if found.computed_by not in (first.computed_by, *self._warned_of):
            self._warned_of.add(found.computed_by)
            log.warning("bits of embeddings may depend on the node: %s, %s", first.computed_by, found.computed_by)
        return found


def encode(settings: str, passages: Sequence[Passage]) -> Encoded | OpenbookError:
    """A task. Errors of ours are values: Ray would log the others."""
    try:
        model = _model(settings)
        device = EncoderSettings.model_validate_json(settings).device
        make = torch.backends.cpu.get_cpu_capability() if device == "cpu" else torch.cuda.get_device_name(device)
        computed_by = f"torch {torch.__version__}, {make}"
        with told_if_gpu_full(StartupError, "a GPU's memory is full: reserve more of it with --ray-gpus"):
            return Encoded(model.space, model.embeds_passages_by, computed_by, model.encode_passages(passages))
    except OpenbookError as error:
        return error


@cache
def _model(settings: str) -> TextEncoder:
    """One for each of Ray's processes, which live on from task to task."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return TextEncoder.load(EncoderSettings.model_validate_json(settings), role="passage")
