"""What a run minimises: the sum of -log p(y|x) over its examples (section 2.4), with torch and transformers alone.

Gradients reach the query encoder through the prior, whose scores are computed anew from the stored vectors of the
passages, and the generator through the likelihood. Passage encoder and index stay as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from openbook.core.types import NO_HIT, Float32
from openbook.errors import InvalidRequest
from openbook.models import marginal
from openbook.models.checkpoint import GeneratorCheckpoint, of_base
from openbook.models.encoder import EncoderCheckpoint, embed, question_ids
from openbook.models.formats import pad
from openbook.models.seq2seq import Seq2Seq
from openbook.training.data import Example
from openbook.training.loop import Loss, TrainingDiverged
from openbook.training.retrieval import EMPTY, Found, PassageFinder
from openbook.training.settings import TrainingSettings

LENGTH_STEP = 32
"""Lengths are multiples of this: CPU kernels keep what they prepare for every new shape, which costs gigabytes."""

PORTIONS = {"cpu": 1 << 12, "cuda": 1 << 14}
"""Tokens whose computations are kept until their backward pass, unless a single question has more: more at once would
not be faster."""


@dataclass(frozen=True, slots=True)
class Collated:
    """n examples with their k passages, as tensors."""

    query_ids: Tensor  # (n, t)
    query_mask: Tensor
    vectors: Tensor | None  # (n, k, d)
    scores: Tensor  # (n, k) as retrieved; -inf in empty slots
    context_ids: Tensor  # (n * k, l)
    context_mask: Tensor
    labels: Tensor  # (n, t) padded with -100
    n_distinct: float  # passages

    def __getitem__(self, questions: slice) -> "Collated":
        """Some of the questions, and their share of the distinct passages."""
        n, k = self.scores.shape
        rows, labels = slice(questions.start * k, questions.stop * k), self.labels[questions]
        return Collated(
            self.query_ids[questions],
            self.query_mask[questions],
            None if self.vectors is None else self.vectors[questions],
            self.scores[questions],
            self.context_ids[rows],
            self.context_mask[rows],
            labels[:, : int((labels != marginal.IGNORED).sum(1).max())],
            self.n_distinct * len(labels) / n,
        )


class RagLoss(nn.Module):
    """The loss of RAG-Sequence or RAG-Token over a query encoder and a generator, which it holds as modules."""

    def __init__(
        self,
        query_encoder: EncoderCheckpoint,
        generator: GeneratorCheckpoint,
        retriever: PassageFinder,
        settings: TrainingSettings,
    ) -> None:
        super().__init__()
        self.query_encoder: nn.Module = query_encoder.model.eval()
        self.generator: nn.Module = generator.model.train(settings.models.dropout)
        self.retriever = retriever
        self._encoder, self._reads = query_encoder, generator
        self._settings, self._formulation = settings, settings.models.formulation
        self._is_dense, self._trains_queries = settings.retrieval.kind == "dense", settings.trains_query_encoder
        self.query_encoder.requires_grad_(settings.trains_query_encoder)
        self.generator.requires_grad_(settings.models.train_generator)
        if generator.base is not None:
            for name, parameter in self.generator.named_parameters():
                if of_base(name):  # shared with the base, and not stored
                    parameter.requires_grad_(False)
        self._reader: Seq2Seq | None = None

    @property
    def identity(self) -> Mapping[str, str]:
        """Of what the run began with."""
        return {**self.retriever.identity, "generator": self._reads.fingerprint}

    def collate(self, examples: Sequence[Example]) -> Collated:
        """Retrieve with the query encoder as it is, without gradients, and make tensors of what was found.

        Raises:
            InvalidRequest: a question or an answer is too long.
            TrainingDiverged, ShardUnavailable, Overloaded, SnapshotMismatch: as `retrieve`.
        """
        return self.as_tensors(examples, self.retrieve(examples))

    def as_tensors(self, examples: Sequence[Example], found: Found) -> Collated:
        """Of examples and the passages found for them. Raises InvalidRequest as `collate`."""
        query_ids, query_mask = self._question_ids(examples)
        contexts = [
            context
            for example, passages in zip(examples, found.passages, strict=True)
            for context in self._reads.contexts(example.text, passages)
        ]
        context_ids, context_mask = pad(contexts, self._pad, LENGTH_STEP, self._reads.input_format.max_tokens)
        context_mask *= torch.from_numpy(found.ids != NO_HIT).flatten()[:, None]
        return Collated(
            query_ids,
            query_mask,
            None if found.vectors is None else torch.from_numpy(found.vectors),
            torch.from_numpy(found.scores),
            context_ids,
            context_mask,
            self.labels([example.target for example in examples]),
            len(np.unique(found.ids[found.ids != NO_HIT])),
        )

    def check(self, example: Example) -> None:
        """Whether it can be trained on. Raises InvalidRequest: question or answer has too many tokens."""
        self._reads.contexts(example.text, [EMPTY])
        self.labels([example.target])

    def retrieve(self, examples: Sequence[Example], k: int | None = None) -> Found:
        """The k passages of each example, found with the query encoder as it is; as many as are trained with.

        Raises:
            TrainingDiverged: a query is not finite.
            ShardUnavailable, Overloaded, SnapshotMismatch: as `PassageFinder.find`.
        """
        queries: Float32 | None = None
        if self._is_dense:
            with torch.no_grad():
                queries = self._queries(*self._question_ids(examples)).cpu().numpy()
            if not np.isfinite(queries).all():
                raise TrainingDiverged("the query encoder's queries are not finite any more")
        return self.retriever.find(examples, queries, k or self._settings.retrieval.k)

    def portions(self, collated: Collated) -> Iterator[Collated]:
        """As many questions at once as have no more tokens than are worth computing together, or one."""
        n_tokens = collated.context_mask.view(len(collated.scores), -1).sum(1).tolist()
        most, first, total = PORTIONS.get(self.device.type, PORTIONS["cpu"]), 0, 0
        for i, more in enumerate(n_tokens):
            if i > first and total + more > most:
                yield collated[first:i]
                first, total = i, 0
            total += more
        yield collated[first : len(n_tokens)]

    def forward(self, collated: Collated) -> Loss:
        """-log p(y|x) summed over the examples."""
        log_prior_of = self.scores(collated)
        losses = marginal.loss(
            self.reader,
            collated.context_ids,
            collated.context_mask,
            log_prior_of,
            collated.labels,
            self._formulation,
            label_smoothing=self._settings.optimizer.label_smoothing,
        )
        with torch.no_grad():
            log_prior = marginal.log_prior(log_prior_of)
            entropy = -(log_prior.exp() * log_prior.clamp_min(-1e30)).sum()
        return Loss(
            losses.sum(),
            {
                "prior_entropy": float(entropy),
                "distinct_passages": float(collated.n_distinct),
                "tokens": float(collated.context_mask.sum() + (collated.labels != marginal.IGNORED).sum()),
            },
        )

    def scores(self, collated: Collated) -> Tensor:
        """(n, k) logits of the prior, with gradients for the query encoder if it is trained."""
        scores = collated.scores.to(self.device)
        if not self._trains_queries or collated.vectors is None:
            return scores
        queries = self._queries(collated.query_ids, collated.query_mask)
        # Not a matrix product: autocast would round it to bfloat16.
        computed = (queries[:, None] * collated.vectors.to(self.device)).sum(-1)
        return computed.masked_fill(scores.isneginf(), -torch.inf)

    @property
    def reader(self) -> Seq2Seq:
        """The generator in training mode. Made when it is first asked for: weights may still move to a device."""
        if self._reader is None or self._reader.device != self.device:
            recompute = self._settings.recomputes
            self._reader = Seq2Seq(self.generator, keep_mode=True, recompute=recompute, adds_gradients=True)
        return self._reader

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.generator.parameters()).device

    def labels(self, targets: Sequence[str]) -> Tensor:
        """(n, t) token ids as decoding would produce them, end-of-sequence included, padded with -100.

        The words of a classification have one token each and no end, where all of them have one (section 3.4). A BOS
        that the model forces stands before them, too: there they are read when a label is chosen.

        Raises:
            InvalidRequest: a target has more tokens than `task.max_target_tokens`, or than the decoder can read.
        """
        task, special = self._settings.task, self.reader.special
        tokenized = [self._reads.answer_ids(target) for target in targets]
        words = [self._reads.answer_ids(word) for word in task.labels.values()]
        ends = [] if words and all(len(word) == 1 for word in words) else [special.eos[0]]
        begins = [] if special.forced_bos is None else [special.forced_bos]
        rows = [[*begins, *tokens, *ends] for tokens in tokenized]
        limit = min(task.max_target_tokens, self._reads.max_answer_tokens or task.max_target_tokens)
        name = "task.max_target_tokens" if limit == task.max_target_tokens else "the generator's positions"
        for target, row in zip(targets, rows, strict=True):
            if not 1 <= len(row) <= limit:
                raise InvalidRequest(
                    f"an answer must have 1..{name} = {limit} tokens, got {len(row)} in {target[:100]!r}"
                )
        ids, mask = pad(rows, special.pad)
        return ids.masked_fill(mask == 0, marginal.IGNORED)

    def _question_ids(self, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
        pooling, tokenizer = self._encoder.pooling, self._encoder.tokenizer
        rows = question_ids(tokenizer, pooling, [example.text for example in examples])
        return pad(rows, tokenizer.pad_token_id, LENGTH_STEP // 2, pooling.max_tokens)

    def _queries(self, ids: Tensor, mask: Tensor) -> Tensor:
        # In float32, as in the search: a query is a few tokens, and query_scale would multiply its rounding.
        # Left alone where it is off: leaving it clears the weights that it has rounded for any thread of the process.
        device = self.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            queries = embed(self.query_encoder, self._encoder.pooling, ids.to(self.device), mask.to(self.device))
        return queries * self._encoder.pooling.query_scale

    @property
    def _pad(self) -> int:
        return self.reader.special.pad
