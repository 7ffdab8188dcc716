"""How well the weights of now answer: the same questions each time, all workers taking their share."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from openbook.core.metrics import exact_match, f1, regex_match
from openbook.core.types import NO_HIT, Float64, GenerationSettings, Int64
from openbook.evaluation.score import answering
from openbook.models import decoding, marginal
from openbook.models.checkpoint import GeneratorCheckpoint
from openbook.models.seq2seq import Seq2Seq
from openbook.training.data import Example
from openbook.training.loss import Collated, RagLoss
from openbook.training.retrieval import Found
from openbook.training.settings import TrainingSettings
from openbook.training.world import World

EXAMPLES_AT_ONCE = 8
MAX_NEW_TOKENS = 512
"""As many as `GenerationSettings` lets be asked for."""


class Validation:
    """Measured on a fixed set of examples. Made before the first step: it keeps what the frozen retriever found."""

    def __init__(
        self,
        objective: RagLoss,
        generator: GeneratorCheckpoint,
        examples: Sequence[Example],
        settings: TrainingSettings,
        world: World,
    ) -> None:
        self._objective, self._generator, self._world = objective, generator, world
        self._examples = examples[world.rank :: world.n_workers]
        self._settings = settings
        self._frozen = [self._found(batch).ids for batch in self._batches()]

    def __call__(self) -> dict[str, float]:
        """Means over all examples of all workers for which there is such a number, by name.

        Entropy and agreement, with the distinct passages of a batch, are the signs of a retriever that collapses.
        """
        rows = self.measured()
        total = torch.from_numpy(np.stack([np.nansum(rows, 0), (~np.isnan(rows)).sum(0)])).to(self._objective.device)
        self._world.add_up([total])
        return {name: of / n for name, of, n in zip(NAMES, *total.tolist(), strict=True) if n}

    def measured(self) -> Float64:
        """(n, 6) for each of this worker's examples, in the order of NAMES: log p(y|x), exact match (or accuracy), F1,
        whether a passage has an answer, entropy of the prior in nats, and the share of its passages that the retriever
        found before training.

        NaN where there is none: the probability of an answer of which only a regular expression is known, passages
        that have the answer where the answer is a class.
        """
        reader = Seq2Seq(self._objective.generator)
        with torch.inference_mode():
            batches = zip(self._batches(), self._frozen, strict=True)
            rows = [self._of_batch(batch, frozen, reader) for batch, frozen in batches]
        return np.concatenate([*rows, np.zeros((0, len(NAMES)))])

    def _of_batch(self, batch: Sequence[Example], frozen: Int64, reader: Seq2Seq) -> Float64:
        found = self._found(batch)
        collated = self._objective.as_tensors(batch, found)
        inputs = collated.context_ids, collated.context_mask, self._objective.scores(collated)
        task, formulation = self._settings.task, self._settings.models.formulation
        log_p = marginal.log_likelihood(reader, *inputs, collated.labels, formulation)
        log_prior = marginal.log_prior(inputs[2])
        entropy = -(log_prior.exp() * log_prior.clamp_min(-1e30)).sum(-1)
        agreement = [
            len({*now} & {*then} - {NO_HIT}) / max(1, len({*then} - {NO_HIT}))
            for now, then in zip(found.ids.tolist(), frozen.tolist(), strict=True)
        ]
        texts = self._answers(reader, collated, found)
        right = [_scores(text, example, task.labels) for text, example in zip(texts, batch, strict=True)]
        recalled = [_recalled(example, found, row) for row, example in enumerate(batch)]
        rows = np.column_stack([log_p.cpu(), right, recalled, entropy.cpu(), agreement]).astype(np.float64)
        rows[[not example.target for example in batch], NAMES.index("log_likelihood")] = np.nan
        if task.kind == "classification":
            rows[:, NAMES.index("has_answer")] = np.nan
        return rows

    def _answers(self, reader: Seq2Seq, collated: Collated, found: Found) -> list[str]:
        """Greedy answers, or the most probable label."""
        task, formulation = self._settings.task, self._settings.models.formulation
        inputs = collated.context_ids, collated.context_mask, self._objective.scores(collated)
        if task.kind == "classification":
            words = list(task.labels.values())
            # As when it serves: a BOS that the model forces is read, and does not count.
            begin = int(reader.special.forced_bos is not None)
            labels = [row[row != marginal.IGNORED].tolist()[begin:] for row in self._objective.labels(words)]
            best = marginal.label_log_likelihood(reader, *inputs, labels, formulation).argmax(-1)
            return [words[i] for i in best.tolist()]
        # Cut shorter than what is trained, a longer answer would be wrong whatever was learned.
        longest = min(task.max_target_tokens, self._generator.max_answer_tokens or MAX_NEW_TOKENS, MAX_NEW_TOKENS)
        settings = GenerationSettings(formulation=formulation, n_beams=1, max_new_tokens=longest)
        decoded = decoding.generate(reader, *inputs, settings)
        return [
            self._generator.answer(each.token_ids, passages, each.log_posterior)
            for each, passages in zip(decoded, found.passages, strict=True)
        ]

    def _found(self, batch: Sequence[Example]) -> Found:
        return self._objective.retrieve(batch)

    def _batches(self) -> list[Sequence[Example]]:
        return [self._examples[i : i + EXAMPLES_AT_ONCE] for i in range(0, len(self._examples), EXAMPLES_AT_ONCE)]


NAMES = ("log_likelihood", "exact_match", "f1", "has_answer", "prior_entropy", "agreement")


def _scores(text: str, example: Example, labels: Mapping[str, str]) -> tuple[float, float]:
    question = example.question
    if labels:  # letter for letter: C, C++ and C# are three classes
        right = float(text in [labels.get(label) for label in question.answers])
        return right, right
    if question.answer_regex:
        matches = float(regex_match(text, question.answer_regex))
        return matches, matches
    # In question generation the target is not among the file's answers.
    answers = question.answers if example.target in question.answers else (example.target,)
    return float(exact_match(text, answers)), f1(text, answers)


def _recalled(example: Example, found: Found, row: int) -> bool:
    """Whether one of the passages has an answer."""
    return any(map(answering(example.question), (passage.text for passage in found.passages[row])))
