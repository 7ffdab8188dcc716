"""RAG as what a run trains: query encoder and generator over passages that are retrieved at every step."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from transformers import DPRQuestionEncoder

from openbook.core.space import Space
from openbook.errors import InvalidDocuments, InvalidRequest
from openbook.models.checkpoint import load_generator, torch_device
from openbook.models.encoder import load_encoder
from openbook.models.formats import RagFormat
from openbook.models.saving import check_generator, check_rag, save_encoder, save_generator, save_rag
from openbook.training.data import Example, Search, examples_digest, read_examples, read_validation
from openbook.training.loss import RagLoss
from openbook.training.opening import open_retriever
from openbook.training.retrieval import REGEX_PASSAGES, PassageFinder, texts_by
from openbook.training.settings import TrainingSettings
from openbook.training.validation import Validation
from openbook.training.world import World

log = logging.getLogger(__name__)


class RagJob:
    """See `openbook.training.run.Job`."""

    def __init__(self, settings: TrainingSettings, world: World) -> None:
        self._settings = settings
        device = torch_device(settings.loop.device)
        self._encoder = load_encoder(settings.models.query_encoder, passage_model=settings.models.passage_model)
        self._generator = load_generator(settings.models.generator)
        self._space = self._encoder.space
        self._check_layout()
        fingerprint = self._encoder.fingerprint
        queries = Space(f"query encoder {settings.models.query_encoder!r}", self._space, self._encoder.dimension)
        with ExitStack() as undo:
            self._retriever: PassageFinder = open_retriever(settings.retrieval, queries, device)
            undo.callback(self.close)
            self.objective = RagLoss(self._encoder, self._generator, self._retriever, settings).to(device)
            self.examples = self._usable(read_examples(settings.task, settings.loop.seed, self._search))
            if not self.examples:
                raise InvalidDocuments("all examples are too long to be trained on, as the warning before this says")
            self.plan = {
                **self.objective.identity,
                "query encoder": fingerprint,
                "examples": examples_digest(self.examples),
            }
            asked = self._usable(read_validation(settings.task, settings.loop.n_validation))
            self._check_contexts([*self.examples, *asked])
            self.validation = Validation(self.objective, self._generator, asked, settings, world) if asked else None
            undo.pop_all()

    def _check_contexts(self, examples: Sequence[Example]) -> None:
        """Raises InvalidDocuments: an example has no passage of its own, where these are read."""
        bare = [each.question.id for each in examples if not each.question.context]
        if self._settings.retrieval.kind == "given" and bare:
            raise InvalidDocuments(
                f"retrieval.kind = 'given' needs a context for every question: question {bare[0]} has none, as "
                f"{len(bare)} of {len(examples)}"
            )

    def validate(self) -> Mapping[str, float]:
        """See `Validation`."""
        return self.validation() if self.validation else {}

    def save(self, folder: Path) -> None:
        """In RAG's layout where it can hold both models, else each in a folder of its own."""
        models = self._settings.models
        dtype: torch.dtype = getattr(torch, models.saved_dtype)
        encoder = replace(self._encoder, declared_space=self._space)
        if self._fits_rag:
            save_rag(folder, encoder, self._generator, models.formulation)
            return
        if self._settings.trains_query_encoder:
            save_encoder(folder / "query_encoder", encoder, dtype)
        save_generator(folder / "generator", self._generator, dtype)

    def close(self) -> None:
        """Let go of the index."""
        self._retriever.close()

    @property
    def _fits_rag(self) -> bool:
        return isinstance(self._encoder.model, DPRQuestionEncoder) and isinstance(
            self._generator.input_format, RagFormat
        )

    def _check_layout(self) -> None:
        """What could not be saved at the end is refused at the start."""
        if self._fits_rag:
            check_rag(self._encoder, self._generator)
        else:
            check_generator(self._generator)

    @property
    def _search(self) -> Search | None:
        if self._settings.retrieval.kind not in ("dense", "bm25"):
            return None
        return texts_by(lambda examples: self.objective.retrieve(examples, REGEX_PASSAGES))

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
