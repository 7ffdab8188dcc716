"""The differentiable twin of `openbook.core.marginal`, and log p(y|x) of given answers under a generator.

    loss(model, context_ids, context_mask, scores, labels, Formulation.SEQUENCE).sum().backward()   # of (n,)

Gradients reach the query encoder through the scores, and the generator through the likelihood (section 2.4). Only the
log-probability of each target token is needed, so no (passages, tokens, vocabulary) tensor is kept.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from openbook.core.types import Formulation
from openbook.errors import InvalidRequest
from openbook.models.answers import answer_log_probs
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
    """log p(y|x) of one given answer per question.

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
    rows = _Rows(model, context_ids, context_mask, scores, special)
    _, log_p, tokens = rows.read(labels)
    return _MARGINALS[formulation](rows.log_prior, log_p, tokens)


def loss(
    model: Any,
    context_ids: Tensor,
    context_mask: Tensor,
    scores: Tensor,
    labels: Tensor,
    formulation: Formulation,
    special: SpecialTokens | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """What training minimises: -log p(y|x) of each given answer, (n,), on request with smoothed labels.

    With an epsilon e, it is the cross entropy of every token's label, the fraction e of it spread evenly over the
    vocabulary, with the model's own distribution of that token:

        sum_t -(1 - e) log p(y_t|x,y_<t) - e mean_v log p(v|x,y_<t),    p(v|x,y_<t) = sum_z w_z p(v|x,z,y_<t)

    where w is p(z|x) for RAG-Token, and p(z|x,y_<t) for RAG-Sequence: by the chain rule p(y|x) is the product of these.
    So the prior counts once, and with one passage it is torch's cross entropy. Else as `log_likelihood`.

    Raises:
        InvalidRequest: shapes do not fit, or label_smoothing is no fraction.
    """
    if not 0.0 <= label_smoothing <= 1.0:  # also refuses NaN
        raise InvalidRequest(f"label_smoothing must be 0.0..1.0, got {label_smoothing}")
    rows = _Rows(model, context_ids, context_mask, scores, special)
    states, log_p, tokens = rows.read(labels)
    likelihood = _MARGINALS[formulation](rows.log_prior, log_p, tokens)
    if not label_smoothing:
        return -likelihood
    log_weights = rows.log_prior[..., None].expand_as(log_p)
    if formulation is Formulation.SEQUENCE:
        log_weights = (log_weights + F.pad(log_p, (1, -1)).cumsum(-1)).log_softmax(1)
    uniform = rows.mean_log_probs(states, log_weights, tokens)
    return -(1 - label_smoothing) * likelihood - label_smoothing * uniform


def label_log_likelihood(
    model: Any,
    context_ids: Tensor,
    context_mask: Tensor,
    scores: Tensor,
    labels: Sequence[Sequence[int]],
    formulation: Formulation,
    special: SpecialTokens | None = None,
) -> Tensor:
    """Classification: log p(label|x) of each of c labels, (n, c). Log-softmaxed, all other answers are left out.

    labels are token ids, one or more each, and all of them count. The paper's are of one token without end-of-sequence,
    where both formulations agree (section 2.3); longer ones need it, as decoding would give it. A forced BOS that a
    label lacks is read before it and not counted. Contexts are encoded once, and what labels begin with alike is read
    once. Else as `log_likelihood`.
    """
    rows = _Rows(model, context_ids, context_mask, scores, special)
    scored = answer_log_probs(rows.reader, rows.contexts, labels)  # (rows, c, t)
    n, c = len(scores), len(labels)
    log_p = rows.per_slot(scored).transpose(1, 2).flatten(0, 1)  # (n * c, k, t)
    lengths = torch.tensor([len(label) for label in labels], device=scored.device)
    tokens = (torch.arange(scored.shape[-1], device=scored.device) < lengths[:, None]).repeat(n, 1)
    return _MARGINALS[formulation](rows.log_prior.repeat_interleave(c, 0), log_p, tokens).view(n, c)


class _Rows:
    """The (question, passage) pairs without the empty slots, encoded."""

    def __init__(
        self, model: Any, context_ids: Tensor, context_mask: Tensor, scores: Tensor, special: SpecialTokens | None
    ) -> None:
        check_shapes(context_ids, context_mask, scores)
        self.reader = Seq2Seq.of(model, special, keep_mode=True)
        self.log_prior = log_prior(scores).to(self.reader.device)
        self._owner, self._slot = torch.nonzero(~self.log_prior.detach().isneginf(), as_tuple=True)
        rows = (self._owner * scores.shape[1] + self._slot).to(context_ids.device)
        self.contexts = self.reader.encode(context_ids[rows], context_mask[rows])

    def read(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """States before each of the (n, t) labels, (rows, t, h), log p(y_t|x,z,y_<t), (n, k, t), and which are tokens.

        log p is 0 where there is no token, and in empty slots.
        """
        if labels.ndim != 2 or len(labels) != len(self.log_prior):
            raise InvalidRequest(f"labels must be ({len(self.log_prior)}, t), got {tuple(labels.shape)}")
        labels = labels.to(self.reader.device)
        tokens, special = labels != IGNORED, self.reader.special
        targets = labels.masked_fill(~tokens, special.pad)
        inputs = F.pad(targets, (1, -1), value=special.decoder_start)
        states = self.reader.states(self.contexts, inputs[self._owner, None])[:, 0]
        real = tokens[self._owner]
        known = self.reader.token_log_probs(states[real], targets[self._owner][real])
        log_p = torch.zeros(real.shape, dtype=known.dtype, device=known.device).masked_scatter(real, known)
        return states, self.per_slot(log_p), tokens

    def mean_log_probs(self, states: Tensor, log_weights: Tensor, tokens: Tensor) -> Tensor:
        """(n,) sum over the tokens of mean_v log sum_z w_z p(v|x,z,y_<t), from (rows, t, h) and (n, k, t)."""
        of_slots = self.per_slot(states).transpose(1, 2)[tokens]  # (m, k, h)
        means = self.reader.mean_log_probs(of_slots, log_weights.transpose(1, 2)[tokens])
        return torch.zeros(tokens.shape, dtype=means.dtype, device=means.device).masked_scatter(tokens, means).sum(-1)

    def per_slot(self, values: Tensor) -> Tensor:
        """(rows, ...) as (n, k, ...), 0 in empty slots."""
        zeros = values.new_zeros(*self.log_prior.shape, *values.shape[1:])
        return zeros.index_put((self._owner, self._slot), values)


def check_shapes(context_ids: Tensor, context_mask: Tensor, scores: Tensor) -> None:
    """Raises InvalidRequest unless they are those of n questions with k contexts each."""
    ids, mask, of_scores = (tuple(tensor.shape) for tensor in (context_ids, context_mask, scores))
    if [len(ids), len(of_scores)] != [2, 2] or ids != mask or len(context_ids) != scores.numel():
        expected = "context_ids must be (n * k, l), context_mask (n * k, l) and scores (n, k)"
        raise InvalidRequest(f"{expected}, got {ids}, {mask}, {of_scores}")
