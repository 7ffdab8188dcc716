"""Any transformers encoder-decoder as rows (question, passage) that several beams read at once.

Folding. A beam search asks each row b times: the beams share the row's context. transformers copies the context's
cross-attention keys and values once per beam. Here the b beams become b times as many *queries* of one attention call,
so keys and values stand in memory once, are never reordered, and are read once per step. The models' own forward does
everything else: `_folded_attention` takes the place of the attention function in a twin that shares all weights with
the model. The twin's output matrix is taken out too, so that the vocabulary is only projected where it is needed.
Models outside `_FOLDING`, and decoders that do not take it, run as they are, with the contexts copied per beam: slower,
same numbers.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoEModelOutput
from transformers.modeling_utils import AttentionInterface

from openbook.core.deadline import Check, go_on
from openbook.errors import InvalidModel
from openbook.models.source import n_positions
from openbook.models.vocabulary import Vocabulary

# Attention through transformers' interface, and logits = output matrix @ state (+ final_logits_bias), nothing after.
_FOLDING = {"bart", "mbart", "pegasus", "t5"}
_FOLDING_DECODERS = {"bert"}  # inside an EncoderDecoderModel
_ONE_BY_ONE = {"fsmt", "prophetnet"}  # given a past: of several tokens one refuses, and the other sees what follows
_AT_ONCE = {"cpu": 1 << 11, "cuda": 1 << 16}  # tokens: more would not be faster, and not fit a processor's caches


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Token ids that steer decoding; None where the model has none."""

    decoder_start: int
    eos: tuple[int, ...]  # any of them ends an answer
    pad: int
    forced_bos: int | None = None
    forced_eos: int | None = None

    @classmethod
    def of(cls, model: Any) -> "SpecialTokens":
        """As the model's generation config says, or else its config.

        Raises:
            InvalidModel: there is no decoder start, or no end-of-sequence token.
        """

        def first(*names: str) -> Any:
            for config in (getattr(model, "generation_config", None), model.config):
                for name in names:
                    value = getattr(config, name, None)
                    if value is not None:
                        return value
            return None

        def several(name: str) -> tuple[int, ...]:
            value = first(name)
            return () if value is None else tuple(value) if isinstance(value, list) else (value,)

        start, eos, pad = (
            first("decoder_start_token_id", "bos_token_id"),
            several("eos_token_id"),
            first("pad_token_id"),
        )
        if not isinstance(start, int) or not eos:
            raise InvalidModel(f"the generator needs decoder_start_token_id and eos_token_id, got {start} and {eos}")
        forced = (several(f"forced_{name}_token_id")[:1] for name in ("bos", "eos"))
        return cls(start, eos, eos[0] if pad is None else pad, *(token[0] if token else None for token in forced))


@dataclass(frozen=True, slots=True)
class Contexts:
    """Encoded contexts of r rows. The first decoder call fills `cross`; later ones only read it."""

    hidden: Tensor  # (r, l, d)
    mask: Tensor | None  # (r, l) bool; None where nothing is padding
    cross: DynamicCache  # per layer keys and values (r, heads, l, d / heads); stays empty where beams are not folded

    def take(self, rows: Tensor | slice) -> "Contexts":
        """Some of the rows: views for a slice, a copy for indices."""
        cross = DynamicCache()
        cross.layers = [copy.copy(layer) for layer in self.cross.layers]  # given tensors, it would copy them
        for layer in cross.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        return Contexts(self.hidden[rows], None if self.mask is None else self.mask[rows], cross)


def max_answer_tokens(model: Any) -> int | None:
    """How many tokens the decoder reads at most; None: no matter how many."""
    names = ("max_decoder_position_embeddings", "max_position_embeddings")  # the first is LED's
    return n_positions(getattr(model, "decoder", model), names)


class Seq2Seq:
    """One encoder-decoder. Shares the weights of `model` and leaves `model` itself untouched.

    Building one takes milliseconds; keep it where the same model is called often. It computes in evaluation mode,
    unless it is told to keep the mode (dropout) that `model` is in. In a loss the encoder runs again in the backward
    pass instead of keeping what it computed: less than half the memory, and on a CPU no slower, for fresh memory costs
    as much as computing. Without `recompute` it keeps it.

    With `adds_gradients`, those of the matrices that are as long as the vocabulary, most of which are zeros or come in
    several parts, do not stand in memory besides `.grad`: give every parameter one before a backward pass.
    """

    def __init__(
        self,
        model: Any,
        *,
        keep_mode: bool = False,
        fold: bool = True,
        recompute: bool = True,
        adds_gradients: bool = False,
    ) -> None:
        output = model.get_output_embeddings()
        decoder_type = getattr(getattr(model.config, "decoder", None), "model_type", None)
        known = model.config.model_type in _FOLDING or decoder_type in _FOLDING_DECODERS
        self.folds: bool = fold and known and type(output) is nn.Linear  # an adapter around it would be passed over
        self.n_beside_past = 1 if {model.config.model_type, decoder_type} & _ONE_BY_ONE else 4
        """How many tokens, of each beam, are worth giving to `states` beside a past."""
        self._is_told_inputs = model.config.model_type == "fsmt"
        self._recompute = recompute
        self._check: Check = go_on
        self.special = SpecialTokens.of(model)
        self.n_positions = max_answer_tokens(model)
        self.dtype = torch.float64 if model.dtype == torch.float64 else torch.float32  # of log-probabilities
        self.vocabulary_size: int = output.weight.shape[0]
        self._twin, bias = _twin(model), None
        takes = signature(self._twin.forward).parameters
        self._past_name = "cache" if "cache" in takes else "past_key_values"  # until transformers 5.23
        if self.folds:
            self._twin.set_attn_implementation(_NAME)  # not where a part, such as MPNet's encoder, does not take it
            self.folds = self._twin.get_decoder().config._attn_implementation == _NAME  # T5's since transformers 5.15
        if self.folds:
            for module in self._twin.modules():  # some have a config of their own, which that call does not know
                config = getattr(module, "config", None)
                if isinstance(config, PreTrainedConfig) and config.model_type in _FOLDING | _FOLDING_DECODERS:
                    config._attn_implementation = _NAME
            _replace(self._twin, self._twin.get_output_embeddings(), nn.Identity())
            if hasattr(self._twin, "final_logits_bias"):
                bias = self._twin.final_logits_bias[0]
                self._twin.final_logits_bias = torch.zeros(1, 1, dtype=model.dtype, device=model.device)
        matrix = output if self.folds else None
        self._vocabulary = Vocabulary(matrix, bias, self.vocabulary_size, self.dtype, adds_gradients)
        for module in self._twin.modules():
            if adds_gradients and isinstance(module, nn.Embedding):
                module.sparse = True  # autograd adds a sparse gradient to a dense `.grad` in place
            if isinstance(module, GradientCheckpointingLayer):  # what every layer is, of transformers' own models
                module.register_forward_pre_hook(_look_up)
        if not keep_mode:
            self._twin.eval()

    @classmethod
    def of(cls, model: Any, special: SpecialTokens | None = None, *, keep_mode: bool = False) -> "Seq2Seq":
        """The model itself if it is one already, with other special tokens if there are any."""
        reader = model if isinstance(model, cls) else cls(model, keep_mode=keep_mode)
        if special is not None:
            reader = copy.copy(reader)
            reader.special = special
        return reader

    def stopped_by(self, check: Check) -> "Seq2Seq":
        """The same model and weights; `check` is called before each layer, and stops it all by raising."""
        reader = copy.copy(self)
        reader._check = check
        return reader

    @property
    def device(self) -> torch.device:
        """Where the weights are, and all that is computed from them."""
        device: torch.device = self._twin.device
        return device

    @property
    def tokens_at_once(self) -> int:
        """How many tokens, of whichever rows, are worth computing together."""
        return _AT_ONCE.get(self.device.type, _AT_ONCE["cpu"])

    def encode(self, ids: Tensor, mask: Tensor) -> Contexts:
        """Encode (r, l) contexts once, cut to the longest real one. Every row needs one real token or more.

        Rows of like length are encoded together, so that padding costs nothing.
        """
        ids, mask = ids.to(self.device), mask.to(self.device).bool()
        lengths = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1)
        order = lengths.argsort().tolist()
        hidden: list[Tensor] = [ids] * len(order)
        longest = int(lengths.max())
        for rows in _runs(order, lengths.tolist(), self.tokens_at_once):
            length = int(lengths[rows[-1]])
            some, real = ids[rows, :length], mask[rows, :length].long()
            with _looking_up(self._check):
                encoded = self._encoded(some, real)
            for row, each in zip(rows, F.pad(encoded, (0, 0, 0, longest - length)), strict=True):
                hidden[row] = each
        mask = mask[:, :longest]
        return Contexts(torch.stack(hidden), None if bool(mask.all()) else mask, DynamicCache())

    def _encoded(self, ids: Tensor, mask: Tensor) -> Tensor:
        def run(ids: Tensor, mask: Tensor) -> Tensor:
            hidden: Tensor = self._twin.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
            return hidden

        if not (self._recompute and torch.is_grad_enabled()):
            return run(ids, mask)
        hidden: Tensor = checkpoint(run, ids, mask, use_reentrant=False)
        return hidden

    def cache(self, contexts: Contexts) -> EncoderDecoderCache:
        """An empty past for `states`, on the contexts' shared keys and values."""
        return EncoderDecoderCache(DynamicCache(), contexts.cross if self.folds else DynamicCache())

    def states(self, contexts: Contexts, tokens: Tensor, past: EncoderDecoderCache | None = None) -> Tensor:
        """(r, b, t, h): what the decoder knows after each of the (r, b, t) tokens, given those in `past`."""
        rows, beams, length = tokens.shape
        hidden, mask = contexts.hidden, contexts.mask
        if not self.folds:
            hidden = hidden.repeat_interleave(beams, 0)
            mask = None if mask is None else mask.repeat_interleave(beams, 0).long()
        elif mask is not None:
            mask = mask[:, None, None, :]
        flat = tokens.reshape(rows * beams, length)
        # FSMT hides from tokens what follows them only if it is given inputs, at which it does not look then.
        inputs = {"input_ids": flat} if self._is_told_inputs else {}
        with _looking_up(self._check):
            output = self._twin(
                encoder_outputs=MoEModelOutput(hidden),  # of mixtures of experts, and all that others need
                attention_mask=mask,
                decoder_input_ids=flat,
                use_cache=past is not None,
                **{self._past_name: past, **inputs},
            )
        states: Tensor = output.logits
        return states.view(rows, beams, length, -1)

    def log_probs(self, states: Tensor) -> Tensor:
        """(..., v) log p(next token) after the (..., h) states. Without gradients the next call overwrites it."""
        return self._vocabulary.log_probs(states.flatten(0, -2), self._check).view(*states.shape[:-1], -1)

    def token_log_probs(self, states: Tensor, targets: Tensor) -> Tensor:
        """(m,) log p of each of the (m,) targets after the (m, h) states, or (m, j) of j targets each."""
        return self._vocabulary.token_log_probs(states, targets, self._check)

    def mean_log_probs(self, states: Tensor, log_weights: Tensor) -> Tensor:
        """(m,) mean over all tokens of log sum_k w_k p(token), from (m, k, h) states and (m, k) log weights."""
        return self._vocabulary.mean_log_probs(states, log_weights)


class Steps:
    """Decoding step by step: so many beams on each row of some contexts, one at first."""

    def __init__(self, model: Seq2Seq, contexts: Contexts) -> None:
        self._model, self._contexts, self._n_beams = model, contexts, 1
        self._past = model.cache(contexts)

    def __call__(self, tokens: Tensor) -> Tensor:
        """(r, b, t, h) states after t more tokens per beam, (r, b, t)."""
        return self._model.states(self._contexts, tokens, self._past)

    def branch(self, beams: Tensor) -> None:
        """Continue with these beams, (r, b) indices within their row, as many as may be. The contexts stay."""
        rows = torch.arange(len(beams), device=beams.device)[:, None]
        flat = (rows * self._n_beams + beams).flatten()
        self._n_beams = beams.shape[1]
        self._past.self_attention_cache.reorder_cache(flat)
        if not self._model.folds:
            self._past.cross_attention_cache.reorder_cache(flat)

    def keep(self, rows: Tensor) -> None:
        """Go on with some rows only."""
        beams = torch.arange(self._n_beams, device=rows.device)
        flat = (rows[:, None] * self._n_beams + beams).flatten()
        self._contexts = self._contexts.take(rows)
        cross = self._contexts.cross
        if not self._model.folds:
            cross = self._past.cross_attention_cache
            cross.batch_select_indices(flat)
        self._past.self_attention_cache.batch_select_indices(flat)
        self._past = EncoderDecoderCache(self._past.self_attention_cache, cross)


_CHECK: ContextVar[Check] = ContextVar("check", default=go_on)


@contextmanager
def _looking_up(check: Check) -> Iterator[None]:
    """What runs within calls it now and before each layer. It may compute something else with the same model."""
    check()
    former = _CHECK.set(check)
    try:
        yield
    finally:
        _CHECK.reset(former)


def _look_up(*_: object) -> None:
    _CHECK.get()()


def _runs(order: list[int], lengths: list[int], max_tokens: int) -> Iterator[list[int]]:
    """Rows, shortest first, cut into runs of at most so many tokens, or of one row."""
    run: list[int] = []
    for row in order:
        if run and (len(run) + 1) * lengths[row] > max_tokens:
            yield run
            run = []
        run.append(row)
    yield run


def _twin(model: Any) -> Any:
    """The model's modules and config copied, its parameters and buffers shared."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child is old:
                setattr(parent, name, new)


_NAME = "openbook_folded"


def _folded_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Scaled dot product attention where query (r * b, heads, t, d) may hold b beams of each row of key (r, ...).

    Only cross attention has such a query; its position bias, where a model passes one (T5), is zero.
    """
    rows, n = key.shape[0], query.shape[0]
    if n == rows:
        if attention_mask is not None and kwargs.get("position_bias") is None and _is_slow(query, key):
            scale = query.shape[-1] ** -0.5 if kwargs.get("scaling") is None else kwargs["scaling"]
            given = query * scale, key, value, attention_mask, kwargs.get("dropout", 0.0)
            return checkpoint(_plain_attention, *given, use_reentrant=False).transpose(1, 2), None
        attended, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return attended, None
    heads, length, size = query.shape[1:]
    folded = query.view(rows, -1, heads, length, size).transpose(1, 2).reshape(rows, heads, -1, size)
    attended = F.scaled_dot_product_attention(folded, key, value, attention_mask, scale=kwargs.get("scaling"))
    unfolded = attended.view(rows, heads, n // rows, length, -1).permute(0, 2, 3, 1, 4)
    return unfolded.reshape(n, length, heads, -1), None


def _is_slow(query: Tensor, key: Tensor) -> bool:
    """Whether a gradient is wanted where PyTorch's fused kernel of CPUs goes back five times as slowly as products."""
    wanted = torch.is_grad_enabled() and query.requires_grad and query.shape[1] == key.shape[1]
    return wanted and query.device.type == "cpu" and query.dtype == torch.bfloat16


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float) -> Tensor:
    scores = query @ key.transpose(2, 3)
    lowest = torch.finfo(scores.dtype).min  # and not -inf: a row of which all is masked would be no number
    scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask.clamp_min(lowest)
    return F.dropout(scores.softmax(-1).to(value.dtype), dropout) @ value


AttentionInterface.register(_NAME, _folded_attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)
