"""Checkpoints that go from openbook to transformers and back, with equal numbers at every station."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints as tiny
import torch
from torch import Tensor
from transformers import RagSequenceForGeneration, RagTokenForGeneration, RagTokenizer

from openbook.config import EncoderSettings, GeneratorSettings
from openbook.core.types import Formulation, GenerationSettings, Passage, Retrieved
from openbook.errors import InvalidModel
from openbook.models import marginal
from openbook.models.checkpoint import GeneratorCheckpoint, load_generator
from openbook.models.decoding import generate
from openbook.models.encoder import EncoderCheckpoint, TextEncoder, load_encoder
from openbook.models.formats import RagFormat
from openbook.models.generator import RagGenerator
from openbook.models.saving import save_rag
from openbook.models.seq2seq import SpecialTokens

KINDS = {Formulation.SEQUENCE: RagSequenceForGeneration, Formulation.TOKEN: RagTokenForGeneration}
GENERATORS = [(tiny.bart, tiny.byte_tokenizer), (tiny.t5, tiny.byte_tokenizer), (tiny.bert2bert, tiny.word_tokenizer)]
QUESTIONS = ["who invented the telephone", "is Paris in France"]
PASSAGES = (
    Passage(0, "a", "telephone", "alexander graham bell invented the telephone"),
    Passage(1, "b", "", "paris is the capital"),
)
RETRIEVED = Retrieved(PASSAGES, np.array([1.0, 0.5], np.float32), "snapshot")


@pytest.fixture
def encoder(tmp_path: Path) -> EncoderCheckpoint:
    model = tiny.rag().rag.question_encoder
    return load_encoder(tiny.save(tmp_path / "dpr", model, tiny.word_tokenizer(), space="wikipedia"))


def _generator(folder: Path, build: Any = tiny.bart, tokenizer: Any = tiny.byte_tokenizer) -> GeneratorCheckpoint:
    model = build()
    model.generation_config.forced_bos_token_id = 7  # RAG's config has no field for it
    return load_generator(tiny.save(folder, model, tokenizer()))


def _numbers(model: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Contexts, mask, scores and labels, with padding of both kinds."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 100, (6, 9), generator=random)
    mask = (torch.arange(9) < torch.tensor([9, 3, 5, 9, 1, 7])[:, None]).long()
    labels = torch.tensor([[7, 11, 12, 13, 3], [7, 14, 3, -100, -100]])
    scores = torch.randn(2, 3, generator=random).double()
    return ids.masked_fill(mask == 0, SpecialTokens.of(model).pad), mask, scores, labels


def _their_loss(rag: Any, ids: Tensor, mask: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    """Of labels as we take them: theirs have the decoder's start in front, and their generator's padding behind."""
    special = SpecialTokens.of(rag.generator)
    start = torch.full((len(labels), 1), special.decoder_start)
    given = torch.cat([start, labels.masked_fill(labels < 0, special.pad)], 1)
    loss: Tensor = rag(
        context_input_ids=ids, context_attention_mask=mask, doc_scores=scores, labels=given, n_docs=scores.shape[1]
    ).loss
    return loss.flatten()


def _asked(folder: Path, formulation: Formulation) -> Any:
    reader = RagGenerator.load(GeneratorSettings(model=str(folder)))
    settings = GenerationSettings(formulation=formulation, n_beams=2, max_new_tokens=6)
    return [
        (answer.token_ids, answer.log_likelihood) for answer in reader.generate(QUESTIONS, [RETRIEVED] * 2, settings)
    ]


@pytest.mark.parametrize(("build", "tokenizer"), GENERATORS)
@pytest.mark.parametrize("formulation", Formulation)
def test_there_and_back_again(
    tmp_path: Path, encoder: EncoderCheckpoint, build: Any, tokenizer: Any, formulation: Formulation
) -> None:
    generator = _generator(tmp_path / "generator", build, tokenizer)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save_rag(ours, encoder, generator, formulation)

    numbers = _numbers(generator.model)
    wanted = marginal.log_likelihood(generator.model.double(), *numbers, formulation)
    rag = KINDS[formulation].from_pretrained(ours)
    torch.testing.assert_close(_their_loss(rag.double(), *numbers), -wanted, atol=1e-9, rtol=0)

    rag.float().save_pretrained(theirs)
    RagTokenizer.from_pretrained(ours).save_pretrained(theirs)
    generator.model.float()
    for folder in (ours, theirs):
        back = load_generator(str(folder))
        assert back.fingerprint == generator.fingerprint
        assert SpecialTokens.of(back.model) == SpecialTokens.of(generator.model)
        assert _asked(folder, formulation) == _asked(tmp_path / "generator", formulation)
        queries = TextEncoder.load(EncoderSettings(model=str(folder)))
        original = TextEncoder.load(EncoderSettings(model=str(tmp_path / "dpr")))
        assert (queries.space, queries.fingerprint) == ("wikipedia", original.fingerprint)
        np.testing.assert_array_equal(queries.encode_questions(QUESTIONS), original.encode_questions(QUESTIONS))


def test_either_class_loads_what_was_trained_as_the_other(tmp_path: Path, encoder: EncoderCheckpoint) -> None:
    generator = _generator(tmp_path / "generator")
    save_rag(tmp_path / "token", encoder, generator, Formulation.TOKEN)
    assert json.loads((tmp_path / "token/config.json").read_text())["architectures"] == ["RagTokenForGeneration"]
    numbers = _numbers(generator.model)
    wanted = marginal.log_likelihood(generator.model.double(), *numbers, Formulation.SEQUENCE)
    rag = RagSequenceForGeneration.from_pretrained(tmp_path / "token").double()
    torch.testing.assert_close(_their_loss(rag, *numbers), -wanted, atol=1e-9, rtol=0)


def test_rag_token_of_transformers_decodes_as_the_generator_says(tmp_path: Path, encoder: EncoderCheckpoint) -> None:
    generator = _generator(tmp_path / "generator")
    save_rag(tmp_path / "token", encoder, generator, Formulation.TOKEN)
    ids, mask, scores, _ = _numbers(generator.model)
    settings = GenerationSettings(formulation=Formulation.TOKEN, n_beams=1, max_new_tokens=6)
    rag = RagTokenForGeneration.from_pretrained(tmp_path / "token").double()
    inputs = {"context_input_ids": ids, "context_attention_mask": mask, "doc_scores": scores}
    theirs = rag.generate(**inputs, n_docs=3, max_length=7).tolist()
    ours = generate(generator.model.double(), ids, mask, scores, settings)
    assert [tuple(row[1 : 1 + len(answer.token_ids)]) for row, answer in zip(theirs, ours, strict=True)] == [
        answer.token_ids for answer in ours
    ]
    assert {answer.token_ids[0] for answer in ours} == {7}


def test_how_an_old_checkpoint_reads_is_kept(tmp_path: Path) -> None:
    rag = tiny.rag()
    rag.config.title_sep, rag.config.doc_sep, rag.config.max_combined_length = " : ", " ? ", 50
    rag.config.generator.prefix = "answer "
    old = tiny.save_rag(tmp_path / "old", rag)
    generator = load_generator(old)
    save_rag(tmp_path / "new", load_encoder(old), generator, Formulation.TOKEN)
    again = load_generator(str(tmp_path / "new"))
    assert again.input_format == generator.input_format == RagFormat(50, " : ", " ? ", "answer ", legacy=True)
    assert again.fingerprint == generator.fingerprint
    assert again.legacy_tokenizer.get_vocab() == generator.legacy_tokenizer.get_vocab()


def test_what_the_layout_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path, encoder: EncoderCheckpoint
) -> None:
    generator, folder = _generator(tmp_path / "generator"), tmp_path / "saved"
    with pytest.raises(InvalidModel, match="holds DPR's question encoder, got BertModel"):
        save_rag(folder, load_encoder("embedded"), generator, Formulation.TOKEN)
    with pytest.raises(InvalidModel, match="one that reads PairFormat, as the embedded reader does"):
        save_rag(folder, encoder, load_generator("embedded"), Formulation.TOKEN)
    legacy = GeneratorCheckpoint(
        generator.model, generator.tokenizer, RagFormat(legacy=True), legacy_tokenizer=tiny.byte_tokenizer()
    )
    with pytest.raises(InvalidModel, match="as another tokenizer spells them"):
        save_rag(folder, encoder, legacy, Formulation.TOKEN)
    generator.model.config.pad_token_id = generator.model.generation_config.pad_token_id = None
    with pytest.raises(InvalidModel, match="a generator with a pad_token_id"):
        save_rag(folder, encoder, generator, Formulation.TOKEN)
    assert not folder.exists()


def test_a_checkpoint_is_never_overwritten(tmp_path: Path, encoder: EncoderCheckpoint) -> None:
    generator, folder = _generator(tmp_path / "generator"), tmp_path / "saved"
    save_rag(folder, encoder, generator, Formulation.TOKEN)
    with pytest.raises(InvalidModel, match="to a new or an empty folder"):
        save_rag(folder, encoder, generator, Formulation.TOKEN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dpr", "generator", "saved"]
