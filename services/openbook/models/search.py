"""Greedy and beam search, and sampling, over g groups at once. Searches have the semantics of transformers 5.23.

A group is what is searched together: all k passages of a question, marginalised token by token (RAG-Token), or one
passage alone (the proposals of RAG-Sequence, k = 1). Groups never influence each other; one that is decided drops out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from openbook.core.types import GenerationSettings, PartSettings
from openbook.models.seq2seq import Contexts, Seq2Seq, Steps

_MAX_LOGITS = 1 << 25  # log-probabilities of one step held at once: 128 MiB in float32
_BLOCK = 64  # tokens
_COLDEST = 1e-6  # what is asked below it means the same, and would divide by zero in float32


@dataclass(frozen=True, slots=True)
class Hypotheses:
    """The b best hypotheses of each group, best first. Tokens after `length` mean nothing."""

    tokens: Tensor  # (g, b, t) long, end-of-sequence included, decoder start not
    length: Tensor  # (g, b) long; 0 where a group has fewer than b hypotheses
    log_likelihood: Tensor  # (g, b, t, k) log p(y_t|x,z,y_<t) as the model gives it, forced tokens too


@dataclass(frozen=True, slots=True)
class Continuations:
    """The n chosen continuations of each group."""

    score: Tensor  # (g, n) running score with this token
    beam: Tensor  # (g, n) the beam it continues
    token: Tensor  # (g, n)
    log_likelihood: Tensor  # (g, n, k) log p(token|x,z,y_<t)


Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From (g, b, v) log-probabilities and (g, m) of what else counts: scores and indices into b * v, (g, n) each."""


class Search:
    """What all searches have in common: one step from running beams to their continuations."""

    def __init__(self, model: Seq2Seq, contexts: Contexts, log_prior: Tensor, settings: GenerationSettings) -> None:
        self.model, self.settings, self.special = model, settings, model.special
        self.log_prior = log_prior.to(contexts.hidden.device, model.dtype)  # (g, k)
        self.steps = Steps(model, contexts)
        self._begun: tuple[int, ...] = ()
        self.n_tokens = settings.max_new_tokens
        """An answer has no more when it is left."""
        if isinstance(settings, PartSettings):
            self._begun = settings.begun
            self.n_tokens = min(self.n_tokens, len(settings.begun) + settings.n_more)
        self._eos = torch.tensor(self.special.eos, device=self.log_prior.device)

    def start(self) -> Tensor:
        """(g, 1) the first input: one beam, until there are several continuations."""
        return torch.full((len(self.log_prior), 1), self.special.decoder_start, device=self.log_prior.device)

    def ends(self, tokens: Tensor) -> Tensor:
        """Which of these tokens are an end of sequence."""
        return torch.isin(tokens, self._eos)

    def continuations(self, tokens: Tensor, n_generated: int, choose: Choose, given: Tensor) -> Continuations:
        """What is chosen to follow the (g, b) tokens just taken; `given` has a row for each group."""
        k, b = self.log_prior.shape[1], tokens.shape[1]
        states = self.steps(tokens.repeat_interleave(k, 0)[..., None]).view(len(tokens), k, b, -1)  # (g, k, b, h)
        size = max(1, _MAX_LOGITS // (k * b * self.model.vocabulary_size))
        slices = zip(*(torch.split(tensor, size) for tensor in (states, self.log_prior, given)), strict=True)
        parts = [self._chosen(n_generated, choose, *of_groups) for of_groups in slices]
        return Continuations(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _chosen(
        self, n_generated: int, choose: Choose, states: Tensor, log_prior: Tensor, given: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        log_p = self.model.log_probs(states)  # (g, k, b, v)
        g, k, b, v = log_p.shape
        if k > 1:  # sum_z p(z|x) p(y_t|x,z,y_<t), as a matrix product: nothing relevant is below 1e-38
            marginal = (log_prior.exp()[:, None] @ log_p.exp().view(g, k, b * v)).log_().view(g, b, v)
        else:
            marginal = log_p[:, 0]
        score, index = choose(self._constrain(marginal, n_generated), given)
        of_choice = log_p.flatten(2).gather(2, index[:, None].expand(-1, k, -1))  # (g, k, n)
        return score, index // v, index % v, of_choice.transpose(1, 2)

    def _constrain(self, log_p: Tensor, n_generated: int) -> Tensor:
        """Minimum length and forced tokens. They steer the search and never touch the reported likelihood."""
        special, settings = self.special, self.settings
        forced = special.forced_bos if n_generated == 0 else None
        if n_generated == settings.max_new_tokens - 1 and special.forced_eos is not None:
            forced = special.forced_eos
        if n_generated < len(self._begun):
            forced = self._begun[n_generated]
        if forced is not None:
            log_p = torch.full_like(log_p, -torch.inf)
            log_p[..., forced] = 0.0
        elif n_generated < settings.min_new_tokens:
            log_p = log_p.index_fill(-1, self._eos, -torch.inf)
        return log_p

    def keep(self, groups: Tensor) -> None:
        """Go on with some groups only."""
        k = self.log_prior.shape[1]
        self.log_prior = self.log_prior[groups]
        self.steps.keep((groups[:, None] * k + torch.arange(k, device=groups.device)).flatten())


def decode(search: Search, draws: Tensor | None = None) -> Hypotheses:
    """One hypothesis per group by greedy search, or n_beams by beam search, or with (g, n, t) draws n samples."""
    if draws is None and search.settings.n_beams > 1:
        return beam(search)
    g, k = search.log_prior.shape
    out = _nothing(g, 1 if draws is None else draws.shape[1], search.settings.max_new_tokens, k, search.log_prior)
    for position, (group, beam_, token, log_likelihood) in enumerate(steps(search, draws)):
        out.tokens[group, beam_, position] = token
        out.log_likelihood[group, beam_, position] = log_likelihood
        out.length[group, beam_] += 1
    return out


def steps(search: Search, draws: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Token after token, never looking back: the most probable one, or with (g, n, t) draws from [0, 1) sampled ones.

    Yields (group (a,), sample (a,), token (a,), log_likelihood (a, k)) of the a samples without an end so far.
    """
    g, k = search.log_prior.shape
    n = 1 if draws is None else draws.shape[1]
    alive = torch.arange(g, device=search.log_prior.device)
    undecided = torch.ones((g, n), dtype=torch.bool, device=alive.device)
    tokens = search.start()
    choose = partial(_best, 1) if draws is None else partial(_sampled, search.settings)
    for position in range(search.n_tokens):
        given = torch.zeros_like(search.log_prior[:, :1]) if draws is None else draws[alive, :, position]
        found = search.continuations(tokens, position, choose, given)
        group, sample = undecided.nonzero(as_tuple=True)
        yield alive[group], sample, found.token[group, sample], found.log_likelihood[group, sample]
        undecided = undecided & ~search.ends(found.token)
        if not undecided.any():
            return
        if n > tokens.shape[1]:
            search.steps.branch(found.beam.repeat_interleave(k, 0))
        tokens = found.token
        if _worth_dropping(undecided.any(1)):
            keep = undecided.any(1).nonzero()[:, 0]
            alive, tokens, undecided = alive[keep], tokens[keep], undecided[keep]
            search.keep(keep)


def _best(n: int, log_p: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
    """The n continuations with the highest running scores.

    They stand in the n blocks of tokens whose highest ones are the highest: a fifth of the time that it takes to look
    through all of them for n.
    """
    g, b, v = log_p.shape
    n_blocks = v // _BLOCK
    blocks = log_p[..., : n_blocks * _BLOCK].reshape(g, b, n_blocks, _BLOCK)
    highest = (blocks.amax(-1) + running[..., None]).flatten(1)  # (g, b * blocks)
    block = highest.topk(min(n, highest.shape[1])).indices
    token = torch.arange(v, device=block.device)
    first = block // n_blocks * v + block % n_blocks * _BLOCK
    rest = torch.arange(b, device=block.device)[:, None] * v + token[n_blocks * _BLOCK :]  # that fill no block
    index = torch.cat([(first[..., None] + token[:_BLOCK]).flatten(1), rest.flatten().expand(g, -1)], 1)
    scores = log_p.flatten(1).gather(1, index) + running.gather(1, index // v)
    score, choice = scores.topk(min(n, b * v))
    return score, index.gather(1, choice)


def _sampled(settings: GenerationSettings, log_p: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """One continuation of each of n beams by its draw, from the most probable tokens that hold top_p together."""
    n, v = draws.shape[1], log_p.shape[-1]
    p, token = (log_p / max(settings.temperature, _COLDEST)).softmax(-1).sort(dim=-1, descending=True, stable=True)
    reached = p.cumsum(-1)
    n_kept = (reached - p < settings.top_p).sum(-1, keepdim=True)  # (g, b, 1)
    target = reached.gather(-1, n_kept - 1).expand(-1, n, -1) * draws[..., None]
    place = torch.searchsorted(reached.expand(-1, n, -1).contiguous(), target, right=True)
    choice = token.expand(-1, n, -1).gather(-1, torch.minimum(place, n_kept - 1))[..., 0]  # (g, n)
    beams = torch.arange(log_p.shape[1], device=log_p.device).expand(len(log_p), n)
    index = beams * v + choice
    return log_p.flatten(1).gather(1, index), index


def beam(search: Search) -> Hypotheses:
    """The b hypotheses of each group with the highest score / length ** length_penalty.

    As in transformers: the top 2b continuations of a step are looked at, or (1 + e) * b with e end-of-sequence tokens,
    so that b can go on; an ended one is accepted only if it ranks among the top b; a group is decided when its best
    running beam, normalised at its present length, is no better than the worst of b accepted hypotheses, or with
    `early_stopping` as soon as there are b.
    """
    settings, b = search.settings, search.settings.n_beams
    choose = partial(_best, (1 + len(search.special.eos)) * b)
    g, k = search.log_prior.shape
    done = _nothing(g, b, settings.max_new_tokens, k, search.log_prior)
    done_score = done.log_likelihood.new_full((g, b), -torch.inf)
    alive = torch.arange(g, device=done.tokens.device)
    undecided = torch.ones_like(alive, dtype=torch.bool)
    run = _nothing(g, 1, settings.max_new_tokens, k, search.log_prior)
    tokens = search.start()
    running = torch.zeros_like(tokens, dtype=search.log_prior.dtype)
    for n_generated in range(settings.max_new_tokens):
        found = search.continuations(tokens, n_generated, choose, running)
        grown = _grow(run, found, n_generated)
        ended = search.ends(found.token) | (n_generated + 1 == settings.max_new_tokens)

        accepted = ended & (torch.arange(ended.shape[1], device=ended.device) < b) & undecided[:, None]
        normaliser = (n_generated + 1) ** settings.length_penalty
        score = (found.score / normaliser).masked_fill(~accepted, -torch.inf)
        merged = torch.cat([done_score[alive], score], 1)
        done_score[alive], choice = merged.topk(b)
        for kept, new in zip(_fields(done), _fields(grown), strict=True):
            kept[alive] = _pick(torch.cat([kept[alive], new], 1), choice)

        running, choice = found.score.masked_fill(ended, -torch.inf).topk(min(b, ended.shape[1]))
        worst = done_score[alive].min(1).values  # -inf while there are fewer than b
        undecided = undecided & (running[:, 0] / normaliser > worst)
        if settings.early_stopping:
            undecided &= worst.isneginf()
        if not undecided.any():
            break
        search.steps.branch(found.beam.gather(1, choice).repeat_interleave(k, 0))
        run = Hypotheses(*(_pick(field, choice) for field in _fields(grown)))
        tokens = found.token.gather(1, choice)
        if _worth_dropping(undecided):
            keep = undecided.nonzero()[:, 0]
            alive, running, tokens, undecided = alive[keep], running[keep], tokens[keep], undecided[keep]
            run = Hypotheses(*(field[keep] for field in _fields(run)))
            search.keep(keep)
    done.length.masked_fill_(done_score.isneginf(), 0)
    return done


def _worth_dropping(undecided: Tensor) -> bool:
    """Dropping decided groups copies the contexts of the others: only when it halves the work."""
    return 2 * int(undecided.sum()) <= len(undecided)


def _nothing(g: int, b: int, t: int, k: int, like: Tensor) -> Hypotheses:
    tokens = torch.zeros((g, b, t), dtype=torch.long, device=like.device)
    return Hypotheses(tokens, tokens[..., 0].clone(), like.new_zeros((g, b, t, k)))


def _fields(hypotheses: Hypotheses) -> tuple[Tensor, Tensor, Tensor]:
    return hypotheses.tokens, hypotheses.length, hypotheses.log_likelihood


def _grow(run: Hypotheses, found: Continuations, position: int) -> Hypotheses:
    """The continuations as hypotheses: the beam each continues, and its token."""
    grown = Hypotheses(*(_pick(field, found.beam) for field in _fields(run)))
    grown.tokens[:, :, position] = found.token
    grown.log_likelihood[:, :, position] = found.log_likelihood
    grown.length.fill_(position + 1)
    return grown


def _pick(field: Tensor, choice: Tensor) -> Tensor:
    """(g, m, ...) by (g, n) indices into m: (g, n, ...)."""
    return field.gather(1, choice.view(*choice.shape, *[1] * (field.ndim - 2)).expand(-1, -1, *field.shape[2:]))
