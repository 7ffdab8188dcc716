"""The bi-encoder that a retriever begins as, trained as DPR is (Karpukhin et al. 2020, section 3.2).

A question's negatives are its own hard ones and all passages of the other questions in its *micro-batch*: therefore the
result does not depend on the number of workers, and `loop.micro_batch_size` is the batch size of the paper. With
`loop.gradient_checkpointing` passages are embedded a few at a time and once more in the backward pass, so memory holds
the activations of those few, however large the micro-batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from openbook.core.types import Passage
from openbook.errors import InvalidConfig, InvalidModel
from openbook.models.checkpoint import torch_device
from openbook.models.encoder import LENGTH_STEP, EncoderCheckpoint, embed, load_encoder, passage_ids, question_ids
from openbook.models.formats import pad
from openbook.models.saving import save_encoder
from openbook.training.data import read_examples, read_validation
from openbook.training.loop import Loss
from openbook.training.opening import open_retriever
from openbook.training.pairs import Pair, mined, pairs_digest, pool
from openbook.training.retrieval import REGEX_PASSAGES, SnapshotTexts, texts_by
from openbook.training.settings import BiEncoderSettings, TrainingSettings
from openbook.training.world import World

T = TypeVar("T")

ROWS_AT_ONCE = 32
QUERY_ENCODER, PASSAGE_ENCODER = "query_encoder", "passage_encoder"


@dataclass(frozen=True, slots=True)
class Collated:
    """n questions and m passages as tensors: the n positives in the questions' order, then all hard negatives."""

    query_ids: Tensor  # (n, t)
    query_mask: Tensor
    passage_ids: Tensor  # (m, l)
    passage_mask: Tensor
    left_out: Tensor  # (n, m) bool: passages that answer the question and are not its positive


class BiEncoderLoss(nn.Module):
    """-log softmax of the positive's inner product among all passages of the micro-batch (equation 2).

    One tower, where both encoders are the same object, or two. Queries of normalised encoders are `query_scale` long,
    as when they search. A passage that answers another's question is no negative for it, which in DPR it is.
    """

    def __init__(self, query_encoder: EncoderCheckpoint, passage_encoder: EncoderCheckpoint, recompute: bool) -> None:
        super().__init__()
        self._queries_of, self._passages_of, self._recompute = query_encoder, passage_encoder, recompute
        self.query_encoder: nn.Module = query_encoder.model
        self.passage_encoder: nn.Module = passage_encoder.model
        self.dimension = passage_encoder.dimension
        """d"""

    def collate(self, examples: Sequence[Pair]) -> Collated:
        """Tensors of a micro-batch."""
        passages, left_out = pool(examples)
        questions = self.question_tensors([pair.example.text for pair in examples])
        return Collated(*questions, *self.passage_tensors(passages), torch.from_numpy(left_out))

    def portions(self, collated: Collated) -> list[Collated]:
        """All of it: each passage is a negative of every other question."""
        return [collated]

    def forward(self, collated: Collated) -> Loss:
        """The loss summed over the questions, and how many have their positive before all negatives."""
        queries = self.queries(collated.query_ids, collated.query_mask)
        passages = self.passages(collated.passage_ids, collated.passage_mask)
        with torch.autocast(self.device.type, enabled=False):  # it would round the scores to bfloat16
            scores = (queries @ passages.T).masked_fill(collated.left_out.to(self.device), -torch.inf)  # (n, m)
        own = torch.arange(len(queries), device=self.device)
        n_first = (scores.detach().argmax(-1) == own).sum()
        n_tokens = collated.query_mask.sum() + collated.passage_mask.sum()
        loss = F.cross_entropy(scores, own, reduction="sum")
        return Loss(loss, {"accuracy": float(n_first), "tokens": float(n_tokens)})

    def queries(self, ids: Tensor, mask: Tensor) -> Tensor:
        """(n, d) as they search."""
        return self._embedded(self.query_encoder, self._queries_of, ids, mask) * self._queries_of.pooling.query_scale

    def passages(self, ids: Tensor, mask: Tensor) -> Tensor:
        """(m, d) as they are stored."""
        return self._embedded(self.passage_encoder, self._passages_of, ids, mask)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.passage_encoder.parameters()).device

    def question_tensors(self, questions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """(n, t) token ids and their mask."""
        tokenizer, pooling = self._queries_of.tokenizer, self._queries_of.pooling
        rows = question_ids(tokenizer, pooling, questions)
        return pad(rows, tokenizer.pad_token_id, LENGTH_STEP // 2, pooling.max_tokens)

    def passage_tensors(self, passages: Sequence[Passage]) -> tuple[Tensor, Tensor]:
        """(m, l) token ids and their mask."""
        tokenizer, pooling = self._passages_of.tokenizer, self._passages_of.pooling
        rows = passage_ids(tokenizer, pooling, passages)
        return pad(rows, tokenizer.pad_token_id, LENGTH_STEP, pooling.max_tokens)

    def _embedded(self, tower: nn.Module, encoder: EncoderCheckpoint, ids: Tensor, mask: Tensor) -> Tensor:
        ids, mask = ids.to(self.device), mask.to(self.device)
        if not (self._recompute and torch.is_grad_enabled()):
            return embed(tower, encoder.pooling, ids, mask)
        few = [slice(start, start + ROWS_AT_ONCE) for start in range(0, len(ids), ROWS_AT_ONCE)]
        parts = [checkpoint(embed, tower, encoder.pooling, ids[i], mask[i], use_reentrant=False) for i in few]
        return torch.cat(parts)


class BiEncoderJob:
    """See `openbook.training.run.Job`."""

    def __init__(self, settings: TrainingSettings, own: BiEncoderSettings, world: World) -> None:
        """Raises InvalidConfig, beside what a `Job` does: DPR's question encoder alone, which cannot read passages."""
        device = torch_device(settings.loop.device)
        self._dropout = settings.models.dropout
        self._query_encoder, self._passage_encoder = _towers(settings.models.query_encoder, own.passage_encoder)
        plan = {
            "query encoder": self._query_encoder.fingerprint,
            "passage encoder": self._passage_encoder.fingerprint,
            "towers": "1" if self._query_encoder is self._passage_encoder else "2",
        }
        self.objective = BiEncoderLoss(self._query_encoder, self._passage_encoder, settings.recomputes).to(device)
        self.objective.passage_encoder.requires_grad_()
        self.objective.query_encoder.requires_grad_(settings.models.train_query_encoder)
        self.objective.train(self._dropout)
        retrieval, task = settings.retrieval, settings.task.model_copy(update={"max_answers": 1})
        bm25 = open_retriever(retrieval, None, device)
        search = texts_by(lambda examples: bm25.find(examples, None, REGEX_PASSAGES))
        self.examples = mined(read_examples(task, settings.loop.seed, search), bm25, retrieval.k, own.n_negatives)
        self.plan = {**bm25.identity, **plan, "examples": pairs_digest(self.examples)}
        asked = read_validation(task, settings.loop.n_validation)
        self._validation: Validation | None = None
        if asked:
            assert retrieval.snapshot is not None
            pairs = mined(asked, bm25, retrieval.k, own.n_negatives)
            others = _sample(SnapshotTexts(retrieval.snapshot), own.n_validation_passages)
            self._validation = Validation(self.objective, pairs, others, world)

    def validate(self) -> Mapping[str, float]:
        """See `Validation`."""
        self.objective.eval()
        measured = self._validation() if self._validation else {}
        self.objective.train(self._dropout)
        return measured

    def save(self, folder: Path) -> None:
        """Both encoders, the passage encoder also where it is the same: `openbook build --encoder` takes its folder.

        The query encoder declares the space of the passage encoder, so that it asks for no other's passages.
        """
        passage_encoder = replace(self._passage_encoder, declared_space=None)
        query_encoder = replace(self._query_encoder, declared_space=passage_encoder.fingerprint)
        save_encoder(folder / PASSAGE_ENCODER, passage_encoder)
        save_encoder(folder / QUERY_ENCODER, query_encoder)

    def close(self) -> None:
        """Nothing to close."""


class Validation:
    """Where the positives of a fixed set of questions rank in a fixed pool of passages: all positives, all hard
    negatives, and some more of the corpus. As in training, another passage that has an answer does not count."""

    def __init__(
        self, objective: BiEncoderLoss, pairs: Sequence[Pair], others: Sequence[Passage], world: World
    ) -> None:
        self._objective, self._world = objective, world
        self._questions = [pair.example.text for pair in pairs]
        self._passages, left_out = pool(pairs, others)
        self._left_out = torch.from_numpy(left_out)

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Means over all questions."""
        loss = self._objective
        queries = self._together(self._questions, lambda some: loss.queries(*loss.question_tensors(some)))
        passages = self._together(self._passages, lambda some: loss.passages(*loss.passage_tensors(some)))
        scores = (queries @ passages.T).masked_fill(self._left_out, -torch.inf)  # (n, m)
        # Ties count against it: an encoder that gives all passages one vector finds nothing.
        ranks = (scores >= scores.diagonal()[:, None]).sum(-1).double()
        recalls = {f"recall_at_{k}": float((ranks <= k).double().mean()) for k in RECALL_AT}
        return {**recalls, "reciprocal_rank": float((1 / ranks).mean())}

    def _together(self, items: Sequence[T], embedded: Callable[[Sequence[T]], Tensor]) -> Tensor:
        """(len(items), d) on the CPU. Every worker embeds its share of the rows, and gets those of the others."""
        world, mine = self._world, range(self._world.rank, len(items), self._world.n_workers)
        vectors = torch.zeros(len(items), self._objective.dimension, device=self._objective.device)
        for start in range(0, len(mine), ROWS_AT_ONCE):
            rows = mine[start : start + ROWS_AT_ONCE]
            vectors[list(rows)] = embedded([items[i] for i in rows])
        world.add_up([vectors])
        return vectors.cpu()


RECALL_AT = (1, 5, 20)


def _towers(query: str, passage: str | None) -> tuple[EncoderCheckpoint, EncoderCheckpoint]:
    """Query and passage encoder, which are the same object where there is one tower."""
    query_encoder = load_encoder(query, passage_model=None)
    if passage is None:
        if query_encoder.pooling.mode == "pooler":
            raise InvalidConfig(f"biencoder.passage_encoder is needed: {query!r} is DPR's encoder of questions alone")
        return query_encoder, query_encoder
    passage_encoder = load_encoder(passage, "passage")
    if query_encoder.dimension != passage_encoder.dimension:
        raise InvalidModel(
            f"queries of {query!r} have {query_encoder.dimension} dimensions, "
            f"passages of {passage!r} {passage_encoder.dimension}"
        )
    return query_encoder, passage_encoder


def _sample(texts: SnapshotTexts, n_passages: int) -> list[Passage]:
    chosen = np.random.default_rng(0).choice(len(texts), min(n_passages, len(texts)), replace=False)
    return [texts[i] for i in sorted(chosen.tolist())]
