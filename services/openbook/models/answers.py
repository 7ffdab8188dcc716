"""Given answers read by contexts, all in one teacher-forced pass. What answers begin with alike is read once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from openbook.errors import InvalidRequest
from openbook.models.reading import Tokens
from openbook.models.seq2seq import Contexts, Seq2Seq


def answer_log_probs(reader: Seq2Seq, contexts: Contexts, answers: Sequence[Sequence[int]]) -> Tensor:
    """(r, c, t) log p(y_t|x,z,y_<t) of c answers of one token or more under r contexts, 0 behind their ends.

    An answer that lacks a BOS that the model forces is read after it, and BOS does not count. Gradients pass.

    Raises:
        InvalidRequest: there is no answer, or one has no token.
    """
    if not answers or not all(answers):
        raise InvalidRequest(f"answers must be one or more, of one token or more each, got {list(answers)}")
    bos, device = reader.special.forced_bos, contexts.hidden.device
    read = [(bos, *y) if bos not in (None, y[0]) else tuple(y) for y in answers]
    tree = _tree(read)
    # Every beginning is part of a path to where nothing more begins: (row of the path, position in it).
    paths = [begun for begun, following in tree.items() if not any((*begun, token) in tree for token in following)]
    place = {path[:i]: (row, i) for row, path in enumerate(paths) for i in range(len(path) + 1)}
    at = torch.tensor([place[begun] for begun in tree], device=device).T
    inputs = _padded([(reader.special.decoder_start, *path) for path in paths], reader.special.pad).to(device)
    targets = _padded([tuple(following) for following in tree.values()], reader.special.pad).to(device)  # (m, j)

    size = max(1, reader.tokens_at_once // inputs.numel())
    portions = torch.split(inputs, max(1, reader.tokens_at_once // inputs.shape[1]))  # one, unless a row is too much
    log_p = []
    for first in range(0, len(contexts.hidden), size):
        some = contexts.take(slice(first, first + size))
        n = len(some.hidden)
        states = torch.cat([reader.states(some, portion.expand(n, -1, -1)) for portion in portions], 1)
        states = states[:, at[0], at[1]]  # (n, m, h)
        of_rows = reader.token_log_probs(states.flatten(0, 1), targets.repeat(n, 1))
        log_p.append(of_rows.view(n, -1))  # (n, m * j)
    index = {begun: i * targets.shape[1] for i, begun in enumerate(tree)}
    chosen = [tuple(index[y[:i]] + tree[y[:i]][y[i]] for i in range(len(y))) for y in read]
    counted = _padded([of_read[-len(y) :] for of_read, y in zip(chosen, answers, strict=True)], -1).to(device)
    return torch.cat(log_p)[:, counted].masked_fill(counted < 0, 0.0)


def _tree(answers: Sequence[Tokens]) -> dict[Tokens, dict[int, int]]:
    """Every beginning of an answer, and which tokens follow it, numbered."""
    tree: dict[Tokens, dict[int, int]] = {}
    for y in answers:
        for i, token in enumerate(y):
            following = tree.setdefault(y[:i], {})
            following.setdefault(token, len(following))
    return tree


def _padded(rows: Sequence[Tokens], value: int) -> Tensor:
    padded = torch.full((len(rows), max(map(len, rows))), value)
    for row, tokens in enumerate(rows):
        padded[row, : len(tokens)] = torch.tensor(tokens)
    return padded
