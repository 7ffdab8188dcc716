"""Encoders: the embedded one as it is, the other families as tiny random models against transformers' own forward."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_checkpoints
import tiny_encoders as tiny
import torch
import transformers
from tokenizers import normalizers

from openbook.config import EncoderSettings
from openbook.core.types import Passage
from openbook.errors import InvalidModel, InvalidRequest
from openbook.models import embedded
from openbook.models.batches import Batches
from openbook.models.encoder import TextEncoder, load_encoder
from openbook.models.pooling import sentence_pooling
from openbook.models.source import Source, n_positions

BELL = Passage(0, "a", "Alexander Graham Bell", "Bell was awarded the first United States patent for the telephone.")
CURIE = Passage(1, "b", "Marie Curie", "Marie Curie was born in Warsaw in 1867 and moved to Paris at the age of 24.")
MOON = Passage(2, "c", "Moon", "The Moon is the only natural satellite of the Earth.")
MEAN = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    return TextEncoder.load(EncoderSettings())


@pytest.fixture(scope="module")
def passage_encoder() -> TextEncoder:
    return TextEncoder.load(EncoderSettings(), "passage")


def load(model: str, role: str = "query", **settings: object) -> TextEncoder:
    return TextEncoder.load(EncoderSettings(model=model, **settings), role=role)


def modules(*kinds: str) -> list[dict[str, str]]:
    paths = {"Transformer": "", "Pooling": "1_Pooling"}
    return [{"type": f"sentence_transformers.models.{kind}", "path": paths.get(kind, kind)} for kind in kinds]


@pytest.mark.parametrize(
    ("question", "best"),
    [("who invented the telephone?", 0), ("In which city was Marie Curie born?", 1), ("what circles our planet?", 2)],
)
def test_the_embedded_encoder_finds_the_right_passage(encoder: TextEncoder, question: str, best: int) -> None:
    scores = encoder.encode_questions([question]) @ encoder.encode_passages([BELL, CURIE, MOON]).T
    assert scores.argmax() == best


def test_the_embedded_encoder_is_mean_pooling_at_the_length_it_was_trained_with(passage_encoder: TextEncoder) -> None:
    encoder = passage_encoder
    folder = embedded.encoder_folder()
    tokenizer, model = (kind.from_pretrained(folder) for kind in (transformers.AutoTokenizer, transformers.AutoModel))
    with torch.no_grad():
        states = model(**tokenizer("who was Marie Curie?", return_tensors="pt")).last_hidden_state[0]
    mean = states.mean(0).numpy()
    query = encoder.encode_questions(["who was Marie Curie?"])[0]
    np.testing.assert_allclose(query, 20 * mean / np.linalg.norm(mean), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(encoder.encode_passages([BELL, MOON]), axis=1), 1, atol=1e-6)
    assert (query.dtype, encoder.dimension) == (np.float32, 384)


def test_a_question_has_the_same_bits_whatever_is_in_its_batch(encoder: TextEncoder) -> None:
    rng = np.random.default_rng(0)
    words = [*tiny.WORDS[:20], "uncopyrightable", "東京"]
    questions = [" ".join(rng.choice(words, size)) for size in rng.integers(1, 40, 24)]
    alone = np.concatenate([encoder.encode_questions([question]) for question in questions])
    for _ in range(3):
        order = rng.permutation(24)[: rng.integers(2, 25)]
        assert encoder.encode_questions([questions[i] for i in order]).tobytes() == alone[order].tobytes()


def test_a_question_that_is_too_long_is_refused_and_one_that_just_fits_is_not(encoder: TextEncoder) -> None:
    longest = "moon " * 254
    assert encoder.n_tokens(longest) == 256
    assert encoder.encode_questions([longest]).shape == (1, 384)
    with pytest.raises(InvalidRequest, match="question has 257 tokens, and the encoder can read 256"):
        encoder.encode_questions(["who?", longest + "moon"])


def test_passages_keep_their_order_and_what_does_not_fit_is_cut_off_their_ends(encoder: TextEncoder) -> None:
    rng = np.random.default_rng(1)
    texts = [" ".join(rng.choice(tiny.WORDS[:20], size)) for size in rng.integers(1, 70, 20)]
    passages = [Passage(i, "", "Title", text) for i, text in enumerate(texts)]
    alone = np.concatenate([encoder.encode_passages([passage]) for passage in passages])
    np.testing.assert_allclose(encoder.encode_passages(passages), alone, atol=1e-5)
    # 256 tokens: [CLS], title, ".", 252 words, [SEP]
    cut, whole, more = (encoder.encode_passages([Passage(0, "", "Title", "moon " * n)])[0] for n in (251, 252, 300))
    np.testing.assert_array_equal(whole, more)
    assert not np.array_equal(cut, whole)


def test_it_computes_with_as_many_threads_as_it_was_given(
    encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever another model of this process computes with."""
    chosen: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    encoder.encode_questions(["who?"])
    encoder.encode_passages([BELL])
    assert chosen == [encoder._n_threads] * 2


def test_nothing_in_nothing_out(encoder: TextEncoder) -> None:
    assert encoder.encode_questions([]).shape == encoder.encode_passages([]).shape == (0, 384)


def test_bfloat16_stays_near_and_in_the_same_space(encoder: TextEncoder, passage_encoder: TextEncoder) -> None:
    fast = TextEncoder.load(EncoderSettings(dtype="bfloat16"), "passage")
    assert fast.space == passage_encoder.space == encoder.space
    assert fast.fingerprint != passage_encoder.fingerprint, "or a cache would hand one's embeddings to the other"
    cosines = (fast.encode_passages([BELL, CURIE, MOON]) * passage_encoder.encode_passages([BELL, CURIE, MOON])).sum(1)
    assert cosines.min() > 0.999


def test_dpr_reads_a_title_and_a_text_as_two_segments_of_one_type(tmp_path: Path) -> None:
    model, tokenizer = tiny.dpr_model(transformers.DPRContextEncoder), tiny.bert_tokenizer()
    encoder = load(tiny.saved(tmp_path, model, tokenizer), "passage")
    for title, text, read in (
        ("The Moon", "The moon is a moon of the earth", "[CLS] the moon [SEP] the moon is a moon of the earth [SEP]"),
        ("bell", "who " * 90, f"[CLS] bell [SEP] {'who ' * 36}[SEP]"),
        ("moon " * 60, "the moon", f"[CLS] {'moon ' * 35}[SEP] the moon [SEP]"),  # the longer of the two is cut
    ):
        found = encoder.encode_passages([Passage(0, "", title, text)])
        with torch.no_grad():
            ids = torch.tensor([tokenizer.convert_tokens_to_ids(read.split())])
            expected = model.eval()(ids).pooler_output.numpy()
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_dpr_reads_as_much_as_it_was_trained_with_however_many_positions_it_has(tmp_path: Path) -> None:
    config = transformers.DPRConfig(**{**tiny.DPR.to_dict(), "max_position_embeddings": 300})
    name = tiny.saved(tmp_path, transformers.DPRQuestionEncoder(config), tiny.bert_tokenizer())
    assert load_encoder(name).pooling.max_tokens == 256


def test_a_dpr_query_encoder_says_whose_passages_it_asks_for(tmp_path: Path) -> None:
    model, tokenizer = tiny.dpr_model(transformers.DPRQuestionEncoder), tiny.bert_tokenizer()
    passages = load(
        tiny.saved(tmp_path / "p", tiny.dpr_model(transformers.DPRContextEncoder), tokenizer), "passage"
    ).fingerprint
    name = tiny.saved(tmp_path / "q", model, tokenizer, openbook={"space": passages})
    encoder = load(name)
    assert encoder.space == passages != encoder.fingerprint
    with torch.no_grad():
        expected = model.eval()(**tokenizer("who was bell ?", return_tensors="pt")).pooler_output.numpy()
    np.testing.assert_allclose(encoder.encode_questions(["who was bell ?"]), expected, atol=1e-5)
    with pytest.raises(InvalidModel, match="weights are missing"):
        load(name, "passage")


def test_the_query_encoder_of_a_rag_checkpoint(tmp_path: Path) -> None:
    rag = tiny_checkpoints.rag()
    name = tiny_checkpoints.save_rag(tmp_path, rag)
    encoder = load(name)
    inputs = tiny_checkpoints.word_tokenizer()("who was bell ?", return_tensors="pt")
    with torch.no_grad():
        expected = rag.rag.question_encoder(**inputs).pooler_output.numpy()
    np.testing.assert_allclose(encoder.encode_questions(["who was bell ?"]), expected, atol=1e-5)
    with pytest.raises(InvalidModel, match="its passages were encoded by another model"):
        load(name, "passage")


@pytest.mark.parametrize(
    ("cls", "prompt"),
    [
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, "document"),
        ({"pooling_mode": "cls"}, "passage"),
        ({"pooling_mode": "cls"}, "corpus"),
    ],
)
def test_sentence_encoders_pool_as_their_files_say(tmp_path: Path, cls: dict[str, object], prompt: str) -> None:
    model, tokenizer = tiny.bert_model(), tiny.bert_tokenizer()
    encoder = load(
        tiny.saved(
            tmp_path,
            model,
            tokenizer,
            modules=modules("Transformer", "Pooling"),
            **{"1_Pooling__config": cls},
            sentence_bert_config={"max_seq_length": 20},
            config_sentence_transformers={"prompts": {"query": "question : ", prompt: "passage : "}},
        )
    )
    texts = ["question : who was bell", "passage : moon. the earth", "passage : the earth"]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model.eval()(**inputs).last_hidden_state[:, 0].numpy()
    np.testing.assert_allclose(encoder.encode_questions(["who was bell"])[0], states[0], atol=1e-5)
    passages = encoder.encode_passages([Passage(0, "", title, "the earth") for title in ("moon", "")])
    np.testing.assert_allclose(passages, states[1:], atol=1e-5)
    assert encoder.n_tokens("who " * 17) == 21
    with pytest.raises(InvalidRequest, match="question has 21 tokens, and the encoder can read 20"):
        encoder.encode_questions(["who " * 17])


@pytest.mark.parametrize("name", ["sentence_roberta_config", "sentence_distilbert_config"])
def test_a_sentence_encoders_length_may_stand_in_a_file_named_after_its_model(tmp_path: Path, name: str) -> None:
    """As sentence-transformers' older ones have it."""
    files = {name: {"max_seq_length": 20}}
    assert load(tiny.saved(tmp_path, tiny.bert_model(), tiny.bert_tokenizer(), **files)).pooling.max_tokens == 20


def test_of_several_such_files_the_first_counts_and_the_one_that_is_wrong_is_named(tmp_path: Path) -> None:
    """As sentence-transformers reads them."""
    limited = {"sentence_roberta_config": {"max_seq_length": 20}}
    both = tiny.saved(tmp_path / "both", tiny.bert_model(), tiny.bert_tokenizer(), sentence_bert_config={}, **limited)
    assert load(both).pooling.max_tokens == tiny.DPR.max_position_embeddings
    limited["sentence_roberta_config"]["max_seq_length"] = -1
    with pytest.raises(InvalidModel, match=r"max_seq_length of sentence_roberta_config\.json must say"):
        load(tiny.saved(tmp_path / "wrong", tiny.bert_model(), tiny.bert_tokenizer(), **limited))


@pytest.mark.parametrize("knows_capitals", [False, True])
def test_lower_case_that_its_files_ask_for_is_the_tokenizers_to_make(tmp_path: Path, knows_capitals: bool) -> None:
    """sentence-transformers puts it before any tokenizer."""
    tokenizer = tiny.bert_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not knows_capitals)
    files = {"sentence_bert_config": {"max_seq_length": 20, "do_lower_case": True}}
    name = tiny.saved(tmp_path, tiny.bert_model(), tokenizer, **files)
    message = r"sentence_bert_config\.json asks for do_lower_case, its tokenizer knows capitals"
    with pytest.raises(InvalidModel, match=message) if knows_capitals else nullcontext():
        load(name)


def test_without_such_files_the_mean_is_normalised_and_scaled(tmp_path: Path) -> None:
    tokenizer = tiny.bert_tokenizer()
    tokenizer.model_max_length = 20
    encoder = load(tiny.saved(tmp_path, tiny.bert_model(), tokenizer, openbook={"query_scale": 3.0}))
    assert encoder.pooling.max_tokens == 20
    assert np.linalg.norm(encoder.encode_questions(["who was bell"])[0]) == pytest.approx(3)
    assert np.linalg.norm(encoder.encode_passages([BELL])[0]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("kinds", "pooling", "message"),
    [
        (["Transformer", "Pooling", "Dense"], MEAN, "modules.json asks for Dense"),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "pooling must be mean or cls, got max_tokens"),
        (["Transformer", "Pooling"], MEAN | {"pooling_mode_cls_token": True}, "got mean_tokens, cls_token"),
        (["Transformer", "Pooling"], MEAN | {"include_prompt": False}, "include_prompt of pooling must be true"),
    ],
)
def test_what_is_not_done_here_is_refused(
    tmp_path: Path, kinds: list[str], pooling: dict[str, bool], message: str
) -> None:
    prompts = {"prompts": {"query": "question : "}}
    files = {"modules": modules(*kinds), "1_Pooling__config": pooling, "config_sentence_transformers": prompts}
    with pytest.raises(InvalidModel, match=message):
        load(tiny.saved(tmp_path, tiny.bert_model(), tiny.bert_tokenizer(), **files))


@pytest.mark.parametrize(
    "files",
    [
        {"modules": [{"idx": 0}]},
        {"modules": {"a": 1}},
        {"sentence_bert_config": {"max_seq_length": "long"}},
        {"sentence_bert_config": {"max_seq_length": -1}},
        {"config_sentence_transformers": {"prompts": ["x"]}},
        {"config_sentence_transformers": {"prompts": {"query": 5}}},
    ],
)
def test_files_that_are_not_as_they_must_be_are_named(tmp_path: Path, files: dict[str, object]) -> None:
    with pytest.raises(InvalidModel, match=r"cannot load its pooling: |must say how many tokens .*, got -1"):
        load(tiny.saved(tmp_path, tiny.bert_model(), tiny.bert_tokenizer(), **files))


def test_a_model_may_have_no_limit_of_its_own_if_something_else_has(tmp_path: Path) -> None:
    """As XLNet, which says -1."""
    model, source = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=-1), base_model=None), str(tmp_path)
    assert n_positions(model) is None
    with pytest.raises(InvalidModel, match=r"must say how many tokens it reads, 1\.\.1048576, got 1000000"):
        sentence_pooling(Source(source, source, local=True), model, tiny.bert_tokenizer(), None)


@pytest.mark.parametrize("build", [tiny_checkpoints.bart, tiny_checkpoints.t5])
def test_a_generator_is_no_encoder(tmp_path: Path, build: Callable[[], Any]) -> None:
    """transformers' base class of it gives the decoder's states."""
    with pytest.raises(InvalidModel, match=r"must not be an encoder-decoder, got '(bart|t5)'"):
        load(tiny_checkpoints.save(tmp_path, build(), tiny_checkpoints.byte_tokenizer()))


def test_a_tokenizer_that_is_not_the_models_is_refused_at_once(tmp_path: Path) -> None:
    """It would end in torch's error, in the middle of a build or with its first batch."""
    unpadded = tiny.bert_tokenizer()
    unpadded.pad_token = None
    with pytest.raises(InvalidModel, match="its tokenizer has no padding token"):
        load(tiny.saved(tmp_path / "unpadded", tiny.bert_model(), unpadded))
    n = len(tiny.BERT)
    with pytest.raises(InvalidModel, match=rf"its tokenizer has ids up to {n}, and the model knows those below {n}"):
        load(tiny.saved(tmp_path / "wide", tiny.bert_model(), tiny.bert_tokenizer([*tiny.BERT, "more"])))


def test_an_added_token_that_the_model_does_not_know_is_refused_unless_it_is_special(tmp_path: Path) -> None:
    """A caller's text has it, and would fail all that are computed with it. Special ones, such as a mask that the
    vocabulary lacked, no text needs: there they are characters like others."""
    ordinary, masked, padded = (tiny.bert_tokenizer() for _ in range(3))
    ordinary.add_tokens(["phone"])
    masked.add_special_tokens({"mask_token": "<mask>"})
    padded.add_special_tokens({"pad_token": "<pad>"})
    n = len(tiny.BERT)
    for name, tokenizer in ("ordinary", ordinary), ("padded", padded):
        with pytest.raises(InvalidModel, match=rf"its tokenizer has ids up to {n}, and the model knows those below"):
            load(tiny.saved(tmp_path / name, tiny.bert_model(), tokenizer))
    plain, encoder = (
        load(tiny.saved(tmp_path / name, tiny.bert_model(), tokenizer))
        for name, tokenizer in (("plain", tiny.bert_tokenizer()), ("masked", masked))
    )
    questions = ["who was bell", "what is <mask> for"]
    assert encoder.encode_questions(questions).tobytes() == plain.encode_questions(questions).tobytes()
    passages = [Passage(0, "", "<mask>", "a <mask>"), BELL]
    assert encoder.encode_passages(passages).tobytes() == plain.encode_passages(passages).tobytes()


def test_roberta_reads_as_much_as_it_has_positions_behind_the_paddings(tmp_path: Path) -> None:
    config = transformers.RobertaConfig(
        **tiny.SIZES, vocab_size=len(tiny.BERT), max_position_embeddings=42, pad_token_id=1
    )
    encoder = load(tiny.saved(tmp_path, transformers.RobertaModel(config), tiny.bert_tokenizer()))
    assert encoder.pooling.max_tokens == 40
    assert encoder.encode_questions(["who " * 38]).shape == (1, 16)
    with pytest.raises(InvalidRequest, match="question has 41 tokens, and the encoder can read 40"):
        encoder.encode_questions(["who " * 39])


def test_fingerprints_tell_weights_tokenizers_and_pooling_apart(tmp_path: Path) -> None:
    def fingerprint(folder: str, model: object, tokenizer: object, **files: object) -> str:
        return load(tiny.saved(tmp_path / folder, model, tokenizer, **files)).fingerprint

    plain = fingerprint("plain", tiny.bert_model(), tiny.bert_tokenizer())
    assert fingerprint("again", tiny.bert_model(), tiny.bert_tokenizer()) == plain
    altered = tiny.bert_model()
    with torch.no_grad():
        altered.embeddings.word_embeddings.weight[7, 3] += 1e-6
    cased = tiny.bert_tokenizer()
    cased.backend_tokenizer.normalizer = tiny.normalizers.BertNormalizer(lowercase=False)
    others = {
        fingerprint("altered", altered, tiny.bert_tokenizer()),
        fingerprint("cased", tiny.bert_model(), cased),
        fingerprint("shorter", tiny.bert_model(), tiny.bert_tokenizer(), sentence_bert_config={"max_seq_length": 20}),
    }
    assert len(others | {plain}) == 4


@pytest.mark.parametrize("step", ["TextEncoder._embed", "Batches.try_all"])
def test_a_gpu_without_room_for_the_first_question_is_told_in_a_line(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    owner, _, method = step.partition(".")
    monkeypatch.setattr({"TextEncoder": TextEncoder, "Batches": Batches}[owner], method, full)
    with pytest.raises(InvalidModel, match=r"^device 'cpu' cannot be used: CUDA out of memory. Tried .* GiB\.$"):
        TextEncoder.load(EncoderSettings(device="cpu", n_threads=1))
