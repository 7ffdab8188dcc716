"""A whole training step beside transformers' RAG classes: forward, backward, AdamW. CPU time and peak memory.

    python benchmarks/bench_train.py [--questions 8] [--passages 10] [--target 25] [--real 180 300] [--padded 300]

Ours is a step of `openbook.training.loop` over `openbook.training.loss`: questions are encoded for the search and once
more for the gradient; the search itself is left out on both sides. Theirs is the loop that a person writes around
`RagSequenceForGeneration` or `RagTokenForGeneration`: loss, backward, clipping, torch's AdamW. Same random weights, no
dropout, one thread, a process for each. The CPU time is that of the last of `--steps` steps, for memory that a process
has not touched before costs the first one more; the memory is the most that the process held, weights and moments
included. Losses and gradient norms of every step must be equal. `--real` tokens of a context are no padding. Where the
processor multiplies bfloat16, both are also measured so. A table, and one JSON line.
"""

import argparse
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rag_side_by_side import THEIRS, Batch, build, compare, dpr, rag
from torch import Tensor

from openbook.core.types import Formulation
from openbook.models.checkpoint import GeneratorCheckpoint
from openbook.models.encoder import EncoderCheckpoint
from openbook.models.formats import RagFormat
from openbook.models.pooling import Pooling
from openbook.training.loop import Loop
from openbook.training.loss import Collated, RagLoss
from openbook.training.retrieval import Nothing
from openbook.training.settings import TrainingSettings

OURS, TWICE, HALF = "openbook", ", gradient checkpointing", ", bfloat16"
N_QUESTION_TOKENS = 16
RATE, MAX_NORM = 1e-5, 1.0
Step = Callable[[], tuple[float, float]]
"""Takes one; gives the loss of a question and the norm of all gradients."""


@dataclass(frozen=True)
class Parts:
    """What both train, and on what."""

    formulation: Formulation
    half: bool
    encoder: Any
    generator: Any
    questions: Tensor  # (n, t) token ids
    vectors: Tensor  # (n, k, d) of the passages
    batch: Batch

    @classmethod
    def random(cls, args: Any, formulation: Formulation, half: bool, encoder: Any, generator: Any) -> "Parts":
        """On the device of the models, whose states are as wide as the vectors."""
        device, width = generator.device, encoder.config.hidden_size
        random = torch.Generator().manual_seed(1)
        questions = torch.randint(5, 30522, (args.questions, N_QUESTION_TOKENS), generator=random)
        vectors = torch.randn(args.questions, args.passages, width, generator=random) / 20
        tensors = questions.to(device), vectors.to(device), Batch.random(args).to(device)
        return cls(formulation, half, encoder, generator, *tensors)


def measure(args: argparse.Namespace, formulation: Formulation, whose: str) -> dict[str, Any]:
    """All steps; the time of the last."""
    models = dpr(args.d_model, args.layers), build(args)
    parts = Parts.random(args, formulation, whose.endswith(HALF), *models)
    step = theirs(parts) if whose.startswith(THEIRS) else ours(parts, recompute=TWICE in whose)
    results, cpu_s = [], 0.0
    for _ in range(args.steps):
        started = time.process_time()
        results.append(step())
        cpu_s = time.process_time() - started
    losses, norms = zip(*results, strict=True)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tolerance = {"tolerance": 2e-2} if parts.half else {}
    return {"cpu_s": cpu_s, "peak_mb": peak_mb, "losses": losses, "gradient_norms": norms, **tolerance}


def theirs(parts: Parts) -> Step:
    """The scores as transformers' own retriever gives them, from the vectors."""
    batch = parts.batch
    model = rag(parts.generator, parts.formulation, parts.vectors.shape[1], parts.encoder)
    adam = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)

    def step() -> tuple[float, float]:
        with torch.autocast(parts.questions.device.type, torch.bfloat16, enabled=parts.half):
            queries = model.question_encoder(parts.questions).pooler_output
            loss = model(
                context_input_ids=batch.ids,
                context_attention_mask=batch.mask,
                doc_scores=torch.bmm(queries[:, None], parts.vectors.transpose(1, 2))[:, 0],
                labels=batch.labels_with_start,
                reduce_loss=True,
            ).loss / len(batch.labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        adam.step()
        adam.zero_grad()
        return loss.item(), norm.item()

    return step


class Fed(RagLoss):
    """With the same passages at every step."""

    def feed(self, collated: Collated) -> None:
        """What is collated from now on."""
        self._fed = collated

    def collate(self, examples: Sequence[Any]) -> Collated:
        """Bare. The queries of the search are computed, as they are in training."""
        with torch.no_grad():
            self._queries(self._fed.query_ids, self._fed.query_mask)
        return self._fed


def ours(parts: Parts, recompute: bool) -> Step:
    """A step of a run of `openbook train`."""
    batch, (n, k, _) = parts.batch, parts.vectors.shape
    loop = {"out": "unused", "n_steps": 100, "batch_size": n, "micro_batch_size": n}
    loop |= {"dtype": "bfloat16" if parts.half else "float32", "gradient_checkpointing": recompute}
    settings = TrainingSettings.model_validate(
        {
            "task": {"train": [{"path": "unused"}]},
            "retrieval": {"k": k, "snapshot": "unused"},
            "models": {"formulation": parts.formulation, "dropout": False},
            "optimizer": {"learning_rate": RATE, "max_gradient_norm": MAX_NORM, "decay": "constant"},
            "loop": loop,
        }
    )
    encoder = EncoderCheckpoint(parts.encoder, None, Pooling("pooler", False, 256, "pair"))
    objective = Fed(encoder, GeneratorCheckpoint(parts.generator, None, RagFormat()), Nothing(), settings)
    everywhere = torch.ones_like(parts.questions)
    scores = torch.zeros(n, k)  # computed anew from the vectors
    contexts = batch.ids, batch.mask
    objective.feed(Collated(parts.questions, everywhere, parts.vectors, scores, *contexts, batch.labels, n * k))
    steps = Loop(objective, range(n), settings.loop, settings.optimizer).run()

    def step() -> tuple[float, float]:
        report = next(steps)
        return report.loss, report.gradient_norm

    return step


if __name__ == "__main__":
    contestants = [OURS, OURS + TWICE]
    if torch.cpu.get_capabilities().get("avx512_bf16"):
        contestants += [THEIRS + HALF, OURS + HALF]
    compare(__doc__, "train", contestants, measure, {"losses": 1e-4, "gradient_norms": 1e-3}, [180, 300], steps=2)
