"""Candidates read by contexts, some tokens at a time. What candidates of a row begin with alike is read once."""

from collections.abc import Collection, Sequence

import torch

from openbook.models.seq2seq import Contexts, Seq2Seq, Steps

Tokens = tuple[int, ...]
Prefixes = tuple[float, ...]
"""log p(y_<=t|x,z) of a candidate's first, first two, ... tokens under one passage. The last is that of all of them."""


class Reading:
    """log p(y_<=t|x,z) of each row's own candidates y for growing t; `drop` those that no longer matter."""

    def __init__(self, reader: Seq2Seq, contexts: Contexts, candidates: Sequence[Collection[Tokens]]) -> None:
        widest = max(map(len, candidates))
        size = max(1, reader.tokens_at_once // (reader.n_beside_past * max(1, widest)))
        slices = [slice(i, i + size) for i in range(0, len(candidates), size)]
        self._parts = [_Part(reader, contexts.take(rows), candidates[rows]) for rows in slices]
        self._at = [(part, i) for part in self._parts for i in range(len(part.log_p))]

    @property
    def is_open(self) -> bool:
        """Whether any candidate has tokens left."""
        return any(any(part.open) for part in self._parts)

    def advance(self) -> list[dict[Tokens, Prefixes]]:
        """Read the next tokens. Gives log p of each row's candidates that are finished by now."""
        return [finished for part in self._parts for finished in part.advance()]

    def drop(self, kept: Sequence[Collection[Tokens]]) -> None:
        """Give up each row's candidates that are not among the kept ones."""
        for (part, i), of_row in zip(self._at, kept, strict=True):
            part.open[i] = [y for y in part.open[i] if y in of_row]

    def log_p(self, row: int, candidate: Tokens) -> Prefixes:
        """Of the tokens that were read so far of a candidate that is not finished."""
        part, i = self._at[row]
        return part.log_p[i][candidate[: part.n_read]]


class _Part:
    """Some rows, whose next tokens are read in one forward pass."""

    def __init__(self, reader: Seq2Seq, contexts: Contexts, candidates: Sequence[Collection[Tokens]]) -> None:
        self.open = [list(of_row) for of_row in candidates]
        self.log_p: list[dict[Tokens, Prefixes]] = [{(): ()} for _ in candidates]
        self.n_read = 0
        self._reader, self._steps = reader, Steps(reader, contexts)
        self._beams: list[dict[Tokens, int]] = [{(): 0} for _ in candidates]

    def advance(self) -> list[dict[Tokens, Prefixes]]:
        begun, end = self.n_read, self.n_read + self._reader.n_beside_past
        self.n_read = end
        if not any(self.open):
            return [{} for _ in self.open]
        pieces = [list(dict.fromkeys(y[:end] for y in of_row)) for of_row in self.open]
        for row, (of_row, added) in enumerate(zip(pieces, self._added(pieces, begun), strict=True)):
            before = self.log_p[row]
            self.log_p[row] = {
                y: _longer(before[y[:begun]], more[: len(y) - begun]) for y, more in zip(of_row, added, strict=False)
            }
            self._beams[row] = {y: beam for beam, y in enumerate(of_row)}
        finished = [
            {y: log_p[y] for y in of_row if len(y) <= end} for of_row, log_p in zip(self.open, self.log_p, strict=True)
        ]
        self.open = [[y for y in of_row if len(y) > end] for of_row in self.open]
        return finished

    def _added(self, pieces: list[list[Tokens]], begun: int) -> list[list[list[float]]]:
        """log p of each token that each piece adds to its first `begun` ones, and whatever behind its end."""
        device, special = self._reader.device, self._reader.special
        shape = (len(pieces), max(map(len, pieces)))
        most = self._reader.n_positions
        width = self._reader.n_beside_past
        width = width if most is None else min(width, most - begun)  # the decoder's last positions may be fewer
        parents = torch.zeros(shape, dtype=torch.long)
        inputs = torch.full((*shape, width), special.pad)
        targets, mask = inputs.clone(), torch.zeros(inputs.shape, dtype=torch.bool)
        for row, of_row in enumerate(pieces):
            for beam, y in enumerate(of_row):
                n = len(y) - begun
                parents[row, beam] = self._beams[row][y[:begun]]
                inputs[row, beam, :n] = torch.tensor((special.decoder_start, *y)[begun:-1])
                targets[row, beam, :n], mask[row, beam, :n] = torch.tensor(y[begun:]), True
        self._steps.branch(parents.to(device))
        states, mask = self._steps(inputs.to(device)), mask.to(device)
        known = self._reader.token_log_probs(states[mask], targets.to(device)[mask])
        added = torch.zeros(mask.shape, dtype=known.dtype, device=device).masked_scatter(mask, known)
        of_pieces: list[list[list[float]]] = added.tolist()
        return of_pieces


def _longer(before: Prefixes, added: Sequence[float]) -> Prefixes:
    so_far = before[-1] if before else 0.0
    return (*before, *(so_far := so_far + each for each in added))
