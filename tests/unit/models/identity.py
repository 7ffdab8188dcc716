"""Random questions asked of openbook, in a batch and alone, and of transformers: any number of them, always the same.

transformers is the oracle where it is right. Its RAG-Sequence gets the attention mask that it forgets; BOS and label
smoothing are off, so that it scores whole answers; every answer has two tokens, so that it does not lose the prior.
It has no fast decoding: there its beam search proposes, its forward pass scores, and the paper's formula chooses. All
of it in float64, where rounding is no excuse.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import tiny_models as tiny
import torch
from torch import Tensor
from transformers import RagSequenceForGeneration, RagTokenForGeneration

from openbook.core import marginal as paper
from openbook.core.types import Decoding, Formulation, GenerationSettings
from openbook.models import marginal
from openbook.models.decoding import Decoded, Seq2Seq, SpecialTokens, generate

Tokens = tuple[int, ...]
BATCH, MAX_K, N_MODELS = 4, 50, 13
WAYS = [(Formulation.TOKEN, Decoding.THOROUGH), *((Formulation.SEQUENCE, decoding) for decoding in Decoding)]
SETTINGS = list(product(WAYS, (1, 4), (0.0, 1.0, 2.0), (False, True)))  # way, beams, length penalty, early stopping
ROUNDING = 1e-9  # nats


@dataclass(frozen=True, slots=True)
class Verdict:
    """One question, and what the three made of it."""

    question: int
    settings: GenerationSettings
    k: int
    lengths: range  # of its contexts, in tokens
    ours: Decoded
    alone: Decoded  # ours without the rest of the batch
    theirs: Tokens
    gap: float  # log p(y|x) of our answer minus that of theirs

    @property
    def agrees(self) -> bool:
        """With transformers."""
        return self.ours.token_ids == self.theirs

    @property
    def stable(self) -> bool:
        """The batch changes neither the answer nor its numbers."""
        numbers = (self.alone.log_likelihood, *self.alone.log_posterior)
        in_batch = (self.ours.log_likelihood, *self.ours.log_posterior[: self.k])
        return self.ours.token_ids == self.alone.token_ids and np.allclose(numbers, in_batch, atol=ROUNDING, rtol=0)


def verdicts(n: int, device: str = "cpu", batch: int = BATCH) -> Iterator[Verdict]:
    """The first n questions, in batches whose questions have different numbers of passages."""
    for first in range(0, n, batch):
        yield from _batch(first // batch, range(first, min(first + batch, n)), device)


def _batch(number: int, questions: range, device: str) -> Iterator[Verdict]:
    settings, special = _settings(number)
    generator, reader = _generator(number % N_MODELS, device)
    ks = [1 + 7 * question % MAX_K for question in questions]
    empty = torch.arange(max(ks)) >= torch.tensor(ks)[:, None]
    scores = tiny.scores(number, len(ks), max(ks)).masked_fill(empty, -torch.inf).to(device)
    ids, mask = (tensor.to(device) for tensor in tiny.contexts(number, len(ks) * max(ks)))
    together = generate(reader, ids, mask, scores, settings, special)
    for row, (question, k) in enumerate(zip(questions, ks, strict=True)):
        slots = slice(row * max(ks), row * max(ks) + k)
        own = (ids[slots], mask[slots], scores[row : row + 1, :k])
        [alone] = generate(reader, *own, settings, special)
        [answer] = theirs(generator, *own, settings, special)
        lengths = mask[slots].sum(1)
        gap = together[row].log_likelihood - _log_p(reader, *own, answer, settings.formulation, special)
        spread = range(int(lengths.min()), int(lengths.max()) + 1)
        yield Verdict(question, settings, k, spread, together[row], alone, answer, gap)


def _settings(number: int) -> tuple[GenerationSettings, SpecialTokens]:
    """Every combination of `SETTINGS` in turn; what else varies does so with other periods."""
    (formulation, decoding), n_beams, length_penalty, early_stopping = SETTINGS[number % len(SETTINGS)]
    forced_bos, forced_eos = number % 5 == 0, number % 11 < 3
    settings = GenerationSettings(
        formulation=formulation,
        decoding=decoding,
        n_beams=n_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        max_new_tokens=3 + number % 7,
        min_new_tokens=0 if forced_bos else 2,
    )
    bos, eos = tiny.BOS if forced_bos else None, tiny.EOS if forced_eos else None
    return settings, SpecialTokens(tiny.EOS, (tiny.EOS,), tiny.PAD, bos, eos)


@cache
def _generator(seed: int, device: str) -> tuple[Any, Seq2Seq]:
    generator = tiny.bart(seed).to(device)
    return generator, Seq2Seq(generator)


def theirs(
    generator: Any, ids: Tensor, mask: Tensor, scores: Tensor, settings: GenerationSettings, special: SpecialTokens
) -> list[Tokens]:
    """transformers' answers to n questions."""
    n, k = scores.shape
    options = arguments(settings, special)
    if settings.formulation is Formulation.TOKEN:
        options["max_length"] = options.pop("max_new_tokens") + 1  # which it ignores
        oracle = _oracle(RagTokenForGeneration, generator)
        oracle.config.n_docs = k
        return answers(
            oracle.generate(context_input_ids=ids, context_attention_mask=mask, doc_scores=scores, **options)
        )
    if settings.decoding is Decoding.FAST:
        rows = [slice(q * k, (q + 1) * k) for q in range(n)]
        return [_fast(generator, ids[r], mask[r], s, settings, options) for r, s in zip(rows, scores, strict=True)]
    oracle = _oracle(RagSequenceForGeneration, generator)
    oracle.config.n_docs = k
    question = iter(range(n))

    def with_mask(inputs: Any, **kwargs: Any) -> Any:
        q = next(question)
        return type(generator).generate(generator, inputs, **kwargs | {"attention_mask": mask[q * k : (q + 1) * k]})

    generator.generate = with_mask
    try:
        rows = oracle.generate(context_input_ids=ids, context_attention_mask=mask, doc_scores=scores, **options)
    finally:
        del generator.generate
    return answers(rows)


@cache
def _oracle(kind: Any, generator: Any) -> Any:
    return tiny.rag(kind, generator, 1).to(generator.device)


def arguments(settings: GenerationSettings, special: SpecialTokens) -> dict[str, Any]:
    """For transformers' `generate`."""
    return {
        "num_beams": settings.n_beams,
        "length_penalty": settings.length_penalty,
        "early_stopping": settings.early_stopping,
        "min_new_tokens": settings.min_new_tokens,
        "max_new_tokens": settings.max_new_tokens,
        "decoder_start_token_id": special.decoder_start,
        "pad_token_id": special.pad,
        "eos_token_id": list(special.eos),
        "forced_bos_token_id": special.forced_bos,
        "forced_eos_token_id": special.forced_eos,
    }


@torch.no_grad()
def _fast(
    generator: Any, ids: Tensor, mask: Tensor, scores: Tensor, settings: GenerationSettings, options: dict[str, Any]
) -> Tokens:
    """The y with the highest sum of p(z|x) p(y|x,z) over the passages whose own search proposed it (section 2.5)."""
    n_beams = settings.n_beams
    proposed = generator.generate(ids, attention_mask=mask, num_return_sequences=n_beams, **options)
    proposers: dict[Tokens, list[int]] = {}
    for row, y in enumerate(answers(proposed)):
        proposers.setdefault(y, []).append(row // n_beams)
    log_prior, mass = paper.log_prior(scores.cpu().numpy()), {}
    rows = [row for of_y in proposers.values() for row in of_y]
    targets = [torch.tensor(y) for y, of_y in proposers.items() for _ in of_y]
    padded = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=tiny.PAD).to(ids.device)
    inputs = torch.cat([padded.new_full((len(rows), 1), tiny.EOS), padded[:, :-1]], 1)
    logits = generator(input_ids=ids[rows], attention_mask=mask[rows], decoder_input_ids=inputs).logits
    each = logits.log_softmax(-1).gather(2, padded[..., None])[..., 0].masked_fill(padded == tiny.PAD, 0)
    likelihoods = iter(each.sum(-1).cpu().numpy())
    for y, of_y in proposers.items():
        mass[y] = np.logaddexp.reduce(log_prior[of_y] + [next(likelihoods) for _ in of_y])
    return max(mass, key=lambda y: mass[y])


def answers(rows: Tensor) -> list[Tokens]:
    """Without decoder start and padding."""
    return [tuple(row[1 : 1 + max(i for i, token in enumerate(row) if token != tiny.PAD)]) for row in rows.tolist()]


@torch.no_grad()
def _log_p(
    reader: Seq2Seq, ids: Tensor, mask: Tensor, scores: Tensor, y: Tokens, how: Formulation, special: SpecialTokens
) -> float:
    return float(marginal.log_likelihood(reader, ids, mask, scores, torch.tensor([y]), how, special))
