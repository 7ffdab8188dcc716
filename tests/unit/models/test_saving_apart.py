"""Encoders and generators saved each in a folder of its own, and loaded as what they were."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints as tiny
import tiny_encoders
import torch
from safetensors.torch import load_file, save_file
from transformers import DPRQuestionEncoder

from openbook.config import EncoderSettings
from openbook.core.types import Passage
from openbook.errors import InvalidModel
from openbook.models.checkpoint import load_generator
from openbook.models.encoder import EncoderCheckpoint, TextEncoder, load_encoder
from openbook.models.formats import PairFormat, RagFormat
from openbook.models.saving import save_encoder, save_generator

QUESTIONS = ["who was bell", "where is the moon, a moon of the earth?"]
PASSAGE = Passage(0, "a", "moon", "the moon is a moon of the earth " * 3)
CLS = {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}


def modules(*kinds: str) -> list[dict[str, str]]:
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    return [{"type": f"sentence_transformers.models.{kind}", "path": paths[kind]} for kind in kinds]


SENTENCES: dict[str, dict[str, Any]] = {
    "mean, normalised": {},
    "its own scale and space": {"openbook": {"query_scale": 3.5, "space": "wikipedia"}},
    "first token, as it is": {"modules": modules("Transformer", "Pooling"), "1_Pooling__config": CLS},
    "first token, normalised": {
        "modules": modules("Transformer", "Pooling", "Normalize"),
        "1_Pooling__config": CLS,
        "sentence_bert_config": {"max_seq_length": 20},
        "config_sentence_transformers": {"prompts": {"query": "question : ", "document": "passage : "}},
    },
}


def check_encoder(before: EncoderCheckpoint, out: Path) -> None:
    save_encoder(out, before)
    after = load_encoder(str(out))
    assert (after.fingerprint, after.pooling, after.space) == (before.fingerprint, before.pooling, before.space)
    one, other = (TextEncoder(each, EncoderSettings()) for each in (before, after))
    np.testing.assert_array_equal(one.encode_questions(QUESTIONS), other.encode_questions(QUESTIONS))


@pytest.mark.parametrize("kind", SENTENCES)
def test_sentence_encoders_keep_how_they_pool(tmp_path: Path, kind: str) -> None:
    model, tokenizer = tiny_encoders.bert_model(), tiny_encoders.bert_tokenizer()
    name = tiny_encoders.saved(tmp_path / "before", model, tokenizer, **SENTENCES[kind])
    check_encoder(load_encoder(name), tmp_path / "after")
    told = json.loads((tmp_path / "after/1_Pooling/config.json").read_text())
    is_first = SENTENCES[kind].get("1_Pooling__config") == CLS
    assert (told["pooling_mode_cls_token"], told["pooling_mode_mean_tokens"]) == (is_first, not is_first)
    one, other = (
        TextEncoder.load(EncoderSettings(model=str(tmp_path / each)), "passage") for each in ("before", "after")
    )
    np.testing.assert_array_equal(one.encode_passages([PASSAGE]), other.encode_passages([PASSAGE]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_of_the_embedded_encoder_only_what_was_trained_is_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    trained = load_encoder("embedded", "passage")
    space = trained.fingerprint
    trained = replace(trained, declared_space=space)
    bias = trained.model.encoder.layer[5].output.dense.bias
    bias.data += torch.ones_like(bias)  # exact in half precision or not: what is stored counts
    save_encoder(tmp_path / "trained", trained, dtype)
    stored = load_file(tmp_path / "trained/model.safetensors")
    assert {name: value.dtype for name, value in stored.items()} == {"encoder.layer.5.output.dense.bias": dtype}
    after = load_encoder(str(tmp_path / "trained"))
    assert after.space == space != after.fingerprint
    assert dtype != torch.float32 or after.fingerprint == trained.fingerprint
    check_encoder(after, tmp_path / "again")


def test_weights_that_the_embedded_encoder_does_not_have_are_refused(tmp_path: Path) -> None:
    stored = "encoder.layer.9.output.dense.bias"
    save_file({stored: torch.ones(384)}, tmp_path / "model.safetensors")
    (tmp_path / "openbook.json").write_text('{"base": "embedded"}')
    with pytest.raises(InvalidModel, match=f"1 weights are missing or unknown, first {stored}"):
        load_encoder(str(tmp_path))


def test_questions_and_passages_have_an_embedded_encoder_each_in_one_space() -> None:
    query, passage = load_encoder("embedded"), load_encoder("embedded", "passage")
    assert query.space == passage.space == passage.fingerprint
    assert query.pooling == passage.pooling


def test_dpr_and_the_space_it_was_trained_for(tmp_path: Path) -> None:
    dpr = tiny_encoders.dpr_model(DPRQuestionEncoder), tiny_encoders.bert_tokenizer()
    name = tiny_encoders.saved(tmp_path / "before", *dpr)
    check_encoder(load_encoder(name), tmp_path / "after")
    save_encoder(tmp_path / "declared", replace(load_encoder(name), declared_space="wikipedia"))
    assert load_encoder(str(tmp_path / "declared")).space == "wikipedia"


@pytest.mark.parametrize(
    ("build", "tokenizer"),
    [(tiny.bart, tiny.byte_tokenizer), (tiny.t5, tiny.byte_tokenizer), (tiny.bert2bert, tiny.word_tokenizer)],
)
@pytest.mark.parametrize("declared", [{}, {"input_format": "pair", "max_tokens": 40}, {"max_tokens": 50}])
def test_generators_keep_how_they_read(tmp_path: Path, build: Any, tokenizer: Any, declared: dict[str, Any]) -> None:
    model = build()
    model.config.prefix = "answer: "
    before = load_generator(tiny.save(tmp_path / "before", model, tokenizer(), **declared))
    save_generator(tmp_path / "after", before)
    after = load_generator(str(tmp_path / "after"))
    assert (after.fingerprint, after.input_format) == (before.fingerprint, before.input_format)
    assert isinstance(after.input_format, PairFormat if "input_format" in declared else RagFormat)
    assert after.input_format.max_tokens <= declared.get("max_tokens", 300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_embedded_reader_is_saved_without_what_it_shares(tmp_path: Path, dtype: torch.dtype) -> None:
    before = load_generator("embedded")
    save_generator(tmp_path / "after", before, dtype)
    after = load_generator(str(tmp_path / "after"))
    assert (after.fingerprint, after.input_format) == (before.fingerprint, before.input_format)
    stored = load_file(tmp_path / "after/model.safetensors")
    assert {value.dtype for value in stored.values()} == {dtype}
    assert sum(value.numel() for value in stored.values()) < sum(p.numel() for p in before.model.parameters())
    content = bytearray((tmp_path / "after/model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "after/model.safetensors").write_bytes(content)
    with pytest.raises(InvalidModel, match="was altered"):
        load_generator(str(tmp_path / "after"))


def test_a_generator_that_only_rags_layout_can_hold_is_refused(tmp_path: Path) -> None:
    before = load_generator(tiny.save(tmp_path / "before", tiny.bart(), tiny.byte_tokenizer()))
    for read in (RagFormat(100, legacy=True), RagFormat(100, title_separator=" : ")):
        with pytest.raises(InvalidModel, match="only RAG's layout holds a generator that reads RagFormat"):
            save_generator(tmp_path / "after", replace(before, input_format=read))
    save_generator(tmp_path / "after", replace(before, input_format=PairFormat(30)))
    assert load_generator(str(tmp_path / "after")).input_format == PairFormat(30)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "before"
    generator = load_generator(tiny.save(folder, tiny.bart(), tiny.byte_tokenizer()))
    with pytest.raises(InvalidModel, match="to a new or an empty folder"):
        save_generator(folder, generator)
    with pytest.raises(InvalidModel, match="to a new or an empty folder"):
        save_encoder(folder, load_encoder("embedded"))
    assert load_generator(str(tmp_path / "before")).fingerprint == generator.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["before"]
