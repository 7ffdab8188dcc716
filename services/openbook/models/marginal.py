"""The differentiable twin of `openbook.core.marginal`, and log p(y|x) of given answers under a generator.

    log_p = log_likelihood(model, context_ids, context_mask, scores, labels, Formulation.SEQUENCE)   # (n,)
    (-log_p.sum()).backward()

Gradients reach the query encoder through the scores, and the generator through the likelihood (section 2.4). Only the
log-probability of each target token is needed, so no (passages, tokens, vocabulary) tensor is kept.
"""

from typing import Any

import torch
from torch import Tensor

from openbook.core.types import Formulation
from openbook.errors import InvalidRequest
from openbook.models.seq2seq import Seq2Seq, SpecialTokens

IGNORED = -100
"""Pads labels, as in transformers and torch."""


def log_prior(scores: Tensor) -> Tensor:
    """(n, k) log p(z|x) from (n, k) scores; -inf in empty slots. In float32 or better."""
    return scores.log_softmax(-1, dtype=None if scores.dtype == torch.float64 else torch.float32)


def sequence_log_marginal(log_prior: Tensor, log_likelihood: Tensor, tokens: Tensor) -> Tensor:
    """RAG-Sequence: (n,) from log_prior (n, k), log p(y_t|x,z,y_<t) (n, k, t) and tokens (n, t) bool."""
    return torch.logsumexp(log_prior + (log_likelihood * tokens[:, None]).sum(-1), -1)


def token_log_marginal(log_prior: Tensor, log_likelihood: Tensor, tokens: Tensor) -> Tensor:
    """RAG-Token: (n,) from the same."""
    return (torch.logsumexp(log_prior[..., None] + log_likelihood, 1) * tokens).sum(-1)


def label_log_marginal(log_prior: Tensor, log_likelihood: Tensor) -> Tensor:
    """Classification: (n, c) from log_prior (n, k) and log p(label|x,z) (n, k, c), labels of one token."""
    return torch.logsumexp(log_prior[..., None] + log_likelihood, 1)


_MARGINALS = {Formulation.SEQUENCE: sequence_log_marginal, Formulation.TOKEN: token_log_marginal}


def log_likelihood(
    model: Any,
    context_ids: Tensor,
    context_mask: Tensor,
    scores: Tensor,
    labels: Tensor,
    formulation: Formulation,
    special: SpecialTokens | None = None,
) -> Tensor:
    """log p(y|x) of one given answer per question; minus its sum is the training loss.

    Args:
        model: a transformers encoder-decoder in the mode it is to run in, or a `Seq2Seq` made of one.
        context_ids: (n * k, l) question and passage, the contexts of a question together.
        context_mask: (n * k, l) true or 1 for real tokens, padded on the right.
        scores: (n, k) the logits of the prior; -inf marks an empty slot, whose context is ignored.
        labels: (n, t) the answer as decoding would produce it, padded on the right with -100: end-of-sequence
            included, decoder start not. BART's begin with BOS. transformers' RAG labels have the start in front.
        formulation: RAG-Sequence or RAG-Token.
        special: token ids; by default the model's own.

    Returns:
        (n,) in float32 or better. An answer without tokens has log p = 0.

    Raises:
        InvalidRequest: shapes do not fit.
    """
    _check(context_ids, context_mask, scores, labels)
    reader = Seq2Seq.of(model, special, keep_mode=True)
    tokens = labels.to(reader.device) != IGNORED
    targets = labels.to(reader.device).masked_fill(~tokens, reader.special.pad)
    rows = _Rows(reader, context_ids, context_mask, scores)
    scored = reader.score(rows.contexts, targets[rows.owner, None], tokens[rows.owner, None], None)[:, 0]
    return _MARGINALS[formulation](rows.log_prior, rows.per_slot(scored), tokens)


def label_log_likelihood(
    model: Any,
    context_ids: Tensor,
    context_mask: Tensor,
    scores: Tensor,
    labels: Tensor,
    special: SpecialTokens | None = None,
) -> Tensor:
    """Classification: log p(label|x) of each of c labels that are one token long, (n, c).

    Both formulations give this number; end-of-sequence is not part of it. labels (c,) are token ids; a forced BOS is
    read before them and not counted. Normalise over the labels to leave all other answers out. Else as
    `log_likelihood`.
    """
    _check(context_ids, context_mask, scores, scores)
    reader = Seq2Seq.of(model, special, keep_mode=True)
    rows = _Rows(reader, context_ids, context_mask, scores)
    start = [token for token in (reader.special.decoder_start, reader.special.forced_bos) if token is not None]
    inputs = torch.tensor(start, device=reader.device).expand(len(rows.owner), 1, -1)
    log_p = reader.log_probs(reader.states(rows.contexts, inputs)[:, 0, -1])
    return label_log_marginal(rows.log_prior, rows.per_slot(log_p[:, labels.to(reader.device)]))


class _Rows:
    """The (question, passage) pairs without the empty slots, encoded."""

    def __init__(self, reader: Seq2Seq, context_ids: Tensor, context_mask: Tensor, scores: Tensor) -> None:
        self.log_prior = log_prior(scores).to(reader.device)
        self.owner, self._slot = torch.nonzero(~self.log_prior.detach().isneginf(), as_tuple=True)
        rows = (self.owner * scores.shape[1] + self._slot).to(context_ids.device)
        self.contexts = reader.encode(context_ids[rows], context_mask[rows])

    def per_slot(self, values: Tensor) -> Tensor:
        """(rows, m) as (n, k, m), 0 in empty slots."""
        return values.new_zeros(*self.log_prior.shape, values.shape[-1]).index_put((self.owner, self._slot), values)


def _check(context_ids: Tensor, context_mask: Tensor, scores: Tensor, labels: Tensor) -> None:
    shapes = [tuple(tensor.shape) for tensor in (context_ids, context_mask, scores, labels)]
    ranks = [len(shape) for shape in shapes]
    if ranks != [2] * 4 or shapes[0] != shapes[1] or len(context_ids) != scores.numel() or len(labels) != len(scores):
        names = "context_ids (n * k, l), context_mask (n * k, l), scores (n, k) and labels (n, t)"
        raise InvalidRequest(f"expected {names}, got {', '.join(map(str, shapes))}")
