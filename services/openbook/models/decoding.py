"""Answers from a generator and scored contexts: both formulations of the paper (section 2.5), on token ids.

    decoded = generate(model, context_ids, context_mask, scores, GenerationSettings(n_beams=4))

RAG-Token is one search over the marginal next-token distribution. RAG-Sequence searches each passage on its own and
takes, of all hypotheses Y, the one with the highest p(y|x): *thorough* scores every (hypothesis, passage) pair, *fast*
takes p(y|x,z) = 0 where z's own search did not propose y. Whatever finds the answer, the numbers reported with it are
those of the model: forced tokens and end-of-sequence count with the probability the model gives them, and the
length penalty does not count at all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from openbook.core import marginal
from openbook.core.types import Decoding, Float64, Formulation, GenerationSettings, Int64
from openbook.errors import InvalidRequest
from openbook.models.answers import answer_log_probs
from openbook.models.candidates import Candidates
from openbook.models.marginal import check_shapes
from openbook.models.search import Search, decode, steps
from openbook.models.seq2seq import Contexts, Seq2Seq, SpecialTokens

__all__ = [
    "Decoded",
    "DecodedToken",
    "Seq2Seq",
    "SpecialTokens",
    "generate",
    "generate_several",
    "score_answers",
    "stream",
]


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer and what the model thinks of it. All logs are natural; empty slots have -inf."""

    token_ids: tuple[int, ...]  # t, end-of-sequence included where it was generated, decoder start not
    log_likelihood: float  # log p(y|x) under the formulation asked for
    log_prior: Float64  # (k,) log p(z|x)
    log_posterior: Float64  # (k,) log p(z|x,y); RAG-Token: log of the mean of p(z|x,y_<=t) over the tokens
    token_log_likelihood: Float64  # (t,) log p(y_t|x,y_<t), which sum to that of the answer
    token_log_posterior: Float64  # (t, k) log p(z|x,y_<=t); RAG-Sequence: of all tokens so far, RAG-Token: of each


class DecodedToken(NamedTuple):
    """One token of greedy or sampled RAG-Token, as soon as it is decided."""

    token_id: int
    log_likelihood: float  # log p(y_t|x,y_<t)
    log_posterior: Float64  # (k,) log p(z|x,y_<=t)


def generate(
    model: Any,
    context_ids: Tensor,
    context_mask: Tensor,
    scores: Tensor,
    settings: GenerationSettings,
    special: SpecialTokens | None = None,
    max_tokens: int | None = None,
) -> list[Decoded]:
    """The best answer to each of n questions, each with its own k contexts. No question influences another.

    `generate_several` with its first answers alone.
    """
    answers = generate_several(model, context_ids, context_mask, scores, settings, 1, special, max_tokens)
    return [of_question[0] for of_question in answers]


@torch.no_grad()
def generate_several(
    model: Any,
    context_ids: Tensor,
    context_mask: Tensor,
    scores: Tensor,
    settings: GenerationSettings,
    n_answers: int,
    special: SpecialTokens | None = None,
    max_tokens: int | None = None,
) -> list[list[Decoded]]:
    """The n_answers best distinct answers to each of n questions, best first, or as many as the search found.

    With a temperature it is so many samples instead, in the order drawn and not necessarily distinct: RAG-Token's from
    the marginal next-token distribution, RAG-Sequence's from a passage drawn from the prior. At temperature 1 and top_p
    1 both are samples of p(y|x). Equal seeds give equal answers, whatever else is asked.

    Args:
        model: a transformers encoder-decoder, or a `Seq2Seq` made of one (saves milliseconds per call).
        context_ids: (n * k, l) question and passage as the generator reads them, the contexts of a question together.
        context_mask: (n * k, l) true or 1 for real tokens, padded on the right.
        scores: (n, k) retrieval scores, the logits of the prior; -inf marks an empty slot, whose context is ignored.
        settings: formulation and search; all fields are honoured. RAG-Token finds at most n_beams answers, ordered by
            the beam's score; RAG-Sequence at most n_beams per passage, ordered by p(y|x).
        n_answers: 1 or more.
        special: token ids that steer decoding; by default the model's own.
        max_tokens: so many tokens of contexts and answers, rows x (longest + width x max_new_tokens), at once, and no
            fewer than one question's: bounds memory. By default all at once.

    Raises:
        InvalidRequest: shapes do not fit, a question has no passage, or a passage no token.
    """
    reader = Seq2Seq.of(model, special)
    log_prior = _check(context_ids, context_mask, scores)
    k = log_prior.shape[1]
    answer = _token if settings.formulation is Formulation.TOKEN else _sequence
    answers: list[list[Decoded]] = []
    for first, last in _batches(context_mask, log_prior, max_tokens, settings.width * settings.max_new_tokens):
        rows = slice(first * k, last * k)
        answers += answer(
            reader, context_ids[rows], context_mask[rows].bool(), log_prior[first:last], settings, n_answers
        )
    return answers


@torch.no_grad()
def stream(
    model: Any,
    context_ids: Tensor,
    context_mask: Tensor,
    scores: Tensor,
    settings: GenerationSettings,
    special: SpecialTokens | None = None,
) -> Iterator[DecodedToken | Decoded]:
    """The answer to one question, token by token, the whole `Decoded` last. Arguments, errors as in `generate_several`.

    context_ids and context_mask (k, l), scores (k,). Only RAG-Token, greedy or sampled, decides token by token; with
    any other settings the answer comes alone. Closing the iterator stops the work.
    """
    if not settings.one_by_one:
        yield from generate(model, context_ids, context_mask, scores[None], settings, special)
        return
    reader = Seq2Seq.of(model, special)
    log_prior = _check(context_ids, context_mask, scores[None])
    search = _token_search(reader, context_ids, context_mask.bool(), log_prior, settings)
    token_ids: list[int] = []
    likelihoods: list[Float64] = []
    for _, _, token, log_likelihood in steps(search, _token_draws(search, 1)):
        token_ids.append(int(token))
        likelihoods.append(_numpy(log_likelihood[0]))
        one = _decoded_token(log_prior[0], token_ids[-1:], likelihoods[-1][:, None])
        yield DecodedToken(token_ids[-1], one.log_likelihood, one.log_posterior)
    yield _decoded_token(log_prior[0], token_ids, np.stack(likelihoods, -1))


@torch.no_grad()
def score_answers(
    model: Any,
    context_ids: Tensor,
    context_mask: Tensor,
    scores: Tensor,
    answers: Sequence[Sequence[int]],
    formulation: Formulation,
    special: SpecialTokens | None = None,
    max_tokens: int | None = None,
) -> list[list[Decoded]]:
    """What the model thinks of each of c given answers to each of n questions: (n, c). Contexts are encoded once.

    answers are token ids as decoding gives them, one or more each; all of their tokens count. One that lacks a BOS that
    the model forces is read after it, and BOS does not count. Labels of one token without end-of-sequence are the
    paper's classification, where both formulations agree. Other arguments and errors as in `generate`.
    """
    reader = Seq2Seq.of(model, special)
    log_prior = _check(context_ids, context_mask, scores)
    k = log_prior.shape[1]

    def one(prior: Float64, y: tuple[int, ...], given: Float64) -> Decoded:
        if formulation is Formulation.TOKEN:
            return _decoded_token(prior, y, given)
        return _decoded_sequence(prior, y, given.cumsum(-1))

    decoded = []
    for first, last in _batches(context_mask, log_prior, max_tokens):
        rows, prior = slice(first * k, last * k), log_prior[first:last]
        contexts, owner, slot = _encoded(reader, context_ids[rows], context_mask[rows], prior)
        scored = _numpy(answer_log_probs(reader, contexts, answers))  # (r, c, t)
        likelihood: Float64 = np.full((*prior.shape, *scored.shape[1:]), -np.inf)
        likelihood[owner, slot] = scored
        for question, given in enumerate(likelihood):  # (k, c, t)
            decoded.append([one(prior[question], tuple(y), given[:, c, : len(y)]) for c, y in enumerate(answers)])
    return decoded


def _token(
    reader: Seq2Seq, ids: Tensor, mask: Tensor, log_prior: Float64, settings: GenerationSettings, n_best: int
) -> list[list[Decoded]]:
    """One search per question, over the marginal next-token distribution."""
    search = _token_search(reader, ids, mask, log_prior, settings)
    found = decode(search, _token_draws(search, n_best))
    likelihoods = _numpy(found.log_likelihood)
    return [
        [
            _decoded_token(log_prior[question], tokens[b][:length], likelihoods[question, b, :length].T)
            for b, length in enumerate(lengths[:n_best])
            if length
        ]
        for question, (tokens, lengths) in enumerate(zip(found.tokens.tolist(), found.length.tolist(), strict=True))
    ]


def _token_search(
    reader: Seq2Seq, ids: Tensor, mask: Tensor, log_prior: Float64, settings: GenerationSettings
) -> Search:
    mask = mask & ~torch.from_numpy(np.isneginf(log_prior)).flatten()[:, None].to(mask.device)
    # An empty slot reads one token, at prior 0: attention to nothing at all would be NaN.
    mask[:, 0] |= ~mask.any(1)
    return Search(reader, reader.encode(ids, mask), torch.from_numpy(log_prior), settings)


def _draws(settings: GenerationSettings, n: int) -> Float64:
    """(n, 1 + t) from [0, 1): for a passage, then for each token. The first ones are the same for any n."""
    return np.random.default_rng(settings.seed).random((n, 1 + settings.max_new_tokens))


def _token_draws(search: Search, n: int) -> Tensor | None:
    """(q, n, t), the same for every question, or None where nothing is sampled."""
    if not search.settings.temperature:
        return None
    return (
        torch.from_numpy(_draws(search.settings, n)[:, 1:]).to(search.log_prior).expand(len(search.log_prior), -1, -1)
    )


def _decoded_token(log_prior: Float64, token_ids: Sequence[int], log_likelihood: Float64) -> Decoded:
    """RAG-Token's numbers of one answer from log p(y_t|x,z,y_<t), (k, t)."""
    next_token = marginal.next_log_marginal(log_prior, log_likelihood)
    posterior = marginal.token_log_posterior(log_prior, log_likelihood)
    of_answer = marginal.answer_log_posterior(posterior, np.ones(len(token_ids)))
    return Decoded(tuple(token_ids), float(next_token.sum()), log_prior, of_answer, next_token, posterior)


def _sequence(
    reader: Seq2Seq, ids: Tensor, mask: Tensor, log_prior: Float64, settings: GenerationSettings, n_best: int
) -> list[list[Decoded]]:
    """A search per passage, then the best of all hypotheses; or samples, each from a passage's own distribution."""
    contexts, owner, slot = _encoded(reader, ids, mask, log_prior)
    candidates = Candidates(reader, contexts, owner, slot, log_prior)
    if settings.temperature:
        chosen = candidates.draw(settings, _draws(settings, n_best))
    else:
        candidates.propose(settings)
        if settings.decoding is Decoding.THOROUGH:
            candidates.score_rivals(n_best)
        chosen = [candidates.best(question, n_best) for question in range(len(log_prior))]
    candidates.score(chosen)  # fast is fast in the choice alone: what is reported is exact
    return [
        [_decoded_sequence(log_prior[question], y, candidates.log_likelihood(question, y)) for y in answers]
        for question, answers in enumerate(chosen)
    ]


def _encoded(reader: Seq2Seq, ids: Tensor, mask: Tensor, log_prior: Float64) -> tuple[Contexts, Int64, Int64]:
    """The contexts without those of empty slots, and of each its question and its place among the k."""
    owner, slot = np.nonzero(~np.isneginf(log_prior))
    rows = torch.from_numpy(owner * log_prior.shape[1] + slot).to(ids.device)
    return reader.encode(ids[rows], mask[rows]), owner, slot


def _decoded_sequence(log_prior: Float64, token_ids: tuple[int, ...], log_prefix: Float64) -> Decoded:
    """RAG-Sequence's numbers of one answer from log p(y_<=t|x,z), (k, t)."""
    whole = marginal.next_log_marginal(log_prior, log_prefix)  # (t,) log p(y_<=t|x)
    posterior = marginal.token_log_posterior(log_prior, log_prefix)
    next_token = marginal.sequence_next_log_marginal(log_prior, log_prefix)
    return Decoded(token_ids, float(whole[-1]), log_prior, posterior[-1], next_token, posterior)


def _check(context_ids: Tensor, context_mask: Tensor, scores: Tensor) -> Float64:
    """The (n, k) log prior, once everything fits."""
    check_shapes(context_ids, context_mask, scores)
    log_prior = marginal.log_prior(_numpy(scores))
    empty = np.isneginf(log_prior).flatten() | _numpy(context_mask.any(1)).astype(bool)
    if not empty.all():
        raise InvalidRequest(f"context {int(empty.argmin())} has a score and no token")
    return log_prior


def _batches(mask: Tensor, log_prior: Float64, max_tokens: int | None, n_new: int = 0) -> Iterator[tuple[int, int]]:
    """Runs of questions, (first, last + 1), that hold max_tokens: contexts with padding, and n_new more for each."""
    n, k = log_prior.shape
    width = (mask != 0).to(torch.uint8).cpu() * torch.arange(1, mask.shape[1] + 1)
    longest = width.amax(1).view(n, k).amax(1).tolist()
    first, length = 0, 0
    for question in range(n):
        length = max(length, longest[question])
        n_tokens = (question + 1 - first) * k * (length + n_new)
        if max_tokens is not None and question > first and n_tokens > max_tokens:
            yield first, question
            first, length = question, longest[question]
    yield first, n


def _numpy(tensor: Tensor) -> Float64:
    return tensor.detach().cpu().double().numpy()
