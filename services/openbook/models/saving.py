"""Checkpoints in the layout of transformers' RAG classes: one set of weights, each tokenizer in a folder of its own.

    save_rag(Path("checkpoint"), load_encoder("my-dpr"), load_generator("my-bart"), Formulation.SEQUENCE)

transformers' `RagSequenceForGeneration`, `RagTokenForGeneration` and `RagTokenizer` load the folder, as `load_encoder`
and `load_generator` do, and all of them give the same numbers. What RAG's config has no field for stands in config.json
under "openbook" (see `Declaration`), so that it is still there after transformers loaded and saved the checkpoint.
"""

import shutil
from pathlib import Path
from typing import Any

from transformers import DPRQuestionEncoder, RagConfig, RagSequenceForGeneration, RagTokenForGeneration

from openbook.core.types import Formulation
from openbook.errors import InvalidModel
from openbook.models.checkpoint import GeneratorCheckpoint, quiet, tokenizer_digest
from openbook.models.encoder import EncoderCheckpoint
from openbook.models.formats import RagFormat

_KINDS = {Formulation.SEQUENCE: RagSequenceForGeneration, Formulation.TOKEN: RagTokenForGeneration}
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
_FORCED = ("forced_bos_token_id", "forced_eos_token_id")


def save_rag(
    folder: Path, encoder: EncoderCheckpoint, generator: GeneratorCheckpoint, formulation: Formulation
) -> None:
    """Write a query encoder and a generator that belong together. The folder appears whole or not at all.

    Args:
        folder: absent or empty.
        encoder: DPR's question encoder. Its `space` should name the passage encoder whose passages it asks for.
        generator: any encoder-decoder that reads `title / passage // question`.
        formulation: the one that was trained. It is only named in the config: either class loads the checkpoint.

    Raises:
        InvalidModel: the folder is not empty, or a model does not fit into this layout; nothing was written.
    """
    input_format = _check(encoder, generator)
    if folder.exists() and any(folder.iterdir()):
        raise InvalidModel(f"{folder}: a checkpoint must be saved to a new or an empty folder")
    config = _config(encoder, generator.model, input_format)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with quiet():
        rag = _KINDS[formulation](config=config, question_encoder=encoder.model, generator=generator.model)
        if formulation is Formulation.TOKEN:  # the other class has none, and decodes with its generator's
            rag.generation_config = generator.model.generation_config
        rag.save_pretrained(partial)
        encoder.tokenizer.save_pretrained(partial / "question_encoder_tokenizer")
        generator.tokenizer.save_pretrained(partial / "generator_tokenizer")
    partial.rename(folder)


def _check(encoder: EncoderCheckpoint, generator: GeneratorCheckpoint) -> RagFormat:
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
        retrieval_vector_size=encoder.model.config.projection_dim or encoder.model.config.hidden_size,
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
    if encoder.space:
        config.openbook["space"] = encoder.space
    return config
