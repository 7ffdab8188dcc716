"""The output matrix: from states to log-probabilities, a slice of the vocabulary at a time.

A large vocabulary is much of a decoder's arithmetic, and its logits are the largest tensor by far. In slices that stay
in the processor's caches, and in memory that is not asked for anew at every step, they cost half the time.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

_MAX_LOGITS = 1 << 24  # logits held at once in the loss: 64 MiB in float32
_TILE = (1024, 1024)  # states x vocabulary entries at once on a CPU: 4 MiB in float32


class Vocabulary:
    """`output` @ state + `bias` for each of `size` tokens; without an output matrix the states are logits already.

    Log-probabilities are accumulated in `dtype`, float32 or better: bfloat16 would be 0.025 nats off.
    """

    def __init__(self, output: nn.Linear | None, bias: Tensor | None, size: int, dtype: torch.dtype) -> None:
        self.size = size
        self._output, self._more_bias, self._dtype = output, bias, dtype
        self._scratch = torch.empty(0)

    def log_probs(self, states: Tensor) -> Tensor:
        """(m, v) log p(next token) after (m, h) states. Without gradients, good until the next call."""
        if self._output is None or torch.is_grad_enabled() or states.is_cuda:
            return self._logits(states).to(self._dtype).log_softmax(-1)
        logits = self._room(states, self.size)
        for part, tile in zip(torch.split(logits, _TILE[1], -1), self._tiles(self._output), strict=True):
            _into(part, states, *tile)
        return torch.log_softmax(logits, -1, out=logits)

    def token_log_probs(self, states: Tensor, targets: Tensor) -> Tensor:
        """(m,) log p of each of the (m,) targets after its (m, h) state, or (m, j) of j targets each.

        No (m, v) tensor is held. With gradients each slice is computed again in the backward pass.
        """
        if targets.ndim == 1:
            return self.token_log_probs(states, targets[:, None])[:, 0]
        if self._output is not None and not torch.is_grad_enabled():
            size = max(1, _TILE[0] // targets.shape[1])
            slices = zip(torch.split(states, size), torch.split(targets, size), strict=True)
            return torch.cat([self._tiled(self._output, s, t) for s, t in slices])

        def one(states: Tensor, targets: Tensor) -> Tensor:
            return self.log_probs(states).gather(-1, targets)

        return _in_slices(one, _MAX_LOGITS // self.size, states, targets)

    def mean_log_probs(self, states: Tensor, log_weights: Tensor) -> Tensor:
        """(m,) mean over all tokens of log sum_k w_k p(token | state k), from (m, k, h) states and (m, k) log weights.

        Held and computed again as in `token_log_probs`.
        """

        def one(states: Tensor, log_weights: Tensor) -> Tensor:
            log_p = self.log_probs(states.flatten(0, 1)).view(*log_weights.shape, -1)
            return torch.logsumexp(log_weights[..., None] + log_p, 1).mean(-1)

        return _in_slices(one, _MAX_LOGITS // (self.size * log_weights.shape[1]), states, log_weights)

    def _tiled(self, output: nn.Linear, states: Tensor, targets: Tensor) -> Tensor:
        normalisers = []
        for weight, bias in self._tiles(output):
            logits = self._room(states, len(weight))
            _into(logits, states, weight, bias)
            highest = logits.amax(-1, keepdim=True)
            normalisers.append(logits.sub_(highest).exp_().sum(-1).log_() + highest[:, 0])
        bias = self._bias(output)[targets].to(self._dtype)
        logits = (states[:, None].to(self._dtype) * output.weight[targets].to(self._dtype)).sum(-1) + bias
        log_p: Tensor = logits - torch.stack(normalisers).logsumexp(0)[:, None]
        return log_p

    def _room(self, states: Tensor, n_logits: int) -> Tensor:
        """(m, n_logits) of memory that is kept: fresh pages cost more than what is computed in them."""
        size = len(states) * n_logits
        if self._scratch.numel() < size or self._scratch.device != states.device:
            self._scratch = torch.empty(size, dtype=self._dtype, device=states.device)
        return self._scratch[:size].view(len(states), n_logits)

    def _logits(self, states: Tensor) -> Tensor:
        return states if self._output is None else F.linear(states, self._output.weight, self._bias(self._output))

    def _tiles(self, output: nn.Linear) -> Iterator[tuple[Tensor, Tensor]]:
        width = self.size if output.weight.is_cuda else _TILE[1]
        return zip(torch.split(output.weight, width), torch.split(self._bias(output), width), strict=True)

    def _bias(self, output: nn.Linear) -> Tensor:
        """(v,) all that is added to output matrix @ state."""
        bias: Tensor = output.weight.new_zeros(self.size)
        for term in (output.bias, self._more_bias):
            bias = bias if term is None else bias + term
        return bias


def _in_slices(function: Callable[[Tensor, Tensor], Tensor], size: int, *tensors: Tensor) -> Tensor:
    """The function of so many rows at a time, none of its intermediate results kept for the backward pass."""
    slices = zip(*(torch.split(tensor, max(1, size)) for tensor in tensors), strict=True)
    return torch.cat([checkpoint(function, *each, use_reentrant=False) for each in slices])


def _into(logits: Tensor, states: Tensor, weight: Tensor, bias: Tensor) -> None:
    if logits.dtype == states.dtype:
        torch.addmm(bias, states, weight.T, out=logits)
    else:
        logits.copy_(torch.addmm(bias, states, weight.T))
