"""Models on disk or on a hub: where they lie, whether they are whole, what identifies them.

A folder may hold an `openbook.json` beside transformers' own files, for what those cannot say: see `Declaration`. Its
keys may also stand in `config.json` under "openbook", where they survive transformers' own `save_pretrained`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
    RagModel,
)
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from openbook.config import ModelSettings
from openbook.core.fingerprint import json_digest
from openbook.core.spelling import as_spelled
from openbook.core.types import Float64, Passage
from openbook.errors import InvalidModel
from openbook.models.embedded import EMBEDDED, WEIGHTS, encoder_folder, reader_folder, verify
from openbook.models.formats import InputFormat, PairFormat, RagFormat

HUB_TIMEOUT_S = 5.0

PROBE = "Who wrote “Les Misérables” (1862)?  The naïve U.S.-based author's 3.14% — re-thought, 東京 42,000\n"
"""Two tokenizers of equal vocabulary that split this alike are taken for one: case, accents, spaces, punctuation."""

SPELLED = "É-a 42,000"
"""A tokenizer that gives this back tells how words are spelled."""


class Declaration(BaseModel):
    """What a checkpoint says of itself: `openbook.json`, or "openbook" in `config.json`. All of it may be absent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Of a query encoder: the fingerprint of the passage encoder that it was trained with.
    space: str | None = None
    # Of a sentence encoder: the inverse of the temperature it was trained with.
    query_scale: float | None = Field(None, gt=0, allow_inf_nan=False)
    # Of a generator: how it reads a question with a passage (`openbook.models.formats`), and how much of them together.
    input_format: Literal["rag", "pair"] | None = None
    max_tokens: int | None = Field(None, ge=8)
    legacy: bool | None = None
    # Of a generator in RAG's layout, which has no place for all of them: special tokens of its generation config.
    generation: dict[str, int | list[int]] | None = None
    # Stored is only what differs from the embedded encoder. Of a query encoder: the weights that were trained. Of a
    # generator, BERT to BERT on it: all but its tokenizer and its frozen embeddings.
    base: Literal["embedded"] | None = None
    decoder_layers: int = Field(1, ge=1)
    sha256: str | None = None  # of model.safetensors


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model lies."""

    name: str  # as the settings call it
    location: str  # a folder or a hub name
    local: bool  # read nothing that is not on this machine

    @classmethod
    def find(cls, name: str, embedded: Callable[[], Path]) -> "Source":
        """The model that comes with openbook, or a folder, or a hub name.

        The hub is asked once whether it has the model, and where it cannot be asked, what was downloaded before counts:
        transformers itself would try again for half a minute.

        Raises:
            InvalidModel: there is no such model.
        """
        if name == EMBEDDED:
            return cls(name, str(embedded()), local=True)
        if Path(name).is_dir():
            return cls(name, name, local=True)
        try:
            HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
        except (RepositoryNotFoundError, HFValidationError):
            raise InvalidModel(
                f"model {name!r} is neither 'embedded', nor a folder, nor a model on the hub that may be read"
            ) from None
        except Exception as error:  # no network, offline mode, a hub in trouble
            source = cls(name, name, local=True)
            if source.json("config.json") is None:
                raise InvalidModel(
                    f"model {name!r} is neither 'embedded' nor a folder; should it be a model on the hub, it was never "
                    f"downloaded to this machine, and the hub does not answer: {_first_line(error)}"
                ) from None
            return source
        return cls(name, name, local=False)

    def file(self, filename: str) -> Path | None:
        """Where a file lies on this machine, downloaded if need be; None where the model has no such file.

        Raises:
            InvalidModel: it cannot be downloaded.
        """
        with self._explained(filename):
            path = cached_file(
                self.location, filename, local_files_only=self.local, _raise_exceptions_for_missing_entries=False
            )
        return Path(path) if path else None

    def json(self, filename: str) -> Any:
        """A JSON file's content; None where the model has no such file. Raises InvalidModel if it is no JSON."""
        path = self.file(filename)
        with self._explained(filename):
            return json.loads(path.read_text(encoding="utf-8")) if path else None

    def declaration(self) -> Declaration:
        """What is declared, `openbook.json` before `config.json`, and the weights are those that it declares.

        Raises:
            InvalidModel: it is not as it must be, or the weights were altered.
        """
        config = self.json("config.json")
        parts = {"config.json": config.get("openbook") if isinstance(config, dict) else None}
        parts["openbook.json"] = self.json("openbook.json")
        declared = Declaration.model_validate({})
        for filename, part in parts.items():
            try:
                own = Declaration.model_validate(part or {})
            except ValidationError as error:
                raise InvalidModel(f"model {self.name!r}: {filename}: {error}") from None
            declared = declared.model_copy(update=own.model_dump(exclude_unset=True))
        if declared.sha256:
            verify(self.file(WEIGHTS) or Path(self.location) / WEIGHTS, declared.sha256)
        return declared

    def config(self) -> Any:
        """transformers' config. Raises InvalidModel."""
        with self._explained("config"):
            return AutoConfig.from_pretrained(self.location, local_files_only=self.local)

    def tokenizer(self, subfolder: str = "") -> Any:
        """transformers' tokenizer. Raises InvalidModel."""
        with self._explained("tokenizer"):
            return AutoTokenizer.from_pretrained(self.location, subfolder=subfolder, local_files_only=self.local)

    def model(self, kind: Any, **options: Any) -> Any:
        """A model of a transformers class, in float32, all of its weights out of the checkpoint.

        Raises:
            InvalidModel: it cannot be read, or lacks weights, which transformers would make up at random.
        """
        with self._explained("weights"):
            model, report = kind.from_pretrained(
                self.location, local_files_only=self.local, dtype=torch.float32, output_loading_info=True, **options
            )
        for module in model.modules():
            if isinstance(getattr(module, "pooler", None), nn.Module):  # BERT's: never used here, and often not stored
                module.pooler = None
        missing = sorted(report["missing_keys"] & model.state_dict().keys())
        if missing:
            raise InvalidModel(f"model {self.name!r}: {len(missing)} weights are missing, first of them {missing[0]}")
        return model

    def load_into(self, model: Any, may_miss: Callable[[str], bool]) -> None:
        """Give a model of the embedded encoder the weights that are stored beside it, in whatever dtype.

        Raises:
            InvalidModel: they cannot be read, the model has no such weights, or one is absent that may not be.
        """
        with self._explained("weights"):
            state = {name: weight.float() for name, weight in load_file(self.file(WEIGHTS) or WEIGHTS).items()}
            missing, unexpected = model.load_state_dict(state, strict=False)
        wrong = [name for name in missing if not may_miss(name)] + unexpected
        if wrong:
            raise InvalidModel(f"model {self.name!r}: {len(wrong)} weights are missing or unknown, first {wrong[0]}")

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        """transformers raises errors of every kind here."""
        try:
            with quiet():
                yield
        except Exception as error:
            raise InvalidModel(f"model {self.name!r}: cannot load its {what}: {_first_line(error)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and advice, which belong in no log."""
    shown, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()


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
        return json_digest([weights_digest(self.model), tokenizer_digest(self.tokenizer), described])[:32]

    def contexts(self, question: str, passages: Sequence[Passage]) -> list[list[int]]:
        """Token ids of the question with each passage. Raises InvalidRequest as `InputFormat.encode`."""
        if self.legacy_tokenizer is not None:
            ids = self.legacy_tokenizer(question)["input_ids"]
            question = self.legacy_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self.input_format.encode(self.tokenizer, question, passages)

    def text(self, token_ids: Sequence[int]) -> str:
        """An answer's text, of the tokens so far: with one more it only grows."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text.rstrip("\N{REPLACEMENT CHARACTER}").strip()  # half a character at the end is left out for now

    def answer(self, token_ids: Sequence[int], passages: Sequence[Passage], log_posterior: Float64) -> str:
        """A whole answer's text; if tokens do not tell, spelled as in the likeliest of the passages that has it.

        log_posterior is (k,), that of the passages first and of empty slots behind them.
        """
        text = self.text(token_ids)
        if self.text(self.tokenizer(SPELLED, add_special_tokens=False)["input_ids"]) == SPELLED:
            return text
        likeliest = (-log_posterior[: len(passages)]).argsort(kind="stable")
        return as_spelled(text, (passages[i] for i in likeliest))


def load_generator(name: str) -> GeneratorCheckpoint:
    """The embedded reader, any transformers encoder-decoder, or the generator of a RAG checkpoint.

    Checkpoints in RAG's layout were trained on questions decoded from the question encoder's tokens ("who ' s the
    president"), and get them so unless they declare `"legacy": false`, as those do that `save_rag` wrote.

    Raises:
        InvalidModel: there is no such model, it is no encoder-decoder, or its files are not whole.
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
    input_format = PairFormat() if declared.input_format == "pair" else RagFormat(prefix=_prefix(config))
    return GeneratorCheckpoint(model, source.tokenizer(), _limited(input_format, model, declared))


def _load_rag(source: Source, declared: Declaration, config: Any) -> GeneratorCheckpoint:
    model = source.model(RagModel).generator
    model.generation_config.update(**declared.generation or {})
    legacy = declared.legacy is not False
    input_format = RagFormat(
        config.max_combined_length, config.title_sep, config.doc_sep, _prefix(config.generator), legacy
    )
    return GeneratorCheckpoint(
        model,
        source.tokenizer("generator_tokenizer"),
        _limited(input_format, model, declared),
        source.tokenizer("question_encoder_tokenizer") if legacy else None,
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
    encoder = getattr(model.config, "encoder", model.config)
    wanted = declared.max_tokens or input_format.max_tokens
    return replace(input_format, max_tokens=min(wanted, getattr(encoder, "max_position_embeddings", None) or wanted))


def _prefix(config: Any) -> str:
    return getattr(config, "prefix", None) or ""


def place(model: Any, settings: ModelSettings) -> Any:
    """The model ready to compute: device, dtype, evaluation mode. The number of threads is the whole process's.

    Raises:
        InvalidModel: there is no such device.
    """
    torch.set_num_threads(settings.n_threads)
    device = device_of(settings.device)
    try:
        return model.eval().requires_grad_(False).to(device=device, dtype=_dtype(settings.dtype, device))
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise InvalidModel(f"device {settings.device!r} cannot be used: {_first_line(error)}") from None


def device_of(name: str) -> str:
    """What `auto` stands for here, or the device itself."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name


def _dtype(name: str, device: str) -> torch.dtype:
    if name == "auto":
        # Where the processor cannot multiply bfloat16 by itself, it is several times slower than float32, not faster.
        native = device.startswith("cuda") or torch.cpu.get_capabilities().get("avx512_bf16", False)
        name = "bfloat16" if native else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def weights_digest(model: Any) -> str:
    """Digest of all weights by name, as float32: the same whatever file format they are stored in."""
    seen: set[int] = set()
    digests = {}
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.data_ptr() not in seen:  # tied weights count once
            seen.add(tensor.data_ptr())
            digests[name] = [list(tensor.shape), hashlib.sha256(tensor.cpu().float().numpy().tobytes()).hexdigest()]
    return json_digest(digests)


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of the vocabulary and of how it splits text: tokenizer files change with the library that writes them."""
    return json_digest([tokenizer.get_vocab(), tokenizer(PROBE)["input_ids"]])


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
