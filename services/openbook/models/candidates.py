"""RAG-Sequence's set Y: the hypotheses of every passage's own search, and what each passage thinks of each of them.

Rows are (question, passage) pairs without the empty slots. A pair is scored at most once: those that a search proposed
are known from it, and candidates that cannot win are never scored to their end.
"""

import numpy as np
import torch

from openbook.core.types import Float64, GenerationSettings, Int64
from openbook.models.search import Search, beam, greedy
from openbook.models.seq2seq import Contexts, Seq2Seq

Tokens = tuple[int, ...]
_Scored = list[dict[Tokens, dict[int, float]]]
"""Per question: candidate -> row -> log p(y|x,z), for the pairs scored so far."""

_MAX_SCORED = 1 << 14  # target tokens scored at once
_PREFIX = 3  # tokens read before a candidate may be given up
_MARGIN = 1e-3  # nats by which it must be beaten: more than rounding


class Candidates:
    """The candidates of n questions with (n, k) log priors; `owner` and `slot` say which of these each row is."""

    def __init__(self, reader: Seq2Seq, contexts: Contexts, owner: Int64, slot: Int64, log_prior: Float64) -> None:
        self._reader, self._contexts, self._owner, self._slot = reader, contexts, owner, slot
        self._log_prior = log_prior
        self._scored: _Scored = [{} for _ in log_prior]

    def propose(self, settings: GenerationSettings) -> None:
        """Search every row on its own. The likelihoods its search saw are kept."""
        search = Search(self._reader, self._contexts, torch.zeros(len(self._owner), 1), settings)
        found = beam(search) if settings.n_beams > 1 else greedy(search)
        totals = found.log_likelihood[..., 0].sum(-1).tolist()
        for row, (lengths, tokens) in enumerate(zip(found.length.tolist(), found.tokens.tolist(), strict=True)):
            for b, length in enumerate(lengths):
                if length:
                    scored = self._scored[self._owner[row]].setdefault(tuple(tokens[b][:length]), {})
                    scored[row] = totals[row][b]

    def score_rivals(self, n_best: int) -> None:
        """Score, under all passages, every candidate that may be among the n best.

        p(y|x,z) is at most the probability of y's first tokens, which candidates share: one is given up when even with
        that bound for every unknown passage it stays behind what n others have for certain. The choice is unchanged.
        """
        rivals = [list(scored) for scored in self._scored]
        if max(len(y) for scored in self._scored for y in scored) > 2 * _PREFIX:  # or it would not pay
            firsts: _Scored = [{y[:_PREFIX]: {} for y in scored} for scored in self._scored]
            self._score(firsts, [list(of_question) for of_question in firsts])
            rivals = [self._in_reach(question, n_best, first) for question, first in enumerate(firsts)]
        self._score(self._scored, rivals)

    def _in_reach(self, question: int, n_best: int, firsts: dict[Tokens, dict[int, float]]) -> list[Tokens]:
        scored = self._scored[question]
        certain = sorted((self._mass(question, known) for known in scored.values()), reverse=True)
        bar = certain[min(n_best, len(certain)) - 1] - _MARGIN
        return [y for y, known in scored.items() if self._mass(question, firsts[y[:_PREFIX]] | known) >= bar]

    def score(self, chosen: list[list[Tokens]]) -> None:
        """Score these candidates, per question, under all passages."""
        self._score(self._scored, chosen)

    def best(self, question: int, n: int) -> list[Tokens]:
        """The n candidates with the highest log sum_z p(z|x) p(y|x,z) over the pairs scored so far."""
        scored = self._scored[question]
        return sorted(scored, key=lambda y: -self._mass(question, scored[y]))[:n]

    def log_likelihood(self, question: int, candidate: Tokens) -> Float64:
        """(k,) log p(y|x,z), -inf in empty slots and where it was not scored."""
        return self._per_slot(self._scored[question][candidate])

    def _per_slot(self, known: dict[int, float]) -> Float64:
        per_slot: Float64 = np.full(self._log_prior.shape[1], -np.inf)
        per_slot[self._slot[list(known)]] = list(known.values())
        return per_slot

    def _mass(self, question: int, known: dict[int, float]) -> float:
        return float(np.logaddexp.reduce(self._log_prior[question] + self._per_slot(known)))

    def _score(self, scored: _Scored, wanted: list[list[Tokens]]) -> None:
        """Add to `scored` the pairs (wanted, row of the question) that are missing from it."""
        missing = [[y for y in wanted[q] if row not in scored[q][y]] for row, q in enumerate(self._owner)]
        widest = max(map(len, missing))
        if not widest:
            return
        longest = max(len(y) for candidates in missing for y in candidates)
        step = max(1, _MAX_SCORED // (widest * longest))
        for first in range(0, len(missing), step):
            totals = self._totals(missing[first : first + step], first, widest, longest)
            for row, candidates in enumerate(missing[first : first + step], start=first):
                for y, total in zip(candidates, totals[row - first], strict=False):
                    scored[self._owner[row]][y][row] = total

    def _totals(self, candidates: list[list[Tokens]], first: int, widest: int, longest: int) -> list[list[float]]:
        """log p(y|x,z) of each row's own candidates, for rows first, first + 1 ..., in one teacher-forced pass."""
        device = self._contexts.hidden.device
        targets = torch.full((len(candidates), widest, longest), self._reader.special.pad)
        tokens = torch.zeros(targets.shape, dtype=torch.bool)
        for row, of_row in enumerate(candidates):
            for c, y in enumerate(of_row):
                targets[row, c, : len(y)], tokens[row, c, : len(y)] = torch.tensor(y), True
        contexts = self._contexts.take(slice(first, first + len(candidates)))
        past = self._reader.cache(contexts)
        totals: list[list[float]] = (
            self._reader.score(contexts, targets.to(device), tokens.to(device), past).sum(-1).tolist()
        )
        return totals
