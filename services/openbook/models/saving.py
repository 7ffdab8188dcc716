"""Models to disk, for `load_encoder` and `load_generator` to give back unchanged. Folders appear whole or not at all.

RAG's layout, that of transformers' RAG classes, is one set of weights, each tokenizer in a folder of its own:

    save_rag(Path("checkpoint"), load_encoder("my-dpr"), load_generator("my-bart"), Formulation.SEQUENCE)

transformers' `RagSequenceForGeneration`, `RagTokenForGeneration` and `RagTokenizer` load the folder, as `load_encoder`
and `load_generator` do, and all of them give the same numbers. What RAG's config has no field for stands in config.json
under "openbook" (see `Declaration`), so that it is still there after transformers loaded and saved the checkpoint.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DPRQuestionEncoder, RagConfig, RagSequenceForGeneration, RagTokenForGeneration

from openbook import files
from openbook.core.fingerprint import file_digest
from openbook.core.types import Formulation
from openbook.errors import InvalidModel
from openbook.models.checkpoint import GeneratorCheckpoint, of_base
from openbook.models.embedded import WEIGHTS
from openbook.models.encoder import EncoderCheckpoint, load_encoder
from openbook.models.formats import PairFormat, RagFormat
from openbook.models.pooling import Pooling
from openbook.models.source import quiet, tokenizer_digest

_KINDS = {Formulation.SEQUENCE: RagSequenceForGeneration, Formulation.TOKEN: RagTokenForGeneration}
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_FORCED = ("forced_bos_token_id", "forced_eos_token_id")


def save_rag(
    folder: Path, encoder: EncoderCheckpoint, generator: GeneratorCheckpoint, formulation: Formulation
) -> None:
    """Write a query encoder and a generator that belong together. The folder appears whole or not at all.

    Args:
        folder: absent or empty.
        encoder: DPR's question encoder. Its `declared_space` should name the encoder whose passages it asks for.
        generator: any encoder-decoder that reads `title / passage // question`.
        formulation: the one that was trained. It is only named in the config: either class loads the checkpoint.

    Raises:
        InvalidModel: the folder is not empty, or a model does not fit into this layout; nothing was written.
    """
    config = check_rag(encoder, generator)
    with _new(folder) as partial:
        rag = _KINDS[formulation](config=config, question_encoder=encoder.model, generator=generator.model)
        if formulation is Formulation.TOKEN:  # the other class has none, and decodes with its generator's
            rag.generation_config = generator.model.generation_config
        rag.save_pretrained(partial)
        encoder.tokenizer.save_pretrained(partial / "question_encoder_tokenizer")
        generator.tokenizer.save_pretrained(partial / "generator_tokenizer")


def save_encoder(folder: Path, encoder: EncoderCheckpoint, dtype: torch.dtype = torch.float32) -> None:
    """Write a query or passage encoder by itself.

    A sentence encoder so that sentence-transformers loads it too; one that began as the embedded encoder as what is
    not as it was there, in the dtype given.

    Raises:
        InvalidModel: the folder is not empty.
    """
    pooling = encoder.pooling
    declared: dict[str, Any] = {"space": encoder.declared_space} if encoder.declared_space else {}
    if pooling.mode != "pooler":
        declared["query_scale"] = pooling.query_scale
    with _new(folder) as partial:
        if encoder.base is not None:
            before = load_encoder(encoder.base, "passage").model.state_dict()
            state = encoder.model.state_dict()
            trained = {name: value for name, value in state.items() if not torch.equal(value.cpu(), before[name])}
            declared |= {"base": encoder.base, "sha256": _write_weights(partial, trained, dtype)}
        else:
            encoder.model.save_pretrained(partial)
            encoder.tokenizer.save_pretrained(partial)
            if pooling.mode != "pooler":
                _write_sentence_files(partial, pooling, encoder.dimension)
        _write(partial / "openbook.json", declared)


def save_generator(folder: Path, generator: GeneratorCheckpoint, dtype: torch.dtype = torch.float32) -> None:
    """Write a generator by itself: in transformers' layout, or beside the embedded encoder if it has its embeddings.

    Raises:
        InvalidModel: the folder is not empty, or the format it reads has no place outside RAG's layout.
    """
    check_generator(generator)
    read = generator.input_format
    declared = {"input_format": "pair" if isinstance(read, PairFormat) else "rag", "max_tokens": read.max_tokens}
    with _new(folder) as partial:
        if generator.base is None:
            generator.model.save_pretrained(partial)
            generator.tokenizer.save_pretrained(partial)
        else:
            state = {name: value for name, value in generator.model.state_dict().items() if not of_base(name)}
            layers, sha256 = generator.model.config.decoder.num_hidden_layers, _write_weights(partial, state, dtype)
            declared |= {"base": generator.base, "decoder_layers": layers, "sha256": sha256}
        _write(partial / "openbook.json", declared)


def check_rag(encoder: EncoderCheckpoint, generator: GeneratorCheckpoint) -> RagConfig:
    """The config of both in RAG's layout. Raises InvalidModel: a model does not fit into it."""
    return _config(encoder, generator.model, _rag_format(encoder, generator))


def check_generator(generator: GeneratorCheckpoint) -> None:
    """Whether `save_generator` can write it. Raises InvalidModel."""
    read, prefix = generator.input_format, getattr(generator.model.config, "prefix", None) or ""
    if read not in (PairFormat(read.max_tokens), RagFormat(read.max_tokens, prefix=prefix)):
        raise InvalidModel(f"only RAG's layout holds a generator that reads {read}: save it with its query encoder")


@contextmanager
def _new(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when all is written."""
    if folder.exists() and any(folder.iterdir()):
        raise InvalidModel(f"{folder}: a checkpoint must be saved to a new or an empty folder")
    with files.new_folder(folder) as partial, quiet():
        yield partial


def _write_sentence_files(folder: Path, pooling: Pooling, dimension: int) -> None:
    kinds = ["Transformer", "Pooling", *(["Normalize"] if pooling.normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=False))
    ]
    _write(folder / "modules.json", modules)
    (folder / paths[1]).mkdir()
    # Both are said: without a word of the mean, sentence-transformers before 6 put it behind the first token's vector.
    modes = {"pooling_mode_cls_token": pooling.mode == "cls", "pooling_mode_mean_tokens": pooling.mode == "mean"}
    _write(folder / paths[1] / "config.json", {"word_embedding_dimension": dimension, **modes})
    _write(folder / "sentence_bert_config.json", {"max_seq_length": pooling.max_tokens, "do_lower_case": False})
    prompts = {"query": pooling.query_prefix, "document": pooling.passage_prefix}
    _write(folder / "config_sentence_transformers.json", {"prompts": prompts})


def _write_weights(folder: Path, state: Mapping[str, Tensor], dtype: torch.dtype) -> str:
    """Weights that are stored beside their base. Returns the file's digest."""
    save_file({name: value.to("cpu", dtype).contiguous() for name, value in state.items()}, folder / WEIGHTS)
    return file_digest(folder / WEIGHTS)


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _rag_format(encoder: EncoderCheckpoint, generator: GeneratorCheckpoint) -> RagFormat:
    if not isinstance(encoder.model, DPRQuestionEncoder):
        raise InvalidModel(
            f"RAG's layout holds DPR's question encoder, got {type(encoder.model).__name__}, whose pooling "
            "transformers' RAG classes cannot do"
        )
    if not isinstance(generator.input_format, RagFormat):
        raise InvalidModel(
            f"RAG's layout holds a generator that reads `title / passage // question`, got one that reads "
            f"{type(generator.input_format).__name__}, as the embedded reader does"
        )
    spelling = generator.legacy_tokenizer
    if spelling is not None and tokenizer_digest(spelling) != tokenizer_digest(encoder.tokenizer):
        raise InvalidModel(
            "the generator knows questions as another tokenizer spells them, not this question encoder's"
        )
    return generator.input_format


def _config(encoder: EncoderCheckpoint, generator: Any, input_format: RagFormat) -> RagConfig:
    config = RagConfig.from_question_encoder_generator_configs(
        encoder.model.config,
        generator.config,
        max_combined_length=input_format.max_tokens,
        title_sep=input_format.title_separator,
        doc_sep=input_format.question_separator,
        retrieval_vector_size=encoder.dimension,
    )
    config.generator.prefix = input_format.prefix or None
    steering = {name: getattr(generator.generation_config, name, None) for name in (*_SPECIAL, *_FORCED)}
    for name in _SPECIAL:
        # The RAG classes read these off the generator's config, and crash where it has no such field (T5 has no BOS).
        value = steering[name]
        setattr(config.generator, name, getattr(config.generator, name, None) if value is None else value)
    if config.generator.pad_token_id is None:
        raise InvalidModel("RAG's layout needs a generator with a pad_token_id: the loss of transformers masks it")
    config.openbook = {
        "legacy": input_format.legacy,
        "generation": {name: value for name, value in steering.items() if value is not None},
    }
    if encoder.declared_space:
        config.openbook["space"] = encoder.declared_space
    return config
