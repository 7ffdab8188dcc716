"""Callers' own passages get the embeddings that the index would hold of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_encoders as tiny
import transformers

from openbook.config import EncoderSettings, ServedEncoderSettings
from openbook.core.space import Space, check_same_space
from openbook.core.types import Passage
from openbook.errors import InvalidModel, InvalidRequest, SnapshotMismatch
from openbook.models.embedded import EMBEDDED
from openbook.models.encoder import TextEncoder, load_encoder
from openbook.models.pair import TRY_AGAIN_S, EncoderPair
from openbook.models.published import passage_model_of
from openbook.models.saving import save_encoder

BELL = Passage(-1, "", "Telephone", "Bell patented the telephone in 1876")
MOON = Passage(-2, "", "Moon", "the Moon goes around the Earth")


def test_own_passages_are_encoded_as_the_index_was() -> None:
    pair = EncoderPair.load(ServedEncoderSettings())
    builder = TextEncoder.load(EncoderSettings(), role="passage")
    assert pair.space == builder.space
    assert pair.fingerprint != builder.fingerprint, "the embedded query encoder is another one"
    for passage in (BELL, MOON):
        ours, its = pair.encode_passages([passage]), builder.encode_passages([passage])
        assert ours.tobytes() == its.tobytes()
    near, far = pair.encode_passages([BELL, MOON]) @ pair.encode_questions(["who patented the telephone?"])[0]
    assert near > far


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """DPR's question and passage encoder, which do not say that they are a pair."""
    folder = tmp_path_factory.mktemp("towers")
    kinds = {"questions": transformers.DPRQuestionEncoder, "passages": transformers.DPRContextEncoder}
    questions, passages = (
        tiny.saved(folder / name, kind(tiny.DPR), tiny.bert_tokenizer()) for name, kind in kinds.items()
    )
    return questions, passages


def test_an_encoder_of_another_space_is_refused_by_name_every_time(
    towers: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, passages = towers
    pair = EncoderPair.load(ServedEncoderSettings(passage_model=passages))
    load, roles = TextEncoder.load, list[str]()

    def loaded(settings: EncoderSettings, role: str) -> TextEncoder:
        roles.append(role)
        return load(settings, role)

    monkeypatch.setattr(TextEncoder, "load", loaded)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=rf"must name the encoder of .* is {pair.space}, got '{passages}'"):
            pair.encode_passages([BELL])
    assert roles == ["passage"], "what it is, it stays"
    assert np.isfinite(pair.encode_questions(["who?"])).all()


def test_two_encoders_are_a_pair_if_it_is_said(towers: tuple[str, str]) -> None:
    questions, passages = towers
    builder = TextEncoder.load(EncoderSettings(model=passages), role="passage")
    snapshot = Space("this snapshot", builder.space, builder.dimension)
    pair = EncoderPair.load(ServedEncoderSettings(model=questions, passage_model=passages))
    check_same_space(Space("these queries", pair.space, pair.dimension), snapshot)
    assert pair.encode_passages([BELL]).tobytes() == builder.encode_passages([BELL]).tobytes()
    alone = TextEncoder.load(EncoderSettings(model=questions))
    with pytest.raises(SnapshotMismatch, match="passage_model must name the encoder of the passages"):
        check_same_space(Space("these queries", alone.space, alone.dimension), snapshot)


def test_what_was_trained_of_a_pair_says_so_itself(towers: tuple[str, str], tmp_path: Path) -> None:
    questions, passages = towers
    loaded = load_encoder(questions, passage_model=passages)
    save_encoder(tmp_path / "trained", loaded)
    assert load_encoder(str(tmp_path / "trained")).space == load_encoder(passages, "passage").fingerprint


@pytest.mark.parametrize("base", ["DPR", EMBEDDED])
def test_what_is_said_comes_before_what_a_model_says(towers: tuple[str, str], tmp_path: Path, base: str) -> None:
    questions, passages = towers
    began_as = load_encoder(EMBEDDED if base == EMBEDDED else questions)
    save_encoder(tmp_path / "trained", replace(began_as, declared_space="of another"))
    name, space = str(tmp_path / "trained"), load_encoder(passages, "passage").fingerprint
    assert [load_encoder(name, passage_model=given).space for given in ("", passages)] == ["of another", space]


def test_published_pairs_are_known(towers: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    questions, passages = towers
    monkeypatch.setattr("openbook.models.encoder.passage_model_of", lambda name: {questions: passages}.get(name, ""))
    assert load_encoder(questions).space == load_encoder(passages, "passage").fingerprint
    monkeypatch.setattr("openbook.models.encoder.passage_model_of", lambda _: "no/such/model")
    assert load_encoder(questions, passage_model=None).declared_space is None


@pytest.mark.parametrize(
    ("query_encoder", "passage_encoder"),
    [
        ("facebook/dpr-question_encoder-single-nq-base", "facebook/dpr-ctx_encoder-single-nq-base"),
        ("facebook/dpr-question_encoder-multiset-base", "facebook/dpr-ctx_encoder-multiset-base"),
        ("facebook/rag-sequence-nq", "facebook/dpr-ctx_encoder-single-nq-base"),
        ("facebook/rag-token-base", "facebook/dpr-ctx_encoder-single-nq-base"),
        ("sentence-transformers/all-MiniLM-L6-v2", ""),
        ("/models/facebook/dpr-question_encoder-single-nq-base", ""),
    ],
)
def test_names_of_published_pairs(query_encoder: str, passage_encoder: str) -> None:
    assert passage_model_of(query_encoder) == passage_encoder


def test_an_encoder_that_could_not_be_loaded_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = EncoderPair.load(ServedEncoderSettings())
    now, loads = [1000.0], TextEncoder.load
    monkeypatch.setattr("openbook.models.pair.monotonic", lambda: now[0])

    def away(*_: object, **__: object) -> TextEncoder:
        now[0] += 1
        raise InvalidModel("the hub does not answer")

    monkeypatch.setattr(TextEncoder, "load", away)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="the hub does not answer"):
            pair.encode_passages([BELL])
    assert now == [1001.0], "it was asked once"
    monkeypatch.setattr(TextEncoder, "load", loads)
    with pytest.raises(InvalidRequest):
        pair.encode_passages([BELL])
    now[0] += TRY_AGAIN_S
    assert pair.encode_passages([BELL]).shape == (1, pair.dimension)
