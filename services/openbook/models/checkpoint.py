"""Generators as they are loaded, and models of either kind made ready to compute."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
    RagModel,
)

from openbook.config import ModelSettings
from openbook.core.fingerprint import json_digest
from openbook.core.spelling import Letters, as_spelled, letters_of
from openbook.core.types import Float64, Passage
from openbook.errors import InvalidModel
from openbook.models.embedded import EMBEDDED, encoder_folder, reader_folder
from openbook.models.formats import InputFormat, PairFormat, RagFormat
from openbook.models.seq2seq import max_answer_tokens
from openbook.models.source import Declaration, Source, first_line, n_positions, tokenizer_digest, weights_digest
from openbook.processes import threads

log = logging.getLogger(__name__)

BFLOAT16_SINCE = (8, 0)
"""Compute capability: Ampere. NVIDIA's T4 and V100 are older, AMD's cards that torch knows count from 9."""
SPELLED = "É-a 42,000"
"""A tokenizer that gives this back tells how words are spelled."""


@dataclass(frozen=True, slots=True)
class GeneratorCheckpoint:
    """A generator as it was loaded, on the CPU in float32."""

    model: Any  # a transformers encoder-decoder
    tokenizer: Any
    input_format: InputFormat
    legacy_tokenizer: Any | None = None  # the question encoder's: RAG's old checkpoints know questions only through it
    base: Literal["embedded"] | None = None  # whose frozen embeddings it has: see `Declaration`

    @property
    def fingerprint(self) -> str:
        """Digest of weights, tokenizer and input format."""
        described = [type(self.input_format).__name__, asdict(self.input_format)]  # type: ignore[call-overload]
        spelled = [tokenizer_digest(self.legacy_tokenizer)] if self.legacy_tokenizer else []
        return json_digest([weights_digest(self.model), tokenizer_digest(self.tokenizer), described, *spelled])[:32]

    @property
    def max_answer_tokens(self) -> int | None:
        """As many as the decoder has positions for; None: no matter how many."""
        return max_answer_tokens(self.model)

    def contexts(self, question: str, passages: Sequence[Passage]) -> list[list[int]]:
        """Token ids of the question with each passage. Raises InvalidRequest as `InputFormat.encode`."""
        if self.legacy_tokenizer is not None:
            ids = self.legacy_tokenizer(question)["input_ids"]
            # By default so in 2020, when they were trained; no longer in transformers 5.
            question = self.legacy_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=True)
        return self.input_format.encode(self.tokenizer, question, passages)

    def answer_ids(self, text: str) -> list[int]:
        """Token ids of a given answer, without BOS and end-of-sequence.

        RAG's published generators learned answers as they stand within a text: after a space, which BART's tokens hold.
        """
        spaced = f" {text}" if self.legacy_tokenizer else text
        return list(self.tokenizer(spaced, add_special_tokens=False)["input_ids"])

    def text(self, token_ids: Sequence[int]) -> str:
        """An answer's text, of the tokens so far: with one more it only grows."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text.rstrip("\N{REPLACEMENT CHARACTER}").strip()  # half a character at the end is left out for now

    def answer(
        self,
        token_ids: Sequence[int],
        passages: Sequence[Passage],
        log_posterior: Float64,
        letters: Callable[[str], Letters] = letters_of,
    ) -> str:
        """A whole answer's text; if tokens do not tell, spelled as in the likeliest of the passages that has it.

        log_posterior is (k,), that of the passages first and of empty slots behind them; letters as in `as_spelled`.
        """
        text = self.text(token_ids)
        if self.text(self.tokenizer(SPELLED, add_special_tokens=False)["input_ids"]) == SPELLED:
            return text
        likeliest = (-log_posterior[: len(passages)]).argsort(kind="stable")
        return as_spelled(text, (passages[i] for i in likeliest), letters)


def load_generator(name: str) -> GeneratorCheckpoint:
    """The embedded reader, any transformers encoder-decoder, or the generator of a RAG checkpoint.

    Checkpoints in RAG's layout were trained on questions decoded from the question encoder's tokens ("who's the
    president of the u. s.?"), and get them so unless they declare `"legacy": false`, as those do that `save_rag` wrote.

    Raises:
        InvalidModel: there is no such model, it is no encoder-decoder, its tokenizer is another's, or its files are
            not whole.
    """
    source = Source.find(name, reader_folder)
    declared = source.declaration()
    if declared.base:
        return _load_reader(source, declared)
    config = source.config()
    if config.model_type == "rag":
        return _load_rag(source, declared, config)
    if not config.is_encoder_decoder:
        raise InvalidModel(f"model {name!r}: a generator must be an encoder-decoder, got {config.model_type!r}")
    if declared.legacy:
        raise InvalidModel(f"model {name!r}: openbook.json: legacy is for checkpoints in RAG's layout")
    kind = EncoderDecoderModel if config.model_type == "encoder-decoder" else AutoModelForSeq2SeqLM
    model = source.model(kind)
    tokenizer = source.tokenizer()
    source.check_ids(tokenizer, model)
    input_format = PairFormat() if declared.input_format == "pair" else RagFormat(prefix=_prefix(config))
    return GeneratorCheckpoint(model, tokenizer, _limited(input_format, model, declared))


def _load_rag(source: Source, declared: Declaration, config: Any) -> GeneratorCheckpoint:
    model = source.model(RagModel).generator
    model.generation_config.update(**declared.generation or {})
    tokenizer = source.tokenizer("generator_tokenizer", config.generator)
    source.check_ids(tokenizer, model)
    legacy = declared.legacy is not False
    input_format = RagFormat(
        config.max_combined_length, config.title_sep, config.doc_sep, _prefix(config.generator), legacy
    )
    return GeneratorCheckpoint(
        model,
        tokenizer,
        _limited(input_format, model, declared),
        source.tokenizer("question_encoder_tokenizer", config.question_encoder) if legacy else None,
    )


def _load_reader(source: Source, declared: Declaration) -> GeneratorCheckpoint:
    base = Source.find(EMBEDDED, encoder_folder)
    tokenizer = base.tokenizer()
    model = bert2bert(base, declared.decoder_layers)
    source.load_into(model, may_miss=of_base)
    special = model.generation_config
    special.decoder_start_token_id, special.eos_token_id = tokenizer.cls_token_id, tokenizer.sep_token_id
    special.pad_token_id = tokenizer.pad_token_id
    input_format = RagFormat() if declared.input_format == "rag" else PairFormat()
    return GeneratorCheckpoint(model, tokenizer, _limited(input_format, model, declared), base=declared.base)


def of_base(name: str) -> bool:
    """Whether a weight of `bert2bert` is one of its frozen embeddings, and hence not stored with it."""
    return "embeddings" in name or "predictions.decoder" in name


def bert2bert(base: Source, decoder_layers: int) -> Any:
    """An encoder-decoder on a BERT encoder: one matrix of token embeddings for both sides and for the output.

    The decoder's layers are random; its other embeddings are copies of the encoder's.
    """
    encoder = base.model(BertModel, add_pooling_layer=False)
    config = {**encoder.config.to_dict(), "num_hidden_layers": decoder_layers}
    decoder = BertLMHeadModel(BertConfig(**config | {"is_decoder": True, "add_cross_attention": True}))
    decoder.bert.embeddings.load_state_dict(encoder.embeddings.state_dict())
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder)
    words = encoder.embeddings.word_embeddings.weight
    model.decoder.bert.embeddings.word_embeddings.weight = words
    model.decoder.cls.predictions.decoder.weight = words
    return model


def _limited(input_format: RagFormat | PairFormat, model: Any, declared: Declaration) -> InputFormat:
    """With the length declared, or else the format's own, as far as the model has positions."""
    wanted = declared.max_tokens or input_format.max_tokens
    return replace(input_format, max_tokens=min(wanted, n_positions(getattr(model, "encoder", model)) or wanted))


def _prefix(config: Any) -> str:
    return getattr(config, "prefix", None) or ""


def place(model: Any, settings: ModelSettings) -> Any:
    """The model ready to compute: device, dtype, evaluation mode, threads.

    Raises:
        InvalidModel: there is no such device.
    """
    use_threads(threads(settings.n_threads))
    device = device_of(settings.device)
    try:
        return model.eval().requires_grad_(False).to(device=device, dtype=_dtype(settings.dtype, device))
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise InvalidModel(f"device {settings.device!r} cannot be used: {first_line(error)}") from None


def use_threads(n: int) -> None:
    """Compute with so many in this thread: each has a number of its own, and the last one set is that of new ones."""
    if torch.get_num_threads() != n:
        torch.set_num_threads(n)


def device_of(name: str) -> str:
    """What `auto` stands for here, or the device itself."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def devices_of(name: str) -> list[str]:
    """All devices that a name stands for here: of `cuda` each GPU that torch sees."""
    device = device_of(name)
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or [device] if device == "cuda" else [device]


def torch_device(name: str) -> torch.device:
    """Raises InvalidModel: there is no such device here."""
    try:
        return torch.empty(0, device=device_of(name)).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise InvalidModel(f"device {name!r} cannot be used: {first_line(error)}") from None


def _dtype(name: str, device: str) -> torch.dtype:
    # Where the processor cannot multiply bfloat16 by itself, it is many times slower than float32, not faster.
    if device.startswith("cuda"):
        native = torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= BFLOAT16_SINCE
    else:
        native = torch.cpu.get_capabilities().get("avx512_bf16", False)
    if name == "auto":
        name = "bfloat16" if native else "float32"
    elif name == "bfloat16" and not native:
        log.warning("bfloat16 is many times slower than float32 on this processor: dtype auto takes the faster one")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
