"""Models out of folders in every layout: found, whole, identified, or refused with a reason."""

import hashlib
import json
from pathlib import Path

import pytest
import tiny_checkpoints as tiny
import tiny_encoders
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import WhitespaceSplit

from openbook.config import EncoderSettings, GeneratorSettings
from openbook.core.types import Passage
from openbook.errors import InvalidModel
from openbook.models.checkpoint import bert2bert, load_generator, place
from openbook.models.embedded import EMBEDDED, encoder_folder
from openbook.models.encoder import load_encoder
from openbook.models.formats import PairFormat, RagFormat
from openbook.models.source import PROBE, Source, first_line, weights_digest


def bart(folder: Path, **declaration: object) -> str:
    return tiny.save(folder, tiny.bart(), tiny.byte_tokenizer(), **declaration)


def logits(model: object) -> torch.Tensor:
    with torch.no_grad():
        ids = torch.tensor([[0, 5, 6, 2]])
        return model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=ids[:, :2]).logits


@pytest.mark.parametrize("name", ["no-such/encoder", "/no/such/folder", "no such name"])
def test_an_unknown_model_is_named_at_once(name: str) -> None:
    with pytest.raises(InvalidModel, match=f"model '{name}' is neither 'embedded'"):
        Source.find(name, encoder_folder)


def test_what_was_downloaded_before_is_found_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--tiny--bart"
    bart(cached / "snapshots/abc")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("abc")
    loaded = load_generator("tiny/bart")
    torch.testing.assert_close(logits(loaded.model), logits(tiny.bart()))


def test_a_folder_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="cannot load its config"):
        load_generator(str(tmp_path))


def test_missing_weights_are_refused_rather_than_made_up(tmp_path: Path) -> None:
    path = Path(bart(tmp_path)) / "model.safetensors"
    weights = load_file(path)
    del weights["model.decoder.layers.0.fc1.weight"]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(InvalidModel, match=r"1 weights are missing, first of them model\.decoder\.layers\.0\.fc1"):
        load_generator(str(tmp_path))


def test_what_is_said_of_an_error_is_its_first_line_or_the_reasons_that_this_announces() -> None:
    many = RuntimeError("Error(s) in loading state_dict:" + "\n\tsize mismatch for a.weight: 3, not 4" * 1000)
    assert "size mismatch for a.weight" in first_line(many)
    assert len(first_line(many)) < 500
    assert first_line(RuntimeError("CUDA error: invalid device\nFor debugging:\n...")) == "CUDA error: invalid device"


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    path = Path(bart(tmp_path)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidModel, match="cannot load its weights"):
        load_generator(str(tmp_path))


def test_declared_digests_are_checked(tmp_path: Path) -> None:
    path = Path(bart(tmp_path)) / "model.safetensors"
    declared = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (tmp_path / "openbook.json").write_text(json.dumps(declared))
    load_generator(str(tmp_path))
    altered = bytearray(path.read_bytes())
    altered[-1] ^= 1
    path.write_bytes(altered)
    with pytest.raises(InvalidModel, match=rf"altered: sha256 must be {declared['sha256']}, got [0-9a-f]{{64}}"):
        load_generator(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"max_token": 30}', "max_token"), ('{"max_tokens": 0}', "max_tokens"), ("{", "cannot load its openbook.json")],
)
def test_a_bad_declaration_is_refused(tmp_path: Path, content: str, message: str) -> None:
    bart(tmp_path)
    (tmp_path / "openbook.json").write_text(content)
    with pytest.raises(InvalidModel, match=message):
        load_generator(str(tmp_path))


def test_a_declaration_may_stand_in_the_config_and_be_overruled_key_by_key(tmp_path: Path) -> None:
    name = bart(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"openbook": {"input_format": "pair", "max_tokens": 40}}))
    assert load_generator(name).input_format == PairFormat(max_tokens=40)
    (tmp_path / "openbook.json").write_text('{"max_tokens": 30}')
    assert load_generator(name).input_format == PairFormat(max_tokens=30)
    (tmp_path / "config.json").write_text(json.dumps(config | {"openbook": ["pair"]}))
    with pytest.raises(InvalidModel, match=r"config\.json: 1 validation error"):
        load_generator(name)


def test_an_encoder_decoder_reads_as_rag_does_as_far_as_it_has_positions(tmp_path: Path) -> None:
    loaded = load_generator(bart(tmp_path))
    assert loaded.input_format == RagFormat(max_tokens=128)
    torch.testing.assert_close(logits(loaded.model), logits(tiny.bart()))


def test_an_encoder_decoder_reads_as_it_declares(tmp_path: Path) -> None:
    name = bart(tmp_path, input_format="pair", max_tokens=30)
    assert load_generator(name).input_format == PairFormat(max_tokens=30)


def test_two_models_in_one_without_a_pooler(tmp_path: Path) -> None:
    model = tiny.bert2bert()
    name = tiny.save(tmp_path, model, tiny.word_tokenizer())
    loaded = load_generator(name)
    torch.testing.assert_close(logits(loaded.model), logits(model))
    assert loaded.fingerprint == load_generator(name).fingerprint, "nothing random is left in it"


def test_two_robertas_in_one_read_what_they_have_positions_for(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": len(tiny.word_tokenizer()), "max_position_embeddings": 42, "pad_token_id": 1}
    encoding = transformers.RobertaConfig(**sizes)
    decoding = transformers.RobertaConfig(**sizes, is_decoder=True, add_cross_attention=True)
    model = transformers.EncoderDecoderModel(
        encoder=transformers.RobertaModel(encoding, add_pooling_layer=False),
        decoder=transformers.RobertaForCausalLM(decoding),
    )
    model.generation_config.update(decoder_start_token_id=2, eos_token_id=3, pad_token_id=1)
    loaded = load_generator(tiny.save(tmp_path, model, tiny.word_tokenizer()))
    ids = torch.full((1, 40), 5)
    assert loaded.input_format.max_tokens == loaded.max_answer_tokens == ids.shape[1]
    assert loaded.model(input_ids=ids, decoder_input_ids=ids).logits.shape[1] == ids.shape[1]
    with pytest.raises(RuntimeError, match="out of bounds"):
        loaded.model(input_ids=ids, decoder_input_ids=torch.full((1, 41), 5))


def test_the_generator_of_a_rag_checkpoint(tmp_path: Path) -> None:
    rag = tiny.rag()
    rag.config.title_sep, rag.config.doc_sep, rag.config.max_combined_length = " : ", " ? ", 50
    name = tiny.save_rag(tmp_path, rag)
    loaded = load_generator(name)
    assert loaded.input_format == RagFormat(50, " : ", " ? ", legacy=True)
    assert loaded.legacy_tokenizer.cls_token == "[CLS]"
    assert loaded.tokenizer.bos_token == "<s>"
    torch.testing.assert_close(logits(loaded.model), logits(rag.rag.generator))
    (tmp_path / "openbook.json").write_text('{"legacy": false}')
    plain = load_generator(name)
    assert (plain.input_format.legacy, plain.legacy_tokenizer) == (False, None)
    assert plain.fingerprint != loaded.fingerprint


def test_a_rag_checkpoint_of_2020_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """Its tokenizers' folders do not say which tokenizers they are; RAG's config does."""
    rag = tiny.rag()
    name = tiny.save_rag_of_2020(tmp_path, rag)
    theirs = transformers.RagTokenizer.from_pretrained(name)
    encoder, generator = load_encoder(name, passage_model=None), load_generator(name)
    for text in ("Who's the president of France?", PROBE):
        assert encoder.tokenizer(text)["input_ids"] == theirs.question_encoder(text)["input_ids"]
        assert generator.legacy_tokenizer(text)["input_ids"] == theirs.question_encoder(text)["input_ids"]
        assert generator.tokenizer(text)["input_ids"] == theirs.generator(text)["input_ids"]
    torch.testing.assert_close(logits(generator.model), logits(rag.rag.generator))


def test_a_tokenizer_of_rag_that_was_made_by_hand_is_read_as_it_stands(tmp_path: Path) -> None:
    """Made anew as that of the model which reads it, it would split other than its tokenizer.json does."""
    made = tiny.word_tokenizer()
    made.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    folder = Path(tiny.save_rag(tmp_path, tiny.rag())) / "question_encoder_tokenizer"
    made.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": None}))
    loaded = load_encoder(str(tmp_path), passage_model=None).tokenizer
    assert loaded(PROBE)["input_ids"] == made(PROBE)["input_ids"] != tiny.word_tokenizer()(PROBE)["input_ids"]


def test_a_generator_makes_only_ids_that_its_model_knows(tmp_path: Path) -> None:
    """Special tokens that it does not know are characters like others in a text."""
    ordinary, masked = tiny.byte_tokenizer(), tiny.byte_tokenizer()
    ordinary.add_tokens(["zzz"])
    n = len(masked)
    with pytest.raises(InvalidModel, match=f"its tokenizer has ids up to {n}, and the model knows those below {n}"):
        load_generator(tiny.save(tmp_path / "ordinary", tiny.bart(), ordinary))
    masked.add_special_tokens({"mask_token": "<mask>"})
    loaded = load_generator(tiny.save(tmp_path / "masked", tiny.bart(), masked))
    plain = load_generator(bart(tmp_path / "plain"))
    passages = [Passage(0, "", "Moon", "a <mask>")]
    assert loaded.contexts("what is <mask>?", passages) == plain.contexts("what is <mask>?", passages)
    assert loaded.answer_ids("<mask>") == plain.answer_ids("<mask>")


def test_what_is_no_generator_is_refused(tmp_path: Path) -> None:
    name = tiny_encoders.saved(tmp_path / "bert", tiny_encoders.bert_model(), tiny_encoders.bert_tokenizer())
    with pytest.raises(InvalidModel, match="a generator must be an encoder-decoder, got 'bert'"):
        load_generator(name)
    with pytest.raises(InvalidModel, match="legacy is for checkpoints in RAG's layout"):
        load_generator(bart(tmp_path / "bart", legacy=True))


def test_a_reader_on_the_embedded_encoder_stores_no_embeddings(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = bert2bert(Source.find(EMBEDDED, encoder_folder), decoder_layers=1)
    own = {
        n: w.half() for n, w in model.state_dict().items() if ".embeddings." not in n and "predictions.decoder" not in n
    }
    save_file(own, tmp_path / "model.safetensors")
    (tmp_path / "openbook.json").write_text(json.dumps({"base": "embedded", "max_tokens": 224}))
    loaded = load_generator(str(tmp_path))
    torch.testing.assert_close(logits(loaded.model), logits(model), atol=1e-2, rtol=1e-2)
    words = loaded.model.encoder.embeddings.word_embeddings.weight
    assert loaded.model.decoder.cls.predictions.decoder.weight is words
    assert loaded.input_format == PairFormat(224)
    save_file({n: w for n, w in own.items() if "crossattention" not in n}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModel, match=r"weights are missing or unknown, first decoder\.bert"):
        load_generator(str(tmp_path))


def test_weights_have_one_digest_in_every_file_format(tmp_path: Path) -> None:
    one, other = tiny.bart(), tiny.bart()
    one.save_pretrained(tmp_path)
    torch.save(one.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    loaded = Source.find(str(tmp_path), encoder_folder).model(transformers.BartForConditionalGeneration)
    assert weights_digest(loaded) == weights_digest(other)
    with torch.no_grad():
        other.model.shared.weight[3, 3] += 1e-6
    assert weights_digest(loaded) != weights_digest(other)


def test_models_go_where_the_settings_say() -> None:
    model = place(tiny.bart().train(), GeneratorSettings(dtype="bfloat16", n_threads=1))
    assert (model.dtype, model.training, torch.get_num_threads()) == (torch.bfloat16, False, 1)
    for device in ("cuda:99", "tpu?"):
        with pytest.raises(InvalidModel, match=f"device '{device[:3]}"):
            place(tiny.bart(), EncoderSettings(device=device))
