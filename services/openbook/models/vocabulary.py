"""The output matrix: from states to log-probabilities, a slice of the vocabulary at a time.

A large vocabulary is much of a decoder's arithmetic, and its logits are the largest tensor by far. In slices that stay
in the processor's caches, and in memory that is not asked for anew at every step, they cost half the time.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from openbook.core.deadline import Check, go_on

_MAX_LOGITS = 1 << 24  # logits held at once in the loss: 64 MiB in float32
_MAX_KEPT = 1 << 25  # logits whose memory is kept: 128 MiB; 32 beams over 100 passages have five times as many
_TILE = (1024, 1024)  # states x vocabulary entries at once on a CPU: 4 MiB in float32; of fewer states more entries


class Vocabulary:
    """`output` @ state + `bias` for each of `size` tokens; without an output matrix the states are logits already.

    Log-probabilities are accumulated in `dtype`, float32 or better: bfloat16 would be 0.025 nats off. A `check` is
    called before each slice.

    With `adds_gradients`, a backward pass adds the gradient of the output matrix to its `.grad` if it has one, and
    hands autograd none: a matrix as large as all embeddings, which need not be made anew for every call.
    """

    def __init__(
        self,
        output: nn.Linear | None,
        bias: Tensor | None,
        size: int,
        dtype: torch.dtype,
        adds_gradients: bool = False,
    ) -> None:
        self.size = size
        self.adds_gradients = adds_gradients
        self._output, self._more_bias, self.dtype = output, bias, dtype
        self._scratch = torch.empty(0)

    def log_probs(self, states: Tensor, check: Check = go_on) -> Tensor:
        """(m, v) log p(next token) after (m, h) states. Without gradients, good until the next call."""
        if self._output is None or torch.is_grad_enabled() or states.is_cuda:
            return self._logits(states).to(self.dtype).log_softmax(-1)
        logits = self._room(states, self.size)
        filled, self._scratch = self._scratch, torch.empty(0)  # a check may have this model compute something else
        width = _width(len(states))
        weights, biases = torch.split(self._output.weight, width), torch.split(self._bias(self._output), width)
        for part, weight, bias in zip(torch.split(logits, width, -1), weights, biases, strict=True):
            check()
            _into(part, states, weight, bias)
        self._scratch = filled if len(filled) <= _MAX_KEPT else torch.empty(0)
        return torch.log_softmax(logits, -1, out=logits)

    def token_log_probs(self, states: Tensor, targets: Tensor, check: Check = go_on) -> Tensor:
        """(m,) log p of each of the (m,) targets after its (m, h) state, or (m, j) of j targets each.

        No (m, v) tensor is held: the backward pass computes each tile again.
        """
        if targets.ndim == 1:
            return self.token_log_probs(states, targets[:, None], check)[:, 0]
        output = self._output
        if output is None:  # the states are logits

            def one(states: Tensor, targets: Tensor) -> Tensor:
                return self.log_probs(states).gather(-1, targets)

            return _in_slices(one, _MAX_LOGITS // self.size, states, targets)
        states, bias = states.to(_product_dtype(states)), self._bias(output)
        size = max(1, _TILE[0] // targets.shape[1])
        slices = zip(torch.split(states, size), torch.split(targets, size), strict=True)
        apply, parts = _TokenLogProbs.apply, []
        for part, of_part in slices:
            check()
            parts.append(apply(self, part, output.weight, bias, of_part))  # type: ignore[no-untyped-call]
        return torch.cat(parts)

    def mean_log_probs(self, states: Tensor, log_weights: Tensor) -> Tensor:
        """(m,) mean over all tokens of log sum_k w_k p(token | state k), from (m, k, h) states and (m, k) log weights.

        With gradients each slice is computed again in the backward pass.
        """

        def one(states: Tensor, log_weights: Tensor) -> Tensor:
            log_p = self.log_probs(states.flatten(0, 1)).view(*log_weights.shape, -1)
            return torch.logsumexp(log_weights[..., None] + log_p, 1).mean(-1)

        return _in_slices(one, _MAX_LOGITS // (self.size * log_weights.shape[1]), states, log_weights)

    def tiles(self, states: Tensor, weight: Tensor, bias: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Some tokens, their part of the matrix in the dtype of the states, their (m, ...) logits until the next."""
        width = self.size if weight.is_cuda else _width(len(states))
        for first in range(0, self.size, width):
            some = slice(first, min(first + width, self.size))
            part, logits = weight[some].to(states.dtype), self._room(states, some.stop - first)
            yield some, part, _into(logits, states, part, bias[some].to(states.dtype))

    def _room(self, states: Tensor, n_logits: int) -> Tensor:
        """(m, n_logits) of memory that is kept: fresh pages cost more than what is computed in them."""
        size = len(states) * n_logits
        if self._scratch.numel() < size or self._scratch.device != states.device:
            self._scratch = torch.empty(size, dtype=self.dtype, device=states.device)
        return self._scratch[:size].view(len(states), n_logits)

    def _logits(self, states: Tensor) -> Tensor:
        return states if self._output is None else F.linear(states, self._output.weight, self._bias(self._output))

    def _bias(self, output: nn.Linear) -> Tensor:
        """(v,) all that is added to output matrix @ state."""
        bias: Tensor = output.weight.new_zeros(self.size)
        for term in (output.bias, self._more_bias):
            bias = bias if term is None else bias + term
        return bias


class _TokenLogProbs(torch.autograd.Function):
    """log softmax(weight @ state + bias) of (m, j) targets.

    Autograd's own way has several (m, v) tensors in fresh memory, which costs as much as the products.
    """

    @staticmethod
    def forward(
        ctx: Any, vocabulary: Vocabulary, states: Tensor, weight: Tensor, bias: Tensor, targets: Tensor
    ) -> Tensor:
        normalisers, of_targets = [], torch.zeros(targets.shape, dtype=vocabulary.dtype, device=states.device)
        for some, _, logits in vocabulary.tiles(states, weight, bias):
            # As rounded as those that it is one of: beside them alone it is a probability.
            is_here = (some.start <= targets) & (targets < some.stop)
            found = logits.gather(-1, (targets - some.start).clamp(0, some.stop - some.start - 1))
            of_targets = torch.where(is_here, found, of_targets)
            highest = logits.amax(-1, keepdim=True)
            normalisers.append(logits.sub_(highest).exp_().sum(-1, keepdim=True).log_() + highest)
        normaliser = torch.stack(normalisers).logsumexp(0)
        ctx.vocabulary = vocabulary
        ctx.save_for_backward(states, weight, bias, targets, normaliser)
        return of_targets - normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets, normaliser = ctx.saved_tensors
        in_place = ctx.vocabulary.adds_gradients and weight.grad is not None
        of_states = (gradient[..., None] * weight[targets].to(gradient.dtype)).sum(1)
        of_bias = torch.zeros_like(bias, dtype=gradient.dtype).put_(targets, gradient, accumulate=True)
        of_weight = None
        if ctx.needs_input_grad[2]:
            of_weight = weight.grad if in_place else torch.zeros_like(weight)
            rows = (gradient[..., None] * states[:, None]).flatten(0, 1)
            of_weight.index_add_(0, targets.flatten(), rows.to(weight.dtype))
        of_all = -gradient.sum(-1, keepdim=True)
        for some, part, logits in ctx.vocabulary.tiles(states, weight, bias):
            of_logits = logits.sub_(normaliser).exp_().mul_(of_all)
            of_bias[some] += of_logits.sum(0)
            of_logits = of_logits.to(states.dtype)
            of_states += of_logits @ part
            if of_weight is not None:
                of_weight[some] += of_logits.T @ states
        return None, of_states, None if in_place else of_weight, of_bias, None


def _width(n_states: int) -> int:
    """Of a tile. Each has a cost of its own, which for the states of one question would be most of it."""
    return _TILE[1] * max(1, _TILE[0] // max(1, n_states))


def _product_dtype(states: Tensor) -> torch.dtype:
    """Of matrix products, as autocast would have them."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


def _in_slices(function: Callable[[Tensor, Tensor], Tensor], size: int, *tensors: Tensor) -> Tensor:
    """The function of so many rows at a time, none of its intermediate results kept for the backward pass."""
    slices = zip(*(torch.split(tensor, max(1, size)) for tensor in tensors), strict=True)
    return torch.cat([checkpoint(function, *each, use_reentrant=False) for each in slices])


def _into(logits: Tensor, states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if logits.dtype == states.dtype:
        return torch.addmm(bias, states, weight.T, out=logits)
    return logits.copy_(torch.addmm(bias, states, weight.T))
