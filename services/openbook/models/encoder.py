"""Questions and passages into one space of embeddings: DPR and sentence encoders, recognised from their config."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, DPRContextEncoder, DPRQuestionEncoder, RagModel

from openbook.config import Dtype, EncoderSettings, ModelSettings
from openbook.core.deadline import Check, go_on
from openbook.core.fingerprint import json_digest
from openbook.core.types import Float32, Passage
from openbook.errors import InvalidModel, InvalidRequest
from openbook.models import embedded
from openbook.models.batches import Batches
from openbook.models.checkpoint import place, use_threads
from openbook.models.embedded import EMBEDDED
from openbook.models.formats import pad
from openbook.models.gpu import told_if_gpu_full
from openbook.models.packing import STEP, Packing
from openbook.models.pooling import Pooling, sentence_pooling
from openbook.models.published import passage_model_of
from openbook.models.source import Declaration, Source, tokenizer_digest, weights_digest
from openbook.processes import threads

Role = Literal["query", "passage"]

DPR_MAX_TOKENS = 256
LENGTH_STEP = 32
"""Batches to train on are padded to multiples of this: CPU kernels cache what they prepare for every new shape."""


@dataclass(frozen=True, slots=True)
class EncoderCheckpoint:
    """An encoder as it was loaded, on the CPU in float32."""

    model: Any
    tokenizer: Any
    pooling: Pooling
    declared_space: str | None = None  # see `space`
    base: Literal["embedded"] | None = None  # the encoder that it began as: see `Declaration`

    @property
    def fingerprint(self) -> str:
        """Digest of weights, tokenizer and pooling."""
        return json_digest([weights_digest(self.model), tokenizer_digest(self.tokenizer), asdict(self.pooling)])[:32]

    @property
    def space(self) -> str:
        """Which passages its queries are meant for: see `TextEncoder`."""
        return self.declared_space or self.fingerprint

    @property
    def dimension(self) -> int:
        """d"""
        config = self.model.config
        return int(getattr(config, "projection_dim", 0) or config.hidden_size)


def load_encoder(name: str, role: Role = "query", passage_model: str | None = "") -> EncoderCheckpoint:
    """The embedded encoder, DPR, the query encoder of a RAG checkpoint, or a sentence encoder.

    Args:
        name: `embedded`, a folder, or a hub name.
        role: what it reads.
        passage_model: of a query encoder, the encoder of the passages that it is for, loaded for its digest. Empty:
            what it says itself, or is known of a published one. None: nobody asks. The embedded one's is always known.

    Raises:
        InvalidModel: there is no such model, it is of no family known here, or its files are not whole.
    """
    source = Source.find(name, embedded.encoder_folder if role == "passage" else embedded.query_encoder_folder)
    declared = source.declaration()
    partner = passage_model or ("" if declared.space or passage_model is None else passage_model_of(name))
    if role == "query" and name != EMBEDDED and partner:
        declared = declared.model_copy(update={"space": load_encoder(partner, "passage").space})
    if declared.base:
        return _load_trained(source, declared)
    config = source.config()
    model_type = config.model_type
    if model_type == "rag":
        if role == "passage":
            raise InvalidModel(f"model {name!r} holds a query encoder; its passages were encoded by another model")
        model = source.model(RagModel).question_encoder
        tokenizer = source.tokenizer("question_encoder_tokenizer", config.question_encoder)
    elif config.is_encoder_decoder:
        raise InvalidModel(f"model {name!r}: an encoder must not be an encoder-decoder, got {model_type!r}")
    else:
        kind = AutoModel
        if model_type == "dpr":
            kind = DPRQuestionEncoder if role == "query" else DPRContextEncoder
        model, tokenizer = source.model(kind), source.tokenizer()
    if tokenizer.pad_token_id is None:
        raise InvalidModel(f"model {name!r}: its tokenizer has no padding token")
    source.check_ids(tokenizer, model, tokenizer.pad_token_id)
    if model_type in ("rag", "dpr"):
        max_tokens = min(DPR_MAX_TOKENS, model.config.max_position_embeddings)
        pooling = Pooling("pooler", normalize=False, max_tokens=max_tokens, titles="pair")
    else:
        with source.explained("pooling"):
            pooling = sentence_pooling(source, model, tokenizer, declared.query_scale)
    return EncoderCheckpoint(model, tokenizer, pooling, declared.space, EMBEDDED if name == EMBEDDED else None)


def _load_trained(source: Source, declared: Declaration) -> EncoderCheckpoint:
    """The embedded encoder with other weights in place of some of its own."""
    base = load_encoder(EMBEDDED, "passage")
    source.load_into(base.model, may_miss=lambda _: True)
    pooling = replace(base.pooling, query_scale=declared.query_scale or base.pooling.query_scale)
    return replace(base, pooling=pooling, declared_space=declared.space)


class TextEncoder:
    """One encoder, for questions or for passages. Not for several threads at once.

    Question and passage side of a DPR pair have different weights, hence different fingerprints. `space` tells
    whether they belong together: it identifies the passage encoder whose embeddings the queries are meant for, whatever
    the dtype. A query encoder that is also the passage encoder is its own space; any other has it in its
    `openbook.json` (`{"space": "<the snapshot's encoder_fingerprint>"}`), where training writes it, or its passage
    encoder is known by name: `load_encoder`.
    """

    def __init__(self, checkpoint: EncoderCheckpoint, settings: ModelSettings) -> None:
        self.pooling = checkpoint.pooling
        weights = checkpoint.fingerprint
        self.space = checkpoint.declared_space or weights
        self.base = checkpoint.base
        """The encoder that it began as, where that is known."""
        self._tokenizer = tokenizer = checkpoint.tokenizer
        self._model = place(checkpoint.model, settings)
        self._n_threads = threads(settings.n_threads)
        self.dtype: Dtype = str(self._model.dtype).removeprefix("torch.")  # type: ignore[assignment]
        """In which it computes, whatever stood for that."""
        self.fingerprint = weights if self.dtype == "float32" else f"{weights}-{self.dtype}"
        """Digest of weights, tokenizer and pooling, and the dtype they compute in; not of the device or the role."""
        with _told_if_gpu_full(settings):  # the weights had room on the GPU, and nothing else has
            self.dimension = len(self._embed([[tokenizer.pad_token_id]])[0])
        """d"""
        described = self.pooling.max_tokens, self._model.config.vocab_size, self.dtype
        self._batches = Batches(self._embed, *described)
        kind = self._model.device.type
        self._packing = Packing(self._embed, *described, on_cpu=kind == "cpu")
        self.embeds_passages_by = f"{self.fingerprint}, padded by {STEP}, {kind}"
        """All that determines the bits of a passage's embedding besides its text, but for the make of the processor and
        the version of the libraries."""

    @classmethod
    def load(cls, settings: EncoderSettings, role: Role = "query") -> Self:
        """Load `settings.model`. Raises InvalidModel as `load_encoder`."""
        encoder = cls(load_encoder(settings.model, role, settings.passage_model), settings)
        if role == "query":
            with _told_if_gpu_full(settings):
                encoder._batches.try_all()
        return encoder

    def n_tokens(self, question: str) -> int:
        """How many tokens the encoder would read, special tokens included; `pooling.max_tokens` is the limit."""
        return len(self._tokenizer(self.pooling.query_prefix + question)["input_ids"])

    def count_tokens(self, words: Sequence[str]) -> list[int]:
        """How many tokens each word has by itself, without special tokens."""
        options = {"add_special_tokens": False, "verbose": False}  # no warning of long ones: they are only counted
        return [len(ids) for ids in self._tokenizer(list(words), **options)["input_ids"]] if words else []

    def padded_length(self, question: str) -> int:
        """How long the question is computed, in tokens: those of one length are computed together.

        Raises:
            InvalidRequest: it has more tokens than the encoder can read.
        """
        return self._batches.length(self._checked(self.n_tokens(question)))

    def encode_questions(self, questions: Sequence[str], check: Check = go_on) -> Float32:
        """(n, d) embeddings, in order. Calls `check` between its batches.

        A question has the same bits whatever it arrives with: see `models.batches`.

        Raises:
            InvalidRequest: a question has more tokens than the encoder can read.
        """
        use_threads(self._n_threads)  # a generator in this process has its own number
        embeddings = np.empty((len(questions), self.dimension), np.float32)
        texts = [self.pooling.query_prefix + question for question in questions]
        ids = self._tokenizer(texts)["input_ids"] if texts else []
        for row in ids:
            self._checked(len(row))
        for rows, found in self._batches.embed(ids, check):
            embeddings[rows] = found
        return embeddings * np.float32(self.pooling.query_scale)

    def encode_passages(self, passages: Sequence[Passage]) -> Float32:
        """(n, d) embeddings of titles and texts, in order. A text that does not fit is cut at its end.

        A passage has the same bits whatever it is encoded with: see `models.packing`.
        """
        use_threads(self._n_threads)
        embeddings = np.empty((len(passages), self.dimension), np.float32)
        ids = passage_ids(self._tokenizer, self.pooling, passages) if passages else []
        for rows, found in self._packing.embed(ids):
            embeddings[rows] = found
        return embeddings

    def _checked(self, n_tokens: int) -> int:
        if n_tokens > self.pooling.max_tokens:
            raise InvalidRequest(f"question has {n_tokens} tokens, and the encoder can read {self.pooling.max_tokens}")
        return n_tokens

    @torch.inference_mode()
    def _embed(self, rows: Sequence[Sequence[int]], multiple: int = 1) -> Float32:
        ids, mask = pad(rows, self._tokenizer.pad_token_id, multiple, self.pooling.max_tokens)
        device = self._model.device
        embedding: Float32 = embed(self._model, self.pooling, ids.to(device), mask.to(device)).cpu().numpy()
        return embedding


def _told_if_gpu_full(settings: ModelSettings) -> AbstractContextManager[None]:
    return told_if_gpu_full(InvalidModel, f"device {settings.device!r} cannot be used")


def question_ids(tokenizer: Any, pooling: Pooling, questions: Sequence[str]) -> list[list[int]]:
    """Token ids of questions to train on. One that does not fit is cut at its end, as in DPR."""
    texts = [pooling.query_prefix + question for question in questions]
    return list(tokenizer(texts, truncation=True, max_length=pooling.max_tokens)["input_ids"])


def passage_ids(tokenizer: Any, pooling: Pooling, passages: Sequence[Passage]) -> list[list[int]]:
    """Token ids of titles and texts. A text that does not fit is cut at its end."""
    options = {"truncation": "longest_first", "max_length": pooling.max_tokens}
    options |= {"return_attention_mask": False, "return_token_type_ids": False}  # lists that nobody reads take time too
    texts = [passage.text for passage in passages]
    if pooling.titles == "pair":
        # Cuts the longer of the two: the text, unless a title is longer than what would be left of it.
        return list(tokenizer([passage.title for passage in passages], texts, **options)["input_ids"])
    titled = (f"{p.title}. {p.text}" if p.title else p.text for p in passages)
    return list(tokenizer([pooling.passage_prefix + text for text in titled], **options)["input_ids"])


def embed(model: Any, pooling: Pooling, ids: Tensor, mask: Tensor) -> Tensor:
    """(n, d) float32 embeddings of (n, t) token ids and their mask, with gradients where they are on.

    Not yet `query_scale` long. Token types are all 0, for DPR's pairs too.
    """
    pooled = _pool(model(input_ids=ids, attention_mask=mask), mask, pooling)
    return F.normalize(pooled, dim=-1) if pooling.normalize else pooled


def _pool(output: Any, mask: Tensor, pooling: Pooling) -> Tensor:
    if pooling.mode == "pooler":
        return _precise(output.pooler_output)
    states = _precise(output.last_hidden_state)  # (n, t, d)
    if pooling.mode == "cls":
        return states[:, 0]
    weights = mask[..., None].to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1)


def _precise(states: Tensor) -> Tensor:
    """In float32 or better."""
    return states if states.dtype == torch.float64 else states.float()
