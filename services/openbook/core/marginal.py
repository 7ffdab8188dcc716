"""The paper in one file (arXiv 2005.11401, section 2): prior, both marginals, posteriors. NumPy, float64, log space.

x question, z passage, y answer. Shapes: n questions, k passages, t tokens, c labels. An empty slot (a question
with fewer than k hits) has score -inf, hence prior 0, and whatever stands in its likelihood changes nothing.
`openbook.models.marginal` is the differentiable twin, tested against this file.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from openbook.core.types import Float64
from openbook.errors import InvalidRequest


def log_prior(scores: ArrayLike) -> Float64:
    """log p(z|x): softmax over the k retrieved passages, never over the whole index (equation 1).

    scores (..., k): inner products, -inf in empty slots. Returns (..., k), -inf in empty slots.

    Raises:
        InvalidRequest: a question has no passage at all, or a score is NaN or +inf.
    """
    values = np.asarray(scores, dtype=np.float64)
    if not values.shape[-1] or not np.isfinite(values.max(axis=-1)).all():
        raise InvalidRequest("scores must be finite, or -inf in empty slots, with one passage or more per question")
    return _normalised(values)


def sequence_log_marginal(log_prior: Float64, log_likelihood: ArrayLike, tokens: ArrayLike) -> Float64:
    """RAG-Sequence: log p(y|x) = log sum_z p(z|x) prod_t p(y_t|x,z,y_<t).

    log_prior (n, k); log_likelihood (n, k, t), log p(y_t|x,z,y_<t); tokens (n, t), true where y has a token.
    Returns (n,).
    """
    return _logsumexp(log_prior + _of_sequence(log_prior, log_likelihood, tokens), axis=-1)


def token_log_marginal(log_prior: Float64, log_likelihood: ArrayLike, tokens: ArrayLike) -> Float64:
    """RAG-Token: log p(y|x) = sum_t log sum_z p(z|x) p(y_t|x,z,y_<t). Shapes as in `sequence_log_marginal`."""
    marginal = next_log_marginal(log_prior, log_likelihood)
    return np.asarray(np.where(np.asarray(tokens, dtype=bool), marginal, 0.0).sum(axis=-1))


def next_log_marginal(log_prior: Float64, log_likelihood: ArrayLike) -> Float64:
    """RAG-Token: log p(y_t|x,y_<t) = log sum_z p(z|x) p(y_t|x,z,y_<t), (n, t). Rows of padding tokens mean nothing."""
    return _logsumexp(log_prior[..., None] + _of_tokens(log_prior, log_likelihood), axis=-2)


def sequence_next_log_marginal(log_prior: Float64, log_prefix: ArrayLike) -> Float64:
    """RAG-Sequence: log p(y_t|x,y_<t) = log p(y_<=t|x) - log p(y_<t|x), (n, t); together log p(y|x).

    log_prefix (n, k, t): log p(y_<=t|x,z).
    """
    whole = next_log_marginal(log_prior, log_prefix)  # (n, t) log p(y_<=t|x)
    return np.diff(whole, prepend=0.0, axis=-1)


def sequence_log_posterior(log_prior: Float64, log_likelihood: ArrayLike, tokens: ArrayLike) -> Float64:
    """RAG-Sequence: log p(z|x,y), (n, k): which passage the whole answer rests on."""
    return _normalised(log_prior + _of_sequence(log_prior, log_likelihood, tokens))


def token_log_posterior(log_prior: Float64, log_likelihood: ArrayLike) -> Float64:
    """RAG-Token: log p(z|x,y_<=t), (n, t, k): which passage each token rests on.

    The model draws a passage anew for every token, so earlier tokens enter through the likelihood alone. RAG-Sequence
    draws one for all: from log p(y_<=t|x,z) in place of the likelihood it is that model's log p(z|x,y_<=t).
    Rows of padding tokens mean nothing.
    """
    return _normalised(np.swapaxes(log_prior[..., None] + _of_tokens(log_prior, log_likelihood), -1, -2))


def answer_log_posterior(token_log_posterior: Float64, tokens: ArrayLike) -> Float64:
    """RAG-Token: log of the mean over an answer's tokens of p(z|x,y_<=t), (n, k).

    The expected share of the answer's tokens that passage z gave: it sums to 1, and for one token it is the posterior.
    """
    mask = np.asarray(tokens, dtype=bool)
    if not mask.any(axis=-1).all():
        raise InvalidRequest("tokens must hold one token or more per answer")
    masked = np.where(mask[..., None], token_log_posterior, -np.inf)
    return np.asarray(_logsumexp(masked, axis=-2) - np.log(mask.sum(axis=-1))[..., None])


def label_log_marginal(log_prior: Float64, log_likelihood: ArrayLike) -> Float64:
    """Classification: log p(y|x) of labels of one token, where both formulations agree (section 2.3, FEVER).

    log_likelihood (n, k, c): log p(label|x,z), end-of-sequence not part of it. Returns (n, c).
    """
    return next_log_marginal(log_prior, log_likelihood)


def _of_tokens(log_prior: Float64, log_likelihood: ArrayLike) -> Float64:
    """The likelihood with empty slots at -inf: a NaN behind a prior of 0 must not come through."""
    values = np.asarray(log_likelihood, dtype=np.float64)
    return np.where(np.isneginf(log_prior)[..., None], -np.inf, values)


def _of_sequence(log_prior: Float64, log_likelihood: ArrayLike, tokens: ArrayLike) -> Float64:
    values = np.where(np.asarray(tokens, dtype=bool)[..., None, :], _of_tokens(log_prior, log_likelihood), 0.0)
    return np.asarray(values.sum(axis=-1))  # (n, k); an empty answer keeps its prior


def _normalised(log_weights: Float64) -> Float64:
    return np.asarray(log_weights - _logsumexp(log_weights, axis=-1)[..., None])


def _logsumexp(x: NDArray[Any], axis: int) -> Float64:
    peak = x.max(axis=axis, keepdims=True)
    peak = np.where(np.isneginf(peak), 0.0, peak)  # -inf - -inf would be NaN
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(x - peak).sum(axis=axis)) + peak.squeeze(axis))
