"""RAG-Sequence's set Y: the hypotheses of every passage's own search, and what each passage thinks of each of them.

Rows are (question, passage) pairs without the empty slots. A pair is scored at most once: those that a search proposed
are known from it, and candidates that cannot win are never scored to their end.
"""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch

from openbook.core.types import Float64, GenerationSettings, Int64
from openbook.models.reading import Prefixes, Reading, Tokens
from openbook.models.search import Hypotheses, Search, decode
from openbook.models.seq2seq import Contexts, Seq2Seq

_Scored = list[dict[Tokens, dict[int, Prefixes]]]
"""Per question: candidate -> row -> log p(y_<=t|x,z), for the pairs scored so far."""

_MAX_SCORED = 1 << 14  # (row, candidate, token) triples scored at once: bounds memory
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
        self._record(range(len(self._owner)), decode(search))

    def draw(self, settings: GenerationSettings, draws: Float64) -> list[list[Tokens]]:
        """Sample n answers to each question: a passage from the prior, then an answer under that passage alone.

        draws (n, 1 + t) from [0, 1): every question gets the same ones, so that none depends on the others.
        """
        reached = np.exp(self._log_prior).cumsum(1)  # (q, k)
        slot = (reached[:, None] <= reached[:, None, -1:] * draws[None, :, :1]).sum(-1)  # (q, n)
        row_of = np.zeros(self._log_prior.shape, np.int64)
        row_of[self._owner, self._slot] = np.arange(len(self._owner))
        rows = np.take_along_axis(row_of, slot, 1).flatten()
        contexts = self._contexts.take(torch.from_numpy(rows).to(self._contexts.hidden.device))
        search = Search(self._reader, contexts, torch.zeros(len(rows), 1), settings)
        of_rows = torch.from_numpy(draws[None, :, 1:].repeat(len(reached), 0)).flatten(0, 1)[:, None]  # (q * n, 1, t)
        drawn = self._record(rows.tolist(), decode(search, of_rows.to(search.log_prior)))
        return [drawn[i : i + len(draws)] for i in range(0, len(drawn), len(draws))]

    def _record(self, rows: Iterable[int], found: Hypotheses) -> list[Tokens]:
        """Keep what the search saw of its hypotheses' likelihoods; (row, beam) by row."""
        prefixes = found.log_likelihood[..., 0].double().cumsum(-1).tolist()
        hypotheses = []
        for row, *of_row in zip(rows, found.length.tolist(), found.tokens.tolist(), prefixes, strict=True):
            for length, tokens, log_p in zip(*of_row, strict=True):
                if length:
                    y = tuple(tokens[:length])
                    self._scored[self._owner[row]].setdefault(y, {})[row] = tuple(log_p[:length])
                    hypotheses.append(y)
        return hypotheses

    def score_rivals(self, n_best: int) -> None:
        """Score, under all passages, every candidate that may be among the n best.

        p(y|x,z) is at most the probability of y's first tokens: a candidate is given up as soon as even with that
        bound for every unknown passage it stays behind what n others have for certain. The choice is unchanged.
        """
        self._score([list(scored) for scored in self._scored], n_best)

    def score(self, chosen: list[list[Tokens]]) -> None:
        """Score these candidates, per question, under all passages."""
        self._score(chosen, None)

    def best(self, question: int, n: int) -> list[Tokens]:
        """The n candidates with the highest log sum_z p(z|x) p(y|x,z) over the pairs scored so far."""
        return sorted(self._scored[question], key=partial(self._unlikely, question))[:n]

    def log_likelihood(self, question: int, candidate: Tokens) -> Float64:
        """(k, t) log p(y_<=t|x,z), -inf in empty slots and where it was not scored."""
        known = self._scored[question][candidate]
        per_slot: Float64 = np.full((self._log_prior.shape[1], len(candidate)), -np.inf)
        per_slot[self._slot[list(known)]] = list(known.values())
        return per_slot

    def _unlikely(self, question: int, candidate: Tokens) -> float:
        return -self._mass(question, self._scored[question][candidate])

    def _mass(self, question: int, known: dict[int, Prefixes]) -> float:
        """log sum_z p(z|x) p(y|x,z) over these passages."""
        joint = np.full(self._log_prior.shape[1], -np.inf)
        joint[self._slot[list(known)]] = [log_p[-1] for log_p in known.values()]
        return float(np.logaddexp.reduce(self._log_prior[question] + joint))

    def _score(self, wanted: list[list[Tokens]], n_best: int | None) -> None:
        """Find the pairs (wanted, row of the question) that are missing; with n_best, only while they matter."""
        longest = max(len(y) for candidates in wanted for y in candidates)
        at_once = max(1, _MAX_SCORED // (len(self._owner) * longest))
        # The most promising first: they raise the bar for the others.
        wanted = [sorted(candidates, key=partial(self._unlikely, q)) for q, candidates in enumerate(wanted)]
        for first in range(0, max(map(len, wanted)), at_once):
            some = [candidates[first : first + at_once] for candidates in wanted]
            missing = [[y for y in some[q] if row not in self._scored[q][y]] for row, q in enumerate(self._owner)]
            reading = Reading(self._reader, self._contexts, missing)
            while reading.is_open:
                for row, finished in enumerate(reading.advance()):
                    for y, log_p in finished.items():
                        self._scored[self._owner[row]][y][row] = log_p
                if n_best is not None:
                    some = [self._in_reach(q, n_best, candidates, reading) for q, candidates in enumerate(some)]
                    reading.drop([some[q] for q in self._owner])

    def _in_reach(self, question: int, n_best: int, wanted: list[Tokens], reading: Reading) -> list[Tokens]:
        scored = self._scored[question]
        certain = sorted((self._mass(question, known) for known in scored.values()), reverse=True)
        bar = certain[min(n_best, len(certain)) - 1] - _MARGIN
        rows = np.flatnonzero(self._owner == question).tolist()

        def bound(y: Tokens) -> float:
            known = scored[y]
            return self._mass(question, known | {row: reading.log_p(row, y) for row in rows if row not in known})

        return [y for y in wanted if bound(y) >= bar]
